/* Back transformation from tridiagonal form. A panel's reflections are applied together, as matrix products (Schreiber
 * and Van Loan, 1989): to eigenvectors from one side, and to symmetric matrices from both sides at once. */
#include <string.h>

#include "linalg/eigh/tridiagonal.h"

enum {
  SMALL_NUMEL = DC__REFLECTOR_BLOCK * DC__REFLECTOR_BLOCK
}; /* elements of the small matrices; their rows are DC__REFLECTOR_BLOCK apart */

/* Element i of a matrix of the form's present type. */
static void *form_element(const dc__tridiagonal_form *w, const void *data, int64_t i) {
  return dc__element_ptr(data, w->dtype, i);
}

/* c [count, cols] = alpha x op(b) + beta c. Leading dimensions: x has ld, b has n, c has ldc. */
static void panel_gemm(const dc__tridiagonal_form *w, int64_t count, int64_t cols, int64_t depth, double alpha,
                       const void *x, int64_t ld, const void *b, bool trans_b, double beta, void *c, int64_t ldc) {
  dc__gemm g = {.dtype = w->dtype,
                .out_dtype = w->dtype,
                .trans_b = trans_b,
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
  dc__gemm_on(dc__tridiagonal_pool(w), &g, w->scratch);
}

/* Small matrices are float64, whatever the form's type. Their copy in that type is at the end of w->rest. */
static void *small_workspace(const dc__tridiagonal_form *w) {
  return w->rest + 4 * SMALL_NUMEL;
}

/* small [count, count] = x y^T */
static void panel_gram(const dc__tridiagonal_form *w, int64_t count, int64_t across, const void *x, const void *y,
                       double *small) {
  panel_gemm(w, count, count, across, 1, x, w->n, y, true, 0, small_workspace(w), DC__REFLECTOR_BLOCK);
  dc__cast(small, DC_FLOAT64, small_workspace(w), w->dtype, count * DC__REFLECTOR_BLOCK);
}

/* c [count, cols] = alpha small b + beta c */
static void small_gemm(const dc__tridiagonal_form *w, int64_t count, int64_t cols, double alpha, const double *small,
                       const void *b, double beta, void *c) {
  dc__cast(small_workspace(w), w->dtype, small, DC_FLOAT64, count * DC__REFLECTOR_BLOCK);
  panel_gemm(w, count, cols, count, alpha, small_workspace(w), DC__REFLECTOR_BLOCK, b, false, beta, c, w->n);
}

/* A panel's reflections together are I - V^T T V with T lower triangular; the last row's is applied last. gram_v is
 * V V^T. */
static void triangular_factor(const double *gram_v, int64_t count, const double *tau, double *t) {
  double sums[DC__REFLECTOR_BLOCK];
  memset(t, 0, SMALL_NUMEL * sizeof *t);
  for (int64_t i = count - 1; i >= 0; i--) {
    int64_t later = count - i - 1;
    double *below = t + (i + 1) * DC__REFLECTOR_BLOCK + i;
    t[i * DC__REFLECTOR_BLOCK + i] = tau[i];
    dc__tridiagonal_gemv(sums, below + 1, DC__REFLECTOR_BLOCK, later, gram_v + i * DC__REFLECTOR_BLOCK + i + 1, later);
    for (int64_t j = 0; j < later; j++) {
      below[j * DC__REFLECTOR_BLOCK] = -tau[i] * sums[j];
    }
  }
}

/* s = T M T^T / 2 for M = Z V^T; tm is scratch. */
static void half_tmt(const double *m, int64_t count, const double *t, double *tm, double *s) {
  memset(tm, 0, SMALL_NUMEL * sizeof *tm);
  for (int64_t i = 0; i < count; i++) {
    dc__tridiagonal_gemv_t(tm + i * DC__REFLECTOR_BLOCK, m, DC__REFLECTOR_BLOCK, i + 1, t + i * DC__REFLECTOR_BLOCK,
                           count);
    dc__tridiagonal_gemv(s + i * DC__REFLECTOR_BLOCK, t, DC__REFLECTOR_BLOCK, count, tm + i * DC__REFLECTOR_BLOCK,
                         count);
    for (int64_t j = 0; j < count; j++) {
      s[i * DC__REFLECTOR_BLOCK + j] /= 2;
    }
  }
}

/* v [count, across] = the reflections in the `count` rows from `begin` on. */
static void read_panel(const dc__tridiagonal_form *w, int64_t begin, int64_t count, int64_t across, void *v) {
  for (int64_t k = 0; k < count; k++) { /* entries beyond a reflection's end are left from a narrower panel */
    int64_t end = begin + k;
    dc__cast(form_element(w, v, k * w->n), w->dtype, w->a + end * w->n, DC_FLOAT64, end);
    memset(form_element(w, v, k * w->n + end), 0, (size_t)(across - end) * dc_dtype_size(w->dtype));
  }
}

/* z [count, n] = V F, where V has `across` columns and F is stored in its lower triangle. */
static void times_result(const dc__tridiagonal_form *w, const void *v, int64_t count, int64_t across, void *z) {
  enum { BLOCK = DC__TRIANGLE_BLOCK };
  int64_t n = w->n;
  for (int64_t i = 0; i < across; i += BLOCK) {
    int64_t rows = across - i < BLOCK ? across - i : BLOCK;
    const void *f = form_element(w, w->f, i * n);
    panel_gemm(w, count, rows, i + rows, 1, v, n, f, true, 0, form_element(w, z, i), n);
    if (i > 0) {
      panel_gemm(w, count, i, rows, 1, form_element(w, v, i), n, f, false, 1, z, n);
    }
  }
  if (across < n) {
    panel_gemm(w, count, n - across, across, 1, v, n, form_element(w, w->f, across * n), true, 0,
               form_element(w, z, across), n);
  }
}

/* Mirrors the changed lower left part of the diagonal block that column `across` cuts. */
static void mirror_cut(const dc__tridiagonal_form *w, int64_t across) {
  bool wide = w->dtype == DC_FLOAT64;
  int64_t begin = across - across % DC__TRIANGLE_BLOCK;
  int64_t end = begin + DC__TRIANGLE_BLOCK < w->n ? begin + DC__TRIANGLE_BLOCK : w->n;
  for (int64_t i = across; i < end; i++) {
    for (int64_t j = begin; j < across; j++) {
      dc__store_element(w->f, wide, j * w->n + i, dc__load_element(w->f, wide, i * w->n + j));
    }
  }
}

/* Subtracts Y^T V from the rows of F below the leading block, from `across` on. */
static void below_leading(const dc__tridiagonal_form *w, int64_t count, int64_t across, const void *y, const void *v) {
  int64_t n = w->n;
  dc__gemm g = {.dtype = w->dtype,
                .out_dtype = w->dtype,
                .trans_a = true,
                .m = n - across,
                .n = across,
                .k = count,
                .a = form_element(w, y, across),
                .b = v,
                .c = form_element(w, w->f, across * n),
                .lda = n,
                .ldb = n,
                .ldc = n,
                .batch = 1,
                .alpha = -1,
                .beta = 1};
  dc__gemm_on(dc__tridiagonal_pool(w), &g, w->scratch);
  mirror_cut(w, across);
}

/* F = P F P^T with P = I - V^T T V, where V is the reflections of rows [begin, end). Let Y = T V F and U = Y - S V with
 * half_tmt()'s S. The leading block loses U^T V + V^T U, the rows below it Y^T V. */
static void apply_panel_both_sides(const dc__tridiagonal_form *w, int64_t begin, int64_t end) {
  int64_t n = w->n;
  int64_t count = end - begin;
  int64_t across = end - 1;
  double *t = w->rest;
  double *s = t + SMALL_NUMEL;
  double *m = s + SMALL_NUMEL;
  void *y = w->p;
  void *v = form_element(w, y, count * n);
  void *z = w->q;
  read_panel(w, begin, count, across, v);
  panel_gram(w, count, across, v, v, m);
  triangular_factor(m, count, w->tau + begin, t);
  times_result(w, v, count, across, z);
  panel_gram(w, count, across, z, v, m);
  half_tmt(m, count, t, m + SMALL_NUMEL, s);
  small_gemm(w, count, n, 1, t, z, 0, y);
  if (across < n) {
    below_leading(w, count, across, y, v);
  }
  small_gemm(w, count, across, -1, s, v, 1, y);
  size_t bytes = (size_t)(count * n) * dc_dtype_size(w->dtype);
  memcpy(w->q, v, bytes);
  memcpy(form_element(w, w->q, count * n), y, bytes);
  dc__tridiagonal_syr2k(w, across, 2 * count, w->f);
}

/* Starts with the first rows, whose reflections were computed last. */
void dc__back_transform_matrix(const dc__tridiagonal_form *w) {
  for (int64_t begin = 1; begin < w->n; begin += DC__REFLECTOR_BLOCK) {
    apply_panel_both_sides(w, begin, begin + DC__REFLECTOR_BLOCK < w->n ? begin + DC__REFLECTOR_BLOCK : w->n);
  }
}

/* ---- eigenvectors ---- */

/* F = F P^T = F - (F V^T) T^T V */
static void apply_panel_right(const dc__tridiagonal_form *w, int64_t begin, int64_t end) {
  int64_t n = w->n;
  int64_t count = end - begin;
  int64_t across = end - 1;
  double *t = w->rest;
  double *m = t + SMALL_NUMEL;
  void *v = w->p;
  void *tv = form_element(w, v, DC__REFLECTOR_BLOCK * n);
  read_panel(w, begin, count, across, v);
  panel_gram(w, count, across, v, v, m);
  triangular_factor(m, count, w->tau + begin, t);
  for (int64_t i = 0; i < count; i++) {
    for (int64_t j = 0; j < count; j++) {
      m[j * DC__REFLECTOR_BLOCK + i] = t[i * DC__REFLECTOR_BLOCK + j];
    }
  }
  small_gemm(w, count, across, 1, m, v, 0, tv);
  panel_gemm(w, n, count, across, 1, w->f, n, v, true, 0, w->q, DC__REFLECTOR_BLOCK);
  panel_gemm(w, n, across, count, -1, w->q, DC__REFLECTOR_BLOCK, tv, false, 1, w->f, n);
}

void dc__back_transform_vectors(const dc__tridiagonal_form *w) {
  for (int64_t begin = 1; begin < w->n; begin += DC__REFLECTOR_BLOCK) {
    apply_panel_right(w, begin, begin + DC__REFLECTOR_BLOCK < w->n ? begin + DC__REFLECTOR_BLOCK : w->n);
  }
}
