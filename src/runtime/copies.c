/* Gathered copies: find, wait, release, take, drop. A parameter's full weights exist as copies, one for each data type.
 * A copy has a completion event and the version of its weights, so all graphs wait for the same event and none uses
 * stale weights.
 *
 *   no copy → dc__gather → copy coming → event passed → copy ready → last release → no copy
 *
 * A parameter is in use from the first wait to the last release. A persistent parameter keeps its copy; when the
 * weights changed, the next gather overwrites it in place. */
#include "runtime/runtime.h"

bool dc__copy_is_current(const dc__param *param, const dc__gathered_copy *copy) {
  return copy->buffer != NULL && copy->version == param->version;
}

dc__gathered_copy *dc__gather_copy(dc__param *param, int32_t dtype) {
  dtype = dtype == DC_DTYPE_NONE ? param->dtype : dtype;
  for (int32_t i = 0; i < DC__COPIES; i++) {
    if (param->copies[i].buffer != NULL && param->copies[i].dtype == dtype) {
      return &param->copies[i];
    }
  }
  return NULL;
}

dc__gathered_copy *dc__gather_source(dc__param *param) {
  for (int32_t i = 0; i < DC__COPIES; i++) {
    if (dc__copy_is_current(param, &param->copies[i]) &&
        dc__dtype_can_represent(param->copies[i].dtype, param->dtype)) {
      return &param->copies[i];
    }
  }
  return NULL;
}

static bool has_copy(const dc__param *param) {
  for (int32_t i = 0; i < DC__COPIES; i++) {
    if (param->copies[i].buffer != NULL) {
      return true;
    }
  }
  return false;
}

dc_event *dc__event_unless_in_order(const dc_context *ctx, dc_event *event) {
  return ctx->stream_ordered ? NULL : event;
}

void dc__gathered_copy_free(const dc_context *ctx, const dc__param *param, dc__gathered_copy *copy) {
  dc_event *last_read = dc__event_unless_in_order(ctx, param->last_read);
  if (copy->retained) {
    dc__buffer_release_after(copy->buffer, last_read); /* other holders may read on */
  } else {
    dc__buffer_revoke(copy->buffer, last_read, dc__event_unless_in_order(ctx, copy->ready)); /* asked in this order */
    dc_buffer_release(copy->buffer);
  }
  copy->buffer = NULL;
  copy->retained = false;
}

/* A copy that a caller retains is freed when the caller releases it, which no event delays. So gathers into it and
 * casts from it must end first. */
static void wait_retained_copies(const dc__param *param) {
  for (int32_t i = 0; i < DC__COPIES; i++) {
    const dc__gathered_copy *copy = &param->copies[i];
    if (copy->buffer != NULL && copy->retained) {
      dc__event_wait(copy->ready, NULL);
    }
  }
}

void dc__gather_free(dc_context *ctx, dc__param *param) {
  dc_stream *caller = ctx->lanes[DC__LANE_CALLER];
  wait_retained_copies(param);
  if (caller != NULL && has_copy(param)) { /* the caller's stream may still read it */
    if (dc__ensure_event(ctx, &param->last_read) == DC_OK) {
      dc__context_record_event(ctx, param->last_read, caller);
    } else {
      (void)dc__stream_sync(caller, 0);
    }
    if (ctx->stream_ordered && param->last_read != NULL) { /* as the next gather would anyway */
      dc__event_wait(param->last_read, ctx->capturing ? caller : ctx->lanes[DC__LANE_GATHER]);
    }
  }
  for (int32_t i = 0; i < DC__COPIES; i++) {
    if (param->copies[i].buffer != NULL) {
      dc__gathered_copy_free(ctx, param, &param->copies[i]);
    }
  }
  dc__param_end_use(param);
}

/* ---- wait, release, take ---- */

static dc_status check_gathered(const char *fn, const dc__param *param) {
  return has_copy(param)
             ? DC_OK
             : dc__fail(DC_E_STATE, "%s: parameter %" PRId64 " is not gathered; call dc_allgather_param first", fn,
                        param->id);
}

/* With profiling, operators are timed one by one, and a gather's copy may be gone before its wait. */
static bool is_forgotten(const dc_context *ctx, const dc__param *param) {
  return ctx->profiling && !has_copy(param);
}

dc_status dc__gather_wait(dc_context *ctx, const char *fn, dc__param *param) {
  if (is_forgotten(ctx, param)) {
    return dc__context_check(ctx);
  }
  DC__TRY(check_gathered(fn, param));
  for (int32_t i = 0; i < DC__COPIES; i++) {
    dc__gathered_copy *copy = &param->copies[i];
    if (copy->buffer != NULL && !copy->awaited) {
      dc__event_wait(copy->ready, ctx->lanes[DC__LANE_CALLER]);
      copy->awaited = true;
    }
  }
  param->in_use = true;
  return dc__context_check(ctx); /* a collective that failed has passed its event as well */
}

dc_status dc__gather_release(dc_context *ctx, const char *fn, dc__param *param, int64_t n_users) {
  if (n_users < 1) {
    return dc__fail(DC_E_INVALID, "%s: n_users = %" PRId64 " for parameter %" PRId64 ", must be >= 1", fn, n_users,
                    param->id);
  }
  if (is_forgotten(ctx, param)) {
    return DC_OK;
  }
  if (!has_copy(param)) {
    return dc__fail(DC_E_STATE,
                    "%s: parameter %" PRId64 " is not gathered: it was released by its last user, or never gathered",
                    fn, param->id);
  }
  if (param->users != 0 && param->users != n_users) {
    return dc__fail(DC_E_INVALID,
                    "%s: n_users = %" PRId64 " for parameter %" PRId64
                    ", but the first of its users said "
                    "%" PRId64,
                    fn, n_users, param->id, param->users);
  }
  param->users = n_users;
  if (++param->released < n_users) {
    return DC_OK;
  }
  dc__param_end_use(param);
  if (!param->persistent || ctx->capturing) {
    dc__gather_free(ctx, param);
  }
  return DC_OK;
}

dc_status dc__gather_retain(dc_context *ctx, const char *fn, dc__param *param, int32_t dtype, dc_buffer **buffer) {
  DC__TRY(dc__gather_dtype(fn, param, &dtype));
  dc__gathered_copy *copy = dc__gather_copy(param, dtype);
  if (copy == NULL) {
    return dc__fail(DC_E_STATE, "%s: parameter %" PRId64 " is not gathered as %s; call dc_allgather_param first", fn,
                    param->id, dc_dtype_name(dtype));
  }
  if (param->users != 0) {
    return dc__fail(DC_E_STATE,
                    "%s: parameter %" PRId64 " was released by %" PRId64 " of %" PRId64
                    " user%s; it can't be taken from the others",
                    fn, param->id, param->released, param->users, DC__PLURAL_S(param->users));
  }
  DC__TRY(dc__gather_wait(ctx, fn, param));
  if (param->reloaded != NULL && !ctx->capturing) { /* a hit has not waited for that */
    dc__event_wait(param->reloaded, ctx->lanes[DC__LANE_CALLER]);
  }
  dc__param_end_use(param);
  *buffer = copy->buffer;
  if (param->persistent && !ctx->capturing) {
    dc_buffer_retain(copy->buffer);
    copy->retained = true;
  } else {
    copy->buffer = NULL; /* the context's reference is the caller's now */
  }
  return DC_OK;
}
