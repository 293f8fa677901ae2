/* Polar factors on a device, one slice of the batch at a time. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/batch_slice_cuda.h"
#include "linalg/polar/newton_schulz.h"

static void newton_schulz_gemm_cuda(const dc__newton_schulz *o, double alpha, const void *a, bool trans_b,
                                    const void *b, double beta, void *c, int64_t n, int64_t k) {
  dc__batch_slice *f = o->context;
  const dc__gemm g = dc__newton_schulz_gemm(o, alpha, a, trans_b, b, beta, c, n, k);
  dc__linalg_gemm(f->l, &g, f->gemm_workspace);
}

static void newton_schulz_copy_cuda(const dc__newton_schulz *o, void *to, const void *from, int64_t cols) {
  const dc__batch_slice *f = o->context;
  dc__stream_copy(f->stream, to, from, (size_t)(o->count * o->rows * cols) * dc_dtype_size(o->dtype));
}

static void newton_schulz_syrk_cuda(const dc__newton_schulz *o, double alpha, const void *a, double beta, void *c,
                                    int64_t k) {
  newton_schulz_gemm_cuda(o, alpha, a, true, a, beta, c, o->rows, k);
}

static const dc__newton_schulz_work newton_schulz_work_cuda = {newton_schulz_syrk_cuda, newton_schulz_gemm_cuda,
                                                               newton_schulz_copy_cuda};

static dc_status check_finite_cuda(dc__batch_slice *f, const char *fn, const dc__mat *a, void *staging) {
  const dc__cuda_matrices from = dc__batch_slice_view(f, a);
  dc__mat host;
  dc__batch_slice_measure(f, &from);
  dc__batch_slice_sync_reports(f);
  for (int32_t i = 0; i < f->count; i++) {
    if (!isfinite(dc__double_from_bits(f->host_reports[i].max_abs))) {
      if (!dc__batch_slice_copy_to_host(f, a, i, staging, &host)) {
        return DC_E_NO_MEMORY;
      }
      const dc_status status = dc__newton_schulz_check_finite(fn, &host, f->first + i);
      dc__free(host.data);
      return status;
    }
  }
  return DC_OK;
}

/* x = the matrices over their Frobenius norms, scaled by a power of two so that no square overflows. */
static void load_normalised_cuda(dc__newton_schulz *o, const dc__mat *a) {
  dc__batch_slice *f = o->context;
  const dc__cuda_matrices from = dc__batch_slice_view(f, a);
  const dc__cuda_matrices next = dc__batch_slice_dense_view(f, o->next, o->dtype, o->rows, o->cols);
  const dc__cuda_load_args args = {.from = from, .to = next, .reports = f->reports, .mask = UINT32_MAX};
  dc__cuda_affine_args norm = {.from = o->next, .to = o->x, .rows = o->rows, .cols = o->cols, .count = f->count};
  norm.wide = o->dtype == DC_FLOAT64;
  dc__batch_slice_measure(f, &from);
  dc__cuda_load(f->stream, &args);
  dc__batch_slice_reduce(f, &next, true);
  dc__batch_slice_sync_reports(f);
  for (int32_t i = 0; i < f->count; i++) {
    norm.factor[i] = f->host_reports[i].norm > 0 ? 1 / sqrt(f->host_reports[i].norm) : 0;
  }
  dc__cuda_affine(f->stream, &norm);
}

static void store_result_cuda(const dc__newton_schulz *o, const dc__mat *out) {
  const dc__batch_slice *f = o->context;
  dc__cuda_load_uniform(f->stream, dc__batch_slice_dense_view(f, o->x, o->dtype, o->rows, o->cols),
                        dc__batch_slice_view(f, out), UINT32_MAX, 1);
}

dc_status dc__orthogonalize_cuda(dc_linalg *l, const char *fn, const dc__mat *a, bool polar_express, int32_t steps,
                                 const dc__mat *out) {
  const dc__mat from = dc__mat_as_wide(a);
  const dc__mat to = dc__mat_as_wide(out);
  const int64_t batch = a->rows * a->cols > 0 ? a->batch : 0;
  dc__newton_schulz o = {.work = &newton_schulz_work_cuda, .rows = from.rows, .cols = from.cols, .dtype = a->dtype};
  dc__batch_slice f;
  int64_t elements;
  if (__builtin_add_overflow(from.rows, from.cols, &elements) ||
      __builtin_mul_overflow(2 * elements, from.rows, &elements) || elements > INT64_MAX / 64) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", fn);
  }
  DC__TRY(dc__batch_slice_init(&f, l, fn, batch, from.rows, (size_t)elements * dc_dtype_size(a->dtype), 0));
  o.context = &f;
  for (int64_t first = 0; dc__batch_slice_advance(&f, first, batch); first += f.count) {
    DC__TRY(check_finite_cuda(&f, fn, a, f.matrices));
  }
  for (int64_t first = 0; dc__batch_slice_advance(&f, first, batch); first += f.count) {
    o.count = f.count;
    dc__newton_schulz_layout(&o, f.matrices, f.max_count);
    load_normalised_cuda(&o, &from);
    dc__newton_schulz_run(&o, polar_express, steps);
    store_result_cuda(&o, &to);
  }
  return dc__linalg_synchronize(l);
}

/* ---- inside other operators ---- */

/* Returns the next part of temporary memory. A product's algorithm depends on its operands' alignment, so parts are
 * 16-byte aligned whatever the number of matrices. */
static void *polar_part(char **end, int64_t elements, int32_t dtype) {
  enum { ALIGNMENT = 16 };
  void *part = *end;
  *end += ((size_t)elements * dc_dtype_size(dtype) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return part;
}

void dc__polar_cuda(dc_linalg *l, const dc__polar *p, float *temp, void *gemm_workspace, double *sums,
                    dc__cuda_matrix_stats *reports) {
  const dc__mat x = {.data = p->x,
                     .dtype = DC_FLOAT32,
                     .batch = p->count,
                     .rows = p->rows,
                     .cols = p->cols,
                     .batch_stride = p->stride,
                     .row_stride = p->cols,
                     .col_stride = 1};
  const dc__mat lying = dc__mat_as_wide(&x);
  const bool narrow = p->dtype != DC_FLOAT32;
  const int64_t count = p->count * p->rows * p->cols;
  dc__batch_slice f = {.l = l, .stream = l->stream, .gemm_workspace = gemm_workspace, .reports = reports, .sums = sums};
  f.count = f.max_count = p->count;
  dc__newton_schulz o = {
      .work = &newton_schulz_work_cuda, .context = &f, .rows = lying.rows, .cols = lying.cols, .count = p->count};
  const int64_t squares = p->count * o.rows * o.rows;
  char *end = (char *)temp;
  o.dtype = p->dtype;
  o.batch_invariant = true;
  (void)polar_part(&end, narrow ? count : 0, DC_FLOAT32); /* temp itself: the matrices in float32 */
  o.x = polar_part(&end, count, p->dtype);
  o.next = polar_part(&end, count, p->dtype);
  o.gram = polar_part(&end, squares, p->dtype);
  o.poly = polar_part(&end, squares, p->dtype);
  const dc__cuda_matrices strided = dc__batch_slice_view(&f, &lying), whole = dc__batch_slice_view(&f, &x);
  const dc__cuda_load_args over_length = {
      .from = strided,
      .to = dc__batch_slice_dense_view(&f, narrow ? temp : o.x, DC_FLOAT32, o.rows, o.cols),
      .reports = reports,
      .unit = p->eps,
      .mask = UINT32_MAX};
  dc__batch_slice_reduce(&f, &whole, true);
  dc__cuda_load(f.stream, &over_length);
  if (narrow) {
    dc__cuda_cast(f.stream, o.x, p->dtype, temp, DC_FLOAT32, count);
  }
  dc__newton_schulz_run(&o, p->polar_express, p->steps);
  if (narrow) {
    dc__cuda_cast(f.stream, temp, DC_FLOAT32, o.x, p->dtype, count);
  }
  dc__cuda_load_uniform(f.stream, dc__batch_slice_dense_view(&f, narrow ? temp : o.x, DC_FLOAT32, o.rows, o.cols),
                        strided, UINT32_MAX, p->factor);
}
