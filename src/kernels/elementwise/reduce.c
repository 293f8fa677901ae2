/* The fixed-order reduction over ranks, tile by tile. Each tile of every source is read once, combined in the
 * first-level cache in the order of the tree, and written once. All of a tile is read before any of it is written, so
 * dst may be one of the sources. A result's bits do not depend on the instruction set, but the choice between several
 * NaNs is open, as in C. */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"

typedef struct reduce_sources {
  const void *const *src;
  int32_t dtype;
  int32_t compute_dtype; /* the type in which they are added */
} reduce_sources;

static void reduce_divide(void *values, int32_t dtype, int64_t count, int32_t n) {
  if (dtype == DC_FLOAT32) {
    dc__f32 *v = values;
    for (int64_t i = 0; i < count; i++) {
      v[i] = v[i] / (float)n;
    }
  } else if (dtype == DC_FLOAT64) {
    dc__f64 *v = values;
    for (int64_t i = 0; i < count; i++) {
      v[i] = v[i] / (double)n;
    }
  }
}

/* out = the tree over sources [first, first + n), divided by n if mean. */
static void reduce_tree(void *out, const reduce_sources *in, int32_t first, int32_t n, int64_t begin, int64_t count,
                        bool mean) {
  dc__reduce_fn fast = dc__active_kernels()->reduce[in->compute_dtype][in->dtype];
  if (fast != NULL && n > 1 && n <= DC__KERNELS_FAN_IN && count % DC__KERNELS_STEP == 0) {
    fast(out, in->src + first, n, begin, count, mean, false);
    return;
  }
  if (n <= 2) {
    dc__cast(out, in->compute_dtype, dc__const_at(in->src[first], in->dtype, begin), in->dtype, count);
  }
  if (n == 2) {
    dc__accumulate(out, in->compute_dtype, dc__const_at(in->src[first + 1], in->dtype, begin), in->dtype, count);
  }
  if (n > 2) {
    int32_t left = 2; /* the largest power of two below n: a full tree of pairs, level by level */
    while (left * 2 < n) {
      left *= 2;
    }
    double right[DC__KERNELS_TILE];
    reduce_tree(out, in, first, left, begin, count, false);
    reduce_tree(right, in, first + left, n - left, begin, count, false);
    dc__accumulate(out, in->compute_dtype, right, in->compute_dtype, count);
  }
  if (mean) {
    reduce_divide(out, in->compute_dtype, count, n);
  }
}

static void reduce_tile(void *dst, int32_t dst_dtype, const reduce_sources *in, int32_t n, int64_t begin, int64_t count,
                        bool mean, bool accumulate) {
  double sum[DC__KERNELS_TILE]; /* of the compute type, which has at most 8 bytes */
  double converted[DC__KERNELS_TILE];
  reduce_tree(sum, in, 0, n, begin, count, mean);
  if (in->compute_dtype == DC_INT64 && in->dtype != DC_INT64) { /* integers wrap in their own type */
    dc__cast(converted, in->dtype, sum, DC_INT64, count);
    dc__cast(sum, DC_INT64, converted, in->dtype, count);
  }
  if (!accumulate) {
    dc__cast(dst, dst_dtype, sum, in->compute_dtype, count);
  } else if (dst_dtype == in->compute_dtype) {
    dc__accumulate(dst, dst_dtype, sum, dst_dtype, count);
  } else {
    dc__cast(converted, dst_dtype, sum, in->compute_dtype, count);
    dc__accumulate(dst, dst_dtype, converted, dst_dtype, count);
  }
}

void dc__reduce(void *dst, int32_t dst_dtype, const void *const *src, int32_t n, int32_t src_dtype, int64_t count,
                bool mean, bool accumulate) {
  if (n == 1 && !accumulate) {
    if (dst != src[0]) {
      dc__cast(dst, dst_dtype, src[0], src_dtype, count);
    }
    return;
  }
  int64_t done = 0;
  dc__reduce_fn fast = dc__active_kernels()->reduce[dst_dtype][src_dtype];
  if (fast != NULL && n > 1 && n <= DC__KERNELS_FAN_IN) {
    done = count - count % DC__KERNELS_STEP;
    fast(dst, src, n, 0, done, mean, accumulate);
  }
  reduce_sources in = {src, src_dtype, dc__compute_dtype(src_dtype, src_dtype)};
  for (int64_t i = done; i < count; i += DC__KERNELS_TILE) {
    int64_t part = count - i < DC__KERNELS_TILE ? count - i : DC__KERNELS_TILE;
    reduce_tile(dc__at(dst, dst_dtype, i), dst_dtype, &in, n, i, part, mean, accumulate);
  }
}
