/* Per-sample gradients: dispatch by layer type. */
#include "linalg/per_sample/per_sample_cuda.h"

bool dc__per_sample_has_bias(const dc__per_sample *s) {
  return !dc__is_embedding(s->layer.kind) && s->layer.kind != DC_SAMPLE_RMS_NORM;
}

int32_t dc__per_sample_shape(const dc__per_sample *s, bool bias, bool per_sample, int64_t shape[8]) {
  int32_t ndim = 0;
  if (per_sample) {
    shape[ndim++] = s->samples;
  }
  if (dc__is_embedding(s->layer.kind)) {
    shape[ndim++] = s->in;
    shape[ndim++] = s->out;
  } else if (bias || dc__is_norm_layer(s->layer.kind)) {
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

dc_status dc__per_sample_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias) {
  if (dc__linalg_is_cuda(l)) {
    const dc__per_sample_call call = {.op = DC__PER_SAMPLE_GRADS,
                                      .weight = weight != NULL,
                                      .bias = bias != NULL,
                                      .to_weight = weight,
                                      .to_bias = bias};
    return dc__per_sample_cuda_run(l, s, &call);
  }
  if (dc__is_embedding(s->layer.kind)) {
    return dc__per_sample_embedding_grads(l, s, weight);
  }
  return dc__is_norm_layer(s->layer.kind) ? dc__per_sample_norm_layer_grads(l, s, weight, bias)
                                          : dc__per_sample_linear_grads(l, s, weight, bias);
}

dc_status dc__per_sample_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate, void *squares) {
  if (dc__linalg_is_cuda(l)) {
    const dc__per_sample_call call = {.op = DC__PER_SAMPLE_NORMS,
                                      .weight = (parts & DC_PART_WEIGHT) != 0,
                                      .bias = (parts & DC_PART_BIAS) != 0,
                                      .accumulate = accumulate,
                                      .squares = squares};
    return dc__per_sample_cuda_run(l, s, &call);
  }
  if (dc__is_embedding(s->layer.kind)) {
    return dc__per_sample_embedding_norms(l, s, accumulate, squares);
  }
  return dc__is_norm_layer(s->layer.kind) ? dc__per_sample_norm_layer_norms(l, s, parts, accumulate, squares)
                                          : dc__per_sample_linear_norms(l, s, parts, accumulate, squares);
}

dc_status dc__per_sample_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate, void *weight,
                             void *bias) {
  if (dc__linalg_is_cuda(l)) {
    const dc__per_sample_call call = {.op = DC__PER_SAMPLE_SUM,
                                      .weight = weight != NULL,
                                      .bias = bias != NULL,
                                      .accumulate = accumulate,
                                      .factors = factors,
                                      .to_weight = weight,
                                      .to_bias = bias};
    return dc__per_sample_cuda_run(l, s, &call);
  }
  if (dc__is_embedding(s->layer.kind)) {
    return dc__per_sample_embedding_sum(l, s, factors, accumulate, weight);
  }
  return dc__is_norm_layer(s->layer.kind) ? dc__per_sample_norm_layer_sum(l, s, factors, accumulate, weight, bias)
                                          : dc__per_sample_linear_sum(l, s, factors, accumulate, weight, bias);
}

dc_status dc__clip_factors(dc_linalg *l, int32_t dtype, int64_t count, const void *squares, double max_norm,
                           void *factors) {
  const bool wide = dtype == DC_FLOAT64;
  if (l->query) {
    return DC_OK;
  }
  if (dc__linalg_is_cuda(l)) {
    const dc__cuda_clip_args args = {
        .squares = squares, .factors = factors, .count = count, .max_norm = max_norm, .wide = wide};
    dc__cuda_clip(l->device->internal_stream, &args);
    return dc__linalg_synchronize(l);
  }
  for (int64_t i = 0; i < count; i++) {
    const double square = dc__load_element(squares, wide, i);
    dc__store_element(factors, wide, i, isfinite(square) ? fmin(1, max_norm / (sqrt(square) + 1e-6)) : 0);
  }
  return DC_OK;
}
