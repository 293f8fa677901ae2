/* The nearest matrix with orthonormal rows or columns, by odd polynomials of its singular values: X <- (a + b G + c
 * G^2) X with G = X X^T. Rows are the shorter side, so a matrix and its transpose have the same bits, unless they
 * are square. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh.h"
#include "linalg/polar/newton_schulz.h"

typedef struct schulz_polynomial {
  double a, b, c;
} schulz_polynomial;

/* Polar Express (arXiv 2505.16932), for singular values from 1e-3 of the Frobenius norm. The last polynomial is
 * Newton-Schulz and repeats in later steps. The others leave a margin for rounding, as if values went up to 1.01. */
enum { POLAR_EXPRESS_STEPS = 8 };
static const schulz_polynomial polar_express[POLAR_EXPRESS_STEPS] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375},
};
static const schulz_polynomial muon = {3.4445, -4.7750, 2.0315};

static schulz_polynomial polynomial_of_step(bool use_polar_express, int32_t step) {
  if (!use_polar_express) {
    return muon;
  }
  schulz_polynomial p = polar_express[step < POLAR_EXPRESS_STEPS - 1 ? step : POLAR_EXPRESS_STEPS - 1];
  double margin = step < POLAR_EXPRESS_STEPS - 1 ? 1.01 : 1;
  return (schulz_polynomial){p.a / margin, p.b / pow(margin, 3), p.c / pow(margin, 5)};
}

void dc__newton_schulz_run(dc__newton_schulz *o, bool use_polar_express, int32_t steps) {
  const int64_t rows = o->rows;
  for (int32_t step = 0; step < steps; step++) {
    schulz_polynomial p = polynomial_of_step(use_polar_express, step);
    o->work->syrk(o, 1, o->x, 0, o->gram, o->cols);
    o->work->copy(o, o->poly, o->gram, rows);
    o->work->syrk(o, p.c, o->gram, p.b, o->poly, rows);
    o->work->copy(o, o->next, o->x, o->cols);
    o->work->gemm(o, 1, o->poly, false, o->x, p.a, o->next, o->cols, rows);
    void *swap = o->x;
    o->x = o->next;
    o->next = swap;
  }
}

dc__mat dc__mat_as_wide(const dc__mat *m) {
  dc__mat t = *m;
  if (m->rows > m->cols) {
    t.rows = m->cols;
    t.cols = m->rows;
    t.row_stride = m->col_stride;
    t.col_stride = m->row_stride;
  }
  return t;
}

void dc__newton_schulz_layout(dc__newton_schulz *o, void *memory, int64_t count) {
  const size_t rectangle = (size_t)(count * o->rows * o->cols) * dc_dtype_size(o->dtype);
  const size_t square = (size_t)(count * o->rows * o->rows) * dc_dtype_size(o->dtype);
  o->x = memory;
  o->next = (char *)memory + rectangle;
  o->gram = (char *)memory + 2 * rectangle;
  o->poly = (char *)memory + 2 * rectangle + square;
}

dc_status dc__newton_schulz_check_finite(const char *fn, const dc__mat *a, int64_t first) {
  bool wide = a->dtype == DC_FLOAT64;
  for (int64_t i = 0; i < a->batch * a->rows * a->cols; i++) {
    int64_t index = i / (a->rows * a->cols);
    int64_t row = i / a->cols % a->rows;
    if (!isfinite(dc__load_element(a->data, wide, dc__mat_offset(a, index, row, i % a->cols)))) {
      return dc__fail(DC_E_NOT_FINITE,
                      "%s: a has a NaN or an infinity at [%" PRId64 ", %" PRId64 "] of matrix %" PRId64, fn, row,
                      i % a->cols, first + index);
    }
  }
  return DC_OK;
}

dc__gemm dc__newton_schulz_gemm(const dc__newton_schulz *o, double alpha, const void *a, bool trans_b, const void *b,
                                double beta, void *c, int64_t n, int64_t k) {
  dc__gemm g = dc__gemm_dense(o->dtype, false, trans_b, o->rows, n, k, a, b, c);
  g.batch = o->count;
  g.stride_a = o->rows * k;
  g.stride_b = k * n;
  g.stride_c = o->rows * n;
  g.alpha = alpha;
  g.beta = beta;
  g.batch_invariant = o->batch_invariant;
  return g;
}

/* ---- CPU: one matrix per thread, or few matrices that share the threads ---- */

typedef struct orthogonalize_job {
  dc_linalg *l;
  dc__mat a, out; /* transposed if taller than wide */
  bool polar_express, serial;
  int32_t steps;
  dc__slots slots;
} orthogonalize_job;

/* Context of the CPU table. */
typedef struct cpu_context {
  dc__threadpool *pool; /* NULL for this thread, with scratch */
  void *scratch;
} cpu_context;

/* x = the matrix over its Frobenius norm, scaled by a power of two so that no square overflows. Returns false if it
 * is zero. */
static bool load_normalised(const orthogonalize_job *o, int64_t index, void *x) {
  const dc__mat *a = &o->a;
  bool wide = a->dtype == DC_FLOAT64;
  double max_abs = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      double size = fabs(dc__load_element(a->data, wide, dc__mat_offset(a, index, i, j)));
      max_abs = size > max_abs ? size : max_abs; /* not fmax(): gcc 12 for 64-bit ARM crashes when it vectorises it */
    }
  }
  dc__pow2_scale scale = dc__pow2_scale_of(max_abs > 0 ? -ilogb(max_abs) : 0);
  double sum = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    for (int64_t j = 0; j < a->cols; j++) {
      double value = dc__pow2_scaled(dc__load_element(a->data, wide, dc__mat_offset(a, index, i, j)), scale);
      dc__store_element(x, wide, i * a->cols + j, value);
      sum += value * value;
    }
  }
  double norm = sqrt(sum);
  for (int64_t i = 0; i < a->rows * a->cols && max_abs > 0; i++) {
    dc__store_element(x, wide, i, dc__load_element(x, wide, i) / norm);
  }
  return max_abs > 0;
}

/* Computes one triangle and mirrors it. */
static void newton_schulz_syrk_cpu(const dc__newton_schulz *o, double alpha, const void *a, double beta, void *c,
                                   int64_t k) {
  const cpu_context *cpu = o->context;
  const dc__gemm g = dc__newton_schulz_gemm(o, alpha, a, true, a, beta, c, o->rows, k);
  dc__gemmt(cpu->pool, &g, cpu->scratch);
  dc__mirror_lower(c, o->dtype, o->rows);
}

static void newton_schulz_gemm_cpu(const dc__newton_schulz *o, double alpha, const void *a, bool trans_b, const void *b,
                                   double beta, void *c, int64_t n, int64_t k) {
  const cpu_context *cpu = o->context;
  const dc__gemm g = dc__newton_schulz_gemm(o, alpha, a, trans_b, b, beta, c, n, k);
  dc__gemm_on(cpu->pool, &g, cpu->scratch);
}

static void newton_schulz_copy_cpu(const dc__newton_schulz *o, void *to, const void *from, int64_t cols) {
  memcpy(to, from, (size_t)(o->rows * cols) * dc_dtype_size(o->dtype));
}

static const dc__newton_schulz_work newton_schulz_work_cpu = {newton_schulz_syrk_cpu, newton_schulz_gemm_cpu,
                                                              newton_schulz_copy_cpu};

static void orthogonalize_matrix(void *arg, int64_t index, void *scratch) {
  orthogonalize_job *job = arg;
  int64_t slot = dc__slots_acquire(&job->slots);
  cpu_context context = {job->serial ? NULL : job->l->pool, scratch};
  dc__newton_schulz o = {
      .work = &newton_schulz_work_cpu, .context = &context, .rows = job->a.rows, .cols = job->a.cols, .count = 1};
  o.dtype = job->a.dtype;
  dc__newton_schulz_layout(&o, dc__slots_memory(&job->slots, slot), 1);
  if (load_normalised(job, index, o.x)) {
    dc__newton_schulz_run(&o, job->polar_express, job->steps);
  }
  bool wide = o.dtype == DC_FLOAT64;
  for (int64_t i = 0; i < o.rows; i++) {
    for (int64_t j = 0; j < o.cols; j++) {
      dc__store_element(job->out.data, wide, dc__mat_offset(&job->out, index, i, j),
                        dc__load_element(o.x, wide, i * o.cols + j));
    }
  }
  dc__slots_release(&job->slots, slot);
}

dc_status dc__orthogonalize(dc_linalg *l, const char *fn, const dc__mat *a, bool use_polar_express, int32_t steps,
                            const dc__mat *out) {
  orthogonalize_job o = {
      .l = l, .a = dc__mat_as_wide(a), .out = dc__mat_as_wide(out), .polar_express = use_polar_express, .steps = steps};
  if (dc__linalg_is_cuda(l)) {
    return dc__orthogonalize_cuda(l, fn, a, use_polar_express, steps, out);
  }
  o.serial = a->batch >= dc__threadpool_threads(l->pool);
  size_t size = dc_dtype_size(a->dtype);
  size_t slot = 0;
  size_t bytes = 0;
  void *memory;
  if (!dc__linalg_add_bytes(&slot, 2 * o.a.rows * o.a.cols, size) ||
      !dc__linalg_add_bytes(&slot, 2 * o.a.rows * o.a.rows, size) ||
      !dc__slots_plan(&o.slots, l, a->batch, slot, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL || a->batch * a->rows * a->cols == 0) {
    return DC_OK;
  }
  DC__TRY(dc__newton_schulz_check_finite(fn, a, 0));
  size_t offset = 0;
  dc__slots_init(&o.slots, memory, &offset);
  if (o.serial) {
    dc__parallel_for(l->pool, a->batch, orthogonalize_matrix, &o);
  }
  for (int64_t i = 0; i < a->batch && !o.serial; i++) {
    orthogonalize_matrix(&o, i, NULL);
  }
  return DC_OK;
}

/* ---- CPU: inside other operators ---- */

/* A float32 matrix with strides in elements. */
typedef struct strided_floats {
  float *data;
  int64_t row, col;
} strided_floats;

/* to = from times factor, both [rows, cols], in tiles because one may be transposed. */
static void scale_into(strided_floats to, strided_floats from, int64_t rows, int64_t cols, double factor) {
  enum { TILE = 32 };
  for (int64_t i0 = 0; i0 < rows; i0 += TILE) {
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
      for (int64_t i = i0; i < rows && i < i0 + TILE; i++) {
        for (int64_t j = j0; j < cols && j < j0 + TILE; j++) {
          to.data[i * to.row + j * to.col] = (float)((double)from.data[i * from.row + j * from.col] * factor);
        }
      }
    }
  }
}

void dc__polar_cpu(dc__threadpool *pool, void *scratch, const dc__polar *p, float *temp) {
  const bool tall = p->rows > p->cols;
  const int64_t count = p->rows * p->cols;
  cpu_context context = {pool, scratch};
  dc__newton_schulz o = {.work = &newton_schulz_work_cpu, .context = &context, .count = 1, .dtype = p->dtype};
  o.rows = tall ? p->cols : p->rows;
  o.cols = tall ? p->rows : p->cols;
  const bool narrow = p->dtype != DC_FLOAT32;
  double squares = 0;
  for (int64_t i = 0; i < count; i++) {
    squares += (double)p->x[i] * (double)p->x[i];
  }
  dc__newton_schulz_layout(&o, narrow ? temp + count : temp, 1);
  const strided_floats x = {.data = p->x, .row = tall ? 1 : o.cols, .col = tall ? o.rows : 1}; /* wide */
  strided_floats iterate = {.data = narrow ? temp : o.x, .row = o.cols, .col = 1};
  scale_into(iterate, x, o.rows, o.cols, 1 / fmax(sqrt(squares), p->eps));
  if (narrow) {
    dc__cast(o.x, p->dtype, temp, DC_FLOAT32, count);
  }
  dc__newton_schulz_run(&o, p->polar_express, p->steps);
  if (narrow) {
    dc__cast(temp, DC_FLOAT32, o.x, p->dtype, count);
  }
  iterate.data = narrow ? temp : o.x; /* the run may have exchanged o.x and o.next */
  scale_into(x, iterate, o.rows, o.cols, p->factor);
}
