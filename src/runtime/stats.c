/* Statistics, and dry runs: what an operator would do. */
#include <string.h>

#include "runtime/replicas.h"
#include "runtime/runtime.h"

int64_t dc__wire_elements(const dc_context *ctx, const dc__range *ranges, int64_t total, bool reduce) {
  int64_t own = ranges[ctx->rank].count;
  return reduce ? own * (ctx->world - 1) : total - own;
}

static int64_t arena_allocations(dc_context *ctx, int64_t *device_bytes) {
  dc__arena *arenas[] = {ctx->arenas.gathered,      ctx->arenas.working,       ctx->saved_arenas.gathered,
                         ctx->saved_arenas.working, ctx->arenas.shared,        ctx->arenas.buckets,
                         ctx->saved_arenas.shared,  ctx->saved_arenas.buckets, ctx->host};
  int64_t allocations = 0;
  *device_bytes = 0;
  for (size_t i = 0; i < DC__COUNT(arenas); i++) {
    dc__arena_stats stats = {0};
    if (arenas[i] != NULL) {
      dc__arena_get_stats(arenas[i], &stats);
    }
    allocations += stats.chunk_allocations;
    *device_bytes += i < 4 ? stats.chunk_bytes : 0;
  }
  return allocations;
}

static int64_t bucket_bytes(const dc_context *ctx) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    const dc__buckets *b = &ctx->buckets[i];
    bytes += (b->half[0].capacity + b->half[1].capacity) * (int64_t)dc_dtype_size(b->dtype);
  }
  return bytes;
}

void dc__stats(dc_context *ctx, dc_memory_stats *stats) {
  dc__arena_stats gathered;
  dc__arena_get_stats(ctx->arenas.gathered, &gathered);
  const dc__counters *c = &ctx->counters;
  *stats = (dc_memory_stats){
      .struct_size = sizeof *stats,
      .gathered_bytes = gathered.used_bytes,
      .gathered_peak_bytes = gathered.peak_bytes,
      .bucket_bytes = bucket_bytes(ctx),
      .offload_bytes = ctx->offload_bytes,
      .reload_bytes = ctx->reload_bytes,
      .gathers = c->gathers,
      .gather_hits = c->gather_hits,
      .gather_wire_bytes = c->gather_wire_bytes,
      .reductions = c->reductions,
      .reduce_wire_bytes = c->reduce_wire_bytes,
      .flushes = c->flushes,
      .copied_d2h_bytes = c->d2h_bytes,
      .copied_h2d_bytes = c->h2d_bytes,
      .registered_params = ctx->params.count,
      .registered_graphs = ctx->graphs.count,
  };
  stats->allocations = arena_allocations(ctx, &stats->arena_bytes) - c->allocations_base;
}

void dc__stats_reset(dc_context *ctx) {
  int64_t device_bytes;
  ctx->counters = (dc__counters){.allocations_base = arena_allocations(ctx, &device_bytes)};
  dc__arena_reset_peak(ctx->arenas.gathered);
}

/* ---- dry runs ---- */

static dc_status dry_gather(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                            dc_op_info *info) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  DC__TRY(dc__gather_dtype(fn, param, &dtype));
  if (op != DC_OP_PREFETCH_PARAMS_FUSED) { /* a prefetch returns no tensor */
    info->shape = param->ndim > 0 ? param->shape : NULL;
    info->ndim = param->ndim;
    info->dtype = dtype;
  }
  int64_t size = (int64_t)dc_dtype_size(dtype);
  const dc__gathered_copy *copy = dc__gather_copy(param, dtype);
  bool gathers = op != DC_OP_TAKE_PARAM && (copy == NULL || !dc__copy_is_current(param, copy));
  info->device_bytes = gathers && copy == NULL ? param->numel * size : 0;
  if (gathers && dc__gather_source(param) == NULL) {
    info->wire_bytes = dc__wire_elements(ctx, param->chunks, param->numel, false) * size;
  }
  return DC_OK;
}

static dc_status dry_reload_shard(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, dc_op_info *info) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param));
  if (!dc__shard_is_reloaded(param)) {
    info->device_bytes = param->chunks[ctx->rank].count * (int64_t)dc_dtype_size(param->dtype);
  }
  return DC_OK;
}

int64_t dc__reduction_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype) {
  int64_t size = (int64_t)dc_dtype_size(dtype);
  if (ctx->replica_comm != NULL) {
    return dc__replicas_wire_bytes(ctx, stage, param, dtype);
  }
  if (stage != 0) {
    return dc__wire_elements(ctx, param->owned, param->numel, true) * size;
  }
  return dc__wire_elements(ctx, param->chunks, param->numel, true) * size +
         dc__wire_elements(ctx, param->chunks, param->numel, false) * (int64_t)dc_dtype_size(param->grad_dtype);
}

static dc_status dry_reduce(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, int32_t dtype,
                            dc_op_info *info) {
  dc__graph *graph;
  dc__param *param;
  DC__TRY(dc__graph_find_param(ctx, fn, graph_id, id, false, &graph, &param));
  if (dtype != DC_DTYPE_NONE && !dc__dtype_is_float(dtype)) {
    return dc__fail(DC_E_DTYPE, "%s: grad is %s, must be a floating-point type", fn, dc_dtype_name(dtype));
  }
  dtype = dtype == DC_DTYPE_NONE ? param->expected_grad_dtype : dc__reduce_dtype(param, dtype);
  bool communicates = !ctx->profiling && !param->frozen && (graph->stage != 1 || ctx->update);
  if (communicates && dtype != DC_DTYPE_NONE) {
    info->wire_bytes = dc__reduction_bytes(ctx, graph->stage, param, dtype);
  }
  return DC_OK;
}

/* Reductions count at their dc_reduce_grad. These are of the local sums alone, which the end of a step reduces. */
static dc_status dry_end_backward(dc_context *ctx, const char *fn, int64_t graph_id, dc_op_info *info) {
  dc__graph *graph;
  DC__TRY(dc__graph_find(ctx, fn, graph_id, &graph));
  DC__MAP_EACH (&ctx->params, i) {
    const dc__param *param = ctx->params.values[i];
    if (ctx->update && param->local_sum != NULL) {
      info->wire_bytes += dc__reduction_bytes(ctx, 1, param, param->local_sum_dtype);
    }
  }
  return DC_OK;
}

/* After the first offload the shape is known; at the first one it is the argument's. */
static dc_status dry_value(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id,
                           dc_op_info *info) {
  dc__graph *graph;
  DC__TRY(dc__graph_find_stage3(ctx, fn, graph_id, &graph));
  info->host = op == DC_OP_OFFLOAD_TENSOR || op == DC_OP_WAIT_OFFLOAD;
  const dc__offloaded *value = dc__map_get(&graph->values, id);
  if (value != NULL) {
    info->shape = value->ndim > 0 ? value->shape : NULL;
    info->ndim = value->ndim;
    info->dtype = value->dtype;
    info->device_bytes =
        op == DC_OP_RELOAD_TENSOR && (value->device == NULL || value->stale) ? (int64_t)value->bytes : 0;
  }
  return DC_OK;
}

dc_status dc__dry_run(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                      dc_op_info *info) {
  dc__graph *graph;
  dc__param *param;
  info->ndim = -1;
  switch (op) {
    case DC_OP_ALLGATHER_PARAM:
    case DC_OP_PREFETCH_PARAMS_FUSED:
    case DC_OP_TAKE_PARAM:
      return dry_gather(ctx, fn, op, graph_id, id, dtype, info);
    case DC_OP_REDUCE_GRAD:
      return dry_reduce(ctx, fn, graph_id, id, dtype, info);
    case DC_OP_WAIT_ALLGATHER:
    case DC_OP_RELEASE_PARAM:
    case DC_OP_OFFLOAD_PARAMETER:
      return dc__graph_find_param(ctx, fn, graph_id, id, true, &graph, &param);
    case DC_OP_RELOAD_PARAMETER:
      return dry_reload_shard(ctx, fn, graph_id, id, info);
    case DC_OP_OFFLOAD_TENSOR:
    case DC_OP_RELOAD_TENSOR:
    case DC_OP_WAIT_OFFLOAD:
    case DC_OP_WAIT_RELOAD:
      return dry_value(ctx, fn, op, graph_id, id, info);
    case DC_OP_END_BACKWARD:
      return dry_end_backward(ctx, fn, graph_id, info);
    case DC_OP_FREE_TENSORS:
      return DC_OK;
    default:
      return dc__fail(DC_E_INVALID, "%s: op = %" PRId32 " is none of the operators", fn, op);
  }
}
