/* The all-gather: from shards to copies of whole parameters. */
#include <string.h>

#include "kernels/kernels.h"
#include "runtime/replicas.h"

dc_status dc__gather_dtype(const char *fn, const dc__param *param, int32_t *dtype) {
  if (*dtype == DC_DTYPE_NONE) {
    *dtype = param->dtype;
  }
  if (!dc__dtype_is_castable(*dtype)) {
    return dc__fail(DC_E_DTYPE,
                    "%s: dtype = %" PRId32 " (%s) for parameter %" PRId64
                    "; gathers take float32, float64, "
                    "float16, bfloat16, int8, int32 and int64",
                    fn, *dtype, dc_dtype_name(*dtype), param->id);
  }
  return DC_OK;
}

/* Provides memory and an event for a copy in a type. *made: the copy is new, to be freed if no gather starts. */
static dc_status open_copy(dc_context *ctx, const char *fn, dc_stream *stream, dc__param *param, int32_t dtype,
                           dc__gathered_copy **copy, bool *made) {
  *copy = dc__gather_copy(param, dtype);
  *made = *copy == NULL;
  if (!*made) {
    return DC_OK; /* a stale one is overwritten */
  }
  for (int32_t i = 0; i < DC__COPIES && *copy == NULL; i++) {
    *copy = param->copies[i].buffer == NULL ? &param->copies[i] : NULL;
  }
  if (*copy == NULL) {
    return dc__fail(DC_E_STATE, "%s: parameter %" PRId64 " is gathered in %d types already; release one", fn, param->id,
                    (int)DC__COPIES);
  }
  DC__TRY(dc__ensure_event(ctx, &(*copy)->ready));
  size_t bytes = (size_t)param->numel * dc_dtype_size(dtype);
  void *data;
  DC__TRY(dc__arena_alloc(ctx->arenas.gathered, stream, bytes, &data));
  DC__TRY(dc__buffer_create(ctx->arenas.gathered, data, bytes, &(*copy)->buffer));
  (*copy)->dtype = dtype;
  (*copy)->version = -1; /* holds nothing yet */
  return DC_OK;
}

/* ---- the gather ---- */

static const void *device_shard(const dc__param *param) {
  return dc__shard_is_reloaded(param) ? param->device_shard : NULL;
}

/* Whether this rank's shard must be staged before the gather: cast, or copied to memory that peers can read. */
static bool needs_staging(const dc_context *ctx, const dc__param *param, int32_t dtype) {
  if (dtype != param->dtype) {
    return true;
  }
  return ctx->world > 1 && ctx->config.symmetric_memory != 1 && device_shard(param) == NULL &&
         ctx->gather_comm->ops->heap_alloc != NULL;
}

/* One parameter of a gather that is about to start. */
typedef struct gather_plan {
  dc__param *param;
  dc__gathered_copy *copy;
  dc__gathered_copy *from; /* an exact copy in another type: cast from it, without communication */
  void *staged;            /* NULL: the shard itself is sent */
  bool made;
} gather_plan;

static dc_status plan_gather(dc_context *ctx, const char *fn, dc_stream *stream, dc__param *param, int32_t dtype,
                             gather_plan *p) {
  *p = (gather_plan){.param = param, .from = dc__gather_source(param)};
  DC__TRY(open_copy(ctx, fn, stream, param, dtype, &p->copy, &p->made));
  int64_t count = ctx->stream_ordered ? param->chunk : param->chunks[ctx->rank].count; /* the same on all ranks */
  if (p->from == NULL && count > 0 && needs_staging(ctx, param, dtype)) {
    return dc__arena_alloc(ctx->arenas.staged, stream, (size_t)count * dc_dtype_size(dtype), &p->staged);
  }
  return DC_OK;
}

static void cancel_plan(dc_context *ctx, gather_plan *p) {
  if (p->staged != NULL) {
    dc__arena_free(ctx->arenas.staged, p->staged, NULL, NULL);
  }
  if (p->made && p->copy != NULL && p->copy->buffer != NULL) {
    dc__gathered_copy_free(ctx, p->param, p->copy);
  }
}

/* Queues the work before the collective and fills in its item. Returns false if a cast replaces the collective. */
static bool gather_start_one(dc_context *ctx, dc_stream *stream, dc__op_timing *span, gather_plan *p,
                             dc__coll_item *item) {
  dc__param *param = p->param;
  int32_t dtype = p->copy->dtype;
  void *full = dc_buffer_data(p->copy->buffer);
  p->copy->version = param->version;
  p->copy->awaited = false;
  if (p->from != NULL) {
    dc__op_timing_begin_on(span, stream);
    dc__stream_cast(stream, full, dtype, dc_buffer_data(p->from->buffer), p->from->dtype, param->numel);
    dc__op_timing_end_on(span, stream);
    return false;
  }
  const void *shard = param->shard;
  if (device_shard(param) != NULL) {
    dc__event_wait(param->reloaded, stream);
    shard = device_shard(param);
  }
  if (p->staged != NULL) {
    dc__stream_cast(stream, p->staged, dtype, shard, param->dtype, param->chunks[ctx->rank].count);
    shard = p->staged;
  }
  *item = (dc__coll_item){.send = shard,
                          .recv = full,
                          .ranges = param->chunks,
                          .total = param->numel,
                          .id = param->id,
                          .dtype = dtype,
                          .recv_dtype = dtype};
  return true;
}

/* Counts the bytes on the wire and records the operation. */
static dc__op_timing *record_gather(dc_context *ctx, const dc__tag *tag, const gather_plan *plans, int64_t count) {
  dc__recorded_op note = {.tag = tag, .lane = DC__LANE_GATHER, .dtype = plans[0].copy->dtype};
  for (int64_t i = 0; i < count; i++) {
    if (plans[i].from == NULL) {
      const dc__param *param = plans[i].param;
      int64_t size = (int64_t)dc_dtype_size(plans[i].copy->dtype);
      note.bytes += param->numel * size;
      note.moved += dc__wire_elements(ctx, param->chunks, param->numel, false) * size;
      note.count++;
    }
  }
  ctx->counters.gathers += note.count;
  ctx->counters.gather_wire_bytes += note.moved;
  note.group = note.count > 0 ? DC__GROUP_GATHER : DC__GROUP_NONE;
  return dc__recorder_begin(ctx, &note);
}

static void gather_start(dc_context *ctx, dc_stream *stream, const dc__tag *named, gather_plan *plans, int64_t count) {
  int64_t items = 0;
  dc__wait_for_caller(ctx, stream);
  dc__tag tag = *named;
  tag.span = record_gather(ctx, named, plans, count);
  for (int64_t i = 0; i < count; i++) {
    items += gather_start_one(ctx, stream, tag.span, &plans[i], &ctx->items[items]);
  }
  dc__replicas_share_checksums(ctx);
  dc__comm_all_gather(ctx->gather_comm, stream, &tag, ctx->items, items);
  dc__recorder_submitted(tag.span);
  for (int64_t i = 0; i < count; i++) {
    dc__context_record_event(ctx, plans[i].copy->ready, stream);
    if (plans[i].from != NULL) {
      dc__context_record_event(ctx, plans[i].from->ready, stream); /* its memory must stay until it is cast */
    }
    if (plans[i].staged != NULL) {
      dc__arena_free(ctx->arenas.staged, plans[i].staged, dc__event_unless_in_order(ctx, plans[i].copy->ready), NULL);
    }
  }
}

/* Plans all gathers before any starts, so that a failure leaves nothing half done. */
static dc_status plan_all(dc_context *ctx, const char *fn, dc_stream *stream, gather_plan *plans,
                          dc__param *const *params, const int32_t *dtypes, int64_t count) {
  dc_status status = DC_OK;
  int64_t planned = 0;
  for (; planned < count && status == DC_OK; planned++) {
    status = plan_gather(ctx, fn, stream, params[planned], dtypes[planned], &plans[planned]);
  }
  if (status != DC_OK) {
    (void)dc__stream_sync(stream, 0); /* the stream may still wait for earlier users of the memory */
    for (int64_t i = 0; i < planned; i++) {
      cancel_plan(ctx, &plans[i]);
    }
  }
  return status;
}

static dc_status gather_missing(dc_context *ctx, const char *fn, const dc__tag *tag, gather_plan *plans,
                                dc__param *const *params, const int32_t *dtypes, int64_t count) {
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_GATHER, &stream));
  if (ctx->config.sync_before_allgather == 1) {
    DC__TRY(dc__context_synchronize(ctx));
  }
  dc_status status = plan_all(ctx, fn, stream, plans, params, dtypes, count);
  if (status == DC_E_NO_MEMORY && ctx->stream_ordered && !ctx->capturing) { /* idle chunks may have the memory */
    dc__arena_trim(ctx->arenas.gathered);
    status = plan_all(ctx, fn, stream, plans, params, dtypes, count);
  }
  DC__TRY(status);
  gather_start(ctx, stream, tag, plans, count);
  return ctx->config.sync_after_allgather == 1 ? dc__context_synchronize(ctx) : DC_OK;
}

/* Returns whether this call has already planned the parameter in the type, and marks it as planned. */
static bool note_planned(const dc_context *ctx, dc__param *param, int32_t dtype) {
  const uint32_t bit = UINT32_C(1) << dtype;
  if (param->planned_in != ctx->gather_calls) {
    param->planned_in = ctx->gather_calls;
    param->planned_dtypes = 0;
  }
  bool before = (param->planned_dtypes & bit) != 0;
  param->planned_dtypes |= bit;
  return before;
}

enum { ON_STACK = 16 }; /* plans on the stack: single gathers and most fused ones allocate nothing */

dc_status dc__gather(dc_context *ctx, const char *fn, int32_t op, dc__graph *graph, dc__param *const *params,
                     const int32_t *dtypes, int64_t count) {
  gather_plan small[ON_STACK] = {{0}};
  dc__param *small_params[ON_STACK];
  int32_t small_dtypes[ON_STACK];
  if (!dc__array_reserve((void **)&ctx->items, &ctx->item_capacity, count, sizeof *ctx->items)) {
    return DC_E_NO_MEMORY;
  }
  char *block =
      count <= ON_STACK ? NULL : dc__calloc((size_t)count, sizeof(gather_plan) + sizeof(void *) + sizeof(int32_t));
  if (count > ON_STACK && block == NULL) {
    return DC_E_NO_MEMORY;
  }
  gather_plan *plans = block == NULL ? small : (gather_plan *)(void *)block;
  dc__param **missing = block == NULL ? small_params : (dc__param **)(void *)(plans + count);
  int32_t *types = block == NULL ? small_dtypes : (int32_t *)(void *)(missing + count);
  int64_t misses = 0;
  dc_status status = DC_OK;
  ctx->gather_calls++;
  for (int64_t i = 0; i < count && status == DC_OK; i++) {
    int32_t dtype = dtypes == NULL ? DC_DTYPE_NONE : dtypes[i];
    status = dc__gather_dtype(fn, params[i], &dtype);
    dc__gathered_copy *copy = dc__gather_copy(params[i], dtype);
    if (copy != NULL && dc__copy_is_current(params[i], copy)) {
      ctx->counters.gather_hits++;
    } else if (status == DC_OK && !note_planned(ctx, params[i], dtype)) {
      missing[misses] = params[i];
      types[misses++] = dtype;
    }
  }
  if (status == DC_OK && misses > 0) {
    dc__tag tag = {.graph_id = graph->ordinal, .id = missing[0]->id, .op = op};
    status = gather_missing(ctx, fn, &tag, plans, missing, types, misses);
  }
  dc__free(block);
  return status;
}
