/* The arguments of the attention kernels, as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_ATTENTION_ARGS_H
#define DC_KERNELS_CUDA_ATTENTION_ARGS_H

#include <stdint.h>

/* Attention of a whole batch (attention.cu). N tokens, A heads of d features. Elements have one type, except where
 * stated. Heads of more than WIDE features go in parts. */
enum {
  DC__CUDA_ATTENTION_THREADS = 128,
  DC__CUDA_ATTENTION_ROWS = 64, /* of a block; ROW_TILES times as many for heads of up to 64 features of 16 bits */
  DC__CUDA_ATTENTION_ROW_TILES = 2,
  DC__CUDA_ATTENTION_WIDE = 128,
  DC__CUDA_ATTENTION_PART_OF_FLOATS = 64,
  DC__CUDA_ATTENTION_PART_OF_HALVES = 128
};
typedef struct dc__cuda_attention_args {
  const void *qkv;        /* [N, 3 A d] */
  void *c;                /* [N, A d]; backward: read */
  float *softmax;         /* [2, A, N]: the rows' maxima as powers of two, then 1 / their sums; NULL: not kept */
  const void *dc;         /* backward: [N, A d] */
  void *dqkv;             /* backward: [N, 3 A d] */
  float *delta;           /* backward: [A, N] */
  const void *mask;       /* [B, S] or NULL */
  const int32_t *offsets; /* [B + 1], the samples' first tokens; NULL: each has `longest` */
  int64_t tokens, longest, batch;
  int32_t heads, d;
  int32_t wide_mask;          /* it is float32 for every type */
  float factor;               /* 1 / sqrt d */
  uint32_t key[2], threshold; /* of dropout */
  float scale;
} dc__cuda_attention_args;

#endif
