/* Inverse roots without eigenvectors. Householder's reflections bring A to a tridiagonal T = Q^T A Q; the root of that
 * is a sum of inverses (quadrature.c), each of which takes a multiplication an entry; the reflections, applied from
 * both sides, give Q f(T) Q^T. Rows are reduced from the last one up, so that what is left is the leading block, and
 * each row's reflection stays in its place. A panel of rows is reduced before the rest of the matrix sees it, as LAPACK
 * does (Dongarra, Hammarling and Sorensen, 1989); both ways end in products of matrices. */
#include <math.h>
#include <string.h>

#include "linalg/spectral.h"

enum { MOST_PANEL = 32, WIDE = 48 }; /* rows that are reduced, and reflections that are applied, together */

/* Memory of one matrix on its way. P and Q are a panel's [2 WIDE, n] each. */
typedef struct way {
  const dc__job *job;
  dc__task *t;
  void *scratch; /* of this thread; NULL: on the pool */
  double *a;     /* the matrix, and then the reflections in its rows */
  double *f;     /* the result, in place of the working memory's beginning */
  double *p, *q;
  double *d, *off, *tau;
  double *rest;
  int64_t n;
} way;

static dc__pool *pool_of(const way *w) {
  return w->scratch != NULL ? NULL : w->job->l->pool;
}

static int64_t panel_of(int64_t n) {
  return n < 256 ? 16 : MOST_PANEL;
}

int64_t dc__tridiagonal_work(int64_t n) {
  return n * n + 4 * WIDE * n + 3 * n + 4 * WIDE * WIDE + DC__TRIDIAGONAL_SCRATCH(n);
}

static way way_of(const dc__job *job, dc__task *t, void *scratch) {
  int64_t n = job->n;
  way w = {.job = job, .t = t, .scratch = scratch, .n = n, .a = t->s, .f = t->work};
  w.p = w.f + n * n;
  w.q = w.p + 2 * WIDE * n;
  w.d = w.q + 2 * WIDE * n;
  w.off = w.d + n;
  w.tau = w.off + n;
  w.rest = w.tau + n;
  return w;
}

/* v [0, row] becomes the reflection that leaves its last but one element alone, v[row - 1] = 1, and zero from there up
 * to `end`. Returns its factor. */
static double reflection(double *v, int64_t row, int64_t end, double *d, double *off) {
  double square = 0;
  dc__tridiagonal_dots(&square, v, 0, 1, v, row - 1);
  double last = v[row - 1];
  *d = v[row];
  *off = last;
  double factor = 0;
  if (square > 0) {
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
static void take_off(double *y, const double *x_rows, const double *z_rows, int64_t count, const double *x, int64_t n,
                     int64_t across) {
  double factors[MOST_PANEL];
  dc__tridiagonal_dots(factors, z_rows, n, count, x, across);
  for (int64_t k = 0; k < count; k++) {
    factors[k] = -factors[k];
  }
  dc__tridiagonal_combine(y, x_rows, n, count, factors, across);
}

/* Row `row` of the matrix as the panel's rows below it, up to `end`, have made it. w: theirs, beside the reflections.
 */
static void catch_up(const way *w, int64_t row, int64_t end, const double *rows) {
  int64_t n = w->n;
  int64_t count = end - row - 1;
  double *v = w->a + row * n;
  double of_v[MOST_PANEL], of_w[MOST_PANEL];
  for (int64_t k = 0; k < count; k++) {
    of_v[k] = -w->a[(row + 1 + k) * n + row];
    of_w[k] = -rows[(k + 1) * n + row];
  }
  dc__tridiagonal_combine(v, rows + n, n, count, of_v, row + 1);
  dc__tridiagonal_combine(v, v + n, n, count, of_w, row + 1);
}

/* Row `row`: its reflection v, and the w with which the matrix becomes A - v w^T - w v^T. */
static void reduce_row(const way *w, int64_t row, int64_t end, double *rows) {
  int64_t n = w->n;
  int64_t count = end - row - 1;
  double *v = w->a + row * n;
  catch_up(w, row, end, rows);
  double factor = w->tau[row] = reflection(v, row, end, &w->d[row], &w->off[row]);
  if (factor == 0) {
    memset(rows, 0, (size_t)row * sizeof *rows);
    return;
  }
  dc__tridiagonal_times(rows, w->a, n, v, row);
  take_off(rows, v + n, rows + n, count, v, n, row);
  take_off(rows, rows + n, v + n, count, v, n, row);
  double along;
  dc__tridiagonal_dots(&along, rows, 0, 1, v, row);
  for (int64_t j = 0; j < row; j++) {
    rows[j] = factor * (rows[j] - factor * along / 2 * v[j]);
  }
}

/* The lower triangle of c [m, m] -= P^T Q, `depth` rows of each. */
static void subtract(const way *w, int64_t m, int64_t depth, double *c) {
  dc__gemm g = {.dtype = DC_FLOAT64,
                .out_dtype = DC_FLOAT64,
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
  dc__triangle(pool_of(w), &g, w->scratch);
}

/* A becomes T and the reflections, whose rows are in a panel's own places. */
static void reduce(const way *w) {
  int64_t n = w->n;
  int64_t panel = panel_of(n);
  for (int64_t end = n; end > 1; end -= panel) {
    int64_t begin = end > panel + 1 ? end - panel : 1;
    int64_t count = end - begin;
    double *rows = w->p + count * n; /* of w; those of v go in front of them */
    for (int64_t row = end - 1; row >= begin; row--) {
      reduce_row(w, row, end, rows + (row - begin) * n);
    }
    size_t bytes = (size_t)(count * n) * sizeof(double);
    memcpy(w->p, w->a + begin * n, bytes);
    memcpy(w->q, rows, bytes);
    memcpy(w->q + count * n, w->p, bytes);
    subtract(w, begin, 2 * count, w->a);
  }
  w->d[0] = w->a[0];
  w->off[0] = w->tau[0] = 0;
}

/* ---- the way back ---- */

/* c [count, cols] = alpha x b, or with `turned` x b^T, + beta c; x has lines of ld, b of n, c of ldc. */
static void product(const way *w, int64_t count, int64_t cols, int64_t depth, double alpha, const double *x, int64_t ld,
                    const double *b, bool turned, double beta, double *c, int64_t ldc) {
  dc__gemm g = {.dtype = DC_FLOAT64,
                .out_dtype = DC_FLOAT64,
                .trans_b = turned,
                .m = count,
                .n = cols,
                .k = depth,
                .a = x,
                .b = b,
                .c = c,
                .lda = ld,
                .ldb = w->n,
                .ldc = ldc,
                .batch = 1,
                .alpha = alpha,
                .beta = beta};
  dc__gemm_on(pool_of(w), &g, w->scratch);
}

/* A panel's reflections together are I - V^T T V, the last row's applied last: T lower triangular; t has room
 * for one more. */
static void triangular_factor(const way *w, const double *v, int64_t count, int64_t across, const double *tau,
                              double *t) {
  double *gram = t + WIDE * WIDE;
  double sums[WIDE];
  memset(t, 0, sizeof(double) * WIDE * WIDE);
  product(w, count, count, across, 1, v, w->n, v, true, 0, gram, WIDE);
  for (int64_t i = count - 1; i >= 0; i--) {
    int64_t later = count - i - 1;
    double *below = t + (i + 1) * WIDE + i;
    t[i * WIDE + i] = tau[i];
    dc__tridiagonal_dots(sums, below + 1, WIDE, later, gram + i * WIDE + i + 1, later);
    for (int64_t j = 0; j < later; j++) {
      below[j * WIDE] = -tau[i] * sums[j];
    }
  }
}

/* z [count, n] = V F, where V's columns end at `across` and F is its lower triangle. */
static void times_result(const way *w, const double *v, int64_t count, int64_t across, double *z) {
  enum { BLOCK = DC__TRIANGLE_BLOCK };
  int64_t n = w->n;
  for (int64_t i = 0; i < across; i += BLOCK) {
    int64_t rows = across - i < BLOCK ? across - i : BLOCK;
    const double *f = w->f + i * n;
    product(w, count, rows, i + rows, 1, v, n, f, true, 0, z + i, n);
    if (i > 0) {
      product(w, count, i, rows, 1, v + i, n, f, false, 1, z, n);
    }
  }
  if (across < n) {
    product(w, count, n - across, across, 1, v, n, w->f + across * n, true, 0, z + across, n);
  }
}

/* s = T M T^T / 2 for M = Z V^T; s has room for two more. */
static void inner(const way *w, const double *z, const double *v, int64_t count, int64_t across, const double *t,
                  double *s) {
  double *m = s + WIDE * WIDE;
  double *tm = m + WIDE * WIDE;
  product(w, count, count, across, 1, z, w->n, v, true, 0, m, WIDE);
  memset(tm, 0, sizeof(double) * WIDE * WIDE);
  for (int64_t i = 0; i < count; i++) {
    dc__tridiagonal_combine(tm + i * WIDE, m, WIDE, i + 1, t + i * WIDE, count);
    dc__tridiagonal_dots(s + i * WIDE, t, WIDE, count, tm + i * WIDE, count);
    for (int64_t j = 0; j < count; j++) {
      s[i * WIDE + j] /= 2;
    }
  }
}

/* The block that column `across` cuts is whole again after its lower left part has changed. */
static void mirror_cut(const way *w, int64_t across) {
  int64_t begin = across - across % DC__TRIANGLE_BLOCK;
  int64_t end = begin + DC__TRIANGLE_BLOCK < w->n ? begin + DC__TRIANGLE_BLOCK : w->n;
  for (int64_t i = across; i < end; i++) {
    for (int64_t j = begin; j < across; j++) {
      w->f[j * w->n + i] = w->f[i * w->n + j];
    }
  }
}

/* F = P F P^T with P = I - V^T T V: rows [begin, end) are V. With Y = T V F and S as above, U = Y - S V: the leading
 * block loses U^T V + V^T U, the rows below it Y^T V. */
static void expand_panel(const way *w, int64_t begin, int64_t end) {
  int64_t n = w->n;
  int64_t count = end - begin;
  int64_t across = end - 1;
  double *v = w->a + begin * n;
  double *t = w->rest;
  double *s = t + WIDE * WIDE;
  double *z = w->q;
  double *y = w->p;
  for (int64_t k = 0; k < count; k++) { /* what a narrower panel left there */
    memset(v + k * n + begin + k, 0, (size_t)(count - k) * sizeof *v);
  }
  triangular_factor(w, v, count, across, w->tau + begin, t);
  times_result(w, v, count, across, z);
  inner(w, z, v, count, across, t, s);
  product(w, count, n, count, 1, t, WIDE, z, false, 0, y, n);
  if (across < n) {
    dc__gemm g = {.dtype = DC_FLOAT64,
                  .out_dtype = DC_FLOAT64,
                  .trans_a = true,
                  .m = n - across,
                  .n = across,
                  .k = count,
                  .a = y + across,
                  .b = v,
                  .c = w->f + across * n,
                  .lda = n,
                  .ldb = n,
                  .ldc = n,
                  .batch = 1,
                  .alpha = -1,
                  .beta = 1};
    dc__gemm_on(pool_of(w), &g, w->scratch);
    mirror_cut(w, across);
  }
  product(w, count, across, count, -1, s, WIDE, v, false, 1, y, n);
  size_t bytes = (size_t)(count * n) * sizeof(double);
  memcpy(w->p + count * n, v, bytes);
  memcpy(w->q, v, bytes);
  memcpy(w->q + count * n, w->p, bytes);
  subtract(w, across, 2 * count, w->f);
}

/* The first rows' reflections were the last ones. */
static void expand(const way *w) {
  for (int64_t begin = 1; begin < w->n; begin += WIDE) {
    expand_panel(w, begin, begin + WIDE < w->n ? begin + WIDE : w->n);
  }
}

/* ---- roots ---- */

static const double RANGE = 1e-12; /* of the regularised eigenvalues: quadrature.c */
static const double FAR = 1e100;   /* their size beside the matrix's entries */

int32_t dc__rational_root(const dc_linalg *l, const dc__spectral *r) {
  double root = r->op == DC__SPECTRAL_ROOT || r->op == DC__SPECTRAL_POWER ? -1 / r->power : 0;
  bool whole = root >= 1 && root <= DC__RULES && root == rint(root) && -1 / root == r->power;
  bool plain = l->blas == NULL || r->basis.data != NULL || r->options.rank_rtol != 0;
  return whole && !plain ? (int32_t)root : 0;
}

bool dc__rational(const dc__job *job, dc__task *t, int32_t root, void *scratch) {
  way w = way_of(job, t, scratch);
  int64_t n = job->n;
  reduce(&w);
  double least, most;
  dc__tridiagonal_ends(w.d, w.off, n, &least, &most);
  double unit = ldexp(1, -t->exponent);
  double epsilon = fmax(job->r->options.eps_abs * unit, job->r->options.eps_rel * fmax(most, 0));
  double low = fmax(least, 0) + epsilon;
  double high = fmax(most, 0) + epsilon;
  bool suits = least >= -(double)n * dc__epsilon(DC_FLOAT64) * fmax(most, 0) && low >= RANGE * high && low > 1 / FAR &&
               high < FAR;
  if (!suits) {
    return false;
  }
  t->smallest = ldexp(least, t->exponent);
  t->largest = ldexp(most, t->exponent);
  t->epsilon = fmax(job->r->options.eps_abs, job->r->options.eps_rel * fmax(t->largest, 0));
  double shifts[DC__TRIDIAGONAL_SHIFTS], weights[DC__TRIDIAGONAL_SHIFTS];
  dc__rule_fractions(&job->l->rules[root - 1], low / high, shifts, weights);
  double scale = pow(high, 1 - 1 / (double)root) * exp2(-t->exponent / (double)root);
  for (int64_t k = 0; k < DC__TRIDIAGONAL_SHIFTS; k++) {
    shifts[k] *= high;
    weights[k] *= scale;
  }
  for (int64_t i = 0; i < n; i++) {
    w.d[i] += epsilon;
  }
  dc__tridiagonal_inverses(w.f, w.d, w.off, n, shifts, weights, w.rest);
  return true;
}

bool dc__rational_finish(const dc__job *job, int64_t index, dc__task *t, void *scratch) {
  way w = way_of(job, t, scratch);
  dc__mirror(w.f, DC_FLOAT64, job->n);
  expand(&w);
  t->path = DC_PATH_FRESH;
  if (!dc__symmetric_store(job, index, t, w.f)) {
    t->status = DC_E_NOT_FINITE;
    return false;
  }
  return true;
}
