/* Eight neighbours of an array of float32, float16 or bfloat16, as floats: the unit of a thread in the layer's rows. */
#ifndef DC_KERNELS_CUDA_VEC8_H
#define DC_KERNELS_CUDA_VEC8_H

#include "kernels/cuda/half.h"

namespace {

enum { VEC8 = 8 };

struct vec8 {
  float at[VEC8];
};
struct alignas(16) half8 {
  uint32_t word[4];
} __attribute__((may_alias));
struct alignas(16) float4_words {
  float at[4];
} __attribute__((may_alias));

/* Element i as it is stored, and as a float. */
template <int DTYPE>
DC_DEVICE float get(const void *array, int64_t i) {
  if constexpr (DTYPE == DC_FLOAT32) {
    return static_cast<const float *>(array)[i];
  } else {
    return f32_of<DTYPE>(static_cast<const uint16_t *>(array)[i]);
  }
}
template <int DTYPE>
DC_DEVICE void put(void *array, int64_t i, float x) {
  if constexpr (DTYPE == DC_FLOAT32) {
    static_cast<float *>(array)[i] = x;
  } else {
    static_cast<uint16_t *>(array)[i] = half_of<DTYPE>(x);
  }
}

template <int DTYPE>
DC_DEVICE int64_t size_of() {
  return DTYPE == DC_FLOAT32 ? 4 : 2;
}

/* Whether all eight exist and are aligned to 16 bytes; otherwise they are moved one by one. */
template <int DTYPE>
DC_DEVICE bool is_vectorizable(const void *array, int64_t i, int64_t left) {
  return left >= VEC8 && (reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(i * size_of<DTYPE>())) % 16 == 0;
}

/* Eight in their stored form: a load requested long before its use takes no more registers than that. */
template <int DTYPE>
struct packed_vec8 {
  half8 half;
};
template <>
struct packed_vec8<DC_FLOAT32> {
  float4_words low, high;
};

template <int DTYPE>
DC_DEVICE vec8 unpack_vec8(const packed_vec8<DTYPE> &s) {
  vec8 x;
  DC_UNROLL
  for (int j = 0; j < 4; j++) {
    if constexpr (DTYPE == DC_FLOAT32) {
      x.at[j] = s.low.at[j];
      x.at[4 + j] = s.high.at[j];
    } else {
      x.at[2 * j] = f32_of<DTYPE>(static_cast<uint16_t>(s.half.word[j]));
      x.at[2 * j + 1] = f32_of<DTYPE>(static_cast<uint16_t>(s.half.word[j] >> 16));
    }
  }
  return x;
}

/* Elements i to i + 7, at once. */
template <int DTYPE>
DC_DEVICE packed_vec8<DTYPE> load_packed_aligned(const void *array, int64_t i) {
  if constexpr (DTYPE == DC_FLOAT32) {
    const float4_words *from = reinterpret_cast<const float4_words *>(static_cast<const float *>(array) + i);
    return {from[0], from[1]};
  } else {
    return {*reinterpret_cast<const half8 *>(static_cast<const uint16_t *>(array) + i)};
  }
}

/* Elements i to i + 7, of which `left` exist; zeros for the others. */
template <int DTYPE>
DC_DEVICE packed_vec8<DTYPE> load_packed(const void *array, int64_t i, int64_t left) {
  if (is_vectorizable<DTYPE>(array, i, left)) {
    return load_packed_aligned<DTYPE>(array, i);
  }
  packed_vec8<DTYPE> s;
  if constexpr (DTYPE == DC_FLOAT32) {
    const float *from = static_cast<const float *>(array) + i;
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      s.low.at[j] = j < left ? from[j] : 0.0f;
      s.high.at[j] = 4 + j < left ? from[4 + j] : 0.0f;
    }
  } else {
    const uint16_t *from = static_cast<const uint16_t *>(array) + i, zero = 0;
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      s.half.word[j] = two_halves(2 * j < left ? from[2 * j] : zero, 2 * j + 1 < left ? from[2 * j + 1] : zero);
    }
  }
  return s;
}

template <int DTYPE>
DC_DEVICE vec8 load_aligned(const void *array, int64_t i) {
  return unpack_vec8(load_packed_aligned<DTYPE>(array, i));
}
template <int DTYPE>
DC_DEVICE vec8 load(const void *array, int64_t i, int64_t left) {
  return unpack_vec8(load_packed<DTYPE>(array, i, left));
}

template <int DTYPE>
DC_DEVICE void store(void *array, int64_t i, int64_t left, const vec8 &x) {
  if (!is_vectorizable<DTYPE>(array, i, left)) {
    DC_UNROLL
    for (int j = 0; j < VEC8; j++) {
      if (j < left) {
        put<DTYPE>(array, i + j, x.at[j]);
      }
    }
  } else if constexpr (DTYPE == DC_FLOAT32) {
    float4_words *to = reinterpret_cast<float4_words *>(static_cast<float *>(array) + i);
    to[0] = float4_words{{x.at[0], x.at[1], x.at[2], x.at[3]}};
    to[1] = float4_words{{x.at[4], x.at[5], x.at[6], x.at[7]}};
  } else {
    half8 all;
    DC_UNROLL
    for (int j = 0; j < 4; j++) {
      all.word[j] = halves_of<DTYPE>(x.at[2 * j], x.at[2 * j + 1]);
    }
    *reinterpret_cast<half8 *>(static_cast<uint16_t *>(array) + i) = all;
  }
}

DC_DEVICE void add(vec8 &x, const vec8 &y) {
  DC_UNROLL
  for (int i = 0; i < VEC8; i++) {
    x.at[i] += y.at[i];
  }
}

/* Rounded as by a store and a load. */
template <int DTYPE>
DC_DEVICE vec8 rounded(const vec8 &x) {
  vec8 r = x;
  if constexpr (DTYPE != DC_FLOAT32) {
    DC_UNROLL
    for (int j = 0; j < VEC8; j += 2) {
      const uint32_t both = halves_of<DTYPE>(x.at[j], x.at[j + 1]);
      r.at[j] = f32_of<DTYPE>(static_cast<uint16_t>(both));
      r.at[j + 1] = f32_of<DTYPE>(static_cast<uint16_t>(both >> 16));
    }
  }
  return r;
}

/* An array of `count` elements of the device; NULL stays NULL. */
template <int DTYPE, typename T>
DC_DEVICE T *device_array(T *array, int64_t count) {
  (void)count;
  return array == nullptr
             ? array
             : static_cast<T *>(DC_MEMORY(array, count * size_of<DTYPE>(), static_cast<size_t>(size_of<DTYPE>())));
}

/* A thread's first piece of a row, and how far the next one is. */
DC_DEVICE int64_t first_piece() {
  return static_cast<int64_t>(dc_thread()) * VEC8;
}
DC_DEVICE int64_t piece_stride() {
  return static_cast<int64_t>(dc_threads()) * VEC8;
}

}  // namespace

/* pass<DTYPE>(...) for one of the three types. */
#define DC_BY_TYPE(dtype, pass, ...)                       \
  ((dtype) == DC_FLOAT32   ? pass<DC_FLOAT32>(__VA_ARGS__) \
   : (dtype) == DC_FLOAT16 ? pass<DC_FLOAT16>(__VA_ARGS__) \
                           : pass<DC_BFLOAT16>(__VA_ARGS__))

#endif
