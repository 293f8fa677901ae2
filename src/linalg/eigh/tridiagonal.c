/* Symmetric matrices by tridiagonal form. Householder reflections reduce A to a tridiagonal T = Q^T A Q. Its inverse
 * root is a sum of inverses (root_quadrature.c), each with one multiplication per entry. The reflections, applied
 * from both sides, give Q f(T) Q^T. If the spectrum does not suit, LAPACK's divide and conquer solves T, and the
 * reflections transform its eigenvectors to those of A. Rows are reduced from the last one up, so the rest is the
 * leading block, and each row's reflection stays in place. A panel of rows is reduced before the rest of the matrix
 * is updated, as in LAPACK (Dongarra, Hammarling and Sorensen, 1989). Reduction and back transformation both end in
 * matrix products. */
#include <math.h>
#include <string.h>

#include "linalg/eigh/tridiagonal.h"

enum { MAX_PANEL = 32 }; /* rows that are reduced together */

static int64_t panel_rows(int64_t n) {
  return n < 256 ? 16 : MAX_PANEL;
}

/* LAPACK's workspace for eigenvectors of T. */
static int64_t solve_stedc_work(int64_t n) {
  return n * n + 4 * n + 1;
}

int64_t dc__tridiagonal_work(int64_t n) {
  int64_t panels =
      4 * DC__REFLECTOR_BLOCK * n + 5 * DC__REFLECTOR_BLOCK * DC__REFLECTOR_BLOCK + DC__TRIDIAGONAL_SCRATCH(n);
  return n * n + 3 * n + (panels > solve_stedc_work(n) ? panels : solve_stedc_work(n));
}

/* The form begins in the task's type. */
static dc__tridiagonal_form make_form(const dc__spectral_job *job, dc__spectral_task *t, void *scratch) {
  int64_t n = job->n;
  dc__tridiagonal_form w = {.job = job, .t = t, .scratch = scratch, .n = n, .dtype = t->dtype, .a = t->s, .f = t->work};
  w.d = (double *)t->work + n * n;
  w.off = w.d + n;
  w.tau = w.off + n;
  double *panels = w.tau + n;
  w.p = panels;
  w.q = panels + 2 * DC__REFLECTOR_BLOCK * n;
  w.rest = panels + 4 * DC__REFLECTOR_BLOCK * n;
  return w;
}

/* The largest entry of the matrix is at least 1 and below 2. Squares below this have few digits or none, and the
 * reflection would not be orthogonal; the elements that are dropped instead are below 2^-480. */
#define LEAST_SQUARE 0x1p-960

/* Makes v[0, row) the Householder vector that zeroes all elements before row - 1; v[row - 1] is 1, and the rest up to
 * `end` is 0. Sets T's entries *d and *off. Returns the vector's factor. */
static double make_householder(double *v, int64_t row, int64_t end, double *d, double *off) {
  double square = 0;
  dc__tridiagonal_gemv(&square, v, 0, 1, v, row - 1);
  double last = v[row - 1];
  *d = v[row];
  *off = last;
  double factor = 0;
  if (square > LEAST_SQUARE) {
    double norm = -copysign(sqrt(last * last + square), last);
    double scale = 1 / (last - norm);
    for (int64_t j = 0; j < row - 1; j++) {
      v[j] *= scale;
    }
    factor = (norm - last) / norm;
    *off = norm;
  }
  v[row - 1] = 1;
  memset(v + row, 0, (size_t)(end - row) * sizeof *v);
  return factor;
}

/* y -= X^T (Z x) for `count` rows of X and Z that are n apart, up to column `across`. */
static void subtract_panel(double *y, const double *x_rows, const double *z_rows, int64_t count, const double *x,
                           int64_t n, int64_t across) {
  double factors[MAX_PANEL];
  dc__tridiagonal_gemv(factors, z_rows, n, count, x, across);
  for (int64_t k = 0; k < count; k++) {
    factors[k] = -factors[k];
  }
  dc__tridiagonal_gemv_t(y, x_rows, n, count, factors, across);
}

/* Updates row `row` by the panel's rows below it, up to `end`. `rows` has their vectors w of reduce_row(). */
static void update_row(const dc__tridiagonal_form *w, int64_t row, int64_t end, const double *rows) {
  int64_t n = w->n;
  int64_t count = end - row - 1;
  double *v = w->a + row * n;
  double of_v[MAX_PANEL], of_w[MAX_PANEL];
  for (int64_t k = 0; k < count; k++) {
    of_v[k] = -w->a[(row + 1 + k) * n + row];
    of_w[k] = -rows[(k + 1) * n + row];
  }
  dc__tridiagonal_gemv_t(v, rows + n, n, count, of_v, row + 1);
  dc__tridiagonal_gemv_t(v, v + n, n, count, of_w, row + 1);
}

/* Computes the reflection v of row `row`, in place, and in `rows` the w with which A becomes A - v w^T - w v^T. */
static void reduce_row(const dc__tridiagonal_form *w, int64_t row, int64_t end, double *rows) {
  int64_t n = w->n;
  int64_t count = end - row - 1;
  double *v = w->a + row * n;
  update_row(w, row, end, rows);
  double factor = w->tau[row] = make_householder(v, row, end, &w->d[row], &w->off[row]);
  if (factor == 0) {
    memset(rows, 0, (size_t)row * sizeof *rows);
    return;
  }
  dc__tridiagonal_symv(rows, w->a, n, v, row);
  subtract_panel(rows, v + n, rows + n, count, v, n, row);
  subtract_panel(rows, rows + n, v + n, count, v, n, row);
  double along;
  dc__tridiagonal_gemv(&along, rows, 0, 1, v, row);
  for (int64_t j = 0; j < row; j++) {
    rows[j] = factor * (rows[j] - factor * along / 2 * v[j]);
  }
}

void dc__tridiagonal_syr2k(const dc__tridiagonal_form *w, int64_t m, int64_t depth, void *c) {
  dc__gemm g = {.dtype = w->dtype,
                .out_dtype = w->dtype,
                .trans_a = true,
                .m = m,
                .n = m,
                .k = depth,
                .a = w->p,
                .b = w->q,
                .c = c,
                .lda = w->n,
                .ldb = w->n,
                .ldc = w->n,
                .batch = 1,
                .alpha = -1,
                .beta = 1};
  dc__gemmt(dc__tridiagonal_pool(w), &g, w->scratch);
}

/* Reduces A to T, and leaves the reflections in A's rows. */
static void reduce_to_tridiagonal(const dc__tridiagonal_form *w) {
  int64_t n = w->n;
  int64_t panel = panel_rows(n);
  for (int64_t end = n; end > 1; end -= panel) {
    int64_t begin = end > panel + 1 ? end - panel : 1;
    int64_t count = end - begin;
    double *p = w->p, *q = w->q;
    double *rows = p + count * n; /* the vectors w; the vectors v go in front of them */
    for (int64_t row = end - 1; row >= begin; row--) {
      reduce_row(w, row, end, rows + (row - begin) * n);
    }
    size_t bytes = (size_t)(count * n) * sizeof(double);
    memcpy(p, w->a + begin * n, bytes);
    memcpy(q, rows, bytes);
    memcpy(q + count * n, p, bytes);
    dc__tridiagonal_syr2k(w, begin, 2 * count, w->a);
  }
  w->d[0] = w->a[0];
  w->off[0] = w->tau[0] = 0;
}

/* ---- roots ---- */

static const double RANGE = 1e-12; /* the least allowed ratio of regularised eigenvalues: root_quadrature.c */
static const double FAR = 1e100;   /* regularised eigenvalues are above 1 / FAR and below FAR times the largest entry */
static const double NEAR = 64;     /* up to this ratio of the root's eigenvalues float32 is enough */

int32_t dc__rational_root_order(const dc_linalg *l, const dc__spectral_request *r) {
  double root = r->op == DC__SPECTRAL_ROOT || r->op == DC__SPECTRAL_POWER ? -1 / r->power : 0;
  bool whole = root >= 1 && root <= DC__MAX_QUADRATURE_ROOT && root == rint(root) && -1 / root == r->power;
  bool plain = l->blas == NULL || r->basis.data != NULL || r->options.rank_rtol != 0;
  return whole && !plain ? (int32_t)root : 0;
}

/* Whether the back transformation may run in float32: its loss is no larger than rounding the result. */
static bool allows_float32(const dc__spectral_job *job) {
  return job->r->out.dtype == DC_FLOAT32 && job->r->options.precision != DC_FLOAT64;
}

/* Converts the lower triangle of F to float32 in place. */
static void cast_result(const dc__tridiagonal_form *w) {
  const double *f = w->f;
  float *narrowed = w->f;
  float *row = w->p;
  for (int64_t i = 0; i < w->n; i++) {
    dc__cast(row, DC_FLOAT32, f + i * w->n, DC_FLOAT64, i + 1);
    memcpy(narrowed + i * w->n, row, (size_t)(i + 1) * sizeof *row);
  }
  w->t->dtype = DC_FLOAT32;
}

/* Computes the root of T in F. Returns false if the spectrum does not suit. */
static bool rational_root(const dc__tridiagonal_form *w, int32_t root) {
  const dc__spectral_job *job = w->job;
  dc__spectral_task *t = w->t;
  int64_t n = w->n;
  double min_eig, max_eig;
  dc__tridiagonal_eigenvalue_bounds(w->d, w->off, n, &min_eig, &max_eig);
  double unit = ldexp(1, -t->exponent);
  double epsilon = fmax(job->r->options.eps_abs * unit, job->r->options.eps_rel * fmax(max_eig, 0));
  double low = fmax(min_eig, 0) + epsilon;
  double high = fmax(max_eig, 0) + epsilon;
  bool suits = min_eig >= -(double)n * dc__epsilon(DC_FLOAT64) * fmax(max_eig, 0) && low >= RANGE * high &&
               low > 1 / FAR && high < FAR;
  if (!suits) {
    return false;
  }
  t->smallest = ldexp(min_eig, t->exponent);
  t->largest = ldexp(max_eig, t->exponent);
  t->epsilon = fmax(job->r->options.eps_abs, job->r->options.eps_rel * fmax(t->largest, 0));
  double shifts[DC__TRIDIAGONAL_SHIFTS], weights[DC__TRIDIAGONAL_SHIFTS];
  dc__quadrature_partial_fractions(&job->l->rules[root - 1], low / high, shifts, weights);
  double unit_root = exp2(-t->exponent / (double)root);
  bool is_tiny = unit_root < 1 / FAR; /* inverses drop tiny entries, so the result is scaled afterwards */
  double scale = pow(high, 1 - 1 / (double)root) * (is_tiny ? 1 : unit_root);
  for (int64_t k = 0; k < DC__TRIDIAGONAL_SHIFTS; k++) {
    shifts[k] *= high;
    weights[k] *= scale;
  }
  for (int64_t i = 0; i < n; i++) {
    w->d[i] += epsilon;
  }
  dc__tridiagonal_shifted_inverses(w->f, w->d, w->off, n, shifts, weights, w->rest);
  for (int64_t i = 0; i < n * n && is_tiny; i++) {
    ((double *)w->f)[i] *= unit_root;
  }
  if (pow(high / low, 1 / (double)root) <= NEAR && allows_float32(job)) {
    cast_result(w);
  }
  return true;
}

bool dc__rational_root_store(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  dc__tridiagonal_form w = make_form(job, t, scratch);
  dc__mirror_lower(w.f, w.dtype, job->n);
  dc__back_transform_matrix(&w);
  t->path = DC_PATH_FRESH;
  if (!dc__symmetric_store(job, index, t, w.f)) {
    t->status = DC_E_NOT_FINITE;
    return false;
  }
  return true;
}

/* ---- eigenvectors ---- */

static bool finite_values(const dc__spectral_task *t, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(t->values[i])) {
      return false;
    }
  }
  return true;
}

/* Computes T's eigenvalues in the task's `values` and its eigenvectors in F's rows, in `dtype`. LAPACK's info is not
 * enough: OpenBLAS can return 0 with values that are not finite. */
static bool solve_stedc(const dc__tridiagonal_form *w, int32_t dtype, bool vectors) {
  dc__spectral_task *t = w->t;
  const dc__blas *blas = w->job->l->blas;
  int64_t n = w->n;
  const char *what = vectors ? "I" : "N";
  int32_t order = (int32_t)n;
  int32_t size = (int32_t)solve_stedc_work(n);
  int32_t isize = (int32_t)(3 + 5 * n);
  int32_t info = 0;
  void *off = t->values + n;
  if (dtype == DC_FLOAT64) {
    memcpy(t->values, w->d, (size_t)n * sizeof(double));
    memcpy(off, w->off + 1, (size_t)(n - 1) * sizeof(double));
    blas->dstedc(what, &order, t->values, off, w->f, &order, w->p, &size, t->iwork, &isize, &info, 1);
  } else {
    float *d = (float *)off + n; /* float32 d and off fit into the memory of float64 off */
    dc__cast(d, DC_FLOAT32, w->d, DC_FLOAT64, n);
    dc__cast(off, DC_FLOAT32, w->off + 1, DC_FLOAT64, n - 1);
    blas->sstedc(what, &order, d, off, w->f, &order, w->p, &size, t->iwork, &isize, &info, 1);
    dc__cast(t->values, DC_FLOAT64, d, DC_FLOAT32, n);
  }
  return info == 0 && finite_values(t, n);
}

/* Replaces the rows of s by the eigenvectors of A; in float32 first, if requested. */
static bool solve_tridiagonal(dc__tridiagonal_form *w, int32_t dtype) {
  dc__spectral_task *t = w->t;
  bool vectors = w->job->r->op != DC__SPECTRAL_EIGH || w->job->r->vectors;
  t->path = DC_PATH_FRESH;
  bool done = solve_stedc(w, dtype, vectors);
  if (!done && dtype == DC_FLOAT32) {
    t->path = DC_PATH_RETRIED;
    dtype = DC_FLOAT64;
    done = solve_stedc(w, dtype, vectors);
  }
  if (done && vectors) {
    w->dtype = t->dtype = dtype;
    dc__back_transform_vectors(w);
    memcpy(t->s, w->f, (size_t)(w->n * w->n) * dc_dtype_size(dtype));
  }
  return done;
}

bool dc__tridiagonal_solve(const dc__spectral_job *job, dc__spectral_task *t, int32_t root, int32_t dtype,
                           void *scratch) {
  dc__tridiagonal_form w = make_form(job, t, scratch);
  reduce_to_tridiagonal(&w);
  t->rational = root > 0 && rational_root(&w, root);
  t->solved = !t->rational && solve_tridiagonal(&w, dtype);
  return t->rational || t->solved;
}
