/* Per-sample gradients, internal. A linear layer and a group of a convolution are alike: a pair of matrices per
 * sample whose product is the weight's gradient. Embeddings and norm layers have code of their own. */
#ifndef DC_LINALG_PER_SAMPLE_H
#define DC_LINALG_PER_SAMPLE_H

#include "linalg/linalg.h"

/* The two factors of one sample's and group's gradient [out, in], which is D times A, summed over the positions.
 * by_rows: D is stored [out][positions] and A [in][positions]; otherwise [positions][out] and [positions][in]. */
typedef struct dc__grad_factors {
  const void *a, *d;
  bool by_rows;
  int64_t in, out, positions;
} dc__grad_factors;

/* The request: each sample's gradients, their squared norms, or their sum. */
enum dc__per_sample_op { DC__PER_SAMPLE_GRADS, DC__PER_SAMPLE_NORMS, DC__PER_SAMPLE_SUM };
typedef struct dc__per_sample_call {
  int32_t op;
  bool weight, bias; /* wanted */
  bool accumulate;
  const void *factors;       /* SUM; NULL for all 1 */
  void *to_weight, *to_bias; /* GRADS, SUM */
  void *squares;             /* NORMS */
} dc__per_sample_call;

/* per_sample_cuda.c: the request on a device. */
dc_status dc__per_sample_run_cuda(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call);

static inline bool dc__is_norm_layer(int32_t kind) {
  return kind == DC_SAMPLE_LAYER_NORM || kind == DC_SAMPLE_RMS_NORM || kind == DC_SAMPLE_GROUP_NORM;
}
static inline bool dc__is_embedding_bag(int32_t kind) {
  return kind == DC_SAMPLE_BAG_SUM || kind == DC_SAMPLE_BAG_MEAN;
}
static inline bool dc__is_embedding(int32_t kind) {
  return kind == DC_SAMPLE_EMBEDDING || dc__is_embedding_bag(kind);
}

/* per_sample_linear.c */
dc_status dc__per_sample_linear_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias);
dc_status dc__per_sample_linear_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate,
                                      void *squares);
dc_status dc__per_sample_linear_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                    void *weight, void *bias);

/* per_sample_embedding.c */
dc_status dc__per_sample_embedding_check(dc_linalg *l,
                                         const dc__per_sample *s); /* checks a device's indices in host memory */
dc_status dc__per_sample_embedding_grads(dc_linalg *l, const dc__per_sample *s, void *weight);
dc_status dc__per_sample_embedding_norms(dc_linalg *l, const dc__per_sample *s, bool accumulate, void *squares);
dc_status dc__per_sample_embedding_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                       void *weight);

/* per_sample_norm_layer.c */
dc_status dc__per_sample_norm_layer_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias);
dc_status dc__per_sample_norm_layer_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate,
                                          void *squares);
dc_status dc__per_sample_norm_layer_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate,
                                        void *weight, void *bias);

static inline double dc__per_sample_factor(const dc__per_sample *s, const void *factors, int64_t sample) {
  return factors == NULL ? 1 : dc__load_element(factors, s->dtype == DC_FLOAT64, sample);
}
/* Stores a square as 0 if rounding in a sum of products has made it negative. NaN stays. */
static inline void dc__store_squared_norm(const dc__per_sample *s, void *squares, int64_t sample, double square,
                                          bool accumulate) {
  bool wide = s->dtype == DC_FLOAT64;
  double before = accumulate ? dc__load_element(squares, wide, sample) : 0;
  dc__store_element(squares, wide, sample, before + (square < 0 ? 0 : square));
}

#endif
