/* Hybrid sharding: the ranks form `replicas` groups of consecutive ranks. Parameters are sharded inside a group, so
 * gathers stay inside it, and each group has all parameters. The ranks with the same part in each group are replicas.
 *
 * Gradients are reduced over all ranks, with the same bits as in plain ZeRO: each rank sums one piece of its part. Then
 * replicas gather the pieces of their part from each other. Both together move as many bytes as an all-reduce of the
 * parts. */
#include "runtime/replicas.h"

#include <pthread.h>
#include <string.h>

/* ---- memory of flushes, which is reused ---- */

/* Ranges of a flush's items, which collectives read until they are done. */
typedef struct replica_block {
  struct replica_block *next;
  struct dc__replica_blocks *blocks;
  size_t count;
  dc__range ranges[];
} replica_block;

typedef struct dc__replica_blocks {
  pthread_mutex_t mutex; /* guards `free`: the reduce stream returns blocks */
  replica_block *free;
  size_t count;           /* ranges of the largest flush so far, the size of new blocks */
  dc__coll_item *gathers; /* of the flush in progress */
  int64_t gather_capacity;
} dc__replica_blocks;

static replica_block *replica_take_block(dc__replica_blocks *blocks, size_t count) {
  pthread_mutex_lock(&blocks->mutex);
  replica_block *block = blocks->free;
  if (block != NULL) {
    blocks->free = block->next;
  }
  pthread_mutex_unlock(&blocks->mutex);
  blocks->count = count > blocks->count ? count : blocks->count;
  if (block != NULL && block->count < count) {
    dc__free(block);
    block = NULL;
  }
  if (block == NULL) {
    block = dc__calloc(1, sizeof *block + blocks->count * sizeof block->ranges[0]);
    if (block != NULL) {
      block->blocks = blocks;
      block->count = blocks->count;
    }
  }
  return block;
}

static void replica_give_block(void *args) {
  replica_block *block;
  memcpy(&block, args, sizeof block);
  dc__replica_blocks *blocks = block->blocks;
  pthread_mutex_lock(&blocks->mutex);
  block->next = blocks->free;
  blocks->free = block;
  pthread_mutex_unlock(&blocks->mutex);
}

void dc__replicas_free(dc_context *ctx) {
  dc__replica_blocks *blocks = ctx->replica_blocks;
  if (blocks == NULL) {
    return;
  }
  while (blocks->free != NULL) {
    replica_block *block = blocks->free;
    blocks->free = block->next;
    dc__free(block);
  }
  pthread_mutex_destroy(&blocks->mutex);
  dc__free(blocks->gathers);
  dc__free(blocks);
  ctx->replica_blocks = NULL;
}

/* ---- groups ---- */

/* All ranks have agreed on config.replicas. */
dc_status dc__replicas_connect(dc_context *ctx, const char *fn) {
  dc_comm *all = ctx->reduce_comm;
  const int32_t replicas = ctx->config.replicas;
  if (all->world % replicas != 0) {
    return dc__fail(DC_E_INVALID,
                    "%s: config.replicas = %" PRId32 " does not divide the number of ranks, which is %" PRId32, fn,
                    replicas, all->world);
  }
  const int32_t group = all->world / replicas;
  ctx->replica_blocks = dc__calloc(1, sizeof *ctx->replica_blocks);
  if (ctx->replica_blocks == NULL) {
    all->ops->abort(all, "a rank has no memory for its replicas");
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_init(&ctx->replica_blocks->mutex, NULL);
  DC__TRY(dc__comm_split_even(all, all->rank / group * group, 1, group, &ctx->gather_comm));
  DC__TRY(dc__comm_split_even(all, all->rank % group, group, replicas, &ctx->replica_comm));
  dc__comm_set_parent(ctx->gather_comm, all); /* dc_comm_abort() reaches `all` alone */
  dc__comm_set_parent(ctx->replica_comm, all);
  return DC_OK;
}

void dc__replicas_disconnect(dc_context *ctx) {
  if (ctx->replica_comm != NULL && ctx->gather_comm != NULL) {
    dc__comm_set_parent(ctx->gather_comm, NULL);
    dc__comm_set_parent(ctx->replica_comm, NULL);
  }
}

/* gather_comm and replica_comm are separate groups, which the caller's dc_comm_set_checksums() does not reach. */
void dc__replicas_share_checksums(dc_context *ctx) {
  const dc_comm *all = ctx->reduce_comm;
  if (ctx->replica_comm == NULL || all->ops->has_checksums == NULL) {
    return;
  }
  const bool wanted = all->ops->has_checksums(all);
  dc_comm *const parts[] = {ctx->gather_comm, ctx->replica_comm};
  for (size_t i = 0; i < DC__COUNT(parts); i++) {
    const dc__comm_ops *ops = parts[i]->ops;
    if (ops->has_checksums != NULL && ops->has_checksums(parts[i]) != wanted &&
        ops->set_checksums(parts[i], wanted) != DC_OK) {
      ops->abort(parts[i], dc_last_error());
    }
  }
}

/* ---- flushes ---- */

/* Cuts the parts of a group into pieces, one for each rank of all groups. */
static void cut_parts(const dc_context *ctx, const dc__range *parts, dc__range *pieces) {
  const int32_t replicas = ctx->replica_comm->world;
  for (int32_t all = 0; all < ctx->reduce_comm->world; all++) {
    const dc__range part = parts[all % ctx->world];
    const dc__range piece = dc__chunk_range(part.count, replicas, all / ctx->world);
    pieces[all] = (dc__range){part.begin + piece.begin, piece.count};
  }
}

/* Ranges of an item: the pieces of all ranks, and those of this rank's part, which count from the part's begin. */
typedef struct replica_ranges {
  dc__range *pieces, *own;
} replica_ranges;

static replica_ranges ranges_of(const dc_context *ctx, dc__range *block, int64_t item) {
  dc__range *pieces = block + item * (ctx->reduce_comm->world + ctx->replica_comm->world);
  return (replica_ranges){pieces, pieces + ctx->reduce_comm->world};
}

static void fill_ranges(const dc_context *ctx, const dc__coll_item *item, replica_ranges r) {
  cut_parts(ctx, item->ranges, r.pieces);
  for (int32_t i = 0; i < ctx->replica_comm->world; i++) {
    r.own[i] = dc__chunk_range(item->ranges[ctx->rank].count, ctx->replica_comm->world, i);
  }
}

static void *own_piece(const dc_context *ctx, const dc__coll_item *item, replica_ranges r) {
  const int64_t begin = r.own[ctx->replica_comm->rank].begin;
  return item->recv == NULL ? NULL : (char *)item->recv + (size_t)begin * dc_dtype_size(item->recv_dtype);
}

/* The gather after an item's reduction: at stage 0 of all pieces among all ranks, else of this rank's part among its
 * replicas. */
static dc__coll_item replicas_gather_item(const dc_context *ctx, const dc__coll_item *item, const dc__param *whole,
                                          replica_ranges r) {
  return (dc__coll_item){.send = own_piece(ctx, item, r),
                         .recv = whole != NULL ? whole->grad : item->recv,
                         .ranges = whole != NULL ? r.pieces : r.own,
                         .total = whole != NULL ? whole->numel : item->ranges[ctx->rank].count,
                         .id = item->id,
                         .dtype = item->recv_dtype,
                         .recv_dtype = item->recv_dtype};
}

/* Turns the items into reductions of pieces, and fills in the gathers that follow: those among all ranks from the
 * front, those among replicas from the back. Returns the number of the former. */
static int64_t plan_items(const dc_context *ctx, dc__buckets *buckets, dc__range *block, dc__coll_item *gathers) {
  int64_t among_all = 0, last = buckets->item_count;
  for (int64_t i = 0; i < buckets->item_count; i++) {
    dc__coll_item *item = &buckets->items[i];
    const dc__param *param = buckets->params[i];
    const dc__param *whole = item->ranges == param->chunks && !param->sharded ? param : NULL;
    const replica_ranges r = ranges_of(ctx, block, i);
    fill_ranges(ctx, item, r);
    item->lacks_recv = item->recv == NULL && item->ranges[ctx->rank].count > 0; /* even if its piece is empty */
    gathers[whole != NULL ? among_all++ : --last] = replicas_gather_item(ctx, item, whole, r);
    item->recv = own_piece(ctx, item, r);
    item->ranges = r.pieces;
  }
  return among_all;
}

/* Aborts the replicas' gather if the reduction failed: it would move pieces that were never reduced. */
static void end_replicas_task(void *args) {
  dc_context *ctx;
  memcpy(&ctx, args, sizeof ctx);
  if (dc__comm_check(ctx->reduce_comm) != DC_OK) {
    ctx->replica_comm->ops->abort(ctx->replica_comm, dc_last_error());
  }
}

void dc__replicas_reduce(dc_context *ctx, dc_stream *stream, const dc__tag *tag, dc__buckets *buckets) {
  dc__replica_blocks *blocks = ctx->replica_blocks;
  const size_t ranges = (size_t)ctx->reduce_comm->world + (size_t)ctx->replica_comm->world;
  const bool fits = dc__array_reserve((void **)&blocks->gathers, &blocks->gather_capacity, buckets->item_count,
                                      sizeof *blocks->gathers);
  replica_block *block = fits ? replica_take_block(blocks, (size_t)buckets->item_count * ranges) : NULL;
  if (block == NULL) {
    ctx->reduce_comm->ops->abort(ctx->reduce_comm, "a rank has no memory for the pieces of its gradients");
    return;
  }
  const int64_t among_all = plan_items(ctx, buckets, block->ranges, blocks->gathers);
  dc__replicas_share_checksums(ctx);
  dc__comm_reduce_scatter(ctx->reduce_comm, stream, tag, buckets->items, buckets->item_count);
  dc__comm_all_gather(ctx->reduce_comm, stream, tag, blocks->gathers, among_all);
  dc__comm_run_behind(ctx->reduce_comm, stream, end_replicas_task, ctx);
  dc__comm_all_gather(ctx->replica_comm, stream, tag, blocks->gathers + among_all, buckets->item_count - among_all);
  dc__comm_run_behind(ctx->reduce_comm, stream, replica_give_block, block);
}

/* Elements of a gradient that this rank sums. cut: a large gradient goes through buckets in pieces (chunks.c). */
static int64_t summed_elements(const dc_context *ctx, const dc__param *param, const dc__range *parts, bool cut) {
  const int64_t pieces = cut ? dc__piece_count(ctx, param->numel) : 1;
  int64_t own = 0;
  for (int64_t k = 0; k < pieces; k++) {
    const dc__range *slices = pieces > 1 ? dc__chunks_piece(ctx, param->numel, k) : parts;
    own += dc__chunk_range(slices[ctx->rank].count, ctx->replica_comm->world, ctx->replica_comm->rank).count;
  }
  return own;
}

int64_t dc__replicas_wire_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype) {
  const dc__range *parts = stage == 0 ? param->chunks : param->owned;
  const int64_t own = summed_elements(ctx, param, parts, stage > 0 && param->owned != param->own_split);
  const int64_t gathered = stage == 0 ? param->numel : parts[ctx->rank].count;
  return own * (ctx->reduce_comm->world - 1) * (int64_t)dc_dtype_size(dtype) +
         (gathered - own) * (int64_t)dc_dtype_size(param->grad_dtype);
}

/* A part's error has the part's own numbers, so its ranks go before it. Where the part took the error of all ranks, the
 * numbers are theirs. */
static dc_status name_part(const dc_context *ctx, const dc_comm *part, dc_status status) {
  dc__failure failure = {DC_OK, ""}, of_all = {DC_OK, ""};
  dc__failure_keep(&failure, status);
  dc__failure_keep(&of_all, dc__comm_check(ctx->reduce_comm));
  if (of_all.status != DC_OK && strcmp(failure.text, of_all.text) == 0) {
    return dc__failure_raise(&failure);
  }
  const bool is_group = part == ctx->gather_comm;
  const int32_t step = is_group ? 1 : ctx->world, first = ctx->reduce_comm->rank - part->rank * step;
  return dc__fail(failure.status, "ranks %" PRId32 "%s%" PRId32 "%s, numbered from 0: %s", first,
                  is_group ? " to " : ", ", first + (is_group ? part->world - 1 : step), is_group ? "" : ", ...",
                  failure.text);
}

static dc_status check_part(const dc_context *ctx, dc_comm *part) {
  const dc_status status = dc__comm_check(part);
  return status == DC_OK || part == ctx->reduce_comm ? status : name_part(ctx, part, status);
}

/* Keeps a cause rather than DC_E_ABORTED: another rank may have aborted one communicator since another one failed. */
dc_status dc__replicas_check(dc_context *ctx) {
  dc_comm *const comms[] = {ctx->gather_comm, ctx->reduce_comm, ctx->replica_comm};
  dc__failure failure = {DC_OK, ""};
  for (size_t i = 0; i < DC__COUNT(comms); i++) {
    const dc_status status = check_part(ctx, comms[i]);
    if (failure.status == DC_E_ABORTED && status != DC_OK && status != DC_E_ABORTED) {
      failure.status = DC_OK;
    }
    dc__failure_keep(&failure, status);
  }
  for (size_t i = 0; i < DC__COUNT(comms) && failure.status != DC_OK; i++) {
    if (dc__comm_check(comms[i]) == DC_OK) {
      comms[i]->ops->abort(comms[i], failure.text);
    }
  }
  return failure.status == DC_OK ? DC_OK : dc__failure_raise(&failure);
}
