/* Symmetric matrices, internal: loads one matrix, computes its eigenvectors or a function of it, and stores that. */
#ifndef DC_LINALG_EIGH_H
#define DC_LINALG_EIGH_H

#include "linalg/linalg.h"

/* Rows of a triangle that are computed together. The block on the diagonal is computed whole. */
enum { DC__TRIANGLE_BLOCK = 128 };
enum { DC__PROBES = 8 }; /* columns of the power iteration that measures a change */

/* One matrix in progress. Its arrays have room for float64: `s` n * n, `values` 2 n, and `iwork` 5 n + 3 int32. `work`
 * has 6 n * n for Newton's iteration, otherwise the larger of 2 n * n + 3 * DC__PROBES * n + 1 and
 * dc__tridiagonal_work(n). */
typedef struct dc__spectral_task {
  double *values; /* eigenvalues of the scaled matrix; later overwritten */
  void *s, *work;
  int32_t *iwork;
  int32_t status, path;
  int32_t dtype;    /* type of s at present, the compute type */
  int exponent;     /* the matrix is s times 2^exponent */
  bool solved;      /* the rows of s are eigenvectors */
  bool rational;    /* the root of the tridiagonal matrix is in work */
  int64_t row, col; /* where the input is invalid, for the error text */
  double smallest, largest, epsilon, asymmetry, change;
  int32_t iterations; /* of Newton's method */
  double residual;
} dc__spectral_task;

/* Shared by all tasks of a batch. */
typedef struct dc__spectral_job {
  dc_linalg *l;
  const dc__spectral_request *r;
  int64_t n;
  dc__spectral_task *tasks;
  bool serial; /* tasks run side by side, so products stay on their thread */
} dc__spectral_job;

/* Measurements of a matrix by symmetric.c or a device. `finite`: all entries are finite. */
typedef struct dc__symmetric_stats {
  double max_abs;      /* the largest entry */
  double max_combined; /* the largest entry of the triangles' combination, which is the matrix that is decomposed */
  double asymmetry;    /* half the largest difference of two entries that mirror each other */
  bool finite;
} dc__symmetric_stats;

/* The weights with which the lower and the upper triangle are combined; their sum is 1. */
typedef struct dc__symmetric_weights {
  double low, high;
} dc__symmetric_weights;

/* symmetric.c: loads matrix `index` into s, scaled by a power of two so that its largest entry is near 1. Returns
 * false and sets a status if it is not finite or not symmetric. */
bool dc__symmetric_load(const dc__spectral_job *job, int64_t index, dc__spectral_task *t);
dc__symmetric_weights dc__symmetric_weights_of(int32_t symmetry);
/* Checks a matrix by its measurements. Sets exponent and asymmetry, or returns false and sets a status. */
bool dc__symmetric_check(const dc__spectral_job *job, dc__spectral_task *t, const dc__symmetric_stats *stats);
/* Sets row and col to the position of an invalid entry. */
void dc__symmetric_locate(const dc__spectral_job *job, int64_t index, dc__spectral_task *t);
/* Writes the lower triangle of `from` to both triangles of the caller's matrix. Returns false if a value does not
 * fit. */
bool dc__symmetric_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const void *from);
/* Copies the lower triangle of a dense matrix to the upper one. */
void dc__mirror_lower(void *a, int32_t dtype, int64_t n);
/* Stores the rows of s as the columns of the caller's matrix `to`, with `descending` in reverse order. */
void dc__eigenvectors_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const dc__mat *to,
                            bool descending);

/* eigh_solve.c: replaces s by its eigenvectors, in rows, and values by the eigenvalues, ascending, computed in `dtype`.
 * With root > 0 and a suitable spectrum, work becomes the root instead, for dc__rational_root_store() to store. Retries
 * in float64, then with the reference solver. Returns false and sets a status if nothing converges. */
bool dc__eigh_solve(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, int32_t root, int32_t dtype,
                    void *scratch);

/* eigh_reference.c: the same in float64 without LAPACK. a is [n, n], both triangles; work has 3 n elements. Returns
 * false if it does not converge. */
bool dc__eigh_reference(int64_t n, double *a, double *values, double *work);
/* QL for the tridiagonal matrix with diagonal d and off[i] between i and i + 1, off[n - 1] = 0. d becomes its
 * eigenvalues, unsorted. `rows` [n, width] is rotated along: with the identity's first columns it becomes the
 * eigenvectors' first elements. */
bool dc__tridiagonal_ql(int64_t n, double *rows, int64_t width, double *d, double *off);

/* tridiagonal.c: inverse roots without a decomposition. Returns the root p if the power is -1 / p, with p at most
 * DC__MAX_QUADRATURE_ROOT, no basis or rank_rtol, and LAPACK; otherwise 0. */
int32_t dc__rational_root_order(const dc_linalg *l, const dc__spectral_request *r);
/* Elements of `work` that reduction and back transformation need. */
int64_t dc__tridiagonal_work(int64_t n);
/* dc__eigh_solve() by LAPACK alone; s is float64. Returns false, with s overwritten, if that fails. With scratch NULL,
 * products run on the pool. */
bool dc__tridiagonal_solve(const dc__spectral_job *job, dc__spectral_task *t, int32_t root, int32_t dtype,
                           void *scratch);
bool dc__rational_root_store(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* root_quadrature.c: the rule for a root. x^(-1 / root) = sum of weights / (shifts + x) for x in [min_x, 1]. */
void dc__quadrature_init(dc__quadrature_rule *rule, int32_t root);
void dc__quadrature_partial_fractions(const dc__quadrature_rule *rule, double min_x, double *shifts, double *weights);

/* matrix_power.c: maps values, in the matrix's own scale, to the nonnegative numbers that are raised to the power;
 * -1 marks those that a pseudo-inverse leaves out. Sets smallest, largest and epsilon. Returns false and sets a
 * status if a value is not allowed. */
bool dc__regularise_eigenvalues(const dc__spectral_job *job, dc__spectral_task *t);
/* Sets smallest and largest. Returns false and sets a status if eigenvalues overflow the caller's type. */
bool dc__eigh_fits(const dc__spectral_job *job, dc__spectral_task *t);
/* Computes and stores the result from eigenvectors and eigenvalues. Returns false and sets a status if an eigenvalue is
 * not allowed or the result overflows. */
bool dc__spectral_finish(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* root_warm_start.c: computes the root from the caller's basis and stores it. Returns false, with s as it was, if
 * the basis is not near enough. */
bool dc__root_warm_start(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);
static inline bool dc__wants_warm_start(const dc__spectral_request *r) {
  return r->op == DC__SPECTRAL_ROOT && r->basis.data != NULL && r->options.tolerance > 0;
}
/* Fills v with n times DC__PROBES reproducible pseudorandom numbers. The tolerance bounds |Q^T Q v - v|. */
void dc__warm_start_probes(void *v, int32_t dtype, int64_t n);
double dc__orthonormal_tolerance(int32_t dtype);
/* Returns the type for the remaining computation, once the basis is near enough. */
int32_t dc__warm_start_result_dtype(const dc__spectral_request *r, int32_t dtype);

/* orthogonal_iteration.c: refines the eigenvectors in the caller's basis and stores them with their order. Sets
 * DC_E_NOT_CONVERGED if LAPACK fails or an entry becomes nonfinite. */
void dc__orthogonal_iteration_step(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* inverse_root_newton.c: computes the root by Newton's iteration and stores it. The status says whether it
 * converged. */
void dc__newton_cpu(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch);

/* inverse_root_newton_cuda.c, eigh_cuda.c: run a whole request on a device. */
dc_status dc__newton_cuda(dc_linalg *l, const dc__spectral_request *r);
dc_status dc__spectral_cuda(dc_linalg *l, const dc__spectral_request *r);

/* symmetric_cuda.c: initialises a slice's tasks and checks them by host_reports, as dc__symmetric_check() does.
 * `staging` is device memory for one matrix. */
struct dc__batch_slice;
void dc__symmetric_check_slice(struct dc__batch_slice *f, const dc__spectral_job *job, void *staging,
                               dc__spectral_task *tasks);
/* Loads a slice's matrices into s [count, n, n] of type `dtype`, measured and scaled as by dc__symmetric_load(). */
void dc__symmetric_load_slice(struct dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *s);
/* Stores matrices of `from` [count, n, n] that have a bit in `mask` to the caller's `out`, as dc__symmetric_store()
 * does. Sets a task's status to DC_E_NOT_FINITE if its matrix does not fit. Waits for the device. */
void dc__symmetric_store_slice(struct dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *from,
                               uint32_t mask, dc__spectral_task *tasks);
/* Reports a slice's results and records the batch's first failed task and its index. */
void dc__batch_slice_write_info(const struct dc__batch_slice *f, const dc__spectral_request *r,
                                const dc__spectral_task *tasks, dc__spectral_task *failed, int64_t *at);

/* eigh.c: the compute type for a matrix whose largest eigenvalue is at most `bound`. */
int32_t dc__spectral_compute_dtype(const dc__spectral_request *r, double bound);
/* The first writes a matrix's result to the caller's struct, cut to its size. The second sets a failed one's error. */
void dc__spectral_write_info(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index);
dc_status dc__spectral_fail(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index);

/* c = a b, all [n, n]. */
dc__gemm dc__square_gemm(int32_t dtype, int64_t n, const void *a, const void *b, void *c);
/* Computes the lower triangle of a square product, and the parts of the upper one in the same blocks. scratch as for
 * dc__gemm_on(). */
void dc__gemmt(dc__threadpool *pool, const dc__gemm *whole, void *scratch);
/* dc__gemmt() for c [n, n] = op(a) op(b), on the pool or, if the job is serial, on this thread. */
void dc__spectral_gemmt(const dc__spectral_job *job, int32_t dtype, bool trans_a, bool trans_b, const void *a,
                        const void *b, void *c, void *scratch);
/* c = a lower, all [n, n]; above the diagonal `lower` is zero. */
void dc__spectral_trmm(const dc__spectral_job *job, int32_t dtype, const void *a, const void *lower, void *c,
                       void *scratch);
/* c [n, cols] = op(a) b, where b and c are dense. */
void dc__spectral_gemm(const dc__spectral_job *job, int32_t dtype, bool trans_a, const void *a, const void *b,
                       int64_t cols, void *c, void *scratch);

#endif
