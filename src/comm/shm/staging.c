/* Plans a collective, and copies to staging memory what peers cannot read in place. */
#include <inttypes.h>
#include <string.h>

#include "comm/shm/collective.h"
#include "kernels/kernels.h"

static int64_t window_bytes(const dc__shm_plan *p, int64_t buffer) {
  return p->has_parts ? (buffer / p->self->head.world) & ~INT64_C(63) : buffer; /* a gather stages one part */
}

/* Whether peers read any data of this rank, and whether all of it lies in the shared heap. */
static void find_shared(const dc__shm_plan *p, bool *has_data, bool *shared) {
  const dc_comm *head = &p->self->head;
  *has_data = false;
  *shared = true;
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    int64_t count = p->has_parts ? item->total : item->ranges[head->rank].count;
    if (count > 0) {
      size_t bytes = (size_t)count * dc_dtype_size(item->dtype);
      *has_data = true;
      *shared = *shared && dc__shm_heap_contains(&p->self->group->heap, item->send, bytes);
    }
  }
}

dc_status dc__shm_plan_collective(dc__shm_plan *p, dc__shm *self, const dc__coll *coll) {
  p->self = self;
  memcpy(&p->coll, coll, offsetof(dc__coll, items) + (size_t)coll->count * sizeof coll->items[0]);
  p->stream = coll->device == NULL ? NULL : coll->device->internal_stream;
  p->has_parts = coll->kind == DC__COLL_REDUCE || coll->kind == DC__COLL_ALL_TO_ALL;
  int32_t world = self->head.world;
  if (coll->kind == DC__COLL_BROADCAST) { /* a gather in which only the root has a part */
    memset(p->broadcast, 0, sizeof p->broadcast[0] * (size_t)world);
    p->broadcast[coll->root].count = coll->items[0].total;
    p->coll.items[0].ranges = p->broadcast;
  }
  p->largest = dc__max_part_bytes(&p->coll, world);
  bool has_data;
  bool shared;
  find_shared(p, &has_data, &shared);
  /* Device memory is read in place and without checksums, because the host cannot access it. */
  p->staged = world > 1 && p->stream == NULL && (p->largest <= window_bytes(p, DC__SHM_EAGER_BYTES) || !shared);
  p->in_place = world > 1 && has_data && !p->staged;
  p->window = window_bytes(p, (int64_t)self->stage_bytes);
  p->has_checksums =
      world > 1 && p->stream == NULL && atomic_load_explicit(&self->group->checksums, memory_order_relaxed) != 0;
  p->first = self->seq + 1;
  p->has_counts = world > 1 && coll->kind == DC__COLL_ALL_TO_ALL;
  if ((p->staged || p->has_checksums || p->has_counts) && self->stage == NULL) {
    dc_status status = dc__shm_staging(self->group, self->channel, self->stage_bytes, &self->stage);
    if (status != DC_OK) { /* the error goes to all ranks */
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
      return dc__fail(status, "%s: rank %" PRId32 ": %s", name, self->head.rank, dc_last_error());
    }
  }
  return DC_OK;
}

static void stage_item(const dc__shm_plan *p, char *buffer, const dc__coll_item *item, int32_t rank, int64_t pos,
                       int64_t lo) {
  dc__window_slice s = dc__window_intersect(item, rank, pos, lo, p->window);
  if (s.count > 0) {
    int64_t begin = s.begin + (p->has_parts ? item->ranges[rank].begin : 0);
    memcpy(buffer + s.at, dc__bytes_at(item->send, begin, item->dtype), (size_t)s.count * dc_dtype_size(item->dtype));
  }
}

/* Copies this rank's data of the window to staging memory. Plain memcpy keeps it in the cache: peers read it soon. */
static void copy_to_staging(const dc__shm_plan *p, int64_t lo) {
  const dc__shm *self = p->self;
  char *buffer = self->stage + ((self->seq + 1) & 1) * self->stage_bytes;
  for (int32_t r = 0; r < self->head.world; r++) {
    if ((r == self->head.rank) == p->has_parts) {
      continue; /* a gather stages this rank's part, others the peers' parts */
    }
    int64_t pos = 0;
    for (int32_t i = 0; i < p->coll.count; i++) {
      stage_item(p, buffer + (p->has_parts ? r * p->window : 0), &p->coll.items[i], r, pos, lo);
      pos += dc__item_stride(&p->coll.items[i], r);
    }
  }
}

dc__window_slice dc__shm_checksum_slice(const dc__coll_item *item, int32_t range, bool staged, int64_t pos, int64_t lo,
                                        int64_t size) {
  return staged ? dc__window_intersect(item, range, pos, lo, size)
                : (dc__window_slice){0, item->ranges[range].count, 0};
}

/* Writes the next round's checksums behind the staging buffers. */
static void write_checksums(const dc__shm_plan *p, int64_t lo) {
  const dc__shm *self = p->self;
  uint64_t *sums = dc__shm_checksums(self, self->stage, self->seq + 1);
  for (int32_t r = 0; r < self->head.world; r++) {
    int64_t pos = 0;
    for (int32_t i = 0; i < p->coll.count && (r == self->head.rank) != p->has_parts; i++) {
      const dc__coll_item *item = &p->coll.items[i];
      dc__window_slice s = dc__shm_checksum_slice(item, r, p->staged, pos, lo, p->window);
      int64_t begin = s.begin + (p->has_parts ? item->ranges[r].begin : 0);
      if (s.count > 0) {
        sums[r * DC__COMM_GROUP + i] = dc__checksum(DC__CHECKSUM, dc__bytes_at(item->send, begin, item->dtype),
                                                    (size_t)s.count * dc_dtype_size(item->dtype));
      }
      pos += dc__item_stride(item, r);
    }
  }
}

static uint64_t hash_part(int32_t from, int32_t to, int64_t count) {
  return dc__digest_add(dc__digest_add(1, (uint64_t)from << 32 | (uint32_t)to), (uint64_t)count);
}

/* Writes the sizes of an all-to-all's parts: to each rank, and from it. */
static void write_parts(const dc__shm_plan *p) {
  const dc__shm *self = p->self;
  const int32_t world = self->head.world, rank = self->head.rank;
  const dc__range *ranges = p->coll.items[0].ranges;
  uint64_t *words = dc__shm_checksums(self, self->stage, self->seq + 1), sum = 0;
  for (int32_t r = 0; r < world; r++) {
    uint64_t *part = words + (size_t)r * DC__COMM_GROUP;
    part[DC__SHM_PART_BEGIN] = (uint64_t)ranges[r].begin;
    part[DC__SHM_PART_SENT] = (uint64_t)ranges[r].count;
    part[DC__SHM_PART_EXPECTED] = (uint64_t)ranges[world + r].count;
    sum += hash_part(rank, r, ranges[r].count) - hash_part(r, rank, ranges[world + r].count);
  }
  words[DC__SHM_PARTS_SUM] = sum;
  words[DC__SHM_PARTS_LARGEST] = (uint64_t)p->largest;
}

void dc__shm_stage_round(const dc__shm_plan *p, int64_t lo) {
  if (p->staged) {
    copy_to_staging(p, lo);
  }
  if (p->has_checksums && (p->staged || lo == 0)) {
    write_checksums(p, lo);
  }
  if (p->has_counts && lo == 0) {
    write_parts(p);
  }
}
