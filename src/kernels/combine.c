/* Copies, casts and sums that look at what they store: one pass over memory says whether all of it is finite. */
#include "kernels/convert.h"
#include "kernels/table.h"

/* One more than an exponent that is all ones carries into the sign's place: sums and "or"s, of which every compiler
 * makes vectors. */
#define FINITE(name, type, bits, one)                  \
  static bool name(const void *x, int64_t count) {     \
    const bits sign = (bits) ~((bits) ~(bits)0 >> 1);  \
    const type *s = x;                                 \
    bits carried = 0;                                  \
    for (int64_t i = 0; i < count; i++) {              \
      carried |= (bits)((s[i] & (bits)~sign) + (one)); \
    }                                                  \
    return (carried & sign) == 0;                      \
  }

typedef uint32_t word DC__ANYWHERE;
typedef uint64_t twin DC__ANYWHERE;

FINITE(finite_f16, dc__half, uint16_t, 0x0400u)
FINITE(finite_bf16, dc__half, uint16_t, 0x0080u)
FINITE(finite_f32, word, uint32_t, 0x00800000u)
FINITE(finite_f64, twin, uint64_t, UINT64_C(0x0010000000000000))

static bool is_finite(const void *x, int32_t dtype, int64_t count) {
  switch (dtype) {
    case DC_FLOAT16:
      return finite_f16(x, count);
    case DC_BFLOAT16:
      return finite_bf16(x, count);
    case DC_FLOAT32:
      return finite_f32(x, count);
    default:
      return finite_f64(x, count);
  }
}

/* A tile is looked at while it is in the first-level cache. */
static bool combine_plain(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add) {
  bool finite = true;
  for (int64_t i = 0; i < count; i += DC__KERNELS_TILE) {
    const int64_t part = count - i < DC__KERNELS_TILE ? count - i : DC__KERNELS_TILE;
    void *d = dc__at(dst, dst_dtype, i);
    (add ? dc__accumulate : dc__cast)(d, dst_dtype, dc__const_at(src, src_dtype, i), src_dtype, part);
    finite = is_finite(d, dst_dtype, part) && finite;
  }
  return finite;
}

bool dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add) {
  int64_t done = 0;
  bool finite = true;
  const dc__combine_fn fast = dc__kernels_table()->combine[add][dst_dtype][src_dtype];
  if (fast != NULL) {
    done = count - count % DC__KERNELS_STEP;
    finite = fast(dst, src, done);
  }
  return combine_plain(dc__at(dst, dst_dtype, done), dst_dtype, dc__const_at(src, src_dtype, done), src_dtype,
                       count - done, add) &&
         finite;
}
