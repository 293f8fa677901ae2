/* Newton's iteration on a device, one slice of the batch at a time. Kernels accept or reject steps and detect
 * convergence. The host reads the state once before the iteration, after each step that is not rough, and once after
 * the iteration. */
#include <string.h>

#include "linalg/batch_slice_cuda.h"
#include "linalg/roots/inverse_root_newton.h"

static void newton_multiply_cuda(const dc__newton_iteration *w, const void *a, const void *b, void *c) {
  dc__batch_slice *f = w->context;
  const int64_t n = w->job->n;
  dc__gemm g = dc__square_gemm(w->dtype, n, a, b, c);
  g.batch = f->count;
  g.stride_a = g.stride_b = g.stride_c = n * n;
  dc__linalg_gemm(f->l, &g, f->gemm_workspace);
}

static void newton_affine_cuda(const dc__newton_iteration *w, const double *factor, const void *from,
                               const double *shift, void *to, bool steps) {
  const dc__batch_slice *f = w->context;
  dc__cuda_affine_args args = {.from = from, .to = to, .reports = steps ? f->reports : NULL};
  args.rows = args.cols = w->job->n;
  args.count = f->count;
  args.wide = w->dtype == DC_FLOAT64;
  memcpy(args.factor, factor, sizeof args.factor);
  memcpy(args.shift, shift, sizeof args.shift);
  dc__cuda_affine(f->stream, &args);
}

static dc__cuda_newton_args newton_args(const dc__newton_iteration *w) {
  const dc__batch_slice *f = w->context;
  dc__cuda_newton_args args = {.m = w->m, .x = w->x, .next = w->next, .reports = f->reports, .n = w->job->n};
  args.count = f->count;
  args.wide = w->dtype == DC_FLOAT64;
  return args;
}

static void newton_check_cuda(dc__newton_iteration *w, uint32_t rough) {
  const dc__batch_slice *f = w->context;
  dc__cuda_newton_args args = newton_args(w);
  args.rough = rough;
  dc__cuda_newton_check_convergence(f->stream, &args);
}

static void newton_sync_cuda(dc__newton_iteration *w) {
  dc__batch_slice *f = w->context;
  dc__batch_slice_sync_reports(f);
  for (int32_t i = 0; i < f->count; i++) {
    w->state[i] = f->host_reports[i].newton;
  }
}

static void newton_distance_cuda(dc__newton_iteration *w, double *distances) {
  dc__batch_slice *f = w->context;
  dc__cuda_newton_args args = newton_args(w);
  args.ended = 1;
  dc__cuda_newton_distance(f->stream, &args);
  newton_sync_cuda(w);
  for (int32_t i = 0; i < f->count; i++) {
    distances[i] = dc__double_from_bits(f->host_reports[i].distance);
  }
}

static void newton_store_cuda(dc__newton_iteration *w) {
  uint32_t mask = 0;
  for (int32_t i = 0; i < w->count; i++) {
    mask |= (uint32_t)(w->tasks[i].status == DC_OK) << i;
  }
  dc__symmetric_store_slice(w->context, w->job, w->dtype, w->next, mask, w->tasks);
}

static const dc__newton_work newton_work_cuda = {.multiply = newton_multiply_cuda,
                                                 .affine = newton_affine_cuda,
                                                 .check_convergence = newton_check_cuda,
                                                 .sync_state = newton_sync_cuda,
                                                 .distance = newton_distance_cuda,
                                                 .store = newton_store_cuda};

/* ---- slices ---- */

/* Loads matrices into s and bounds their eigenvalues. */
static void newton_load_cuda(dc__newton_iteration *w, double *bounds) {
  dc__batch_slice *f = w->context;
  const dc__cuda_matrices s = dc__batch_slice_dense_view(f, w->s, w->dtype, w->job->n, w->job->n);
  dc__symmetric_load_slice(f, w->job, w->dtype, w->s);
  dc__batch_slice_reduce(f, &s, false);
  dc__batch_slice_sync_reports(f);
  dc__symmetric_check_slice(f, w->job, w->x,
                            w->tasks); /* x and the memory behind it are free, and larger than a matrix */
  for (int32_t i = 0; i < f->count; i++) {
    w->tasks[i].dtype = w->dtype;
    bounds[i] = f->host_reports[i].norm;
  }
}

static void bind_matrices(dc__newton_iteration *w, const dc__batch_slice *f) {
  void **const squares[] = {&w->s, &w->x, &w->next, &w->m, &w->h, &w->spare, &w->other};
  const size_t bytes = (size_t)(w->job->n * w->job->n * f->max_count) * dc_dtype_size(w->dtype);
  w->first = f->first;
  w->count = f->count;
  for (size_t i = 0; i < DC__COUNT(squares); i++) {
    *squares[i] = f->matrices + i * bytes;
  }
}

dc_status dc__newton_cuda(dc_linalg *l, const dc__spectral_request *r) {
  const int64_t n = r->a.rows;
  const int64_t batch = n > 0 ? r->a.batch : 0;
  const int32_t dtype = r->options.precision != DC_DTYPE_NONE ? r->options.precision : r->a.dtype;
  const dc__spectral_job job = {.l = l, .r = r, .n = n};
  dc__spectral_task tasks[DC__CUDA_BATCH_SLICE];
  dc__spectral_task failed = {.status = DC_OK};
  int64_t at = 0;
  int64_t bytes;
  dc__batch_slice f;
  if (__builtin_mul_overflow(n, n, &bytes) || __builtin_mul_overflow(bytes, (DC__NEWTON_SQUARES + 1) * 8, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", r->fn);
  }
  DC__TRY(dc__batch_slice_init(&f, l, r->fn, batch, n, (size_t)bytes / 8 * dc_dtype_size(dtype), 0));
  for (int64_t first = 0; dc__batch_slice_advance(&f, first, batch); first += f.count) {
    double bounds[DC__CUDA_BATCH_SLICE];
    dc__newton_iteration w = {.job = &job, .work = &newton_work_cuda, .context = &f, .tasks = tasks, .dtype = dtype};
    bind_matrices(&w, &f);
    newton_load_cuda(&w, bounds);
    dc__newton_run(&w, bounds);
    DC__TRY(dc__linalg_synchronize(l));
    dc__batch_slice_write_info(&f, r, tasks, &failed, &at);
  }
  return failed.status == DC_OK ? DC_OK : dc__spectral_fail(r, &failed, at);
}
