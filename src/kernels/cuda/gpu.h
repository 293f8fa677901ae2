/* One source of kernels for nvcc and for the CPU: the simulated driver of the tests runs them as C++.
 *
 * A kernel has one argument, a struct, and is defined by DC_KERNEL(name, struct, threads) { … args … }. It is
 * DC_BLOCK_KERNEL if the threads of a block meet: at dc_sync(), or a warp's 32 at dc_sync_warp(), a shuffle or a
 * ballot, in which all of them take part. `threads`: the most of a block; whole warps if threads meet.
 * DC_BLOCKS_KERNEL(…, blocks) limits registers so that a processor has room for that many blocks.
 *
 * DC_MEMORY(pointer, bytes, alignment) must name memory of the device before it is touched. On a device it is the
 * pointer. On the CPU it is the memory that stands for it, after a check that all of it is allocated. DC_SHARED(type,
 * name, [n][m]) declares uninitialised shared memory; DC_LAUNCH_SHARED(type, name) is the launch's dynamic shared
 * memory. */
#ifndef DC_KERNELS_CUDA_GPU_H
#define DC_KERNELS_CUDA_GPU_H

#include <stdint.h>

enum { DC_WARP = 32 };

#ifdef __CUDACC__

/* Two blocks a processor: otherwise the compiler would spill registers to save them. */
#define DC_KERNEL(name, type, threads) extern "C" __global__ void __launch_bounds__(threads, 2) name(const type args)
#define DC_BLOCKS_KERNEL(name, type, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const type args)
#define DC_DEVICE static __device__ __forceinline__
#define DC_MEMBER __device__ __forceinline__
#define DC_CONSTANT static constexpr __host__ __device__
#define DC_UNROLL _Pragma("unroll")
#define DC_UNROLL_4 _Pragma("unroll 4")
#define DC_UNROLL_8 _Pragma("unroll 8")
#define DC_ROLLED _Pragma("unroll 1")
#define DC_MEMORY(pointer, bytes, alignment) ((void)(bytes), (void)(alignment), (pointer))
#define DC_SHARED(type, name, dims) __shared__ __align__(16) type name dims
#define DC_LAUNCH_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char dc_launch_shared[]; \
  type *name = reinterpret_cast<type *>(dc_launch_shared)

DC_DEVICE uint32_t dc_block(int axis = 0) {
  return axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z;
}
DC_DEVICE uint32_t dc_blocks(int axis = 0) {
  return axis == 0 ? gridDim.x : axis == 1 ? gridDim.y : gridDim.z;
}
DC_DEVICE uint32_t dc_thread() {
  return threadIdx.x;
}
DC_DEVICE uint32_t dc_threads() {
  return blockDim.x;
}
DC_DEVICE void dc_sync() {
  __syncthreads();
}
DC_DEVICE void dc_sync_warp() {
  __syncwarp();
}
template <typename T>
DC_DEVICE T dc_shuffle(T value, uint32_t lane) {
  return __shfl_sync(~0u, value, static_cast<int>(lane));
}
DC_DEVICE uint32_t dc_ballot(bool value) {
  return __ballot_sync(~0u, value);
}
DC_DEVICE uint32_t dc_ones(uint32_t bits) {
  return static_cast<uint32_t>(__popc(bits));
}
/* Copies 16 bytes of the device's memory, or zeros, into shared memory. This thread sees them after dc_wait_copies(),
 * the others after the next dc_sync(). */
DC_DEVICE void dc_copy_async(void *to, const void *from, bool zeros) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(zeros ? 0 : 16) : "memory");
}
DC_DEVICE void dc_wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
/* 2^x and 1/x within 2 ulp; subnormals are 0. */
DC_DEVICE float dc_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DC_DEVICE float dc_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/* *at becomes at least `value`. */
DC_DEVICE void dc_atomic_max(uint64_t *at, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long *>(at), static_cast<unsigned long long>(value));
}

#else

#include <cudasim.h>
#include <cmath>
#include <cstring>
#include <type_traits>

#define DC_SIM_KERNEL(name, type, threads, has_barriers)                                    \
  static void name##_body(const type &args);                                                \
  static void name##_run(const void *args) {                                                \
    name##_body(*static_cast<const type *>(args));                                          \
  }                                                                                         \
  extern "C" const cudasim_kernel name;                                                     \
  const cudasim_kernel name = {#name, name##_run, sizeof(type), (threads), (has_barriers)}; \
  static void name##_body(const type &args)
#define DC_KERNEL(name, type, threads) DC_SIM_KERNEL(name, type, threads, false)
#define DC_BLOCKS_KERNEL(name, type, threads, blocks) DC_SIM_KERNEL(name, type, threads, true)
#define DC_DEVICE static inline
#define DC_MEMBER
#define DC_CONSTANT static constexpr
#define DC_UNROLL
#define DC_UNROLL_4
#define DC_UNROLL_8
#define DC_ROLLED
#define DC_MEMORY(pointer, bytes, alignment) \
  (static_cast<std::decay_t<decltype(pointer)>>(cudasim_memory((pointer), (size_t)(bytes), (alignment))))
#define DC_SHARED(type, name, dims) \
  using name##_shared = type dims;  \
  static char name##_site;          \
  name##_shared &name = *static_cast<name##_shared *>(cudasim_shared(&name##_site, sizeof(name##_shared)))
#define DC_LAUNCH_SHARED(type, name) type *name = static_cast<type *>(cudasim_launch_shared())

DC_DEVICE uint32_t dc_block(int axis = 0) {
  return cudasim_me()->block[axis];
}
DC_DEVICE uint32_t dc_blocks(int axis = 0) {
  return cudasim_me()->blocks[axis];
}
DC_DEVICE uint32_t dc_thread() {
  return cudasim_me()->thread;
}
DC_DEVICE uint32_t dc_threads() {
  return cudasim_me()->threads;
}
DC_DEVICE void dc_sync() {
  cudasim_sync(false);
}
DC_DEVICE void dc_sync_warp() {
  cudasim_sync(true);
}
template <typename T>
DC_DEVICE T dc_shuffle(T value, uint32_t lane) {
  T found;
  std::memcpy(&found, cudasim_exchange(&value, sizeof value) + CUDASIM_SLOT * (lane % DC_WARP), sizeof found);
  return found;
}
DC_DEVICE uint32_t dc_ballot(bool value) {
  const unsigned char own = value;
  const unsigned char *all = cudasim_exchange(&own, sizeof own);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < DC_WARP; lane++) {
    bits |= static_cast<uint32_t>(all[CUDASIM_SLOT * lane] != 0) << lane;
  }
  return bits;
}
DC_DEVICE uint32_t dc_ones(uint32_t bits) {
  return static_cast<uint32_t>(__builtin_popcount(bits));
}
DC_DEVICE void dc_copy_async(void *to, const void *from, bool zeros) {
  if (zeros) {
    std::memset(to, 0, 16);
  } else {
    std::memcpy(to, from, 16);
  }
}
DC_DEVICE void dc_wait_copies() {}
DC_DEVICE float dc_exp2(float x) {
  return std::exp2(x);
}
DC_DEVICE float dc_reciprocal(float x) {
  return 1.0f / x;
}
DC_DEVICE void dc_atomic_max(uint64_t *at, uint64_t value) {
  uint64_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(at, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

#endif

#define DC_BLOCK_KERNEL(name, type, threads) DC_BLOCKS_KERNEL(name, type, threads, 1)

/* e^x is dc_exp2(DC_LOG2_E x). */
#define DC_LOG2_E 1.44269504f

/* The value of the lane whose number differs in the bits of `mask`. */
template <typename T>
DC_DEVICE T dc_shuffle_xor(T value, uint32_t mask) {
  return dc_shuffle(value, (dc_thread() % DC_WARP) ^ mask);
}

/* Threads of a grid of one axis count from dc_first() in steps of dc_step(). */
DC_DEVICE int64_t dc_first() {
  return static_cast<int64_t>(dc_block()) * dc_threads() + dc_thread();
}
DC_DEVICE int64_t dc_step() {
  return static_cast<int64_t>(dc_blocks()) * dc_threads();
}

#endif
