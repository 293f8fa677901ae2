/* One source of kernels for nvcc and for the CPU: the simulated driver of the tests runs them as C++.
 *
 * A kernel has one argument, a struct, and is defined by DC_KERNEL(name, struct) { … args … }. Its threads count from
 * dc_first() in steps of dc_step(). Memory of the device is named by DC_MEMORY(pointer, bytes, alignment) before it
 * is touched: on a card that is the pointer, and on the CPU the place that stands for it, once the driver has seen that
 * all of it was allocated. */
#ifndef DC_KERNELS_CUDA_GPU_H
#define DC_KERNELS_CUDA_GPU_H

#include <stdint.h>

#ifdef __CUDACC__

#define DC_KERNEL(name, type, threads) extern "C" __global__ void __launch_bounds__(threads) name(const type args)
#define DC_DEVICE static __device__ __forceinline__
#define DC_CONSTANT static constexpr __host__ __device__
#define DC_UNROLL _Pragma("unroll")
#define DC_MEMORY(pointer, bytes, alignment) (pointer)

DC_DEVICE int64_t dc_first() {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

DC_DEVICE int64_t dc_step() {
  return (int64_t)gridDim.x * blockDim.x;
}

#else

#include <cudasim.h>

#define DC_KERNEL(name, type, threads)             \
  static void name##_body(const type &args);       \
  extern "C" void name(const void *args);          \
  extern "C" void name(const void *args) {         \
    name##_body(*static_cast<const type *>(args)); \
  }                                                \
  static void name##_body(const type &args)
#define DC_DEVICE static inline
#define DC_CONSTANT static constexpr
#define DC_UNROLL
#define DC_MEMORY(pointer, bytes, alignment) \
  (static_cast<decltype(pointer)>(cudasim_memory((pointer), (size_t)(bytes), (alignment))))

DC_DEVICE int64_t dc_first() {
  return cudasim_me()->block * (int64_t)cudasim_me()->threads + cudasim_me()->thread;
}

DC_DEVICE int64_t dc_step() {
  return (int64_t)cudasim_me()->blocks * cudasim_me()->threads;
}

#endif

#endif
