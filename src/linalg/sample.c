/* Which file knows what of a kind of layer. */
#include "linalg/sample.h"

bool dc__sample_has_bias(const dc__sample *s) {
  return !dc__is_embedding(s->layer.kind) && s->layer.kind != DC_SAMPLE_RMS_NORM;
}

int32_t dc__sample_shape(const dc__sample *s, bool bias, bool per_sample, int64_t shape[8]) {
  int32_t ndim = 0;
  if (per_sample) {
    shape[ndim++] = s->samples;
  }
  if (dc__is_embedding(s->layer.kind)) {
    shape[ndim++] = s->in;
    shape[ndim++] = s->out;
  } else if (bias || dc__is_norm(s->layer.kind)) {
    shape[ndim++] = s->out;
  } else {
    shape[ndim++] = s->out;
    shape[ndim++] = s->layer.kind == DC_SAMPLE_CONV ? s->in / s->layer.groups : s->in;
    for (int32_t i = 3 - s->spatial; i < 3 && s->layer.kind == DC_SAMPLE_CONV; i++) {
      shape[ndim++] = s->layer.kernel[i];
    }
  }
  return ndim;
}

dc_status dc__sample_grads(dc_linalg *l, const dc__sample *s, void *weight, void *bias) {
  if (dc__is_embedding(s->layer.kind)) {
    return dc__embedding_grads(l, s, weight);
  }
  return dc__is_norm(s->layer.kind) ? dc__norm_grads(l, s, weight, bias) : dc__pair_grads(l, s, weight, bias);
}

dc_status dc__sample_norms(dc_linalg *l, const dc__sample *s, int32_t parts, bool accumulate, void *squares) {
  if (dc__is_embedding(s->layer.kind)) {
    return dc__embedding_norms(l, s, accumulate, squares);
  }
  return dc__is_norm(s->layer.kind) ? dc__norm_norms(l, s, parts, accumulate, squares)
                                    : dc__pair_norms(l, s, parts, accumulate, squares);
}

dc_status dc__sample_sum(dc_linalg *l, const dc__sample *s, const void *factors, bool accumulate, void *weight,
                         void *bias) {
  if (dc__is_embedding(s->layer.kind)) {
    return dc__embedding_sum(l, s, factors, accumulate, weight);
  }
  return dc__is_norm(s->layer.kind) ? dc__norm_sum(l, s, factors, accumulate, weight, bias)
                                    : dc__pair_sum(l, s, factors, accumulate, weight, bias);
}
