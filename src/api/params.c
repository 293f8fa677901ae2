/* Chapters 7 and 8: parameters and graphs. */
#include "api/api_internal.h"

dc_status dc_register_param(dc_context *context, int64_t id, const int64_t *shape, int32_t ndim,
                            const dc_tensor *tensor, dc_tensor *grad_buffer, int64_t offset) {
  DC__WITHOUT_TRAPS;
  dc__param_spec spec = {
      .id = id, .shape = shape, .ndim = ndim, .offset = offset, .tensor = tensor, .grad = grad_buffer};
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__param_register(context, __func__, &spec));
}

dc_status dc_shard_range(int64_t numel, int32_t rank, int32_t world_size, int64_t *offset, int64_t *count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__check_range(__func__, "numel", numel, 0, INT64_MAX));
  DC__TRY(dc__check_range(__func__, "world_size", world_size, 1, INT32_MAX));
  DC__TRY(dc__check_range(__func__, "rank", rank, 0, world_size - 1));
  if (offset == NULL || count == NULL) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", __func__, offset == NULL ? "offset" : "count");
  }
  const dc__range part = dc__chunk_range(numel, world_size, rank);
  *offset = part.begin;
  *count = part.count;
  return DC_OK;
}

dc_status dc_register_z3_param(dc_context *context, int64_t id, const int64_t *shape, int32_t ndim,
                               const dc_tensor *shard, dc_tensor *grad_buffer, int32_t persistent,
                               int32_t expected_grad_dtype) {
  DC__WITHOUT_TRAPS;
  dc__param_spec spec = {.id = id,
                         .shape = shape,
                         .ndim = ndim,
                         .sharded = true,
                         .persistent = persistent == 1,
                         .expected_grad_dtype = expected_grad_dtype,
                         .tensor = shard,
                         .grad = grad_buffer};
  DC__TRY(dc__check_flag(__func__, "persistent", persistent));
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__param_register(context, __func__, &spec));
}

dc_status dc_context_set_param_name(dc_context *context, int64_t id, const char *name) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__name_set(context, __func__, id, name));
}

dc_status dc_context_update_param_grad_buffer(dc_context *context, int64_t id, dc_tensor *grad_buffer, int64_t offset) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__param_set_grad(context, __func__, id, grad_buffer, offset));
}

dc_status dc_unregister_param(dc_context *context, int64_t id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__param_unregister(context, __func__, id));
}

static dc_status find_sharded(dc_context *ctx, const char *fn, int64_t id, dc__param **param) {
  DC__TRY(dc__param_find(ctx, fn, id, param));
  return (*param)->sharded ? DC_OK
                           : dc__fail(DC_E_STAGE,
                                      "%s: parameter %" PRId64
                                      " is not sharded; it was registered by "
                                      "dc_register_param",
                                      fn, id);
}

/* Any graph that contains a parameter; its gathers are the same in all. */
static dc__graph *graph_of(dc_context *ctx, const dc__param *param) {
  DC__MAP_EACH (&ctx->graphs, i) {
    dc__graph *graph = ctx->graphs.values[i];
    if (dc__map_get(&graph->params, param->id) == param) {
      return graph;
    }
  }
  return NULL;
}

static dc_status params_set_persistent(dc_context *ctx, const char *fn, int64_t id) {
  dc__param *param;
  DC__TRY(find_sharded(ctx, fn, id, &param));
  dc__graph none = {.ordinal = -1};
  dc__graph *graph = graph_of(ctx, param);
  DC__TRY(dc__gather(ctx, fn, DC_OP_SET_PERSISTENT, graph == NULL ? &none : graph, &param, NULL, 1));
  param->persistent = true;
  return DC_OK;
}

dc_status dc_set_persistent(dc_context *context, int64_t id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, params_set_persistent(context, __func__, id));
}

static dc_status params_clear_persistent(dc_context *ctx, const char *fn, int64_t id) {
  dc__param *param;
  DC__TRY(find_sharded(ctx, fn, id, &param));
  param->persistent = false;
  if (!dc__param_in_use(param)) {
    dc__gather_free(ctx, param);
  }
  return DC_OK;
}

dc_status dc_clear_persistent(dc_context *context, int64_t id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, params_clear_persistent(context, __func__, id));
}

static dc_status params_invalidate(dc_context *ctx, const char *fn, int64_t id) {
  dc__param *param;
  DC__TRY(find_sharded(ctx, fn, id, &param));
  if (!param->persistent) {
    dc__gather_free(ctx, param);
  }
  return DC_OK;
}

dc_status dc_invalidate_gathered_param(dc_context *context, int64_t id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, params_invalidate(context, __func__, id));
}

static dc_status params_clear_all(dc_context *ctx) {
  DC__MAP_EACH (&ctx->params, i) {
    dc__param *param = ctx->params.values[i];
    if (!param->persistent) {
      dc__gather_free(ctx, param);
    }
  }
  return DC_OK;
}

dc_status dc_clear_all_gathered_params(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, params_clear_all(context));
}

/* Calls `each` for the listed parameters, once all are found. */
static dc_status params_for_each(dc_context *ctx, const char *fn, const int64_t *ids, int64_t count,
                                 void (*each)(dc__param *param)) {
  DC__TRY(dc__check_ids(fn, ids, count));
  dc__param *param;
  for (int64_t i = 0; i < count; i++) {
    DC__TRY(dc__param_find(ctx, fn, ids[i], &param));
  }
  for (int64_t i = 0; i < count; i++) {
    each(dc__map_get(&ctx->params, ids[i]));
  }
  return DC_OK;
}

static void raise_version(dc__param *param) {
  param->version++;
}

static dc_status params_updated(dc_context *ctx, const char *fn, const int64_t *ids, int64_t count) {
  DC__TRY(params_for_each(ctx, fn, ids, count, raise_version));
  if (ids == NULL) {
    DC__MAP_EACH (&ctx->params, i) {
      raise_version(ctx->params.values[i]);
    }
  }
  return DC_OK;
}

dc_status dc_context_params_updated(dc_context *context, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, params_updated(context, __func__, ids, count));
}

static void keep_grad(dc__param *param) {
  param->has_grad = true;
}

/* Between two steps, this also covers the first reduction of the next step. */
static void keep_grad_over_boundary(dc__param *param) {
  param->has_grad = param->keeps_grad = true;
}

dc_status dc_context_accumulate_grads(dc_context *context, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  void (*keep)(dc__param *) = context->boundary ? keep_grad_over_boundary : keep_grad;
  return dc__context_leave(context, params_for_each(context, __func__, ids, count, keep));
}

dc_status dc_register_graph_z0(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graph_register(context, __func__, graph_id, 0, ids, count));
}

dc_status dc_register_graph_z1(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graph_register(context, __func__, graph_id, 1, ids, count));
}

dc_status dc_register_graph_z2(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graph_register(context, __func__, graph_id, 2, ids, count));
}

dc_status dc_register_graph_z3(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graph_register(context, __func__, graph_id, 3, ids, count));
}

dc_status dc_unregister_graph(dc_context *context, int64_t graph_id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graph_unregister(context, __func__, graph_id));
}
