/* libdc's own symmetric eigensolver: Householder tridiagonalisation and implicit QL (Golub and Van Loan, Matrix
 * Computations, 8.3; EISPACK's tred2 and tql2). It is the reference for LAPACK's results, and the fallback. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh.h"

enum { MAX_SWEEPS = 64 }; /* QL steps for one eigenvalue; 2 or 3 are usual */

/* Couplings below this are none, as in LAPACK's steqr: it is the root of the least normal number. The largest entry is
 * near 1. Each row of a matrix of low rank multiplies the rest by the rounding, and subnormal numbers do not converge.
 */
static const double NEGLIGIBLE = 0x1p-511;

/* Replaces row `row` of the lower triangle by its Householder vector v. Returns |v|^2 / 2, or 0 for no reflection. */
static double householder_row(double *a, int64_t n, int64_t row, double *off) {
  double *v = a + row * n;
  double scale = 0;
  for (int64_t k = 0; k < row; k++) {
    scale += fabs(v[k]);
  }
  if (row < 2 || scale == 0) {
    off[row] = row > 0 ? v[row - 1] : 0;
    return 0;
  }
  double h = 0;
  for (int64_t k = 0; k < row; k++) {
    v[k] /= scale;
    h += v[k] * v[k];
  }
  double last = v[row - 1];
  double g = last >= 0 ? -sqrt(h) : sqrt(h);
  off[row] = scale * g;
  v[row - 1] = last - g;
  return h - last * g;
}

/* A <- (I - v v^T / h) A (I - v v^T / h) on the leading `row` rows, lower triangle. p is scratch. */
static void apply_householder(double *a, int64_t n, int64_t row, double h, double *p) {
  const double *v = a + row * n;
  memset(p, 0, (size_t)row * sizeof *p);
  for (int64_t i = 0; i < row; i++) {
    const double *line = a + i * n;
    double sum = line[i] * v[i];
    for (int64_t k = 0; k < i; k++) {
      sum += line[k] * v[k];
      p[k] += line[k] * v[i];
    }
    p[i] += sum;
  }
  double vp = 0;
  for (int64_t i = 0; i < row; i++) {
    p[i] /= h;
    vp += p[i] * v[i];
  }
  for (int64_t i = 0; i < row; i++) {
    p[i] -= vp / (h + h) * v[i];
    double *line = a + i * n;
    for (int64_t k = 0; k <= i; k++) {
      line[k] -= v[i] * p[k] + p[i] * v[k];
    }
  }
}

/* Sets d to T's diagonal and A to the transposed product of the reflections, so that row j will be eigenvector j. */
static void accumulate_householder(double *a, int64_t n, double *d, const double *h, double *p) {
  for (int64_t row = 0; row < n; row++) {
    double *v = a + row * n;
    if (h[row] != 0) {
      for (int64_t j = 0; j < row; j++) {
        double *line = a + j * n;
        double dot = 0;
        for (int64_t k = 0; k < row; k++) {
          dot += v[k] * line[k];
        }
        p[j] = dot / h[row];
      }
      for (int64_t j = 0; j < row; j++) {
        double *line = a + j * n;
        for (int64_t k = 0; k < row; k++) {
          line[k] -= p[j] * v[k];
        }
      }
    }
    d[row] = v[row];
    memset(v, 0, (size_t)row * sizeof *v);
    for (int64_t j = 0; j < row; j++) {
      a[j * n + row] = 0;
    }
    v[row] = 1;
  }
}

/* One implicit QL step on the unreduced block [l, m] with Wilkinson's shift. */
static void ql_step(double *rows, int64_t width, double *d, double *off, int64_t l, int64_t m) {
  double g = (d[l + 1] - d[l]) / (2 * off[l]);
  double r = hypot(g, 1);
  g = d[m] - d[l] + off[l] / (g + copysign(r, g));
  double s = 1;
  double c = 1;
  double p = 0;
  for (int64_t i = m - 1; i >= l; i--) {
    double f = s * off[i];
    double b = c * off[i];
    r = hypot(f, g);
    off[i + 1] = r;
    if (r == 0) { /* the block decouples at this element */
      d[i + 1] -= p;
      off[m] = 0;
      return;
    }
    s = f / r;
    c = g / r;
    g = d[i + 1] - p;
    r = (d[i] - g) * s + 2 * c * b;
    p = s * r;
    d[i + 1] = g + p;
    g = c * r - b;
    double *low = rows + i * width;
    double *high = low + width;
    for (int64_t k = 0; k < width; k++) {
      f = high[k];
      high[k] = s * low[k] + c * f;
      low[k] = c * low[k] - s * f;
    }
  }
  d[l] -= p;
  off[l] = g;
  off[m] = 0;
}

bool dc__tridiagonal_ql(int64_t n, double *rows, int64_t width, double *d, double *off) {
  for (int64_t l = 0; l < n; l++) {
    for (int32_t sweep = 0;; sweep++) {
      int64_t m = l;
      while (m < n - 1 && fabs(off[m]) > fmax(DBL_EPSILON * (fabs(d[m]) + fabs(d[m + 1])), NEGLIGIBLE)) {
        m++;
      }
      if (m == l) {
        break;
      }
      if (sweep == MAX_SWEEPS) {
        return false;
      }
      ql_step(rows, width, d, off, l, m);
    }
  }
  return true;
}

static void sort_eigenpairs(double *a, int64_t n, double *d, double *line) {
  for (int64_t i = 0; i < n; i++) {
    int64_t smallest = i;
    for (int64_t j = i + 1; j < n; j++) {
      smallest = d[j] < d[smallest] ? j : smallest;
    }
    if (smallest != i) {
      double value = d[i];
      d[i] = d[smallest];
      d[smallest] = value;
      memcpy(line, a + i * n, (size_t)n * sizeof *a);
      memcpy(a + i * n, a + smallest * n, (size_t)n * sizeof *a);
      memcpy(a + smallest * n, line, (size_t)n * sizeof *a);
    }
  }
}

bool dc__eigh_reference(int64_t n, double *a, double *values, double *work) {
  double *off = work;
  double *h = work + n;
  double *p = work + 2 * n;
  for (int64_t row = n - 1; row >= 0; row--) {
    h[row] = householder_row(a, n, row, off);
    if (h[row] != 0) {
      apply_householder(a, n, row, h[row], p);
    }
  }
  accumulate_householder(a, n, values, h, p);
  memmove(off, off + 1, (size_t)(n > 0 ? n - 1 : 0) * sizeof *off); /* off[i] joins i and i + 1 */
  if (n > 0) {
    off[n - 1] = 0;
  }
  if (!dc__tridiagonal_ql(n, a, n, values, off)) {
    return false;
  }
  sort_eigenpairs(a, n, values, p);
  return true;
}
