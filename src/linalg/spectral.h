/* Symmetric matrices, inside the room: one matrix's way from the caller's memory to its eigenvectors, and back. */
#ifndef DC_LINALG_SPECTRAL_H
#define DC_LINALG_SPECTRAL_H

#include "linalg/linalg.h"

enum { DC__PROBES = 8 }; /* columns of the power iteration that measures a change */

/* One matrix of a batch under way. Its memory has room for float64: `s` n * n elements, `work` 2 n * n and
 * 3 * DC__PROBES * n more (LAPACK wants 6 n + 1; Newton's iteration 6 n * n in all), `values` 2 n, `iwork` 5 n + 3. */
typedef struct dc__task {
  double *values; /* eigenvalues of the scaled matrix; after finishing, whatever was needed */
  void *s, *work;
  int32_t *iwork;
  int32_t status, path;
  int32_t dtype;    /* of s now: the computing type */
  int exponent;     /* the matrix is s times 2^exponent */
  bool solved;      /* the rows of s are eigenvectors */
  int64_t row, col; /* where the fault is, for the error's text */
  double smallest, largest, epsilon, asymmetry, change;
  int32_t iterations; /* Newton's */
  double residual;
} dc__task;

/* Everything a task needs to know beside itself. */
typedef struct dc__job {
  dc_linalg *l;
  const dc__spectral *r;
  int64_t n;
  dc__task *tasks;
  bool inside; /* tasks run side by side: products stay on their thread */
} dc__job;

/* symmetric.c: matrix `index` into s, scaled by a power of two so that its largest entry is near 1; false and a status
 * when it is not finite or not symmetric. */
bool dc__symmetric_load(const dc__job *job, int64_t index, dc__task *t);
/* Writes row-major `from` (lower triangle) to the caller's matrix, both triangles; false if a value does not fit. */
bool dc__symmetric_store(const dc__job *job, int64_t index, const dc__task *t, const void *from);
/* Copies the lower triangle of a dense matrix to the upper one. */
void dc__mirror(void *a, int32_t dtype, int64_t n);
/* The rows of s into the columns of the caller's matrix `to`. */
void dc__vectors_store(const dc__job *job, int64_t index, const dc__task *t, const dc__mat *to, bool descending);

/* decompose.c: s becomes its eigenvectors, in its rows, and values theirs, ascending. Retries in float64, then with the
 * plain solver; false and a status if nothing converges. */
bool dc__decompose(const dc__job *job, int64_t index, dc__task *t);

/* eigen_plain.c: the same in float64 without LAPACK; a n * n, both triangles. work: 3 n. False: not converged. */
bool dc__eigen_plain(int64_t n, double *a, double *values, double *work);

/* power.c: values, in the matrix's own scale, become what the power is taken of, at least 0; -1 marks those that a
 * pseudo-inverse leaves out. Fills in smallest, largest and epsilon; false and a status where it is not allowed. */
bool dc__regularise(const dc__job *job, dc__task *t);
/* From eigenvectors and eigenvalues to the caller's result; false and a status where it does not fit. */
bool dc__finish(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* warm.c: the root from the caller's basis, stored; false: not near enough, and s is as it was. */
bool dc__warm(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* newton.c: the root by Newton's iteration, stored; the status says whether it is near enough. */
void dc__newton(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* The lower triangle of c [n, n] = op(a) b (or a b^T): rows of blocks, on the pool or on this thread. */
void dc__half_product(const dc__job *job, int32_t dtype, bool trans_a, bool trans_b, const void *a, const void *b,
                      void *c, void *scratch);
/* c = a lower, all [n, n]; above the diagonal `lower` is zero. */
void dc__triangular_product(const dc__job *job, int32_t dtype, const void *a, const void *lower, void *c,
                            void *scratch);
/* All of it. cols: columns of b and c, which are dense. */
void dc__full_product(const dc__job *job, int32_t dtype, bool trans_a, const void *a, const void *b, int64_t cols,
                      void *c, void *scratch);

/* A place of the caller's matrix `index`. */
static inline int64_t dc__place(const dc__mat *m, int64_t index, int64_t i, int64_t j) {
  return index * m->batch_stride + i * m->row_stride + j * m->col_stride;
}

#endif
