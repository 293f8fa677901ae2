/* Chapters 10 and 11: the step, statistics, dry runs, traces. */
#include "api/api_internal.h"

/* ---- the step ---- */

static dc_status start_forward(dc_context *ctx, const char *fn) {
  if (ctx->in_forward) {
    return dc__fail(DC_E_STATE, "%s: a forward has begun already; call dc_end_forward first", fn);
  }
  ctx->in_forward = true;
  return DC_OK;
}

dc_status dc_start_forward(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, start_forward(context, __func__));
}

static dc_status end_forward(dc_context *ctx, const char *fn) {
  if (!ctx->in_forward) {
    return dc__fail(DC_E_STATE, "%s: no forward has begun; call dc_start_forward first", fn);
  }
  ctx->in_forward = false;
  DC__MAP_EACH (&ctx->params, i) {
    const dc__param *param = ctx->params.values[i];
    if (param->users > 0 && !param->persistent) {
      dc__logf(ctx, DC_LOG_WARNING,
               "dc_end_forward: parameter %" PRId64 " is still gathered: released by %" PRId64 " of %" PRId64 " user%s",
               param->id, param->released, param->users, DC__PLURAL_S(param->users));
    }
  }
  return DC_OK;
}

dc_status dc_end_forward(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, end_forward(context, __func__));
}

static dc_status start_backward(dc_context *ctx, const char *fn, int32_t update) {
  DC__TRY(dc__check_flag(fn, "update", update));
  if (ctx->boundary) {
    DC__MAP_EACH (&ctx->params, i) {
      dc__param *param = ctx->params.values[i];
      param->has_grad = param->keeps_grad;
      param->keeps_grad = false;
    }
    ctx->boundary = false;
    dc__grad_finite_reset(ctx);
  }
  ctx->update = update == 1;
  return DC_OK;
}

dc_status dc_start_backward(dc_context *context, int32_t update) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, start_backward(context, __func__, update));
}

static dc_status grads_finite(dc_context *ctx, const char *fn, int32_t *finite, int64_t *id) {
  if (finite == NULL) {
    return dc__fail(DC_E_INVALID, "%s: finite is NULL", fn);
  }
  return dc__grad_finite_query(ctx, fn, finite, id);
}

dc_status dc_context_grads_finite(dc_context *context, int32_t *finite, int64_t *id) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, grads_finite(context, __func__, finite, id));
}

static dc_status enable_profiling(dc_context *ctx, const char *fn, int32_t enable) {
  DC__TRY(dc__check_flag(fn, "enable", enable));
  ctx->profiling = enable == 1;
  return DC_OK;
}

dc_status dc_enable_profiling(dc_context *context, int32_t enable) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, enable_profiling(context, __func__, enable));
}

int32_t dc_is_profiling(const dc_context *context) {
  if (!dc__handle_is(context, DC__HANDLE_CONTEXT) || dc__owner_is_forked(&context->device->owner)) {
    return 0;
  }
  pthread_mutex_t *mutex = (pthread_mutex_t *)(uintptr_t)&context->mutex; /* locking does not change visible state */
  pthread_mutex_lock(mutex);
  int32_t profiling = context->profiling ? 1 : 0;
  pthread_mutex_unlock(mutex);
  return profiling;
}

/* ---- reports ---- */

void dc_memory_stats_init(dc_memory_stats *stats, size_t struct_size) {
  dc__init_sized(stats, struct_size, sizeof *stats);
}

void dc_op_info_init(dc_op_info *info, size_t struct_size) {
  dc__init_sized(info, struct_size, sizeof *info);
}

static dc_status step_get_stats(dc_context *ctx, const char *fn, dc_memory_stats *stats) {
  dc_memory_stats s;
  dc__stats(ctx, &s);
  return dc__write_sized(fn, "stats", stats, &s, sizeof s, DC__MEMORY_STATS_SIZE_0_1);
}

dc_status dc_context_get_memory_stats(dc_context *context, dc_memory_stats *stats) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, step_get_stats(context, __func__, stats));
}

static dc_status reset_stats(dc_context *ctx) {
  dc__stats_reset(ctx);
  return DC_OK;
}

dc_status dc_context_reset_stats(dc_context *context) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, reset_stats(context));
}

static dc_status dry_run(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                         dc_op_info *info) {
  dc_op_info i = {.struct_size = sizeof i};
  if (info == NULL) {
    return dc__fail(DC_E_INVALID, "%s: info is NULL", fn);
  }
  DC__TRY(dc__dry_run(ctx, fn, op, graph_id, id, dtype, &i));
  return dc__write_sized(fn, "info", info, &i, sizeof i, DC__OP_INFO_SIZE_0_1);
}

dc_status dc_context_dry_run(dc_context *context, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                             dc_op_info *info) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dry_run(context, __func__, op, graph_id, id, dtype, info));
}

dc_status dc_context_trace_start(dc_context *context, int64_t capacity) {
  DC__WITHOUT_TRAPS;
  if (capacity < 0 || capacity > 16777216) {
    return dc__fail(DC_E_INVALID, "%s: capacity = %" PRId64 ", must be 0 to 16777216", __func__, capacity);
  }
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, dc__trace_start(context, capacity));
}

static dc_status trace_read(dc_context *ctx, dc_trace_event *events, size_t event_size, int64_t cap, int64_t *count) {
  *count = dc__trace_read(ctx, (char *)events, event_size, cap);
  return DC_OK;
}

dc_status dc_context_trace_read(dc_context *context, dc_trace_event *events, size_t event_size, int64_t cap,
                                int64_t *count) {
  DC__WITHOUT_TRAPS;
  if (cap < 0) {
    return dc__fail(DC_E_INVALID, "%s: cap = %" PRId64 ", must be >= 0", __func__, cap);
  }
  if (event_size < DC__TRACE_EVENT_SIZE_0_1) {
    return dc__fail(DC_E_INVALID, "%s: event_size = %zu, must be at least %d, sizeof(dc_trace_event)", __func__,
                    event_size, (int)DC__TRACE_EVENT_SIZE_0_1);
  }
  if (count == NULL || (cap > 0 && events == NULL)) {
    return dc__fail(DC_E_INVALID, "%s: %s is NULL", __func__, count == NULL ? "count" : "events");
  }
  DC__TRY(dc__context_enter(context, __func__));
  return dc__context_leave(context, trace_read(context, events, event_size, cap, count));
}

static dc_status check_folder(const char *fn, const dc_context *context, const char *folder) {
  DC__TRY(dc__handle_check(fn, "context", context, DC__HANDLE_CONTEXT));
  DC__TRY(dc__owner_check(fn, "context", &context->device->owner));
  if (folder != NULL && folder[0] == '\0') {
    return dc__fail(DC_E_INVALID, "%s: folder is empty, must be a path", fn);
  }
  return DC_OK;
}

dc_status dc_context_trace_dump(dc_context *context, const char *folder) {
  DC__WITHOUT_TRAPS;
  DC__TRY(check_folder(__func__, context, folder));
  if (folder == NULL) {
    return dc__fail(DC_E_INVALID, "%s: folder is NULL, must be a path", __func__);
  }
  return dc__trace_dump(context, __func__, folder); /* without the context's mutex: a blocked call holds it */
}

dc_status dc_context_trace_dump_on_error(dc_context *context, const char *folder) {
  DC__WITHOUT_TRAPS;
  DC__TRY(check_folder(__func__, context, folder));
  return dc__trace_dump_on_error(context, folder);
}
