/* A step that is captured into a CUDA graph. The host's part of a call is done once, when it is captured; the device's
 * part is done each time the graph is launched. So a graph must hold all that a step needs, and no launch may write to
 * memory that has another owner by then:
 *
 *   order   all work is queued on the caller's stream, in order. Nothing waits, and no event is recorded: freed memory
 *           is used again at once
 *   memory  a step's memory comes from arenas that serve captures alone
 *   state   no state enters or leaves the capture: it begins and ends between steps. Inside it even a persistent
 *           parameter loses its copy at the last release, and is gathered again
 *
 * Ranks on NCCL exchange signatures at capture, and must launch their graphs in the same order. Ranks that read each
 * other's memory in place synchronise their hosts in each collective, so their steps cannot be captured. */
#include "runtime/runtime.h"

/* DC_E_STATE if a step is in progress. `what`, for the text, says whether the capture begins or has ended. */
static dc_status between_steps(const dc_context *ctx, const char *fn, const char *what) {
  DC__MAP_EACH (&ctx->params, i) {
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

/* Frees all that one step leaves for the next, except memory that callers own or hold. */
static void free_step_state(dc_context *ctx) {
  dc__reduce_drop(ctx);
  dc__buckets_free(ctx);
  DC__MAP_EACH (&ctx->params, i) {
    dc__gather_free(ctx, ctx->params.values[i]);
    dc__free_device_shard(ctx, ctx->params.values[i]);
  }
  DC__MAP_EACH (&ctx->graphs, i) {
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
  ctx->capturing = true; /* set first, so that freeing the step's state does not wait for the stream */
  free_step_state(ctx);
  capture_swap_arenas(ctx);
  dc__grad_finite_reset(ctx); /* captured too, so each launch resets the findings */
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
