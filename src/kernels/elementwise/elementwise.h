/* The arguments of elementwise work for the runtime and the transports. */
#ifndef DC_KERNELS_ELEMENTWISE_H
#define DC_KERNELS_ELEMENTWISE_H

#include <stdbool.h>
#include <stdint.h>

/* dst = src, or dst += src with `add`, of `count` elements. */
typedef struct dc__combination {
  void *dst;
  const void *src;
  int64_t count;
  int32_t dst_dtype, src_dtype;
  bool add;
} dc__combination;

/* The fixed-order reduction over `n` ranks, 1 to 1024, of `count` elements each; dc__reduce() defines it. */
typedef struct dc__reduction {
  void *dst;
  const void *const *src; /* n pointers */
  int64_t count;
  int32_t dst_dtype, src_dtype;
  int32_t n;
  bool mean, accumulate;
} dc__reduction;

#endif
