/* Kronecker products: formed, applied, and inverted with damping. */
#include "linalg/kron/kron.h"

#include <inttypes.h>

/* ---- formed ---- */

typedef struct kron_job {
  const dc__mat *a, *b, *out;
} kron_job;

#define SCALE_ROW(name, T)                                                                 \
  static void name(T *restrict to, T factor, const T *from, int64_t count, int64_t step) { \
    if (step == 1) {                                                                       \
      for (int64_t i = 0; i < count; i++) {                                                \
        to[i] = factor * from[i];                                                          \
      }                                                                                    \
    } else {                                                                               \
      for (int64_t i = 0; i < count; i++) {                                                \
        to[i] = factor * from[i * step];                                                   \
      }                                                                                    \
    }                                                                                      \
  }
SCALE_ROW(scale_float, float)
SCALE_ROW(scale_double, double)

/* Row `index` of the product: row index / p of a with row index % p of b. */
static void kron_row(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const kron_job *job = arg;
  const dc__mat *a = job->a;
  const dc__mat *b = job->b;
  int64_t i = index / b->rows * a->row_stride;
  int64_t k = index % b->rows * b->row_stride;
  int64_t to = index * job->out->row_stride;
  for (int64_t j = 0; j < a->cols; j++, to += b->cols) {
    if (a->dtype == DC_FLOAT64) {
      scale_double((double *)job->out->data + to, ((const double *)a->data)[i + j * a->col_stride],
                   (const double *)b->data + k, b->cols, b->col_stride);
    } else {
      scale_float((float *)job->out->data + to, ((const float *)a->data)[i + j * a->col_stride],
                  (const float *)b->data + k, b->cols, b->col_stride);
    }
  }
}

static void kron_form(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out) {
  kron_job job = {a, b, out};
  dc__parallel_for(l->pool, out->rows, kron_row, &job);
}

static const dc__kron_work *kron_work_of(const dc_linalg *l) {
  return dc__linalg_is_cuda(l) ? &dc__kron_work_cuda : &dc__kron_work_cpu;
}

dc_status dc__kron(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out) {
  if (l->query || out->rows == 0 || out->cols == 0) {
    return DC_OK;
  }
  kron_work_of(l)->form(l, a, b, out);
  return dc__linalg_synchronize(l);
}

/* ---- applied ---- */

static dc__mat transposed_mat(const dc__mat *m) {
  dc__mat t = *m;
  t.rows = m->cols;
  t.cols = m->rows;
  t.row_stride = m->col_stride;
  t.col_stride = m->row_stride;
  return t;
}

static dc__mat dense_mat(void *data, int32_t dtype, int64_t batch, int64_t rows, int64_t cols) {
  dc__mat m = {.data = data,
               .dtype = dtype,
               .batch = batch,
               .rows = rows,
               .cols = cols,
               .batch_stride = rows * cols,
               .row_stride = cols > 0 ? cols : 1,
               .col_stride = 1};
  return m;
}

/* Memory for A X B^T: the intermediate product, and the workspace for products. */
typedef struct kron_scratch {
  dc_linalg *l;
  void *t, *product;
} kron_scratch;

static void kron_gemm(const kron_scratch *k, const dc__mat *a, const dc__mat *b, const dc__mat *out) {
  const dc__gemm g = dc__mat_gemm(a, b, 1, 0, out);
  dc__linalg_gemm(k->l, &g, k->product);
}

/* out = A X B^T through t; out may be x. */
static void kron_multiply(const kron_scratch *k, const dc__mat *a, const dc__mat *b, const dc__mat *x,
                          const dc__mat *out) {
  dc__mat bt = transposed_mat(b);
  double left = (double)a->rows * (double)b->cols * (double)(a->cols + b->rows);
  double right = (double)a->cols * (double)b->rows * (double)(b->cols + a->rows);
  if (left <= right) {
    dc__mat middle = dense_mat(k->t, out->dtype, out->batch, a->rows, b->cols);
    kron_gemm(k, a, x, &middle);
    kron_gemm(k, &middle, &bt, out);
  } else {
    dc__mat middle = dense_mat(k->t, out->dtype, out->batch, a->cols, b->rows);
    kron_gemm(k, x, &bt, &middle);
    kron_gemm(k, a, &middle, out);
  }
}

dc_status dc__kron_too_large(const char *fn) {
  return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold an intermediate of this size", fn);
}

dc_status dc__kron_apply(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, const dc__mat *x,
                         const dc__mat *out) {
  int64_t left = a->rows * b->cols;
  int64_t right = a->cols * b->rows;
  size_t bytes = 0;
  size_t offset = 0;
  void *memory;
  int64_t count;
  if (__builtin_mul_overflow(left > right ? left : right, out->batch, &count) ||
      !dc__linalg_add_gemm_workspace(&bytes, l) || !dc__linalg_add_bytes(&bytes, count, dc_dtype_size(out->dtype))) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  kron_scratch k = {.l = l, .product = dc__linalg_gemm_workspace(l, memory, &offset)};
  k.t = dc__linalg_suballoc(memory, &offset, count, dc_dtype_size(out->dtype));
  kron_multiply(&k, a, b, x, out);
  return dc__linalg_synchronize(l);
}

/* ---- inverted ---- */

static double damped_at(const dc__kron_damped *d, int64_t i, int64_t j) {
  return dc__load_element(d->a, d->wide, i) * dc__load_element(d->b, d->wide, j) + d->damping;
}

dc_status dc__kron_check_values(const dc__kron_damped *d) {
  for (int64_t i = 0; i < d->rows; i++) {
    for (int64_t j = 0; j < d->cols; j++) {
      double sum = damped_at(d, i, j);
      if (!(sum > 0)) {
        return dc__fail(DC_E_NOT_POSITIVE,
                        "%s: a_values[%" PRId64 "] * b_values[%" PRId64 "] + damping = %g, must be > 0", d->fn, i, j,
                        sum);
      }
    }
  }
  return DC_OK;
}

static dc_status check_values_cpu(dc_linalg *l, const dc__kron_damped *d) {
  (void)l;
  return dc__kron_check_values(d);
}

static void divide_damped(dc_linalg *l, const dc__kron_damped *d, void *x) {
  (void)l;
  for (int64_t i = 0; i < d->count * d->rows; i++) {
    for (int64_t j = 0; j < d->cols; j++) {
      const double sum = damped_at(d, i, i / d->rows * d->cols + j);
      dc__store_element(x, d->wide, i * d->cols + j, dc__load_element(x, d->wide, i * d->cols + j) / sum);
    }
  }
}

const dc__kron_work dc__kron_work_cpu = {
    .form = kron_form, .check_values = check_values_cpu, .divide_damped = divide_damped};

static dc__kron_damped damped_of(const dc__kron_inverse *k, const dc__mat *x) {
  return (dc__kron_damped){.a = k->a_values,
                           .b = k->b_values,
                           .rows = x->rows,
                           .cols = x->cols,
                           .damping = k->damping,
                           .wide = x->dtype == DC_FLOAT64,
                           .count = x->batch};
}

dc_status dc__kron_check_damped(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x) {
  dc__kron_damped d = damped_of(inverse, x);
  d.fn = fn;
  d.count = 1;
  return kron_work_of(l)->check_values(l, &d);
}

bool dc__kron_add_scratch(const dc_linalg *l, const dc__mat *x, size_t *bytes) {
  const size_t size = dc_dtype_size(x->dtype);
  int64_t count;
  return !__builtin_mul_overflow(x->batch, x->rows * x->cols, &count) && dc__linalg_add_gemm_workspace(bytes, l) &&
         dc__linalg_add_bytes(bytes, count, size) && dc__linalg_add_bytes(bytes, count, size);
}

void dc__kron_apply_inverse(dc_linalg *l, const dc__kron_inverse *inverse, const dc__mat *x, const dc__mat *out,
                            void *scratch, uint64_t *not_positive) {
  dc__kron_damped d = damped_of(inverse, out);
  const int64_t count = out->batch * out->rows * out->cols;
  size_t offset = 0;
  kron_scratch k = {.l = l, .product = dc__linalg_gemm_workspace(l, scratch, &offset)};
  k.t = dc__linalg_suballoc(scratch, &offset, count, dc_dtype_size(out->dtype));
  const dc__mat inner = dense_mat(dc__linalg_suballoc(scratch, &offset, count, dc_dtype_size(out->dtype)), out->dtype,
                                  out->batch, out->rows, out->cols);
  const dc__mat qat = transposed_mat(inverse->a_vectors);
  const dc__mat qbt = transposed_mat(inverse->b_vectors);
  d.not_positive = not_positive;
  kron_multiply(&k, &qat, &qbt, x, &inner);
  kron_work_of(l)->divide_damped(l, &d, inner.data);
  kron_multiply(&k, inverse->a_vectors, inverse->b_vectors, &inner, out);
}

dc_status dc__kron_solve(dc_linalg *l, const char *fn, const dc__kron_inverse *inverse, const dc__mat *x,
                         const dc__mat *out) {
  size_t bytes = 0;
  void *memory;
  DC__TRY(dc__kron_check_damped(l, fn, inverse, out));
  if (!dc__kron_add_scratch(l, out, &bytes)) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  if (memory == NULL || out->rows * out->cols == 0) {
    return DC_OK;
  }
  dc__kron_apply_inverse(l, inverse, x, out, memory, NULL);
  return dc__linalg_synchronize(l);
}
