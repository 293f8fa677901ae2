/* The arguments of the CUDA kernels, as the host (launch.c) and the device (elementwise.cu) see them. */
#ifndef DC_KERNELS_CUDA_ARGS_H
#define DC_KERNELS_CUDA_ARGS_H

#include <stdint.h>

enum { DC__CUDA_THREADS = 256, DC__CUDA_SOURCES = 64 };

/* dst = (dst_dtype)src, and dst += src. */
typedef struct dc__cuda_binary_args {
  void *dst;
  const void *src;
  int64_t count;
  int32_t dst_dtype;
  int32_t src_dtype;
} dc__cuda_binary_args;

/* dc__reduce(). */
typedef struct dc__cuda_reduce_args {
  void *dst;
  int64_t count;
  int32_t dst_dtype;
  int32_t src_dtype;
  int32_t n;
  int32_t mean;
  int32_t accumulate;
  const void *src[DC__CUDA_SOURCES];
} dc__cuda_reduce_args;

#endif
