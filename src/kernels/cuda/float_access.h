/* Shared by kernels on float32 and float64: numbers are computed in float64 and rounded to the array's type. */
#ifndef DC_KERNELS_CUDA_FLOAT_ACCESS_H
#define DC_KERNELS_CUDA_FLOAT_ACCESS_H

#include "kernels/cuda/gpu.h"

namespace {

DC_DEVICE double get(const void *data, int32_t wide, int64_t i) {
  return wide ? static_cast<const double *>(data)[i] : static_cast<double>(static_cast<const float *>(data)[i]);
}
DC_DEVICE void put(void *data, int32_t wide, int64_t i, double value) {
  if (wide) {
    static_cast<double *>(data)[i] = value;
  } else {
    static_cast<float *>(data)[i] = static_cast<float>(value);
  }
}

/* `count` elements of the device. */
template <typename T>
DC_DEVICE T *device_array(T *data, int32_t wide, int64_t count) {
  const int64_t size = wide ? 8 : 4;
  (void)size;
  (void)count;
  return static_cast<T *>(DC_MEMORY(data, count * size, static_cast<size_t>(size)));
}
/* The same in every lane. */
DC_DEVICE double sum_of_warp(double x) {
  for (uint32_t step = DC_WARP / 2; step > 0; step /= 2) {
    x += dc_shuffle_xor(x, step);
  }
  return x;
}

}  // namespace

#endif
