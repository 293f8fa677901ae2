/* x^(-1/p) as a sum of fractions. For 0 < a <= 1 and x in [min_x, 1]
 *   x^-a = sin(pi a) / pi * integral over t > 0 of t^-a / (t + x).
 * With t = min_x sc(u)^2, sc = sn / cn of Jacobi's functions for the modulus that belongs to min_x, let 0 < u < K.
 * The integrand is smooth except for u^(1 - 2 a) at one end and (K - u)^(2 a - 1) at the other. It stays so in a strip
 * around the interval that hardly narrows as min_x falls. So a Gauss-Jacobi rule of DC__TRIDIAGONAL_SHIFTS points has
 * an error below 1e-11 for min_x down to 1e-12. All weights are positive. */
#include <math.h>

#include "linalg/eigh/eigh.h"

enum { POINTS = DC__TRIDIAGONAL_SHIFTS, MEANS = 16 };

static const double PI = 3.14159265358979323846;

/* The Gauss-Jacobi rule for (1 - x)^a (1 + x)^-a on [-1, 1], from the eigenvalues of the recurrence's matrix. */
static void gauss_jacobi(double a, double x[POINTS], double weight[POINTS]) {
  double off[POINTS];
  for (int64_t k = 0; k < POINTS; k++) {
    double next = (double)(k + 1);
    x[k] = k == 0 ? -a : 0;
    off[k] = k + 1 < POINTS ? sqrt((next * next - a * a) / (4 * next * next - 1)) : 0;
    weight[k] = k == 0;
  }
  (void)dc__tridiagonal_ql(POINTS, weight, 1, x, off);
  double total = a == 0 ? 2 : 2 * PI * a / sin(PI * a);
  for (int64_t k = 0; k < POINTS; k++) {
    weight[k] *= total * weight[k];
  }
}

void dc__quadrature_init(dc__quadrature_rule *rule, int32_t root) {
  double a = 1 / (double)root;
  double exponent = 2 * a - 1;
  double x[POINTS], weight[POINTS];
  rule->root = root;
  if (root == 1) {
    return;
  }
  gauss_jacobi(exponent, x, weight);
  for (int64_t k = 0; k < POINTS; k++) {
    rule->node[k] = (1 + x[k]) / 2;
    rule->one_minus_node[k] = (1 - x[k]) / 2;
    rule->weight[k] = weight[k] * pow((1 + x[k]) / (1 - x[k]), exponent) * sin(PI * a) / PI;
  }
}

/* Landen's transformation: alternating arithmetic and geometric means of 1 and sqrt(min_x). */
typedef struct landen_means {
  double arithmetic[MEANS], geometric[MEANS];
  double last; /* the common mean: K is pi / 2 over it */
  int32_t count;
} landen_means;

static landen_means landen_means_of(double min_x) {
  landen_means l = {.count = 0};
  double a = 1;
  double product = min_x;
  for (int32_t i = 0; i < MEANS; i++) {
    double g = sqrt(product);
    l.arithmetic[i] = a;
    l.geometric[i] = g;
    l.count = i + 1;
    l.last = (a + g) / 2;
    if (fabs(a - g) <= 1e-8 * a) { /* the next difference is about its square */
      break;
    }
    product = g * a;
    a = l.last;
  }
  return l;
}

/* sc(u) and dn(u), for 0 < u < K. */
static void jacobi_functions(const landen_means *l, double u, double *sc, double *dn) {
  double phase = u * l->last;
  double a = cos(phase) / sin(phase);
  double c = a * l->last;
  *dn = 1;
  for (int32_t i = l->count - 1; i >= 0; i--) {
    a *= c;
    c *= *dn;
    *dn = (l->geometric[i] + a) / (l->arithmetic[i] + a);
    a = c / l->arithmetic[i];
  }
  *sc = 1 / c;
}

void dc__quadrature_partial_fractions(const dc__quadrature_rule *rule, double min_x, double *shifts, double *weights) {
  double a = 1 / (double)rule->root;
  landen_means l = landen_means_of(min_x);
  double whole = PI / 2 / l.last;
  for (int64_t k = 0; k < POINTS; k++) {
    if (rule->root == 1) {
      shifts[k] = k == 0 ? 0 : 1;
      weights[k] = k == 0 ? 1 : 0;
      continue;
    }
    bool left = rule->node[k] < rule->one_minus_node[k];
    double sc, dn;
    jacobi_functions(&l, whole * (left ? rule->node[k] : rule->one_minus_node[k]), &sc, &dn);
    double t = left ? min_x * sc * sc : 1 / (sc * sc); /* sc(K - u) sc(u) sqrt(min_x) = 1 */
    shifts[k] = t;
    weights[k] = rule->weight[k] * whole * pow(t, 1 - a) * dn * (1 + sc * sc) / sc;
  }
}
