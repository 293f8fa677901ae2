/* Eigendecompositions and QR by cuSOLVER. A single matrix is decomposed by divide and conquer, several by the batched
 * routine where the library has one, else one after the other. QR runs one matrix after the other, since the library
 * has no batches of whole matrices for it. */
#include <dlfcn.h>

#include "device/cuda/cuda.h"
#include "device/cuda/cusolver.h"
#include "device/cuda/vendor_library.h"

struct dc__cuda_cusolver {
  dc__cusolver api;
  dc__cusolver_handle handle;
  dc__cusolver_params params;
  pthread_mutex_t mutex; /* for the handle's stream and the calls that use it */
  bool has_batched;
};

/* Bytes of a call's workspaces on the device and on the host. */
typedef struct workspace_size {
  size_t device, host;
} workspace_size;

/* ---- opening ---- */

static dc_status cusolver_error(const char *name, const char *call, int error) {
  return dc__fail(error == DC__CUSOLVER_ALLOC_FAILED ? DC_E_NO_MEMORY : DC_E_DEVICE,
                  "device \"%s\": %s: cuSOLVER's status %d", name, call, error);
}

static dc_status cusolver_load(dc__cuda_device *device, struct dc__cuda_cusolver *cusolver) {
  static const dc__vendor_library versions[] = {{"libcusolver.so.12", "nvidia/cu13/lib", 13000},
                                                {"libcusolver.so.11", "nvidia/cusolver/lib", DC__CU_OLDEST_DRIVER}};
  dc__cusolver *api = &cusolver->api;
  void *library;
  DC__TRY(dc__cuda_vendor_library(device, versions, DC__COUNT(versions), "eigendecompositions need cuSOLVER",
                                  "nvidia-cusolver", &library));
  const char *missing = NULL;
  const char *no_batches = NULL;
  int version = 0;
#define X(name, arguments) DC__DLSYM(library, api, name, missing)
  DC__CUSOLVER_FUNCTIONS(X)
#undef X
#define X(name, arguments) DC__DLSYM(library, api, name, no_batches)
  DC__CUSOLVER_BATCH_FUNCTIONS(X)
#undef X
  dlclose(library);
  if (missing == NULL && (api->cusolverGetVersion(&version) != 0 || version < DC__CUSOLVER_OLDEST)) {
    missing = "version";
  }
  cusolver->has_batched = no_batches == NULL && version >= DC__CUSOLVER_OLDEST_BATCHED;
  return missing == NULL
             ? DC_OK
             : dc__fail(DC_E_UNSUPPORTED, "CUDA: cuSOLVER is too old (%s); that of CUDA 12.0 is needed", missing);
}

static void cusolver_close(struct dc__cuda_cusolver *cusolver) {
  if (cusolver->params != NULL) {
    (void)cusolver->api.cusolverDnDestroyParams(cusolver->params);
  }
  if (cusolver->handle != NULL) {
    (void)cusolver->api.cusolverDnDestroy(cusolver->handle);
  }
  pthread_mutex_destroy(&cusolver->mutex);
  dc__free(cusolver);
}

static dc_status cusolver_open_handle(dc__cuda_device *device, struct dc__cuda_cusolver *cusolver) {
  const char *call = "cusolverDnCreate";
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  int error = cusolver->api.cusolverDnCreate(&cusolver->handle);
  if (error == 0) {
    call = "cusolverDnCreateParams";
    error = cusolver->api.cusolverDnCreateParams(&cusolver->params);
  }
  dc__cuda_context_leave(entry);
  return error == 0 ? DC_OK : cusolver_error(device->head.name, call, error);
}

/* Opens the library at its first use. Another thread may do the same meanwhile: the first one's is kept. */
static dc_status cusolver_init(dc__cuda_device *device) {
  if (atomic_load(&device->cusolver) != NULL) {
    return DC_OK;
  }
  struct dc__cuda_cusolver *fresh = dc__calloc(1, sizeof *fresh);
  if (fresh == NULL) {
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_init(&fresh->mutex, NULL);
  dc_status status = cusolver_load(device, fresh);
  status = status != DC_OK ? status : cusolver_open_handle(device, fresh);
  struct dc__cuda_cusolver *none = NULL;
  if (status != DC_OK || !atomic_compare_exchange_strong(&device->cusolver, &none, fresh)) {
    cusolver_close(fresh);
  }
  return status;
}

/* Called with the device entered. */
void dc__cuda_cusolver_close(dc__cuda_device *device) {
  if (device->cusolver != NULL) {
    cusolver_close(device->cusolver);
  }
}

/* ---- decompositions ---- */

static int cusolver_type_of(const dc__eigh *e) {
  return e->dtype == DC_FLOAT64 ? DC__CUSOLVER_R_64F : DC__CUSOLVER_R_32F;
}

static bool in_batches(const struct dc__cuda_cusolver *s, const dc__eigh *e, int64_t count) {
  return s->has_batched && (count > 1 || e->batch_invariant);
}

/* Sets *bytes to the workspace for `count` matrices; a may be NULL, as the size does not depend on it. Called with the
 * mutex held and the device entered. Returns the library's status. */
static int eigh_workspace_of(const struct dc__cuda_cusolver *s, const dc__eigh *e, int64_t count,
                             workspace_size *bytes) {
  const int type = cusolver_type_of(e);
  return in_batches(s, e, count)
             ? s->api.cusolverDnXsyevBatched_bufferSize(s->handle, s->params, e->vectors, DC__CUSOLVER_LOWER, e->n,
                                                        type, e->a, e->n, type, e->values, type, &bytes->device,
                                                        &bytes->host, count)
             : s->api.cusolverDnXsyevd_bufferSize(s->handle, s->params, e->vectors, DC__CUSOLVER_LOWER, e->n, type,
                                                  e->a, e->n, type, e->values, type, &bytes->device, &bytes->host);
}

static int eigh_call(const struct dc__cuda_cusolver *s, const dc__eigh *e, int64_t count, const workspace_size *bytes) {
  const int type = cusolver_type_of(e);
  return in_batches(s, e, count)
             ? s->api.cusolverDnXsyevBatched(s->handle, s->params, e->vectors, DC__CUSOLVER_LOWER, e->n, type, e->a,
                                             e->n, type, e->values, type, e->workspace, bytes->device, e->host,
                                             bytes->host, e->info, count)
             : s->api.cusolverDnXsyevd(s->handle, s->params, e->vectors, DC__CUSOLVER_LOWER, e->n, type, e->a, e->n,
                                       type, e->values, type, e->workspace, bytes->device, e->host, bytes->host,
                                       e->info);
}

/* Decomposes the next *count matrices, as many as the workspace has room for. That is queried for each count, since the
 * library does not say that a smaller batch needs less. Returns the library's status. */
static int eigh_next_batch(dc__cuda_stream *stream, const struct dc__cuda_cusolver *s, const dc__eigh *e,
                           size_t *host_bytes, int64_t *count) {
  workspace_size bytes;
  int error;
  *count = s->has_batched ? e->count : 1;
  for (;; *count /= 2) {
    error = eigh_workspace_of(s, e, *count, &bytes);
    if (error != 0 || *count == 1 || (bytes.device <= e->workspace_bytes && bytes.host <= e->host_bytes)) {
      break;
    }
  }
  if (*host_bytes > 0) { /* the call before may use the host's workspace until the stream has run it */
    (void)DC__CUDA_KEEP((dc__cuda_device *)stream->head.device, cuStreamSynchronize, stream->native);
  }
  *host_bytes = bytes.host;
  return error != 0 ? error : eigh_call(s, e, *count, &bytes);
}

dc_status dc__cuda_eigh_workspace_size(dc_device *device, dc__eigh *e) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  DC__TRY(cusolver_init(self));
  struct dc__cuda_cusolver *s = self->cusolver;
  workspace_size one = {0}, all = {0};
  int error = 0;
  if (e->n > 0 && e->count > 0) {
    dc__cuda_context_guard entry = dc__cuda_context_enter(self);
    pthread_mutex_lock(&s->mutex);
    error = eigh_workspace_of(s, e, 1, &one);
    error = error != 0 || !s->has_batched ? error : eigh_workspace_of(s, e, e->count, &all);
    pthread_mutex_unlock(&s->mutex);
    dc__cuda_context_leave(entry);
  }
  e->workspace_bytes = one.device > all.device ? one.device : all.device;
  e->host_bytes = one.host > all.host ? one.host : all.host;
  return error == 0 ? DC_OK : cusolver_error(device->name, "cusolverDnXsyevd_bufferSize", error);
}

static void issue_eigh(dc__cuda_stream *stream, void *args) {
  dc__eigh e = *(const dc__eigh *)args;
  const dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  struct dc__cuda_cusolver *s = device->cusolver;
  const int64_t size = e.dtype == DC_FLOAT64 ? 8 : 4;
  size_t host_bytes = 0; /* host workspace of the call before; 0 if it has none */
  pthread_mutex_lock(&s->mutex);
  int error = s->api.cusolverDnSetStream(s->handle, stream->native);
  while (error == 0 && e.count > 0) {
    int64_t count = 0;
    error = eigh_next_batch(stream, s, &e, &host_bytes, &count);
    e.a = (char *)e.a + count * e.n * e.n * size;
    e.values = (char *)e.values + count * e.n * size;
    e.info += count;
    e.count -= count;
  }
  pthread_mutex_unlock(&s->mutex);
  if (error != 0) {
    dc__failure_keep(e.failure, cusolver_error(device->head.name, "cusolverDnXsyevd", error));
  }
}

dc_status dc__cuda_stream_eigh(dc_stream *stream, const dc__eigh *eigen) {
  return dc__cuda_submit((dc__cuda_stream *)stream, issue_eigh, eigen, sizeof *eigen, false);
}

/* ---- QR ---- */

dc_status dc__cuda_qr_workspace_size(dc_device *device, dc__qr *qr) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  const int n = (int)qr->n;
  int sizes[2] = {0};
  if (qr->n > INT32_MAX) {
    return dc__fail(DC_E_UNSUPPORTED, "device \"%s\": cuSOLVER's QR has 32-bit integers", device->name);
  }
  DC__TRY(cusolver_init(self));
  struct dc__cuda_cusolver *s = self->cusolver;
  dc__cuda_context_guard entry = dc__cuda_context_enter(self);
  pthread_mutex_lock(&s->mutex);
  int error = s->api.cusolverDnSgeqrf_bufferSize(s->handle, n, n, qr->a, n, &sizes[0]);
  error = error != 0 ? error : s->api.cusolverDnSorgqr_bufferSize(s->handle, n, n, n, qr->a, n, qr->tau, &sizes[1]);
  pthread_mutex_unlock(&s->mutex);
  dc__cuda_context_leave(entry);
  qr->workspace_bytes = (size_t)(sizes[0] > sizes[1] ? sizes[0] : sizes[1]) * sizeof(float);
  return error == 0 ? DC_OK : cusolver_error(device->name, "cusolverDnSgeqrf_bufferSize", error);
}

/* A matrix that the library refuses keeps its initial info, which says that it is not done. */
static void issue_qr(dc__cuda_stream *stream, void *args) {
  const dc__qr *qr = args;
  struct dc__cuda_cusolver *s = ((dc__cuda_device *)stream->head.device)->cusolver;
  const int n = (int)qr->n, size = (int)(qr->workspace_bytes / sizeof(float));
  pthread_mutex_lock(&s->mutex);
  const bool begun = s->api.cusolverDnSetStream(s->handle, stream->native) == 0;
  for (int64_t i = 0; i < qr->count && begun; i++) {
    float *a = qr->a + i * qr->n * qr->n;
    int32_t *info = qr->info + 2 * i;
    if (s->api.cusolverDnSgeqrf(s->handle, n, n, a, n, qr->tau, qr->workspace, size, &info[0]) == 0) {
      (void)s->api.cusolverDnSorgqr(s->handle, n, n, n, a, n, qr->tau, qr->workspace, size, &info[1]);
    }
  }
  pthread_mutex_unlock(&s->mutex);
}

dc_status dc__cuda_stream_qr(dc_stream *stream, const dc__qr *qr) {
  return dc__cuda_submit((dc__cuda_stream *)stream, issue_qr, qr, sizeof *qr, false);
}
