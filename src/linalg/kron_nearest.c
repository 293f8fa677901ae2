/* The nearest Kronecker product: the largest singular value of the matrix of blocks (Van Loan and Pitsianis, 1993), by
 * power iteration. */
#include <inttypes.h>
#include <math.h>

#include "linalg/nearest.h"

/* x as a matrix of blocks: u [m, n] and v [p, q] are the vectors of its largest singular value. */
typedef struct nearest {
  const dc__mat *x, *a, *b;
  bool wide;
  int exponent; /* of the power of two that was taken out of x */
  dc__scale scale;
  double *u, *v, *old, *rows;
} nearest;

static double entry(const nearest *s, int64_t row, int64_t col) {
  return dc__scaled(dc__get(s->x->data, s->wide, row * s->x->row_stride + col * s->x->col_stride), s->scale);
}

/* Row i of u from v, or row k of v from u. */
static void block_rows(void *arg, int64_t i, void *scratch) {
  (void)scratch;
  nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  for (int64_t j = 0; j < s->a->cols; j++) {
    double sum = 0;
    for (int64_t k = 0; k < p; k++) {
      for (int64_t l = 0; l < q; l++) {
        sum += entry(s, i * p + k, j * q + l) * s->v[k * q + l];
      }
    }
    s->u[i * s->a->cols + j] = sum;
  }
}

static void inner_rows(void *arg, int64_t k, void *scratch) {
  (void)scratch;
  nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  for (int64_t l = 0; l < q; l++) {
    s->v[k * q + l] = 0;
  }
  for (int64_t i = 0; i < s->a->rows; i++) {
    for (int64_t j = 0; j < s->a->cols; j++) {
      double factor = s->u[i * s->a->cols + j];
      for (int64_t l = 0; l < q; l++) {
        s->v[k * q + l] += factor * entry(s, i * p + k, j * q + l);
      }
    }
  }
}

static void residual_row(void *arg, int64_t row, void *scratch) {
  (void)scratch;
  nearest *s = arg;
  int64_t p = s->b->rows;
  int64_t q = s->b->cols;
  double apart = 0;
  double whole = 0;
  for (int64_t col = 0; col < s->x->cols; col++) {
    double x = entry(s, row, col);
    double product = s->u[row / p * s->a->cols + col / q] * s->v[row % p * q + col % q];
    apart += (x - product) * (x - product);
    whole += x * x;
  }
  s->rows[2 * row] = apart;
  s->rows[2 * row + 1] = whole;
}

static double normalise(double *x, int64_t count) {
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

static bool iterate(dc_linalg *l, nearest *s) {
  int64_t inner = s->b->rows * s->b->cols;
  int64_t outer = s->a->rows * s->a->cols;
  const double enough = dc__nearest_enough(s->x->dtype);
  dc__nearest_state state = {0};
  for (int64_t i = 0; i < outer; i++) {
    s->u[i] = dc__nearest_guess(i / s->a->cols, i % s->a->cols, s->a->rows, s->a->cols);
  }
  for (int64_t i = 0; i < inner; i++) {
    s->v[i] = 0;
  }
  while (dc__nearest_goes_on(&state)) {
    for (int64_t i = 0; i < inner; i++) {
      s->old[i] = s->v[i];
    }
    dc__parallel(l->pool, s->b->rows, inner_rows, s);
    (void)normalise(s->v, inner);
    dc__parallel(l->pool, s->a->rows, block_rows, s);
    double now = normalise(s->u, outer);
    double moved = 0;
    for (int64_t i = 0; i < inner; i++) {
      moved = fmax(moved, fabs(s->v[i] - s->old[i]));
    }
    dc__nearest_judge(&state, now, moved, enough);
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
  return state.still >= DC__NEAREST_STILL;
}

dc_status dc__nearest_check(const char *fn, const dc__mat *x, int64_t first, double *most) {
  for (int64_t i = 0; i < x->rows; i++) {
    for (int64_t j = 0; j < x->cols; j++) {
      double value = dc__get(x->data, x->dtype == DC_FLOAT64, i * x->row_stride + j * x->col_stride);
      if (!isfinite(value)) {
        return dc__fail(DC_E_NOT_FINITE, "%s: x has a NaN or an infinity at [%" PRId64 ", %" PRId64 "]", fn, first + i,
                        j);
      }
      *most = fmax(*most, fabs(value));
    }
  }
  return DC_OK;
}

dc_status dc__nearest_lost(const char *fn) {
  return dc__fail(DC_E_NOT_CONVERGED, "%s: the power iteration did not converge in %d steps", fn,
                  (int)DC__NEAREST_STEPS);
}

static dc_status measure(const char *fn, nearest *s) {
  double most = 0;
  DC__TRY(dc__nearest_check(fn, s->x, 0, &most));
  s->exponent = dc__nearest_exponent(most);
  s->scale = dc__scale_of(-s->exponent);
  return DC_OK;
}

/* a and b each get half of the power of two that was taken out. */
static void store(const nearest *s) {
  int half = s->exponent / 2;
  for (int64_t i = 0; i < s->a->rows * s->a->cols; i++) {
    dc__put(s->a->data, s->wide, i, ldexp(s->u[i], half));
  }
  for (int64_t i = 0; i < s->b->rows * s->b->cols; i++) {
    dc__put(s->b->data, s->wide, i, ldexp(s->v[i], half));
  }
}

dc_status dc__kron_nearest(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                           double *residual) {
  int64_t outer = a->rows * a->cols;
  int64_t inner = b->rows * b->cols;
  size_t bytes = 0;
  void *memory;
  if (dc__linalg_is_there(l)) {
    return dc__nearest_there(l, fn, x, a, b, residual);
  }
  if (!dc__linalg_add(&bytes, outer, sizeof(double)) || !dc__linalg_add(&bytes, 2 * inner, sizeof(double)) ||
      !dc__linalg_add(&bytes, 2 * x->rows, sizeof(double))) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  size_t offset = 0;
  nearest s = {.x = x, .a = a, .b = b, .wide = x->dtype == DC_FLOAT64, .scale = {1, 1}};
  s.u = dc__linalg_part(memory, &offset, outer, sizeof(double));
  s.v = dc__linalg_part(memory, &offset, 2 * inner, sizeof(double));
  s.old = s.v + inner;
  s.rows = dc__linalg_part(memory, &offset, 2 * x->rows, sizeof(double));
  DC__TRY(measure(fn, &s));
  if (!iterate(l, &s)) {
    return dc__nearest_lost(fn);
  }
  dc__parallel(l->pool, x->rows, residual_row, &s);
  double apart = 0;
  double whole = 0;
  for (int64_t row = 0; row < x->rows; row++) {
    apart += s.rows[2 * row];
    whole += s.rows[2 * row + 1];
  }
  store(&s);
  if (residual != NULL) {
    *residual = whole > 0 ? sqrt(apart / whole) : 0;
  }
  return DC_OK;
}
