/* Shared by the forward and the backward of attention. */
#ifndef DC_TRANSFORMER_ATTENTION_H
#define DC_TRANSFORMER_ATTENTION_H

#include "transformer/transformer_internal.h"

/* One head of one sample. */
typedef struct dc__attention_head {
  int32_t dtype;
  int64_t d;
  int64_t stride;         /* elements from one token of q, k, v to the next */
  const char *q, *k, *v;  /* the first token's */
  int64_t length;         /* tokens */
  int64_t first_token;    /* in the batch */
  int64_t out;            /* offset of the first token in an [N, H] tensor */
  int64_t statistics;     /* its offset in an [A, N] array */
  int64_t all_statistics; /* elements of such an array */
  const char *mask;       /* the sample's row, or NULL */
  int32_t mask_dtype;
  uint32_t plane; /* sample * A + head, for dropout */
} dc__attention_head;
dc__attention_head dc__attention_head_of(const dc__layer_job *job, const dc__attention_args *a, int64_t plane);

static inline const void *dc__attention_head_row(const dc__attention_head *head, const char *base, int64_t token) {
  return base + (size_t)(token * head->stride) * dc_dtype_size(head->dtype);
}

typedef struct dc__attention_tile {
  int64_t first_query, queries, first_key, keys;
} dc__attention_tile;

enum { DC__ATTENTION_GEMM = 5 << 19 }; /* 2.5 MiB for the products of one tile */

/* A task's scratch memory. */
typedef struct dc__attention_scratch {
  void *gemm;
  float *s, *dp; /* [queries, keys] */
  float *m;      /* [keys] */
  float *out[2]; /* [queries or keys, d] */
  void *p, *ds;  /* [queries, keys] in 16 bits */
} dc__attention_scratch;
dc__attention_scratch dc__attention_scratch_layout(void *scratch, int64_t d);

/* s = q k' / sqrt d + mask; [queries, keys]. */
void dc__attention_scores(const dc__attention_head *head, const dc__attention_tile *tile, float *s, void *scratch);
/* A tile in the head's dtype: `wide` itself, or its copy in `narrow`. */
const void *dc__attention_cast_tile(const dc__attention_head *head, void *narrow, const float *wide, int64_t count);

#endif
