/* Tensors and shards between device and host memory. The graph owns an offloaded tensor's host copy and uses it again
 * in every step. The device copy lives from reload to the end of the backward, or to a reload of newer content. */
#include <string.h>

#include "runtime/runtime.h"

/* ---- values ---- */

dc_status dc__offloaded_find(dc__graph *graph, const char *fn, int64_t id, dc__offloaded **value) {
  *value = dc__map_get(&graph->values, id);
  return *value != NULL ? DC_OK
                        : dc__fail(DC_E_NOT_FOUND, "%s: id = %" PRId64 " was never offloaded in graph %" PRId64, fn, id,
                                   graph->id);
}

/* From here on, value->reloaded also covers the caller's reads of both copies. */
static void mark_last_read(dc_context *ctx, dc__offloaded *value) {
  dc_stream *caller = ctx->lanes[DC__LANE_CALLER];
  if (caller != NULL) {
    dc__event_wait(value->reloaded, caller);
    dc__context_record_event(ctx, value->reloaded, caller);
  }
}

static void value_free(dc_context *ctx, dc__offloaded *value) {
  if (value->host != NULL) {
    mark_last_read(ctx, value);
    dc__buffer_revoke(value->host, value->reloaded, value->offloaded);
    dc_buffer_release(value->host);
    ctx->offload_bytes -= (int64_t)value->bytes;
  }
  dc__destroy_event(ctx, &value->offloaded);
  dc__destroy_event(ctx, &value->reloaded);
  dc__free(value->shape);
  dc__free(value);
}

static dc_status value_fill(dc_context *ctx, const dc_tensor *tensor, int64_t numel, dc__offloaded *value) {
  value->ndim = tensor->ndim;
  value->dtype = tensor->dtype;
  value->bytes = (size_t)numel * dc_dtype_size(tensor->dtype);
  value->shape = dc__calloc((size_t)tensor->ndim, sizeof *value->shape);
  if (value->shape == NULL) {
    return DC_E_NO_MEMORY;
  }
  if (tensor->ndim > 0) {
    memcpy(value->shape, tensor->shape, (size_t)tensor->ndim * sizeof *value->shape);
  }
  DC__TRY(dc__ensure_event(ctx, &value->offloaded));
  DC__TRY(dc__ensure_event(ctx, &value->reloaded));
  void *data;
  DC__TRY(dc__arena_alloc(ctx->host, NULL, value->bytes, &data));
  DC__TRY(dc__buffer_create(ctx->host, data, value->bytes, &value->host));
  ctx->offload_bytes += (int64_t)value->bytes;
  return DC_OK;
}

static dc_status value_make(dc_context *ctx, dc__graph *graph, int64_t id, const dc_tensor *tensor, int64_t numel,
                            dc__offloaded **value) {
  *value = dc__calloc(1, sizeof **value);
  if (*value == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = value_fill(ctx, tensor, numel, *value);
  if (status == DC_OK && !dc__map_put(&graph->values, id, *value)) {
    status = DC_E_NO_MEMORY;
  }
  if (status != DC_OK) {
    value_free(ctx, *value);
  }
  return status;
}

static bool same_tensor(const dc__offloaded *value, const dc_tensor *tensor) {
  return value->ndim == tensor->ndim && value->dtype == tensor->dtype &&
         (tensor->ndim == 0 || memcmp(value->shape, tensor->shape, (size_t)tensor->ndim * sizeof *value->shape) == 0);
}

static dc_status write_value(const char *fn, const dc__offloaded *value, dc_buffer *buffer, dc_tensor *out) {
  return dc__tensor_write(fn, "out", out, dc_buffer_data(buffer), value->shape, value->ndim, value->dtype, buffer);
}

static void forget_device(dc_context *ctx, dc__offloaded *value) {
  value->device = NULL;
  value->stale = false;
  ctx->reload_bytes -= (int64_t)value->bytes;
}

/* The device copy stays valid while the caller retains it. Blocks until the reload is done, since no later call may
 * wait for it. */
static void drop_device(dc_context *ctx, dc__offloaded *value) {
  if (value->device != NULL) {
    dc__event_wait(value->reloaded, NULL);
    if (value->stale) { /* it may be this very copy that is being offloaded */
      dc__event_wait(value->offloaded, ctx->lanes[DC__LANE_CALLER]);
    }
    mark_last_read(ctx, value);
    dc__buffer_release_after(value->device, value->reloaded);
    forget_device(ctx, value);
  }
}

void dc__offloaded_drop_device(dc_context *ctx, dc__graph *graph) {
  for (int64_t i = 0; i < graph->values.count; i++) {
    drop_device(ctx, graph->values.values[i]);
  }
}

void dc__offloaded_free(dc_context *ctx, dc__graph *graph) {
  dc__offloaded_drop_device(ctx, graph);
  for (int64_t i = 0; i < graph->values.count; i++) {
    value_free(ctx, graph->values.values[i]);
  }
  dc__map_clear(&graph->values);
}

/* ---- the operators ---- */

dc_status dc__offload_tensor(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, const dc_tensor *tensor,
                             dc_tensor *out) {
  dc_tensor t;
  int64_t numel;
  DC__TRY(dc__tensor_read(fn, "tensor", tensor, false, &t, &numel));
  DC__TRY(dc__tensor_check_output(fn, "out", out));
  /* Without a caller's stream, the tensor may be freed when the call returns, so the calling thread copies it. */
  dc_stream *stream = NULL;
  DC__TRY(ctx->lanes[DC__LANE_CALLER] != NULL ? dc__lane(ctx, DC__LANE_OFFLOAD, &stream) : DC_OK);
  dc__offloaded *value = dc__map_get(&graph->values, id);
  if (value == NULL) {
    DC__TRY(value_make(ctx, graph, id, &t, numel, &value));
  } else if (!same_tensor(value, &t)) {
    return dc__fail(DC_E_SHAPE,
                    "%s: tensor (%s, %" PRId64 " element%s, %" PRId32
                    " dimension%s) differs in shape or type from "
                    "the first tensor offloaded as id = %" PRId64 " (%s, %" PRId32 " dimension%s)",
                    fn, dc_dtype_name(t.dtype), numel, DC__PLURAL_S(numel), t.ndim, DC__PLURAL_S(t.ndim), id,
                    dc_dtype_name(value->dtype), value->ndim, DC__PLURAL_S(value->ndim));
  }
  if (stream != NULL) {
    dc__wait_for_caller(ctx, stream);
  }
  dc__event_wait(value->reloaded, stream);  /* the host copy may still be read by the last step's reload */
  dc__event_wait(value->offloaded, stream); /* or written by an offload from another stream */
  const dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_OFFLOAD_TENSOR};
  dc__recorded_copy(ctx, &tag, stream == NULL ? DC__LANE_CALLER : DC__LANE_OFFLOAD, dc_buffer_data(value->host), t.data,
                    value->bytes);
  dc__context_record_event(ctx, value->offloaded, stream);
  value->stale = value->device != NULL;
  ctx->counters.d2h_bytes += (int64_t)value->bytes;
  return write_value(fn, value, value->host, out);
}

dc_status dc__wait_offload(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, dc_tensor *out) {
  dc__offloaded *value;
  DC__TRY(dc__offloaded_find(graph, fn, id, &value));
  DC__TRY(dc__tensor_check_output(fn, "out", out));
  dc__event_wait(value->offloaded, ctx->lanes[DC__LANE_CALLER]);
  return write_value(fn, value, value->host, out);
}

dc_status dc__reload_tensor(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, dc_tensor *out) {
  dc__offloaded *value = dc__map_get(&graph->values, id);
  if (value == NULL) {
    return dc__fail(DC_E_STATE,
                    "%s: id = %" PRId64 " was not offloaded in graph %" PRId64
                    "; call dc_offload_tensor "
                    "first",
                    fn, id, graph->id);
  }
  DC__TRY(dc__tensor_check_output(fn, "out", out));
  if (value->stale) {
    drop_device(ctx, value);
  }
  if (value->device == NULL) {
    dc_stream *stream;
    void *data;
    DC__TRY(dc__lane(ctx, DC__LANE_RELOAD, &stream));
    DC__TRY(dc__arena_alloc(ctx->arenas.working, stream, value->bytes, &data));
    dc_status status = dc__buffer_create(ctx->arenas.working, data, value->bytes, &value->device);
    if (status != DC_OK) {
      (void)dc__stream_sync(stream, 0); /* it may still wait for earlier users of the memory */
      return status;
    }
    dc__wait_for_caller(ctx, stream);
    dc__event_wait(value->offloaded, stream);
    const dc__tag tag = {.graph_id = graph->ordinal, .id = id, .op = DC_OP_RELOAD_TENSOR};
    dc__recorded_copy(ctx, &tag, DC__LANE_RELOAD, data, dc_buffer_data(value->host), value->bytes);
    dc__context_record_event(ctx, value->reloaded, stream);
    ctx->reload_bytes += (int64_t)value->bytes;
    ctx->counters.h2d_bytes += (int64_t)value->bytes;
  }
  return write_value(fn, value, value->device, out);
}

dc_status dc__wait_reload(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, const dc_tensor *tensor,
                          dc_tensor *out) {
  dc__offloaded *value = dc__map_get(&graph->values, id);
  DC__TRY(dc__tensor_check_output(fn, "out", out));
  if (ctx->profiling && (value == NULL || value->device == NULL)) {
    dc_tensor t;
    int64_t numel;
    DC__TRY(dc__tensor_read(fn, "tensor", tensor, false, &t, &numel));
    return dc__tensor_write(fn, "out", out, t.data, t.shape, t.ndim, t.dtype, t.buffer);
  }
  DC__TRY(dc__offloaded_find(graph, fn, id, &value));
  if (value->device == NULL) {
    return dc__fail(DC_E_STATE, "%s: id = %" PRId64 " is not being reloaded; call dc_reload_tensor first", fn, id);
  }
  dc__event_wait(value->reloaded, ctx->lanes[DC__LANE_CALLER]);
  return write_value(fn, value, value->device, out);
}

/* Whether the context keeps the buffer: a gathered copy, or the host copy of an offloaded tensor. */
static bool keeps_buffer(const dc_context *ctx, const dc_buffer *buffer) {
  DC__MAP_EACH (&ctx->params, i) {
    const dc__param *param = ctx->params.values[i];
    for (int32_t k = 0; k < DC__COPIES; k++) {
      if (param->copies[k].buffer == buffer) {
        return true;
      }
    }
  }
  DC__MAP_EACH (&ctx->graphs, g) {
    const dc__graph *graph = ctx->graphs.values[g];
    for (int64_t i = 0; i < graph->values.count; i++) {
      if (((const dc__offloaded *)graph->values.values[i])->host == buffer) {
        return true;
      }
    }
  }
  return false;
}

bool dc__free_buffer(dc_context *ctx, dc_buffer *buffer) {
  DC__MAP_EACH (&ctx->graphs, g) {
    dc__graph *graph = ctx->graphs.values[g];
    for (int64_t i = 0; i < graph->values.count; i++) {
      dc__offloaded *value = graph->values.values[i];
      if (value->device == buffer) {
        if (value->stale) { /* as in drop_device */
          dc__event_wait(value->offloaded, ctx->lanes[DC__LANE_CALLER]);
        }
        mark_last_read(ctx, value);
        dc__buffer_revoke(buffer, value->reloaded, NULL);
        dc_buffer_release(buffer);
        forget_device(ctx, value);
        return true;
      }
    }
  }
  return !keeps_buffer(ctx, buffer);
}

/* ---- shards ---- */

bool dc__shard_is_reloaded(const dc__param *param) {
  return param->device_shard != NULL && param->device_shard_version == param->version;
}

dc_status dc__reload_shard(dc_context *ctx, const dc__graph *graph, dc__param *param) {
  if (dc__shard_is_reloaded(param)) {
    return DC_OK;
  }
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_RELOAD, &stream));
  DC__TRY(dc__ensure_event(ctx, &param->reloaded));
  DC__TRY(dc__ensure_event(ctx, &param->shard_read));
  size_t bytes = (size_t)param->chunks[ctx->rank].count * dc_dtype_size(param->dtype);
  dc__free_device_shard(ctx, param); /* its weights are out of date */
  DC__TRY(dc__arena_alloc(ctx->arenas.reloaded, stream, bytes, &param->device_shard));
  dc__wait_for_caller(ctx, stream);
  const dc__tag tag = {.graph_id = graph->ordinal, .id = param->id, .op = DC_OP_RELOAD_PARAMETER};
  dc__recorded_copy(ctx, &tag, DC__LANE_RELOAD, param->device_shard, param->shard, bytes);
  dc__context_record_event(ctx, param->reloaded, stream);
  param->device_shard_version = param->version;
  ctx->reload_bytes += (int64_t)bytes;
  ctx->counters.h2d_bytes += (int64_t)bytes;
  return DC_OK;
}

void dc__free_device_shard(dc_context *ctx, dc__param *param) {
  if (param->device_shard == NULL) {
    return;
  }
  if (ctx->lanes[DC__LANE_GATHER] != NULL) { /* gathers in progress may read it, on peers too */
    dc__context_record_event(ctx, param->shard_read, ctx->lanes[DC__LANE_GATHER]);
  }
  dc__arena_free(ctx->arenas.reloaded, param->device_shard, param->shard_read, param->reloaded);
  param->device_shard = NULL;
  ctx->reload_bytes -= (int64_t)((size_t)param->chunks[ctx->rank].count * dc_dtype_size(param->dtype));
}
