/* cuBLASLt without a card: it provides what libdc's CUDA device uses of libcublasLt.so.13, on the CPU's matrix products
 * and the simulated driver's streams. It refuses what the library refuses, and can be made to fail as the driver's
 * functions can. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cudasim_internal.h"
#include "device/cuda/cublaslt.h"
#include "kernels/kernels.h"

#define X(name, arguments) CUDASIM_API int name arguments;
DC__LT_FUNCTIONS(X)
#undef X

enum { INVALID = DC__LT_INVALID_VALUE, EXECUTION_FAILED = 13, WORKSPACE_ALIGNMENT = 256, MAX_BATCH = 65535 };
enum { BATCHES = 33, ALIGNMENTS = 17 }; /* bounds for which searches are counted */

static atomic_int searches[BATCHES][ALIGNMENTS];

struct cublasLtContext {
  int device; /* the current device when it was created */
};
struct dc__lt_desc_st {
  int compute, scale, trans[2], epilogue;
  const void *bias, *aux;
  int64_t aux_ld;
};
struct dc__lt_layout_st {
  int type;
  int64_t rows, columns, ld;
  int64_t stride;
  int32_t batch;
};
struct dc__lt_preference_st {
  uint64_t workspace;
  uint32_t reduction, alignment[4];
};

static int32_t dtype_of(int type) {
  return type == DC__LT_R_64F    ? DC_FLOAT64
         : type == DC__LT_R_32F  ? DC_FLOAT32
         : type == DC__LT_R_16F  ? DC_FLOAT16
         : type == DC__LT_R_16BF ? DC_BFLOAT16
                                 : DC_DTYPE_NONE;
}

int cublasLtGetProperty(int type, int *value) {
  ENTER(false);
  *value = type == DC__LT_MAJOR_VERSION ? 13 : 0;
  return 0;
}

/* ---- descriptions ---- */

static int put(void *field, size_t size, const void *value, size_t bytes) {
  if (bytes != size) {
    return INVALID;
  }
  memcpy(field, value, bytes);
  return 0;
}

int cublasLtCreate(dc__lt_handle *handle) {
  ENTER(true);
  const struct cublasLtContext fresh = {cudasim_current()};
  return make_object((void **)handle, &fresh, sizeof fresh);
}

int cublasLtDestroy(dc__lt_handle handle) {
  return end_object(handle, enter(__func__, true));
}

int cublasLtMatmulDescCreate(dc__lt_desc *desc, int compute, int scale) {
  ENTER(false);
  const struct dc__lt_desc_st fresh = {.compute = compute, .scale = scale, .epilogue = DC__LT_EPILOGUE_NONE};
  return make_object((void **)desc, &fresh, sizeof fresh);
}

int cublasLtMatmulDescDestroy(dc__lt_desc desc) {
  return end_object(desc, enter(__func__, false));
}

int cublasLtMatmulDescSetAttribute(dc__lt_desc desc, int attribute, const void *value, size_t bytes) {
  ENTER(false);
  switch (attribute) {
    case DC__LT_DESC_TRANSA:
    case DC__LT_DESC_TRANSB:
      return put(&desc->trans[attribute - DC__LT_DESC_TRANSA], sizeof(int), value, bytes);
    case DC__LT_DESC_EPILOGUE:
      return put(&desc->epilogue, sizeof(int), value, bytes);
    case DC__LT_DESC_BIAS:
      return put(&desc->bias, sizeof desc->bias, value, bytes);
    case DC__LT_DESC_AUX:
      return put(&desc->aux, sizeof desc->aux, value, bytes);
    case DC__LT_DESC_AUX_LD:
      return put(&desc->aux_ld, sizeof desc->aux_ld, value, bytes);
    default:
      return INVALID;
  }
}

int cublasLtMatrixLayoutCreate(dc__lt_layout *layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  ENTER(false);
  const struct dc__lt_layout_st fresh = {type, (int64_t)rows, (int64_t)columns, ld, 0, 1};
  return ld < fresh.rows || dtype_of(type) == DC_DTYPE_NONE ? INVALID
                                                            : make_object((void **)layout, &fresh, sizeof fresh);
}

int cublasLtMatrixLayoutSetAttribute(dc__lt_layout layout, int attribute, const void *value, size_t bytes) {
  ENTER(false);
  return attribute == DC__LT_LAYOUT_BATCH    ? put(&layout->batch, sizeof layout->batch, value, bytes)
         : attribute == DC__LT_LAYOUT_STRIDE ? put(&layout->stride, sizeof layout->stride, value, bytes)
                                             : INVALID;
}

int cublasLtMatrixLayoutDestroy(dc__lt_layout layout) {
  return end_object(layout, enter(__func__, false));
}

int cublasLtMatmulPreferenceCreate(dc__lt_preference *preference) {
  ENTER(false);
  const struct dc__lt_preference_st fresh = {0, 7, {256, 256, 256, 256}};
  return make_object((void **)preference, &fresh, sizeof fresh);
}

int cublasLtMatmulPreferenceDestroy(dc__lt_preference preference) {
  return end_object(preference, enter(__func__, false));
}

int cublasLtMatmulPreferenceSetAttribute(dc__lt_preference preference, int attribute, const void *value, size_t bytes) {
  ENTER(false);
  if (attribute == DC__LT_PREFER_WORKSPACE) {
    return put(&preference->workspace, sizeof preference->workspace, value, bytes);
  }
  if (attribute == DC__LT_PREFER_REDUCTION) {
    return put(&preference->reduction, sizeof preference->reduction, value, bytes);
  }
  const int operand = attribute - DC__LT_PREFER_ALIGN_A;
  return operand >= 0 && operand < 4 ? put(&preference->alignment[operand], sizeof(uint32_t), value, bytes) : INVALID;
}

/* ---- products ---- */

int cudasim_searches(int batch, int alignment) {
  return atomic_load(&searches[batch][alignment]);
}

static size_t bytes_of(const struct dc__lt_layout_st *layout) {
  const int64_t before = (layout->batch - 1) * layout->stride + (layout->columns - 1) * layout->ld;
  return (size_t)(before + layout->rows) * dc_dtype_size(dtype_of(layout->type));
}

static bool shapes_fit(const struct dc__lt_desc_st *desc, const struct dc__lt_layout_st *a,
                       const struct dc__lt_layout_st *b, const struct dc__lt_layout_st *d) {
  int64_t m = desc->trans[0] != 0 ? a->columns : a->rows, k = desc->trans[0] != 0 ? a->rows : a->columns;
  int64_t n = desc->trans[1] != 0 ? b->rows : b->columns;
  bool types = a->type == b->type && (d->type == a->type || (a->type != DC__LT_R_64F && d->type == DC__LT_R_32F));
  bool wide = a->type == DC__LT_R_64F;
  types = types && desc->compute == (wide ? DC__LT_COMPUTE_64F : DC__LT_COMPUTE_32F) &&
          desc->scale == (wide ? DC__LT_R_64F : DC__LT_R_32F);
  types = types && a->batch == d->batch && b->batch == d->batch &&
          (d->batch == 1 || desc->epilogue == DC__LT_EPILOGUE_NONE);
  return types && d->rows == m && d->columns == n && (desc->trans[1] != 0 ? b->columns : b->rows) == k;
}

/* The library has the derivative of GELU only for 16-bit types with rows of a multiple of 16 bytes, and sums of rows
 * only for 16-bit types. */
static bool has_epilogue(const struct dc__lt_desc_st *desc, const struct dc__lt_layout_st *b,
                         const struct dc__lt_layout_st *d, uint32_t alignment) {
  if (desc->epilogue == DC__LT_EPILOGUE_BGRADB) {
    return dc_dtype_size(dtype_of(b->type)) == 2;
  }
  if (desc->epilogue == DC__LT_EPILOGUE_DGELU) {
    return dc_dtype_size(dtype_of(d->type)) == 2 && desc->aux_ld % 8 == 0 && alignment >= 16;
  }
  return desc->epilogue == DC__LT_EPILOGUE_NONE || d->type != DC__LT_R_64F;
}

int cublasLtMatmulAlgoGetHeuristic(dc__lt_handle handle, dc__lt_desc desc, dc__lt_layout a, dc__lt_layout b,
                                   dc__lt_layout c, dc__lt_layout d, dc__lt_preference preference, int wanted,
                                   dc__lt_found *found, int *count) {
  ENTER(true);
  *count = 0;
  if (handle == NULL || wanted != 1 || c != d || preference->reduction != DC__LT_REDUCTION_COMPUTE_TYPE ||
      !shapes_fit(desc, a, b, d)) {
    return INVALID;
  }
  if (!has_epilogue(desc, b, d, preference->alignment[3]) || d->batch > MAX_BATCH) {
    return desc->aux_ld % 8 != 0 ? INVALID : DC__LT_NOT_SUPPORTED;
  }
  *found = (dc__lt_found){.algo.data = {preference->alignment[0], preference->workspace}};
  *count = 1;
  if (d->batch < BATCHES && preference->alignment[0] < ALIGNMENTS) {
    atomic_fetch_add(&searches[d->batch][preference->alignment[0]], 1);
  }
  return 0;
}

int cublasLtMatmulAlgoCheck(dc__lt_handle handle, dc__lt_desc desc, dc__lt_layout a, dc__lt_layout b, dc__lt_layout c,
                            dc__lt_layout d, const dc__lt_algo *algo, dc__lt_found *found) {
  ENTER(true);
  if (handle == NULL || c != d || algo->data[0] == 0 || !shapes_fit(desc, a, b, d)) {
    return INVALID;
  }
  *found = (dc__lt_found){.algo = *algo, .workspace = algo->data[1]};
  return 0;
}

typedef struct task {
  dc__gemm gemm;
  size_t bytes[3]; /* of A, B and C in the gemm's order */
  char *workspace;
  size_t workspace_bytes;
  void *sums; /* the row sums of op(A); NULL: none */
} task;

static void sum_rows(const dc__gemm *g, void *to) {
  for (int64_t i = 0; i < g->m; i++) {
    float sum = 0;
    for (int64_t k = 0; k < g->k; k++) {
      float x;
      const int64_t at = g->trans_a ? k * g->lda + i : i * g->lda + k;
      dc__cast(&x, DC_FLOAT32, (const char *)g->a + (size_t)at * dc_dtype_size(g->dtype), g->dtype, 1);
      sum += x;
    }
    dc__cast((char *)to + (size_t)i * dc_dtype_size(g->out_dtype), g->out_dtype, &sum, DC_FLOAT32, 1);
  }
}

static void run_product(void *args) {
  task *t = args;
  dc__gemm *g = &t->gemm;
  g->a = resolve_pointer(g->a, t->bytes[0], false);
  g->b = resolve_pointer(g->b, t->bytes[1], false);
  g->c = resolve_pointer(g->c, t->bytes[2], false);
  void *space = t->workspace_bytes == 0 ? g->c : resolve_pointer(t->workspace, t->workspace_bytes, false);
  bool fits = g->a != NULL && g->b != NULL && g->c != NULL && space != NULL;
  if (g->bias != NULL) {
    g->bias = resolve_pointer(g->bias, (size_t)g->n * dc_dtype_size(g->dtype), false);
    fits = fits && g->bias != NULL;
  }
  if (g->aux != NULL) {
    g->aux = resolve_pointer(g->aux, t->bytes[2], false);
    fits = fits && g->aux != NULL;
  }
  if (t->sums != NULL) {
    t->sums = resolve_pointer(t->sums, (size_t)g->m * dc_dtype_size(g->out_dtype), false);
    fits = fits && t->sums != NULL;
  }
  if (!fits) {
    lose_device(ILLEGAL_ADDRESS);
  }
  if (lost() != 0) {
    return;
  }
  if (t->sums != NULL) {
    sum_rows(g, t->sums);
  }
  if (t->workspace_bytes > 0) { /* the workspace belongs to this product: writes to both of its ends */
    const size_t end = t->workspace_bytes < 8192 ? t->workspace_bytes : 8192;
    memset(space, 0xa5, end);
    memset((char *)space + t->workspace_bytes - end, 0xa5, end);
  }
  void *scratch = aligned_alloc(4096, DC__SCRATCH_BYTES);
  dc__gemm_serial(g, scratch);
  free(scratch);
}

/* Whether the pointers are set that the product and its epilogue need. */
static bool has_pointers(const struct dc__lt_desc_st *desc, const void *alpha, const void *beta, const void *workspace,
                         size_t workspace_bytes) {
  const bool biased = desc->epilogue == DC__LT_EPILOGUE_BIAS || desc->epilogue == DC__LT_EPILOGUE_BGRADB;
  return alpha != NULL && beta != NULL && (workspace != NULL || workspace_bytes == 0) &&
         (!biased || desc->bias != NULL) && (desc->epilogue != DC__LT_EPILOGUE_DGELU || desc->aux != NULL);
}

/* In a batch, matrices that are written must not share elements. */
static bool are_apart(const struct dc__lt_layout_st *d) {
  return d->batch == 1 || d->stride >= (d->columns - 1) * d->ld + d->rows;
}

/* D = A B with columns is D' = B' A' with rows. */
int cublasLtMatmul(dc__lt_handle handle, dc__lt_desc desc, const void *alpha, const void *a, dc__lt_layout a_layout,
                   const void *b, dc__lt_layout b_layout, const void *beta, const void *c, dc__lt_layout c_layout,
                   void *d, dc__lt_layout d_layout, const dc__lt_algo *algo, void *workspace, size_t workspace_bytes,
                   dc__cu_stream stream) {
  ENTER(true);
  if (handle == NULL || c != d || c_layout != d_layout || algo->data[0] == 0 || workspace_bytes < algo->data[1]) {
    return INVALID;
  }
  if (handle->device != cudasim_current() || !shapes_fit(desc, a_layout, b_layout, d_layout) || !are_apart(d_layout) ||
      !has_pointers(desc, alpha, beta, workspace, workspace_bytes)) {
    return INVALID;
  }
  uintptr_t all = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d;
  if (all % algo->data[0] != 0 || (workspace_bytes > 0 && (uintptr_t)workspace % WORKSPACE_ALIGNMENT != 0)) {
    return INVALID;
  }
  const bool wide = desc->scale == DC__LT_R_64F;
  task t = {.bytes = {bytes_of(b_layout), bytes_of(a_layout), bytes_of(d_layout)}, .workspace = workspace};
  t.workspace_bytes = workspace_bytes;
  t.gemm = (dc__gemm){.dtype = dtype_of(a_layout->type), .out_dtype = dtype_of(d_layout->type)};
  dc__gemm *g = &t.gemm;
  g->batch = d_layout->batch;
  g->stride_a = b_layout->stride;
  g->stride_b = a_layout->stride;
  g->stride_c = d_layout->stride;
  g->trans_a = desc->trans[1] != 0;
  g->trans_b = desc->trans[0] != 0;
  g->m = d_layout->columns;
  g->n = d_layout->rows;
  g->k = desc->trans[0] != 0 ? a_layout->rows : a_layout->columns;
  g->a = b;
  g->b = a;
  g->c = d;
  g->lda = b_layout->ld;
  g->ldb = a_layout->ld;
  g->ldc = d_layout->ld;
  g->alpha = wide ? *(const double *)alpha : (double)*(const float *)alpha;
  g->beta = wide ? *(const double *)beta : (double)*(const float *)beta;
  if (desc->epilogue == DC__LT_EPILOGUE_BIAS) {
    g->epilogue = DC__EPILOGUE_BIAS;
    g->bias = desc->bias;
  } else if (desc->epilogue == DC__LT_EPILOGUE_DGELU) {
    g->epilogue = DC__EPILOGUE_GELU_BACK;
    g->aux = (void *)(uintptr_t)desc->aux; /* this epilogue only reads it */
  } else if (desc->epilogue == DC__LT_EPILOGUE_BGRADB) {
    t.sums = (void *)(uintptr_t)desc->bias;
  }
  return push(stream, run_product, &t, sizeof t) == 0 ? 0 : EXECUTION_FAILED;
}
