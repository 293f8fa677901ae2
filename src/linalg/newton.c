/* Inverse roots by products of matrices alone. Coupled Newton: M begins as z (A + epsilon I) with its eigenvalues in
 * [least, 1], X as I; a step multiplies X by H = a (I - c M) and M by H^p, so that X^p z (A + epsilon I) stays M, and M
 * goes to I. The two numbers of a step are those that lift the least eigenvalue most while none leaves (0, 1]; they
 * depend on p and least alone. */
#include <math.h>

#include "linalg/newton.h"

/* Steps that lift to the utmost would take the largest eigenvalue down to the least one, and its digits with it: they
 * pretend that no eigenvalue is below the cushion. */
static const double CUSHION = 0.05;

static const double none[DC__CUDA_FLIGHT];
static const double ones[DC__CUDA_FLIGHT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                             1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static void swap(void **a, void **b) {
  void *first = *a;
  *a = *b;
  *b = first;
}

/* m = h^p m; h is spoilt. */
static void apply(dc__newton *w, void **m, void **h) {
  for (int32_t p = w->job->r->root;; swap(h, &w->other)) {
    if (p % 2 == 1) {
      w->work->multiply(w, *h, *m, w->spare);
      swap(m, &w->spare);
    }
    p /= 2;
    if (p == 0) {
      return;
    }
    w->work->multiply(w, *h, *h, w->other);
  }
}

/* The next step's a and c for matrix i; least becomes that of M afterwards. */
static void choose(dc__newton *w, int32_t i, double *a, double *c) {
  double p = w->job->r->root;
  double low = fmax(w->least[i], CUSHION);
  *c = (1 - pow(low, 1 / p)) / (1 - pow(low, 1 + 1 / p));
  double top = 1 / ((p + 1) * *c) * pow(p / (p + 1), p); /* of y (1 - c y)^p over y, at y = 1 / ((p + 1) c) */
  *a = pow(top, -1 / p);
  w->least[i] = fmin(w->least[i] * pow(1 - *c * w->least[i], p), pow(1 - *c, p)) / top;
}

/* One step: H = shift I + factor M. */
static void step(dc__newton *w, const double *factor, const double *shift, uint32_t rough, bool first) {
  w->work->affine(w, factor, w->m, shift, w->h, true);
  if (first) {
    w->work->affine(w, ones, w->h, none, w->next, false);
  } else {
    w->work->multiply(w, w->x, w->h, w->next);
  }
  apply(w, &w->m, &w->h);
  w->work->judge(w, rough);
  swap(&w->x, &w->next);
}

static bool all_ended(const dc__newton *w) {
  bool ended = true;
  for (int32_t i = 0; i < w->count; i++) {
    ended = ended && (w->tasks[i].status != DC_OK || w->state[i].end != DC__NEWTON_GOES_ON);
  }
  return ended;
}

/* How a device's steps end is not asked for while some of them are rough. */
static void iterate(dc__newton *w) {
  double factor[DC__CUDA_FLIGHT], shift[DC__CUDA_FLIGHT];
  double p = w->job->r->root;
  for (int32_t done = 0; done < w->job->r->most_iterations && !all_ended(w); done++) {
    uint32_t rough = 0;
    for (int32_t i = 0; i < w->count; i++) {
      double a = 1 + 1 / p;
      double c = 1 / (p + 1);
      if (w->least[i] < DC__NEWTON_NEARLY) {
        choose(w, i, &a, &c);
        rough |= UINT32_C(1) << i;
      }
      factor[i] = -a * c;
      shift[i] = a;
    }
    step(w, factor, shift, rough, done == 0);
    if (rough == 0) {
      w->work->look(w);
    }
  }
}

/* |X^p (A + epsilon I) - I| from A itself. */
static void residuals(dc__newton *w, double *distances) {
  w->work->affine(w, ones, w->x, none, w->h, false);
  w->work->affine(w, w->scale, w->s, w->shift, w->m, false);
  apply(w, &w->m, &w->h);
  w->work->distance(w, distances);
}

/* Numbers are in units of 2^unit, so that neither large matrices nor large epsilons overflow. A matrix without a root
 * becomes I, and stays that. */
static void begin(dc__newton *w, int32_t i, double bound) {
  const dc_spectral_options *o = &w->job->r->options;
  dc__task *t = &w->tasks[i];
  w->state[i] = (dc__newton_state){.error = 1};
  w->scale[i] = 0;
  w->shift[i] = w->least[i] = w->top[i] = 1;
  w->unit[i] = 0;
  if (t->status != DC_OK) {
    return;
  }
  int unit = t->exponent > 0 ? t->exponent : 0;
  bound = ldexp(bound, t->exponent - unit);
  double epsilon = fmax(ldexp(o->eps_abs, -unit), o->eps_rel * bound);
  double top = (bound + epsilon) * (1 + 1e-3); /* rounding must not lift an eigenvalue over 1 */
  t->largest = ldexp(bound, unit);
  t->epsilon = ldexp(epsilon, unit);
  if (!(epsilon > 0)) {
    t->status = DC_E_NOT_POSITIVE;
    return;
  }
  w->scale[i] = ldexp(1, t->exponent - unit) / top;
  w->shift[i] = w->least[i] = epsilon / top;
  w->top[i] = top;
  w->unit[i] = unit;
  t->path = DC_PATH_FRESH;
}

/* What is known of a matrix whose X is stored. */
static void conclude(dc__newton *w, int32_t i, double residual) {
  const dc__spectral *r = w->job->r;
  dc__task *t = &w->tasks[i];
  double gate = r->most_residual > 0 ? r->most_residual : 16 * dc__epsilon(w->dtype) / (w->shift[i]);
  t->iterations = w->state[i].iterations;
  t->residual = residual;
  if (t->status == DC_OK && !(w->state[i].end == DC__NEWTON_DONE && residual <= gate)) {
    t->status = DC_E_NOT_CONVERGED;
  }
}

void dc__newton_run(dc__newton *w, const double *bounds) {
  double factor[DC__CUDA_FLIGHT], distances[DC__CUDA_FLIGHT];
  double p = w->job->r->root;
  for (int32_t i = 0; i < w->count; i++) {
    begin(w, i, bounds[i]);
  }
  if (all_ended(w)) {
    return;
  }
  w->work->affine(w, w->scale, w->s, w->shift, w->m, false);
  w->work->affine(w, none, w->s, ones, w->x, false);
  iterate(w);
  residuals(w, distances);
  for (int32_t i = 0; i < w->count; i++) {
    factor[i] = pow(w->top[i], -1 / p) * exp2(-w->unit[i] / p);
  }
  w->work->affine(w, factor, w->x, none, w->next, false);
  w->work->store(w);
  for (int32_t i = 0; i < w->count; i++) {
    if (w->tasks[i].path == DC_PATH_FRESH) {
      conclude(w, i, distances[i]);
    }
  }
}

/* ---- here: one matrix ---- */

/* Symmetric, so half of it is computed. */
static void multiply_here(const dc__newton *w, const void *a, const void *b, void *c) {
  dc__half_product(w->job, w->dtype, false, false, a, b, c, w->place);
  dc__mirror(c, w->dtype, w->job->n);
}

static void affine_here(const dc__newton *w, const double *factor, const void *from, const double *shift, void *to,
                        bool steps) {
  (void)steps;
  bool wide = w->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  for (int64_t i = 0; i < n * n; i++) {
    dc__put(to, wide, i, factor[0] * dc__get(from, wide, i));
  }
  for (int64_t i = 0; i < n * n; i += n + 1) {
    dc__put(to, wide, i, dc__get(to, wide, i) + shift[0]);
  }
}

static void distance_here(dc__newton *w, double *distances) {
  bool wide = w->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  double most = 0;
  for (int64_t i = 0; i < n * n; i++) {
    double gap = fabs(dc__get(w->m, wide, i) - (i % (n + 1) == 0 ? 1 : 0));
    most = gap <= most ? most : gap;
  }
  distances[0] = most;
}

static void judge_here(dc__newton *w, uint32_t rough) {
  double now;
  distance_here(w, &now);
  if (!dc__newton_judge(&w->state[0], now, rough != 0)) {
    affine_here(w, ones, w->x, none, w->next, false);
  }
}

static void look_here(dc__newton *w) {
  (void)w;
}

static void store_here(dc__newton *w) {
  dc__task *t = w->tasks;
  if (!dc__symmetric_store(w->job, w->first, t, w->next)) {
    t->status = DC_E_NOT_FINITE;
  }
}

static const dc__newton_work here = {.multiply = multiply_here,
                                     .affine = affine_here,
                                     .judge = judge_here,
                                     .look = look_here,
                                     .distance = distance_here,
                                     .store = store_here};

/* The largest sum of a row's magnitudes: at least the largest eigenvalue. */
static double row_bound(const dc__job *job, const dc__task *t) {
  double most = 0;
  for (int64_t i = 0; i < job->n; i++) {
    double sum = 0;
    for (int64_t j = 0; j < job->n; j++) {
      sum += fabs(dc__get(t->s, t->dtype == DC_FLOAT64, i * job->n + j));
    }
    most = fmax(most, sum);
  }
  return most;
}

void dc__newton_here(const dc__job *job, int64_t index, dc__task *t, void *scratch) {
  int64_t n = job->n;
  size_t bytes = (size_t)(n * n) * dc_dtype_size(t->dtype);
  char *work = t->work;
  double bound = row_bound(job, t);
  dc__newton w = {.job = job, .work = &here, .place = scratch, .tasks = t, .first = index, .count = 1};
  w.dtype = t->dtype;
  w.s = t->s;
  w.x = work;
  w.next = work + bytes;
  w.m = work + 2 * bytes;
  w.h = work + 3 * bytes;
  w.spare = work + 4 * bytes;
  w.other = work + 5 * bytes;
  dc__newton_run(&w, &bound);
}
