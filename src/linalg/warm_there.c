/* Roots from an earlier basis on a device: warm.c's way, a few matrices at a time. The host decides twice: by the
 * diagonal of Q^T A Q and whether Q is orthonormal, and by what the rest is like. */
#include <math.h>
#include <string.h>

#include "linalg/spectral_there.h"

static char *probe(const dc__decomposing *w, int32_t step) {
  return w->probes + (size_t)step * (size_t)w->flight.most * (size_t)w->job.n * DC__PROBES * sizeof(double);
}

/* c = op(a) b + beta c for each matrix; b and c have `cols` columns. */
static void multiply(const dc__decomposing *w, dc__flight *f, int32_t dtype, bool trans_a, const void *a, bool trans_b,
                     const void *b, int64_t cols, double beta, void *c) {
  const int64_t n = w->job.n;
  dc__gemm g = dc__square_product(dtype, n, a, b, c);
  g.trans_a = trans_a;
  g.trans_b = trans_b;
  g.n = g.ldc = cols;
  g.ldb = trans_b ? n : cols;
  g.beta = beta;
  g.batch = f->count;
  g.stride_a = n * n;
  g.stride_b = g.stride_c = n * cols;
  dc__linalg_gemm(f->l, &g, f->product);
}

/* Reports: how far Q^T Q v is from v. turned = Q^T A Q, and its diagonal in values. */
static void turn(dc__decomposing *w, dc__flight *f, int32_t dtype, const void *q) {
  const int64_t n = w->job.n;
  const size_t bytes = (size_t)(n * DC__PROBES) * dc_dtype_size(dtype);
  const dc__cuda_matrices back = dc__flight_dense(f, probe(w, 2), dtype, n, DC__PROBES);
  dc__cuda_matrices diagonal = dc__flight_dense(f, w->turned, dtype, 1, n);
  diagonal.batch_stride = n * n;
  diagonal.col_stride = n + 1;
  for (int32_t i = 0; i < f->count; i++) {
    dc__stream_copy(f->stream, probe(w, 0) + (size_t)i * bytes, w->noise, bytes);
  }
  dc__stream_copy(f->stream, probe(w, 2), probe(w, 0), (size_t)f->count * bytes);
  multiply(w, f, dtype, false, q, false, probe(w, 0), DC__PROBES, 0, probe(w, 1));
  multiply(w, f, dtype, true, q, false, probe(w, 1), DC__PROBES, -1, probe(w, 2));
  dc__flight_forget(f);
  dc__symmetric_bring(f, &w->job, dtype, w->s);
  multiply(w, f, dtype, false, w->s, false, q, n, 0, w->result);
  multiply(w, f, dtype, true, q, false, w->result, n, 0, w->turned);
  dc__cuda_load_alike(f->stream, diagonal, dc__flight_dense(f, w->values, dtype, 1, n), UINT32_MAX, 1);
  dc__flight_forget(f);
  dc__flight_measure(f, &back, false);
}

/* A bit a matrix with an orthonormal basis and a regular diagonal, of which factors become the inverse square roots. */
static uint32_t regular(dc__decomposing *w, dc__flight *f, int32_t dtype, dc__task *tasks) {
  const int64_t n = w->job.n;
  uint32_t mask = 0;
  dc__stream_copy(f->stream, w->numbers, w->values, (size_t)(f->count * n) * dc_dtype_size(dtype));
  dc__flight_look(f);
  for (int32_t i = 0; i < f->count; i++) {
    dc__task *t = &tasks[i];
    for (int64_t j = 0; j < n; j++) {
      t->values[j] = ldexp(dc__get(w->numbers, dtype == DC_FLOAT64, i * n + j), t->exponent);
    }
    const bool orthonormal = dc__flight_number(f->seen[i].most) <= dc__warm_limit(dtype);
    mask |= (uint32_t)(orthonormal && dc__regularise(&w->job, t)) << i;
    t->status = DC_OK; /* an approximation may be negative where the matrix is not: not for it to say */
  }
  for (int32_t i = 0; i < f->count; i++) { /* after all of them: numbers had another type */
    for (int64_t j = 0; j < n; j++) {
      w->numbers[i * n + j] = (mask >> i & 1u) != 0 ? 1 / sqrt(tasks[i].values[j]) : 0;
    }
  }
  dc__stream_copy(f->stream, w->factors, w->numbers, (size_t)(f->count * n) * sizeof *w->factors);
  return mask;
}

static dc__cuda_warm_args rest_of(const dc__decomposing *w, const dc__flight *f, int32_t dtype, const dc__task *tasks) {
  dc__cuda_warm_args args = {.from = w->turned, .to = w->result, .factors = w->factors, .n = w->job.n};
  args.count = f->count;
  args.wide = args.to_wide = dtype == DC_FLOAT64;
  for (int32_t i = 0; i < f->count; i++) {
    const dc__scale scale = dc__scale_of(tasks[i].exponent);
    args.first[i] = scale.first;
    args.second[i] = scale.second;
  }
  return args;
}

/* Of those in `mask`, which have a rest so small that the first order is enough. */
static uint32_t near(dc__decomposing *w, dc__flight *f, int32_t dtype, uint32_t mask, dc__task *tasks) {
  const int64_t n = w->job.n;
  const dc__cuda_warm_args rest = rest_of(w, f, dtype, tasks);
  const int64_t norms = f->count * DC__PROBES;
  dc__cuda_warm_rest(f->stream, &rest);
  for (int32_t step = 0; step < DC__WARM_STEPS; step++) {
    if (step > 0) {
      multiply(w, f, dtype, false, w->result, false, probe(w, step - 1), DC__PROBES, 0, probe(w, step));
    }
    dc__cuda_fold_args columns = {.sums = w->norms + step * norms, .reports = f->reports, .squares = 1};
    columns.from = dc__flight_dense(f, probe(w, step), dtype, DC__PROBES, n);
    columns.from.row_stride = 1;
    columns.from.col_stride = DC__PROBES;
    dc__cuda_fold(f->stream, &columns);
  }
  dc__stream_copy(f->stream, w->numbers, w->norms, (size_t)(DC__WARM_STEPS * norms) * sizeof *w->norms);
  dc__here_done(f->l->device, NULL);
  for (int32_t i = 0; i < f->count; i++) {
    double most = 0; /* the square of a step's stretch */
    for (int64_t at = i * DC__PROBES; at < (i + 1) * DC__PROBES; at++) {
      for (int32_t step = 1; step < DC__WARM_STEPS; step++) {
        const double before = w->numbers[(step - 1) * norms + at];
        const double stretch = before > 0 ? w->numbers[step * norms + at] / before : 0;
        most = stretch > most || isnan(stretch) ? stretch : most; /* NaN stays */
      }
    }
    tasks[i].change = (mask >> i & 1u) != 0 ? most : 0;
    mask &= ~((uint32_t) !(most <= w->job.r->options.tolerance) << i);
  }
  return mask;
}

/* The basis in a type. */
static void load_basis(const dc__decomposing *w, const dc__flight *f, int32_t dtype, void *to) {
  const int64_t n = w->job.n;
  dc__cuda_load_alike(f->stream, dc__flight_part(f, &w->job.r->basis), dc__flight_dense(f, to, dtype, n, n), UINT32_MAX,
                      1);
}

/* out = (Q G) (Q G)^T. */
static void finish(dc__decomposing *w, dc__flight *f, int32_t dtype, const void *q, uint32_t mask, dc__task *tasks) {
  const int64_t n = w->job.n;
  const int32_t finishing = dc__warm_finishing_type(w->job.r, dtype);
  dc__cuda_warm_args args = rest_of(w, f, dtype, tasks);
  args.root = w->job.r->root;
  args.to_wide = finishing == DC_FLOAT64;
  for (int64_t i = 0; i < f->count * n; i++) {
    const bool wanted = (mask >> (i / n) & 1u) != 0;
    w->numbers[i] = wanted ? pow(tasks[i / n].values[i % n], 1 / (double)args.root) : 1;
  }
  dc__stream_copy(f->stream, w->factors, w->numbers, (size_t)(f->count * n) * sizeof *w->factors);
  dc__cuda_warm_root(f->stream, &args);
  if (finishing != dtype) {
    load_basis(w, f, finishing, w->s);
    q = w->s;
  }
  multiply(w, f, finishing, false, q, false, w->result, n, 0, w->turned);
  multiply(w, f, finishing, false, w->turned, true, w->turned, n, 0, w->result);
  dc__symmetric_give(f, &w->job, finishing, w->result, mask, tasks);
  for (int32_t i = 0; i < f->count; i++) {
    if ((mask >> i & 1u) != 0) {
      tasks[i].solved = tasks[i].status == DC_OK;
      tasks[i].path = tasks[i].solved ? DC_PATH_WARM : tasks[i].path;
      tasks[i].status = DC_OK; /* what does not fit so, may otherwise */
    }
  }
}

dc_status dc__warm_there(dc__decomposing *w, dc__flight *f, dc__task *tasks) {
  const dc__mat *basis = &w->job.r->basis;
  const void *q =
      basis->places != NULL ? w->basis : dc__element(basis->data, basis->dtype, f->first * w->job.n * w->job.n);
  if (basis->places != NULL) { /* products want it in one place */
    load_basis(w, f, basis->dtype, w->basis);
  }
  turn(w, f, basis->dtype, q);
  uint32_t mask = regular(w, f, basis->dtype, tasks);
  mask = mask != 0 ? near(w, f, basis->dtype, mask, tasks) : 0;
  if (mask != 0) {
    finish(w, f, basis->dtype, q, mask, tasks);
  }
  return dc__linalg_done(f->l);
}
