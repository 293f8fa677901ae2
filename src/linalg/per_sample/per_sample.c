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

static dc_status run_embedding(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call) {
  switch (call->op) {
    case DC__PER_SAMPLE_GRADS:
      return dc__per_sample_embedding_grads(l, s, call->to_weight);
    case DC__PER_SAMPLE_NORMS:
      return dc__per_sample_embedding_norms(l, s, call->accumulate, call->squares);
    default:
      return dc__per_sample_embedding_sum(l, s, call->factors, call->accumulate, call->to_weight);
  }
}

static int32_t parts_of(const dc__per_sample_call *call) {
  return (call->weight ? DC_PART_WEIGHT : 0) | (call->bias ? DC_PART_BIAS : 0);
}

static dc_status run_norm_layer(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call) {
  switch (call->op) {
    case DC__PER_SAMPLE_GRADS:
      return dc__per_sample_norm_layer_grads(l, s, call->to_weight, call->to_bias);
    case DC__PER_SAMPLE_NORMS:
      return dc__per_sample_norm_layer_norms(l, s, parts_of(call), call->accumulate, call->squares);
    default:
      return dc__per_sample_norm_layer_sum(l, s, call->factors, call->accumulate, call->to_weight, call->to_bias);
  }
}

static dc_status run_linear(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call) {
  switch (call->op) {
    case DC__PER_SAMPLE_GRADS:
      return dc__per_sample_linear_grads(l, s, call->to_weight, call->to_bias);
    case DC__PER_SAMPLE_NORMS:
      return dc__per_sample_linear_norms(l, s, parts_of(call), call->accumulate, call->squares);
    default:
      return dc__per_sample_linear_sum(l, s, call->factors, call->accumulate, call->to_weight, call->to_bias);
  }
}

static dc_status per_sample_run(dc_linalg *l, const dc__per_sample *s, const dc__per_sample_call *call) {
  if (dc__linalg_is_cuda(l)) {
    return dc__per_sample_run_cuda(l, s, call);
  }
  if (dc__is_embedding(s->layer.kind)) {
    return run_embedding(l, s, call);
  }
  return dc__is_norm_layer(s->layer.kind) ? run_norm_layer(l, s, call) : run_linear(l, s, call);
}

dc_status dc__per_sample_grads(dc_linalg *l, const dc__per_sample *s, void *weight, void *bias) {
  const dc__per_sample_call call = {
      .op = DC__PER_SAMPLE_GRADS, .weight = weight != NULL, .bias = bias != NULL, .to_weight = weight, .to_bias = bias};
  return per_sample_run(l, s, &call);
}

dc_status dc__per_sample_norms(dc_linalg *l, const dc__per_sample *s, int32_t parts, bool accumulate, void *squares) {
  const dc__per_sample_call call = {.op = DC__PER_SAMPLE_NORMS,
                                    .weight = (parts & DC_PART_WEIGHT) != 0,
                                    .bias = (parts & DC_PART_BIAS) != 0,
                                    .accumulate = accumulate,
                                    .squares = squares};
  return per_sample_run(l, s, &call);
}

dc_status dc__per_sample_sum(dc_linalg *l, const dc__per_sample *s, const void *factors, bool accumulate, void *weight,
                             void *bias) {
  const dc__per_sample_call call = {.op = DC__PER_SAMPLE_SUM,
                                    .weight = weight != NULL,
                                    .bias = bias != NULL,
                                    .accumulate = accumulate,
                                    .factors = factors,
                                    .to_weight = weight,
                                    .to_bias = bias};
  return per_sample_run(l, s, &call);
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
