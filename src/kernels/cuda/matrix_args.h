/* The arguments of the kernels for matrices (matrix.cu), as the host and the device see them. A flight is a few
 * matrices of a batch that go through the operators together; a grid's second axis, or its third, is the matrix. */
#ifndef DC_KERNELS_CUDA_MATRIX_ARGS_H
#define DC_KERNELS_CUDA_MATRIX_ARGS_H

#include "kernels/eigen/nearest_kron.h"
#include "kernels/eigen/newton_convergence.h"

enum {
  DC__CUDA_MATRIX_THREADS = 256,
  DC__CUDA_TILE_THREADS = 128,
  DC__CUDA_MATRIX_TILE = 32,
  DC__CUDA_BATCH_SLICE = 32
};

/* A batch of matrices as strides in elements, float32 or float64. */
typedef struct dc__cuda_matrices {
  void *data;
  void *const *places; /* of the device: where each matrix begins, instead of data and batch_stride; NULL: no */
  int64_t batch_stride, row_stride, col_stride;
  int64_t rows, cols;
  int32_t count, wide; /* wide: float64 */
} dc__cuda_matrices;

/* What the device knows of a matrix. Magnitudes are the bits of a double, which lie in the order of the numbers, and
 * NaN after all of them: whatever the order of threads, the largest is the same. */
typedef struct dc__cuda_matrix_stats {
  uint64_t most;     /* the largest entry */
  uint64_t apart;    /* half the largest difference of two entries that mirror each other */
  uint64_t distance; /* from I */
  double fold;       /* of the sums of rows */
  int32_t refused;   /* the last step */
  int32_t reserved;
  dc__newton_state newton;
} dc__cuda_matrix_stats;

/* `most` of each matrix and, where `mirrored`, which needs square ones, `apart`. */
typedef struct dc__cuda_measure_args {
  dc__cuda_matrices from;
  dc__cuda_matrix_stats *reports;
  int32_t mirrored;
} dc__cuda_measure_args;

/* to = from times factor; from square ones' entries on both sides of the diagonal, so that `to` is symmetric, where low
 * + high is not 0: low of the lower triangle and high of the upper one. With reports, the factor is the power of two
 * that brings `most` near 1, or with `unit` 1 over the length, the root of `fold`, or over unit if that is more. Only
 * matrices with their bit in `mask` are written. */
typedef struct dc__cuda_load_args {
  dc__cuda_matrices from, to;
  const dc__cuda_matrix_stats *reports; /* NULL: factors */
  double low, high;
  double unit; /* 0: none */
  uint32_t mask;
  double factor[DC__CUDA_BATCH_SLICE];
} dc__cuda_load_args;

/* `fold`: the largest sum of a row's magnitudes, or with `squares` the sum of all squares. sums [count, rows]. */
typedef struct dc__cuda_matrix_norm_args {
  dc__cuda_matrices from;
  double *sums;
  dc__cuda_matrix_stats *reports;
  int32_t squares;
} dc__cuda_matrix_norm_args;

/* to = factor from + shift I, both dense; with reports, to = I where Newton's iteration has ended. */
typedef struct dc__cuda_affine_args {
  const void *from;
  void *to;
  const dc__cuda_matrix_stats *reports;
  int64_t rows, cols;
  int32_t count, wide;
  double factor[DC__CUDA_BATCH_SLICE], shift[DC__CUDA_BATCH_SLICE];
} dc__cuda_affine_args;

/* A step of Newton's iteration: the distance of m from I, m's lower triangle mirrored; what becomes of the step; and,
 * where it is refused, next = x. All dense [count, n, n]. */
typedef struct dc__cuda_newton_args {
  void *m;
  const void *x;
  void *next;
  dc__cuda_matrix_stats *reports;
  int64_t n;
  uint32_t rough; /* a bit a matrix */
  int32_t count, wide;
  int32_t ended; /* 1: those that have ended too */
} dc__cuda_newton_args;

/* x[i][j] *= factors[i], x [count, rows, cols] and dense, factors [count, rows]. */
typedef struct dc__cuda_scale_args {
  void *x;
  const double *factors;
  int64_t rows, cols;
  int32_t count, wide;
} dc__cuda_scale_args;

/* Of B = Q^T A Q, whose lower triangle `from` has, times 2^exponent, to an array of its own, both [count, n, n] and
 * dense: REST: D^-1/2 E D^-1/2, E what is beside the diagonal and factors [count, n] D^-1/2; ROOT: the lower triangular
 * G of linalg/roots/root_warm_start.c, factors D^(1/root). */
typedef struct dc__cuda_warm_start_args {
  const void *from;
  void *to;
  const double *factors;
  int64_t n;
  int32_t count, wide, to_wide;
  int32_t root;
  double first[DC__CUDA_BATCH_SLICE], second[DC__CUDA_BATCH_SLICE]; /* 2^exponent as a product */
} dc__cuda_warm_start_args;

/* A step of orthogonal iteration (linalg/eigh/orthogonal_iteration_cuda.c), all [count, n, n] dense with a vector a
 * row: the order of the vectors q, the largest first, by `values`, their products with their images p; the images in
 * that order, to `sorted`; and what QR has made of those into the columns of the matrices at `to`, where all of it was
 * done and is finite. */
typedef struct dc__cuda_basis_args {
  const float *q, *p;
  float *sorted;
  double *values; /* [count, n] */
  const dc__cuda_matrix_stats *reports;
  void *const *to;        /* of the device, as the next: where each matrix begins, */
  int64_t *const *orders; /* and each order [n]: that of the images, or 0, 1, ... where the matrix stays as it was */
  int32_t *found;         /* [count, 2]: not 0 until QR says so */
  int32_t *failed;        /* [count]: 1 where it stays */
  int64_t n;
  int32_t count;
} dc__cuda_basis_args;

/* to = a kron b. */
typedef struct dc__cuda_kron_args {
  dc__cuda_matrices a, b, to;
} dc__cuda_kron_args;

/* The power iteration for the nearest Kronecker product. x times `first` times `second` as a matrix of blocks, with u
 * [m, n] on the left and v [p, q] on the right; all float64 but x. A vector is made in chunks of the blocks' rows, each
 * chunk of `parts` [chunks, elements]; then `fresh`, with its squares by blocks of threads; then normalised. */
enum { DC__CUDA_NEAREST_BLOCKS = 256 };
typedef struct dc__cuda_nearest_result {
  dc__nearest_state state;
  uint64_t moved; /* the bits of how far v moved */
  double trace;   /* of v */
} dc__cuda_nearest_result;
typedef struct dc__cuda_nearest_args {
  dc__cuda_matrices x;
  double first, second;
  int64_t m, n, p, q;
  double *u, *v, *parts, *fresh, *squares, *traces; /* the last two [DC__CUDA_NEAREST_BLOCKS] */
  double *apart;                                    /* [2, m p] */
  dc__cuda_nearest_result *found;
  double enough;
  int32_t chunks[2]; /* of v and of u */
  int32_t inner;     /* 1: v is made, 0: u */
} dc__cuda_nearest_args;

/* x[i][j] /= a[i] b[j] + damping, x dense [count, rows, cols]. *refused becomes 1 where that is not positive; NULL:
 * nobody wants to know. */
typedef struct dc__cuda_damp_args {
  void *x;
  const void *a, *b; /* [count, rows], [count, cols] */
  int64_t count, rows, cols;
  double damping;
  uint64_t *refused;
  int32_t wide;
} dc__cuda_damp_args;

#endif
