/* Chapter 9: the operators. */
#include <string.h>

#include "api/api_internal.h"

/* ---- weights ---- */

static dc_status write_copy(const char *fn, const dc__param *param, const dc__gathered_copy *copy, dc_tensor *out) {
  return dc__tensor_write(fn, "out", out, dc_buffer_data(copy->buffer), param->shape, param->ndim, copy->dtype,
                          copy->buffer);
}

static dc_status op_allgather(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, int32_t dtype,
                              dc_tensor *out) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  DC__TRY(dc__tensor_check_output(fn, "out", out));
  DC__TRY(dc__gather(ctx, fn, DC_OP_ALLGATHER_PARAM, graph, &param, &dtype, 1));
  return write_copy(fn, param, dc__gather_copy(param, dtype), out);
}

dc_status dc_allgather_param(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id, int32_t dtype,
                             dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_allgather(context, __func__, graph_id, id, dtype, out));
}

static dc_status op_prefetch(dc_context *ctx, const char *fn, int64_t graph_id, const int64_t *ids,
                             const int32_t *dtypes, int64_t count) {
  dc__graph *graph;
  DC__TRY(dc__graph_find(ctx, fn, graph_id, &graph));
  DC__TRY(dc__check_ids(fn, ids, count));
  dc__param *few[64];
  dc__param **params = count <= 64 ? few : dc__calloc((size_t)count, sizeof(dc__param *));
  dc_status status = params == NULL ? DC_E_NO_MEMORY : DC_OK;
  for (int64_t i = 0; i < count && status == DC_OK; i++) {
    status = dc__graph_find_param(ctx, fn, graph_id, ids[i], true, &graph, &params[i]);
  }
  if (status == DC_OK) {
    status = dc__gather(ctx, fn, DC_OP_PREFETCH_PARAMS_FUSED, graph, params, dtypes, count);
  }
  if (params != few) {
    dc__free(params);
  }
  return status;
}

dc_status dc_prefetch_params_fused(dc_context *context, int64_t graph_id, const int64_t *ids, const int32_t *dtypes,
                                   int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_prefetch(context, __func__, graph_id, ids, dtypes, count));
}

static dc_status op_wait_allgather(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_WAIT_ALLGATHER};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  return dc__recorder_end_call(span, dc__gather_wait(ctx, fn, param));
}

dc_status dc_wait_allgather(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_wait_allgather(context, __func__, graph_id, id));
}

static dc_status op_release(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, int64_t n_users) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_RELEASE_PARAM};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  return dc__recorder_end_call(span, dc__gather_release(ctx, fn, param, n_users));
}

dc_status dc_release_param(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id, int64_t n_users) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_release(context, __func__, graph_id, id, n_users));
}

static dc_status op_take(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, int32_t dtype,
                         dc_buffer **buffer) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_TAKE_PARAM};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  return dc__recorder_end_call(span, dc__gather_retain(ctx, fn, param, dtype, buffer));
}

dc_status dc_take_param(dc_context *context, int64_t graph_id, int64_t id, int32_t dtype, dc_buffer **buffer) {
  DC__WITHOUT_TRAPS;
  if (buffer == NULL) {
    return dc__fail(DC_E_INVALID, "%s: buffer is NULL", __func__);
  }
  *buffer = NULL;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_take(context, __func__, graph_id, id, dtype, buffer));
}

/* ---- gradients ---- */

static dc_status check_grad(const dc_context *ctx, const char *fn, const dc_tensor *tensor, const dc__param *param,
                            dc_tensor *grad) {
  int64_t count;
  DC__TRY(dc__tensor_read(fn, "grad", tensor, false, grad, &count));
  if (!dc__dtype_is_float(grad->dtype)) {
    return dc__fail(DC_E_DTYPE, "%s: grad is %s, must be a floating-point type", fn, dc_dtype_name(grad->dtype));
  }
  DC__TRY(dc__device_check_alignment(fn, "grad", ctx->device, grad->data, count, dc_dtype_size(grad->dtype)));
  return count == param->numel
             ? DC_OK
             : dc__fail(DC_E_SHAPE, "%s: grad has %" PRId64 " element%s, but parameter %" PRId64 " has %" PRId64, fn,
                        count, DC__PLURAL_S(count), param->id, param->numel);
}

static dc_status op_reduce_grad(dc_context *ctx, const char *fn, const dc_tensor *tensor, int64_t graph_id,
                                int64_t id) {
  dc__graph *graph;
  dc__param *param;
  dc_tensor grad;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, false, &graph, &param));
  DC__TRY(check_grad(ctx, fn, tensor, param, &grad));
  if (ctx->config.sync_before_reduce == 1) {
    DC__TRY(dc__context_synchronize(ctx));
  }
  if (!ctx->profiling && !param->frozen) {
    dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_REDUCE_GRAD};
    dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, param->numel * (int64_t)dc_dtype_size(grad.dtype));
    DC__TRY(dc__recorder_end_call(span, dc__reduce_grad(ctx, fn, graph, param, &grad)));
  }
  return ctx->config.sync_after_reduce == 1 ? dc__context_synchronize(ctx) : DC_OK;
}

dc_status dc_reduce_grad(dc_context *context, const dc_tensor *grad, int64_t graph_id, int64_t id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_reduce_grad(context, __func__, grad, graph_id, id));
}

static dc_status op_end_backward(dc_context *ctx, const char *fn, int64_t graph_id, int32_t release_buckets) {
  dc__graph *graph;
  DC__TRY(dc__check_flag(fn, "release_buckets", release_buckets));
  DC__TRY(dc__graph_find(ctx, fn, graph_id, &graph));
  if (release_buckets == 1 && ctx->capturing) {
    return dc__fail(DC_E_STATE, "%s: release_buckets = 1, but the CUDA graph that is captured needs the buckets", fn);
  }
  dc__tag tag = {.graph_id = graph->ordinal, .id = -1, .op = DC_OP_END_BACKWARD};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  DC__TRY(dc__recorder_end_call(span, dc__reduce_finish(ctx, fn)));
  dc__offloaded_drop_device(ctx, graph);
  if (ctx->update) { /* gradients are whole, but this backward may still add to them until dc_start_backward */
    ctx->boundary = true;
    ctx->finite_known = true;
  }
  if (release_buckets == 1) {
    dc__buckets_free(ctx);
    dc__arena_trim(ctx->arenas.buckets);
    dc__arena_trim(ctx->arenas.shared);
  }
  return DC_OK;
}

dc_status dc_end_backward(dc_context *context, int64_t graph_id, int32_t release_buckets) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_end_backward(context, __func__, graph_id, release_buckets));
}

/* ---- activations ---- */

static dc_status op_free_tensors(dc_context *ctx, const char *fn, const dc_tensor *tensors, size_t tensor_size,
                                 int64_t count, int32_t *freed) {
  if (count < 0) {
    return dc__fail(DC_E_INVALID, "%s: count = %" PRId64 ", must be >= 0", fn, count);
  }
  DC__TRY(dc__tensors_check(fn, "tensors", tensors, tensor_size, count));
  if (count > 0 && freed == NULL) {
    return dc__fail(DC_E_INVALID, "%s: freed is NULL, must have count = %" PRId64 " entr%s", fn, count,
                    count == 1 ? "y" : "ies");
  }
  int64_t threshold = ctx->config.free_activation_threshold;
  threshold = threshold == 0 ? 10485760 : threshold == -1 ? 0 : threshold;
  dc_tensor t;
  int64_t numel;
  for (int64_t i = 0; i < count; i++) { /* all are checked before any is freed */
    DC__TRY(dc__tensor_read(fn, "tensors", dc__tensors_at(tensors, tensor_size, i), false, &t, &numel));
  }
  dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_FREE_TENSORS};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  for (int64_t i = 0; i < count; i++) {
    (void)dc__tensor_read(fn, "tensors", dc__tensors_at(tensors, tensor_size, i), false, &t, &numel);
    bool frees = !ctx->profiling && numel > threshold;
    freed[i] = frees && (t.buffer == NULL || dc__free_buffer(ctx, t.buffer));
  }
  return dc__recorder_end_call(span, DC_OK);
}

dc_status dc_free_tensors(dc_context *context, const dc_tensor *tensors, size_t tensor_size, int64_t count,
                          int32_t *freed) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_free_tensors(context, __func__, tensors, tensor_size, count, freed));
}

/* Like gathering, offloading is for stage 3 only. */
static dc_status op_offload(dc_context *ctx, const char *fn, const dc_tensor *tensor, int64_t graph_id, int64_t id,
                            dc_tensor *out) {
  dc__graph *graph;
  DC__TRY(dc__graph_find_stage3(ctx, fn, graph_id, &graph));
  return dc__offload_tensor(ctx, fn, graph, id, tensor, out);
}

dc_status dc_offload_tensor(dc_context *context, const dc_tensor *tensor, int64_t graph_id, int64_t id,
                            dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_offload(context, __func__, tensor, graph_id, id, out));
}

static dc_status op_wait_offload(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, dc_tensor *out) {
  dc__graph *graph;
  DC__TRY(dc__graph_find_stage3(ctx, fn, graph_id, &graph));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_WAIT_OFFLOAD};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  return dc__recorder_end_call(span, dc__wait_offload(ctx, fn, graph, id, out));
}

dc_status dc_wait_offload(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_wait_offload(context, __func__, graph_id, id, out));
}

static dc_status op_reload(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, dc_tensor *out) {
  dc__graph *graph;
  DC__TRY(dc__graph_find_stage3(ctx, fn, graph_id, &graph));
  return dc__reload_tensor(ctx, fn, graph, id, out);
}

dc_status dc_reload_tensor(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_reload(context, __func__, graph_id, id, out));
}

static dc_status op_wait_reload(dc_context *ctx, const char *fn, const dc_tensor *tensor, int64_t graph_id, int64_t id,
                                dc_tensor *out) {
  dc__graph *graph;
  DC__TRY(dc__graph_find_stage3(ctx, fn, graph_id, &graph));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_WAIT_RELOAD};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  return dc__recorder_end_call(span, dc__wait_reload(ctx, fn, graph, id, tensor, out));
}

dc_status dc_wait_reload(dc_context *context, const dc_tensor *tensor, int64_t graph_id, int64_t id, dc_tensor *out) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_wait_reload(context, __func__, tensor, graph_id, id, out));
}

/* ---- shards ---- */

static dc_status op_offload_parameter(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_OFFLOAD_PARAMETER};
  dc__op_timing *span = dc__recorder_begin_call(ctx, &tag, 0);
  dc__free_device_shard(ctx, param);
  return dc__recorder_end_call(span, DC_OK);
}

dc_status dc_offload_parameter(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_offload_parameter(context, __func__, graph_id, id));
}

static dc_status op_reload_parameter(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  return dc__reload_shard(ctx, graph, param);
}

dc_status dc_reload_parameter(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id) {
  DC__WITHOUT_TRAPS;
  (void)token;
  DC__TRY(dc__operator_enter(context, __func__));
  return dc__operator_leave(context, op_reload_parameter(context, __func__, graph_id, id));
}
