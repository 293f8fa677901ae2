/* The memory of a stack of transformer layers: dc_layer_plan's formulas. A sum that would pass 2^63 stays at
 * INT64_MAX, which fits nowhere. */
#include "planner/planner.h"

static int64_t mul_or_max(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t add_or_max(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

static int64_t max_int64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t layer_parameters(const dc_layer *layer) {
  int64_t sum = 0;
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t rows;
    int64_t columns;
    sum += dc__layer_weight_numel(layer, i, &rows, &columns);
  }
  return sum;
}

static void count_states(const dc_layer *layer, const dc_layer_plan_options *options, dc_layer_plan *plan) {
  const dc_layer_config *c = &layer->config;
  int64_t element = (int64_t)dc_dtype_size(c->dtype);
  int64_t gradient = (int64_t)dc_dtype_size(c->grad_dtype);
  int64_t own = layer_parameters(layer); /* below 2^51 */
  int64_t ranks = options->ranks;
  int64_t floats = options->moments + (element < (int64_t)sizeof(float));
  plan->parameters = add_or_max(mul_or_max(own, c->num_hidden_layers), options->other_parameters);
  int64_t sharded = dc__ceil_div(plan->parameters, ranks);
  plan->weight_bytes = mul_or_max(options->stage >= 3 ? sharded : plan->parameters, element);
  plan->grad_bytes = mul_or_max(options->stage >= 2 ? sharded : plan->parameters, gradient);
  plan->optimizer_bytes = mul_or_max(options->stage >= 1 ? sharded : plan->parameters, floats * (int64_t)sizeof(float));
  plan->working_bytes = options->stage >= 2 ? own * gradient : 0;
  if (options->stage >= 3) {
    plan->working_bytes += own * element * (c->num_hidden_layers > 1 ? 2 : 1);
  }
}

static void count_libdc(const dc_layer *layer, const dc__layer_size *size, dc_layer_plan *plan) {
  if (!dc__layer_fits_int64(layer, size)) {
    plan->kept_bytes = plan->workspace_bytes = INT64_MAX;
    return;
  }
  dc_layer_cost cost;
  dc__layer_cost(layer, size, &cost);
  int64_t row = cost.kept_bytes - cost.reserve_bytes; /* an activation of [N, H] */
  plan->kept_bytes = add_or_max(mul_or_max(layer->config.num_hidden_layers, cost.kept_bytes), row);
  plan->workspace_bytes = max_int64(cost.forward_workspace_bytes, cost.backward_workspace_bytes) + 2 * row;
}

static void count_deepspeed(const dc_layer *layer, const dc__layer_size *size, dc_layer_plan *plan) {
  const dc_layer_config *c = &layer->config;
  int64_t e = (int64_t)dc_dtype_size(c->dtype);
  int64_t s = (size->max_seqlen + 15) / 16 * 16; /* its wrapper pads */
  int64_t n = mul_or_max(size->batch, s);
  int64_t row = mul_or_max(n, c->hidden_size);
  int64_t wide = mul_or_max(n, c->intermediate_size);
  int64_t square = mul_or_max(mul_or_max(n, s), c->heads);
  bool inv = c->normalize_invertible;
  bool gelu = c->gelu_checkpoint;
  int64_t kept = add_or_max(mul_or_max(row, e * (inv ? 6 : 8) + 2), mul_or_max(wide, e * (gelu ? 1 : 2)));
  kept = add_or_max(kept, mul_or_max(square, 2 * e + 1 - (c->attn_dropout_checkpoint ? e : 0)));
  kept = add_or_max(kept, mul_or_max(n, 4 * e));
  plan->kept_bytes = mul_or_max(c->num_hidden_layers, kept);
  int64_t elements = add_or_max(mul_or_max(row, 6), max_int64(wide, mul_or_max(square, 2)));
  elements = add_or_max(elements, gelu ? mul_or_max(wide, 2) : 0);
  plan->workspace_bytes = mul_or_max(add_or_max(elements, mul_or_max(row, 2)), e);
}

/* Everything for a number of samples. */
static void plan_count(const dc_layer *layer, const dc_layer_plan_options *options, int64_t batch,
                       dc_layer_plan *plan) {
  const dc__layer_size size = {
      .batch = batch, .max_seqlen = options->seq_length, .tokens = mul_or_max(batch, options->seq_length)};
  count_states(layer, options, plan);
  if (batch == 0) {
    plan->kept_bytes = plan->workspace_bytes = 0;
  } else if (options->inventory == DC_LAYER_INVENTORY_DEEPSPEED) {
    count_deepspeed(layer, &size, plan);
  } else {
    count_libdc(layer, &size, plan);
  }
  const int64_t parts[] = {plan->weight_bytes,  plan->grad_bytes, plan->optimizer_bytes,
                           plan->working_bytes, plan->kept_bytes, plan->workspace_bytes};
  plan->micro_batch = batch;
  plan->total_bytes = options->other_bytes;
  for (size_t i = 0; i < DC__COUNT(parts); i++) {
    plan->total_bytes = add_or_max(plan->total_bytes, parts[i]);
  }
}

/* Bytes never fall as samples are added. */
static int64_t max_micro_batch(const dc_layer *layer, const dc_layer_plan_options *options, dc_layer_plan *plan) {
  int64_t fits = 0;
  int64_t end = (layer->config.batch_size > 0 ? layer->config.batch_size : INT32_MAX) + INT64_C(1);
  while (end - fits > 1) {
    int64_t mid = fits + (end - fits) / 2;
    plan_count(layer, options, mid, plan);
    if (plan->total_bytes < INT64_MAX && plan->total_bytes <= options->memory_bytes) {
      fits = mid;
    } else {
      end = mid;
    }
  }
  return fits;
}

dc_status dc__layer_plan(const char *fn, const dc_layer_config *config, const dc_layer_plan_options *options,
                         dc_layer_plan *plan) {
  const dc_layer layer = {.config = *config}; /* only its sizes are asked for */
  int64_t batch = options->micro_batch > 0 ? options->micro_batch : max_micro_batch(&layer, options, plan);
  plan_count(&layer, options, batch, plan);
  if (plan->total_bytes == INT64_MAX) {
    return dc__fail(DC_E_SHAPE, "%s: the bytes of options.micro_batch = %lld sample%s pass 2^63", fn,
                    (long long)options->micro_batch, DC__PLURAL_S(options->micro_batch));
  }
  return DC_OK;
}
