/* One rank of an imagined group, on the counting device. Collectives move nothing; their bytes and time are counted. If
 * the host reads their results, the other ranks are assumed to have this rank's values. */
#include <inttypes.h>
#include <string.h>

#include "comm/levels/levels.h"

typedef struct count_comm {
  dc_comm head;
  dc_device *device;
  bool heap;           /* peers read shards in place from a heap, as in shared memory and through NCCL */
  int32_t first, step; /* rank i is rank first + i * step of the machine; parts of a group need not be neighbours */
  int32_t length;      /* ranks in a block of one node, if collectives run in two levels; else 1 */
} count_comm;

/* Bytes that this rank receives, from ranks of its node and from others. */
typedef struct received {
  int64_t node, network;
} received;

static bool count_same_node(const count_comm *self, int32_t a, int32_t b) {
  const int64_t ranks = dc__count_get(self->device, DC__COUNT_NODE_RANKS);
  const int64_t from = self->first + (int64_t)a * self->step, to = self->first + (int64_t)b * self->step;
  return ranks == 0 || from / ranks == to / ranks;
}

/* Finds the same blocks as dc__comm_create_levels(). A heap stands for shared memory or NCCL, which have no levels. */
static int32_t count_block_length(const count_comm *self) {
  const int32_t world = self->head.world;
  if (self->heap || count_same_node(self, 0, world - 1)) {
    return 1;
  }
  for (int32_t length = DC__COMM_MAX_LOCAL; length > 1; length /= 2) {
    bool fits = world % length == 0;
    for (int32_t first = 0; first < world && fits; first += length) {
      fits = count_same_node(self, first, first + length - 1);
    }
    if (fits) {
      return length;
    }
  }
  return 1;
}

/* Whether a part arrives from within the node. In two levels an all-to-all reaches other blocks over the network. */
static bool count_is_near(const count_comm *self, const dc__coll *coll, int32_t from) {
  const int32_t rank = self->head.rank, length = self->length;
  return coll->kind == DC__COLL_ALL_TO_ALL && length > 1 ? from / length == rank / length
                                                         : count_same_node(self, from, rank);
}

static int64_t *link_from(const count_comm *self, const dc__coll *coll, received *bytes, int32_t from) {
  return count_is_near(self, coll, from) ? &bytes->node : &bytes->network;
}

/* Counts as the other transports move data: each rank reads its part from every other one. */
static received count_received(const count_comm *self, const dc__coll *coll) {
  const int32_t rank = self->head.rank, world = self->head.world;
  received bytes = {0, 0};
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (coll->kind == DC__COLL_BROADCAST && coll->root != rank) {
      *link_from(self, coll, &bytes, coll->root) += item->total * (int64_t)dc_dtype_size(item->dtype);
    }
    for (int32_t from = 0; from < world && item->ranges != NULL; from++) {
      const int32_t range = coll->kind == DC__COLL_REDUCE       ? rank
                            : coll->kind == DC__COLL_ALL_TO_ALL ? world + from
                                                                : from;
      if (from != rank) {
        *link_from(self, coll, &bytes, from) += item->ranges[range].count * (int64_t)dc_dtype_size(item->dtype);
      }
    }
  }
  return bytes;
}

/* Counts in two levels. A rank's column crosses the network; its block stays in the node, once for each block's part of
 * an item. A reduction's column adds the blocks' partial sums. */
static received count_received_in_levels(const count_comm *self, const dc__coll *coll) {
  const int32_t rank = self->head.rank, length = self->length, place = rank % length;
  received bytes = {0, 0};
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    const int64_t size = (int64_t)dc_dtype_size(item->dtype);
    if (coll->kind == DC__COLL_BROADCAST) {
      const bool in_column = place == coll->root % length && rank != coll->root;
      bytes.network += in_column ? item->total * size : 0;
      bytes.node += place != coll->root % length ? item->total * size : 0;
    }
    for (int32_t from = 0; from < self->head.world && item->ranges != NULL; from++) {
      const bool in_column = from % length == place;
      if (coll->kind == DC__COLL_REDUCE) {
        bytes.node += in_column ? (length - 1) * item->ranges[from].count * size : 0;
        bytes.network += in_column && from != rank
                             ? item->ranges[rank].count * (int64_t)dc_dtype_size(dc__levels_sum_dtype(item))
                             : 0;
      } else if (from != rank) {
        *(in_column ? &bytes.network : &bytes.node) += item->ranges[from].count * size;
      }
    }
  }
  return bytes;
}

/* Both kinds of links work at the same time, except in two levels. A single rank waits for none. */
static int64_t count_time(const count_comm *self, const received *bytes, bool in_levels) {
  if (self->head.world == 1) {
    return 0;
  }
  int64_t node = dc__count_get(self->device, DC__COUNT_NODE_NS) +
                 dc__count_duration(self->device, DC__COUNT_NODE_RATE, bytes->node);
  int64_t network = dc__count_get(self->device, DC__COUNT_NETWORK_NS) +
                    dc__count_duration(self->device, DC__COUNT_NETWORK_RATE, bytes->network);
  network = count_same_node(self, 0, self->head.world - 1) ? 0 : network;
  return in_levels ? node + network : node > network ? node : network;
}

static void fill_host_item(const count_comm *self, const dc__coll_item *item) {
  size_t size = dc_dtype_size(item->dtype);
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    const dc__range *range = &item->ranges[rank];
    int64_t own = item->ranges[self->head.rank].count;
    if (range->count > 0) {
      memmove((char *)item->recv + (size_t)range->begin * size, item->send,
              (size_t)(range->count < own ? range->count : own) * size);
    }
  }
}

/* Assumes that the others' parts equal this rank's part for itself. */
static void fill_all_to_all(const count_comm *self, const dc__coll_item *item) {
  const size_t size = dc_dtype_size(item->dtype);
  const dc__range own = item->ranges[self->head.rank];
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    const dc__range *range = &item->ranges[self->head.world + rank];
    if (range->count > 0 && own.count > 0) {
      memcpy((char *)item->recv + (size_t)range->begin * size, (const char *)item->send + (size_t)own.begin * size,
             (size_t)(range->count < own.count ? range->count : own.count) * size);
    }
  }
}

static void count_run(dc_comm *comm, const dc__coll *coll) {
  count_comm *self = (count_comm *)comm;
  const bool exchange = coll->kind == DC__COLL_ALL_TO_ALL;
  const bool in_levels = self->length > 1 && dc__levels_pay(coll, self->length);
  const bool only_network = in_levels || (self->length > 1 && exchange);
  const received bytes = in_levels ? count_received_in_levels(self, coll) : count_received(self, coll);
  for (int32_t i = 0; coll->kind == DC__COLL_GATHER && coll->device == NULL && i < coll->count; i++) {
    fill_host_item(self, &coll->items[i]);
  }
  dc__op_timing_begin_on(coll->tag.span, coll->stream);
  dc__count_work_on_link(self->device, coll->stream, count_time(self, &bytes, in_levels));
  dc__op_timing_end_on(coll->tag.span, coll->stream);
  dc__count_add(self->device, DC__COUNT_NODE_BYTES, bytes.node);
  dc__count_add(self->device, DC__COUNT_NETWORK_BYTES, bytes.network);
  dc__count_add(self->device, DC__COUNT_COLLECTIVES, 1);
  if (exchange && coll->device == NULL) {
    fill_all_to_all(self, &coll->items[0]);
  }
  atomic_fetch_add_explicit(&comm->wire_bytes, only_network ? bytes.network : bytes.node + bytes.network,
                            memory_order_relaxed);
}

static void count_abort(dc_comm *comm, const char *reason) {
  dc__comm_fail(comm, dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group: %.300s", comm->rank,
                               reason != NULL ? reason : "no reason given"));
}

static dc_status count_heap_alloc(dc_comm *comm, size_t bytes, void **ptr) {
  dc_device *device = ((count_comm *)comm)->device;
  return device->ops->alloc(device, bytes, DC_MEMORY_DEVICE, ptr);
}

static void count_heap_free(dc_comm *comm, void *ptr, size_t bytes) {
  dc_device *device = ((count_comm *)comm)->device;
  device->ops->free(device, ptr, bytes, DC_MEMORY_DEVICE);
}

static bool count_peer_accessible(dc_comm *comm, const void *ptr, size_t bytes) {
  (void)comm;
  (void)ptr;
  (void)bytes;
  return true;
}

static void count_choose_ops(count_comm *self);

static dc_status count_split_even(dc_comm *comm, int32_t first, int32_t step, int32_t world, dc_comm **part) {
  const count_comm *self = (const count_comm *)comm;
  DC__TRY(dc__comm_create_count(self->device, (comm->rank - first) / step, world, self->heap, part));
  count_comm *own = (count_comm *)*part;
  own->first = self->first + first * self->step;
  own->step = step * self->step;
  count_choose_ops(own);
  return DC_OK;
}

static dc_status count_dup(dc_comm *comm, dc_comm **copy) {
  return count_split_even(comm, 0, 1, comm->world, copy);
}

static void count_comm_destroy(dc_comm *comm) {
  dc_device *device = ((count_comm *)comm)->device;
  dc__comm_head_destroy(comm);
  dc__free(comm);
  dc__device_release(device);
}

#define COUNT_OPS                                                                                                    \
  .name = "count", .all_gather = dc__host_all_gather, .reduce_scatter = dc__host_reduce_scatter,                     \
  .broadcast = dc__host_broadcast, .all_to_all = dc__host_all_to_all, .barrier = dc__host_barrier, .dup = count_dup, \
  .split_even = count_split_even, .abort = count_abort, .run = count_run, .destroy = count_comm_destroy

static const dc__comm_ops with_heap = {COUNT_OPS, .heap_alloc = count_heap_alloc, .heap_free = count_heap_free,
                                       .peer_accessible = count_peer_accessible};
static const dc__comm_ops without_heap = {COUNT_OPS};
static const dc__comm_ops with_block_heap = {COUNT_OPS, .heap_alloc = count_heap_alloc, .heap_free = count_heap_free};

/* In two levels the heap belongs to the block, and other blocks cannot read it. */
static void count_choose_ops(count_comm *self) {
  self->length = count_block_length(self);
  self->head.ops = self->heap ? &with_heap : self->length > 1 ? &with_block_heap : &without_heap;
}

dc_status dc__comm_create_count(dc_device *device, int32_t rank, int32_t world, bool heap, dc_comm **comm) {
  count_comm *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &without_heap, rank, world, INT64_MAX / 4);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  self->head.stream_ordered = true;
  self->head.supports_device = true;
  self->head.memory_space = device->memory_space;
  self->head.device = device;
  self->device = dc__device_retain(device);
  self->heap = heap;
  self->step = 1;
  count_choose_ops(self);
  *comm = &self->head;
  return DC_OK;
}
