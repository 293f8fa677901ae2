/* Inverse roots by products of matrices alone. Coupled Newton: M begins as z (A + epsilon I) with its eigenvalues in
 * [least, 1], X as I; a step multiplies X by H = a (I - c M) and M by H^p, so that X^p z (A + epsilon I) stays M, and M
 * goes to I. The two numbers of a step are those that lift the least eigenvalue most while none leaves (0, 1]; they
 * depend on p and least alone. */
#include <math.h>

#include "linalg/spectral.h"

/* Steps that lift to the utmost would take the largest eigenvalue down to the least one, and its digits with it: they
 * pretend that no eigenvalue is below the cushion. From NEARLY on, plain Newton steps double the digits. */
static const double CUSHION = 0.05;
static const double NEARLY = 1 - 1e-4;
static const double GROWTH = 1.2; /* of the distance from I: beyond that the iteration runs away */

/* Matrices under way, all [n, n] in the computing type, whole. */
typedef struct newton {
  const dc__job *job;
  dc__task *t;
  void *scratch;
  void *x, *next; /* X now, and before or after the step */
  void *m, *h;
  void *spare, *other;
  double scale, shift; /* M begins as scale s + shift I */
  double least;
} newton;

static void swap(void **a, void **b) {
  void *first = *a;
  *a = *b;
  *b = first;
}

/* c = a b for polynomials of one symmetric matrix: symmetric, so half of it is computed. */
static void multiply(const newton *w, const void *a, const void *b, void *c) {
  dc__half_product(w->job, w->t->dtype, false, false, a, b, c, w->scratch);
  dc__mirror(c, w->t->dtype, w->job->n);
}

/* to = factor from + shift I */
static void affine(const newton *w, double factor, const void *from, double shift, void *to) {
  bool wide = w->t->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  for (int64_t i = 0; i < n * n; i++) {
    dc__put(to, wide, i, factor * dc__get(from, wide, i));
  }
  for (int64_t i = 0; i < n * n; i += n + 1) {
    dc__put(to, wide, i, dc__get(to, wide, i) + shift);
  }
}

/* The largest entry of |a - I|; NaN if there is one. */
static double distance(const newton *w, const void *a) {
  bool wide = w->t->dtype == DC_FLOAT64;
  int64_t n = w->job->n;
  double most = 0;
  for (int64_t i = 0; i < n * n; i++) {
    double gap = fabs(dc__get(a, wide, i) - (i % (n + 1) == 0 ? 1 : 0));
    most = gap <= most ? most : gap;
  }
  return most;
}

/* m = h^p m; h is spoilt. */
static void apply(newton *w, void **m, void **h) {
  for (int32_t p = w->job->r->root;; swap(h, &w->other)) {
    if (p % 2 == 1) {
      multiply(w, *h, *m, w->spare);
      swap(m, &w->spare);
    }
    p /= 2;
    if (p == 0) {
      return;
    }
    multiply(w, *h, *h, w->other);
  }
}

/* The next step's a and c; least becomes that of M afterwards. */
static void choose(newton *w, double *a, double *c) {
  double p = w->job->r->root;
  double low = fmax(w->least, CUSHION);
  *c = (1 - pow(low, 1 / p)) / (1 - pow(low, 1 + 1 / p));
  double top = 1 / ((p + 1) * *c) * pow(p / (p + 1), p); /* of y (1 - c y)^p over y, at y = 1 / ((p + 1) c) */
  *a = pow(top, -1 / p);
  w->least = fmin(w->least * pow(1 - *c * w->least, p), pow(1 - *c, p)) / top;
}

/* One step, with X afterwards in `next`; the distance of M from I. */
static double step(newton *w, double a, double c, bool first) {
  affine(w, -a * c, w->m, a, w->h);
  if (first) {
    affine(w, 1, w->h, 0, w->next);
  } else {
    multiply(w, w->x, w->h, w->next);
  }
  apply(w, &w->m, &w->h);
  return distance(w, w->m);
}

/* Whether X is all that this type can give; otherwise it is the best there was. */
static bool iterate(newton *w) {
  double p = w->job->r->root;
  double error = 1;
  for (int32_t done = 0; done < w->job->r->most_iterations; done++) {
    double a = 1 + 1 / p;
    double c = 1 / (p + 1);
    bool rough = w->least < NEARLY;
    if (rough) {
      choose(w, &a, &c);
    }
    double now = step(w, a, c, done == 0);
    if (!(now <= GROWTH * (rough ? 1 : error))) {
      return !rough && error <= 1 - NEARLY; /* the last digits of this type were reached before */
    }
    swap(&w->x, &w->next);
    w->t->iterations = done + 1;
    if (!rough && now >= error / 2) {
      return true;
    }
    error = rough ? 1 : now;
  }
  return false;
}

/* |X^p (A + epsilon I) - I| from A itself. */
static double residual(newton *w) {
  affine(w, 1, w->x, 0, w->h);
  affine(w, w->scale, w->t->s, w->shift, w->m);
  apply(w, &w->m, &w->h);
  return distance(w, w->m);
}

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

void dc__newton(const dc__job *job, int64_t index, dc__task *t, void *scratch) {
  const dc__spectral *r = job->r;
  int64_t n = job->n;
  size_t bytes = (size_t)(n * n) * dc_dtype_size(t->dtype);
  char *work = t->work;
  newton w = {.job = job, .t = t, .scratch = scratch, .x = work, .next = work + bytes, .m = work + 2 * bytes};
  w.h = work + 3 * bytes;
  w.spare = work + 4 * bytes;
  w.other = work + 5 * bytes;
  /* Numbers are in units of 2^unit, so that neither large matrices nor large epsilons overflow. */
  int unit = t->exponent > 0 ? t->exponent : 0;
  double bound = ldexp(row_bound(job, t), t->exponent - unit);
  double epsilon = fmax(ldexp(r->options.eps_abs, -unit), r->options.eps_rel * bound);
  double top = (bound + epsilon) * (1 + 1e-3); /* rounding must not lift an eigenvalue over 1 */
  t->largest = ldexp(bound, unit);
  t->epsilon = ldexp(epsilon, unit);
  if (!(epsilon > 0)) {
    t->status = DC_E_NOT_POSITIVE;
    return;
  }
  w.scale = ldexp(1, t->exponent - unit) / top;
  w.shift = w.least = epsilon / top;
  affine(&w, w.scale, t->s, w.shift, w.m);
  affine(&w, 0, t->s, 1, w.x);
  t->path = DC_PATH_FRESH;
  bool done = iterate(&w);
  t->residual = residual(&w);
  double gate = r->most_residual > 0 ? r->most_residual : 16 * dc__epsilon(t->dtype) * top / epsilon;
  double p = r->root;
  affine(&w, pow(top, -1 / p) * exp2(-unit / p), w.x, 0, w.next);
  if (!dc__symmetric_store(job, index, t, w.next)) {
    t->status = DC_E_NOT_FINITE;
    return;
  }
  t->status = done && t->residual <= gate ? DC_OK : DC_E_NOT_CONVERGED;
}
