/* Matrix operators: the header of the module. The public functions of src/api read the caller's tensors with it,
 * check them, and call inward. */
#ifndef DC_LINALG_H
#define DC_LINALG_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "kernels/kernels.h"

/* ---- handles and their scratch memory (handle.c) ---- */

/* How x^(-1 / root) is a sum of fractions (root_quadrature.c): a rule's points between 0 and 1, from either end. */
typedef struct dc__quadrature_rule {
  int32_t root; /* 0 if not computed yet */
  double node[DC__TRIDIAGONAL_SHIFTS], one_minus_node[DC__TRIDIAGONAL_SHIFTS], weight[DC__TRIDIAGONAL_SHIFTS];
} dc__quadrature_rule;
enum { DC__MAX_QUADRATURE_ROOT = 8 }; /* the largest root that has one */

struct dc_linalg {
  int32_t handle; /* DC__HANDLE_LINALG */
  dc_device *device;
  dc_stream *stream; /* of a device, for products: the internal stream unless a whole step is on the caller's */
  dc__threadpool *pool;
  const dc__blas *blas; /* NULL for the reference solver */
  const char *solver;
  pthread_mutex_t mutex;          /* held by each call */
  void *scratch, *user_workspace; /* scratch: the handle's, or the caller's */
  size_t scratch_bytes, user_workspace_bytes;
  bool query;
  size_t query_bytes; /* the largest scratch size of the calls in a query */
  dc__quadrature_rule rules[DC__MAX_QUADRATURE_ROOT];
  struct dc__staging *staging; /* out_of_core_cuda.c; NULL until first used */
};

dc_status dc__linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg);
void dc__linalg_destroy(dc_linalg *linalg);

/* Whether the handle's device is CUDA: the host cannot access its memory. */
static inline bool dc__linalg_is_cuda(const dc_linalg *l) {
  return l->device->memory_space != 0;
}

enum { DC__DEVICE_ALIGNMENT = DC__MATMUL_ALIGNMENT }; /* workspace alignment of NVIDIA's libraries */

/* Memory and products of a kind of device. */
typedef struct dc__linalg_work {
  int32_t memory_kind;
  int64_t gemm_workspace_bytes; /* 0 for none */
  dc_status (*check_gemm)(dc_linalg *l, const char *fn);
  void (*gemm)(dc_linalg *l, const dc__gemm *g, void *workspace); /* of at least one element of C */
  dc_status (*synchronize)(dc_linalg *l);
} dc__linalg_work;

extern const dc__linalg_work dc__linalg_work_cpu, dc__linalg_work_cuda; /* linalg_gemm.c, linalg_gemm_cuda.c */

static inline const dc__linalg_work *dc__linalg_work_of(const dc_linalg *l) {
  return dc__linalg_is_cuda(l) ? &dc__linalg_work_cuda : &dc__linalg_work_cpu;
}

/* Returns `bytes` of scratch in the device's memory space, 64-byte aligned and not zeroed, until the next call. In a
 * query *memory is NULL, and the caller returns. */
dc_status dc__linalg_scratch(dc_linalg *l, const char *fn, size_t bytes, void **memory);

/* Adds count elements of a size, rounded to a cache line, to *total. Returns false on overflow. */
bool dc__linalg_add_bytes(size_t *total, int64_t count, size_t size);
/* Returns the part that dc__linalg_add_bytes() added. *offset advances as *total did. */
void *dc__linalg_suballoc(void *memory, size_t *offset, int64_t count, size_t size);

/* Memory that is laid out twice: to count it, and to assign it. */
typedef struct dc__scratch_layout {
  char *memory; /* NULL while counting */
  size_t bytes;
  bool fits;
} dc__scratch_layout;
/* The next count * each elements, or NULL if not wanted or while counting. */
void *dc__scratch_layout_alloc(dc__scratch_layout *to, bool wanted, int64_t count, int64_t each, size_t size);

/* Slots: equal pieces of scratch memory for parallel work, at most one a thread. */
typedef struct dc__slots {
  atomic_bool *taken;
  char *memory;
  int64_t count;
  size_t bytes;
} dc__slots;
/* Plans slots for `work` items and adds them to *total; then assigns them in a memory, at *offset. */
bool dc__slots_plan(dc__slots *slots, const dc_linalg *l, int64_t work, size_t bytes, size_t *total);
void dc__slots_init(dc__slots *slots, void *memory, size_t *offset);
int64_t dc__slots_acquire(dc__slots *slots);
void dc__slots_release(dc__slots *slots, int64_t slot);
static inline void *dc__slots_memory(const dc__slots *slots, int64_t slot) {
  return slots->memory + (size_t)slot * slots->bytes;
}

/* ---- matrices (strided.c) ---- */

/* A batch of matrices as strides in elements; data's type is dtype. */
typedef struct dc__mat {
  void *data;
  int32_t dtype;
  int64_t batch, rows, cols;
  int64_t batch_stride, row_stride, col_stride;
  bool batched;          /* the tensor had three dimensions */
  void *const *pointers; /* on a device: matrix pointers instead of data and batch_stride; or NULL */
} dc__mat;

enum dc__mat_layout {
  DC__MAT_ANY = 0,  /* any strides */
  DC__MAT_GEMM = 1, /* rows or columns are dense and do not overlap */
  DC__MAT_OUT = 2   /* contiguous */
};

/* Reads a tensor of two or three dimensions. */
dc_status dc__mat_read(const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout, dc__mat *mat);
/* Reads a contiguous tensor of `ndim` lengths, given in `shape`, and a type. */
dc_status dc__mat_read_as(const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype, const int64_t *shape,
                          int32_t ndim, dc_tensor *read);
/* DC_E_DTYPE unless float32 or float64. */
dc_status dc__mat_check_real(const char *fn, const char *arg, int32_t dtype);
/* DC_E_DTYPE unless the same. */
dc_status dc__mat_check_dtype(const char *fn, const char *arg, int32_t dtype, const char *other, int32_t wanted);

/* The offset of an element of the caller's matrix `index`. */
static inline int64_t dc__mat_offset(const dc__mat *m, int64_t index, int64_t i, int64_t j) {
  return index * m->batch_stride + i * m->row_stride + j * m->col_stride;
}

static inline double dc__load_element(const void *data, bool wide, int64_t i) {
  return wide ? ((const double *)data)[i] : (double)((const float *)data)[i];
}
static inline void dc__store_element(void *data, bool wide, int64_t i, double value) {
  if (wide) {
    ((double *)data)[i] = value;
  } else {
    ((float *)data)[i] = (float)value;
  }
}
static inline void *dc__element_ptr(const void *data, int32_t dtype, int64_t i) {
  return (char *)(uintptr_t)data + (size_t)i * dc_dtype_size(dtype);
}
/* x * 2^exponent in two steps, so that the factors exist for every exponent a double can have; ldexp() is slow. */
typedef struct dc__pow2_scale {
  double first, second;
} dc__pow2_scale;
static inline dc__pow2_scale dc__pow2_scale_of(int exponent) {
  dc__pow2_scale scale = {ldexp(1, exponent / 2), ldexp(1, exponent - exponent / 2)};
  return scale;
}
static inline double dc__pow2_scaled(double x, dc__pow2_scale scale) {
  return x * scale.first * scale.second;
}

/* The type's distance from 1 to the next number. */
double dc__epsilon(int32_t dtype);

/* Returns DC_E_INVALID if elements are not aligned to their size on a device. */
dc_status dc__linalg_check_alignment(const dc_linalg *l, const char *fn, const char *arg, const void *data,
                                     int32_t dtype);

/* out = alpha op a b + beta out for matrices with dense rows or columns: fills in the product's arguments. */
dc__gemm dc__mat_gemm(const dc__mat *a, const dc__mat *b, double alpha, double beta, const dc__mat *out);

/* Matrices of a batch in one slice on a device, each with `bytes` of squares (batch_slice_cuda.c). */
int32_t dc__batch_slice_max_count(int64_t batch, size_t bytes);

/* ---- products on CPU and CUDA (linalg_gemm.c) ---- */

/* Before the first product: DC_E_UNSUPPORTED on a device without a GEMM library. */
dc_status dc__linalg_check_gemm(dc_linalg *l, const char *fn);
/* The workspace for products, empty on the host: added to *total, and assigned. */
bool dc__linalg_add_gemm_workspace(size_t *total, const dc_linalg *l);
void *dc__linalg_gemm_workspace(const dc_linalg *l, void *memory, size_t *offset);
/* dc__linalg_suballoc() at DC__DEVICE_ALIGNMENT, of bytes that were added with as many more. */
void *dc__linalg_suballoc_aligned(void *memory, size_t *offset, int64_t bytes);
/* Runs on the handle's threads, or is queued on its device. Matrices may be empty. */
void dc__linalg_gemm(dc_linalg *l, const dc__gemm *gemm, void *workspace);
/* out = alpha a b + beta out. */
dc_status dc__batch_matmul(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, double alpha, double beta,
                           const dc__mat *out);
/* Waits for queued work. */
dc_status dc__linalg_synchronize(dc_linalg *l);
/* Copies device memory to the host and waits. */
dc_status dc__linalg_copy_to_host(dc_linalg *l, void *to, const void *from, size_t bytes);

/* ---- symmetric matrices (eigh.c, matrix_power.c) ---- */

/* c = alpha a a^T + beta c, [n, n] and exactly symmetric; a is [n, k], or with trans the transpose of what is stored as
 * [k, n]. On the pool, or with pool NULL on this thread with DC__SCRATCH_BYTES of scratch. */
void dc__syrk(dc__threadpool *pool, void *scratch, bool trans, int64_t n, int64_t k, const float *a, double alpha,
              double beta, float *c);
/* The whole matrix as one product, for a device. */
dc__gemm dc__syrk_gemm(bool trans, int64_t n, int64_t k, const float *a, double alpha, double beta, float *c);

/* ORTHOGONAL_ITERATION is for dc__spectral_run_grouped() only: out is a refinement of the eigenvectors in `basis`,
 * the largest first. */
enum dc__spectral_op {
  DC__SPECTRAL_EIGH,
  DC__SPECTRAL_POWER,
  DC__SPECTRAL_ROOT,
  DC__SPECTRAL_NEWTON,
  DC__SPECTRAL_ORTHOGONAL_ITERATION
};

typedef struct dc__spectral_request {
  const char *fn;
  enum dc__spectral_op op;
  dc_spectral_options options;
  double power; /* POWER; for ROOT -1 / root */
  int32_t root;
  int32_t max_iterations; /* NEWTON */
  double max_residual;    /* 0: by the type and epsilon */
  dc__mat a, out;         /* EIGH: out are the vectors */
  dc__mat basis;          /* data NULL: none */
  int64_t *order;         /* ORTHOGONAL_ITERATION: [n], set to the columns of the basis that out's columns began as */
  void *values;           /* EIGH: [batch, n] of a's type; NULL: not wanted */
  bool vectors;           /* EIGH: wanted */
  void *info;             /* NULL: not wanted. NEWTON: dc_iteration_info */
  size_t info_size;
  const struct dc__spectral_request
      *grouped; /* of a batch on a device: the requests with one matrix each; NULL for the batch's own */
} dc__spectral_request;

dc_status dc__spectral_run(dc_linalg *l, const dc__spectral_request *request);
/* Matrices of different sizes side by side, each on one thread. Requests have one matrix of at least one row each,
 * the largest first, and report in their `info`. On a device, neighbours that differ only in memory are one batch.
 * Fails only if none can be computed. */
dc_status dc__spectral_run_grouped(dc_linalg *l, const dc__spectral_request *requests, int64_t count);

/* On a device, queued, for a batch of dense float32 matrices, of which the lower triangles count: refines each basis
 * as by ORTHOGONAL_ITERATION, the largest first. DC_E_UNSUPPORTED if the device has no QR. */
typedef struct dc__orthogonal_iteration_batch {
  const char *fn;
  dc__mat a, basis;
  /* On the device, [batch]: */
  int64_t *const *orders; /* output of each order [n], */
  int32_t *failed;        /* set to 1 for a basis left as it was, with the order 0, 1, ... */
} dc__orthogonal_iteration_batch;
dc_status dc__orthogonal_iteration_cuda(dc_linalg *l, const dc__orthogonal_iteration_batch *b);

/* a's polar factor by odd polynomials (newton_schulz.c), with Polar Express's coefficients or Muon's. */
dc_status dc__orthogonalize(dc_linalg *l, const char *fn, const dc__mat *a, bool polar_express, int32_t steps,
                            const dc__mat *out);

/* The same as part of other work: `count` dense float32 matrices, `stride` elements apart, each replaced by factor
 * P(x / max(|x|, eps)), with |x| its Frobenius norm. */
typedef struct dc__polar {
  float *x;
  int64_t rows, cols, stride;
  int32_t count;
  int32_t dtype; /* of the products: float32 or bfloat16 */
  bool polar_express;
  int32_t steps;
  double eps; /* > 0 */
  double factor;
} dc__polar;
enum { DC__POLAR_TEMPS = 4 }; /* size of temp, in multiples of the matrices' elements */
/* One matrix on the pool; or with pool NULL on this thread, with scratch as for dc__gemm_on(). */
void dc__polar_cpu(dc__threadpool *pool, void *scratch, const dc__polar *p, float *temp);
/* Queued on the handle's device. The bits do not depend on count, at most DC__CUDA_BATCH_SLICE. temp: at a multiple of
 * 16 bytes, for matrices of their elements rounded up to 64; sums: [count, rows]; reports: [count]. */
void dc__polar_cuda(dc_linalg *l, const dc__polar *p, float *temp, void *gemm_workspace, double *sums,
                    dc__cuda_matrix_stats *reports);

/* ---- Kronecker products (kron.c, kron_nearest.c) and products of matrices (out_of_core.c) ---- */

dc_status dc__kron_too_large(const char *fn);
dc_status dc__kron(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out);
dc_status dc__kron_apply(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, const dc__mat *x,
                         const dc__mat *out);
/* The inverse of kron(A, B) + damping I, by eigendecompositions of A and B. */
typedef struct dc__kron_inverse {
  const dc__mat *a_vectors, *b_vectors;
  const void *a_values, *b_values;
  double damping;
} dc__kron_inverse;
dc_status dc__kron_solve(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x,
                         const dc__mat *out);
/* Its two parts. The check needs no memory and returns DC_E_NOT_POSITIVE unless all damped eigenvalues are positive.
 * The solve takes batches too and is queued, with `scratch` for what was added for out. On a device a not_positive
 * that is not NULL replaces the check: it is set to 1 if an eigenvalue is not positive. */
dc_status dc__kron_check_damped(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x);
bool dc__kron_add_scratch(const dc_linalg *l, const dc__mat *out, size_t *bytes);
void dc__kron_apply_inverse(dc_linalg *l, const dc__kron_inverse *inverse, const dc__mat *x, const dc__mat *out,
                            void *scratch, uint64_t *not_positive);
dc_status dc__kron_nearest(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                           double *residual);

/* A matrix of an out-of-core product: in memory, or dense in a file, with data NULL. */
typedef struct dc__matrix_source {
  dc__mat mat;
  int64_t offset;
  int32_t fd;
  bool in_file;
} dc__matrix_source;
dc_status dc__matmul_bounded(dc_linalg *l, const char *fn, const dc__matrix_source *a, const dc__matrix_source *b,
                             const dc__matrix_source *out, int64_t budget, int64_t *needed);
void dc__staging_destroy(dc_linalg *l); /* frees the handle's staging buffers */

/* ---- gradients per sample (per_sample.c and its neighbours) ---- */

/* A layer with its tensors, checked: the part common to all types. */
typedef struct dc__per_sample {
  const char *fn;
  dc_sample_layer layer; /* defaults filled in */
  const void *x, *delta;
  int32_t dtype;     /* of delta, weight and bias */
  int32_t x_dtype;   /* delta's, an embedding's index type, or for 16-bit reads its own */
  int64_t samples;   /* N */
  int64_t positions; /* T, or output positions of a convolution */
  int64_t in, out;   /* columns and rows of the weight; of one group of a convolution, times groups in `out` */
  int32_t spatial;   /* convolution: 1 to 3, and its lengths, padded with leading ones: */
  int64_t size[3], size_out[3];
} dc__per_sample;

/* Checks x and delta: float32 or float64, of one type; an embedding's indices too. */
dc_status dc__per_sample_read(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, dc__per_sample *sample);
/* The same for a linear layer or a convolution in float32, float16 or bfloat16; x and delta may differ. */
dc_status dc__per_sample_read_mixed(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                                    const dc_tensor *delta, dc__per_sample *sample);
/* Checks only the constants of such a layer of a given number of spatial dimensions, without defaults. */
dc_status dc__per_sample_read_layer(const char *fn, const dc_sample_layer *layer, int32_t spatial,
                                    dc_sample_layer *read);
/* The shape of the weight or the bias, with or without a leading batch of samples. Returns ndim. */
int32_t dc__per_sample_shape(const dc__per_sample *sample, bool bias, bool per_sample, int64_t shape[8]);
bool dc__per_sample_has_bias(const dc__per_sample *sample);

dc_status dc__per_sample_grads(dc_linalg *l, const dc__per_sample *sample, void *weight, void *bias);
dc_status dc__per_sample_norms(dc_linalg *l, const dc__per_sample *sample, int32_t parts, bool accumulate,
                               void *squares);
dc_status dc__per_sample_sum(dc_linalg *l, const dc__per_sample *sample, const void *factors, bool accumulate,
                             void *weight, void *bias);

/* factors[i] = min(1, max_norm / (sqrt(squares[i]) + 1e-6)), or 0 if that square is not finite. */
dc_status dc__clip_factors(dc_linalg *l, int32_t dtype, int64_t count, const void *squares, double max_norm,
                           void *factors);

/* A convolution's patches of one sample and group, [in][positions], `row` elements from one row to the next
 * (im2col.c). */
int64_t dc__im2col_numel(const dc__per_sample *s);
void dc__im2col(const dc__per_sample *s, int64_t sample, int32_t group, void *patches, int64_t row);

#endif
