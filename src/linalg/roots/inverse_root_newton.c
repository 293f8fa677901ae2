/* Inverse roots by matrix products alone. Coupled Newton: M starts as z (A + epsilon I) with eigenvalues in (0, 1], X
 * as I. A step multiplies X by H = a (I - c M) and M by H^p, so that X^p z (A + epsilon I) stays M, and M converges to
 * I. The coefficients a and c raise the smallest eigenvalue most while none leaves (0, 1]. They depend on p and the
 * smallest eigenvalue alone. */
#include <math.h>

#include "linalg/roots/inverse_root_newton.h"

/* The optimal step would take the largest eigenvalue down to the smallest one and lose its digits. Steps therefore
 * assume that no eigenvalue is below this floor. */
static const double MIN_EIG_FLOOR = 0.05;

/* The floor if the smallest eigenvalue is below A's rounding error, where few matrices have any. Lower floors would
 * turn the other eigenvectors further from A's with each step. This one does not, as the slope is below 1 above it. */
static const double CALM_FLOOR = 0.5;

static const double zeros[DC__CUDA_BATCH_SLICE];
static const double ones[DC__CUDA_BATCH_SLICE] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                  1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static void swap_pointers(void **a, void **b) {
  void *first = *a;
  *a = *b;
  *b = first;
}

/* m = h^p m, where h is overwritten. */
static void multiply_power(dc__newton_iteration *w, void **m, void **h) {
  for (int32_t p = w->job->r->root;; swap_pointers(h, &w->other)) {
    if (p % 2 == 1) {
      w->work->multiply(w, *h, *m, w->spare);
      swap_pointers(m, &w->spare);
    }
    p /= 2;
    if (p == 0) {
      return;
    }
    w->work->multiply(w, *h, *h, w->other);
  }
}

/* Computes the next step's a and c for matrix i, and updates min_eig[i] to M's smallest eigenvalue after the step. */
static void step_coefficients(dc__newton_iteration *w, int32_t i, double *a, double *c) {
  double p = w->job->r->root;
  double low = fmax(w->min_eig[i], w->min_eig[i] < dc__epsilon(w->dtype) ? CALM_FLOOR : MIN_EIG_FLOOR);
  *c = (1 - pow(low, 1 / p)) / (1 - pow(low, 1 + 1 / p));
  double top = 1 / ((p + 1) * *c) * pow(p / (p + 1), p); /* maximum of y (1 - c y)^p, at y = 1 / ((p + 1) c) */
  *a = pow(top, -1 / p);
  w->min_eig[i] = fmin(w->min_eig[i] * pow(1 - *c * w->min_eig[i], p), pow(1 - *c, p)) / top;
}

/* One step: H = shift I + factor M. */
static void newton_step(dc__newton_iteration *w, const double *factor, const double *shift, uint32_t rough,
                        bool first) {
  w->work->affine(w, factor, w->m, shift, w->h, true);
  if (first) {
    w->work->affine(w, ones, w->h, zeros, w->next, false);
  } else {
    w->work->multiply(w, w->x, w->h, w->next);
  }
  multiply_power(w, &w->m, &w->h);
  w->work->check_convergence(w, rough);
  swap_pointers(&w->x, &w->next);
}

static bool all_ended(const dc__newton_iteration *w) {
  bool ended = true;
  for (int32_t i = 0; i < w->count; i++) {
    ended = ended && (w->tasks[i].status != DC_OK || w->state[i].end != DC__NEWTON_CONTINUES);
  }
  return ended;
}

/* The device's state is not read while the step of any matrix is rough. */
static void newton_iterate(dc__newton_iteration *w) {
  double factor[DC__CUDA_BATCH_SLICE], shift[DC__CUDA_BATCH_SLICE];
  double p = w->job->r->root;
  for (int32_t done = 0; done < w->job->r->max_iterations && !all_ended(w); done++) {
    uint32_t rough = 0;
    for (int32_t i = 0; i < w->count; i++) {
      double a = 1 + 1 / p;
      double c = 1 / (p + 1);
      if (w->min_eig[i] < DC__NEWTON_NEAR) {
        step_coefficients(w, i, &a, &c);
        rough |= UINT32_C(1) << i;
      }
      factor[i] = -a * c;
      shift[i] = a;
    }
    newton_step(w, factor, shift, rough, done == 0);
    if (rough == 0) {
      w->work->sync_state(w);
    }
  }
}

/* Computes the largest entry of |X^p (A + epsilon I) - I| from A itself. */
static void newton_residuals(dc__newton_iteration *w, double *distances) {
  w->work->affine(w, ones, w->x, zeros, w->h, false);
  w->work->affine(w, w->scale, w->s, w->shift, w->m, false);
  multiply_power(w, &w->m, &w->h);
  w->work->distance(w, distances);
}

/* Numbers are in units of 2^unit, so that large matrices and epsilons do not overflow. A matrix without a root
 * becomes I and stays so. */
static void newton_init(dc__newton_iteration *w, int32_t i, double bound) {
  const dc_spectral_options *o = &w->job->r->options;
  dc__spectral_task *t = &w->tasks[i];
  w->state[i] = (dc__newton_state){.error = 1};
  w->scale[i] = 0;
  w->shift[i] = w->min_eig[i] = w->top[i] = 1;
  w->unit[i] = 0;
  if (t->status != DC_OK) {
    return;
  }
  int unit = t->exponent > 0 ? t->exponent : 0;
  bound = ldexp(bound, t->exponent - unit);
  double epsilon = fmax(ldexp(o->eps_abs, -unit), o->eps_rel * bound);
  double top = (bound + epsilon) * (1 + 1e-3); /* rounding must not raise an eigenvalue over 1 */
  t->largest = ldexp(bound, unit);
  t->epsilon = ldexp(epsilon, unit);
  if (!(epsilon > 0)) {
    t->status = DC_E_NOT_POSITIVE;
    return;
  }
  w->scale[i] = ldexp(1, t->exponent - unit) / top;
  w->shift[i] = w->min_eig[i] = epsilon / top;
  w->top[i] = top;
  w->unit[i] = unit;
  t->path = DC_PATH_FRESH;
}

/* Sets a matrix's iterations, residual and status after its X is stored. */
static void newton_write_info(dc__newton_iteration *w, int32_t i, double residual) {
  const dc__spectral_request *r = w->job->r;
  dc__spectral_task *t = &w->tasks[i];
  double gate = r->max_residual > 0 ? r->max_residual : 16 * dc__epsilon(w->dtype) / (w->shift[i]);
  t->iterations = w->state[i].iterations;
  t->residual = residual;
  if (t->status == DC_OK && !(w->state[i].end == DC__NEWTON_CONVERGED && residual <= gate)) {
    t->status = DC_E_NOT_CONVERGED;
  }
}

void dc__newton_run(dc__newton_iteration *w, const double *bounds) {
  double factor[DC__CUDA_BATCH_SLICE], distances[DC__CUDA_BATCH_SLICE];
  double p = w->job->r->root;
  for (int32_t i = 0; i < w->count; i++) {
    newton_init(w, i, bounds[i]);
  }
  if (all_ended(w)) {
    return;
  }
  w->work->affine(w, w->scale, w->s, w->shift, w->m, false);
  w->work->affine(w, zeros, w->s, ones, w->x, false);
  newton_iterate(w);
  newton_residuals(w, distances);
  for (int32_t i = 0; i < w->count; i++) {
    factor[i] = pow(w->top[i], -1 / p) * exp2(-w->unit[i] / p);
  }
  w->work->affine(w, factor, w->x, zeros, w->next, false);
  w->work->store(w);
  for (int32_t i = 0; i < w->count; i++) {
    if (w->tasks[i].path == DC_PATH_FRESH) {
      newton_write_info(w, i, distances[i]);
    }
  }
}

/* ---- CPU: one matrix ---- */

/* The product is symmetric, so only one triangle is computed. */
static void newton_multiply_cpu(const dc__newton_iteration *w, const void *a, const void *b, void *c) {
  dc__spectral_gemmt(w->job, w->dtype, false, false, a, b, c, w->context);
  dc__mirror_lower(c, w->dtype, w->job->n);
}

static void newton_affine_cpu(const dc__newton_iteration *w, const double *factor, const void *from,
                              const double *shift, void *to, bool steps) {
  (void)steps;
  bool wide = w->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  for (int64_t i = 0; i < n * n; i++) {
    dc__store_element(to, wide, i, factor[0] * dc__load_element(from, wide, i));
  }
  for (int64_t i = 0; i < n * n; i += n + 1) {
    dc__store_element(to, wide, i, dc__load_element(to, wide, i) + shift[0]);
  }
}

static void newton_distance_cpu(dc__newton_iteration *w, double *distances) {
  bool wide = w->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  double max_abs = 0;
  for (int64_t i = 0; i < n * n; i++) {
    double gap = fabs(dc__load_element(w->m, wide, i) - (i % (n + 1) == 0 ? 1 : 0));
    max_abs = gap > max_abs || isnan(gap) ? gap : max_abs; /* the maximum with a NaN is NaN */
  }
  distances[0] = max_abs;
}

static void newton_check_cpu(dc__newton_iteration *w, uint32_t rough) {
  double now;
  newton_distance_cpu(w, &now);
  if (!dc__newton_check_convergence(&w->state[0], now, rough != 0)) {
    newton_affine_cpu(w, ones, w->x, zeros, w->next, false);
  }
}

static void newton_sync_cpu(dc__newton_iteration *w) {
  (void)w;
}

static void newton_store_cpu(dc__newton_iteration *w) {
  dc__spectral_task *t = w->tasks;
  if (!dc__symmetric_store(w->job, w->first, t, w->next)) {
    t->status = DC_E_NOT_FINITE;
  }
}

static const dc__newton_work newton_work_cpu = {.multiply = newton_multiply_cpu,
                                                .affine = newton_affine_cpu,
                                                .check_convergence = newton_check_cpu,
                                                .sync_state = newton_sync_cpu,
                                                .distance = newton_distance_cpu,
                                                .store = newton_store_cpu};

/* The largest row sum of magnitudes bounds the largest eigenvalue. */
static double inf_norm(const dc__spectral_job *job, const dc__spectral_task *t) {
  double max_abs = 0;
  for (int64_t i = 0; i < job->n; i++) {
    double sum = 0;
    for (int64_t j = 0; j < job->n; j++) {
      sum += fabs(dc__load_element(t->s, t->dtype == DC_FLOAT64, i * job->n + j));
    }
    max_abs = fmax(max_abs, sum);
  }
  return max_abs;
}

void dc__newton_cpu(const dc__spectral_job *job, int64_t index, dc__spectral_task *t, void *scratch) {
  int64_t n = job->n;
  size_t bytes = (size_t)(n * n) * dc_dtype_size(t->dtype);
  char *work = t->work;
  double bound = inf_norm(job, t);
  dc__newton_iteration w = {
      .job = job, .work = &newton_work_cpu, .context = scratch, .tasks = t, .first = index, .count = 1};
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
