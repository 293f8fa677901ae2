/* dst += src: both are converted to the compute type, and the sum to dst's type. */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"

static void add_f32(void *dst, const void *src, int64_t count) {
  dc__f32 *d = dst;
  const dc__f32 *s = src;
  for (int64_t i = 0; i < count; i++) {
    d[i] += s[i];
  }
}

static void add_f64(void *dst, const void *src, int64_t count) {
  dc__f64 *d = dst;
  const dc__f64 *s = src;
  for (int64_t i = 0; i < count; i++) {
    d[i] += s[i];
  }
}

static void add_i64(void *dst, const void *src, int64_t count) {
  dc__i64 *d = dst;
  const dc__i64 *s = src;
  for (int64_t i = 0; i < count; i++) {
    d[i] = (int64_t)((uint64_t)d[i] + (uint64_t)s[i]); /* wraps */
  }
}

static void accumulate_same_dtype(void *dst, const void *src, int32_t dtype, int64_t count) {
  if (dtype == DC_FLOAT32) {
    add_f32(dst, src, count);
  } else if (dtype == DC_FLOAT64) {
    add_f64(dst, src, count);
  } else {
    add_i64(dst, src, count);
  }
}

static void accumulate_plain(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  double dst_tile[DC__KERNELS_TILE]; /* of the compute type, which has at most 8 bytes */
  double src_tile[DC__KERNELS_TILE];
  int32_t compute_dtype = dc__compute_dtype(dst_dtype, src_dtype);
  for (int64_t i = 0; i < count; i += DC__KERNELS_TILE) {
    int64_t part = count - i < DC__KERNELS_TILE ? count - i : DC__KERNELS_TILE;
    void *d = dc__at(dst, dst_dtype, i);
    const void *s = dc__const_at(src, src_dtype, i);
    if (src_dtype != compute_dtype) {
      dc__cast(src_tile, compute_dtype, s, src_dtype, part);
      s = src_tile;
    }
    if (dst_dtype == compute_dtype) {
      accumulate_same_dtype(d, s, compute_dtype, part);
    } else {
      dc__cast(dst_tile, compute_dtype, d, dst_dtype, part);
      accumulate_same_dtype(dst_tile, s, compute_dtype, part);
      dc__cast(d, dst_dtype, dst_tile, compute_dtype, part);
    }
  }
}

void dc__accumulate(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  int64_t done = 0;
  dc__binary_fn fast = dc__active_kernels()->accumulate[dst_dtype][src_dtype];
  if (fast != NULL) {
    done = count - count % DC__KERNELS_STEP;
    fast(dst, src, done);
  }
  if (done < count) {
    accumulate_plain(dc__at(dst, dst_dtype, done), dst_dtype, dc__const_at(src, src_dtype, done), src_dtype,
                     count - done);
  }
}
