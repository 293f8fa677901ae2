/* One collective in two levels. All ranks compare their calls over the whole; then blocks and columns move data. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/levels/levels.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

enum { PEER_CHECKS = 100, CHECK_PAUSE_NS = 10000000 };

/* ---- failures ---- */

/* After an error in a block or column, all ranks fail with the same error. The whole often detects the same cause a
 * little later, and knows the ranks' numbers; otherwise it takes the part's error. Failing the block and the column
 * also ends the waits of their ranks, which do the same. */
static bool levels_check_part(dc__levels *self, const char *where, dc_comm *part) {
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, dc__comm_check(part));
  if (failure.status == DC_OK) {
    return true;
  }
  const dc_status parents = dc__comm_check_parents(self->whole); /* the cause, which the whole cannot detect */
  if (parents != DC_OK) {
    self->whole->ops->fail_group(self->whole, parents);
  }
  for (int i = 0; i < PEER_CHECKS && dc__comm_check(self->whole) == DC_OK; i++) {
    const struct timespec pause = {0, CHECK_PAUSE_NS};
    self->whole->ops->check_peers(self->whole);
    nanosleep(&pause, NULL);
  }
  self->head.ops->fail_group(&self->head, dc__fail(failure.status, "%s: %s", where, failure.text));
  return false;
}

static bool levels_check_block(dc__levels *self) {
  char where[80];
  const int32_t first = self->head.rank - self->head.rank % self->length;
  snprintf(where, sizeof where, "among ranks %" PRId32 " to %" PRId32 " of one machine", first,
           first + self->length - 1);
  return levels_check_part(self, where, self->block);
}

static bool levels_check_column(dc__levels *self) {
  char where[80];
  const int32_t first = self->head.rank % self->length;
  snprintf(where, sizeof where, "among ranks %" PRId32 ", %" PRId32 ", ... of all machines", first,
           first + self->length);
  return levels_check_part(self, where, self->column);
}

/* ---- gather and broadcast ---- */

static dc__tag part_tag(const dc__coll *coll) {
  return (dc__tag){.graph_id = coll->tag.graph_id, .id = coll->tag.id, .op = coll->tag.op};
}

static int64_t count_elements(const dc__range *ranges, int32_t count) {
  int64_t elements = 0;
  for (int32_t i = 0; i < count; i++) {
    elements += ranges[i].count;
  }
  return elements;
}

/* First each rank gathers the parts of its column; then the ranks of a block exchange what they gathered. */
static bool levels_gather(dc__levels *self, const dc__coll *coll) {
  const dc__tag tag = part_tag(coll);
  const int32_t place = self->head.rank % self->length;
  int64_t count = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    dc__range *ranges = &self->ranges[(size_t)i * (size_t)self->blocks];
    for (int32_t b = 0; b < self->blocks; b++) {
      ranges[b] = coll->items[i].ranges[b * self->length + place];
    }
    self->items[i] = coll->items[i];
    self->items[i].ranges = ranges;
    self->items[i].total = count_elements(ranges, self->blocks);
  }
  dc__comm_all_gather(self->column, NULL, &tag, self->items, coll->count);
  if (!levels_check_column(self)) {
    return false;
  }
  for (int32_t i = 0; i < coll->count; i++) {
    for (int32_t b = 0; b < self->blocks; b++) {
      const dc__coll_item *item = &coll->items[i];
      dc__coll_item *part = &self->items[count++];
      *part = *item;
      part->ranges = &item->ranges[b * self->length];
      part->total = count_elements(part->ranges, self->length);
      part->send = dc__bytes_at(item->recv, part->ranges[place].begin, item->dtype);
    }
  }
  dc__levels_progress(self, true);
  dc__comm_all_gather(self->block, NULL, &tag, self->items, count);
  dc__levels_progress(self, false);
  return levels_check_block(self);
}

static bool levels_broadcast(dc__levels *self, const dc__coll *coll) {
  const dc__tag tag = part_tag(coll);
  const dc__coll_item *item = &coll->items[0];
  const int32_t place = coll->root % self->length;
  if (self->head.rank % self->length == place) {
    dc__comm_broadcast(self->column, NULL, &tag, item->recv, (size_t)item->total, coll->root / self->length);
    if (!levels_check_column(self)) {
      return false;
    }
  }
  dc__levels_progress(self, true);
  dc__comm_broadcast(self->block, NULL, &tag, item->recv, (size_t)item->total, place);
  dc__levels_progress(self, false);
  return levels_check_block(self);
}

/* ---- reduce ---- */

int32_t dc__levels_sum_dtype(const dc__coll_item *item) {
  return item->dtype == DC_FLOAT16 || item->dtype == DC_BFLOAT16 ? DC_FLOAT32 : item->dtype;
}

static int64_t align_elements(int64_t elements) {
  return (elements + DC__PART_ALIGN - 1) & ~(int64_t)(DC__PART_ALIGN - 1);
}

/* Lays out, item by item, the partial sums for the ranks of this column, and then the sum for this rank. Sets *bytes to
 * the size of all. */
static void plan_sums(dc__levels *self, const dc__coll *coll, int64_t *bytes) {
  const int32_t place = self->head.rank % self->length;
  *bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    dc__range *ranges = &self->ranges[(size_t)i * (size_t)self->blocks];
    int64_t elements = 0;
    for (int32_t b = 0; b < self->blocks; b++) {
      ranges[b] = (dc__range){elements, coll->items[i].ranges[b * self->length + place].count};
      elements += align_elements(ranges[b].count);
    }
    *bytes += (elements + align_elements(ranges[self->head.rank / self->length].count)) *
              (int64_t)dc_dtype_size(dc__levels_sum_dtype(&coll->items[i]));
  }
}

static dc_status reserve_sums(dc__levels *self, int64_t bytes) {
  if (self->scratch_bytes < bytes) {
    dc__free(self->scratch);
    self->scratch = dc__calloc(1, (size_t)bytes);
    self->scratch_bytes = self->scratch == NULL ? 0 : bytes;
  }
  return self->scratch_bytes < bytes ? DC_E_NO_MEMORY : DC_OK;
}

/* Returns where an item's partial sums begin, and moves *at behind its sum. */
static char *sums_of(const dc__levels *self, const dc__coll *coll, int32_t i, char **at) {
  const dc__range *ranges = &self->ranges[(size_t)i * (size_t)self->blocks];
  const dc__range last = ranges[self->blocks - 1];
  char *sums = *at;
  *at += (last.begin + align_elements(last.count) + align_elements(ranges[self->head.rank / self->length].count)) *
         (int64_t)dc_dtype_size(dc__levels_sum_dtype(&coll->items[i]));
  return sums;
}

/* Computes the block's partial sum of each part that a rank of this column owns. */
static bool sum_in_blocks(dc__levels *self, const dc__coll *coll) {
  const dc__tag tag = part_tag(coll);
  int64_t count = 0;
  char *at = self->scratch;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    char *sums = sums_of(self, coll, i, &at);
    for (int32_t b = 0; b < self->blocks; b++) {
      const int64_t begin = self->ranges[(size_t)i * (size_t)self->blocks + (size_t)b].begin;
      dc__coll_item *part = &self->items[count++];
      *part = *item;
      part->ranges = &item->ranges[b * self->length];
      part->recv_dtype = dc__levels_sum_dtype(item);
      part->recv = sums + begin * (int64_t)dc_dtype_size(part->recv_dtype);
      part->accumulate = 0;
      part->reduce_op = DC_SUM;
    }
  }
  dc__levels_progress(self, true);
  dc__comm_reduce_scatter(self->block, NULL, &tag, self->items, count);
  dc__levels_progress(self, false);
  return levels_check_block(self);
}

/* Adds all blocks' partial sums. Each result lies behind its item's partial sums. */
static bool sum_in_columns(dc__levels *self, const dc__coll *coll) {
  const dc__tag tag = part_tag(coll);
  char *at = self->scratch;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__range *ranges = &self->ranges[(size_t)i * (size_t)self->blocks];
    const dc__range last = ranges[self->blocks - 1];
    const int32_t dtype = dc__levels_sum_dtype(&coll->items[i]);
    char *sums = sums_of(self, coll, i, &at);
    const int64_t elements = last.begin + align_elements(last.count);
    self->items[i] = (dc__coll_item){.send = sums,
                                     .recv = sums + elements * (int64_t)dc_dtype_size(dtype),
                                     .ranges = ranges,
                                     .total = elements,
                                     .id = coll->items[i].id,
                                     .dtype = dtype,
                                     .recv_dtype = dtype,
                                     .reduce_op = DC_SUM};
  }
  dc__comm_reduce_scatter(self->column, NULL, &tag, self->items, coll->count);
  return levels_check_column(self);
}

static bool levels_reduce(dc__levels *self, const dc__coll *coll) {
  if (!sum_in_blocks(self, coll) || !sum_in_columns(self, coll)) {
    return false;
  }
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const int64_t count = item->ranges[self->head.rank].count;
    void *sum = self->items[i].recv;
    const void *source = sum;
    const dc__reduction result = {.dst = item->recv,
                                  .src = &source,
                                  .count = count,
                                  .dst_dtype = item->recv_dtype,
                                  .src_dtype = self->items[i].dtype,
                                  .n = 1,
                                  .accumulate = item->accumulate != 0};
    if (item->reduce_op == DC_MEAN) {
      dc__divide(sum, result.src_dtype, count, self->head.world);
    }
    if (count > 0) {
      dc__reduce(&result);
    }
  }
  return true;
}

/* ---- all-to-all ---- */

/* Runs the all-to-all in the block. `first` lets its error texts number the ranks as the whole does. */
static void exchange_in_block(dc__levels *self, const dc__coll *coll, const dc__range *ranges, int32_t first) {
  dc__coll near = *coll;
  near.comm = self->block;
  near.first = first;
  near.items[0].ranges = ranges;
  near.tag = part_tag(coll);
  near.tag.number = dc__comm_number(self->block, 1);
  dc__comm_note_request(self->block, 1);
  dc__levels_progress(self, true);
  self->block->ops->run(self->block, &near);
  dc__levels_progress(self, false);
  (void)levels_check_block(self);
}

/* Parts for ranks of other blocks go directly, and those for the own block over shared memory. */
static void levels_all_to_all(dc__levels *self, const dc__coll *coll) {
  const int32_t world = self->head.world, length = self->length, first = self->head.rank - self->head.rank % length;
  dc__range *far = self->ranges, *near = far + 2 * (size_t)world;
  dc__coll direct = *coll;
  direct.items[0].ranges = far;
  memcpy(far, coll->items[0].ranges, 2 * (size_t)world * sizeof *far);
  for (int32_t side = 0; side < 2; side++) {
    for (int32_t i = 0; i < length; i++) {
      dc__range *part = &far[side * world + first + i];
      near[side * length + i] = *part;
      part->count = 0;
    }
  }
  self->whole->ops->run(self->whole, &direct);
  if (dc__comm_check(self->whole) == DC_OK) {
    exchange_in_block(self, coll, near, first);
  }
}

/* ---- the whole ---- */

bool dc__levels_pay(const dc__coll *coll, int32_t length) {
  int64_t direct = 0, partial = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    direct += item->total * (int64_t)dc_dtype_size(item->dtype);
    partial += item->total * (int64_t)dc_dtype_size(dc__levels_sum_dtype(item));
  }
  return coll->kind != DC__COLL_BARRIER && coll->kind != DC__COLL_ALL_TO_ALL && direct > DC__LEVELS_DIRECT_BYTES &&
         (coll->kind != DC__COLL_REDUCE || partial < direct * length);
}

static void run_in_levels(dc__levels *self, const dc__coll *coll) {
  const long long before = atomic_load(&self->column->wire_bytes);
  int64_t bytes = 0;
  if (coll->kind == DC__COLL_REDUCE) {
    plan_sums(self, coll, &bytes);
    if (reserve_sums(self, bytes) != DC_OK) {
      self->head.ops->abort(&self->head, "a rank has no memory for the sums of its machine");
      return;
    }
  }
  bool done = coll->kind == DC__COLL_GATHER   ? levels_gather(self, coll)
              : coll->kind == DC__COLL_REDUCE ? levels_reduce(self, coll)
                                              : levels_broadcast(self, coll);
  if (done) {
    atomic_fetch_add(&self->head.wire_bytes, atomic_load(&self->column->wire_bytes) - before);
  }
}

void dc__levels_run(dc_comm *comm, const dc__coll *coll) {
  dc__levels *self = (dc__levels *)comm;
  dc_comm *whole = self->whole;
  pthread_mutex_lock(&self->collective_mutex);
  if (!dc__levels_pay(coll, self->length)) {
    const long long before = atomic_load(&whole->wire_bytes);
    if (coll->kind == DC__COLL_ALL_TO_ALL) {
      levels_all_to_all(self, coll);
    } else {
      whole->ops->run(whole, coll);
    }
    atomic_fetch_add(&comm->wire_bytes, atomic_load(&whole->wire_bytes) - before);
  } else if (whole->ops->agree(whole, coll, 0)) {
    run_in_levels(self, coll);
  }
  pthread_mutex_unlock(&self->collective_mutex);
  comm->ops->poll(comm);
}
