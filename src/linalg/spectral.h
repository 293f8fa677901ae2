/* Symmetric matrices, inside the room: one matrix's way from the caller's memory to its eigenvectors, and back. */
#ifndef DC_LINALG_SPECTRAL_H
#define DC_LINALG_SPECTRAL_H

#include "linalg/linalg.h"

/* Rows of a triangle that are computed together: all of the block on the diagonal is. */
enum { DC__TRIANGLE_BLOCK = 128 };
enum { DC__PROBES = 8 }; /* columns of the power iteration that measures a change */

/* One matrix of a batch under way. Its memory has room for float64: `s` n * n elements, `work` 2 n * n and
 * 3 * DC__PROBES * n more (Newton's iteration 6 n * n, the tridiagonal form dc__tridiagonal_work(n), in all), `values`
 * 2 n, `iwork` 5 n + 3. */
typedef struct dc__task {
  double *values; /* eigenvalues of the scaled matrix; after finishing, whatever was needed */
  void *s, *work;
  int32_t *iwork;
  int32_t status, path;
  int32_t dtype;    /* of s now: the computing type */
  int exponent;     /* the matrix is s times 2^exponent */
  bool solved;      /* the rows of s are eigenvectors */
  bool rational;    /* the root of the tridiagonal matrix is in work */
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
/* From what was measured of a matrix, whether it can be loaded: sets exponent and asymmetry, or a status. */
bool dc__symmetric_check(const dc__job *job, dc__task *t, bool finite, double most, double apart);
/* Where the fault is that was found. */
void dc__symmetric_locate(const dc__job *job, int64_t index, dc__task *t);
/* Writes row-major `from` (lower triangle) to the caller's matrix, both triangles; false if a value does not fit. */
bool dc__symmetric_store(const dc__job *job, int64_t index, const dc__task *t, const void *from);
/* Copies the lower triangle of a dense matrix to the upper one. */
void dc__mirror(void *a, int32_t dtype, int64_t n);
/* The rows of s into the columns of the caller's matrix `to`. */
void dc__vectors_store(const dc__job *job, int64_t index, const dc__task *t, const dc__mat *to, bool descending);

/* decompose.c: s becomes its eigenvectors of a type, in its rows, and values theirs, ascending; or with root > 0, if
 * the spectrum suits, work the root, which dc__rational_finish() then stores. Retries in float64, then with the plain
 * solver; false and a status if nothing converges. */
bool dc__decompose(const dc__job *job, int64_t index, dc__task *t, int32_t root, int32_t dtype, void *scratch);

/* eigen_plain.c: the same in float64 without LAPACK; a n * n, both triangles. work: 3 n. False: not converged. */
bool dc__eigen_plain(int64_t n, double *a, double *values, double *work);
/* Of the tridiagonal matrix with diagonal d and off[i] between i and i + 1, off[n - 1] = 0: d becomes its eigenvalues,
 * unsorted; its eigenvectors' first elements, or whatever else `rows` [n, width] begins with, turn with them. */
bool dc__tridiagonal_ql(int64_t n, double *rows, int64_t width, double *d, double *off);

/* tridiagonal.c: inverse roots without a decomposition. The root p where a power is -1 / p and what is asked for needs
 * no eigenvectors; otherwise 0. */
int32_t dc__rational_root(const dc_linalg *l, const dc__spectral *r);
/* Elements of `work` that the way there and back needs. */
int64_t dc__tridiagonal_work(int64_t n);
/* dc__decompose() of s in float64, with LAPACK; false: that failed, and s is spoilt. scratch: NULL: products on the
 * pool. */
bool dc__tridiagonal_solve(const dc__job *job, dc__task *t, int32_t root, int32_t dtype, void *scratch);
bool dc__rational_finish(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* quadrature.c: the rule for a root, and x^(-1 / root) = sum of weights / (shifts + x) for x in [least, 1]. */
void dc__rule_open(dc__rule *rule, int32_t root);
void dc__rule_fractions(const dc__rule *rule, double least, double *shifts, double *weights);

/* power.c: values, in the matrix's own scale, become what the power is taken of, at least 0; -1 marks those that a
 * pseudo-inverse leaves out. Fills in smallest, largest and epsilon; false and a status where it is not allowed. */
bool dc__regularise(const dc__job *job, dc__task *t);
/* Fills in smallest and largest; false and a status where eigenvalues do not fit the caller's type. */
bool dc__eigh_fits(const dc__job *job, dc__task *t);
/* From eigenvectors and eigenvalues to the caller's result; false and a status where it does not fit. */
bool dc__finish(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* warm.c: the root from the caller's basis, stored; false: not near enough, and s is as it was. */
bool dc__warm(const dc__job *job, int64_t index, dc__task *t, void *scratch);
static inline bool dc__wants_warm(const dc__spectral *r) {
  return r->op == DC__SPECTRAL_ROOT && r->basis.data != NULL && r->options.tolerance > 0;
}
/* n times DC__PROBES numbers v that look random and are the same in every run; how far Q^T Q v may be from them. */
void dc__warm_noise(void *v, int32_t dtype, int64_t n);
double dc__warm_limit(int32_t dtype);
/* In which type what is left is computed, once the basis is near enough. */
int32_t dc__warm_finishing_type(const dc__spectral *r, int32_t dtype);

/* basis.c: eigenvectors from the caller's basis, stored, with their order; a status where something is not finite. */
void dc__basis_step(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* newton.c: the root by Newton's iteration, stored; the status says whether it is near enough. */
void dc__newton_here(const dc__job *job, int64_t index, dc__task *t, void *scratch);

/* newton_there.c, spectral_there.c: a whole request, on a device. */
dc_status dc__newton_there(dc_linalg *l, const dc__spectral *r);
dc_status dc__spectral_there(dc_linalg *l, const dc__spectral *r);

/* symmetric_there.c: tasks of a flight begin by what was measured of the caller's matrices, as dc__symmetric_check()
 * has it. through: memory of the device for one of them. */
struct dc__flight;
void dc__symmetric_seen(struct dc__flight *f, const dc__job *job, void *through, dc__task *tasks);
/* The matrices into s [count, n, n] of a type, measured and scaled as dc__symmetric_load() does it. */
void dc__symmetric_bring(struct dc__flight *f, const dc__job *job, int32_t dtype, void *s);
/* What has its bit in `mask`, of `from` [count, n, n], to the caller's `out`, as dc__symmetric_store() does it;
 * DC_E_NOT_FINITE where a value does not fit. Waits. */
void dc__symmetric_give(struct dc__flight *f, const dc__job *job, int32_t dtype, void *from, uint32_t mask,
                        dc__task *tasks);
/* The reports of a flight; the batch's first task that failed, and where it is, are kept. */
void dc__flight_report(const struct dc__flight *f, const dc__spectral *r, const dc__task *tasks, dc__task *failed,
                       int64_t *at);

/* spectral.c: in which type a matrix is decomposed whose largest eigenvalue is at most `bound`. */
int32_t dc__computing_type(const dc__spectral *r, double bound);
/* One matrix's report in the caller's struct, as far as that goes; the error of one that failed. */
void dc__spectral_write_info(const dc__spectral *r, const dc__task *t, int64_t index);
dc_status dc__spectral_explain(const dc__spectral *r, const dc__task *t, int64_t index);

/* c = a b, all [n, n]. */
dc__gemm dc__square_product(int32_t dtype, int64_t n, const void *a, const void *b, void *c);
/* The lower triangle of a square product, and what of the upper one is in the same blocks; scratch as for
 * dc__gemm_on(). */
void dc__triangle(dc__pool *pool, const dc__gemm *whole, void *scratch);
/* The lower triangle of c [n, n] = op(a) b (or a b^T): rows of blocks, on the pool or on this thread. */
void dc__half_product(const dc__job *job, int32_t dtype, bool trans_a, bool trans_b, const void *a, const void *b,
                      void *c, void *scratch);
/* c = a lower, all [n, n]; above the diagonal `lower` is zero. */
void dc__triangular_product(const dc__job *job, int32_t dtype, const void *a, const void *lower, void *c,
                            void *scratch);
/* All of it. cols: columns of b and c, which are dense. */
void dc__full_product(const dc__job *job, int32_t dtype, bool trans_a, const void *a, const void *b, int64_t cols,
                      void *c, void *scratch);

#endif
