/* The memory of training, counted before anything is made. */
#ifndef DC_PLANNER_H
#define DC_PLANNER_H

#include "transformer/transformer.h"

/* config: read, with its defaults; options: right. DC_E_SHAPE when a sum of a given micro_batch passes 2^63. */
dc_status dc__layer_plan(const char *fn, const dc_layer_config *config, const dc_layer_plan_options *options,
                         dc_layer_plan *plan);

#endif
