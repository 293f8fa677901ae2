/* Gradients are copied into a bucket's slot on the caller's stream, so that the caller's tensor is free at once. They
 * are reduced bucket by bucket on the reduce stream, straight into the registered gradient buffers.
 *
 * A slot is one whole gradient, or a piece of a large one. Each rank pulls its own part of it from all ranks' slots,
 * and adds in a fixed order. The bits do not depend on where slots lie, how large buckets are or when they are flushed.
 * Flushes depend on sizes and the order of calls alone, so they are the same on every rank. Each type has buckets of
 * its own, but the gradients of one parameter arrive in the order of the calls: they never wait in two types' buckets
 * at a time. */
#include <string.h>

#include "runtime/replicas.h"
#include "runtime/runtime.h"

/* ---- buckets ---- */

static dc__buckets *find_buckets(dc_context *ctx, int32_t dtype) {
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    if (ctx->buckets[i].dtype == dtype || ctx->buckets[i].dtype == DC_DTYPE_NONE) {
      ctx->buckets[i].dtype = dtype;
      return &ctx->buckets[i];
    }
  }
  return NULL; /* unreachable: there is a place for each floating-point type */
}

static void free_data(dc_context *ctx, dc__bucket *bucket) {
  if (bucket->data != NULL) {
    dc__arena_free(ctx->arenas.buckets, bucket->data, bucket->done, NULL);
    bucket->data = NULL;
    bucket->capacity = 0;
  }
}

/* Makes space for `elements` in an empty bucket. */
static dc_status size_bucket(dc_context *ctx, dc__bucket *bucket, int32_t dtype, int64_t elements) {
  if (bucket->data != NULL && bucket->capacity >= elements) {
    return DC_OK;
  }
  DC__TRY(dc__ensure_event(ctx, &bucket->done));
  int64_t capacity = elements > ctx->bucket_elements ? elements : ctx->bucket_elements;
  void *data;
  free_data(ctx, bucket);
  DC__TRY(dc__arena_alloc(ctx->arenas.buckets, ctx->lanes[DC__LANE_CALLER], (size_t)capacity * dc_dtype_size(dtype),
                          &data));
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
        dc__destroy_event(ctx, &buckets->half[h].done);
      }
    }
    dc__free(buckets->items);
    dc__free(buckets->params);
    memset(buckets, 0, sizeof *buckets);
  }
}

/* ---- flushing ---- */

/* At stage 0 every rank reduces its chunk of the gradient in place, and then gathers all chunks. */
static void reduce_items(dc_context *ctx, dc_stream *stream, const dc__tag *tag, dc__buckets *buckets) {
  int64_t count = 0;
  dc__comm_reduce_scatter(ctx->reduce_comm, stream, tag, buckets->items, buckets->item_count);
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
  }
  dc__comm_all_gather(ctx->reduce_comm, stream, tag, buckets->items, count);
}

static dc_status bucket_flush(dc_context *ctx, dc__buckets *buckets) {
  if (buckets->item_count == 0) {
    return DC_OK;
  }
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  dc__bucket *bucket = &buckets->half[buckets->filling];
  dc__tag tag = {.graph_id = buckets->graph_ordinal, .id = buckets->items[0].id, .op = DC_OP_REDUCE_GRAD};
  dc__wait_for_caller(ctx, stream);
  int64_t bytes = bucket->used * (int64_t)dc_dtype_size(buckets->dtype);
  tag.span = dc__recorder_begin(ctx, &(dc__recorded_op){.tag = &tag,
                                                        .lane = DC__LANE_REDUCE,
                                                        .group = DC__GROUP_REDUCE,
                                                        .dtype = buckets->dtype,
                                                        .count = (int32_t)buckets->item_count,
                                                        .bytes = bytes,
                                                        .moved = bytes});
  (ctx->replica_comm != NULL ? dc__replicas_reduce : reduce_items)(ctx, stream, &tag, buckets);
  dc__recorder_submitted(tag.span);
  dc__context_record_event(ctx, bucket->done, stream);
  ctx->counters.flushes++;
  for (int64_t i = 0; i < buckets->item_count; i++) {
    buckets->params[i]->waits_in = NULL;
  }
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
        DC__TRY(bucket_flush(ctx, &ctx->buckets[i]));
      }
    }
  }
  return DC_OK;
}

void dc__reduce_drop(dc_context *ctx) {
  for (int32_t i = 0; i < DC__BUCKET_TYPES; i++) {
    dc__buckets *buckets = &ctx->buckets[i];
    buckets->half[buckets->filling].used = 0;
    buckets->item_count = 0;
  }
  DC__MAP_EACH (&ctx->params, i) {
    dc__param *param = ctx->params.values[i];
    param->pending = 0;
    param->waits_in = NULL;
    param->has_grad = param->keeps_grad = false;
    if (param->local_sum != NULL) {
      dc__arena_free(ctx->arenas.working, param->local_sum, NULL, NULL);
      param->local_sum = NULL;
    }
  }
}

/* ---- taking a gradient ---- */

/* The type that holds the values of both: gradients that are added locally may differ in type. */
static int32_t type_of_sum(int32_t a, int32_t b) {
  return a == b ? a : a == DC_FLOAT64 || b == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32;
}

int32_t dc__reduce_dtype(const dc__param *param, int32_t dtype) {
  if (param->expected_grad_dtype != DC_DTYPE_NONE) {
    return param->expected_grad_dtype;
  }
  return param->local_sum == NULL ? dtype : type_of_sum(param->local_sum_dtype, dtype);
}

/* Creates the event for drop_local_sum(), which cannot fail afterwards. */
static dc_status prepare_drop(dc_context *ctx, dc__param *param) {
  bool later = param->local_sum != NULL && ctx->lanes[DC__LANE_CALLER] != NULL;
  return later ? dc__ensure_event(ctx, &param->last_read) : DC_OK;
}

/* Call after the last work that reads the sum is queued. */
static void drop_local_sum(dc_context *ctx, dc__param *param) {
  if (ctx->lanes[DC__LANE_CALLER] != NULL) {
    dc__context_record_event(ctx, param->last_read, ctx->lanes[DC__LANE_CALLER]);
  }
  dc__arena_free(ctx->arenas.working, param->local_sum, param->last_read, NULL);
  param->local_sum = NULL;
}

/* Stage 1, before the step's last backward: adds the gradient to the local sum, which may need a wider type. */
static dc_status add_locally(dc_context *ctx, dc__param *param, const dc_tensor *grad, int32_t dtype) {
  void *sum = param->local_sum;
  bool first = sum == NULL;
  if (first || param->local_sum_dtype != dtype) {
    size_t bytes = (size_t)param->numel * dc_dtype_size(dtype);
    DC__TRY(prepare_drop(ctx, param));
    DC__TRY(dc__arena_alloc(ctx->arenas.working, ctx->lanes[DC__LANE_CALLER], bytes, &sum));
  }
  if (!first && sum != param->local_sum) {
    const dc__combination widened = {.dst = sum,
                                     .src = param->local_sum,
                                     .count = param->numel,
                                     .dst_dtype = dtype,
                                     .src_dtype = param->local_sum_dtype};
    dc__grad_combine(ctx, param->id, &widened);
    drop_local_sum(ctx, param);
  }
  const dc__combination added = {.dst = sum,
                                 .src = grad->data,
                                 .count = param->numel,
                                 .dst_dtype = dtype,
                                 .src_dtype = grad->dtype,
                                 .add = !first};
  dc__grad_combine(ctx, param->id, &added);
  param->local_sum = sum;
  param->local_sum_dtype = dtype;
  return DC_OK;
}

/* Takes a slot of `elements` in the bucket being filled, after a flush if it does not fit. */
static dc_status open_slot(dc_context *ctx, dc__buckets *buckets, int64_t elements, void **slot) {
  if (!dc__array_reserve((void **)&buckets->items, &buckets->item_capacity, buckets->item_count + 1,
                         sizeof *buckets->items) ||
      !dc__array_reserve((void **)&buckets->params, &buckets->param_capacity, buckets->item_count + 1,
                         sizeof *buckets->params)) {
    return DC_E_NO_MEMORY;
  }
  dc__bucket *bucket = &buckets->half[buckets->filling];
  if (bucket->used > 0 && bucket->used + elements > bucket->capacity) {
    DC__TRY(bucket_flush(ctx, buckets));
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

/* Describes the reduction of a slot: where this rank's part of the result goes. */
static dc__coll_item reduce_coll_item(const dc_context *ctx, const dc__graph *graph, dc__param *param, const void *slot,
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
  if (graph->stage == 0) { /* its chunk, in place; reduce_items() brings the others */
    item.ranges = param->chunks;
    item.recv = (char *)param->grad + (size_t)param->chunks[ctx->rank].begin * dc_dtype_size(param->grad_dtype);
  }
  if (param->grad == NULL) {
    item.recv_dtype = dtype; /* this rank owns nothing */
  }
  return item;
}

/* A gradient plus the local sum, if any; grad NULL: the local sum alone. */
typedef struct grad_contribution {
  const dc__graph *graph;
  dc__param *param;
  const dc_tensor *grad;
  int32_t dtype; /* in the bucket */
} grad_contribution;

static const char *elements_at(const void *base, int64_t elements, int32_t dtype) {
  return (const char *)base + (size_t)elements * dc_dtype_size(dtype);
}

/* Writes elements of the gradient plus the local sum to a slot. */
static void fill_slot(dc_context *ctx, const grad_contribution *c, void *slot, int64_t begin, int64_t count) {
  const dc__param *param = c->param;
  bool summed = param->local_sum != NULL;
  if (summed) {
    const dc__combination sum = {.dst = slot,
                                 .src = elements_at(param->local_sum, begin, param->local_sum_dtype),
                                 .count = count,
                                 .dst_dtype = c->dtype,
                                 .src_dtype = param->local_sum_dtype};
    dc__grad_combine(ctx, param->id, &sum);
  }
  if (c->grad != NULL) {
    const dc__combination grad = {.dst = slot,
                                  .src = elements_at(c->grad->data, begin, c->grad->dtype),
                                  .count = count,
                                  .dst_dtype = c->dtype,
                                  .src_dtype = c->grad->dtype,
                                  .add = summed};
    dc__grad_combine(ctx, param->id, &grad);
  }
}

static void add_item(dc__buckets *buckets, const grad_contribution *c, const dc__coll_item *item) {
  buckets->graph_ordinal = buckets->item_count == 0 ? c->graph->ordinal : buckets->graph_ordinal;
  buckets->params[buckets->item_count] = c->param;
  buckets->items[buckets->item_count++] = *item;
  c->param->waits_in = buckets;
  c->param->waits_whole = c->graph->stage == 0;
}

static dc_status add_whole(dc_context *ctx, dc__buckets *buckets, const grad_contribution *c) {
  void *slot;
  DC__TRY(open_slot(ctx, buckets, c->param->numel, &slot));
  fill_slot(ctx, c, slot, 0, c->param->numel);
  dc__coll_item item = reduce_coll_item(ctx, c->graph, c->param, slot, c->dtype);
  add_item(buckets, c, &item);
  return DC_OK;
}

/* The pieces go through both buckets in turn. Only a failure of the group can stop them halfway. */
static dc_status add_pieces(dc_context *ctx, dc__buckets *buckets, const grad_contribution *c) {
  const dc__param *param = c->param;
  const int64_t width = dc__piece_width(ctx);
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  DC__TRY(bucket_flush(ctx, buckets));
  for (int32_t h = 0; h < (ctx->config.double_buffer == -1 ? 1 : 2); h++) {
    DC__TRY(size_bucket(ctx, &buckets->half[h], buckets->dtype, width * ctx->world));
  }
  for (int64_t k = 0; k < dc__piece_count(ctx, param->numel); k++) {
    const dc__range *slices = dc__chunks_piece(ctx, param->numel, k);
    int64_t elements = slices[ctx->world - 1].begin + slices[ctx->world - 1].count;
    void *slot;
    DC__TRY(open_slot(ctx, buckets, elements, &slot));
    for (int32_t rank = 0; rank < ctx->world; rank++) {
      void *slice = (char *)slot + (size_t)slices[rank].begin * dc_dtype_size(c->dtype);
      if (slices[rank].count > 0) {
        fill_slot(ctx, c, slice, param->chunks[rank].begin + k * width, slices[rank].count);
      }
    }
    dc__coll_item item = reduce_coll_item(ctx, c->graph, c->param, slot, c->dtype);
    item.ranges = slices;
    item.total = elements;
    if (slices[ctx->rank].count > 0 && param->grad != NULL) {
      item.recv = (char *)param->grad + (size_t)(k * width) * dc_dtype_size(param->grad_dtype);
    }
    add_item(buckets, c, &item);
    DC__TRY(bucket_flush(ctx, buckets));
  }
  return DC_OK;
}

static dc_status add_to_bucket(dc_context *ctx, const char *fn, const dc__graph *graph, dc__param *param,
                               const dc_tensor *grad, int32_t dtype) {
  DC__TRY(dc__param_check_buffer(ctx, fn, param));
  dc__buckets *buckets = find_buckets(ctx, dtype);
  if (param->waits_in != NULL && (param->waits_in != buckets || param->waits_whole != (graph->stage == 0))) {
    DC__TRY(bucket_flush(ctx, param->waits_in)); /* of another type or split, but earlier: it must arrive first */
  }
  DC__TRY(prepare_drop(ctx, param));
  const grad_contribution c = {.graph = graph, .param = param, .grad = grad, .dtype = dtype};
  bool even = graph->stage > 0 && param->owned != param->own_split;
  DC__TRY(even && dc__piece_count(ctx, param->numel) > 1 ? add_pieces(ctx, buckets, &c) : add_whole(ctx, buckets, &c));
  if (param->local_sum != NULL) {
    drop_local_sum(ctx, param);
  }
  param->has_grad = true;
  param->pending++;
  ctx->counters.reductions++;
  ctx->counters.reduce_wire_bytes += dc__reduction_bytes(ctx, graph->stage, param, dtype);
  return DC_OK;
}

dc_status dc__reduce_grad(dc_context *ctx, const char *fn, dc__graph *graph, dc__param *param, const dc_tensor *grad) {
  int32_t dtype = dc__reduce_dtype(param, grad->dtype);
  return graph->stage == 1 && !ctx->update ? add_locally(ctx, param, grad, dtype)
                                           : add_to_bucket(ctx, fn, graph, param, grad, dtype);
}

/* ---- the end of a backward ---- */

/* Stage 1: reduces local sums to which the step's last backward added no gradient. Graphs and their parameters have the
 * same order on all ranks. */
static dc_status reduce_local_sums(dc_context *ctx, const char *fn) {
  DC__MAP_EACH (&ctx->graphs, g) {
    const dc__graph *graph = ctx->graphs.values[g];
    for (int64_t i = 0; graph->stage == 1 && i < graph->params.count; i++) {
      dc__param *param = graph->params.values[i];
      if (param->local_sum != NULL) {
        DC__TRY(add_to_bucket(ctx, fn, graph, param, NULL, param->local_sum_dtype));
      }
    }
  }
  return DC_OK;
}

dc_status dc__reduce_finish(dc_context *ctx, const char *fn) {
  if (ctx->update) {
    DC__TRY(reduce_local_sums(ctx, fn));
  }
  DC__TRY(dc__reduce_flush(ctx));
  dc_stream *stream;
  DC__TRY(dc__lane(ctx, DC__LANE_REDUCE, &stream));
  if (!ctx->capturing) {                 /* then the gradients are complete where the caller's stream is */
    DC__TRY(dc__stream_sync(stream, 0)); /* its collectives have deadlines */
  }
  DC__MAP_EACH (&ctx->params, i) {
    ((dc__param *)ctx->params.values[i])->pending = 0;
  }
  return dc__context_check(ctx);
}
