/* Eight neighbours of an array of float32, float16 or bfloat16, as floats: what a thread of the layer's rows moves at a
 * time. */
#ifndef DC_KERNELS_CUDA_EIGHT_H
#define DC_KERNELS_CUDA_EIGHT_H

#include "kernels/cuda/gpu.h"

#include "dc_api.h"
#include "kernels/convert.h"

namespace {

enum { EIGHT = 8 };

struct eight {
  float at[EIGHT];
};
struct alignas(16) halves {
  uint32_t word[4];
} __attribute__((may_alias));
struct alignas(16) quarter {
  float at[4];
} __attribute__((may_alias));

DC_DEVICE float of_half(uint32_t half, int32_t dtype) {
  const uint16_t bits = static_cast<uint16_t>(half);
  return dtype == DC_FLOAT16 ? dc__f32_of_f16(bits) : dc__f32_of_bf16(bits);
}
DC_DEVICE uint32_t to_half(float x, int32_t dtype) {
  return dtype == DC_FLOAT16 ? dc__f16_of_f32(x) : dc__bf16_of_f32(x);
}
DC_DEVICE float rounded(float x, int32_t dtype) {
  return dtype == DC_FLOAT32 ? x : of_half(to_half(x, dtype), dtype);
}

DC_DEVICE float get(const void *array, int32_t dtype, int64_t i) {
  return dtype == DC_FLOAT32 ? static_cast<const float *>(array)[i]
                             : of_half(static_cast<const uint16_t *>(array)[i], dtype);
}
DC_DEVICE void put(void *array, int32_t dtype, int64_t i, float x) {
  if (dtype == DC_FLOAT32) {
    static_cast<float *>(array)[i] = x;
  } else {
    static_cast<uint16_t *>(array)[i] = static_cast<uint16_t>(to_half(x, dtype));
  }
}

/* Whether all eight are there and lie at a multiple of 16 bytes; else they are moved one by one. */
DC_DEVICE bool at_once(const void *array, int32_t dtype, int64_t i, int64_t left) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(i) * (dtype == DC_FLOAT32 ? 4 : 2);
  return left >= EIGHT && at % 16 == 0;
}

/* Elements i to i + 7, of which `left` are there; zeros for the others. */
DC_DEVICE eight load(const void *array, int32_t dtype, int64_t i, int64_t left) {
  eight x;
  if (!at_once(array, dtype, i, left)) {
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) {
      x.at[j] = j < left ? get(array, dtype, i + j) : 0.0f;
    }
  } else if (dtype == DC_FLOAT32) {
    const quarter *from = reinterpret_cast<const quarter *>(static_cast<const float *>(array) + i);
    const quarter low = from[0], high = from[1];
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      x.at[j] = low.at[j];
      x.at[4 + j] = high.at[j];
    }
  } else {
    const halves all = *reinterpret_cast<const halves *>(static_cast<const uint16_t *>(array) + i);
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      x.at[2 * j] = of_half(all.word[j] & 0xffffu, dtype);
      x.at[2 * j + 1] = of_half(all.word[j] >> 16, dtype);
    }
  }
  return x;
}

DC_DEVICE void store(void *array, int32_t dtype, int64_t i, int64_t left, const eight &x) {
  if (!at_once(array, dtype, i, left)) {
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) {
      if (j < left) {
        put(array, dtype, i + j, x.at[j]);
      }
    }
  } else if (dtype == DC_FLOAT32) {
    quarter *to = reinterpret_cast<quarter *>(static_cast<float *>(array) + i);
    to[0] = quarter{{x.at[0], x.at[1], x.at[2], x.at[3]}};
    to[1] = quarter{{x.at[4], x.at[5], x.at[6], x.at[7]}};
  } else {
    halves all;
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      all.word[j] = to_half(x.at[2 * j], dtype) | to_half(x.at[2 * j + 1], dtype) << 16;
    }
    *reinterpret_cast<halves *>(static_cast<uint16_t *>(array) + i) = all;
  }
}

/* An array of `count` elements of the device; NULL stays NULL. */
template <typename T>
DC_DEVICE T *there(T *array, int32_t dtype, int64_t count) {
  const int64_t size = dtype == DC_FLOAT32 ? 4 : 2;
  (void)size;
  (void)count;
  return array == nullptr ? array : static_cast<T *>(DC_MEMORY(array, count * size, static_cast<size_t>(size)));
}

}  // namespace

#endif
