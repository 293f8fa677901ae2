/* The operators' names, for error texts and traces. */
#include "base/base.h"

static const char *const names[] = {
    [DC_OP_NONE] = "none",
    [DC_OP_ALLGATHER_PARAM] = "allgather_param",
    [DC_OP_PREFETCH_PARAMS_FUSED] = "prefetch_params_fused",
    [DC_OP_WAIT_ALLGATHER] = "wait_allgather",
    [DC_OP_RELEASE_PARAM] = "release_param",
    [DC_OP_REDUCE_GRAD] = "reduce_grad",
    [DC_OP_FREE_TENSORS] = "free_tensors",
    [DC_OP_OFFLOAD_TENSOR] = "offload_tensor",
    [DC_OP_RELOAD_TENSOR] = "reload_tensor",
    [DC_OP_WAIT_OFFLOAD] = "wait_offload",
    [DC_OP_WAIT_RELOAD] = "wait_reload",
    [DC_OP_OFFLOAD_PARAMETER] = "offload_parameter",
    [DC_OP_RELOAD_PARAMETER] = "reload_parameter",
    [DC_OP_END_BACKWARD] = "end_backward",
    [DC_OP_TAKE_PARAM] = "take_param",
    [DC_OP_SET_PERSISTENT] = "set_persistent",
    [DC_OP_REGISTER_GRAPH] = "register_graph",
    [DC_OP_INIT] = "init",
    [DC_OP_GRADS_FINITE] = "grads_finite",
    [DC_OP_COMM_ALL_GATHER] = "all_gather",
    [DC_OP_COMM_REDUCE_SCATTER] = "reduce_scatter",
    [DC_OP_COMM_ALL_REDUCE] = "all_reduce",
    [DC_OP_COMM_BROADCAST] = "broadcast",
    [DC_OP_COMM_BARRIER] = "barrier",
    [DC_OP_COMM_SPLIT] = "split",
    [DC_OP_COMM_ALL_TO_ALL] = "all_to_all",
    [DC_OP_COMM_GATHER] = "gather",
    [DC_OP_COMM_SCATTER] = "scatter",
};

const char *dc_op_name(int32_t op) {
  return op >= 0 && op < (int32_t)DC__COUNT(names) && names[op] != NULL ? names[op] : "unknown";
}
