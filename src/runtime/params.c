/* Parameters: registering, finding, forgetting. */
#include <string.h>

#include "runtime/runtime.h"

dc_status dc__param_find(dc_context *ctx, const char *fn, int64_t id, dc__param **param) {
  *param = dc__map_get(&ctx->params, id);
  return *param != NULL ? DC_OK
                        : dc__fail(DC_E_NOT_FOUND,
                                   "%s: id = %" PRId64 " is not a registered parameter (%" PRId64 " %s registered)", fn,
                                   id, ctx->params.count, ctx->params.count == 1 ? "is" : "are");
}

dc_status dc__check_ids(const char *fn, const int64_t *ids, int64_t count) {
  return count == 0 || (count > 0 && ids != NULL)
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: count = %" PRId64 " with ids %s, must be %s", fn, count,
                        ids == NULL ? "NULL" : "given", ids == NULL ? "0 without ids" : ">= 0");
}

int64_t dc__chunk(int64_t numel, int32_t world) {
  return numel / world + (numel % world != 0);
}

dc__range dc__chunk_range(int64_t numel, int32_t world, int32_t rank) {
  int64_t chunk = dc__chunk(numel, world);
  int64_t begin = rank > 0 && chunk > numel / rank ? numel : rank * chunk; /* the product may be too large */
  return (dc__range){begin, numel - begin < chunk ? numel - begin : chunk};
}

static void param_free(dc_context *ctx, dc__param *param) {
  dc__gather_free(ctx, param);
  dc__free_device_shard(ctx, param);
  if (param->local_sum != NULL) {
    dc__arena_free(ctx->arenas.working, param->local_sum, NULL, NULL);
  }
  for (int32_t i = 0; i < DC__COPIES; i++) {
    dc__destroy_event(ctx, &param->copies[i].ready);
  }
  dc__destroy_event(ctx, &param->last_read);
  dc__destroy_event(ctx, &param->reloaded);
  dc__destroy_event(ctx, &param->shard_read);
  dc__free(param->own_split);
  if (param->chunks != NULL) {
    dc__chunks_release(ctx, param->numel);
  }
  dc__free(param->shape);
  dc__free(param);
}

/* Checks and stores the registered weights: for stage 3 a shard of the right length, else the whole tensor or none. */
static dc_status set_weights(dc_context *ctx, const char *fn, const dc__param_spec *spec, dc__param *param) {
  dc_tensor t;
  int64_t count;
  const char *name = spec->sharded ? "shard" : "tensor";
  DC__TRY(dc__tensor_read(fn, name, spec->tensor, !spec->sharded, &t, &count));
  if (spec->tensor == NULL) {
    return DC_OK;
  }
  if (!dc__dtype_is_castable(t.dtype)) {
    return dc__fail(DC_E_DTYPE,
                    "%s: %s of parameter %" PRId64
                    " is %s; collectives take float32, float64, float16, "
                    "bfloat16, int8, int32 and int64",
                    fn, name, spec->id, dc_dtype_name(t.dtype));
  }
  param->dtype = t.dtype;
  if (!spec->sharded) {
    return count == param->numel
               ? DC_OK
               : dc__fail(DC_E_SHAPE,
                          "%s: tensor of parameter %" PRId64 " has %" PRId64 " element%s, but its shape has %" PRId64,
                          fn, spec->id, count, DC__PLURAL_S(count), param->numel);
  }
  int64_t real = param->chunks[ctx->rank].count;
  if (count != param->chunk && count != real) {
    return dc__fail(DC_E_SHAPE,
                    "%s: shard of parameter %" PRId64 " on rank %" PRId32 " has %" PRId64
                    " element%s, must have %" PRId64 " (%" PRId64 " element%s over %" PRId32 " rank%s, rounded up)",
                    fn, spec->id, ctx->rank, count, DC__PLURAL_S(count), param->chunk, param->numel,
                    DC__PLURAL_S(param->numel), ctx->world, DC__PLURAL_S(ctx->world));
  }
  DC__TRY(dc__device_check_alignment(fn, name, ctx->device, t.data, count, dc_dtype_size(t.dtype)));
  dc_comm *comm = ctx->gather_comm;
  if (ctx->config.symmetric_memory == 1 && ctx->world > 1 && count > 0 && /* padding too, so that ranks agree */
      !comm->ops->peer_accessible(comm, t.data, (size_t)count * dc_dtype_size(t.dtype))) {
    return dc__fail(DC_E_INVALID,
                    "%s: shard of parameter %" PRId64
                    " does not lie in memory that peers can read, as "
                    "symmetric_memory = 1 wants; allocate it with dc_context_alloc and DC_MEMORY_SHARED",
                    fn, spec->id);
  }
  param->shard = t.data;
  return DC_OK;
}

/* Checks a gradient buffer against the parameter. *part: the elements that it covers, without padding. */
static dc_status read_grad(const dc_context *ctx, const char *fn, const dc__param *param, const dc_tensor *grad,
                           int64_t offset, dc_tensor *t, int64_t *count, dc__range *part) {
  DC__TRY(dc__tensor_read(fn, "grad_buffer", grad, true, t, count));
  if (grad != NULL && !dc__dtype_is_float(t->dtype)) { /* also if empty, as it may not be on other ranks */
    return dc__fail(DC_E_DTYPE, "%s: grad_buffer of parameter %" PRId64 " is %s, must be a floating-point type", fn,
                    param->id, dc_dtype_name(t->dtype));
  }
  DC__TRY(dc__device_check_alignment(fn, "grad_buffer", ctx->device, t->data, *count, dc_dtype_size(t->dtype)));
  *part = (dc__range){offset, *count};
  if (param->sharded) {
    dc__range own = param->chunks[ctx->rank];
    if (*count != 0 && *count != param->chunk && *count != own.count) {
      return dc__fail(DC_E_SHAPE,
                      "%s: grad_buffer of parameter %" PRId64 " on rank %" PRId32 " has %" PRId64
                      " element%s, must have %" PRId64 ", as its shard, or 0",
                      fn, param->id, ctx->rank, *count, DC__PLURAL_S(*count), param->chunk);
    }
    if (offset != 0) {
      return dc__fail(DC_E_INVALID, "%s: offset = %" PRId64 " for parameter %" PRId64 ", must be 0 for a sharded one",
                      fn, offset, param->id);
    }
    *part = (dc__range){own.begin, *count < own.count ? *count : own.count};
  } else if (offset < 0 || offset > param->numel || *count > param->numel - offset) {
    const int64_t end = offset > INT64_MAX - *count ? INT64_MAX : offset + *count;
    return dc__fail(DC_E_SHAPE,
                    "%s: grad_buffer of parameter %" PRId64 " covers elements %" PRId64 " to %" PRId64
                    ", but the parameter has %" PRId64,
                    fn, param->id, offset, end, param->numel);
  }
  return DC_OK;
}

/* Zeroes the buffer and makes it the parameter's. count includes padding. */
static void bind_grad(dc_context *ctx, dc__param *param, const dc_tensor *t, int64_t count, dc__range part) {
  if (count > 0) {
    dc_stream *caller = ctx->lanes[DC__LANE_CALLER];
    dc__stream_zero(dc__stream_or_internal(ctx->device, caller), t->data, (size_t)count * dc_dtype_size(t->dtype));
    dc__device_sync_internal(ctx->device, caller);
    dc__record_caller_event(ctx);
  }
  param->grad = count > 0 ? t->data : NULL;
  param->grad_count = part.count;
  param->grad_offset = part.begin;
  param->grad_dtype = count > 0 ? t->dtype : DC_DTYPE_NONE;
  param->has_grad = param->keeps_grad = false;
}

static dc_status param_fill(dc_context *ctx, const char *fn, const dc__param_spec *spec, dc__param *param) {
  DC__TRY(dc__numel(fn, "shape", spec->shape, spec->ndim, &param->numel));
  param->ndim = spec->ndim;
  param->shape = dc__calloc((size_t)spec->ndim, sizeof *param->shape);
  param->chunks = dc__chunks_retain(ctx, param->numel);
  if (param->shape == NULL || param->chunks == NULL) {
    return DC_E_NO_MEMORY;
  }
  param->owned = dc__chunks_even_split(ctx, param->numel); /* until a graph says otherwise */
  if (spec->ndim > 0) {
    memcpy(param->shape, spec->shape, (size_t)spec->ndim * sizeof *param->shape);
  }
  param->chunk = dc__chunk(param->numel, ctx->world);
  DC__TRY(set_weights(ctx, fn, spec, param));
  dc_tensor grad;
  int64_t count;
  dc__range part;
  DC__TRY(read_grad(ctx, fn, param, spec->grad, spec->offset, &grad, &count, &part));
  bind_grad(ctx, param, &grad, count, part);
  return dc__map_put(&ctx->params, param->id, param) ? DC_OK : DC_E_NO_MEMORY;
}

dc_status dc__param_register(dc_context *ctx, const char *fn, const dc__param_spec *spec) {
  if (dc__map_get(&ctx->params, spec->id) != NULL) {
    return dc__fail(DC_E_EXISTS, "%s: id = %" PRId64 " is registered already; call dc_unregister_param first", fn,
                    spec->id);
  }
  if (spec->expected_grad_dtype != DC_DTYPE_NONE && !dc__dtype_is_float(spec->expected_grad_dtype)) {
    return dc__fail(DC_E_DTYPE, "%s: expected_grad_dtype = %" PRId32 " (%s), must be a floating-point type or none", fn,
                    spec->expected_grad_dtype, dc_dtype_name(spec->expected_grad_dtype));
  }
  dc__param *param = dc__calloc(1, sizeof *param);
  if (param == NULL) {
    return DC_E_NO_MEMORY;
  }
  param->id = spec->id;
  param->sharded = spec->sharded;
  param->persistent = spec->persistent;
  param->expected_grad_dtype = spec->expected_grad_dtype;
  dc_status status = param_fill(ctx, fn, spec, param);
  if (status != DC_OK) {
    param_free(ctx, param);
  }
  return status;
}

dc_status dc__param_unregister(dc_context *ctx, const char *fn, int64_t id) {
  dc__param *param;
  DC__TRY(dc__param_find(ctx, fn, id, &param));
  if (param->graphs > 0) {
    return dc__fail(DC_E_BUSY, "%s: parameter %" PRId64 " is in %" PRId32 " graph%s; unregister %s first", fn, id,
                    param->graphs, DC__PLURAL_S(param->graphs), param->graphs == 1 ? "it" : "them");
  }
  if (dc__param_in_use(param)) {
    return dc__fail(DC_E_BUSY,
                    "%s: parameter %" PRId64
                    " is in use: it is gathered, and not released by all of its users; call "
                    "dc_release_param or dc_context_step_abort first",
                    fn, id);
  }
  DC__TRY(dc__context_synchronize(ctx)); /* collectives in progress read its ranges and its shard */
  dc__map_remove(&ctx->params, id);
  dc__name_remove(ctx, id);
  param_free(ctx, param);
  return DC_OK;
}

dc_status dc__param_set_grad(dc_context *ctx, const char *fn, int64_t id, const dc_tensor *grad, int64_t offset) {
  dc__param *param;
  DC__TRY(dc__param_find(ctx, fn, id, &param));
  if (param->pending > 0) {
    return dc__fail(DC_E_BUSY,
                    "%s: a reduction into the buffer of parameter %" PRId64
                    " is pending; call "
                    "dc_end_backward first",
                    fn, id);
  }
  dc_tensor t;
  int64_t count;
  dc__range part;
  DC__TRY(read_grad(ctx, fn, param, grad, offset, &t, &count, &part));
  const dc__range owned = param->owned[ctx->rank];
  if (param->graphs > 0 && count > 0 && (part.begin != owned.begin || part.count != owned.count)) {
    return dc__fail(DC_E_SHAPE,
                    "%s: grad_buffer of parameter %" PRId64 " covers elements %" PRId64 " to %" PRId64
                    ", but its graph was registered with %" PRId64 " to %" PRId64
                    "; call dc_unregister_graph, and register it again with the new buffer",
                    fn, id, part.begin, part.begin + part.count, owned.begin, owned.begin + owned.count);
  }
  if (param->grad != NULL) {
    dc__event_wait(ctx->caller_event, NULL); /* the stream may still be zeroing the old buffer */
  }
  bind_grad(ctx, param, &t, count, part);
  return DC_OK;
}

/* A rank that owns nothing cannot know whether buffers were removed. If there is such a rank, all ranks continue, and
 * fail when they compare the reduction (comm/signature.h). */
dc_status dc__param_check_buffer(const dc_context *ctx, const char *fn, const dc__param *param) {
  if (param->grad != NULL) {
    return DC_OK;
  }
  for (int32_t rank = 0; rank < ctx->world; rank++) {
    if (param->owned[rank].count == 0) {
      return DC_OK;
    }
  }
  return dc__fail(DC_E_STATE,
                  "%s: the gradient buffer of parameter %" PRId64
                  " was taken away by dc_context_update_param_grad_buffer; give it one first",
                  fn, param->id);
}

void dc__params_free(dc_context *ctx) {
  DC__MAP_EACH (&ctx->params, i) {
    param_free(ctx, ctx->params.values[i]);
  }
  dc__map_clear(&ctx->params);
  dc__map_clear(&ctx->chunks);
}
