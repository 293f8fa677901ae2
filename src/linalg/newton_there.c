/* Newton's iteration on a device, a few matrices at a time. The kernels decide themselves which steps are taken and
 * when a matrix has ended; the host looks when no step is rough any more, and once before and once after the iteration.
 */
#include <string.h>

#include "linalg/newton.h"
#include "linalg/there.h"

static void multiply(const dc__newton *w, const void *a, const void *b, void *c) {
  dc__flight *f = w->place;
  const int64_t n = w->job->n;
  dc__gemm g = dc__square_product(w->dtype, n, a, b, c);
  g.batch = f->count;
  g.stride_a = g.stride_b = g.stride_c = n * n;
  dc__linalg_gemm(f->l, &g, f->product);
}

static void affine(const dc__newton *w, const double *factor, const void *from, const double *shift, void *to,
                   bool steps) {
  const dc__flight *f = w->place;
  dc__cuda_affine_args args = {.from = from, .to = to, .reports = steps ? f->reports : NULL};
  args.rows = args.cols = w->job->n;
  args.count = f->count;
  args.wide = w->dtype == DC_FLOAT64;
  memcpy(args.factor, factor, sizeof args.factor);
  memcpy(args.shift, shift, sizeof args.shift);
  dc__cuda_affine(f->stream, &args);
}

static dc__cuda_newton_args newton_args(const dc__newton *w) {
  const dc__flight *f = w->place;
  dc__cuda_newton_args args = {.m = w->m, .x = w->x, .next = w->next, .reports = f->reports, .n = w->job->n};
  args.count = f->count;
  args.wide = w->dtype == DC_FLOAT64;
  return args;
}

static void judge(dc__newton *w, uint32_t rough) {
  const dc__flight *f = w->place;
  dc__cuda_newton_args args = newton_args(w);
  args.rough = rough;
  dc__cuda_newton_judge(f->stream, &args);
}

static void look(dc__newton *w) {
  dc__flight *f = w->place;
  dc__flight_look(f);
  for (int32_t i = 0; i < f->count; i++) {
    w->state[i] = f->seen[i].newton;
  }
}

static void distance(dc__newton *w, double *distances) {
  dc__flight *f = w->place;
  dc__cuda_newton_args args = newton_args(w);
  args.ended = 1;
  dc__cuda_newton_distance(f->stream, &args);
  look(w);
  for (int32_t i = 0; i < f->count; i++) {
    distances[i] = dc__flight_number(f->seen[i].distance);
  }
}

static void store(dc__newton *w) {
  uint32_t mask = 0;
  for (int32_t i = 0; i < w->count; i++) {
    mask |= (uint32_t)(w->tasks[i].status == DC_OK) << i;
  }
  dc__symmetric_give(w->place, w->job, w->dtype, w->next, mask, w->tasks);
}

static const dc__newton_work there = {
    .multiply = multiply, .affine = affine, .judge = judge, .look = look, .distance = distance, .store = store};

/* ---- flights ---- */

/* Matrices into s, and bounds of their eigenvalues. */
static void load(dc__newton *w, double *bounds) {
  dc__flight *f = w->place;
  const dc__cuda_matrices s = dc__flight_dense(f, w->s, w->dtype, w->job->n, w->job->n);
  dc__symmetric_bring(f, w->job, w->dtype, w->s);
  dc__flight_fold(f, &s, false);
  dc__flight_look(f);
  dc__symmetric_seen(f, w->job, w->x, w->tasks); /* six matrices of at least half the size lie behind x */
  for (int32_t i = 0; i < f->count; i++) {
    w->tasks[i].dtype = w->dtype;
    bounds[i] = f->seen[i].fold;
  }
}

static void place(dc__newton *w, const dc__flight *f) {
  void **const squares[] = {&w->s, &w->x, &w->next, &w->m, &w->h, &w->spare, &w->other};
  const size_t bytes = (size_t)(w->job->n * w->job->n * f->most) * dc_dtype_size(w->dtype);
  w->first = f->first;
  w->count = f->count;
  for (size_t i = 0; i < DC__COUNT(squares); i++) {
    *squares[i] = f->squares + i * bytes;
  }
}

dc_status dc__newton_there(dc_linalg *l, const dc__spectral *r) {
  const int64_t n = r->a.rows;
  const int64_t batch = n > 0 ? r->a.batch : 0;
  const int32_t dtype = r->options.precision != DC_DTYPE_NONE ? r->options.precision : r->a.dtype;
  const dc__job job = {.l = l, .r = r, .n = n};
  dc__task tasks[DC__CUDA_FLIGHT];
  dc__task failed = {.status = DC_OK};
  int64_t at = 0;
  int64_t bytes;
  dc__flight f;
  if (__builtin_mul_overflow(n, n, &bytes) || __builtin_mul_overflow(bytes, (DC__NEWTON_SQUARES + 1) * 8, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", r->fn);
  }
  DC__TRY(dc__flight_open(&f, l, r->fn, batch, n, (size_t)bytes / 8 * dc_dtype_size(dtype), 0));
  for (int64_t first = 0; dc__flight_next(&f, first, batch); first += f.count) {
    double bounds[DC__CUDA_FLIGHT];
    dc__newton w = {.job = &job, .work = &there, .place = &f, .tasks = tasks, .dtype = dtype};
    place(&w, &f);
    load(&w, bounds);
    dc__newton_run(&w, bounds);
    DC__TRY(dc__linalg_done(l));
    dc__flight_report(&f, r, tasks, &failed, &at);
  }
  return failed.status == DC_OK ? DC_OK : dc__spectral_explain(r, &failed, at);
}
