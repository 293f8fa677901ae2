/* Scalar conversions between element types, and element types that may lie at any address. */
#ifndef DC_KERNELS_CONVERT_H
#define DC_KERNELS_CONVERT_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define DC__CONVERT static __device__ __forceinline__
#else
#define DC__CONVERT static inline
#endif

/* The kernels read memory that was declared with other types, at addresses that need not be multiples of the element
 * size. */
#define DC__UNALIGNED __attribute__((aligned(1), may_alias))
typedef float dc__f32 DC__UNALIGNED;
typedef double dc__f64 DC__UNALIGNED;
typedef uint16_t dc__half DC__UNALIGNED; /* the bits of a float16 or bfloat16 */
typedef int8_t dc__i8 DC__UNALIGNED;
typedef int32_t dc__i32 DC__UNALIGNED;
typedef int64_t dc__i64 DC__UNALIGNED;

DC__CONVERT uint32_t dc__bits_of_f32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

DC__CONVERT float dc__f32_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

DC__CONVERT float dc__f32_of_bf16(uint16_t h) {
  return dc__f32_of_bits((uint32_t)h << 16);
}

DC__CONVERT uint16_t dc__bf16_of_f32(float x) {
  uint32_t bits = dc__bits_of_f32(x);
  uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  uint32_t quiet = bits | 0x00400000u; /* rounding could carry a NaN over to infinity */
  return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) >> 16);
}

DC__CONVERT float dc__f32_of_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu;
  uint32_t fraction = h & 0x3ffu;
  if (exponent == 0) {
    return dc__f32_of_bits(sign | dc__bits_of_f32((float)fraction * 0x1p-24f));
  }
  if (exponent == 31) {
    uint32_t quiet = fraction != 0 ? 0x00400000u : 0u;
    return dc__f32_of_bits(sign | 0x7f800000u | quiet | (fraction << 13));
  }
  return dc__f32_of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

DC__CONVERT uint16_t dc__f16_of_f32(float x) {
  uint32_t bits = dc__bits_of_f32(x);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) {
    return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  }
  if (bits >= 0x47800000u) { /* 65536; from 65520 on the rounding below carries to infinity by itself */
    return (uint16_t)(sign | 0x7c00u);
  }
  if (bits >= 0x38800000u) { /* 2^-14, the smallest normal number */
    return (uint16_t)(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
  }
  uint32_t exponent = bits >> 23;
  if (exponent < 102) { /* below 2^-25, half of the smallest subnormal */
    return (uint16_t)sign;
  }
  uint32_t fraction = (bits & 0x7fffffu) | 0x800000u;
  uint32_t shift = 126 - exponent; /* to units of 2^-24; 14 to 24 */
  return (uint16_t)(sign | ((fraction + (1u << (shift - 1)) - 1 + ((fraction >> shift) & 1u)) >> shift));
}

/* Truncates, saturates at low and high; NaN gives 0. Doubles hold every float, so one function serves both. */
DC__CONVERT int64_t dc__integer_of(double x, int64_t low, int64_t high) {
  if (x != x) {
    return 0;
  }
  if (x >= 0x1p63) {
    return high;
  }
  if (x <= -0x1p63) {
    return low;
  }
  int64_t i = (int64_t)x;
  return i < low ? low : i > high ? high : i;
}

#endif
