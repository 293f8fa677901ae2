/* The configuration of a transformer layer: its checks and its defaults. */
#include <float.h>

#include "api/api_internal.h"
#include "transformer/transformer.h"

static dc_status check_shape(const char *fn, dc_layer_config *c) {
  const int64_t most = INT32_MAX;
  DC__TRY(dc__check_range(fn, "config.batch_size", c->batch_size, 0, most));
  DC__TRY(dc__check_range(fn, "config.max_seq_length", c->max_seq_length, 0, most));
  DC__TRY(dc__check_range(fn, "config.hidden_size", c->hidden_size, 1, DC__LAYER_MAX_HIDDEN));
  DC__TRY(dc__check_range(fn, "config.intermediate_size", c->intermediate_size, 0, most));
  DC__TRY(dc__check_range(fn, "config.heads", c->heads, 1, c->hidden_size));
  if (c->hidden_size % c->heads != 0) {
    return dc__fail(DC_E_INVALID, "%s: config.heads = %" PRId64 ", must divide hidden_size = %" PRId64, fn, c->heads,
                    c->hidden_size);
  }
  if (c->hidden_size / c->heads > DC__LAYER_MAX_HEAD) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: config.hidden_size / heads = %" PRId64 ", must be at most %d", fn,
                    c->hidden_size / c->heads, (int)DC__LAYER_MAX_HEAD);
  }
  DC__TRY(dc__check_range(fn, "config.num_hidden_layers", c->num_hidden_layers, 0, most));
  return dc__check_range(fn, "config.layer_id", c->layer_id, 0, UINT32_MAX);
}

static dc_status check_ratio(const char *fn, const char *name, double value, double low, double below) {
  if (!(value >= low && value < below)) {
    return dc__fail(DC_E_INVALID, "%s: config.%s = %g, must be %g or more and less than %g", fn, name, value, low,
                    below);
  }
  return DC_OK;
}

/* A switch that is on by default: 0 and 1 on, -1 off. */
static dc_status check_default_on(const char *fn, const char *name, int32_t *value) {
  if (*value < -1 || *value > 1) {
    return dc__fail(DC_E_INVALID, "%s: config.%s = %" PRId32 ", must be -1 (off), 0 (default) or 1 (on)", fn, name,
                    *value);
  }
  *value = *value >= 0;
  return DC_OK;
}

static dc_status check_switches(const char *fn, dc_layer_config *c) {
  DC__TRY(dc__check_flag(fn, "config.fp16", c->fp16));
  DC__TRY(dc__check_flag(fn, "config.normalize_invertible", c->normalize_invertible));
  DC__TRY(dc__check_flag(fn, "config.gelu_checkpoint", c->gelu_checkpoint));
  DC__TRY(dc__check_flag(fn, "config.attn_dropout_checkpoint", c->attn_dropout_checkpoint));
  DC__TRY(dc__check_flag(fn, "config.stochastic_mode", c->stochastic_mode));
  DC__TRY(check_default_on(fn, "pre_layer_norm", &c->pre_layer_norm));
  DC__TRY(check_default_on(fn, "adjust_init_range", &c->adjust_init_range));
  DC__TRY(check_default_on(fn, "training", &c->training));
  DC__TRY(dc__check_range(fn, "config.gelu", c->gelu, 0, DC_GELU_ERF));
  DC__TRY(dc__check_range(fn, "config.local_rank", c->local_rank, -1, INT32_MAX));
  DC__TRY(dc__check_range(fn, "config.threads", c->threads, 0, DC__THREADS_MAX));
  return dc__check_range(fn, "config.reserved0", c->reserved0, 0, 0);
}

static dc_status check_dtypes(const char *fn, dc_layer_config *c) {
  if (c->dtype == DC_DTYPE_NONE) {
    c->dtype = c->fp16 ? DC_FLOAT16 : DC_FLOAT32;
  }
  if (c->dtype != DC_FLOAT32 && c->dtype != DC_FLOAT16 && c->dtype != DC_BFLOAT16) {
    return dc__fail(DC_E_DTYPE, "%s: config.dtype = %" PRId32 " (%s), must be float32, float16 or bfloat16", fn,
                    c->dtype, dc_dtype_name(c->dtype));
  }
  if (c->grad_dtype == DC_DTYPE_NONE) {
    c->grad_dtype = c->dtype;
  }
  if (c->grad_dtype != c->dtype && c->grad_dtype != DC_FLOAT32) {
    return dc__fail(DC_E_DTYPE, "%s: config.grad_dtype = %" PRId32 " (%s), must be none, %s or float32", fn,
                    c->grad_dtype, dc_dtype_name(c->grad_dtype), dc_dtype_name(c->dtype));
  }
  return DC_OK;
}

static void fill_defaults(dc_layer_config *c) {
  c->intermediate_size = c->intermediate_size > 0 ? c->intermediate_size : 4 * c->hidden_size;
  c->num_hidden_layers = c->num_hidden_layers > 0 ? c->num_hidden_layers : 1;
  c->initializer_range = c->initializer_range > 0 ? c->initializer_range : 0.02;
  c->layer_norm_eps = c->layer_norm_eps > 0 ? c->layer_norm_eps : 1e-12;
  c->gelu = c->gelu > 0 ? c->gelu : DC_GELU_TANH;
}

dc_status dc__read_layer_config(const char *fn, const dc_layer_config *config, dc_layer_config *c) {
  DC__TRY(dc__read_options(fn, "config", c, sizeof *c, config, DC__LAYER_CONFIG_SIZE_0_1));
  DC__TRY(check_shape(fn, c));
  DC__TRY(check_ratio(fn, "attn_dropout_ratio", c->attn_dropout_ratio, 0, 1));
  DC__TRY(check_ratio(fn, "hidden_dropout_ratio", c->hidden_dropout_ratio, 0, 1));
  DC__TRY(check_ratio(fn, "initializer_range", c->initializer_range, 0, 1e30));
  DC__TRY(check_ratio(fn, "layer_norm_eps", c->layer_norm_eps, 0, 1e30));
  if (c->layer_norm_eps > 0 && c->layer_norm_eps < (double)FLT_MIN) { /* the layer adds it in float32 */
    return dc__fail(DC_E_INVALID, "%s: config.layer_norm_eps = %g, must be 0 or at least %g", fn, c->layer_norm_eps,
                    (double)FLT_MIN);
  }
  DC__TRY(check_switches(fn, c));
  DC__TRY(check_dtypes(fn, c));
  fill_defaults(c);
  return DC_OK;
}
