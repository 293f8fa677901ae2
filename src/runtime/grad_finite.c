/* Whether the gradients of a step are finite. The copies into buckets (reduce.c) scan them and write findings to device
 * memory, in the order of the caller's stream. The host reads them only on request. The context keeps the memory for
 * its whole life, so that a captured graph may write to it at each launch. */
#include "kernels/kernels.h"
#include "runtime/runtime.h"

/* Keys have the reverse order of ids: the largest key is that of the lowest id. */
static uint64_t key_of(int64_t id) {
  return ~((uint64_t)id ^ (uint64_t)INT64_MIN);
}

static int64_t id_of(uint64_t key) {
  return (int64_t)(~key ^ (uint64_t)INT64_MIN);
}

dc_status dc__grad_finite_init(dc_context *ctx) {
  void *note;
  if (ctx->config.check_finite == 0) {
    return DC_OK;
  }
  DC__TRY(dc__arena_alloc(ctx->arenas.working, NULL, sizeof(dc__nonfinite), &note));
  DC__TRY(dc__buffer_create(ctx->arenas.working, note, sizeof(dc__nonfinite), &ctx->not_finite));
  dc__grad_finite_reset(ctx);
  return DC_OK;
}

void dc__grad_finite_destroy(dc_context *ctx) {
  dc_buffer_release(ctx->not_finite);
  ctx->not_finite = NULL;
}

void dc__grad_finite_reset(dc_context *ctx) {
  ctx->finite_known = false;
  if (ctx->not_finite != NULL) {
    dc_stream *caller = ctx->lanes[DC__LANE_CALLER];
    dc__stream_zero(dc__stream_or_internal(ctx->device, caller), dc_buffer_data(ctx->not_finite),
                    sizeof(dc__nonfinite));
    dc__device_sync_internal(ctx->device, caller);
    dc__record_caller_event(ctx);
  }
}

void dc__grad_combine(dc_context *ctx, int64_t id, const dc__combination *c) {
  dc_stream *caller = ctx->lanes[DC__LANE_CALLER];
  dc__stream_combine(dc__stream_or_internal(ctx->device, caller), c,
                     ctx->not_finite == NULL ? NULL : dc_buffer_data(ctx->not_finite), key_of(id));
  dc__device_sync_internal(ctx->device, caller);
  dc__record_caller_event(ctx);
}

/* Reads this rank's findings, once the caller's stream has reached them. */
static dc_status read_flag(dc_context *ctx, dc__nonfinite *note) {
  dc_stream *on = dc__stream_or_internal(ctx->device, ctx->lanes[DC__LANE_CALLER]);
  dc__stream_copy(on, note, dc_buffer_data(ctx->not_finite), sizeof *note);
  DC__TRY(dc__stream_sync(on, 0));
  return dc__context_check(ctx);
}

dc_status dc__grad_finite_query(dc_context *ctx, const char *fn, int32_t *finite, int64_t *id) {
  if (ctx->not_finite == NULL) {
    return dc__fail(DC_E_STATE, "%s: config.check_finite was 0 in dc_init, so gradients were not checked", fn);
  }
  if (ctx->capturing) {
    return dc__fail(DC_E_STATE, "%s: the stream is captured into a CUDA graph; ask after a launch of it", fn);
  }
  if (!ctx->finite_known) {
    return dc__fail(DC_E_STATE, "%s: no backward with update = 1 has ended since gradients were last dropped or begun",
                    fn);
  }
  dc_stream *stream;
  dc__nonfinite note;
  DC__TRY(read_flag(ctx, &note));
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  DC__TRY(dc__stream_sync(stream, 0)); /* gathers may be in progress if one communicator serves both */
  const int64_t own[2] = {note.found != 0, id_of(note.key)};
  int64_t table[2 * DC__COMM_MAX_WORLD];
  dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_GRADS_FINITE};
  DC__TRY(dc__context_exchange(ctx, DC__GROUP_REDUCE, &tag, own, 2, table));
  bool found = false;
  int64_t lowest = INT64_MAX;
  for (int32_t rank = 0; rank < ctx->reduce_comm->world; rank++) {
    const int64_t *peer = table + 2 * rank;
    found = found || peer[0] != 0;
    lowest = peer[0] != 0 && peer[1] < lowest ? peer[1] : lowest;
  }
  *finite = !found;
  if (id != NULL && found) {
    *id = lowest;
  }
  return DC_OK;
}
