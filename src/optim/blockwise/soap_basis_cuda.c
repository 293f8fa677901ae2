/* SOAP's eigenvectors on a device. The device runs orthogonal iteration, and writes success and column order to its
 * own memory. The host reads them at its next sync. First bases come from the host's LAPACK, and all of them if the
 * device has no QR. A step's matrices go to the host together to share its threads. */
#include "optim/blockwise/blockwise.h"

static size_t request_bytes(const dc__spectral_request *r) {
  return (size_t)(r->a.rows * r->a.rows) * sizeof(float);
}
static size_t order_bytes_of(const dc__spectral_request *r) {
  return (size_t)r->a.rows * sizeof(int64_t);
}

/* ---- memory ---- */

/* A step's matrices, in device tables: pointers to each, its vectors and their order. */
enum { TABLE_A, TABLE_BASIS, TABLE_ORDER, TABLES };

void dc__soap_basis_destroy(dc__soap_basis *b) {
  if (b->host != NULL) {
    dc__linalg_destroy(b->host);
  }
  if (b->device_memory != NULL) {
    b->device->ops->free(b->device, b->device_memory, b->device_bytes, DC_MEMORY_DEVICE);
  }
  dc__free(b->requests);
  dc__free(b->pending);
  dc__free(b->tables);
  dc__free(b->host_failed);
  dc__free(b->memory);
  *b = (dc__soap_basis){.host = NULL};
}

static dc_status soap_basis_alloc_device(dc__soap_basis *b, const dc_linalg *l, int64_t sides, int64_t rows) {
  const size_t orders = (size_t)rows * sizeof(int64_t), tables = TABLES * (size_t)sides * sizeof(void *);
  const size_t bytes = orders + tables + (size_t)sides * sizeof(int32_t) + 1;
  b->device = l->device;
  DC__TRY(l->device->ops->alloc(l->device, bytes, DC_MEMORY_DEVICE, &b->device_memory));
  b->device_bytes = bytes;
  b->orders = b->device_memory;
  b->pointers = (void **)(void *)((char *)b->device_memory + orders);
  b->failed = (int32_t *)(void *)((char *)b->device_memory + orders + tables);
  dc__stream_zero(l->device->internal_stream, b->device_memory,
                  bytes); /* orders are valid indices even after a failure */
  dc__device_sync_internal(l->device, NULL);
  return dc__device_check(l->device);
}

dc_status dc__soap_basis_create(dc__soap_basis *b, const dc_linalg *l, int64_t sides, int64_t rows) {
  const size_t count = (size_t)sides + 1;
  b->sides = sides;
  b->requests = dc__calloc(count, sizeof *b->requests);
  b->pending = dc__calloc(count, sizeof *b->pending);
  b->tables = dc__calloc(TABLES * count, sizeof *b->tables);
  b->host_failed = dc__calloc(count, sizeof *b->host_failed);
  return b->requests == NULL || b->pending == NULL || b->tables == NULL || b->host_failed == NULL
             ? DC_E_NO_MEMORY
             : soap_basis_alloc_device(b, l, sides, rows);
}

static dc_status create_host_linalg(const dc_linalg *l, dc_linalg **host) {
  dc_device *cpu;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  options.threads = dc__threadpool_threads(l->pool);
  options.plain = l->blas == NULL ? 1 : 0;
  DC__TRY(dc__cpu_device_open(NULL, &cpu));
  dc_status status = dc__linalg_create(cpu, &options, host);
  dc__device_release(cpu);
  return status;
}

/* Reserves host scratch memory for any of the requests. */
static dc_status reserve_host(dc__soap_basis *b, const char *fn, const dc__spectral_request *requests, int64_t count) {
  void *memory;
  b->host->query = true;
  dc_status status = dc__spectral_run_grouped(b->host, requests, count);
  b->host->query = false;
  return status == DC_OK ? dc__linalg_scratch(b->host, fn, b->host->query_bytes, &memory) : status;
}

/* ---- on the device ---- */

/* Queues `count` adjacent requests of one size. */
static dc_status enqueue_batch(const dc__soap_basis *b, dc_linalg *l, const dc__spectral_request *requests,
                               int64_t first, int64_t count) {
  void **pointers = b->pointers + first;
  dc__orthogonal_iteration_batch steps = {.fn = requests[0].fn, .a = requests[0].a, .basis = requests[0].out};
  steps.a.batch = steps.basis.batch = count;
  steps.a.pointers = pointers + TABLE_A * b->sides;
  steps.basis.pointers = pointers + TABLE_BASIS * b->sides;
  steps.orders = (int64_t *const *)(void *)(pointers + TABLE_ORDER * b->sides);
  steps.failed = b->failed + first;
  return dc__orthogonal_iteration_cuda(l, &steps);
}

static dc_status enqueue_all(const dc__soap_basis *b, dc_linalg *l, const dc__spectral_request *requests,
                             int64_t count) {
  for (int64_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && requests[end].a.rows == requests[first].a.rows; end++) {
    }
    DC__TRY(enqueue_batch(b, l, requests + first, first, end - first));
  }
  return DC_OK;
}

static dc_status enqueue_pending(dc__soap_basis *b, dc_linalg *l) {
  for (int64_t i = 0; i < b->pending_count; i++) {
    b->tables[TABLE_A * b->sides + i] = b->pending[i].a.data;
    b->tables[TABLE_BASIS * b->sides + i] = b->pending[i].out.data;
    b->tables[TABLE_ORDER * b->sides + i] = b->pending[i].order;
  }
  dc__stream_copy(l->device->internal_stream, b->pointers, b->tables, TABLES * (size_t)b->sides * sizeof *b->tables);
  return enqueue_all(b, l, b->pending, b->pending_count);
}

void dc__soap_basis_copy_status(const dc__soap_basis *b) {
  if (b->pending_count > 0) {
    dc__stream_copy(b->device->internal_stream, b->host_failed, b->failed,
                    (size_t)b->pending_count * sizeof *b->host_failed);
  }
}

void dc__soap_basis_read_status(dc__soap_basis *b) {
  for (int64_t i = 0; i < b->pending_count; i++) {
    dc_spectral_info *info = b->pending[i].info;
    const bool good = b->host_failed[i] == 0;
    *info = (dc_spectral_info){.status = good ? DC_OK : DC_E_NOT_CONVERGED, .path = good ? DC_PATH_WARM : DC_PATH_NONE};
  }
  b->pending_count = 0;
}

/* ---- on the host ---- */

static bool runs_on_device(const dc__soap_basis *b, const dc__spectral_request *r) {
  return b->has_device_qr && r->op == DC__SPECTRAL_ORTHOGONAL_ITERATION;
}

/* Copies matrices and earlier bases to the host. Returns their number. */
static int64_t copy_to_host(dc__soap_basis *b, dc_stream *stream, const dc__spectral_request *requests, int64_t count) {
  char *at = b->memory;
  int64_t host_count = 0;
  for (int64_t i = 0; i < count; i++) {
    if (runs_on_device(b, &requests[i])) {
      continue;
    }
    const size_t bytes = request_bytes(&requests[i]);
    dc__spectral_request *r = &b->requests[host_count++];
    *r = requests[i];
    r->order = (int64_t *)(void *)at;
    r->a.data = at += order_bytes_of(r);
    r->out.data = at += bytes;
    at += bytes;
    dc__stream_copy(stream, r->a.data, requests[i].a.data, bytes);
    if (r->basis.data != NULL) {
      r->basis.data = r->out.data;
      dc__stream_copy(stream, r->out.data, requests[i].out.data, bytes);
    }
  }
  return host_count;
}

/* Copies successful results back. Otherwise vectors and their order stay as they were. */
static void copy_to_device(const dc__soap_basis *b, dc_stream *stream, const dc__spectral_request *requests,
                           int64_t count) {
  int64_t host_count = 0;
  for (int64_t i = 0; i < count; i++) {
    if (runs_on_device(b, &requests[i])) {
      continue;
    }
    const dc__spectral_request *r = &b->requests[host_count++];
    const bool good = ((const dc_spectral_info *)r->info)->status == DC_OK;
    if (good) {
      dc__stream_copy(stream, requests[i].out.data, r->out.data, request_bytes(r));
    }
    for (int64_t k = 0; k < r->a.rows && !good; k++) {
      r->order[k] = k;
    }
    if (requests[i].order != NULL) {
      dc__stream_copy(stream, requests[i].order, r->order, order_bytes_of(r));
    }
  }
}

/* ---- all ---- */

dc_status dc__soap_basis_reserve(dc__soap_basis *b, dc_linalg *l, const char *fn, const dc__spectral_request *requests,
                                 int64_t count) {
  b->bytes = 0;
  for (int64_t i = 0; i < count; i++) {
    b->bytes += order_bytes_of(&requests[i]) + 2 * request_bytes(&requests[i]); /* a multiple of 8 */
  }
  b->memory = dc__calloc(1, b->bytes + 1);
  DC__TRY(b->memory == NULL ? DC_E_NO_MEMORY : create_host_linalg(l, &b->host));
  DC__TRY(reserve_host(b, fn, requests, count));
  const dc_status status = enqueue_all(b, l, requests, count);
  b->has_device_qr = status == DC_OK;
  return status == DC_E_UNSUPPORTED ? DC_OK : status;
}

dc_status dc__soap_basis_refresh(dc__soap_basis *b, dc_linalg *l, const dc__spectral_request *requests, int64_t count) {
  b->pending_count = 0;
  for (int64_t i = 0; i < count; i++) {
    if (runs_on_device(b, &requests[i])) {
      b->pending[b->pending_count++] = requests[i];
    }
  }
  if (b->pending_count > 0) {
    DC__TRY(enqueue_pending(b, l));
  }
  const int64_t host_count = copy_to_host(b, l->device->internal_stream, requests, count);
  if (host_count == 0) {
    return DC_OK;
  }
  DC__TRY(dc__linalg_synchronize(l));
  DC__TRY(dc__spectral_run_grouped(b->host, b->requests, host_count));
  copy_to_device(b, l->device->internal_stream, requests, count);
  return DC_OK;
}
