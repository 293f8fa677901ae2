/* Chapter 12: what a stack of layers needs. Checks the arguments; the planner does the counting. */
#include "api/api_internal.h"
#include "planner/planner.h"

void dc_layer_plan_options_init(dc_layer_plan_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}
void dc_layer_plan_init(dc_layer_plan *plan, size_t struct_size) {
  dc__init_sized(plan, struct_size, sizeof *plan);
}

static dc_status layer_plan_check_options(const char *fn, const dc_layer_config *config, dc_layer_plan_options *o) {
  int64_t longest = config->max_seq_length > 0 ? config->max_seq_length : INT32_MAX;
  DC__TRY(dc__check_range(fn, "options.seq_length", o->seq_length, 1, longest));
  DC__TRY(dc__check_range(fn, "options.micro_batch", o->micro_batch, 0,
                          config->batch_size > 0 ? config->batch_size : INT32_MAX));
  DC__TRY(dc__check_range(fn, "options.memory_bytes", o->memory_bytes, 1, INT64_MAX));
  DC__TRY(dc__check_range(fn, "options.other_bytes", o->other_bytes, 0, INT64_MAX));
  DC__TRY(dc__check_range(fn, "options.other_parameters", o->other_parameters, 0, INT64_MAX));
  DC__TRY(dc__check_range(fn, "options.ranks", o->ranks, 0, INT32_MAX));
  DC__TRY(dc__check_range(fn, "options.stage", o->stage, 0, 3));
  DC__TRY(dc__check_range(fn, "options.moments", o->moments, 0, 8));
  DC__TRY(dc__check_range(fn, "options.inventory", o->inventory, 0, DC_LAYER_INVENTORY_DEEPSPEED));
  DC__TRY(dc__check_range(fn, "options.reserved0", o->reserved0, 0, 0));
  o->ranks = o->ranks > 0 ? o->ranks : 1;
  return DC_OK;
}

dc_status dc_layer_get_plan(const dc_layer_config *config, const dc_layer_plan_options *options, dc_layer_plan *plan) {
  DC__WITHOUT_TRAPS;
  if (config == NULL || options == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", __func__, config == NULL ? "config" : "options");
  }
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  DC__TRY(dc__read_layer_config(__func__, config, &c));
  if (!c.training) {
    return dc__fail(DC_E_INVALID, "%s: config.training = -1, must be 0 or 1: a plan is of training", __func__);
  }
  dc_layer_plan_options o = DC_LAYER_PLAN_OPTIONS_INIT;
  DC__TRY(dc__read_options(__func__, "options", &o, sizeof o, options, DC__LAYER_PLAN_OPTIONS_SIZE_0_1));
  DC__TRY(layer_plan_check_options(__func__, &c, &o));
  dc_layer_plan out = DC_LAYER_PLAN_INIT;
  DC__TRY(dc__layer_plan(__func__, &c, &o, &out));
  return dc__write_sized(__func__, "plan", plan, &out, sizeof out, DC__LAYER_PLAN_SIZE_0_1);
}
