/* Loading and storing symmetric matrices. Invalid input is found before LAPACK sees it. Scaling by a power of two
 * avoids overflow in norms and loss to denormals. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh.h"

enum { TILE = 32 }; /* two tiles that mirror each other fit the first-level cache */

/* Visits the tiles on and below the diagonal. */
#define FOR_TILES(n, i0, j0)                 \
  for (int64_t i0 = 0; i0 < (n); i0 += TILE) \
    for (int64_t j0 = 0; j0 <= i0; j0 += TILE)

/* The tile's mirror tile, transposed into its own memory. In the matrix, rows whose length is a power of two would
 * evict each other from the cache. */
#define TRANSPOSED(T, transposed, a, m, i0, j0, n)               \
  T transposed[TILE][TILE];                                      \
  for (int64_t j = j0; j < dc__min_int64(j0 + TILE, n); j++) {   \
    for (int64_t i = i0; i < dc__min_int64(i0 + TILE, n); i++) { \
      transposed[i - i0][j - j0] = HIGH(a, m, i, j);             \
    }                                                            \
  }

/* Entries of the caller's matrix [i][j] and [j][i]. */
#define LOW(a, m, i, j) (a)[(i) * (m)->row_stride + (j) * (m)->col_stride]
#define HIGH(a, m, i, j) LOW(a, m, j, i)

typedef struct triangle_stats {
  double low, high; /* the largest entry of each triangle */
  double mean;      /* the largest entry of both triangles' mean */
  double gap;       /* half the largest difference of two entries that mirror each other */
} triangle_stats;   /* each is NaN if one of its entries is */

/* The bits of |x|, which as integers have the order of the magnitudes, with infinity and NaN last. The compiler
 * vectorises a search for the largest integer, but not for the largest floating-point number. */
static int32_t magnitude_float(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & INT32_MAX;
}

static int64_t magnitude_double(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & INT64_MAX;
}

/* Measures a tile and its mirror tile: raises the largest magnitude of each triangle and, if wanted, of their mean, and
 * the largest half difference. */
#define MEASURE(name, T, Bits, magnitude)                                                      \
  static void name(const T *a, const dc__mat *m, bool mean, int64_t i0, int64_t j0, int64_t n, \
                   triangle_stats *stats) {                                                    \
    TRANSPOSED(T, transposed, a, m, i0, j0, n)                                                 \
    Bits low_max = magnitude((T)stats->low), high_max = magnitude((T)stats->high);             \
    Bits gap_max = magnitude((T)stats->gap);                                                   \
    for (int64_t i = i0; i < dc__min_int64(i0 + TILE, n); i++) {                               \
      const int64_t columns = dc__min_int64(j0 + TILE, i + 1) - j0;                            \
      T row[TILE];                                                                             \
      for (int64_t j = 0; j < columns; j++) {                                                  \
        row[j] = LOW(a, m, i, j0 + j);                                                         \
      }                                                                                        \
      for (int64_t j = 0; j < columns; j++) {                                                  \
        const Bits low = magnitude(row[j]), high = magnitude(transposed[i - i0][j]);           \
        const Bits gap = magnitude(row[j] / 2 - transposed[i - i0][j] / 2);                    \
        low_max = low > low_max ? low : low_max;                                               \
        high_max = high > high_max ? high : high_max;                                          \
        gap_max = gap > gap_max ? gap : gap_max;                                               \
      }                                                                                        \
      for (int64_t j = 0; mean && j < columns; j++) {                                          \
        const double half = fabs((double)row[j] / 2 + (double)transposed[i - i0][j] / 2);      \
        stats->mean = half > stats->mean ? half : stats->mean;                                 \
      }                                                                                        \
    }                                                                                          \
    T low, high, gap;                                                                          \
    memcpy(&low, &low_max, sizeof low);                                                        \
    memcpy(&high, &high_max, sizeof high);                                                     \
    memcpy(&gap, &gap_max, sizeof gap);                                                        \
    stats->low = (double)low;                                                                  \
    stats->high = (double)high;                                                                \
    stats->gap = (double)gap;                                                                  \
  }
MEASURE(measure_float, float, int32_t, magnitude_float)
MEASURE(measure_double, double, int64_t, magnitude_double)

static const void *data_of(const dc__mat *m, int64_t index) {
  return (const char *)m->data + index * m->batch_stride * (int64_t)dc_dtype_size(m->dtype);
}

dc__symmetric_weights dc__symmetric_weights_of(int32_t symmetry) {
  const double low = symmetry == DC_SYMMETRY_LOWER ? 1 : symmetry == DC_SYMMETRY_UPPER ? 0 : 0.5;
  return (dc__symmetric_weights){low, 1 - low};
}

static dc__symmetric_stats measure_matrix(const dc__spectral_job *job, int64_t index) {
  const dc__mat *a = &job->r->a;
  const void *data = data_of(a, index);
  const int32_t symmetry = job->r->options.symmetry;
  triangle_stats t = {0};
  FOR_TILES(job->n, i0, j0) {
    if (a->dtype == DC_FLOAT64) {
      measure_double(data, a, symmetry == DC_SYMMETRY_MEAN, i0, j0, job->n, &t);
    } else {
      measure_float(data, a, symmetry == DC_SYMMETRY_MEAN, i0, j0, job->n, &t);
    }
  }
  const double largest = t.low > t.high ? t.low : t.high; /* also the mean's, if nearly symmetric */
  return (dc__symmetric_stats){.max_abs = largest,
                               .max_combined = symmetry == DC_SYMMETRY_LOWER   ? t.low
                                               : symmetry == DC_SYMMETRY_UPPER ? t.high
                                               : symmetry == DC_SYMMETRY_MEAN  ? t.mean
                                                                               : largest,
                               .asymmetry = t.gap,
                               .finite = isfinite(t.low) && isfinite(t.high)};
}

/* Finds the first nonfinite entry, or else the largest asymmetry. */
void dc__symmetric_locate(const dc__spectral_job *job, int64_t index, dc__spectral_task *t) {
  const dc__mat *a = &job->r->a;
  bool wide = a->dtype == DC_FLOAT64;
  double asymmetry = 0;
  FOR_TILES(job->n, i0, j0) {
    for (int64_t i = i0; i < dc__min_int64(i0 + TILE, job->n); i++) {
      for (int64_t j = j0; j < dc__min_int64(j0 + TILE, i + 1); j++) {
        double low = dc__load_element(a->data, wide, dc__mat_offset(a, index, i, j));
        double high = dc__load_element(a->data, wide, dc__mat_offset(a, index, j, i));
        if (!isfinite(low) || !isfinite(high)) {
          t->row = isfinite(low) ? j : i;
          t->col = isfinite(low) ? i : j;
          return;
        }
        double gap = fabs(low / 2 - high / 2);
        if (gap > asymmetry) {
          asymmetry = gap;
          t->row = i;
          t->col = j;
        }
      }
    }
  }
}

/* An entry of s is (low * its entry + high * the mirrored one) * both. */
typedef struct load_weights {
  double low, high, both;
} load_weights;

static load_weights load_weights_of(int32_t symmetry, dc__pow2_scale scale) {
  const dc__symmetric_weights w = dc__symmetric_weights_of(symmetry);
  return (load_weights){w.low * scale.first, w.high * scale.first, scale.second};
}

/* Loads one tile of the lower triangle into s. */
#define LOAD(name, From, To)                                                                                           \
  static void name(const From *a, const dc__mat *m, load_weights w, To *s, int64_t i0, int64_t j0, int64_t n) {        \
    TRANSPOSED(From, transposed, a, m, i0, j0, n)                                                                      \
    for (int64_t i = i0; i < dc__min_int64(i0 + TILE, n); i++) {                                                       \
      for (int64_t j = j0; j < dc__min_int64(j0 + TILE, i + 1); j++) {                                                 \
        s[i * n + j] = (To)(((double)LOW(a, m, i, j) * w.low + (double)transposed[i - i0][j - j0] * w.high) * w.both); \
      }                                                                                                                \
    }                                                                                                                  \
  }
LOAD(load_float, float, float)
LOAD(load_widened, float, double)
LOAD(load_narrowed, double, float)
LOAD(load_double, double, double)

static void load_tile(const dc__spectral_job *job, const void *data, const dc__spectral_task *t, load_weights w,
                      int64_t i0, int64_t j0) {
  const dc__mat *a = &job->r->a;
  bool wide = t->dtype == DC_FLOAT64;
  if (a->dtype == DC_FLOAT64) {
    if (wide) {
      load_double(data, a, w, t->s, i0, j0, job->n);
    } else {
      load_narrowed(data, a, w, t->s, i0, j0, job->n);
    }
  } else if (wide) {
    load_widened(data, a, w, t->s, i0, j0, job->n);
  } else {
    load_float(data, a, w, t->s, i0, j0, job->n);
  }
}

bool dc__symmetric_check(const dc__spectral_job *job, dc__spectral_task *t, const dc__symmetric_stats *stats) {
  if (!stats->finite) {
    t->status = DC_E_NOT_FINITE;
    return false;
  }
  t->asymmetry = stats->max_abs > 0 ? 2 * (stats->asymmetry / stats->max_abs) : 0;
  if (job->r->options.symmetry == DC_SYMMETRY_CHECK &&
      t->asymmetry > 64 * (double)job->n * dc__epsilon(job->r->a.dtype)) {
    t->status = DC_E_NOT_SYMMETRIC;
    return false;
  }
  /* max_combined can be 0 for a matrix that is not: half of the smallest subnormal number is 0. */
  const double largest = stats->max_combined > 0 ? stats->max_combined : stats->max_abs;
  t->exponent = largest > 0 ? ilogb(largest) : 0;
  return true;
}

bool dc__symmetric_load(const dc__spectral_job *job, int64_t index, dc__spectral_task *t) {
  const dc__symmetric_stats stats = measure_matrix(job, index);
  if (!dc__symmetric_check(job, t, &stats)) {
    dc__symmetric_locate(job, index, t);
    return false;
  }
  load_weights w = load_weights_of(job->r->options.symmetry, dc__pow2_scale_of(-t->exponent));
  FOR_TILES(job->n, i0, j0) {
    load_tile(job, data_of(&job->r->a, index), t, w, i0, j0);
  }
  dc__mirror_lower(t->s, t->dtype, job->n);
  return true;
}

#define MIRROR(name, T)                                                               \
  static void name(T *a, int64_t n) {                                                 \
    T transposed[TILE][TILE];                                                         \
    FOR_TILES(n, i0, j0) {                                                            \
      for (int64_t i = i0; i < dc__min_int64(i0 + TILE, n); i++) {                    \
        for (int64_t j = j0; j < dc__min_int64(j0 + TILE, n); j++) {                  \
          transposed[j - j0][i - i0] = a[i * n + j];                                  \
        }                                                                             \
      }                                                                               \
      for (int64_t j = j0; j < dc__min_int64(j0 + TILE, n); j++) {                    \
        for (int64_t i = j < i0 ? i0 : j + 1; i < dc__min_int64(i0 + TILE, n); i++) { \
          a[j * n + i] = transposed[j - j0][i - i0];                                  \
        }                                                                             \
      }                                                                               \
    }                                                                                 \
  }
MIRROR(mirror_short, uint16_t)
MIRROR(mirror_float, float)
MIRROR(mirror_double, double)

void dc__mirror_lower(void *a, int32_t dtype, int64_t n) {
  if (dtype == DC_FLOAT64) {
    mirror_double(a, n);
  } else if (dtype != DC_FLOAT32) {
    mirror_short(a, n);
  } else {
    mirror_float(a, n);
  }
}

bool dc__symmetric_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const void *from) {
  const dc__mat *out = &job->r->out;
  bool source = t->dtype == DC_FLOAT64;
  bool target = out->dtype == DC_FLOAT64;
  double limit = target ? DBL_MAX : (double)FLT_MAX;
  int64_t n = job->n;
  for (int64_t i = 0; i < n; i++) {
    bool fits = true;
    for (int64_t j = 0; j <= i; j++) {
      fits &= fabs(dc__load_element(from, source, i * n + j)) <= limit; /* false for NaN */
    }
    if (!fits) {
      return false;
    }
  }
  int64_t base = index * n * n; /* outputs are contiguous */
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j <= i; j++) {
      dc__store_element(out->data, target, base + i * n + j, dc__load_element(from, source, i * n + j));
    }
  }
  dc__mirror_lower((char *)out->data + (size_t)base * dc_dtype_size(out->dtype), out->dtype, n);
  return true;
}

void dc__eigenvectors_store(const dc__spectral_job *job, int64_t index, const dc__spectral_task *t, const dc__mat *to,
                            bool descending) {
  bool source = t->dtype == DC_FLOAT64;
  bool target = to->dtype == DC_FLOAT64;
  int64_t n = job->n;
  for (int64_t i0 = 0; i0 < n; i0 += TILE) {
    for (int64_t j0 = 0; j0 < n; j0 += TILE) {
      for (int64_t i = i0; i < dc__min_int64(i0 + TILE, n); i++) {
        for (int64_t j = j0; j < dc__min_int64(j0 + TILE, n); j++) {
          int64_t vector = descending ? n - 1 - j : j;
          dc__store_element(to->data, target, dc__mat_offset(to, index, i, j),
                            dc__load_element(t->s, source, vector * n + i));
        }
      }
    }
  }
}
