/* The nearest matrix with orthonormal rows or columns, by odd polynomials of its singular values: X <- (a + b G + c
 * G^2) X with G = X X^T. Rows are the shorter side, so a matrix and its transpose have the same bits. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/linalg.h"

typedef struct polynomial {
  double a, b, c;
} polynomial;

/* Polar Express (arXiv 2505.16932), for singular values from 1e-3 of the Frobenius norm; the last one is Newton and
 * Schulz's, which later steps repeat. All before it get room for rounding: as if values were up to 1.01. */
enum { EXPRESS = 8 };
static const polynomial express[EXPRESS] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375},
};
static const polynomial muon = {3.4445, -4.7750, 2.0315};

static polynomial step_of(bool is_express, int32_t step) {
  if (!is_express) {
    return muon;
  }
  polynomial p = express[step < EXPRESS - 1 ? step : EXPRESS - 1];
  double room = step < EXPRESS - 1 ? 1.01 : 1;
  polynomial with_room = {p.a / room, p.b / pow(room, 3), p.c / pow(room, 5)};
  return with_room;
}

typedef struct orthogonal {
  dc_linalg *l;
  dc__mat a, out; /* turned, where they are taller than wide */
  bool express, inside;
  int32_t steps;
  dc__slots slots;
} orthogonal;

static dc__mat lying(const dc__mat *m) {
  dc__mat t = *m;
  if (m->rows > m->cols) {
    t.rows = m->cols;
    t.cols = m->rows;
    t.row_stride = m->col_stride;
    t.col_stride = m->row_stride;
  }
  return t;
}

static int64_t place(const dc__mat *m, int64_t index, int64_t i, int64_t j) {
  return index * m->batch_stride + i * m->row_stride + j * m->col_stride;
}

/* x = the matrix over its Frobenius norm, by way of a power of two, so that no square overflows; false: it is zero. */
static bool load(const orthogonal *o, int64_t index, void *x) {
  const dc__mat *a = &o->a;
  bool wide = a->dtype == DC_FLOAT64;
  double most = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      most = fmax(most, fabs(dc__get(a->data, wide, place(a, index, i, j))));
    }
  }
  dc__scale scale = dc__scale_of(most > 0 ? -ilogb(most) : 0);
  double sum = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      double value = dc__scaled(dc__get(a->data, wide, place(a, index, i, j)), scale);
      dc__put(x, wide, i * a->cols + j, value);
      sum += value * value;
    }
  }
  double norm = sqrt(sum);
  for (int64_t i = 0; i < a->rows * a->cols && most > 0; i++) {
    dc__put(x, wide, i, dc__get(x, wide, i) / norm);
  }
  return most > 0;
}

/* c [m, n] = alpha a op(b) + beta c */
static void product(const orthogonal *o, double alpha, const void *a, bool turned, const void *b, double beta, void *c,
                    int64_t n, int64_t k, void *scratch) {
  dc__gemm g = {.dtype = o->a.dtype,
                .out_dtype = o->a.dtype,
                .trans_b = turned,
                .m = o->a.rows,
                .n = n,
                .k = k,
                .a = a,
                .b = b,
                .c = c,
                .lda = k,
                .ldb = turned ? k : n,
                .ldc = n,
                .batch = 1,
                .alpha = alpha,
                .beta = beta};
  dc__gemm_on(o->inside ? NULL : o->l->pool, &g, scratch);
}

static void one(void *arg, int64_t index, void *scratch) {
  orthogonal *o = arg;
  int64_t rows = o->a.rows;
  int64_t cols = o->a.cols;
  size_t size = dc_dtype_size(o->a.dtype);
  int64_t slot = dc__slots_take(&o->slots);
  char *x = dc__slots_memory(&o->slots, slot);
  char *next = x + (size_t)(rows * cols) * size;
  char *gram = next + (size_t)(rows * cols) * size;
  char *both = gram + (size_t)(rows * rows) * size;
  bool some = load(o, index, x);
  for (int32_t step = 0; step < o->steps && some; step++) {
    polynomial p = step_of(o->express, step);
    product(o, 1, x, true, x, 0, gram, rows, cols, scratch);
    memcpy(both, gram, (size_t)(rows * rows) * size);
    product(o, p.c, gram, false, gram, p.b, both, rows, rows, scratch);
    memcpy(next, x, (size_t)(rows * cols) * size);
    product(o, 1, both, false, x, p.a, next, cols, rows, scratch);
    char *swap = x;
    x = next;
    next = swap;
  }
  bool wide = o->a.dtype == DC_FLOAT64;
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < cols; j++) {
      dc__put(o->out.data, wide, place(&o->out, index, i, j), dc__get(x, wide, i * cols + j));
    }
  }
  dc__slots_give(&o->slots, slot);
}

static dc_status check_finite(const char *fn, const dc__mat *a) {
  bool wide = a->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < a->batch * a->rows * a->cols; i++) {
    int64_t index = i / (a->rows * a->cols);
    int64_t row = i / a->cols % a->rows;
    if (!isfinite(dc__get(a->data, wide, place(a, index, row, i % a->cols)))) {
      return dc__fail(DC_E_NOT_FINITE,
                      "%s: a has a NaN or an infinity at [%" PRId64 ", %" PRId64 "] of matrix %" PRId64, fn, row,
                      i % a->cols, index);
    }
  }
  return DC_OK;
}

dc_status dc__orthogonalize(dc_linalg *l, const char *fn, const dc__mat *a, bool is_express, int32_t steps,
                            const dc__mat *out) {
  orthogonal o = {.l = l, .a = lying(a), .out = lying(out), .express = is_express, .steps = steps};
  o.inside = a->batch >= dc__pool_threads(l->pool);
  size_t size = dc_dtype_size(a->dtype);
  size_t slot = 0;
  size_t bytes = 0;
  void *memory;
  if (!dc__linalg_add(&slot, 2 * o.a.rows * o.a.cols, size) || !dc__linalg_add(&slot, 2 * o.a.rows * o.a.rows, size) ||
      !dc__slots_plan(&o.slots, l, a->batch, slot, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL || a->batch * a->rows * a->cols == 0) {
    return DC_OK;
  }
  DC__TRY(check_finite(fn, a));
  size_t offset = 0;
  dc__slots_place(&o.slots, memory, &offset);
  if (o.inside) {
    dc__parallel(l->pool, a->batch, one, &o);
  }
  for (int64_t i = 0; i < a->batch && !o.inside; i++) {
    one(&o, i, NULL);
  }
  return DC_OK;
}
