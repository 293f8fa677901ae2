/* Chapter 6: contexts. */
#include <string.h>

#include "api/api_internal.h"

dc_status dc__check_range(const char *fn, const char *argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    return dc__fail(DC_E_INVALID, "%s: %s = %" PRId64 ", must be %" PRId64 " to %" PRId64, fn, argument, value, low,
                    high);
  }
  return DC_OK;
}

dc_status dc__check_flag(const char *fn, const char *argument, int32_t value) {
  return value == 0 || value == 1 ? DC_OK
                                  : dc__fail(DC_E_INVALID, "%s: %s = %" PRId32 ", must be 0 or 1", fn, argument, value);
}

void dc_context_options_init(dc_context_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

void dc_config_init(dc_config *config, size_t struct_size) {
  dc__init_sized(config, struct_size, sizeof *config);
}

dc_status dc_context_create(dc_device *device, const dc_context_options *options, dc_context **context) {
  DC__WITHOUT_TRAPS;
  if (context == NULL) {
    return dc__fail(DC_E_INVALID, "%s: context is NULL", __func__);
  }
  *context = NULL;
  DC__TRY(dc__handle_check(__func__, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(__func__, "device", &device->owner));
  dc_context_options o = DC_CONTEXT_OPTIONS_INIT;
  DC__TRY(dc__read_options(__func__, "options", &o, sizeof o, options, DC__CONTEXT_OPTIONS_SIZE_0_1));
  dc_context *ctx = dc__calloc(1, sizeof *ctx);
  if (ctx == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__recorder_create(ctx);
  if (status != DC_OK) {
    dc__free(ctx);
    return status;
  }
  ctx->handle = DC__HANDLE_CONTEXT;
  pthread_mutex_init(&ctx->mutex, NULL);
  ctx->device = dc__device_retain(device);
  ctx->log = o.log;
  ctx->log_user = o.log_user;
  *context = ctx;
  return DC_OK;
}

void dc_context_destroy(dc_context *context) {
  DC__WITHOUT_TRAPS;
  if (!dc__handle_is(context, DC__HANDLE_CONTEXT) || dc__owner_is_forked(&context->device->owner)) {
    return;
  }
  pthread_mutex_lock(&context->mutex);
  (void)dc__context_cleanup(context);
  pthread_mutex_unlock(&context->mutex);
  dc__recorder_free(context); /* before the device, which has its timestamps */
  dc__device_release(context->device);
  pthread_mutex_destroy(&context->mutex);
  dc__handle_clear(&context->handle);
  dc__free(context);
}

static dc_status check_config(const char *fn, const dc_config *c) {
  DC__TRY(dc__check_flag(fn, "config.symmetric_memory", c->symmetric_memory));
  if (c->double_buffer < -1 || c->double_buffer > 1) {
    return dc__fail(DC_E_INVALID, "%s: config.double_buffer = %" PRId32 ", must be -1 (off), 0 (default) or 1 (on)", fn,
                    c->double_buffer);
  }
  if (c->free_activation_threshold < -1) {
    return dc__fail(DC_E_INVALID, "%s: config.free_activation_threshold = %" PRId64 ", must be >= -1", fn,
                    c->free_activation_threshold);
  }
  DC__TRY(dc__check_flag(fn, "config.sync_before_reduce", c->sync_before_reduce));
  DC__TRY(dc__check_flag(fn, "config.sync_after_reduce", c->sync_after_reduce));
  DC__TRY(dc__check_flag(fn, "config.sync_before_allgather", c->sync_before_allgather));
  DC__TRY(dc__check_flag(fn, "config.sync_after_allgather", c->sync_after_allgather));
  DC__TRY(dc__check_flag(fn, "config.check_finite", c->check_finite));
  return dc__check_range(fn, "config.replicas", c->replicas, 0, DC__COMM_MAX_WORLD);
}

static dc_status init_locked(dc_context *ctx, dc_comm *comm, const dc_config *config, int64_t bucket_elements) {
  const char *fn = "dc_init";
  if (ctx->state != DC__NEW) {
    return dc__fail(DC_E_STATE, "%s: the context %s", fn,
                    ctx->state == DC__READY ? "is initialised already" : "was cleaned up; make a new one");
  }
  dc_config c = DC_CONFIG_INIT;
  DC__TRY(dc__read_options(fn, "config", &c, sizeof c, config, DC__CONFIG_SIZE_0_1));
  DC__TRY(check_config(fn, &c));
  if (bucket_elements < 1 || bucket_elements > INT64_C(1) << 48) {
    return dc__fail(DC_E_INVALID, "%s: initial_reduce_bucket_size = %" PRId64 ", must be 1 to 2^48 elements", fn,
                    bucket_elements);
  }
  return dc__context_start(ctx, fn, comm, &c, bucket_elements);
}

dc_status dc_init(dc_context *context, dc_comm *comm, const dc_config *config, int64_t initial_reduce_bucket_size) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "context", context, DC__HANDLE_CONTEXT));
  DC__TRY(dc__owner_check(__func__, "context", &context->device->owner));
  DC__TRY(dc__handle_check_optional(__func__, "comm", comm, DC__HANDLE_COMM));
  if (comm != NULL) {
    DC__TRY(dc__owner_check(__func__, "communicator", &comm->owner));
  }
  pthread_mutex_lock(&context->mutex);
  return dc__context_leave(context, init_locked(context, comm, config, initial_reduce_bucket_size));
}

dc_status dc_cleanup(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check(__func__, "context", context, DC__HANDLE_CONTEXT));
  DC__TRY(dc__owner_check(__func__, "context", &context->device->owner));
  pthread_mutex_lock(&context->mutex);
  if (context->state == DC__NEW) {
    return dc__context_leave(context, dc__fail(DC_E_STATE, "%s: the context was never initialised", __func__));
  }
  return dc__context_leave(context, dc__context_cleanup(context));
}

dc_status dc_reset(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__graphs_reset(context, __func__));
}

static dc_status abort_step(dc_context *ctx) {
  dc_status status = dc__context_synchronize(
      ctx); /* the context's work; memory that the caller's stream reads is freed after its events */
  DC__MAP_EACH (&ctx->params, i) {
    dc__param *param = ctx->params.values[i];
    if (!param->persistent) {
      dc__gather_free(ctx, param);
    }
    dc__param_end_use(param);
  }
  dc__reduce_drop(ctx);
  dc__grad_finite_reset(ctx);
  DC__MAP_EACH (&ctx->graphs, i) {
    dc__offloaded_drop_device(ctx, ctx->graphs.values[i]);
  }
  ctx->in_forward = false;
  return status;
}

dc_status dc_context_step_abort(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, abort_step(context));
}

static dc_status context_set_stream(dc_context *ctx, const char *fn, dc_stream *stream) {
  DC__TRY(dc__handle_check_optional(fn, "stream", stream, DC__HANDLE_STREAM));
  DC__TRY(dc__stream_check_device(fn, stream, "context", ctx->device));
  if (ctx->capturing && stream != ctx->lanes[DC__LANE_CALLER]) {
    return dc__fail(DC_E_STATE, "%s: the stream set before is captured into a CUDA graph; end the capture first", fn);
  }
  dc_stream *old = ctx->lanes[DC__LANE_CALLER];
  if (stream != old && dc__stream_captures(stream)) {
    ctx->lanes[DC__LANE_CALLER] = stream;
    dc_status status = dc__capture_update(ctx, fn); /* the host waits, since a graph cannot */
    ctx->lanes[DC__LANE_CALLER] = status == DC_OK ? stream : old;
    return status;
  }
  /* The old stream's reads stay ordered before releases on the new one. */
  dc__wait_for_caller(ctx, stream);
  ctx->lanes[DC__LANE_CALLER] = stream;
  return DC_OK;
}

dc_status dc_context_set_stream(dc_context *context, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, context_set_stream(context, __func__, stream));
}

dc_status dc_context_check(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, DC_OK); /* entering the context checks for a failure */
}

static dc_status context_alloc(dc_context *ctx, const char *fn, int64_t bytes, int32_t kind, dc_buffer **buffer) {
  const dc__arenas *arenas =
      ctx->capturing ? &ctx->saved_arenas : &ctx->arenas; /* no graph may reuse what the caller keeps */
  dc__arena *arena = kind == DC_MEMORY_DEVICE   ? arenas->working
                     : kind == DC_MEMORY_SHARED ? arenas->shared
                     : kind == DC_MEMORY_HOST   ? ctx->host
                                                : NULL;
  if (arena == NULL) {
    return dc__fail(DC_E_INVALID, "%s: kind = %" PRId32 ", must be DC_MEMORY_DEVICE (1), _SHARED (2) or _HOST (3)", fn,
                    kind);
  }
  DC__TRY(dc__check_range(fn, "bytes", bytes, 0, (int64_t)(SIZE_MAX / 4)));
  void *data;
  DC__TRY(dc__arena_alloc(arena, NULL, (size_t)bytes, &data));
  DC__TRY(dc__buffer_create(arena, data, (size_t)bytes, buffer));
  dc__stream_zero(dc__stream_or_internal(ctx->device, NULL), data, (size_t)bytes);
  dc__device_sync_internal(ctx->device, NULL);
  return DC_OK;
}

dc_status dc_context_alloc(dc_context *context, int64_t bytes, int32_t kind, dc_buffer **buffer) {
  DC__WITHOUT_TRAPS;
  if (buffer == NULL) {
    return dc__fail(DC_E_INVALID, "%s: buffer is NULL", __func__);
  }
  *buffer = NULL;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, context_alloc(context, __func__, bytes, kind, buffer));
}
