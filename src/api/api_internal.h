/* Shared by the public functions: each checks its arguments, enters the context, calls its module, and leaves. */
#ifndef DC_API_INTERNAL_H
#define DC_API_INTERNAL_H

#include "runtime/runtime.h"

/* Sizes of the structs in the version that introduced them; frozen from then on (tests lock them). */
enum {
  DC__CONTEXT_OPTIONS_SIZE_0_1 = 24,
  DC__CONFIG_SIZE_0_1 = 48,
  DC__MEMORY_STATS_SIZE_0_1 = 144,
  DC__OP_INFO_SIZE_0_1 = 48,
  DC__TRACE_EVENT_SIZE_0_1 = 48,
  DC__LAYER_CONFIG_SIZE_0_1 = 160,
  DC__LAYER_CALL_SIZE_0_1 = 96,
  DC__LAYER_COST_SIZE_0_1 = 80,
  DC__LAYER_PLAN_OPTIONS_SIZE_0_1 = 72,
  DC__LAYER_PLAN_SIZE_0_1 = 80,
};

_Static_assert(sizeof(void *) != 8 || sizeof(dc_context_options) >= DC__CONTEXT_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_config) >= DC__CONFIG_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_memory_stats) >= DC__MEMORY_STATS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_op_info) >= DC__OP_INFO_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_trace_event) >= DC__TRACE_EVENT_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_layer_config) >= DC__LAYER_CONFIG_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_layer_call) >= DC__LAYER_CALL_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_layer_cost) >= DC__LAYER_COST_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_layer_plan_options) >= DC__LAYER_PLAN_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(dc_layer_plan) >= DC__LAYER_PLAN_SIZE_0_1, "0.1");

/* DC_E_INVALID unless low <= value <= high. */
dc_status dc__check_range(const char *fn, const char *argument, int64_t value, int64_t low, int64_t high);
/* DC_E_INVALID unless the flag is 0 or 1. */
dc_status dc__check_flag(const char *fn, const char *argument, int32_t value);

/* Reads a layer's configuration with its defaults filled in. */
dc_status dc__read_layer_config(const char *fn, const dc_layer_config *config, dc_layer_config *c);

#endif
