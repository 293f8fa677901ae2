/* The arguments of the kernels for the layer's rows (rowops.cu), as the host and the device see them. [rows, columns]
 * arrays have one type of float32, float16 and bfloat16. Statistics and partial sums are float32, [2, rows] as in
 * transformer/transformer_internal.h. Pointers may be NULL only where stated. */
#ifndef DC_KERNELS_CUDA_ROWOPS_ARGS_H
#define DC_KERNELS_CUDA_ROWOPS_ARGS_H

#include <stdint.h>

#include "kernels/cuda/rowops/column_sums_args.h"
#include "kernels/cuda/threads.h"

enum {
  DC__CUDA_BACKWARD_WARPS = 16, /* warps of LN's backward on a processor at once */
  DC__CUDA_MIN_SMS = 108,       /* processors of the smallest supported device */
  DC__CUDA_OFFSETS = 192
};

/* The rows' positions in their samples, which index dropout's draws. threshold 0: no dropout. */
typedef struct dc__cuda_dropout {
  const int32_t *offsets; /* [batch + 1], the samples' first rows; NULL: each has `longest` */
  int64_t longest, batch;
  uint32_t key[2], threshold;
  float scale;
} dc__cuda_dropout;

/* out = residual + (u + bias) times dropout; y = LN(out). */
typedef struct dc__cuda_residual_args {
  const void *u, *bias, *residual; /* bias and residual may be NULL */
  void *out, *y;                   /* one of them may be NULL */
  const void *gamma, *beta;
  float *stats; /* may be NULL */
  int64_t rows, columns;
  float eps;
  int32_t dtype;
  dc__cuda_dropout drop;
} dc__cuda_residual_args;

/* y = LN(x) from its statistics. */
typedef struct dc__cuda_layernorm_args {
  void *y;
  const void *x, *gamma, *beta;
  const float *stats;
  int64_t rows, columns;
  int32_t dtype;
} dc__cuda_layernorm_args;

/* dx = the gradient by LN's input, plus `add`; dropped = dx times dropout. The sums of dy, and of dy times the
 * normalised rows, go to sums.to. */
typedef struct dc__cuda_layernorm_backward_args {
  const void *dy, *x, *gamma, *add; /* add may be NULL */
  const float *stats;
  void *dx, *dropped; /* may be NULL: then dropped is NULL too */
  int64_t rows, columns;
  int32_t dtype;
  dc__cuda_dropout drop;
  dc__cuda_sums sums;
} dc__cuda_layernorm_backward_args;

/* out = x times dropout. */
typedef struct dc__cuda_dropout_args {
  void *out;
  const void *x;
  int64_t rows, columns;
  int32_t dtype;
  dc__cuda_dropout drop;
} dc__cuda_dropout_args;

/* The offsets of a packed batch as kernel arguments, a few at a time, without a copy from the host. */
typedef struct dc__cuda_offsets_args {
  int32_t *to;
  int32_t count;
  int32_t values[DC__CUDA_OFFSETS];
} dc__cuda_offsets_args;

#endif
