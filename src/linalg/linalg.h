/* Matrix operators: the header of the module. The public functions of src/api read and check the caller's tensors with
 * it, and call its operators. */
#ifndef DC_LINALG_H
#define DC_LINALG_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "kernels/kernels.h"

/* ---- handles and their scratch memory (handle.c) ---- */

/* A quadrature rule that makes x^(-1 / root) a sum of fractions (root_quadrature.c). Nodes lie between 0 and 1. */
typedef struct dc__quadrature_rule {
  int32_t root; /* 0 if not computed yet */
  double node[DC__TRIDIAGONAL_SHIFTS], one_minus_node[DC__TRIDIAGONAL_SHIFTS], weight[DC__TRIDIAGONAL_SHIFTS];
} dc__quadrature_rule;
enum { DC__MAX_QUADRATURE_ROOT = 8 }; /* the largest root that has a rule */

struct dc_linalg {
  int32_t handle; /* DC__HANDLE_LINALG */
  dc_device *device;
  dc_stream *stream; /* CUDA: for products; the internal stream, or an optimizer step's own */
  dc__threadpool *pool;
  const dc__blas *blas; /* NULL for the reference solver */
  const char *solver;
  pthread_mutex_t mutex;          /* held by each call */
  void *scratch, *user_workspace; /* the handle's own; the caller's, used instead if not NULL */
  size_t scratch_bytes, user_workspace_bytes;
  bool query;         /* calls compute nothing, and report the scratch that they need */
  size_t query_bytes; /* the largest scratch size of the calls in a query */
  dc__quadrature_rule rules[DC__MAX_QUADRATURE_ROOT];
  struct dc__staging *staging; /* out_of_core_cuda.c; NULL until first used */
};

dc_status dc__linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg);
void dc__linalg_destroy(dc_linalg *linalg);

/* Whether the handle's device is CUDA, whose memory the host cannot access. */
static inline bool dc__linalg_is_cuda(const dc_linalg *l) {
  return l->device->memory_space != 0;
}

enum { DC__DEVICE_ALIGNMENT = DC__MATMUL_ALIGNMENT }; /* workspace alignment of NVIDIA's libraries */

/* Memory and products on one kind of device. */
typedef struct dc__linalg_work {
  int32_t memory_kind;
  int64_t gemm_workspace_bytes; /* 0 for none */
  dc_status (*check_gemm)(dc_linalg *l, const char *fn);
  void (*gemm)(dc_linalg *l, const dc__gemm *g, void *workspace); /* C is not empty */
  dc_status (*synchronize)(dc_linalg *l);
} dc__linalg_work;

extern const dc__linalg_work dc__linalg_work_cpu, dc__linalg_work_cuda; /* linalg_gemm.c, linalg_gemm_cuda.c */

static inline const dc__linalg_work *dc__linalg_work_of(const dc_linalg *l) {
  return dc__linalg_is_cuda(l) ? &dc__linalg_work_cuda : &dc__linalg_work_cpu;
}

/* Sets *memory to `bytes` bytes of scratch in the device's memory space, 64-byte aligned and not zeroed, valid until
 * the next call. In a query *memory is NULL, and the caller must return. */
dc_status dc__linalg_scratch(dc_linalg *l, const char *fn, size_t bytes, void **memory);

/* Adds count elements of `size` bytes, rounded up to cache lines, to *total. Returns false on overflow. */
bool dc__linalg_add_bytes(size_t *total, int64_t count, size_t size);
/* Returns the part that dc__linalg_add_bytes() added. *offset advances as *total did. */
void *dc__linalg_suballoc(void *memory, size_t *offset, int64_t count, size_t size);

/* A memory layout that runs twice: first to count bytes, then to assign memory. */
typedef struct dc__scratch_layout {
  char *memory; /* NULL while counting */
  size_t bytes;
  bool fits;
} dc__scratch_layout;
/* Returns the next count * each elements, or NULL while counting or if not wanted. */
void *dc__scratch_layout_alloc(dc__scratch_layout *to, bool wanted, int64_t count, int64_t each, size_t size);

/* Slots: equal pieces of scratch memory for parallel work, at most one per thread. */
typedef struct dc__slots {
  atomic_bool *taken;
  char *memory;
  int64_t count;
  size_t bytes;
} dc__slots;
/* The first adds slots for `work` items, of `bytes` each, to *total. The second assigns them in `memory` at *offset. */
bool dc__slots_plan(dc__slots *slots, const dc_linalg *l, int64_t work, size_t bytes, size_t *total);
void dc__slots_init(dc__slots *slots, void *memory, size_t *offset);
int64_t dc__slots_acquire(dc__slots *slots);
void dc__slots_release(dc__slots *slots, int64_t slot);
static inline void *dc__slots_memory(const dc__slots *slots, int64_t slot) {
  return slots->memory + (size_t)slot * slots->bytes;
}

/* ---- matrices (strided.c) ---- */

/* A batch of matrices of type `dtype`. Strides are in elements. */
typedef struct dc__mat {
  void *data;
  int32_t dtype;
  int64_t batch, rows, cols;
  int64_t batch_stride, row_stride, col_stride;
  bool batched;          /* the tensor had three dimensions */
  void *const *pointers; /* on a device: each matrix's address instead of data and batch_stride, or NULL */
} dc__mat;

enum dc__mat_layout {
  DC__MAT_ANY = 0,  /* any strides */
  DC__MAT_GEMM = 1, /* rows or columns are dense and do not overlap */
  DC__MAT_OUT = 2   /* contiguous */
};

/* Reads a tensor of two or three dimensions. */
dc_status dc__mat_read(const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout, dc__mat *mat);
/* Reads a contiguous tensor, which must have this type and shape. */
dc_status dc__mat_read_as(const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype, const int64_t *shape,
                          int32_t ndim, dc_tensor *read);
/* Returns DC_E_DTYPE unless dtype is float32 or float64. */
dc_status dc__mat_check_real(const char *fn, const char *arg, int32_t dtype);
/* Returns DC_E_DTYPE unless dtype is `wanted`, the type of the argument `other`. */
dc_status dc__mat_check_dtype(const char *fn, const char *arg, int32_t dtype, const char *other, int32_t wanted);

/* The offset, in elements, of entry [i, j] of matrix `index`. */
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
/* x * 2^exponent by two factors, since one could overflow a double. It is faster than ldexp(). */
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

/* Returns the arguments of out = alpha a b + beta out, where rows or columns of a and b are dense. */
dc__gemm dc__mat_gemm(const dc__mat *a, const dc__mat *b, double alpha, double beta, const dc__mat *out);

/* Returns how many matrices of a batch a slice on a device has, if each needs `bytes` bytes (batch_slice_cuda.c). */
int32_t dc__batch_slice_max_count(int64_t batch, size_t bytes);

/* ---- products on CPU and CUDA (linalg_gemm.c) ---- */

/* Call it before the first product. Returns DC_E_UNSUPPORTED on a device without a GEMM library. */
dc_status dc__linalg_check_gemm(dc_linalg *l, const char *fn);
/* Workspace for products, of 0 bytes on the host. The first adds it to *total, the second assigns it. */
bool dc__linalg_add_gemm_workspace(size_t *total, const dc_linalg *l);
void *dc__linalg_gemm_workspace(const dc_linalg *l, void *memory, size_t *offset);
/* dc__linalg_suballoc() at DC__DEVICE_ALIGNMENT. *total must have grown by DC__DEVICE_ALIGNMENT more bytes. */
void *dc__linalg_suballoc_aligned(void *memory, size_t *offset, int64_t bytes);
/* Runs a product on the handle's threads, or queues it on its device. Matrices may be empty. */
void dc__linalg_gemm(dc_linalg *l, const dc__gemm *gemm, void *workspace);
/* out = alpha a b + beta out. */
dc_status dc__batch_matmul(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, double alpha, double beta,
                           const dc__mat *out);
/* Waits for queued work. */
dc_status dc__linalg_synchronize(dc_linalg *l);
/* Copies device memory to the host and waits. */
dc_status dc__linalg_copy_to_host(dc_linalg *l, void *to, const void *from, size_t bytes);

/* ---- symmetric matrices (eigh.c, matrix_power.c) ---- */

/* c = alpha a a^T + beta c, where c is [n, n] and exactly symmetric, and a is [n, k], or with trans stored as [k, n].
 * Runs on the pool, or if that is NULL on this thread with DC__SCRATCH_BYTES of scratch. */
void dc__syrk(dc__threadpool *pool, void *scratch, bool trans, int64_t n, int64_t k, const float *a, double alpha,
              double beta, float *c);
/* The same as one product of whole matrices, for a device. */
dc__gemm dc__syrk_gemm(bool trans, int64_t n, int64_t k, const float *a, double alpha, double beta, float *c);

/* ORTHOGONAL_ITERATION is for dc__spectral_run_grouped() only. It refines the eigenvectors in `basis` to out, those of
 * the largest eigenvalues first. */
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
  double max_residual;    /* 0: chosen by type and epsilon */
  dc__mat a, out;         /* EIGH: out receives the eigenvectors */
  dc__mat basis;          /* data NULL: none */
  int64_t *order;         /* ORTHOGONAL_ITERATION: [n], set to the column of `basis` that each column of out began as */
  void *values;           /* EIGH: [batch, n] of a's type; NULL: not wanted */
  bool vectors;           /* EIGH: wanted */
  void *info;             /* NULL: not wanted. NEWTON: dc_iteration_info */
  size_t info_size;
  const struct dc__spectral_request
      *grouped; /* on a device: the requests of one matrix each that this batch joins; NULL if it joins none */
} dc__spectral_request;

dc_status dc__spectral_run(dc_linalg *l, const dc__spectral_request *request);
/* Computes matrices of different sizes side by side, each on one thread. Each request has one matrix of at least one
 * row, the largest come first, and each reports in its `info`. On a device, neighbours that differ only in their
 * pointers are one batch. Fails only if none can be computed. */
dc_status dc__spectral_run_grouped(dc_linalg *l, const dc__spectral_request *requests, int64_t count);

/* Queues ORTHOGONAL_ITERATION on a device, for a batch of dense float32 matrices, whose lower triangles are read. Each
 * basis is refined in place. Returns DC_E_UNSUPPORTED if the device has no QR. */
typedef struct dc__orthogonal_iteration_batch {
  const char *fn;
  dc__mat a, basis;
  /* On the device, [batch]: */
  int64_t *const *orders; /* where each order, [n], is written */
  int32_t *failed;        /* set to 1 for a basis that is left as it was, with the order 0, 1, ... */
} dc__orthogonal_iteration_batch;
dc_status dc__orthogonal_iteration_cuda(dc_linalg *l, const dc__orthogonal_iteration_batch *b);

/* out = a's polar factor by odd polynomials (newton_schulz.c), with Polar Express's coefficients or Muon's. */
dc_status dc__orthogonalize(dc_linalg *l, const char *fn, const dc__mat *a, bool polar_express, int32_t steps,
                            const dc__mat *out);

/* The same inside other operators: each of `count` dense float32 matrices x, `stride` elements apart, is replaced by
 * factor * P(x / max(|x|, eps)). P is the polynomials, |x| the Frobenius norm. */
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
/* Computes one matrix on the pool, or if that is NULL on this thread, with scratch as for dc__gemm_on(). */
void dc__polar_cpu(dc__threadpool *pool, void *scratch, const dc__polar *p, float *temp);
/* Queues `count` matrices, at most DC__CUDA_BATCH_SLICE, on the handle's device. The bits do not depend on count. temp
 * is 16-byte aligned, with each matrix's elements rounded up to 64; sums is [count, rows], reports [count]. */
void dc__polar_cuda(dc_linalg *l, const dc__polar *p, float *temp, void *gemm_workspace, double *sums,
                    dc__cuda_matrix_stats *reports);

/* ---- Kronecker products (kron.c, kron_nearest.c) and products of matrices (out_of_core.c) ---- */

dc_status dc__kron_too_large(const char *fn);
dc_status dc__kron(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out);
dc_status dc__kron_apply(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, const dc__mat *x,
                         const dc__mat *out);
/* The inverse of kron(A, B) + damping I, from the eigendecompositions of A and B. */
typedef struct dc__kron_inverse {
  const dc__mat *a_vectors, *b_vectors;
  const void *a_values, *b_values;
  double damping;
} dc__kron_inverse;
dc_status dc__kron_solve(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x,
                         const dc__mat *out);
/* The two parts of dc__kron_solve(). The check needs no scratch and returns DC_E_NOT_POSITIVE unless all damped
 * eigenvalues are positive. The solve also takes batches; on a device it is queued. dc__kron_add_scratch() counts its
 * scratch. On a device not_positive can replace the check: it is set to 1 if an eigenvalue is not positive. */
dc_status dc__kron_check_damped(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x);
bool dc__kron_add_scratch(const dc_linalg *l, const dc__mat *out, size_t *bytes);
void dc__kron_apply_inverse(dc_linalg *l, const dc__kron_inverse *inverse, const dc__mat *x, const dc__mat *out,
                            void *scratch, uint64_t *not_positive);
dc_status dc__kron_nearest(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                           double *residual);

/* A matrix of an out-of-core product: in memory, or dense in a file from byte `offset` on, with data NULL. */
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

/* A checked layer with its tensors: the part common to all layer types. */
typedef struct dc__per_sample {
  const char *fn;
  dc_sample_layer layer; /* defaults filled in */
  const void *x, *delta;
  int64_t x_count, delta_count; /* elements */
  int32_t dtype;                /* of delta, weight and bias */
  int32_t x_dtype;              /* delta's type, an embedding's index type, or after a mixed read x's own */
  int64_t samples;              /* N */
  int64_t positions;            /* T, or output positions of a convolution */
  int64_t in, out; /* linear: the weight is [out, in]; embedding: [in, out]; convolution: channels; norms: features */
  int32_t spatial; /* convolution: number of dimensions, 1 to 3; lengths, padded with leading ones: */
  int64_t size[3], size_out[3];
} dc__per_sample;

/* Checks x and delta, which must have one type, float32 or float64, and an embedding's indices. */
dc_status dc__per_sample_read(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, dc__per_sample *sample);
/* The same for a linear layer or a convolution in float32, float16 or bfloat16; x and delta may differ. */
dc_status dc__per_sample_read_mixed(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                                    const dc_tensor *delta, dc__per_sample *sample);
/* Checks only the constants of such a layer with `spatial` dimensions. Copies them without filling in defaults. */
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

/* The first counts, the second computes a convolution's patches of one sample and group (im2col.c). They have a row of
 * positions per input channel and kernel element; rows begin `row` elements apart. */
int64_t dc__im2col_numel(const dc__per_sample *s);
void dc__im2col(const dc__per_sample *s, int64_t sample, int32_t group, void *patches, int64_t row);

#endif
