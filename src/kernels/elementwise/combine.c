/* Copies, casts and sums that check their output: one pass over memory tells whether all of it is finite. */
#include "kernels/dispatch.h"
#include "kernels/elementwise/convert.h"

/* Elements per check. Each check costs a call, and two tiles of 4-byte elements fit a first-level cache. */
enum { TILE = 4 * DC__KERNELS_TILE };

/* Masks for the elements in 8 bytes: the bits of their magnitudes, and a one in each exponent. An exponent of all ones
 * plus one carries into the sign's place, and no further. */
typedef uint64_t word DC__UNALIGNED;
typedef struct exponent_masks {
  uint64_t magnitude, one;
} exponent_masks;

static exponent_masks exponent_masks_of(int32_t dtype) {
  switch (dtype) {
    case DC_FLOAT16:
      return (exponent_masks){UINT64_C(0x7fff7fff7fff7fff), UINT64_C(0x0400040004000400)};
    case DC_BFLOAT16:
      return (exponent_masks){UINT64_C(0x7fff7fff7fff7fff), UINT64_C(0x0080008000800080)};
    case DC_FLOAT32:
      return (exponent_masks){UINT64_C(0x7fffffff7fffffff), UINT64_C(0x0080000000800000)};
    default:
      return (exponent_masks){UINT64_C(0x7fffffffffffffff), UINT64_C(0x0010000000000000)};
  }
}

static uint64_t exponent_carry(exponent_masks l, uint64_t x) {
  return (x & l.magnitude) + l.one;
}

/* Sums and "or"s, which every compiler vectorizes; four runs side by side, since an "or" waits for the one before
 * it. */
static bool is_finite(const void *x, int32_t dtype, int64_t count) {
  const exponent_masks l = exponent_masks_of(dtype);
  const size_t bytes = (size_t)count * dc_dtype_size(dtype);
  const size_t words = bytes / sizeof(word), run = words / 4;
  const word *s = x;
  uint64_t a = 0, b = 0, c = 0, d = 0, rest = 0;
  for (size_t i = 0; i < run; i++) {
    a |= exponent_carry(l, s[i]);
    b |= exponent_carry(l, s[run + i]);
    c |= exponent_carry(l, s[2 * run + i]);
    d |= exponent_carry(l, s[3 * run + i]);
  }
  for (size_t i = 4 * run; i < words; i++) {
    a |= exponent_carry(l, s[i]);
  }
  memcpy(&rest, s + words, bytes % sizeof(word));
  return ((a | b | c | d | exponent_carry(l, rest)) & ~l.magnitude) == 0;
}

/* A tile is checked while it is in the first-level cache. For a cast to a larger type the source is checked, which is
 * smaller and has the same answer. */
static bool combine_plain(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add) {
  const bool before = !add && dc_dtype_size(src_dtype) < dc_dtype_size(dst_dtype);
  bool finite = true;
  for (int64_t i = 0; i < count; i += TILE) {
    const int64_t part = count - i < TILE ? count - i : TILE;
    void *d = dc__at(dst, dst_dtype, i);
    const void *s = dc__const_at(src, src_dtype, i);
    (add ? dc__accumulate : dc__cast)(d, dst_dtype, s, src_dtype, part);
    finite = (before ? is_finite(s, src_dtype, part) : is_finite(d, dst_dtype, part)) && finite;
  }
  return finite;
}

bool dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add) {
  int64_t done = 0;
  bool finite = true;
  const dc__combine_fn fast = dc__active_kernels()->combine[add][dst_dtype][src_dtype];
  if (fast != NULL) {
    done = count - count % DC__KERNELS_STEP;
    finite = fast(dst, src, done);
  }
  return combine_plain(dc__at(dst, dst_dtype, done), dst_dtype, dc__const_at(src, src_dtype, done), src_dtype,
                       count - done, add) &&
         finite;
}
