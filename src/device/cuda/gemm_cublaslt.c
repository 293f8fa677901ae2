/* Matrix products by cuBLASLt. The best algorithm for a shape is cached with its descriptors, so a repeated step
 * neither searches nor allocates. Partial sums of split products are added in the compute type, in a fixed order. */
#include <dlfcn.h>
#include <string.h>

#include "device/cuda/cuda.h"
#include "device/cuda/vendor_library.h"

enum { SETS = 64, WAYS = 8 }; /* of the table of plans: a full set's least recently used plan is replaced */

/* The key: everything an algorithm depends on. */
typedef struct matmul_shape {
  int32_t dtype, out_dtype, trans_a, trans_b, epilogue, alignment;
  int64_t m, n, k, lda, ldb, ldd;
  int64_t batch, stride_a, stride_b, stride_d; /* strides are 0 without a batch */
  int64_t heuristic_batch;                     /* 0, or the batch for which the algorithm is searched */
  size_t workspace;
} matmul_shape;

typedef struct matmul_plan {
  matmul_shape shape;
  uint64_t used;  /* clock at its last use; 0 if free */
  bool supported; /* false if the library has no algorithm */
  dc__lt_desc desc;
  dc__lt_layout a, b, d;
  dc__lt_algo algo;
} matmul_plan;

struct dc__cuda_cublaslt {
  dc__lt lt;
  dc__lt_handle handle;
  pthread_mutex_t mutex; /* protects all below */
  uint64_t clock;
  matmul_plan plans[SETS][WAYS];
};

/* ---- opening ---- */

static dc_status cublaslt_error(const char *name, const char *call, int error) {
  return dc__fail(error == DC__LT_ALLOC_FAILED ? DC_E_NO_MEMORY : DC_E_DEVICE,
                  "device \"%s\": %s: cuBLASLt's status %d", name, call, error);
}

static dc_status cublaslt_load(dc__cuda_device *device, dc__lt *lt) {
  static const dc__vendor_library versions[] = {{"libcublasLt.so.13", "nvidia/cu13/lib", 13000},
                                                {"libcublasLt.so.12", "nvidia/cublas/lib", DC__CU_OLDEST_DRIVER}};
  void *library;
  DC__TRY(dc__cuda_vendor_library(device, versions, DC__COUNT(versions), "matrix products need cuBLASLt",
                                  "nvidia-cublas", &library));
  const char *missing = NULL;
#define X(name, arguments) DC__DLSYM(library, lt, name, missing)
  DC__LT_FUNCTIONS(X)
#undef X
  dlclose(library);
  int major = 0;
  if (missing == NULL && (lt->cublasLtGetProperty(DC__LT_MAJOR_VERSION, &major) != 0 || major < DC__LT_OLDEST)) {
    missing = "version";
  }
  return missing == NULL ? DC_OK
                         : dc__fail(DC_E_UNSUPPORTED, "CUDA: cuBLASLt is too old (%s); that of CUDA %d.0 is needed",
                                    missing, DC__LT_OLDEST);
}

static void matmul_plan_destroy(const dc__lt *lt, matmul_plan *p) {
  if (p->a != NULL) {
    (void)lt->cublasLtMatrixLayoutDestroy(p->a);
  }
  if (p->b != NULL) {
    (void)lt->cublasLtMatrixLayoutDestroy(p->b);
  }
  if (p->d != NULL) {
    (void)lt->cublasLtMatrixLayoutDestroy(p->d);
  }
  if (p->desc != NULL) {
    (void)lt->cublasLtMatmulDescDestroy(p->desc);
  }
  memset(p, 0, sizeof *p);
}

static void cublaslt_close(struct dc__cuda_cublaslt *cublaslt) {
  for (int32_t i = 0; i < SETS * WAYS; i++) {
    matmul_plan_destroy(&cublaslt->lt, &cublaslt->plans[i / WAYS][i % WAYS]);
  }
  if (cublaslt->handle != NULL) {
    (void)cublaslt->lt.cublasLtDestroy(cublaslt->handle);
  }
  pthread_mutex_destroy(&cublaslt->mutex);
  dc__free(cublaslt);
}

/* Opens the library at its first use. Another thread may do the same meanwhile: the first one's is kept. */
dc_status dc__cuda_matmul_init(dc_device *device) {
  dc__cuda_device *self = (dc__cuda_device *)device;
  if (atomic_load(&self->cublaslt) != NULL) {
    return DC_OK;
  }
  struct dc__cuda_cublaslt *fresh = dc__calloc(1, sizeof *fresh);
  if (fresh == NULL) {
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_init(&fresh->mutex, NULL);
  dc_status status = cublaslt_load(self, &fresh->lt);
  if (status == DC_OK) {
    dc__cuda_context_guard entry = dc__cuda_context_enter(self);
    int refused = fresh->lt.cublasLtCreate(&fresh->handle);
    dc__cuda_context_leave(entry);
    status = refused == 0 ? DC_OK : cublaslt_error(device->name, "cublasLtCreate", refused);
  }
  struct dc__cuda_cublaslt *none = NULL;
  if (status != DC_OK || !atomic_compare_exchange_strong(&self->cublaslt, &none, fresh)) {
    cublaslt_close(fresh);
  }
  return status;
}

/* Called with the device entered. */
void dc__cuda_cublaslt_close(dc__cuda_device *device) {
  if (device->cublaslt != NULL) {
    cublaslt_close(device->cublaslt);
  }
}

/* ---- plans ---- */

static int cublaslt_type_of(int32_t dtype) {
  return dtype == DC_FLOAT64    ? DC__LT_R_64F
         : dtype == DC_FLOAT16  ? DC__LT_R_16F
         : dtype == DC_BFLOAT16 ? DC__LT_R_16BF
                                : DC__LT_R_32F;
}

/* Returns the alignment of all operands, in bytes, but at most 16. Algorithms ask for no more, and larger values would
 * let the choice depend on the offset within a tensor. */
static int32_t alignment_of(const dc__matmul *product) {
  uintptr_t all =
      (uintptr_t)product->a | (uintptr_t)product->b | (uintptr_t)product->d | (uintptr_t)product->epilogue_ptr | 16;
  return (int32_t)(all & (0 - all));
}

static matmul_shape matmul_shape_of(const dc__matmul *p) {
  matmul_shape s;
  memset(&s, 0, sizeof s); /* shapes are compared bytewise */
  s.dtype = p->dtype;
  s.out_dtype = p->out_dtype;
  s.trans_a = p->trans_a;
  s.trans_b = p->trans_b;
  s.epilogue = p->epilogue;
  s.alignment = alignment_of(p);
  s.m = p->m;
  s.n = p->n;
  s.k = p->k;
  s.lda = p->lda;
  s.ldb = p->ldb;
  s.ldd = p->ldd;
  s.batch = p->batch > 1 ? p->batch : 1;
  s.heuristic_batch = p->heuristic_batch;
  if (s.batch > 1 || s.heuristic_batch > 1) {
    s.stride_a = p->stride_a;
    s.stride_b = p->stride_b;
    s.stride_d = p->stride_d;
  }
  s.workspace = p->workspace_bytes;
  return s;
}

/* The epilogue's pointer is part of the descriptor, but changes with each product. Returns the library's status. */
static int set_epilogue_ptr(const dc__lt *lt, const matmul_plan *p, const dc__matmul *product) {
  if (product->epilogue == DC__MATMUL_NONE) {
    return 0;
  }
  const int attribute = product->epilogue == DC__MATMUL_DGELU ? DC__LT_DESC_AUX : DC__LT_DESC_BIAS;
  return lt->cublasLtMatmulDescSetAttribute(p->desc, attribute, &product->epilogue_ptr, sizeof product->epilogue_ptr);
}

/* Creates the layout of a matrix, or of a batch. Returns the library's status. */
static int cublaslt_create_layout(const dc__lt *lt, dc__lt_layout *layout, int type, int64_t rows, int64_t columns,
                                  int64_t ld, int64_t batch, int64_t stride) {
  const int32_t count = (int32_t)batch;
  int error = lt->cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)columns, ld);
  if (error == 0 && batch > 1) {
    error = lt->cublasLtMatrixLayoutSetAttribute(*layout, DC__LT_LAYOUT_BATCH, &count, sizeof count);
    error = error != 0 ? error
                       : lt->cublasLtMatrixLayoutSetAttribute(*layout, DC__LT_LAYOUT_STRIDE, &stride, sizeof stride);
  }
  return error;
}

/* Creates a plan's descriptors. Returns the library's status. */
static int cublaslt_describe(const dc__lt *lt, matmul_plan *p, const dc__matmul *product) {
  static const int epilogues[] = {DC__LT_EPILOGUE_NONE, DC__LT_EPILOGUE_BIAS, DC__LT_EPILOGUE_DGELU,
                                  DC__LT_EPILOGUE_BGRADB};
  const matmul_shape *shape = &p->shape;
  const bool wide = shape->dtype == DC_FLOAT64;
  const int type = cublaslt_type_of(shape->dtype);
  const int transposed[] = {shape->trans_a, shape->trans_b};
  int error = lt->cublasLtMatmulDescCreate(&p->desc, wide ? DC__LT_COMPUTE_64F : DC__LT_COMPUTE_32F,
                                           wide ? DC__LT_R_64F : DC__LT_R_32F);
#define NEXT(call) error = error != 0 ? error : lt->call
#define SET(attribute, value) NEXT(cublasLtMatmulDescSetAttribute)(p->desc, attribute, &(value), sizeof(value))
  SET(DC__LT_DESC_TRANSA, transposed[0]);
  SET(DC__LT_DESC_TRANSB, transposed[1]);
  SET(DC__LT_DESC_EPILOGUE, epilogues[shape->epilogue]);
  if (shape->epilogue == DC__MATMUL_DGELU) {
    SET(DC__LT_DESC_AUX_LD, shape->ldd);
  }
#undef SET
  error = error != 0 ? error : set_epilogue_ptr(lt, p, product);
  const int64_t a[] = {shape->trans_a ? shape->k : shape->m, shape->trans_a ? shape->m : shape->k};
  const int64_t b[] = {shape->trans_b ? shape->n : shape->k, shape->trans_b ? shape->k : shape->n};
  const int64_t batch = shape->heuristic_batch > 0 ? shape->heuristic_batch : shape->batch;
  error = error != 0 ? error : cublaslt_create_layout(lt, &p->a, type, a[0], a[1], shape->lda, batch, shape->stride_a);
  error = error != 0 ? error : cublaslt_create_layout(lt, &p->b, type, b[0], b[1], shape->ldb, batch, shape->stride_b);
  return error != 0 ? error
                    : cublaslt_create_layout(lt, &p->d, cublaslt_type_of(shape->out_dtype), shape->m, shape->n,
                                             shape->ldd, batch, shape->stride_d);
}

/* Sets the real batch, after the search for heuristic_batch. Returns the library's status. */
static int set_batch(const dc__lt *lt, const matmul_plan *p) {
  const dc__lt_layout layouts[] = {p->a, p->b, p->d};
  const int32_t count = (int32_t)p->shape.batch;
  int error = 0;
  for (size_t i = 0; i < DC__COUNT(layouts) && error == 0 && p->shape.heuristic_batch > 0; i++) {
    error = lt->cublasLtMatrixLayoutSetAttribute(layouts[i], DC__LT_LAYOUT_BATCH, &count, sizeof count);
  }
  return error;
}

/* Searches for the best algorithm, and sets p->supported if there is one. The library may report a missing epilogue as
 * unsupported or invalid. Returns the library's status. */
static int cublaslt_search(const struct dc__cuda_cublaslt *cublaslt, matmul_plan *p) {
  const dc__lt *lt = &cublaslt->lt;
  const uint64_t workspace = p->shape.workspace;
  const uint32_t alignment = (uint32_t)p->shape.alignment, reduction = DC__LT_REDUCTION_COMPUTE_TYPE;
  const bool has_epilogue = p->shape.epilogue != DC__MATMUL_NONE;
  dc__lt_preference preference = NULL;
  dc__lt_found found = {.state = DC__LT_NOT_SUPPORTED};
  int count = 0;
  int error = lt->cublasLtMatmulPreferenceCreate(&preference);
#define SET(attribute, value) NEXT(cublasLtMatmulPreferenceSetAttribute)(preference, attribute, &(value), sizeof(value))
  SET(DC__LT_PREFER_WORKSPACE, workspace);
  SET(DC__LT_PREFER_REDUCTION, reduction);
  for (int i = 0; i < 4; i++) {
    SET(DC__LT_PREFER_ALIGN_A + i, alignment);
  }
#undef SET
#undef NEXT
  if (error == 0) {
    error = lt->cublasLtMatmulAlgoGetHeuristic(cublaslt->handle, p->desc, p->a, p->b, p->d, p->d, preference, 1, &found,
                                               &count);
    p->supported = error == 0 && count > 0 && found.state == 0;
    p->algo = found.algo;
    error = error == DC__LT_NOT_SUPPORTED || (error == DC__LT_INVALID_VALUE && has_epilogue) ? 0 : error;
  }
  if (preference != NULL) {
    (void)lt->cublasLtMatmulPreferenceDestroy(preference);
  }
  return error;
}

/* The library may refuse the algorithm found for heuristic_batch for the real batch. If so, takes the best one for the
 * real batch. Returns the library's status. */
static int cublaslt_fit_batch(const struct dc__cuda_cublaslt *cublaslt, matmul_plan *p) {
  int error = set_batch(&cublaslt->lt, p);
  if (error != 0 || !p->supported || p->shape.heuristic_batch == 0 || p->shape.heuristic_batch == p->shape.batch) {
    return error;
  }
  dc__lt_found found = {.state = DC__LT_NOT_SUPPORTED};
  error = cublaslt->lt.cublasLtMatmulAlgoCheck(cublaslt->handle, p->desc, p->a, p->b, p->d, p->d, &p->algo, &found);
  const bool refused = error == DC__LT_NOT_SUPPORTED || error == DC__LT_INVALID_VALUE ||
                       (error == 0 && (found.state != 0 || found.workspace > p->shape.workspace));
  return refused ? cublaslt_search(cublaslt, p) : error;
}

/* Finds a product's plan, or makes it. Called with the mutex held and the device entered. Returns the library's
 * status. */
static int cublaslt_find_plan(struct dc__cuda_cublaslt *cublaslt, const dc__matmul *product, matmul_plan **found) {
  const matmul_shape shape = matmul_shape_of(product);
  uint64_t hash = UINT64_C(1469598103934665603);
  for (size_t i = 0; i < sizeof shape; i++) {
    hash = (hash ^ ((const unsigned char *)&shape)[i]) * UINT64_C(1099511628211);
  }
  matmul_plan *set = cublaslt->plans[(hash >> 32) % SETS];
  matmul_plan *oldest = set;
  for (int32_t i = 0; i < WAYS; i++) {
    if (set[i].used != 0 && memcmp(&set[i].shape, &shape, sizeof shape) == 0) {
      oldest = &set[i];
      break;
    }
    oldest = set[i].used < oldest->used ? &set[i] : oldest;
  }
  *found = oldest;
  if (oldest->used == 0 || memcmp(&oldest->shape, &shape, sizeof shape) != 0) {
    matmul_plan_destroy(&cublaslt->lt, oldest);
    oldest->shape = shape;
    int error = cublaslt_describe(&cublaslt->lt, oldest, product);
    error = error != 0 ? error : cublaslt_search(cublaslt, oldest);
    error = error != 0 ? error : cublaslt_fit_batch(cublaslt, oldest);
    if (error != 0) {
      matmul_plan_destroy(&cublaslt->lt, oldest);
      return error;
    }
  }
  oldest->used = ++cublaslt->clock;
  return 0;
}

/* ---- products ---- */

static int cublaslt_matmul(struct dc__cuda_cublaslt *cublaslt, const matmul_plan *p, const dc__matmul *product,
                           dc__cu_stream stream) {
  const dc__lt *lt = &cublaslt->lt;
  const float factors[2] = {(float)product->alpha, (float)product->beta};
  const bool wide = product->dtype == DC_FLOAT64;
  const void *alpha = wide ? (const void *)&product->alpha : &factors[0];
  const void *beta = wide ? (const void *)&product->beta : &factors[1];
  int error = set_epilogue_ptr(lt, p, product);
  if (error != 0) {
    return error;
  }
  return lt->cublasLtMatmul(cublaslt->handle, p->desc, alpha, product->a, p->a, product->b, p->b, beta, product->d,
                            p->d, product->d, p->d, &p->algo, product->workspace, product->workspace_bytes, stream);
}

static void cublaslt_keep_error(dc__cuda_device *device, const char *call, int error) {
  dc__cuda_keep_failure(&device->head, cublaslt_error(device->head.name, call, error));
}

/* If the plan has been evicted before the worker issues the product, it is made again. */
static void issue_matmul(dc__cuda_stream *stream, void *args) {
  const dc__matmul *product = args;
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  struct dc__cuda_cublaslt *cublaslt = device->cublaslt;
  matmul_plan *p;
  pthread_mutex_lock(&cublaslt->mutex);
  const char *call = "cublasLtMatmulAlgoGetHeuristic";
  int error = cublaslt_find_plan(cublaslt, product, &p);
  if (error == 0) {
    call = "cublasLtMatmul";
    error = cublaslt_matmul(cublaslt, p, product, stream->native);
  }
  pthread_mutex_unlock(&cublaslt->mutex);
  if (error != 0 && !dc__cuda_is_capture_spoiled(stream)) {
    cublaslt_keep_error(device, call, error);
  }
}

bool dc__cuda_stream_matmul(dc_stream *stream, const dc__matmul *product) {
  dc__cuda_device *device = (dc__cuda_device *)stream->device;
  struct dc__cuda_cublaslt *cublaslt = device->cublaslt;
  matmul_plan *p;
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  pthread_mutex_lock(&cublaslt->mutex);
  int error = cublaslt_find_plan(cublaslt, product, &p);
  const bool supported = error == 0 && p->supported;
  pthread_mutex_unlock(&cublaslt->mutex);
  dc__cuda_context_leave(entry);
  if (error != 0) {
    cublaslt_keep_error(device, "cublasLtMatmulAlgoGetHeuristic", error);
  } else if (supported) {
    dc__cuda_submit_kept((dc__cuda_stream *)stream, issue_matmul, product, sizeof *product);
  } else if (product->epilogue == DC__MATMUL_NONE) {
    cublaslt_keep_error(device, "cublasLtMatmulAlgoGetHeuristic", DC__LT_NOT_SUPPORTED);
  }
  return supported || error != 0 || product->epilogue == DC__MATMUL_NONE;
}
