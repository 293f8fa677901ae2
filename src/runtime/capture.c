/* A step that is captured into a CUDA graph. The host's part of a call is done once, when it is captured; the device's
 * part each time the graph is launched. So a graph must hold all that a step needs, and launch after launch write to
 * nothing that has become somebody else's:
 *
 *   order   all work is put on the caller's stream, one behind the other. Nothing waits, and no event is recorded:
 *           memory that is given back is used again at once
 *   memory  what a step takes comes from arenas that serve captures alone
 *   state   nothing comes in from before the capture and nothing goes out of it: it begins and ends between steps, and
 *           in it a parameter is gathered again after its last release, also if it is persistent
 *
 * Ranks on NCCL meet when they capture, and their graphs must be launched alike. What ranks that read each other's
 * memory in place do with each other is done by their hosts each time, so that cannot be captured. */
#include "runtime/runtime.h"

/* What is under way, as DC_E_STATE; `what` the caller does. */
static dc_status between_steps(const dc_context *ctx, const char *fn, const char *what) {
  for (int64_t i = 0; i < ctx->params.count; i++) {
    const dc__param *param = ctx->params.values[i];
    bool gathered = dc__param_in_use(param);
    for (int32_t k = 0; k < DC__COPIES; k++) {
      gathered = gathered || (param->copies[k].buffer != NULL && (ctx->capturing || !param->persistent));
    }
    if (gathered || param->pending > 0 || param->local_sum != NULL) {
      return dc__fail(
          DC_E_STATE, "%s: a capture into a CUDA graph %s, but parameter %" PRId64 " %s", fn, what, param->id,
          gathered ? "is still gathered: release it before" : "has a gradient pending: end the backward before");
    }
  }
  return DC_OK;
}

/* All that one step leaves for the next one, but for what callers gave and hold. */
static void free_step_state(dc_context *ctx) {
  dc__reduce_drop(ctx);
  dc__buckets_free(ctx);
  for (int64_t i = 0; i < ctx->params.count; i++) {
    dc__gather_free(ctx, ctx->params.values[i]);
    dc__free_device_shard(ctx, ctx->params.values[i]);
  }
  for (int64_t i = 0; i < ctx->graphs.count; i++) {
    dc__offloaded_drop_device(ctx, ctx->graphs.values[i]);
  }
}

static void capture_swap_arenas(dc_context *ctx) {
  const dc__arenas own = ctx->arenas;
  ctx->arenas = ctx->saved_arenas;
  ctx->saved_arenas = own;
}

static dc_status capture_begin(dc_context *ctx, const char *fn) {
  if (!ctx->gather_comm->single_rank && !ctx->gather_comm->stream_ordered) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "%s: the stream is captured into a CUDA graph, but the context has ranks that meet (%s, %" PRId32
                    " of them): only a context of one rank, or of ranks on NCCL, can be captured",
                    fn, ctx->gather_comm->ops->name, ctx->world);
  }
  DC__TRY(between_steps(ctx, fn, "begins"));
  DC__TRY(dc__context_synchronize(ctx));
  if (ctx->saved_arenas.gathered == NULL) {
    DC__TRY(dc__arenas_create(ctx, &ctx->saved_arenas));
  }
  ctx->capturing = true; /* first: what is dropped must not wait for the stream */
  free_step_state(ctx);
  capture_swap_arenas(ctx);
  dc__grad_finite_reset(ctx); /* as each launch does */
  return DC_OK;
}

static dc_status capture_end(dc_context *ctx, const char *fn) {
  dc_status status = between_steps(ctx, fn, "has ended");
  free_step_state(ctx);
  capture_swap_arenas(ctx);
  ctx->capturing = false;
  return status;
}

dc_status dc__capture_update(dc_context *ctx, const char *fn) {
  bool capturing = dc__stream_captures(ctx->lanes[DC__LANE_CALLER]);
  if (capturing == ctx->capturing) {
    return DC_OK;
  }
  return capturing ? capture_begin(ctx, fn) : capture_end(ctx, fn);
}
