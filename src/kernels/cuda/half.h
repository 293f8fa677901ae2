/* float16 and bfloat16 in kernels, by the device's own instructions: rounded to nearest even, with any NaN for a
 * NaN. */
#ifndef DC_KERNELS_CUDA_HALF_H
#define DC_KERNELS_CUDA_HALF_H

#include "kernels/cuda/gpu.h"

#include "dc_api.h"
#include "kernels/elementwise/convert.h"

namespace {

DC_DEVICE uint32_t two_halves(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

#ifdef __CUDACC__

template <int DTYPE>
DC_DEVICE float f32_of(uint16_t x) {
  float wide;
  if constexpr (DTYPE == DC_FLOAT16) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  } else {
    wide = dc__f32_of_bf16(x);
  }
  return wide;
}
template <int DTYPE>
DC_DEVICE uint32_t halves_of(float low, float high) {
  uint32_t halves;
  if constexpr (DTYPE == DC_FLOAT16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  }
  return halves;
}
template <int DTYPE>
DC_DEVICE uint16_t half_of(float x) {
  return static_cast<uint16_t>(halves_of<DTYPE>(x, 0.0f));
}

#else

template <int DTYPE>
DC_DEVICE float f32_of(uint16_t x) {
  return DTYPE == DC_FLOAT16 ? dc__f32_of_f16(x) : dc__f32_of_bf16(x);
}
template <int DTYPE>
DC_DEVICE uint16_t half_of(float x) {
  return DTYPE == DC_FLOAT16 ? dc__f16_of_f32(x) : dc__bf16_of_f32(x);
}
template <int DTYPE>
DC_DEVICE uint32_t halves_of(float low, float high) {
  return two_halves(half_of<DTYPE>(low), half_of<DTYPE>(high));
}

#endif

}  // namespace

#endif
