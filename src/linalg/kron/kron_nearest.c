/* The nearest Kronecker product, by power iteration for the largest singular value of x's rearrangement, which has a
 * row for each block of x (Van Loan and Pitsianis, 1993). */
#include <inttypes.h>
#include <math.h>

#include "linalg/kron/kron_nearest.h"

/* x has [m, n] blocks of [p, q]. u [m, n] and v [p, q] are the singular vectors of its rearrangement. */
typedef struct kron_nearest {
  const dc__mat *x, *a, *b;
  bool wide;
  int exponent; /* x is scaled by 2^-exponent */
  dc__pow2_scale scale;
  double *u, *v, *old, *rows;
} kron_nearest;

static double nearest_entry(const kron_nearest *s, int64_t row, int64_t col) {
  return dc__pow2_scaled(dc__load_element(s->x->data, s->wide, row * s->x->row_stride + col * s->x->col_stride),
                         s->scale);
}

/* Computes row i of u from v. right_factor_rows() computes row k of v from u. */
static void left_factor_rows(void *arg, int64_t i, void *scratch) {
  (void)scratch;
  kron_nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  for (int64_t j = 0; j < s->a->cols; j++) {
    double sum = 0;
    for (int64_t k = 0; k < p; k++) {
      for (int64_t l = 0; l < q; l++) {
        sum += nearest_entry(s, i * p + k, j * q + l) * s->v[k * q + l];
      }
    }
    s->u[i * s->a->cols + j] = sum;
  }
}

static void right_factor_rows(void *arg, int64_t k, void *scratch) {
  (void)scratch;
  kron_nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  for (int64_t l = 0; l < q; l++) {
    s->v[k * q + l] = 0;
  }
  for (int64_t i = 0; i < s->a->rows; i++) {
    for (int64_t j = 0; j < s->a->cols; j++) {
      double factor = s->u[i * s->a->cols + j];
      for (int64_t l = 0; l < q; l++) {
        s->v[k * q + l] += factor * nearest_entry(s, i * p + k, j * q + l);
      }
    }
  }
}

static void residual_row(void *arg, int64_t row, void *scratch) {
  (void)scratch;
  kron_nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  double squared_error = 0;
  double squared_norm = 0;
  for (int64_t col = 0; col < s->x->cols; col++) {
    double x = nearest_entry(s, row, col);
    double product = s->u[row / p * s->a->cols + col / q] * s->v[row % p * q + col % q];
    squared_error += (x - product) * (x - product);
    squared_norm += x * x;
  }
  s->rows[2 * row] = squared_error;
  s->rows[2 * row + 1] = squared_norm;
}

static double nearest_normalise(double *x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    sum += x[i] * x[i];
  }
  double norm = sqrt(sum);
  for (int64_t i = 0; i < count; i++) {
    x[i] = norm > 0 ? x[i] / norm : 0;
  }
  return norm;
}

static bool nearest_iterate(dc_linalg *l, kron_nearest *s) {
  int64_t inner = s->b->rows * s->b->cols;
  int64_t outer = s->a->rows * s->a->cols;
  const double tolerance = dc__nearest_tolerance(s->x->dtype);
  dc__nearest_state state = {0};
  for (int64_t i = 0; i < outer; i++) {
    s->u[i] = dc__nearest_guess(i / s->a->cols, i % s->a->cols, s->a->rows, s->a->cols);
  }
  for (int64_t i = 0; i < inner; i++) {
    s->v[i] = 0;
  }
  while (dc__nearest_continues(&state)) {
    for (int64_t i = 0; i < inner; i++) {
      s->old[i] = s->v[i];
    }
    dc__parallel_for(l->pool, s->b->rows, right_factor_rows, s);
    (void)nearest_normalise(s->v, inner);
    dc__parallel_for(l->pool, s->a->rows, left_factor_rows, s);
    double now = nearest_normalise(s->u, outer);
    double moved = 0;
    for (int64_t i = 0; i < inner; i++) {
      moved = fmax(moved, fabs(s->v[i] - s->old[i]));
    }
    dc__nearest_check_convergence(&state, now, moved, tolerance);
  }
  double trace = 0;
  for (int64_t i = 0; i < inner; i++) {
    trace += s->v[i];
  }
  double scale = copysign(sqrt(state.sigma), trace);
  for (int64_t i = 0; i < inner; i++) {
    s->v[i] *= scale;
  }
  for (int64_t i = 0; i < outer; i++) {
    s->u[i] *= scale;
  }
  return state.stalled_steps >= DC__NEAREST_STALLED_STEPS;
}

dc_status dc__nearest_check_finite(const char *fn, const dc__mat *x, int64_t first, double *max_abs) {
  for (int64_t i = 0; i < x->rows; i++) {
    for (int64_t j = 0; j < x->cols; j++) {
      double value = dc__load_element(x->data, x->dtype == DC_FLOAT64, i * x->row_stride + j * x->col_stride);
      if (!isfinite(value)) {
        return dc__fail(DC_E_NOT_FINITE, "%s: x has a NaN or an infinity at [%" PRId64 ", %" PRId64 "]", fn, first + i,
                        j);
      }
      *max_abs = fmax(*max_abs, fabs(value));
    }
  }
  return DC_OK;
}

dc_status dc__nearest_not_converged(const char *fn) {
  return dc__fail(DC_E_NOT_CONVERGED, "%s: the power iteration did not converge in %d steps", fn,
                  (int)DC__NEAREST_MAX_STEPS);
}

static dc_status nearest_scale(const char *fn, kron_nearest *s) {
  double max_abs = 0;
  DC__TRY(dc__nearest_check_finite(fn, s->x, 0, &max_abs));
  s->exponent = dc__nearest_exponent(max_abs);
  s->scale = dc__pow2_scale_of(-s->exponent);
  return DC_OK;
}

/* a and b each get half of the scale's exponent. */
static void nearest_store(const kron_nearest *s) {
  int half = s->exponent / 2;
  for (int64_t i = 0; i < s->a->rows * s->a->cols; i++) {
    dc__store_element(s->a->data, s->wide, i, ldexp(s->u[i], half));
  }
  for (int64_t i = 0; i < s->b->rows * s->b->cols; i++) {
    dc__store_element(s->b->data, s->wide, i, ldexp(s->v[i], half));
  }
}

dc_status dc__kron_nearest(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                           double *residual) {
  int64_t outer = a->rows * a->cols;
  int64_t inner = b->rows * b->cols;
  size_t bytes = 0;
  void *memory;
  if (dc__linalg_is_cuda(l)) {
    return dc__kron_nearest_cuda(l, fn, x, a, b, residual);
  }
  if (!dc__linalg_add_bytes(&bytes, outer, sizeof(double)) ||
      !dc__linalg_add_bytes(&bytes, 2 * inner, sizeof(double)) ||
      !dc__linalg_add_bytes(&bytes, 2 * x->rows, sizeof(double))) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  size_t offset = 0;
  kron_nearest s = {.x = x, .a = a, .b = b, .wide = x->dtype == DC_FLOAT64, .scale = {1, 1}};
  s.u = dc__linalg_suballoc(memory, &offset, outer, sizeof(double));
  s.v = dc__linalg_suballoc(memory, &offset, 2 * inner, sizeof(double));
  s.old = s.v + inner;
  s.rows = dc__linalg_suballoc(memory, &offset, 2 * x->rows, sizeof(double));
  DC__TRY(nearest_scale(fn, &s));
  if (!nearest_iterate(l, &s)) {
    return dc__nearest_not_converged(fn);
  }
  dc__parallel_for(l->pool, x->rows, residual_row, &s);
  double squared_error = 0;
  double squared_norm = 0;
  for (int64_t row = 0; row < x->rows; row++) {
    squared_error += s.rows[2 * row];
    squared_norm += s.rows[2 * row + 1];
  }
  nearest_store(&s);
  if (residual != NULL) {
    *residual = squared_norm > 0 ? sqrt(squared_error / squared_norm) : 0;
  }
  return DC_OK;
}
