/* Gradients: copied into a bucket's slot on the caller's stream, so that the caller's tensor is free at once, and
 * reduced bucket by bucket on the reduce stream, straight into the registered gradient buffers.
 *
 * A slot is one whole gradient. Each rank pulls its own part of it from all ranks' slots, in an order of additions
 * that is fixed; where slots lie, how large buckets are and when they are flushed changes no bit. Flushes depend on
 * sizes and the order of calls alone, so they are the same on every rank. */
#include <string.h>

#include "runtime/runtime.h"

/* ---- buckets ---- */

static dc__buckets *find_buckets(dc_context *ctx, int32_t dtype) {
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    if (ctx->buckets[i].dtype == dtype || ctx->buckets[i].dtype == DC_DTYPE_NONE) {
      ctx->buckets[i].dtype = dtype;
      return &ctx->buckets[i];
    }
  }
  return NULL; /* four floating-point types have four places */
}

static void free_data(dc_context *ctx, dc__bucket *bucket) {
  if (bucket->data != NULL) {
    dc__arena_free(ctx->arenas.shared, bucket->data, bucket->done, NULL);
    bucket->data = NULL;
    bucket->capacity = 0;
  }
}

/* Room for `elements` in an empty bucket. */
static dc_status size_bucket(dc_context *ctx, dc__bucket *bucket, int32_t dtype, int64_t elements) {
  if (bucket->data != NULL && bucket->capacity >= elements) {
    return DC_OK;
  }
  DC__TRY(dc__need_event(ctx, &bucket->done));
  int64_t capacity = elements > ctx->bucket_elements ? elements : ctx->bucket_elements;
  void *data;
  free_data(ctx, bucket);
  DC__TRY(
      dc__arena_alloc(ctx->arenas.shared, ctx->lanes[DC__LANE_CALLER], (size_t)capacity * dc_dtype_size(dtype), &data));
  bucket->data = data;
  bucket->capacity = capacity;
  return DC_OK;
}

void dc__buckets_free(dc_context *ctx) {
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    dc__buckets *buckets = &ctx->buckets[i];
    for (int32_t h = 0; h < 2; h++) {
      if (buckets->half[h].done != NULL) {
        free_data(ctx, &buckets->half[h]);
        dc__drop_event(ctx, &buckets->half[h].done);
      }
    }
    dc__free(buckets->items);
    dc__free(buckets->params);
    memset(buckets, 0, sizeof *buckets);
  }
}

/* ---- flushing ---- */

/* Stage 0: every rank reduced its chunk of the gradient in place; now all get all chunks. */
static void gather_whole(dc_context *ctx, dc_stream *stream, const dc__tag *tag, dc__buckets *buckets) {
  int64_t count = 0;
  for (int64_t i = 0; i < buckets->item_count; i++) {
    dc__param *param = buckets->params[i];
    if (buckets->items[i].ranges != param->chunks || param->sharded) {
      continue;
    }
    size_t size = dc_dtype_size(param->grad_dtype);
    buckets->items[count++] =
        (dc__coll_item){.send = (char *)param->grad + (size_t)param->chunks[ctx->rank].begin * size,
                        .recv = param->grad,
                        .ranges = param->chunks,
                        .total = param->numel,
                        .id = param->id,
                        .dtype = param->grad_dtype,
                        .recv_dtype = param->grad_dtype};
    ctx->counters.reduce_wire_bytes +=
        dc__wire_elements(ctx, param->chunks, param->numel, false) * (int64_t)dc_dtype_size(param->grad_dtype);
  }
  dc__comm_all_gather(ctx->reduce_comm, stream, tag, buckets->items, count);
}

static dc_status flush(dc_context *ctx, dc__buckets *buckets) {
  if (buckets->item_count == 0) {
    return DC_OK;
  }
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  dc__bucket *bucket = &buckets->half[buckets->filling];
  dc__tag tag = {buckets->graph_ordinal, buckets->items[0].id, DC_OP_REDUCE_GRAD, NULL};
  dc__after_caller(ctx, stream);
  int64_t bytes = bucket->used * (int64_t)dc_dtype_size(buckets->dtype);
  tag.span = dc__record(ctx, &(dc__note){.tag = &tag,
                                         .lane = DC__LANE_REDUCE,
                                         .group = DC__GROUP_REDUCE,
                                         .dtype = buckets->dtype,
                                         .count = (int32_t)buckets->item_count,
                                         .bytes = bytes,
                                         .moved = bytes});
  dc__comm_reduce_scatter(ctx->reduce_comm, stream, &tag, buckets->items, buckets->item_count);
  gather_whole(ctx, stream, &tag, buckets);
  dc__record_queued(tag.span);
  dc__note_event(ctx, bucket->done, stream);
  ctx->counters.flushes++;
  bucket->used = 0;
  buckets->item_count = 0;
  if (ctx->config.double_buffer != -1) {
    buckets->filling = 1 - buckets->filling;
  }
  return DC_OK;
}

dc_status dc__reduce_flush(dc_context *ctx) {
  for (int32_t dtype = DC_FLOAT32; dtype <= DC_BFLOAT16; dtype++) { /* an order that does not depend on first use */
    for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
      if (ctx->buckets[i].dtype == dtype) {
        DC__TRY(flush(ctx, &ctx->buckets[i]));
      }
    }
  }
  return DC_OK;
}

dc_status dc__reduce_finish(dc_context *ctx) {
  DC__TRY(dc__reduce_flush(ctx));
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  if (!ctx->captures) {                  /* then the gradients are complete where the caller's stream is */
    DC__TRY(dc__stream_sync(stream, 0)); /* its collectives have deadlines */
  }
  for (int64_t i = 0; i < ctx->params.count; i++) {
    ((dc__param *)ctx->params.values[i])->pending = 0;
  }
  return dc__context_check(ctx);
}

bool dc__reduce_pending(const dc_context *ctx) {
  for (int64_t i = 0; i < ctx->params.count; i++) {
    const dc__param *param = ctx->params.values[i];
    if (param->pending > 0 || param->local_sum != NULL) {
      return true;
    }
  }
  return false;
}

void dc__reduce_drop(dc_context *ctx) {
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    dc__buckets *buckets = &ctx->buckets[i];
    buckets->half[buckets->filling].used = 0;
    buckets->item_count = 0;
  }
  for (int64_t i = 0; i < ctx->params.count; i++) {
    dc__param *param = ctx->params.values[i];
    param->pending = 0;
    param->has_grad = false;
    if (param->local_sum != NULL) {
      dc__arena_free(ctx->arenas.working, param->local_sum, NULL, NULL);
      param->local_sum = NULL;
    }
  }
}

/* ---- taking a gradient ---- */

/* Stage 1 between boundaries: the gradient joins the local sum. */
static dc_status add_locally(dc_context *ctx, dc__param *param, const dc_tensor *grad, int32_t dtype) {
  bool first = param->local_sum == NULL;
  if (first) {
    size_t bytes = (size_t)param->numel * dc_dtype_size(dtype);
    DC__TRY(dc__arena_alloc(ctx->arenas.working, ctx->lanes[DC__LANE_CALLER], bytes, &param->local_sum));
    param->local_sum_dtype = dtype;
  }
  dc__finite_combine(ctx, param->id, param->local_sum, dtype, grad->data, grad->dtype, param->numel, !first);
  return DC_OK;
}

/* A slot of `elements` in the filling bucket; flushes what is there when it does not fit. */
static dc_status open_slot(dc_context *ctx, dc__buckets *buckets, int64_t elements, void **slot) {
  if (!dc__grow((void **)&buckets->items, &buckets->item_capacity, buckets->item_count + 1, sizeof *buckets->items) ||
      !dc__grow((void **)&buckets->params, &buckets->param_capacity, buckets->item_count + 1,
                sizeof *buckets->params)) {
    return DC_E_NO_MEMORY;
  }
  dc__bucket *bucket = &buckets->half[buckets->filling];
  if (bucket->used > 0 && bucket->used + elements > bucket->capacity) {
    DC__TRY(flush(ctx, buckets));
    bucket = &buckets->half[buckets->filling];
  }
  if (bucket->used == 0) {
    DC__TRY(size_bucket(ctx, bucket, buckets->dtype, elements));
    if (!dc__event_passed(bucket->done)) { /* its last reduction: peers may still read the slots */
      dc__event_wait(bucket->done, ctx->lanes[DC__LANE_CALLER]);
      DC__TRY(dc__context_check(ctx));
    }
  }
  *slot = (char *)bucket->data + (size_t)bucket->used * dc_dtype_size(buckets->dtype);
  bucket->used += elements;
  return DC_OK;
}

/* Where this rank's part of a reduced gradient goes. */
static dc__coll_item reduction(const dc_context *ctx, const dc__graph *graph, dc__param *param, const void *slot,
                               int32_t dtype) {
  dc__coll_item item = {.send = slot,
                        .recv = param->grad,
                        .ranges = param->owned,
                        .total = param->numel,
                        .id = param->id,
                        .dtype = dtype,
                        .recv_dtype = param->grad_dtype,
                        .accumulate = param->has_grad,
                        .reduce_op = DC_MEAN};
  if (graph->stage == 0) { /* its chunk, in place; gather_whole() brings the others */
    item.ranges = param->chunks;
    item.recv = (char *)param->grad + (size_t)param->chunks[ctx->rank].begin * dc_dtype_size(param->grad_dtype);
  }
  if (param->grad == NULL) {
    item.recv_dtype = dtype; /* this rank owns nothing */
  }
  return item;
}

dc_status dc__reduce_grad(dc_context *ctx, const char *fn, dc__graph *graph, dc__param *param, const dc_tensor *grad) {
  int32_t dtype = param->expected_grad_dtype == DC_DTYPE_NONE ? grad->dtype : param->expected_grad_dtype;
  if (param->local_sum != NULL && param->local_sum_dtype != dtype) {
    return dc__fail(DC_E_DTYPE, "%s: a is %s, but earlier gradients of parameter %" PRId64 " in this step were %s", fn,
                    dc_dtype_name(dtype), param->id, dc_dtype_name(param->local_sum_dtype));
  }
  if (graph->stage == 1 && !ctx->update) {
    return add_locally(ctx, param, grad, dtype);
  }
  if (param->grad == NULL &&
      param->owned[ctx->rank].count > 0) { /* the other ranks would send what has no place here */
    return dc__fail(DC_E_STATE,
                    "%s: the gradient buffer of parameter %" PRId64
                    " was taken away by dc_update_param_grad_buffer; give it one first",
                    fn, param->id);
  }
  dc__buckets *buckets = find_buckets(ctx, dtype);
  void *slot;
  if (param->local_sum != NULL && ctx->lanes[DC__LANE_CALLER] != NULL) {
    DC__TRY(dc__need_event(ctx, &param->last_read));
  }
  DC__TRY(open_slot(ctx, buckets, param->numel, &slot));
  if (param->local_sum != NULL) {
    dc__finite_combine(ctx, param->id, slot, dtype, param->local_sum, dtype, param->numel, false);
    dc__finite_combine(ctx, param->id, slot, dtype, grad->data, grad->dtype, param->numel, true);
    if (ctx->lanes[DC__LANE_CALLER] != NULL) {
      dc__note_event(ctx, param->last_read, ctx->lanes[DC__LANE_CALLER]);
    }
    dc__arena_free(ctx->arenas.working, param->local_sum, param->last_read, NULL);
    param->local_sum = NULL;
  } else {
    dc__finite_combine(ctx, param->id, slot, dtype, grad->data, grad->dtype, param->numel, false);
  }
  dc__coll_item item = reduction(ctx, graph, param, slot, dtype);
  if (buckets->item_count == 0) {
    buckets->graph_ordinal = graph->ordinal;
  }
  buckets->params[buckets->item_count] = param;
  buckets->items[buckets->item_count++] = item;
  param->has_grad = true;
  param->pending++;
  ctx->counters.reductions++;
  ctx->counters.reduce_wire_bytes +=
      dc__wire_elements(ctx, item.ranges, param->numel, true) * (int64_t)dc_dtype_size(dtype);
  return DC_OK;
}
