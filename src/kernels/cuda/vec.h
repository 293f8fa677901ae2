/* Elements that a thread moves together. */
#ifndef DC_KERNELS_CUDA_VEC_H
#define DC_KERNELS_CUDA_VEC_H

#include "kernels/cuda/gpu.h"

template <typename T, int64_t N>
struct alignas(N * sizeof(T)) dc_pack {
  T at[N];
};

template <typename T, int64_t N>
DC_DEVICE bool dc_is_aligned(const void *data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(dc_pack<T, N>) == 0;
}

/* Elements i to i + N - 1. */
template <typename T, int64_t N>
DC_DEVICE dc_pack<T, N> dc_load(const void *data, int64_t i) {
  return *reinterpret_cast<const dc_pack<T, N> *>(static_cast<const T *>(data) + i);
}

template <typename T, int64_t N>
DC_DEVICE void dc_store(void *data, int64_t i, const dc_pack<T, N> &x) {
  *reinterpret_cast<dc_pack<T, N> *>(static_cast<T *>(data) + i) = x;
}

#endif
