/* The nearest matrix with orthonormal rows or columns, by odd polynomials of its singular values: X <- (a + b G + c
 * G^2) X with G = X X^T. Rows are the shorter side, so a matrix and its transpose have the same bits,
 * unless they are square: which of two squares comes first nothing says. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/orthogonal.h"
#include "linalg/spectral.h"

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

void dc__polynomials(dc__orthogonal *o, bool is_express, int32_t steps) {
  const int64_t rows = o->rows;
  for (int32_t step = 0; step < steps; step++) {
    polynomial p = step_of(is_express, step);
    o->work->square(o, 1, o->x, 0, o->gram, o->cols);
    o->work->copy(o, o->both, o->gram, rows);
    o->work->square(o, p.c, o->gram, p.b, o->both, rows);
    o->work->copy(o, o->next, o->x, o->cols);
    o->work->product(o, 1, o->both, false, o->x, p.a, o->next, o->cols, rows);
    void *swap = o->x;
    o->x = o->next;
    o->next = swap;
  }
}

dc__mat dc__lying(const dc__mat *m) {
  dc__mat t = *m;
  if (m->rows > m->cols) {
    t.rows = m->cols;
    t.cols = m->rows;
    t.row_stride = m->col_stride;
    t.col_stride = m->row_stride;
  }
  return t;
}

void dc__orthogonal_place(dc__orthogonal *o, void *memory, int64_t count) {
  const size_t rectangle = (size_t)(count * o->rows * o->cols) * dc_dtype_size(o->dtype);
  const size_t square = (size_t)(count * o->rows * o->rows) * dc_dtype_size(o->dtype);
  o->x = memory;
  o->next = (char *)memory + rectangle;
  o->gram = (char *)memory + 2 * rectangle;
  o->both = (char *)memory + 2 * rectangle + square;
}

dc_status dc__orthogonal_check(const char *fn, const dc__mat *a, int64_t first) {
  bool wide = a->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < a->batch * a->rows * a->cols; i++) {
    int64_t index = i / (a->rows * a->cols);
    int64_t row = i / a->cols % a->rows;
    if (!isfinite(dc__get(a->data, wide, dc__place(a, index, row, i % a->cols)))) {
      return dc__fail(DC_E_NOT_FINITE,
                      "%s: a has a NaN or an infinity at [%" PRId64 ", %" PRId64 "] of matrix %" PRId64, fn, row,
                      i % a->cols, first + index);
    }
  }
  return DC_OK;
}

dc__gemm dc__orthogonal_product(const dc__orthogonal *o, double alpha, const void *a, bool turned, const void *b,
                                double beta, void *c, int64_t n, int64_t k) {
  dc__gemm g = dc__gemm_dense(o->dtype, false, turned, o->rows, n, k, a, b, c);
  g.batch = o->count;
  g.stride_a = o->rows * k;
  g.stride_b = k * n;
  g.stride_c = o->rows * n;
  g.alpha = alpha;
  g.beta = beta;
  g.alike = o->alike;
  return g;
}

/* ---- here: a matrix on a thread, or few that share the threads ---- */

typedef struct orthogonal {
  dc_linalg *l;
  dc__mat a, out; /* turned, where they are taller than wide */
  bool express, inside;
  int32_t steps;
  dc__slots slots;
} orthogonal;

/* What the table's functions need. */
typedef struct bench {
  dc__pool *pool; /* NULL: this thread, with scratch */
  void *scratch;
} bench;

/* x = the matrix over its Frobenius norm, by way of a power of two, so that no square overflows; false: it is zero. */
static bool load(const orthogonal *o, int64_t index, void *x) {
  const dc__mat *a = &o->a;
  bool wide = a->dtype == DC_FLOAT64;
  double most = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      double size = fabs(dc__get(a->data, wide, dc__place(a, index, i, j)));
      most = size > most ? size : most; /* not fmax(): gcc 12 fails inside at its vectors for 64-bit ARM */
    }
  }
  dc__scale scale = dc__scale_of(most > 0 ? -ilogb(most) : 0);
  double sum = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      double value = dc__scaled(dc__get(a->data, wide, dc__place(a, index, i, j)), scale);
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

/* Half of it is computed. */
static void square_here(const dc__orthogonal *o, double alpha, const void *a, double beta, void *c, int64_t k) {
  const bench *here = o->place;
  const dc__gemm g = dc__orthogonal_product(o, alpha, a, true, a, beta, c, o->rows, k);
  dc__triangle(here->pool, &g, here->scratch);
  dc__mirror(c, o->dtype, o->rows);
}

static void product_here(const dc__orthogonal *o, double alpha, const void *a, bool turned, const void *b, double beta,
                         void *c, int64_t n, int64_t k) {
  const bench *here = o->place;
  const dc__gemm g = dc__orthogonal_product(o, alpha, a, turned, b, beta, c, n, k);
  dc__gemm_on(here->pool, &g, here->scratch);
}

static void copy_here(const dc__orthogonal *o, void *to, const void *from, int64_t cols) {
  memcpy(to, from, (size_t)(o->rows * cols) * dc_dtype_size(o->dtype));
}

static const dc__orthogonal_work here = {square_here, product_here, copy_here};

static void one(void *arg, int64_t index, void *scratch) {
  orthogonal *job = arg;
  int64_t slot = dc__slots_take(&job->slots);
  bench place = {job->inside ? NULL : job->l->pool, scratch};
  dc__orthogonal o = {.work = &here, .place = &place, .rows = job->a.rows, .cols = job->a.cols, .count = 1};
  o.dtype = job->a.dtype;
  dc__orthogonal_place(&o, dc__slots_memory(&job->slots, slot), 1);
  if (load(job, index, o.x)) {
    dc__polynomials(&o, job->express, job->steps);
  }
  bool wide = o.dtype == DC_FLOAT64;
  for (int64_t i = 0; i < o.rows; i++) {
    for (int64_t j = 0; j < o.cols; j++) {
      dc__put(job->out.data, wide, dc__place(&job->out, index, i, j), dc__get(o.x, wide, i * o.cols + j));
    }
  }
  dc__slots_give(&job->slots, slot);
}

dc_status dc__orthogonalize(dc_linalg *l, const char *fn, const dc__mat *a, bool is_express, int32_t steps,
                            const dc__mat *out) {
  orthogonal o = {.l = l, .a = dc__lying(a), .out = dc__lying(out), .express = is_express, .steps = steps};
  if (dc__linalg_is_there(l)) {
    return dc__orthogonalize_there(l, fn, a, is_express, steps, out);
  }
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
  DC__TRY(dc__orthogonal_check(fn, a, 0));
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

/* ---- here, within other work ---- */

/* to = from times factor, both float32 and [rows, cols] with strides: in tiles, since one of them may be turned. */
static void scale_into(float *to, int64_t to_row, int64_t to_col, const float *from, int64_t from_row, int64_t from_col,
                       int64_t rows, int64_t cols, double factor) {
  enum { TILE = 32 };
  for (int64_t i0 = 0; i0 < rows; i0 += TILE) {
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
      for (int64_t i = i0; i < rows && i < i0 + TILE; i++) {
        for (int64_t j = j0; j < cols && j < j0 + TILE; j++) {
          to[i * to_row + j * to_col] = (float)((double)from[i * from_row + j * from_col] * factor);
        }
      }
    }
  }
}

void dc__polar_here(dc__pool *pool, void *scratch, const dc__polar *p, float *temp) {
  const bool tall = p->rows > p->cols;
  const int64_t count = p->rows * p->cols;
  bench place = {pool, scratch};
  dc__orthogonal o = {.work = &here, .place = &place, .count = 1, .dtype = p->dtype};
  o.rows = tall ? p->cols : p->rows;
  o.cols = tall ? p->rows : p->cols;
  const int64_t row = tall ? 1 : o.cols, col = tall ? o.rows : 1; /* of p->x, lying */
  const bool narrow = p->dtype != DC_FLOAT32;
  double squares = 0;
  for (int64_t i = 0; i < count; i++) {
    squares += (double)p->x[i] * (double)p->x[i];
  }
  dc__orthogonal_place(&o, narrow ? temp + count : temp, 1);
  scale_into(narrow ? temp : o.x, o.cols, 1, p->x, row, col, o.rows, o.cols, 1 / fmax(sqrt(squares), p->eps));
  if (narrow) {
    dc__cast(o.x, p->dtype, temp, DC_FLOAT32, count);
  }
  dc__polynomials(&o, p->express, p->steps);
  if (narrow) {
    dc__cast(temp, DC_FLOAT32, o.x, p->dtype, count);
  }
  scale_into(p->x, row, col, narrow ? temp : o.x, o.cols, 1, o.rows, o.cols, p->factor);
}
