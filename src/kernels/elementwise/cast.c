/* Casts between the seven types.
 *   float to float      rounded to nearest even; to and from 16-bit types by way of float32; NaN stays NaN
 *   float to integer    truncated; out of range saturates, NaN gives 0
 *   integer to float    rounded to nearest even, to 16-bit types by way of float32
 *   integer to integer  keeps the low bits
 *   a type to itself    keeps every bit */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"

#define LOOP(name, to, from, expression)                        \
  static void name(void *dst, const void *src, int64_t count) { \
    to *d = dst;                                                \
    const from *s = src;                                        \
    for (int64_t i = 0; i < count; i++) {                       \
      const from x = s[i];                                      \
      d[i] = (expression);                                      \
    }                                                           \
  }

LOOP(f32_of_f64, dc__f32, dc__f64, (float)x)
LOOP(f32_of_f16, dc__f32, dc__half, dc__f32_of_f16(x))
LOOP(f32_of_bf16, dc__f32, dc__half, dc__f32_of_bf16(x))
LOOP(f32_of_i8, dc__f32, dc__i8, (float)x)
LOOP(f32_of_i32, dc__f32, dc__i32, (float)x)
LOOP(f32_of_i64, dc__f32, dc__i64, (float)x)

LOOP(f16_of_f32, dc__half, dc__f32, dc__f16_of_f32(x))
LOOP(bf16_of_f32, dc__half, dc__f32, dc__bf16_of_f32(x))
LOOP(i8_of_f32, dc__i8, dc__f32, (int8_t)dc__integer_of((double)x, INT8_MIN, INT8_MAX))
LOOP(i32_of_f32, dc__i32, dc__f32, (int32_t)dc__integer_of((double)x, INT32_MIN, INT32_MAX))
LOOP(i64_of_f32, dc__i64, dc__f32, dc__integer_of((double)x, INT64_MIN, INT64_MAX))

LOOP(f64_of_f32, dc__f64, dc__f32, (double)x)
LOOP(f64_of_f16, dc__f64, dc__half, (double)dc__f32_of_f16(x))
LOOP(f64_of_bf16, dc__f64, dc__half, (double)dc__f32_of_bf16(x))
LOOP(f64_of_i8, dc__f64, dc__i8, (double)x)
LOOP(f64_of_i32, dc__f64, dc__i32, (double)x)
LOOP(f64_of_i64, dc__f64, dc__i64, (double)x)

LOOP(f16_of_f64, dc__half, dc__f64, dc__f16_of_f32((float)x))
LOOP(bf16_of_f64, dc__half, dc__f64, dc__bf16_of_f32((float)x))
LOOP(i8_of_f64, dc__i8, dc__f64, (int8_t)dc__integer_of(x, INT8_MIN, INT8_MAX))
LOOP(i32_of_f64, dc__i32, dc__f64, (int32_t)dc__integer_of(x, INT32_MIN, INT32_MAX))
LOOP(i64_of_f64, dc__i64, dc__f64, dc__integer_of(x, INT64_MIN, INT64_MAX))

LOOP(i64_of_i8, dc__i64, dc__i8, x)
LOOP(i64_of_i32, dc__i64, dc__i32, x)
LOOP(i8_of_i64, dc__i8, dc__i64, (int8_t)x)
LOOP(i32_of_i64, dc__i32, dc__i64, (int32_t)x)

/* [dst][src], for each pair of which one type is the pair's dc__compute_dtype; the others take two steps. */
static const dc__binary_fn plain[DC__KERNELS_DTYPES][DC__KERNELS_DTYPES] = {
    [DC_FLOAT32] = {[DC_FLOAT64] = f32_of_f64,
                    [DC_FLOAT16] = f32_of_f16,
                    [DC_BFLOAT16] = f32_of_bf16,
                    [DC_INT8] = f32_of_i8,
                    [DC_INT32] = f32_of_i32,
                    [DC_INT64] = f32_of_i64},
    [DC_FLOAT64] = {[DC_FLOAT32] = f64_of_f32,
                    [DC_FLOAT16] = f64_of_f16,
                    [DC_BFLOAT16] = f64_of_bf16,
                    [DC_INT8] = f64_of_i8,
                    [DC_INT32] = f64_of_i32,
                    [DC_INT64] = f64_of_i64},
    [DC_FLOAT16] = {[DC_FLOAT32] = f16_of_f32, [DC_FLOAT64] = f16_of_f64},
    [DC_BFLOAT16] = {[DC_FLOAT32] = bf16_of_f32, [DC_FLOAT64] = bf16_of_f64},
    [DC_INT8] = {[DC_FLOAT32] = i8_of_f32, [DC_FLOAT64] = i8_of_f64, [DC_INT64] = i8_of_i64},
    [DC_INT32] = {[DC_FLOAT32] = i32_of_f32, [DC_FLOAT64] = i32_of_f64, [DC_INT64] = i32_of_i64},
    [DC_INT64] = {[DC_FLOAT32] = i64_of_f32, [DC_FLOAT64] = i64_of_f64, [DC_INT8] = i64_of_i8, [DC_INT32] = i64_of_i32},
};

static void cast_plain(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  dc__binary_fn direct = plain[dst_dtype][src_dtype];
  if (direct != NULL) {
    direct(dst, src, count);
    return;
  }
  double tile[DC__KERNELS_TILE]; /* of the compute type, which has at most 8 bytes */
  int32_t compute_dtype = dc__compute_dtype(dst_dtype, src_dtype);
  for (int64_t i = 0; i < count; i += DC__KERNELS_TILE) {
    int64_t part = count - i < DC__KERNELS_TILE ? count - i : DC__KERNELS_TILE;
    dc__cast(tile, compute_dtype, dc__const_at(src, src_dtype, i), src_dtype, part);
    dc__cast(dc__at(dst, dst_dtype, i), dst_dtype, tile, compute_dtype, part);
  }
}

void dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count) {
  if (dst_dtype == src_dtype) {
    dc__copy(dst, src, (size_t)count * dc_dtype_size(src_dtype));
    return;
  }
  int64_t done = 0;
  dc__binary_fn fast = dc__active_kernels()->cast[dst_dtype][src_dtype];
  if (fast != NULL) {
    done = count - count % DC__KERNELS_STEP;
    fast(dst, src, done);
  }
  if (done < count) {
    cast_plain(dc__at(dst, dst_dtype, done), dst_dtype, dc__const_at(src, src_dtype, done), src_dtype, count - done);
  }
}
