/* Gradients per sample, inside the room. A linear layer and a group of a convolution are the same thing, a pair of
 * matrices per sample whose product is the weight's gradient; embeddings and norms are their own. */
#ifndef DC_LINALG_SAMPLE_H
#define DC_LINALG_SAMPLE_H

#include "linalg/linalg.h"

/* One sample's (and group's) two factors: gradient [out, in] = D A over the positions.
 * by_rows: D is stored [out][positions] and A [in][positions]; otherwise [positions][out] and [positions][in]. */
typedef struct dc__pair {
  const void *a, *d;
  bool by_rows;
  int64_t in, out, positions;
} dc__pair;

static inline bool dc__is_norm(int32_t kind) {
  return kind == DC_SAMPLE_LAYER_NORM || kind == DC_SAMPLE_RMS_NORM || kind == DC_SAMPLE_GROUP_NORM;
}
static inline bool dc__is_bag(int32_t kind) {
  return kind == DC_SAMPLE_BAG_SUM || kind == DC_SAMPLE_BAG_MEAN;
}
static inline bool dc__is_embedding(int32_t kind) {
  return kind == DC_SAMPLE_EMBEDDING || dc__is_bag(kind);
}

/* sample_pair.c */
dc_status dc__pair_grads(dc_linalg *l, const dc__sample *s, void *weight, void *bias);
dc_status dc__pair_norms(dc_linalg *l, const dc__sample *s, int32_t parts, bool accumulate, void *squares);
dc_status dc__pair_sum(dc_linalg *l, const dc__sample *s, const void *factors, bool accumulate, void *weight,
                       void *bias);

/* sample_embedding.c */
dc_status dc__embedding_check(dc_linalg *l, const dc__sample *s); /* brings indices here from a device */
dc_status dc__embedding_grads(dc_linalg *l, const dc__sample *s, void *weight);
dc_status dc__embedding_norms(dc_linalg *l, const dc__sample *s, bool accumulate, void *squares);
dc_status dc__embedding_sum(dc_linalg *l, const dc__sample *s, const void *factors, bool accumulate, void *weight);

/* sample_norm.c */
dc_status dc__norm_grads(dc_linalg *l, const dc__sample *s, void *weight, void *bias);
dc_status dc__norm_norms(dc_linalg *l, const dc__sample *s, int32_t parts, bool accumulate, void *squares);
dc_status dc__norm_sum(dc_linalg *l, const dc__sample *s, const void *factors, bool accumulate, void *weight,
                       void *bias);

static inline double dc__factor(const dc__sample *s, const void *factors, int64_t sample) {
  return factors == NULL ? 1 : dc__get(factors, s->dtype == DC_FLOAT64, sample);
}
/* Rounding may make a sum of products negative where a square cannot be; NaN stays. */
static inline void dc__put_square(const dc__sample *s, void *squares, int64_t sample, double square, bool accumulate) {
  bool wide = s->dtype == DC_FLOAT64;
  double before = accumulate ? dc__get(squares, wide, sample) : 0;
  dc__put(squares, wide, sample, before + (square < 0 ? 0 : square));
}

#endif
