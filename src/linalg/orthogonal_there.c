/* Polar factors on a device, a few matrices at a time. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/orthogonal.h"
#include "linalg/there.h"

static void product(const dc__orthogonal *o, double alpha, const void *a, bool turned, const void *b, double beta,
                    void *c, int64_t n, int64_t k) {
  dc__flight *f = o->place;
  const dc__gemm g = dc__orthogonal_product(o, alpha, a, turned, b, beta, c, n, k);
  dc__linalg_gemm(f->l, &g, f->product);
}

static void copy(const dc__orthogonal *o, void *to, const void *from, int64_t cols) {
  const dc__flight *f = o->place;
  dc__stream_copy(f->stream, to, from, (size_t)(o->count * o->rows * cols) * dc_dtype_size(o->dtype));
}

static void square(const dc__orthogonal *o, double alpha, const void *a, double beta, void *c, int64_t k) {
  product(o, alpha, a, true, a, beta, c, o->rows, k);
}

static const dc__orthogonal_work there = {square, product, copy};

static dc_status check(dc__flight *f, const char *fn, const dc__mat *a, void *through) {
  const dc__cuda_matrices from = dc__flight_part(f, a);
  dc__mat here;
  dc__flight_measure(f, &from, false);
  dc__flight_look(f);
  for (int32_t i = 0; i < f->count; i++) {
    if (!isfinite(dc__flight_number(f->seen[i].most))) {
      if (!dc__flight_bring(f, a, i, through, &here)) {
        return DC_E_NO_MEMORY;
      }
      const dc_status status = dc__orthogonal_check(fn, &here, f->first + i);
      dc__free(here.data);
      return status;
    }
  }
  return DC_OK;
}

/* x = the matrices over their Frobenius norms, by way of a power of two, so that no square overflows. */
static void load(dc__orthogonal *o, const dc__mat *a) {
  dc__flight *f = o->place;
  const dc__cuda_matrices from = dc__flight_part(f, a);
  const dc__cuda_matrices next = dc__flight_dense(f, o->next, o->dtype, o->rows, o->cols);
  const dc__cuda_load_args args = {.from = from, .to = next, .reports = f->reports, .mask = UINT32_MAX};
  dc__cuda_affine_args norm = {.from = o->next, .to = o->x, .rows = o->rows, .cols = o->cols, .count = f->count};
  norm.wide = o->dtype == DC_FLOAT64;
  dc__flight_measure(f, &from, false);
  dc__cuda_load(f->stream, &args);
  dc__flight_fold(f, &next, true);
  dc__flight_look(f);
  for (int32_t i = 0; i < f->count; i++) {
    norm.factor[i] = f->seen[i].fold > 0 ? 1 / sqrt(f->seen[i].fold) : 0;
  }
  dc__cuda_affine(f->stream, &norm);
}

static void store(const dc__orthogonal *o, const dc__mat *out) {
  const dc__flight *f = o->place;
  dc__cuda_load_alike(f->stream, dc__flight_dense(f, o->x, o->dtype, o->rows, o->cols), dc__flight_part(f, out),
                      UINT32_MAX, 1);
}

dc_status dc__orthogonalize_there(dc_linalg *l, const char *fn, const dc__mat *a, bool express, int32_t steps,
                                  const dc__mat *out) {
  const dc__mat from = dc__lying(a);
  const dc__mat to = dc__lying(out);
  const int64_t batch = a->rows * a->cols > 0 ? a->batch : 0;
  dc__orthogonal o = {.work = &there, .rows = from.rows, .cols = from.cols, .dtype = a->dtype};
  dc__flight f;
  int64_t elements;
  if (__builtin_add_overflow(from.rows, from.cols, &elements) ||
      __builtin_mul_overflow(2 * elements, from.rows, &elements) || elements > INT64_MAX / 64) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", fn);
  }
  DC__TRY(dc__flight_open(&f, l, fn, batch, from.rows, (size_t)elements * dc_dtype_size(a->dtype), 0));
  o.place = &f;
  for (int64_t first = 0; dc__flight_next(&f, first, batch); first += f.count) {
    DC__TRY(check(&f, fn, a, f.squares));
  }
  for (int64_t first = 0; dc__flight_next(&f, first, batch); first += f.count) {
    o.count = f.count;
    dc__orthogonal_place(&o, f.squares, f.most);
    load(&o, &from);
    dc__polynomials(&o, express, steps);
    store(&o, &to);
  }
  return dc__linalg_done(l);
}

/* ---- within other work ---- */

void dc__polar_there(dc_linalg *l, const dc__polar *p, float *temp, void *product, double *sums,
                     dc__cuda_report *reports) {
  const dc__mat x = {.data = p->x,
                     .dtype = DC_FLOAT32,
                     .batch = p->count,
                     .rows = p->rows,
                     .cols = p->cols,
                     .batch_stride = p->stride,
                     .row_stride = p->cols,
                     .col_stride = 1};
  const dc__mat lying = dc__lying(&x);
  const bool narrow = p->dtype != DC_FLOAT32;
  const int64_t count = p->count * p->rows * p->cols;
  dc__flight f = {.l = l, .stream = l->on, .product = product, .reports = reports, .sums = sums};
  f.count = f.most = p->count;
  dc__orthogonal o = {.work = &there, .place = &f, .rows = lying.rows, .cols = lying.cols, .count = p->count};
  o.dtype = p->dtype;
  o.alike = true;
  dc__orthogonal_place(&o, narrow ? temp + count : temp, p->count);
  const dc__cuda_matrices theirs = dc__flight_part(&f, &lying), whole = dc__flight_part(&f, &x);
  const dc__cuda_load_args over_length = {.from = theirs,
                                          .to = dc__flight_dense(&f, narrow ? temp : o.x, DC_FLOAT32, o.rows, o.cols),
                                          .reports = reports,
                                          .unit = p->eps,
                                          .mask = UINT32_MAX};
  dc__flight_fold(&f, &whole, true);
  dc__cuda_load(f.stream, &over_length);
  if (narrow) {
    dc__cuda_cast(f.stream, o.x, p->dtype, temp, DC_FLOAT32, count);
  }
  dc__polynomials(&o, p->express, p->steps);
  if (narrow) {
    dc__cuda_cast(f.stream, temp, DC_FLOAT32, o.x, p->dtype, count);
  }
  dc__cuda_load_alike(f.stream, dc__flight_dense(&f, narrow ? temp : o.x, DC_FLOAT32, o.rows, o.cols), theirs,
                      UINT32_MAX, p->factor);
}
