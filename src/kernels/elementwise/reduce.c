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

void dc__divide(void *values, int32_t dtype, int64_t count, int32_t n) {
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
    dc__divide(out, in->compute_dtype, count, n);
  }
}

/* Computes a tile of the result, from element `begin` on. */
static void reduce_tile(const dc__reduction *r, const reduce_sources *in, int64_t begin, int64_t count) {
  void *dst = dc__at(r->dst, r->dst_dtype, begin);
  double sum[DC__KERNELS_TILE]; /* of the compute type, which has at most 8 bytes */
  double converted[DC__KERNELS_TILE];
  reduce_tree(sum, in, 0, r->n, begin, count, r->mean);
  if (in->compute_dtype == DC_INT64 && in->dtype != DC_INT64) { /* integers wrap in their own type */
    dc__cast(converted, in->dtype, sum, DC_INT64, count);
    dc__cast(sum, DC_INT64, converted, in->dtype, count);
  }
  if (!r->accumulate) {
    dc__cast(dst, r->dst_dtype, sum, in->compute_dtype, count);
  } else if (r->dst_dtype == in->compute_dtype) {
    dc__accumulate(dst, r->dst_dtype, sum, r->dst_dtype, count);
  } else {
    dc__cast(converted, r->dst_dtype, sum, in->compute_dtype, count);
    dc__accumulate(dst, r->dst_dtype, converted, r->dst_dtype, count);
  }
}

void dc__reduce(const dc__reduction *r) {
  if (r->n == 1 && !r->accumulate) {
    if (r->dst != r->src[0]) {
      dc__cast(r->dst, r->dst_dtype, r->src[0], r->src_dtype, r->count);
    }
    return;
  }
  int64_t done = 0;
  dc__reduce_fn fast = dc__active_kernels()->reduce[r->dst_dtype][r->src_dtype];
  if (fast != NULL && r->n > 1 && r->n <= DC__KERNELS_FAN_IN) {
    done = r->count - r->count % DC__KERNELS_STEP;
    fast(r->dst, r->src, r->n, 0, done, r->mean, r->accumulate);
  }
  const reduce_sources in = {r->src, r->src_dtype, dc__compute_dtype(r->src_dtype, r->src_dtype)};
  for (int64_t i = done; i < r->count; i += DC__KERNELS_TILE) {
    reduce_tile(r, &in, i, r->count - i < DC__KERNELS_TILE ? r->count - i : DC__KERNELS_TILE);
  }
}
