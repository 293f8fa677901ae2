/* Symmetric matrices, inside the room: one matrix's way from the caller's memory to its eigenvectors, and back. */
#ifndef DC_LINALG_EIGH_H
#define DC_LINALG_EIGH_H

#include "linalg/linalg.h"

/* Rows of a triangle that are computed together: all of the block on the diagonal is. */
enum { DC__TRIANGLE_BLOCK = 128 };
enum { DC__PROBES = 8 }; /* columns of the power iteration that measures a change */

/* One matrix of a batch under way. Its memory has room for float64: `s` n * n elements, `work` 2 n * n and
 * 3 * DC__PROBES * n more (Newton's iteration 6 n * n, the tridiagonal form dc__tridiagonal_work(n), in all), `values`
 * 2 n, `iwork` 5 n + 3. */
typedef struct dc__spectral_task {
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
} dc__spectral_task;

/* Everything a task needs to know beside itself. */
typedef struct dc__spectral_job {
  dc_linalg *l;
  const dc__spectral_request *r;
  int64_t n;
  dc__spectral_task *tasks;
  bool serial; /* tasks run side by side: products stay on their thread */
} dc__spectral_job;

/* symmetric.c: matrix `index` into s, scaled by a power of two so that its largest entry is near 1; false and a status
 * when it is not finite or not symmetric. */
bool dc__symmetric_load(const dc__spectral_job *job, int64_t index, dc__spectral_task *t);
/* From what was measured of a matrix, whether it can be loaded: sets exponent and asymmetry, or a status. */
bool dc__symmetric_check(const dc__spectral_job *job, dc__spectral_task *t, bool finite, double max_abs,
                         double asymmetry);
/* Where the fault is that was found. */
void dc__symmetric_locate(const dc__spectral_job *job, int64_t index, dc__spectral_task *t);
/* Writes row-major `from` (lower triangle) to the caller's matrix, both triangles; false if a value does not fit. */
bool dc__symmetric_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const void *from);
/* Copies the lower triangle of a dense matrix to the upper one. */
void dc__mirror_lower(void *a, int32_t dtype, int64_t n);
/* The rows of s into the columns of the caller's matrix `to`. */
void dc__eigenvectors_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const dc__mat *to,
                            bool descending);

/* eigh_solve.c: s becomes its eigenvectors of a type, in its rows, and values theirs, ascending; or with root > 0, if
 * the spectrum suits, work the root, which dc__rational_root_store() then stores. Retries in float64, then with the
 * plain solver; false and a status if nothing converges. */
bool dc__eigh_solve(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, int32_t root, int32_t dtype,
                    void *scratch);

/* eigh_reference.c: the same in float64 without LAPACK; a n * n, both triangles. work: 3 n. False: not converged. */
bool dc__eigh_reference(int64_t n, double *a, double *values, double *work);
/* Of the tridiagonal matrix with diagonal d and off[i] between i and i + 1, off[n - 1] = 0: d becomes its eigenvalues,
 * unsorted; its eigenvectors' first elements, or whatever else `rows` [n, width] begins with, turn with them. */
bool dc__tridiagonal_ql(int64_t n, double *rows, int64_t width, double *d, double *off);

/* tridiagonal.c: inverse roots without a decomposition. The root p where a power is -1 / p and what is asked for needs
 * no eigenvectors; otherwise 0. */
int32_t dc__rational_root_order(const dc_linalg *l, const dc__spectral_request *r);
/* Elements of `work` that the way there and back needs. */
int64_t dc__tridiagonal_work(int64_t n);
/* dc__eigh_solve() of s in float64, with LAPACK; false: that failed, and s is spoilt. scratch: NULL: products on the
 * pool. */
bool dc__tridiagonal_solve(const dc__spectral_job *job, dc__spectral_task *t, int32_t root, int32_t dtype,
                           void *scratch);
bool dc__rational_root_store(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* root_quadrature.c: the rule for a root, and x^(-1 / root) = sum of weights / (shifts + x) for x in [min_x, 1]. */
void dc__quadrature_init(dc__quadrature_rule *rule, int32_t root);
void dc__quadrature_partial_fractions(const dc__quadrature_rule *rule, double min_x, double *shifts, double *weights);

/* matrix_power.c: values, in the matrix's own scale, become what the power is taken of, at least 0; -1 marks those that
 * a pseudo-inverse leaves out. Fills in smallest, largest and epsilon; false and a status where it is not allowed. */
bool dc__regularise_eigenvalues(const dc__spectral_job *job, dc__spectral_task *t);
/* Fills in smallest and largest; false and a status where eigenvalues do not fit the caller's type. */
bool dc__eigh_fits(const dc__spectral_job *job, dc__spectral_task *t);
/* From eigenvectors and eigenvalues to the caller's result; false and a status where it does not fit. */
bool dc__spectral_finish(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* root_warm_start.c: the root from the caller's basis, stored; false: not near enough, and s is as it was. */
bool dc__root_warm_start(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);
static inline bool dc__wants_warm_start(const dc__spectral_request *r) {
  return r->op == DC__SPECTRAL_ROOT && r->basis.data != NULL && r->options.tolerance > 0;
}
/* n times DC__PROBES numbers v that look random and are the same in every run; how far Q^T Q v may be from them. */
void dc__warm_start_probes(void *v, int32_t dtype, int64_t n);
double dc__orthonormal_tolerance(int32_t dtype);
/* In which type what is left is computed, once the basis is near enough. */
int32_t dc__warm_start_result_dtype(const dc__spectral_request *r, int32_t dtype);

/* orthogonal_iteration.c: eigenvectors from the caller's basis, stored, with their order; a status where something is
 * not finite. */
void dc__orthogonal_iteration_step(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* inverse_root_newton.c: the root by Newton's iteration, stored; the status says whether it is near enough. */
void dc__newton_cpu(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* inverse_root_newton_cuda.c, eigh_cuda.c: a whole request, on a device. */
dc_status dc__newton_cuda(dc_linalg *l, const dc__spectral_request *r);
dc_status dc__spectral_cuda(dc_linalg *l, const dc__spectral_request *r);

/* symmetric_cuda.c: tasks of a flight begin by what was measured of the caller's matrices, as dc__symmetric_check()
 * has it. through: memory of the device for one of them. */
struct dc__batch_slice;
void dc__symmetric_check_slice(struct dc__batch_slice *f, const dc__spectral_job *job, void *staging,
                               dc__spectral_task *tasks);
/* The matrices into s [count, n, n] of a type, measured and scaled as dc__symmetric_load() does it. */
void dc__symmetric_load_slice(struct dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *s);
/* What has its bit in `mask`, of `from` [count, n, n], to the caller's `out`, as dc__symmetric_store() does it;
 * DC_E_NOT_FINITE where a value does not fit. Waits. */
void dc__symmetric_store_slice(struct dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *from,
                               uint32_t mask, dc__spectral_task *tasks);
/* The reports of a flight; the batch's first task that failed, and where it is, are kept. */
void dc__batch_slice_write_info(const struct dc__batch_slice *f, const dc__spectral_request *r,
                                const dc__spectral_task *tasks, dc__spectral_task *failed, int64_t *at);

/* eigh.c: in which type a matrix is decomposed whose largest eigenvalue is at most `bound`. */
int32_t dc__spectral_compute_dtype(const dc__spectral_request *r, double bound);
/* One matrix's report in the caller's struct, as far as that goes; the error of one that failed. */
void dc__spectral_write_info(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index);
dc_status dc__spectral_fail(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index);

/* c = a b, all [n, n]. */
dc__gemm dc__square_gemm(int32_t dtype, int64_t n, const void *a, const void *b, void *c);
/* The lower triangle of a square product, and what of the upper one is in the same blocks; scratch as for
 * dc__gemm_on(). */
void dc__gemmt(dc__threadpool *pool, const dc__gemm *whole, void *scratch);
/* The lower triangle of c [n, n] = op(a) b (or a b^T): rows of blocks, on the pool or on this thread. */
void dc__spectral_gemmt(const dc__spectral_job *job, int32_t dtype, bool trans_a, bool trans_b, const void *a,
                        const void *b, void *c, void *scratch);
/* c = a lower, all [n, n]; above the diagonal `lower` is zero. */
void dc__spectral_trmm(const dc__spectral_job *job, int32_t dtype, const void *a, const void *lower, void *c,
                       void *scratch);
/* All of it. cols: columns of b and c, which are dense. */
void dc__spectral_gemm(const dc__spectral_job *job, int32_t dtype, bool trans_a, const void *a, const void *b,
                       int64_t cols, void *c, void *scratch);

#endif
