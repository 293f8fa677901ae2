/* Symmetric matrices in and out: what is not finite or not symmetric is found before LAPACK sees it, and a power of two
 * takes the scale away, so that no norm overflows and nothing is lost to denormals. */
#include <float.h>
#include <math.h>

#include "linalg/spectral.h"

enum { TILE = 32 }; /* two tiles that mirror each other fit the first-level cache */

/* Visits the tiles on and below the diagonal. */
#define FOR_TILES(n, i0, j0)                 \
  for (int64_t i0 = 0; i0 < (n); i0 += TILE) \
    for (int64_t j0 = 0; j0 <= i0; j0 += TILE)

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* Largest entry and largest asymmetry; false at the first value that is not finite, in either triangle. */
static bool scan(const dc__job *job, int64_t index, dc__task *t, double *most) {
  const dc__mat *a = &job->r->a;
  bool wide = a->dtype == DC_FLOAT64;
  double apart = 0;
  *most = 0;
  FOR_TILES(job->n, i0, j0) {
    for (int64_t i = i0; i < least(i0 + TILE, job->n); i++) {
      for (int64_t j = j0; j < least(j0 + TILE, i + 1); j++) {
        double low = dc__get(a->data, wide, dc__place(a, index, i, j));
        double high = dc__get(a->data, wide, dc__place(a, index, j, i));
        if (!isfinite(low) || !isfinite(high)) {
          t->row = isfinite(low) ? j : i;
          t->col = isfinite(low) ? i : j;
          return false;
        }
        *most = fmax(*most, fmax(fabs(low), fabs(high)));
        double gap = fabs(low / 2 - high / 2);
        if (gap > apart) {
          apart = gap;
          t->row = i;
          t->col = j;
        }
      }
    }
  }
  t->asymmetry = *most > 0 ? 2 * (apart / *most) : 0;
  return true;
}

static double one_value(double low, double high, int32_t symmetry) {
  switch (symmetry) {
    case DC_SYMMETRY_LOWER:
      return low;
    case DC_SYMMETRY_UPPER:
      return high;
    default:
      return low / 2 + high / 2;
  }
}

/* One tile of the lower triangle into s. */
static void load_tile(const dc__job *job, int64_t index, const dc__task *t, dc__scale scale, int64_t i0, int64_t j0) {
  const dc__mat *a = &job->r->a;
  int32_t symmetry = job->r->options.symmetry;
  bool from = a->dtype == DC_FLOAT64;
  bool to = t->dtype == DC_FLOAT64;
  for (int64_t i = i0; i < least(i0 + TILE, job->n); i++) {
    for (int64_t j = j0; j < least(j0 + TILE, i + 1); j++) {
      double low = dc__scaled(dc__get(a->data, from, dc__place(a, index, i, j)), scale);
      double high = dc__scaled(dc__get(a->data, from, dc__place(a, index, j, i)), scale);
      dc__put(t->s, to, i * job->n + j, one_value(low, high, symmetry));
    }
  }
}

bool dc__symmetric_load(const dc__job *job, int64_t index, dc__task *t) {
  double most;
  if (!scan(job, index, t, &most)) {
    t->status = DC_E_NOT_FINITE;
    return false;
  }
  if (job->r->options.symmetry == DC_SYMMETRY_CHECK &&
      t->asymmetry > 64 * (double)job->n * dc__epsilon(job->r->a.dtype)) {
    t->status = DC_E_NOT_SYMMETRIC;
    return false;
  }
  t->exponent = most > 0 ? ilogb(most) : 0;
  dc__scale scale = dc__scale_of(-t->exponent);
  FOR_TILES(job->n, i0, j0) {
    load_tile(job, index, t, scale, i0, j0);
  }
  dc__mirror(t->s, t->dtype, job->n);
  return true;
}

#define MIRROR(name, T)                                                       \
  static void name(T *a, int64_t n) {                                         \
    FOR_TILES(n, i0, j0) {                                                    \
      for (int64_t j = j0; j < least(j0 + TILE, n); j++) {                    \
        for (int64_t i = j < i0 ? i0 : j + 1; i < least(i0 + TILE, n); i++) { \
          a[j * n + i] = a[i * n + j];                                        \
        }                                                                     \
      }                                                                       \
    }                                                                         \
  }
MIRROR(mirror_float, float)
MIRROR(mirror_double, double)

void dc__mirror(void *a, int32_t dtype, int64_t n) {
  if (dtype == DC_FLOAT64) {
    mirror_double(a, n);
  } else {
    mirror_float(a, n);
  }
}

bool dc__symmetric_store(const dc__job *job, int64_t index, const dc__task *t, const void *from) {
  const dc__mat *out = &job->r->out;
  bool source = t->dtype == DC_FLOAT64;
  bool target = out->dtype == DC_FLOAT64;
  double limit = target ? DBL_MAX : (double)FLT_MAX;
  int64_t n = job->n;
  for (int64_t i = 0; i < n; i++) {
    bool fits = true;
    for (int64_t j = 0; j <= i; j++) {
      fits &= fabs(dc__get(from, source, i * n + j)) <= limit; /* false for NaN */
    }
    if (!fits) {
      return false;
    }
  }
  int64_t base = index * n * n; /* outputs are contiguous */
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j <= i; j++) {
      dc__put(out->data, target, base + i * n + j, dc__get(from, source, i * n + j));
    }
  }
  dc__mirror((char *)out->data + (size_t)base * dc_dtype_size(out->dtype), out->dtype, n);
  return true;
}

void dc__vectors_store(const dc__job *job, int64_t index, const dc__task *t, const dc__mat *to, bool descending) {
  bool source = t->dtype == DC_FLOAT64;
  bool target = to->dtype == DC_FLOAT64;
  int64_t n = job->n;
  for (int64_t i0 = 0; i0 < n; i0 += TILE) {
    for (int64_t j0 = 0; j0 < n; j0 += TILE) {
      for (int64_t i = i0; i < least(i0 + TILE, n); i++) {
        for (int64_t j = j0; j < least(j0 + TILE, n); j++) {
          int64_t vector = descending ? n - 1 - j : j;
          dc__put(to->data, target, dc__place(to, index, i, j), dc__get(t->s, source, vector * n + i));
        }
      }
    }
  }
}
