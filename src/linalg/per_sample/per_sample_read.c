/* Reads callers' layer descriptions: checks x and delta, and derives sizes. */
#include "linalg/per_sample/per_sample.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static dc_status invalid_field(const dc__per_sample *s, const char *field, int64_t value, const char *allowed) {
  return dc__fail(DC_E_INVALID, "%s: layer.%s = %" PRId64 ", must be %s", s->fn, field, value, allowed);
}

static dc_status check_positions_length(const dc__per_sample *s, const dc_tensor *delta, int32_t dim, int64_t wanted) {
  return delta->shape[dim] == wanted
             ? DC_OK
             : dc__fail(DC_E_SHAPE, "%s: delta has length %" PRId64 " in dimension %" PRId32 ", x wants %" PRId64,
                        s->fn, delta->shape[dim], dim, wanted);
}

static dc_status check_ndim(const dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta, int32_t min_ndim,
                            int32_t extra_ndim) {
  if (x->ndim < min_ndim) {
    return dc__fail(DC_E_SHAPE, "%s: x has %" PRId32 " dimension%s, must have %" PRId32 " or more", s->fn, x->ndim,
                    DC__PLURAL_S(x->ndim), min_ndim);
  }
  if (delta->ndim != x->ndim + extra_ndim) {
    return dc__fail(DC_E_SHAPE, "%s: delta has %" PRId32 " dimension%s, must have %" PRId32, s->fn, delta->ndim,
                    DC__PLURAL_S(delta->ndim), x->ndim + extra_ndim);
  }
  return check_positions_length(s, delta, 0, x->shape[0]);
}

/* Positions are dimensions [1, end). Dimension 0 is the samples. */
static dc_status read_positions(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta, int32_t end) {
  s->samples = x->shape[0];
  s->positions = 1;
  for (int32_t i = 1; i < end; i++) {
    DC__TRY(check_positions_length(s, delta, i, x->shape[i]));
    s->positions *= x->shape[i];
  }
  return DC_OK;
}

static dc_status read_linear(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta) {
  DC__TRY(check_ndim(s, x, delta, 2, 0));
  s->in = x->shape[x->ndim - 1];
  s->out = delta->shape[x->ndim - 1];
  return read_positions(s, x, delta, x->ndim - 1);
}

/* Each index, or each bag of them, has a row of delta. */
static dc_status read_embedding(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta) {
  bool bag = dc__is_embedding_bag(s->layer.kind);
  DC__TRY(check_ndim(s, x, delta, bag ? 2 : 1, bag ? 0 : 1));
  s->in = s->layer.rows;
  s->out = delta->shape[delta->ndim - 1];
  if (s->in < 0) {
    return invalid_field(s, "rows", s->in, ">= 0");
  }
  if (s->layer.has_padding_row != 0 && s->layer.has_padding_row != 1) {
    return invalid_field(s, "has_padding_row", s->layer.has_padding_row, "0 or 1");
  }
  if (s->layer.padding_row < 0 || s->layer.padding_row >= (s->layer.has_padding_row == 1 ? s->in : 1)) {
    return invalid_field(s, "padding_row", s->layer.padding_row,
                         s->layer.has_padding_row == 1 ? "0 to rows - 1" : "0, since has_padding_row is 0");
  }
  if (bag && x->ndim != 2) {
    return dc__fail(DC_E_SHAPE, "%s: x has %" PRId32 " dimension%s, must have 2 for bags", s->fn, x->ndim,
                    DC__PLURAL_S(x->ndim));
  }
  s->samples = x->shape[0];
  s->positions = bag ? x->shape[1] : 1;
  if (!bag) {
    DC__TRY(read_positions(s, x, delta, x->ndim));
  }
  return DC_OK;
}

static dc_status check_eps(const dc__per_sample *s) {
  return s->layer.eps >= 0 && !isinf(s->layer.eps)
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: layer.eps = %g, must be >= 0", s->fn, s->layer.eps);
}

static dc_status read_norm(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta) {
  DC__TRY(check_ndim(s, x, delta, 2, 0));
  int64_t wanted = s->layer.features != 0 ? s->layer.features : x->shape[x->ndim - 1];
  int32_t end = x->ndim - 1; /* features span the last dimension at least */
  s->in = x->shape[end];
  while (end > 1 && s->in > 0 && s->in < wanted) {
    s->in *= x->shape[--end];
  }
  if (wanted < 0 || s->in != wanted) {
    return invalid_field(s, "features", s->layer.features, "the product of x's last lengths");
  }
  s->out = s->in;
  for (int32_t i = end; i < x->ndim; i++) {
    DC__TRY(check_positions_length(s, delta, i, x->shape[i]));
  }
  DC__TRY(check_eps(s));
  return read_positions(s, x, delta, end);
}

static dc_status check_groups(dc__per_sample *s) {
  s->layer.groups = s->layer.groups == 0 ? 1 : s->layer.groups;
  bool fits = s->layer.groups > 0 && s->in % s->layer.groups == 0 && s->out % s->layer.groups == 0;
  return fits ? DC_OK : invalid_field(s, "groups", s->layer.groups, "a divisor of the channels of x and of delta");
}

static dc_status read_group_norm(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta) {
  DC__TRY(check_ndim(s, x, delta, 2, 0));
  DC__TRY(check_positions_length(s, delta, 1, x->shape[1]));
  s->in = s->out = x->shape[1];
  s->samples = x->shape[0];
  s->positions = 1;
  for (int32_t i = 2; i < x->ndim; i++) {
    DC__TRY(check_positions_length(s, delta, i, x->shape[i]));
    s->positions *= x->shape[i];
  }
  DC__TRY(check_groups(s));
  return check_eps(s);
}

/* Pads lengths with leading ones to three spatial dimensions. */
static dc_status read_geometry(dc__per_sample *s, int32_t spatial) {
  enum { MAX_GEOMETRY = 1 << 20 };
  dc_sample_layer *c = &s->layer;
  dc_sample_layer user = *c;
  s->spatial = spatial;
  for (int32_t i = 0; i < 3; i++) {
    int32_t from = i - (3 - spatial);
    bool real = from >= 0;
    c->kernel[i] = real ? user.kernel[from] : 1;
    c->stride[i] = real && user.stride[from] != 0 ? user.stride[from] : 1;
    c->padding[i] = real ? user.padding[from] : 0;
    c->dilation[i] = real && user.dilation[from] != 0 ? user.dilation[from] : 1;
    if (c->kernel[i] < 1 || c->kernel[i] > MAX_GEOMETRY) {
      return invalid_field(s, "kernel[…]", c->kernel[i], "1 to 1048576");
    }
    if (c->stride[i] < 1 || c->stride[i] > MAX_GEOMETRY) {
      return invalid_field(s, "stride[…]", c->stride[i], "0 (1) to 1048576");
    }
    if (c->padding[i] < 0 || c->padding[i] > MAX_GEOMETRY) {
      return invalid_field(s, "padding[…]", c->padding[i], "0 to 1048576");
    }
    if (c->dilation[i] < 1 || c->dilation[i] > MAX_GEOMETRY) {
      return invalid_field(s, "dilation[…]", c->dilation[i], "0 (1) to 1048576");
    }
  }
  return DC_OK;
}

static dc_status read_conv(dc__per_sample *s, const dc_tensor *x, const dc_tensor *delta) {
  DC__TRY(check_ndim(s, x, delta, 3, 0));
  if (x->ndim > 5) {
    return dc__fail(DC_E_SHAPE, "%s: x has %" PRId32 " spatial dimensions, must have 1 to 3", s->fn, x->ndim - 2);
  }
  s->samples = x->shape[0];
  s->in = x->shape[1];
  s->out = delta->shape[1];
  DC__TRY(check_groups(s));
  DC__TRY(read_geometry(s, x->ndim - 2));
  s->positions = 1;
  for (int32_t i = 0; i < 3; i++) {
    int32_t from = i - (3 - s->spatial);
    s->size[i] = from >= 0 ? x->shape[2 + from] : 1;
    s->size_out[i] = from >= 0 ? delta->shape[2 + from] : 1;
    s->positions *= s->size_out[i];
  }
  return DC_OK;
}

static dc_status read_layer(dc__per_sample *s, const dc_sample_layer *layer) {
  enum { LAYER_SIZE_0_1 = 152 };
  _Static_assert(sizeof(void *) != 8 || sizeof(dc_sample_layer) >= LAYER_SIZE_0_1, "0.1");
  if (layer == NULL) {
    return dc__fail(DC_E_INVALID, "%s: layer is NULL", s->fn);
  }
  DC__TRY(dc__read_options(s->fn, "layer", &s->layer, sizeof s->layer, layer, LAYER_SIZE_0_1));
  return s->layer.reserved0 == 0 ? DC_OK : invalid_field(s, "reserved0", s->layer.reserved0, "0");
}

/* Reads the layer's constants and the tensors, whatever their types. */
static dc_status read_tensors(const dc_sample_layer *layer, const dc_tensor *x, const dc_tensor *delta,
                              dc_tensor *input, dc_tensor *gradient, dc__per_sample *s) {
  DC__TRY(read_layer(s, layer));
  DC__TRY(dc__tensor_read(s->fn, "x", x, false, input, &s->x_count));
  DC__TRY(dc__tensor_read(s->fn, "delta", delta, false, gradient, &s->delta_count));
  s->x = input->data;
  s->delta = gradient->data;
  s->x_dtype = input->dtype;
  s->dtype = gradient->dtype;
  return DC_OK;
}

dc_status dc__per_sample_read(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                              const dc_tensor *delta, dc__per_sample *sample) {
  dc_tensor input, gradient;
  dc__per_sample s = {.fn = fn, .layer = DC_SAMPLE_LAYER_INIT};
  DC__TRY(read_tensors(layer, x, delta, &input, &gradient, &s));
  DC__TRY(dc__mat_check_real(fn, "delta", s.dtype));
  bool embedding = dc__is_embedding(s.layer.kind);
  if (embedding && s.x_dtype != DC_INT64 && s.x_dtype != DC_INT32) {
    return dc__fail(DC_E_DTYPE, "%s: x is %s, must be int64 or int32 for an embedding", fn, dc_dtype_name(s.x_dtype));
  }
  if (!embedding) {
    DC__TRY(dc__mat_check_dtype(fn, "x", s.x_dtype, "delta", s.dtype));
  }
  dc_status status;
  switch (s.layer.kind) {
    case DC_SAMPLE_LINEAR:
      status = read_linear(&s, &input, &gradient);
      break;
    case DC_SAMPLE_CONV:
      status = read_conv(&s, &input, &gradient);
      break;
    case DC_SAMPLE_EMBEDDING:
    case DC_SAMPLE_BAG_SUM:
    case DC_SAMPLE_BAG_MEAN:
      status = read_embedding(&s, &input, &gradient);
      break;
    case DC_SAMPLE_LAYER_NORM:
    case DC_SAMPLE_RMS_NORM:
      status = read_norm(&s, &input, &gradient);
      break;
    case DC_SAMPLE_GROUP_NORM:
      status = read_group_norm(&s, &input, &gradient);
      break;
    default:
      return invalid_field(&s, "kind", s.layer.kind, "one of enum dc_sample_kind");
  }
  DC__TRY(status);
  DC__TRY(dc__linalg_check_alignment(l, fn, "x", s.x, s.x_dtype));
  DC__TRY(dc__linalg_check_alignment(l, fn, "delta", s.delta, s.dtype));
  *sample = s;
  return embedding ? dc__per_sample_embedding_check(l, &s) : DC_OK;
}

static dc_status check_pair_kind(const dc__per_sample *s) {
  return s->layer.kind == DC_SAMPLE_LINEAR || s->layer.kind == DC_SAMPLE_CONV
             ? DC_OK
             : invalid_field(s, "kind", s->layer.kind, "DC_SAMPLE_LINEAR or DC_SAMPLE_CONV");
}

static dc_status check_short(const char *fn, const char *arg, int32_t dtype) {
  return dtype == DC_FLOAT32 || dtype == DC_FLOAT16 || dtype == DC_BFLOAT16
             ? DC_OK
             : dc__fail(DC_E_DTYPE, "%s: %s is %s, must be float32, float16 or bfloat16", fn, arg,
                        dc_dtype_name(dtype));
}

dc_status dc__per_sample_read_mixed(dc_linalg *l, const char *fn, const dc_sample_layer *layer, const dc_tensor *x,
                                    const dc_tensor *delta, dc__per_sample *sample) {
  dc_tensor input, gradient;
  dc__per_sample s = {.fn = fn, .layer = DC_SAMPLE_LAYER_INIT};
  DC__TRY(read_tensors(layer, x, delta, &input, &gradient, &s));
  DC__TRY(check_short(fn, "x", s.x_dtype));
  DC__TRY(check_short(fn, "delta", s.dtype));
  DC__TRY(check_pair_kind(&s));
  DC__TRY(s.layer.kind == DC_SAMPLE_LINEAR ? read_linear(&s, &input, &gradient) : read_conv(&s, &input, &gradient));
  DC__TRY(dc__linalg_check_alignment(l, fn, "x", s.x, s.x_dtype));
  DC__TRY(dc__linalg_check_alignment(l, fn, "delta", s.delta, s.dtype));
  *sample = s;
  return DC_OK;
}

dc_status dc__per_sample_read_layer(const char *fn, const dc_sample_layer *layer, int32_t spatial,
                                    dc_sample_layer *read) {
  dc__per_sample s = {.fn = fn, .layer = DC_SAMPLE_LAYER_INIT};
  DC__TRY(read_layer(&s, layer));
  DC__TRY(check_pair_kind(&s));
  *read = s.layer;
  return s.layer.kind == DC_SAMPLE_CONV ? read_geometry(&s, spatial) : DC_OK;
}
