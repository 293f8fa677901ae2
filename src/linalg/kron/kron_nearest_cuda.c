/* The nearest Kronecker product on a device. Kernels check convergence; the host reads the state once every few
 * steps. */
#include "linalg/kron/kron_nearest.h"

#include <math.h>

#include "linalg/batch_slice_cuda.h"

enum { STEPS_PER_SYNC = 16, THREADS = 1 << 17 }; /* steps between syncs; threads that fill a device */

typedef struct nearest_cuda {
  dc__batch_slice f;
  dc__cuda_nearest_args args;
  double *totals; /* [2]: squares of the residual and of x */
  void *staging;
  int64_t staging_bytes;
} nearest_cuda;

/* The number of chunks to split `rows` into, so that `count` elements with `threads` threads each fill the device. */
static int32_t nearest_chunks(int64_t count, int64_t threads, int64_t rows) {
  const int64_t wanted = THREADS / (count < THREADS ? count * threads : THREADS) + 1;
  const int64_t most = dc__min_int64(rows, DC__CUDA_MAX_GRID_YZ); /* chunks are on the second axis */
  return (int32_t)(wanted < most ? wanted : most);
}

/* Lays out the matrices of the slice; without memory it counts their bytes. Returns false on overflow. */
static bool nearest_layout(nearest_cuda *w, size_t *bytes) {
  dc__cuda_nearest_args *a = &w->args;
  const int64_t outer = a->m * a->n;
  const int64_t inner = a->p * a->q;
  const int64_t parts = a->chunks[0] * inner > a->chunks[1] * outer ? a->chunks[0] * inner : a->chunks[1] * outer;
  struct {
    void **to;
    int64_t count;
  } const all[] = {{(void **)&a->u, outer},
                   {(void **)&a->v, inner},
                   {(void **)&a->parts, parts},
                   {(void **)&a->next, outer > inner ? outer : inner},
                   {(void **)&a->squares, DC__CUDA_NEAREST_BLOCKS},
                   {(void **)&a->traces, DC__CUDA_NEAREST_BLOCKS},
                   {(void **)&a->residual_sums, 2 * a->x.rows},
                   {(void **)&w->totals, 2},
                   {(void **)&a->result, sizeof *a->result / sizeof(double) + 1},
                   {&w->staging, a->x.cols}};
  *bytes = 0;
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    *all[i].to = w->f.matrices != NULL ? w->f.matrices + *bytes : NULL;
    if (!dc__linalg_add_bytes(bytes, all[i].count, sizeof(double))) {
      return false;
    }
  }
  return true;
}

/* Chooses the scale by x's largest entry. If that is not finite, searches for it row by row. */
static dc_status nearest_scale_cuda(nearest_cuda *w, const char *fn, const dc__mat *x, int *exponent) {
  double max_abs;
  dc__batch_slice_measure(&w->f, &w->args.x);
  dc__batch_slice_sync_reports(&w->f);
  DC__TRY(dc__device_check(w->f.l->device));
  max_abs = dc__double_from_bits(w->f.host_reports[0].max_abs);
  for (int64_t row = 0; row < x->rows && !isfinite(max_abs); row++) {
    dc__mat line = *x;
    dc__mat host;
    double ignored = 0;
    line.data = dc__element_ptr(x->data, x->dtype, row * x->row_stride);
    line.rows = 1;
    if (!dc__batch_slice_copy_to_host(&w->f, &line, 0, w->staging, &host)) {
      return DC_E_NO_MEMORY;
    }
    const dc_status status = dc__nearest_check_finite(fn, &host, row, &ignored);
    dc__free(host.data);
    DC__TRY(status);
  }
  *exponent = dc__nearest_exponent(max_abs);
  const dc__pow2_scale scale = dc__pow2_scale_of(-*exponent);
  w->args.first = scale.first;
  w->args.second = scale.second;
  return DC_OK;
}

static dc_status nearest_iterate_cuda(nearest_cuda *w, const char *fn, dc__cuda_nearest_result *result) {
  dc_linalg *l = w->f.l;
  dc__stream_zero(w->f.stream, w->args.result, sizeof *result);
  dc__stream_zero(w->f.stream, w->args.v, (size_t)(w->args.p * w->args.q) * sizeof(double));
  dc__cuda_nearest_begin(w->f.stream, &w->args);
  do {
    for (int32_t step = 0; step < STEPS_PER_SYNC; step++) {
      dc__cuda_nearest_step(w->f.stream, &w->args);
    }
    DC__TRY(dc__linalg_copy_to_host(l, result, w->args.result, sizeof *result));
  } while (dc__nearest_continues(&result->state));
  return result->state.stalled_steps >= DC__NEAREST_STALLED_STEPS ? DC_OK : dc__nearest_not_converged(fn);
}

static void nearest_store_cuda(const nearest_cuda *w, const double *from, double factor, const dc__mat *to) {
  const dc__cuda_matrices x =
      dc__batch_slice_dense_view(&w->f, (void *)(uintptr_t)from, DC_FLOAT64, to->rows, to->cols);
  dc__cuda_load_uniform(w->f.stream, x, dc__mat_cuda_view(to), 1, factor);
}

/* x is empty, but a or b may still have entries. */
static dc_status zero_factors(dc_linalg *l, const dc__mat *a, const dc__mat *b, double *residual) {
  const dc__mat *const both[] = {a, b};
  for (int i = 0; i < 2; i++) {
    dc__stream_zero(l->device->internal_stream, both[i]->data,
                    (size_t)(both[i]->rows * both[i]->cols) * dc_dtype_size(both[i]->dtype));
  }
  if (residual != NULL) {
    *residual = 0;
  }
  return dc__linalg_synchronize(l);
}

dc_status dc__kron_nearest_cuda(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                                double *residual) {
  nearest_cuda w = {.args = {.x = dc__mat_cuda_view(x), .m = a->rows, .n = a->cols, .p = b->rows, .q = b->cols}};
  dc__cuda_nearest_result result;
  double totals[2];
  size_t bytes;
  int exponent;
  const int64_t batch = x->rows * x->cols > 0 ? 1 : 0;
  w.args.tolerance = dc__nearest_tolerance(x->dtype);
  w.args.chunks[0] = batch > 0 ? nearest_chunks(w.args.p * w.args.q, 1, w.args.m) : 0;
  w.args.chunks[1] = batch > 0 ? nearest_chunks(w.args.m * w.args.n, 32, w.args.p) : 0;
  if (!nearest_layout(&w, &bytes)) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__batch_slice_init(&w.f, l, fn, batch, x->rows, bytes, 0));
  if (!dc__batch_slice_advance(&w.f, 0, batch)) {
    return l->query ? DC_OK : zero_factors(l, a, b, residual);
  }
  (void)nearest_layout(&w, &bytes);
  DC__TRY(nearest_scale_cuda(&w, fn, x, &exponent));
  DC__TRY(nearest_iterate_cuda(&w, fn, &result));
  const dc__cuda_totals_args add = {
      .sums = w.args.residual_sums, .to = w.totals, .count = 2, .rows = x->rows, .group = 2, .step = 2, .factor = 1};
  dc__stream_zero(w.f.stream, w.totals, sizeof totals);
  dc__cuda_nearest_residual(w.f.stream, &w.args);
  dc__cuda_totals(w.f.stream, &add);
  DC__TRY(dc__linalg_copy_to_host(l, totals, w.totals, sizeof totals));
  /* a and b get the same norm, and half of the scale's exponent each. */
  const double factor = copysign(sqrt(result.state.sigma), result.trace);
  nearest_store_cuda(&w, w.args.u, ldexp(factor, exponent / 2), a);
  nearest_store_cuda(&w, w.args.v, ldexp(factor, exponent / 2), b);
  if (residual != NULL) {
    *residual = totals[1] > 0 ? sqrt(totals[0] / totals[1]) : 0;
  }
  return dc__linalg_synchronize(l);
}
