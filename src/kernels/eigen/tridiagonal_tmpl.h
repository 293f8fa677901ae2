/* The bodies of tridiagonal.h. Included once for each instruction set, whose table TRIDIAGONAL names. */
#include <math.h>
#include <string.h>

#include "kernels/dispatch.h"

#if defined __AVX512F__
#include <immintrin.h>
enum { LANES = 8 };
#elif defined __AVX2__
#include <immintrin.h>
enum { LANES = 4 };
#else
enum { LANES = 2 };
#endif
enum { BLOCK = DC__TRIDIAGONAL_BLOCK, SHIFTS = DC__TRIDIAGONAL_SHIFTS };

typedef double lanes __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

/* c + a b */
static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
#if defined __AVX512F__
  return (lanes)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined __AVX2__
  return (lanes)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return c + a * b;
#endif
}

static inline lanes lanes_set1(double x) {
  return x - (lanes){0};
}

static inline double lanes_sum(lanes v) {
#if defined __AVX512F__
  return _mm512_reduce_add_pd((__m512d)v);
#elif defined __AVX2__
  __m128d sum = _mm_add_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum)));
#else
  return v[0] + v[1];
#endif
}

/* tridiagonal_symv() of `rows` rows: each element of the triangle is read once, for its row's sum and its column's. */
static inline void tridiagonal_symv_rows(double *restrict y, const double *restrict a, int64_t ld,
                                         const double *restrict x, int64_t first, int rows, int64_t across) {
  lanes sum[LANES];
  lanes factor[LANES];
  for (int r = 0; r < rows; r++) {
    sum[r] = lanes_set1(0);
    factor[r] = lanes_set1(x[first + r]);
  }
  for (int64_t j = 0; j < across; j += LANES) {
    const lanes at = *(const lanes *)(x + j);
    lanes column = *(lanes *)(y + j);
    for (int r = 0; r < rows; r++) {
      const lanes entry = *(const lanes *)(a + (first + r) * ld + j);
      sum[r] = lanes_fma(entry, at, sum[r]);
      column = lanes_fma(entry, factor[r], column);
    }
    *(lanes *)(y + j) = column;
  }
  for (int r = 0; r < rows; r++) {
    y[first + r] = lanes_sum(sum[r]);
  }
}

static void tridiagonal_symv(double *restrict y, const double *restrict a, int64_t ld, const double *restrict x,
                             int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) { /* the block on the diagonal is whole */
    tridiagonal_symv_rows(y, a, ld, x, i, LANES, i);
    const lanes at = *(const lanes *)(x + i);
    for (int r = 0; r < LANES; r++) {
      y[i + r] += lanes_sum(*(const lanes *)(a + (i + r) * ld + i) * at);
    }
  }
  for (const int64_t across = i; i < n; i++) {
    tridiagonal_symv_rows(y, a, ld, x, i, 1, across);
    for (int64_t j = across; j < i; j++) {
      y[i] += a[i * ld + j] * x[j];
      y[j] += a[i * ld + j] * x[i];
    }
    y[i] += a[i * ld + i] * x[i];
  }
}

enum { ROWS = 4 };

static void tridiagonal_gemv(double *restrict sums, const double *restrict rows, int64_t ld, int64_t count,
                             const double *restrict x, int64_t n) {
  const int64_t whole = n - n % LANES;
  for (int64_t k = 0; k < count; k += ROWS) {
    const int some = count - k < ROWS ? (int)(count - k) : ROWS;
    lanes sum[ROWS] = {lanes_set1(0), lanes_set1(0), lanes_set1(0), lanes_set1(0)};
    if (some == ROWS) {
      for (int64_t j = 0; j < whole; j += LANES) {
        const lanes at = *(const lanes *)(x + j);
        for (int r = 0; r < ROWS; r++) {
          sum[r] = lanes_fma(*(const lanes *)(rows + (k + r) * ld + j), at, sum[r]);
        }
      }
    } else {
      for (int r = 0; r < some; r++) {
        for (int64_t j = 0; j < whole; j += LANES) {
          sum[r] = lanes_fma(*(const lanes *)(rows + (k + r) * ld + j), *(const lanes *)(x + j), sum[r]);
        }
      }
    }
    for (int r = 0; r < some; r++) {
      sums[k + r] = lanes_sum(sum[r]);
      for (int64_t j = whole; j < n; j++) {
        sums[k + r] += rows[(k + r) * ld + j] * x[j];
      }
    }
  }
}

static void tridiagonal_gemv_t(double *restrict y, const double *restrict rows, int64_t ld, int64_t count,
                               const double *restrict factors, int64_t n) {
  const int64_t whole = n - n % LANES;
  int64_t k = 0;
  for (; k + ROWS <= count; k += ROWS) {
    for (int64_t j = 0; j < whole; j += LANES) {
      lanes sum = *(lanes *)(y + j);
      for (int r = 0; r < ROWS; r++) {
        sum = lanes_fma(*(const lanes *)(rows + (k + r) * ld + j), lanes_set1(factors[k + r]), sum);
      }
      *(lanes *)(y + j) = sum;
    }
  }
  for (; k < count; k++) {
    for (int64_t j = 0; j < whole; j += LANES) {
      *(lanes *)(y + j) = lanes_fma(*(const lanes *)(rows + k * ld + j), lanes_set1(factors[k]), *(lanes *)(y + j));
    }
  }
  for (int64_t j = whole; j < n; j++) {
    for (k = 0; k < count; k++) {
      y[j] += factors[k] * rows[k * ld + j];
    }
  }
}

/* ---- the ends of the spectrum ---- */

/* Each sweep cuts both intervals into POINTS + 1 parts. */
enum { POINTS = 8, SWEEPS = 18 };

/* Counts the eigenvalues below each of the 2 POINTS points: the negative pivots of T - point I. A pivot of zero makes
 * the next one negative infinity, so an eigenvalue at a point itself may count or not. */
static inline void count_below(const double *d, const double *off, int64_t n, const double *points, double *below) {
  enum { VECTORS = 2 * POINTS / LANES };
  lanes pivot[VECTORS], count[VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    pivot[v] = lanes_set1(1);
    count[v] = lanes_set1(0);
  }
  for (int64_t i = 0; i < n; i++) {
    const lanes square = lanes_set1(i > 0 ? off[i] * off[i] + 1e-300 : 0);
    const lanes entry = lanes_set1(d[i]);
    for (int v = 0; v < VECTORS; v++) {
      pivot[v] = entry - *(const lanes *)(points + v * LANES) - square / pivot[v];
      count[v] += (lanes)((__typeof__(pivot[v] < 0))lanes_set1(1) & (pivot[v] < 0));
    }
  }
  for (int v = 0; v < VECTORS; v++) {
    *(lanes *)(below + v * LANES) = count[v];
  }
}

static void tridiagonal_eigenvalue_bounds(const double *d, const double *off, int64_t n, double *min, double *max) {
  double low[2], high[2]; /* bounds of the smallest and of the largest eigenvalue */
  double from = d[0];
  double to = d[0];
  for (int64_t i = 0; i < n; i++) {
    const double radius = (i > 0 ? __builtin_fabs(off[i]) : 0) + (i + 1 < n ? __builtin_fabs(off[i + 1]) : 0);
    from = d[i] - radius < from ? d[i] - radius : from;
    to = d[i] + radius > to ? d[i] + radius : to;
  }
  low[0] = low[1] = from;
  high[0] = high[1] = to;
  for (int sweep = 0; sweep < SWEEPS; sweep++) {
    double points[2 * POINTS], below[2 * POINTS];
    for (int l = 0; l < 2 * POINTS; l++) {
      const int end = l / POINTS;
      points[l] = low[end] + (high[end] - low[end]) * (l % POINTS + 1) / (POINTS + 1);
    }
    count_below(d, off, n, points, below);
    for (int l = 0; l < 2 * POINTS; l++) { /* a point bounds the wanted eigenvalue from below, or from above */
      const int end = l / POINTS;
      if (below[l] <= (end == 0 ? 0 : (double)(n - 1))) {
        low[end] = points[l] > low[end] ? points[l] : low[end];
      } else {
        high[end] = points[l] < high[end] ? points[l] : high[end];
      }
    }
  }
  *min = (low[0] + high[0]) / 2;
  *max = (low[1] + high[1]) / 2;
}

/* ---- sums of inverses ---- */

/* The pivots of T from the last row up are base[i] = d[i] - off[i + 1]^2 / base[i + 1]. Those of T + shift I are p =
 * base + m, with m[i] = shift + off[i + 1]^2 / base[i + 1] * m[i + 1] / p[i + 1]. Below its diagonal an inverse has the
 * entry above times r[i] = -off[i] / p[i]. On it, it has 1 / p[i] + r[i]^2 times the one before, so nothing cancels
 * except in `base`. For all shifts, row i of `diagonal` has that entry, weighted, and row i of `ratio` has r[i]. */
static void shifted_pivots(const double *d, const double *off, int64_t n, const double *shifts, const double *weights,
                           double *base, double *diagonal, double *ratio) {
  for (int64_t i = n - 1; i >= 0; i--) {
    base[i] = d[i] - (i + 1 < n ? off[i + 1] * off[i + 1] / base[i + 1] : 0);
  }
  for (int k = 0; k < SHIFTS; k += LANES) {
    const lanes shift = *(const lanes *)(shifts + k);
    lanes more = shift;
    for (int64_t i = n - 1; i >= 0; i--) {
      const double link = i > 0 ? off[i] : 0;
      const lanes inverse = lanes_set1(1) / (lanes_set1(base[i]) + more);
      *(lanes *)(diagonal + i * SHIFTS + k) = *(const lanes *)(weights + k) * inverse;
      *(lanes *)(ratio + i * SHIFTS + k) = lanes_set1(-link) * inverse;
      more = lanes_fma(lanes_set1(link * link / base[i]) * more, inverse, shift);
    }
    lanes before = lanes_set1(0);
    for (int64_t i = 0; i < n; i++) {
      const lanes r = *(const lanes *)(ratio + i * SHIFTS + k);
      lanes *entry = (lanes *)(diagonal + i * SHIFTS + k);
      before = lanes_fma(r * r, before, *entry);
      *entry = before;
    }
  }
}

/* GROUP shifts' entries fit the registers. Every SOME rows, entries too small to matter become zero, before subnormals
 * slow the processor down. */
enum { GROUP = LANES == 8 ? 16 : 8, SOME = 8 };

static inline lanes without_tiny(lanes x) {
  const lanes tiny = lanes_set1(1e-200);
  typedef __typeof__(x > tiny) mask;
  return (lanes)((mask)x & ((x > tiny) | (x < -tiny)));
}

/* Computes the first rows of LANES columns, one in each lane, from each column's diagonal entry on. Leaves the last
 * row's entries for all shifts in `column`. */
static void inverse_head(double *restrict f, int64_t n, int64_t j, const double *restrict diagonal,
                         const double *restrict ratio, lanes *restrict column) {
  const int64_t across = n - j < LANES ? n - j : LANES;
  memset(column, 0, SHIFTS * sizeof *column);
  for (int64_t i = 0; i < across; i++) {
    lanes own = lanes_set1(0); /* the column that begins in this row */
    lanes sum[4] = {lanes_set1(0), lanes_set1(0), lanes_set1(0), lanes_set1(0)};
    own[i] = 1;
    for (int k = 0; k < SHIFTS; k++) {
      column[k] = lanes_fma(own, lanes_set1(diagonal[i * SHIFTS + k]), column[k] * lanes_set1(ratio[i * SHIFTS + k]));
      sum[k % 4] += column[k];
    }
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    memcpy(f + i * n, &sum[0], (size_t)across * sizeof *f);
  }
}

/* Computes the parts of GROUP shifts in the `rows` rows after those of `column`, and adds them to the result, or
 * overwrites it for the first group. */
static inline void inverse_tail(double *restrict f, int64_t n, int64_t rows, const double *restrict ratio,
                                const lanes *restrict column, bool first) {
  lanes entry[GROUP];
  _Pragma("GCC unroll 16") for (int k = 0; k < GROUP; k++) {
    entry[k] = column[k];
  }
  for (int64_t i = 0; i < rows; i++) {
    lanes *const row = (lanes *)(f + i * n);
    lanes sum[2] = {first ? lanes_set1(0) : *row, lanes_set1(0)};
    _Pragma("GCC unroll 16") for (int k = 0; k < GROUP; k++) {
      entry[k] *= lanes_set1(ratio[i * SHIFTS + k]);
      sum[k % 2] += entry[k];
    }
    *row = sum[0] + sum[1];
    if (i % SOME == SOME - 1) {
      _Pragma("GCC unroll 16") for (int k = 0; k < GROUP; k++) {
        entry[k] = without_tiny(entry[k]);
      }
    }
  }
}

static void tridiagonal_shifted_inverses(double *f, const double *d, const double *off, int64_t n, const double *shifts,
                                         const double *weights, double *scratch) {
  double *diagonal = scratch;
  double *ratio = diagonal + SHIFTS * n;
  lanes *column = (lanes *)(ratio + SHIFTS * n);
  shifted_pivots(d, off, n, shifts, weights, ratio + SHIFTS * (n + BLOCK), diagonal, ratio);
  for (int64_t j = 0; j < n; j += LANES) {
    inverse_head(f + j * n + j, n, j, diagonal + j * SHIFTS, ratio + j * SHIFTS, column);
    const int64_t below = j + LANES;
    for (int k = 0; k < SHIFTS && below < n; k += GROUP) {
      inverse_tail(f + below * n + j, n, n - below, ratio + below * SHIFTS + k, column + k, k == 0);
    }
  }
}

const dc__tridiagonal TRIDIAGONAL = {.symv = tridiagonal_symv,
                                     .gemv = tridiagonal_gemv,
                                     .gemv_t = tridiagonal_gemv_t,
                                     .eigenvalue_bounds = tridiagonal_eigenvalue_bounds,
                                     .shifted_inverses = tridiagonal_shifted_inverses};
