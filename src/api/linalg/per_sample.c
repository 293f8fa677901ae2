/* Chapter 13: gradients per sample. */
#include <inttypes.h>

#include "api/linalg/linalg_api.h"

void dc_sample_layer_init(dc_sample_layer *layer, size_t struct_size) {
  dc__init_sized(layer, struct_size, sizeof *layer);
}

/* Checks that an output of `count` elements lies apart from the tensors that the call reads. */
static dc_status per_sample_check_apart(const char *fn, const dc_linalg *l, const dc__per_sample *s, const char *arg,
                                        const void *data, int64_t count, dc__mat *out) {
  const dc__mat x = dc__elements(s->x, s->x_dtype, s->x_count);
  const dc__mat delta = dc__elements(s->delta, s->dtype, s->delta_count);
  *out = dc__elements(data, s->dtype, count);
  DC__TRY(dc__check_apart(l, fn, arg, out, "x", &x));
  return dc__check_apart(l, fn, arg, out, "delta", &delta);
}

/* Reads the output for a weight or a bias. A NULL tensor is not wanted, and its data is NULL. */
static dc_status per_sample_read_part(const char *fn, const dc_linalg *l, const char *arg, const dc__per_sample *s,
                                      const dc_tensor *tensor, bool bias, bool per_sample, dc__mat *out) {
  void *data;
  int64_t count = 1;
  *out = dc__elements(NULL, s->dtype, 0);
  if (tensor == NULL) {
    return DC_OK;
  }
  if (bias && !dc__per_sample_has_bias(s)) {
    return dc__fail(DC_E_INVALID, "%s: %s is not NULL, but this kind of layer has no bias", fn, arg);
  }
  int64_t shape[8];
  int32_t ndim = dc__per_sample_shape(s, bias, per_sample, shape);
  DC__TRY(dc__read_vector(l, fn, arg, tensor, s->dtype, shape, ndim, &data));
  for (int32_t i = 0; i < ndim; i++) {
    count *= shape[i];
  }
  return per_sample_check_apart(fn, l, s, arg, data, count, out);
}

/* Both outputs, which must lie apart from each other too. */
static dc_status per_sample_read_parts(const char *fn, const dc_linalg *l, const dc__per_sample *s,
                                       const dc_tensor *weight, const dc_tensor *bias, bool per_sample, dc__mat *w,
                                       dc__mat *b) {
  DC__TRY(per_sample_read_part(fn, l, "weight", s, weight, false, per_sample, w));
  DC__TRY(per_sample_read_part(fn, l, "bias", s, bias, true, per_sample, b));
  return dc__check_apart(l, fn, "weight", w, "bias", b);
}

static dc_status per_sample_check_flag(const char *fn, const char *arg, int32_t value) {
  return value == 0 || value == 1 ? DC_OK
                                  : dc__fail(DC_E_INVALID, "%s: %s = %" PRId32 ", must be 0 or 1", fn, arg, value);
}

static dc_status per_sample_grads(const char *fn, dc_linalg *l, const dc_sample_layer *layer, const dc_tensor *x,
                                  const dc_tensor *delta, dc_tensor *weight, dc_tensor *bias) {
  dc__per_sample s;
  dc__mat w, b;
  DC__TRY(dc__per_sample_read(l, fn, layer, x, delta, &s));
  DC__TRY(per_sample_read_parts(fn, l, &s, weight, bias, true, &w, &b));
  return dc__per_sample_grads(l, &s, w.data, b.data);
}

dc_status dc_per_sample_grads(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, dc_tensor *weight, dc_tensor *bias) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, per_sample_grads(__func__, linalg, layer, x, delta, weight, bias));
}

static dc_status per_sample_norms(const char *fn, dc_linalg *l, const dc_sample_layer *layer, const dc_tensor *x,
                                  const dc_tensor *delta, int32_t parts, int32_t accumulate, dc_tensor *squares) {
  dc__per_sample s;
  dc__mat out;
  void *data;
  DC__TRY(dc__per_sample_read(l, fn, layer, x, delta, &s));
  DC__TRY(per_sample_check_flag(fn, "accumulate", accumulate));
  int32_t all = dc__per_sample_has_bias(&s) ? DC_PART_WEIGHT | DC_PART_BIAS : DC_PART_WEIGHT;
  if (parts < 1 || (parts & ~all) != 0) {
    return dc__fail(DC_E_INVALID, "%s: parts = %" PRId32 ", must be 1 to %" PRId32 " for this kind of layer", fn, parts,
                    all);
  }
  DC__TRY(dc__read_vector(l, fn, "squares", squares, s.dtype, &s.samples, 1, &data));
  DC__TRY(per_sample_check_apart(fn, l, &s, "squares", data, s.samples, &out));
  return dc__per_sample_norms(l, &s, parts, accumulate == 1, data);
}

dc_status dc_per_sample_norms(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, int32_t parts, int32_t accumulate, dc_tensor *squares) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, per_sample_norms(__func__, linalg, layer, x, delta, parts, accumulate, squares));
}

static dc_status per_sample_clip(const char *fn, dc_linalg *l, const dc_tensor *squares, double max_norm,
                                 dc_tensor *factors) {
  dc_tensor from;
  void *to;
  int64_t count;
  DC__TRY(dc__tensor_read(fn, "squares", squares, false, &from, &count));
  DC__TRY(dc__mat_check_real(fn, "squares", from.dtype));
  DC__TRY(dc__linalg_check_alignment(l, fn, "squares", from.data, from.dtype));
  DC__TRY(dc__read_vector(l, fn, "factors", factors, from.dtype, from.shape, from.ndim, &to));
  if (!(max_norm > 0)) {
    return dc__fail(DC_E_INVALID, "%s: max_norm = %g, must be > 0", fn, max_norm);
  }
  if (to != from.data) {
    const dc__mat in = dc__elements(from.data, from.dtype, count), out = dc__elements(to, from.dtype, count);
    DC__TRY(dc__check_apart(l, fn, "factors", &out, "squares", &in));
  }
  return dc__clip_factors(l, from.dtype, count, from.data, max_norm, to);
}

dc_status dc_clip_factors(dc_linalg *linalg, const dc_tensor *squares, double max_norm, dc_tensor *factors) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, per_sample_clip(__func__, linalg, squares, max_norm, factors));
}

static dc_status per_sample_sum(const char *fn, dc_linalg *l, const dc_sample_layer *layer, const dc_tensor *x,
                                const dc_tensor *delta, const dc_tensor *factors, int32_t accumulate, dc_tensor *weight,
                                dc_tensor *bias) {
  dc__per_sample s;
  dc__mat w, b;
  void *f = NULL;
  DC__TRY(dc__per_sample_read(l, fn, layer, x, delta, &s));
  DC__TRY(per_sample_check_flag(fn, "accumulate", accumulate));
  DC__TRY(per_sample_read_parts(fn, l, &s, weight, bias, false, &w, &b));
  if (factors != NULL) {
    DC__TRY(dc__read_vector(l, fn, "factors", factors, s.dtype, &s.samples, 1, &f));
    const dc__mat row = dc__elements(f, s.dtype, s.samples);
    DC__TRY(dc__check_apart(l, fn, "weight", &w, "factors", &row));
    DC__TRY(dc__check_apart(l, fn, "bias", &b, "factors", &row));
  }
  return dc__per_sample_sum(l, &s, f, accumulate == 1, w.data, b.data);
}

dc_status dc_clipped_grad_sum(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, const dc_tensor *factors, int32_t accumulate, dc_tensor *weight,
                              dc_tensor *bias) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__linalg_enter_compute(linalg, __func__));
  return dc__linalg_leave(linalg, per_sample_sum(__func__, linalg, layer, x, delta, factors, accumulate, weight, bias));
}
