/* Graphs: registering, finding, forgetting, and what ranks must agree on. */
#include <stdio.h>
#include <string.h>

#include "runtime/runtime.h"

dc_status dc__graph_find(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph) {
  *graph = dc__map_get(&ctx->graphs, graph_id);
  return *graph != NULL ? DC_OK
                        : dc__fail(DC_E_NOT_FOUND,
                                   "%s: graph_id = %" PRId64 " is not a registered graph (%" PRId64 " %s registered)",
                                   fn, graph_id, ctx->graphs.count, ctx->graphs.count == 1 ? "is" : "are");
}

dc_status dc__graph_find_stage3(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph) {
  DC__TRY(dc__graph_find(ctx, fn, graph_id, graph));
  return (*graph)->stage == 3
             ? DC_OK
             : dc__fail(DC_E_STAGE, "%s: graph %" PRId64 " is of stage %" PRId32 ", must be of stage 3", fn, graph_id,
                        (*graph)->stage);
}

dc_status dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                               dc__graph **graph, dc__param **param) {
  DC__TRY(stage3 ? dc__graph_find_stage3(ctx, fn, graph_id, graph) : dc__graph_find(ctx, fn, graph_id, graph));
  *param = dc__map_get(&(*graph)->params, id);
  if (*param == NULL) {
    DC__TRY(dc__param_find(ctx, fn, id, param));
    return dc__fail(DC_E_NOT_FOUND,
                    "%s: parameter %" PRId64 " is not in graph %" PRId64 " (it has %" PRId64 " parameter%s)", fn, id,
                    graph_id, (*graph)->params.count, DC__PLURAL_S((*graph)->params.count));
  }
  return DC_OK;
}

static void graph_free(dc_context *ctx, dc__graph *graph) {
  for (int64_t i = 0; i < graph->params.count; i++) {
    ((dc__param *)graph->params.values[i])->graphs--;
  }
  dc__offloaded_free(ctx, graph);
  dc__map_clear(&graph->params);
  dc__free(graph);
}

/* A parameter's row: fields on which ranks must agree, then the rank's part of the gradient. */
enum { ROW_STAGE, ROW_NUMEL, ROW_DTYPE, ROW_EXPECTED, ROW_AGREED, ROW_BEGIN = ROW_AGREED, ROW_COUNT, ROW };

static void write_row(const dc__graph *graph, const dc__param *param, int64_t *row) {
  row[ROW_STAGE] = graph->stage;
  row[ROW_NUMEL] = param->numel;
  row[ROW_DTYPE] = param->dtype;
  row[ROW_EXPECTED] = param->expected_grad_dtype;
  row[ROW_BEGIN] = param->grad_offset;
  row[ROW_COUNT] = param->grad_count;
}

/* Whether a field must be the same on all ranks. At stage 0 the count must, as all want the whole gradient or none. */
static bool is_agreed(const int64_t *row, int field) {
  return field < ROW_AGREED || (field == ROW_COUNT && row[ROW_STAGE] == 0);
}

/* replicas: both ranks hold the same shard in different groups, so their parts of the gradient must be the same too. */
static dc_status compare_rows(const char *fn, const dc__param *param, const int64_t *row, int32_t rank,
                              const int64_t *peer_row, int32_t peer, bool replicas) {
  static const char *const names[ROW] = {"stage",  "number of elements",         "data type", "expected gradient type",
                                         "offset", "number of gradient elements"};
  for (int i = 0; i < ROW; i++) {
    const bool agreed = is_agreed(row, i) || (replicas && (i != ROW_BEGIN || row[ROW_COUNT] > 0));
    if (row[i] != peer_row[i] && agreed) {
      return dc__fail(DC_E_MISMATCH,
                      "%s: parameter %" PRId64 " has %s %" PRId64 " on rank %" PRId32 ", but %" PRId64
                      " on rank %" PRId32,
                      fn, param->id, names[i], row[i], rank, peer_row[i], peer);
    }
  }
  return DC_OK;
}

/* Compares this rank with all, and each rank with its replica in the first group, so that every rank fails if any two
 * differ. rows: the parameter's, one per rank of the communicator, `step` apart. */
static dc_status compare_ranks(const dc_context *ctx, const char *fn, const dc_comm *all, const dc__param *param,
                               const int64_t *rows, int64_t step) {
  for (int32_t rank = 0; rank < all->world; rank++) {
    DC__TRY(compare_rows(fn, param, rows + all->rank * step, all->rank, rows + rank * step, rank, false));
  }
  for (int32_t rank = ctx->world; rank < all->world; rank++) {
    const int32_t first = rank % ctx->world;
    DC__TRY(compare_rows(fn, param, rows + first * step, first, rows + rank * step, rank, true));
  }
  return DC_OK;
}

/* Whether a parameter of a new graph is also in a graph other than `old`, which the new one replaces. */
static bool is_in_another_graph(const dc__graph *old, const dc__param *param) {
  return param->graphs > 1 + (old != NULL && dc__map_get(&old->params, param->id) != NULL);
}

/* Allocates memory for uneven splits before ranks agree, as no rank may fail afterwards. */
static dc_status make_splits(const dc_context *ctx, const dc__graph *graph) {
  for (int64_t i = 0; i < graph->params.count; i++) {
    dc__param *param = graph->params.values[i];
    if (param->own_split == NULL) {
      param->own_split = dc__calloc((size_t)ctx->world, sizeof *param->own_split);
    }
    if (param->own_split == NULL) {
      return DC_E_NO_MEMORY;
    }
  }
  return DC_OK;
}

static void drop_unused_splits(const dc__graph *graph) {
  for (int64_t i = 0; i < graph->params.count; i++) {
    dc__param *param = graph->params.values[i];
    if (param->owned != param->own_split) {
      dc__free(param->own_split);
      param->own_split = NULL;
    }
  }
}

/* Stores which part of a gradient each rank owns. rows: the parameter's, one per rank, `step` apart. */
static void adopt_split(const dc_context *ctx, dc__param *param, const int64_t *rows, int64_t step) {
  bool even = true;
  param->frozen = true;
  for (int32_t rank = 0; rank < ctx->world; rank++) {
    const int64_t *row = rows + rank * step;
    const dc__range *chunk = &param->chunks[rank];
    even = even && row[ROW_BEGIN] == chunk->begin && row[ROW_COUNT] == chunk->count;
    param->own_split[rank] = (dc__range){row[ROW_BEGIN], row[ROW_COUNT]};
    param->frozen = param->frozen && row[ROW_COUNT] == 0;
  }
  param->owned = even ? dc__chunks_even_split(ctx, param->numel) : param->own_split;
}

/* Stage 0 reduces into whole gradients, but another graph may have fixed a split into parts. */
static dc_status check_whole(const dc_context *ctx, const char *fn, const dc__param *param) {
  for (int32_t rank = 0; rank < ctx->world && !param->frozen; rank++) {
    const dc__range *owned = &param->owned[rank];
    if (owned->count != param->numel) {
      return dc__fail(DC_E_MISMATCH,
                      "%s: stage 0 needs all %" PRId64 " elements of the gradient of parameter %" PRId64
                      ", but another graph was registered with %" PRId64 " to %" PRId64 " on rank %" PRId32,
                      fn, param->numel, param->id, owned->begin, owned->begin + owned->count, rank);
    }
  }
  return DC_OK;
}

/* A parameter in another graph already has a split, which must not change. If its buffer was removed on all ranks, the
 * parameter is not frozen, and the split still applies. */
static dc_status compare_split(const dc_context *ctx, const char *fn, const dc__graph *graph, const dc__param *param,
                               const int64_t *rows, int64_t step) {
  bool all_missing = true;
  for (int32_t rank = 0; rank < ctx->world; rank++) {
    all_missing = all_missing && rows[rank * step + ROW_COUNT] == 0;
  }
  if (all_missing) {
    return graph->stage == 0 ? check_whole(ctx, fn, param) : DC_OK;
  }
  for (int32_t rank = 0; rank < ctx->world; rank++) {
    const int64_t *row = rows + rank * step;
    const dc__range *owned = &param->owned[rank];
    if (row[ROW_COUNT] != owned->count || (owned->count > 0 && row[ROW_BEGIN] != owned->begin)) {
      return dc__fail(DC_E_MISMATCH,
                      "%s: grad_buffer of parameter %" PRId64 " covers elements %" PRId64 " to %" PRId64
                      " on rank %" PRId32 ", but another graph was registered with %" PRId64 " to %" PRId64,
                      fn, param->id, row[ROW_BEGIN], row[ROW_BEGIN] + row[ROW_COUNT], rank, owned->begin,
                      owned->begin + owned->count);
    }
  }
  return DC_OK;
}

/* The other ranks of a counting device's group do not exist. If this rank has its even part of a gradient, so have
 * they; any other split is unknown. */
static dc_status write_absent_rows(const dc_context *ctx, const char *fn, const dc__graph *graph, int32_t world,
                                   int64_t *table, int64_t step) {
  for (int64_t i = 0; i < graph->params.count && graph->stage > 0; i++) {
    const dc__param *param = graph->params.values[i];
    const dc__range *own = &param->chunks[ctx->rank];
    if (param->grad_count == 0 && own->count > 0) {
      continue; /* frozen */
    }
    if (param->grad_count != own->count || (own->count > 0 && param->grad_offset != own->begin)) {
      return dc__fail(DC_E_UNSUPPORTED,
                      "%s: grad_buffer of parameter %" PRId64 " covers elements %" PRId64 " to %" PRId64
                      "; on a counting device it must cover dc_shard_range()",
                      fn, param->id, param->grad_offset, param->grad_offset + param->grad_count);
    }
    for (int32_t rank = 0; rank < world; rank++) {
      int64_t *row = table + rank * step + i * ROW;
      row[ROW_BEGIN] = param->chunks[rank % ctx->world].begin;
      row[ROW_COUNT] = param->chunks[rank % ctx->world].count;
    }
  }
  return DC_OK;
}

/* In one small collective, all ranks exchange what they compare, and which part of each gradient they own. A row for
 * the graph itself comes last, so that a rank with an empty graph also takes part. */
static dc_status exchange_graph(dc_context *ctx, const char *fn, const dc_comm *all, const dc__graph *graph,
                                int64_t *own_rows, int64_t *table) {
  const int64_t count = graph->params.count, step = (count + 1) * ROW;
  for (int64_t i = 0; i < count; i++) {
    write_row(graph, graph->params.values[i], own_rows + i * ROW);
  }
  own_rows[count * ROW + ROW_STAGE] = graph->stage;
  dc__tag tag = {.graph_id = graph->ordinal, .id = count > 0 ? graph->params.keys[0] : -1, .op = DC_OP_REGISTER_GRAPH};
  const int32_t group = all == ctx->gather_comm ? DC__GROUP_GATHER : DC__GROUP_REDUCE;
  DC__TRY(dc__context_exchange(ctx, group, &tag, own_rows, step, table));
  return dc__device_is_counting(ctx->device) ? write_absent_rows(ctx, fn, graph, all->world, table, step) : DC_OK;
}

/* Compares the rows of all ranks, and stores the splits in the rows of this rank's group. */
static dc_status adopt_splits(const dc_context *ctx, const char *fn, const dc_comm *all, const dc__graph *graph,
                              const dc__graph *old, const int64_t *table) {
  const int64_t count = graph->params.count, step = (count + 1) * ROW;
  const int64_t *group = table + (all->rank - ctx->rank) * step;
  for (int64_t i = 0; i < count; i++) {
    const dc__param *param = graph->params.values[i];
    DC__TRY(compare_ranks(ctx, fn, all, param, table + i * ROW, step));
    if (is_in_another_graph(old, param)) {
      DC__TRY(compare_split(ctx, fn, graph, param, group + i * ROW, step));
    }
  }
  for (int64_t i = 0; i < count; i++) {
    dc__param *param = graph->params.values[i];
    if (!is_in_another_graph(old, param)) {
      adopt_split(ctx, param, group + i * ROW, step);
    }
  }
  return DC_OK;
}

static dc_status agree_on_graph(dc_context *ctx, const char *fn, dc__graph *graph, const dc__graph *old) {
  const dc_comm *all = ctx->replica_comm != NULL ? ctx->reduce_comm : ctx->gather_comm;
  const size_t rows = (size_t)graph->params.count + 1;
  int64_t *own_rows = dc__calloc(rows, ROW * sizeof *own_rows);
  int64_t *table = dc__calloc(rows * (size_t)all->world, ROW * sizeof *table);
  dc_status status = own_rows == NULL || table == NULL ? DC_E_NO_MEMORY : make_splits(ctx, graph);
  if (status == DC_OK) {
    status = exchange_graph(ctx, fn, all, graph, own_rows, table);
  }
  if (status == DC_OK) {
    status = adopt_splits(ctx, fn, all, graph, old, table);
  }
  drop_unused_splits(graph);
  dc__free(own_rows);
  dc__free(table);
  return status;
}

dc_status dc__graph_check_idle(const dc_context *ctx, const char *fn, const dc__graph *graph) {
  const dc__map *params = graph == NULL ? &ctx->params : &graph->params;
  char which[40] = "";
  if (graph != NULL) {
    snprintf(which, sizeof which, " of graph %" PRId64, graph->id);
  }
  DC__MAP_EACH (params, i) {
    const dc__param *param = params->values[i];
    if (param->pending > 0) {
      return dc__fail(DC_E_BUSY,
                      "%s: reductions%s are pending, one of parameter %" PRId64
                      "; call dc_end_backward or dc_context_step_abort first",
                      fn, which, param->id);
    }
    if (param->local_sum != NULL) {
      return dc__fail(DC_E_BUSY,
                      "%s: local sums%s are pending, one of parameter %" PRId64
                      "; end a backward with update = 1, which averages them, or call dc_context_step_abort first",
                      fn, which, param->id);
    }
  }
  return DC_OK;
}

static dc_status check_member(const char *fn, const dc__graph *graph, const dc__param *param) {
  if (param->sharded != (graph->stage == 3)) {
    return dc__fail(DC_E_STAGE,
                    "%s: parameter %" PRId64 " was registered by %s, which a stage-%" PRId32 " graph does not take", fn,
                    param->id, param->sharded ? "dc_register_z3_param" : "dc_register_param", graph->stage);
  }
  if (graph->stage == 0 && param->grad_count != 0 && param->grad_count != param->numel) {
    return dc__fail(DC_E_SHAPE,
                    "%s: grad_buffer of parameter %" PRId64 " has %" PRId64 " element%s, stage 0 needs all %" PRId64,
                    fn, param->id, param->grad_count, DC__PLURAL_S(param->grad_count), param->numel);
  }
  return DC_OK;
}

static dc_status graph_fill(dc_context *ctx, const char *fn, dc__graph *graph, const dc__graph *old, const int64_t *ids,
                            int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    dc__param *param;
    DC__TRY(dc__param_find(ctx, fn, ids[i], &param));
    DC__TRY(check_member(fn, graph, param));
    if (dc__map_get(&graph->params, ids[i]) != NULL) {
      return dc__fail(DC_E_INVALID, "%s: ids has parameter %" PRId64 " twice", fn, ids[i]);
    }
    if (!dc__map_put(&graph->params, ids[i], param)) {
      return DC_E_NO_MEMORY;
    }
    param->graphs++;
  }
  return agree_on_graph(ctx, fn, graph, old);
}

dc_status dc__graph_register(dc_context *ctx, const char *fn, int64_t graph_id, int32_t stage, const int64_t *ids,
                             int64_t count) {
  DC__TRY(dc__check_ids(fn, ids, count));
  dc__graph *old = dc__map_get(&ctx->graphs, graph_id);
  if (old != NULL) {
    DC__TRY(dc__graph_check_idle(ctx, fn, old));
  }
  dc__graph *graph = dc__calloc(1, sizeof *graph);
  if (graph == NULL) {
    return DC_E_NO_MEMORY;
  }
  graph->id = graph_id;
  graph->stage = stage;
  graph->ordinal = ctx->graph_ordinals;
  dc_status status =
      dc__context_synchronize(ctx); /* the exchange runs on the caller's thread: nothing may be under way */
  if (status == DC_OK && !dc__map_put(&ctx->graphs, graph_id, graph)) { /* once ranks have agreed, none may fail */
    status = DC_E_NO_MEMORY;
  }
  if (status == DC_OK) {
    status = graph_fill(ctx, fn, graph, old, ids, count);
    if (status != DC_OK && old != NULL) {
      (void)dc__map_put(&ctx->graphs, graph_id, old); /* cannot fail: the map has space for it */
    } else if (status != DC_OK) {
      dc__map_remove(&ctx->graphs, graph_id);
    }
  }
  if (status != DC_OK) {
    graph_free(ctx, graph);
    return status;
  }
  ctx->graph_ordinals++;
  if (old != NULL) {
    graph_free(ctx, old);
  }
  return DC_OK;
}

dc_status dc__graph_unregister(dc_context *ctx, const char *fn, int64_t graph_id) {
  dc__graph *graph;
  DC__TRY(dc__graph_find(ctx, fn, graph_id, &graph));
  DC__TRY(dc__graph_check_idle(ctx, fn, graph));
  dc__map_remove(&ctx->graphs, graph_id);
  graph_free(ctx, graph);
  return DC_OK;
}

void dc__graphs_free(dc_context *ctx) {
  DC__MAP_EACH (&ctx->graphs, i) {
    graph_free(ctx, ctx->graphs.values[i]);
  }
  dc__map_clear(&ctx->graphs);
}

dc_status dc__graphs_reset(dc_context *ctx, const char *fn) {
  DC__TRY(dc__graph_check_idle(ctx, fn, NULL));
  dc__graphs_free(ctx);
  ctx->finite_known = false; /* findings so far still count in this step, as gradients in the buffers do */
  return DC_OK;
}
