/* Shared by the module's files. */
#ifndef DC_TRANSFORMER_INTERNAL_H
#define DC_TRANSFORMER_INTERNAL_H

#include <string.h>

#include "transformer/transformer.h"

/* Rows (tokens) per task of a thread. */
enum { DC__ROWS_PER_TASK = 16 };

/* Where a sample's tokens are. */
static inline int64_t dc__first_token(const dc__layer_size *size, int64_t sample) {
  return size->cu_seqlens != NULL ? size->cu_seqlens[sample] : sample * size->max_seqlen;
}
static inline int64_t dc__sample_length(const dc__layer_size *size, int64_t sample) {
  return dc__first_token(size, sample + 1) - dc__first_token(size, sample);
}

/* Walks tokens in order, with their sample and their position in it. */
typedef struct dc__token_cursor {
  int64_t sample;
  int64_t position;
} dc__token_cursor;
dc__token_cursor dc__token_cursor_at(const dc__layer_size *size, int64_t token);
static inline void dc__token_cursor_next(const dc__layer_size *size, dc__token_cursor *cursor) {
  cursor->position++;
  while (cursor->sample + 1 < size->batch && cursor->position >= dc__sample_length(size, cursor->sample)) {
    cursor->sample++;
    cursor->position = 0;
  }
}

/* Loads and stores row i of float32, float16 or bfloat16 rows as float32. */
static inline void dc__row_load(float *row, const void *array, int32_t dtype, int64_t i, int64_t count) {
  dc__cast(row, DC_FLOAT32, (const char *)array + (size_t)(i * count) * dc_dtype_size(dtype), dtype, count);
}
static inline void dc__row_store(void *array, int32_t dtype, int64_t i, const float *row, int64_t count) {
  dc__cast((char *)array + (size_t)(i * count) * dc_dtype_size(dtype), dtype, row, DC_FLOAT32, count);
}

/* y = x w' + bias by rows of tokens, with an epilogue. */
typedef struct dc__linear_args {
  const void *x;    /* [N, in] */
  const void *w;    /* [out, in] */
  const void *bias; /* NULL for none */
  void *y;          /* [N, out] */
  void *aux;        /* GELU's input, stored by DC__EPILOGUE_GELU; NULL if not kept */
  int64_t in, out;
  int32_t epilogue;
} dc__linear_args;
void dc__linear_forward(const dc__layer_job *job, const dc__linear_args *linear);
/* dx = dy w, or dx += dy w; with DC__EPILOGUE_GELU_BACK times gelu'(aux). */
void dc__linear_backward_input(const dc__layer_job *job, const void *dy, const void *w, void *dx, int64_t in,
                               int64_t out, bool add, const void *aux);
/* The gradients of w and of the bias (indices of weights), if wanted. */
void dc__linear_backward_weight(const dc__layer_job *job, const void *dy, const void *x, int32_t w, int32_t bias);

/* layernorm.c: work on rows of tokens */

/* out = residual + (u + bias) times dropout; and, if y is not NULL, y = LN(out) with its statistics. */
typedef struct dc__residual_args {
  const void *u;        /* [N, H] */
  const void *bias;     /* NULL for none */
  const void *residual; /* [N, H]; NULL: 0 */
  void *out;            /* [N, H]; may alias u; NULL if only y is kept */
  void *y;              /* [N, H] or NULL */
  const void *gamma, *beta;
  float *stats; /* [2, N]; NULL if not kept */
  dc__dropout dropout;
} dc__residual_args;
void dc__residual_forward(const dc__layer_job *job, const dc__residual_args *residual);
/* y = LN(x) from kept statistics. */
void dc__layernorm_recompute(const dc__layer_job *job, void *y, const void *x, const void *gamma, const void *beta,
                             const float *stats);

/* Arguments of a normalisation's backward. */
typedef struct dc__layernorm_backward_args {
  const void *dy;           /* [N, H] */
  const void *x;            /* [N, H] its input; NULL to recover it from y, gamma and beta */
  const void *y;            /* [N, H] its output */
  const void *gamma, *beta; /* [H] */
  const float *stats;       /* [2, N] */
  const void *add;          /* added to dx; NULL: 0 */
  void *dx;                 /* [N, H]; may be dy or add */
  void *dropped;            /* dx times dropout; NULL or dx if not wanted */
  dc__dropout dropout;
  int32_t gamma_index; /* of its gradient; beta's is the next */
} dc__layernorm_backward_args;
void dc__layernorm_backward(const dc__layer_job *job, const dc__layernorm_backward_args *back);
/* out = x times dropout. */
void dc__dropout_apply(const dc__layer_job *job, void *out, const void *x, const dc__dropout *dropout);
/* The gradient of weight `index`: the sum over tokens of [N, columns]. */
void dc__column_sums(const dc__layer_job *job, const void *x, int64_t columns, int32_t index);

/* attention.c, attention_backward.c */

typedef struct dc__attention_args {
  const void *qkv; /* [N, 3H] */
  void *c;         /* [N, H]; backward: read */
  float *softmax;  /* [2, A, N]: the rows' maxima, then 1 / their sums; NULL if not kept */
  dc__dropout dropout;
  const void *dc; /* backward: [N, H] */
  void *dqkv;     /* backward: [N, 3H] */
  float *delta;   /* backward: [A, N] */
  float *dq;      /* backward: [N, H] or NULL */
} dc__attention_args;
void dc__attention_forward(const dc__layer_job *job, const dc__attention_args *attention);
void dc__attention_backward(const dc__layer_job *job, const dc__attention_args *attention);

/* The tiles: queries and keys of a block, for heads of d features. */
int64_t dc__attention_queries(int64_t d);
int64_t dc__attention_keys(int64_t d);

/* ---- operations of a device ----
 *
 * The order of the calls is written once, in forward.c and backward.c. They call the layer's table: the functions
 * above, on the calling thread and the pool, or those of layer_cuda.c, which queue kernels on the job's stream. */
typedef struct dc__layer_work {
  void (*gemm)(const dc__layer_job *job, const dc__gemm *gemm);
  /* The same, and perhaps the sums of op(A)'s rows, of C's type, stored or added as the job says. Returns whether it
   * computed the sums, which it does only where they are cheaper within the product. */
  bool (*gemm_sums)(const dc__layer_job *job, const dc__gemm *gemm, void *sums);
  /* f = GELU(h). */
  void (*gelu)(const dc__layer_job *job, void *f, const void *h);
  void (*residual_forward)(const dc__layer_job *job, const dc__residual_args *residual);
  void (*layernorm_recompute)(const dc__layer_job *job, void *y, const void *x, const void *gamma, const void *beta,
                              const float *stats);
  void (*layernorm_backward)(const dc__layer_job *job, const dc__layernorm_backward_args *back);
  void (*drop)(const dc__layer_job *job, void *out, const void *x, const dc__dropout *dropout);
  void (*column_sums)(const dc__layer_job *job, const void *x, int64_t columns, int32_t index);
  void (*attention_forward)(const dc__layer_job *job, const dc__attention_args *attention);
  void (*attention_backward)(const dc__layer_job *job, const dc__attention_args *attention);
  /* Whether the last normalisation's input can be recovered from its output, to the accuracy of the type. */
  bool (*invertible)(const dc__layer_job *job);
} dc__layer_work;
extern const dc__layer_work dc__layer_work_cpu;
extern const dc__layer_work dc__layer_work_cuda;
/* Call before a job is queued on a device: copies cu_seqlens to its workspace. */
void dc__layer_upload_offsets(const dc__layer_job *job);

#endif
