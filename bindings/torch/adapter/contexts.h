/* Which context an operator works on: operators have a graph's number among their arguments, but no handle. */
#ifndef DCT_CONTEXTS_H
#define DCT_CONTEXTS_H

#include "dc_api.h"

/* The context bound to the graph, else the default one, else NULL. */
dc_context *dct_context_of(int64_t graph_id);

#endif
