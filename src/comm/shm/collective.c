/* One collective: publish the call, compare it with the peers' calls, pull the data, signal done. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/shm/shm.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

typedef struct shm_plan {
  dc__shm *self;
  dc__coll coll;     /* with ranges on every item */
  dc_stream *stream; /* moves a device's data; NULL if the calling thread moves it */
  dc__range broadcast[DC__COMM_MAX_LOCAL];
  const dc__shm_request *calls[DC__COMM_MAX_LOCAL];
  bool reduce;
  bool staged;        /* this rank's data is copied to staging memory */
  bool in_place;      /* peers read this rank's data in place */
  bool has_checksums; /* publishes checksums and verifies the peers' */
  uint64_t word;      /* of agree() */
  uint32_t first;     /* the number of the first round */
  int64_t largest;    /* bytes of the largest part */
  int64_t window;     /* bytes of a part that one staging buffer holds */
} shm_plan;

/* ---- plan and staging ---- */

static int64_t window_bytes(const shm_plan *p, int64_t buffer) {
  return p->reduce ? (buffer / p->self->head.world) & ~INT64_C(63)
                   : buffer; /* a reduction stages a part for each rank */
}

/* Whether peers read any data of this rank, and whether all of it lies in the shared heap. */
static void find_shared(const shm_plan *p, bool *has_data, bool *shared) {
  const dc_comm *head = &p->self->head;
  *has_data = false;
  *shared = true;
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    int64_t count = p->reduce ? item->total : item->ranges[head->rank].count;
    if (count > 0) {
      size_t bytes = (size_t)count * dc_dtype_size(item->dtype);
      *has_data = true;
      *shared = *shared && dc__shm_heap_contains(&p->self->group->heap, item->send, bytes);
    }
  }
}

static dc_status plan_collective(shm_plan *p, dc__shm *self, const dc__coll *coll) {
  p->self = self;
  memcpy(&p->coll, coll, offsetof(dc__coll, items) + (size_t)coll->count * sizeof coll->items[0]);
  p->stream = coll->device == NULL ? NULL : coll->device->internal_stream;
  p->reduce = coll->kind == DC__COLL_REDUCE;
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
  if ((p->staged || p->has_checksums) && self->stage == NULL) {
    dc_status status = dc__shm_staging(self->group, self->channel, self->stage_bytes, &self->stage);
    if (status != DC_OK) { /* the error goes to all ranks */
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
      return dc__fail(status, "%s: rank %" PRId32 ": %s", name, self->head.rank, dc_last_error());
    }
  }
  return DC_OK;
}

static void stage_item(const shm_plan *p, char *buffer, const dc__coll_item *item, int32_t rank, int64_t pos,
                       int64_t lo) {
  dc__window_slice s = dc__window_intersect(item, rank, pos, lo, p->window);
  if (s.count > 0) {
    int64_t begin = s.begin + (p->reduce ? item->ranges[rank].begin : 0);
    memcpy(buffer + s.at, dc__bytes_at(item->send, begin, item->dtype), (size_t)s.count * dc_dtype_size(item->dtype));
  }
}

/* Copies this rank's data of the window to staging memory. Plain memcpy keeps it in the cache: peers read it soon. */
static void copy_to_staging(const shm_plan *p, int64_t lo) {
  const dc__shm *self = p->self;
  char *buffer = self->stage + ((self->seq + 1) & 1) * self->stage_bytes;
  for (int32_t r = 0; r < self->head.world; r++) {
    if ((r == self->head.rank) == p->reduce) {
      continue; /* a gather stages this rank's part, a reduction the peers' parts */
    }
    int64_t pos = 0;
    for (int32_t i = 0; i < p->coll.count; i++) {
      stage_item(p, buffer + (p->reduce ? r * p->window : 0), &p->coll.items[i], r, pos, lo);
      pos += dc__item_stride(&p->coll.items[i], r);
    }
  }
}

/* The slice of an item's part that one checksum covers: the window if staged, else all of it. */
static dc__window_slice checksum_slice(const dc__coll_item *item, int32_t rank, bool staged, int64_t pos, int64_t lo,
                                       int64_t size) {
  return staged ? dc__window_intersect(item, rank, pos, lo, size) : (dc__window_slice){0, item->ranges[rank].count, 0};
}

/* Writes the next round's checksums behind the staging buffers. */
static void write_checksums(const shm_plan *p, int64_t lo) {
  const dc__shm *self = p->self;
  uint64_t *sums = dc__shm_checksums(self, self->stage, self->seq + 1);
  for (int32_t r = 0; r < self->head.world; r++) {
    int64_t pos = 0;
    for (int32_t i = 0; i < p->coll.count && (r == self->head.rank) != p->reduce; i++) {
      const dc__coll_item *item = &p->coll.items[i];
      dc__window_slice s = checksum_slice(item, r, p->staged, pos, lo, p->window);
      int64_t begin = s.begin + (p->reduce ? item->ranges[r].begin : 0);
      if (s.count > 0) {
        sums[r * DC__COMM_GROUP + i] = dc__checksum(DC__CHECKSUM, dc__bytes_at(item->send, begin, item->dtype),
                                                    (size_t)s.count * dc_dtype_size(item->dtype));
      }
      pos += dc__item_stride(item, r);
    }
  }
}

static void stage_round(const shm_plan *p, int64_t lo) {
  if (p->staged) {
    copy_to_staging(p, lo);
  }
  if (p->has_checksums && (p->staged || lo == 0)) {
    write_checksums(p, lo);
  }
}

static void publish_call(const shm_plan *p) {
  dc__shm *self = p->self;
  dc__shm_slot *slot = dc__shm_slot_of(self->group, self->channel, self->head.rank);
  dc__shm_request *call = &slot->calls[self->calls & 1];
  uintptr_t base = self->group->bases[self->head.rank];
  dc__signature_fill(&call->call, &self->head, &p->coll, p->word);
  call->staged = p->staged;
  call->has_checksums = p->has_checksums;
  call->stage = (uint64_t)((uintptr_t)self->stage - base);
  for (int32_t i = 0; i < p->coll.count; i++) {
    call->addresses[i] = (uint64_t)((uintptr_t)p->coll.items[i].send - base);
  }
  atomic_store_explicit(&slot->last_op, p->coll.tag.op, memory_order_relaxed);
  atomic_store_explicit(&slot->last_id, p->coll.tag.id, memory_order_relaxed);
}

static dc_status post_and_wait(const shm_plan *p) {
  dc__shm *self = p->self;
  dc__shm_slot *slot = dc__shm_slot_of(self->group, self->channel, self->head.rank);
  dc__shm_signal(self->group, &slot->posted, ++self->seq);
  return dc__shm_wait_posted(self, &p->coll, self->seq);
}

/* ---- transfer ---- */

/* Address of slice s of rank `part`'s part of an item, in the memory of rank `from`. */
static const void *source_ptr(const shm_plan *p, int32_t from, int32_t item, int32_t part, const dc__window_slice *s) {
  const dc__shm *self = p->self;
  const dc__coll_item *own = &p->coll.items[item];
  int64_t begin = s->begin + (p->reduce ? own->ranges[part].begin : 0);
  if (from == self->head.rank) {
    return dc__bytes_at(own->send, begin, own->dtype);
  }
  const dc__shm_request *call = p->calls[from];
  uintptr_t base = self->group->bases[from];
  if (call->staged) {
    uintptr_t buffer = base + call->stage + (self->seq & 1) * self->stage_bytes;
    return (const char *)buffer + (p->reduce ? part * p->window : 0) + s->at;
  }
  return dc__bytes_at((const void *)(base + call->addresses[item]), begin, own->dtype);
}

/* Returns the bytes read from other ranks. */
static int64_t gather_part(const shm_plan *p, int32_t from, int64_t lo, int64_t size) {
  int64_t moved = 0;
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    dc__window_slice s = dc__window_intersect(item, from, pos, lo, size);
    pos += dc__item_stride(item, from);
    if (s.count > 0) {
      const void *src = source_ptr(p, from, i, from, &s);
      char *dst = (char *)item->recv + (item->ranges[from].begin + s.begin) * (int64_t)dc_dtype_size(item->dtype);
      size_t bytes = (size_t)s.count * dc_dtype_size(item->dtype);
      if (src != dst) {
        dc__internal_copy(p->stream, dst, src, bytes);
      }
      moved += from == p->self->head.rank ? 0 : (int64_t)bytes;
    }
  }
  return moved;
}

static int64_t reduce_own_part(const shm_plan *p, int64_t lo, int64_t size) {
  const dc_comm *head = &p->self->head;
  int64_t moved = 0;
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    dc__window_slice s = dc__window_intersect(item, head->rank, pos, lo, size);
    pos += dc__item_stride(item, head->rank);
    if (s.count > 0) {
      const void *src[DC__COMM_MAX_LOCAL];
      for (int32_t r = 0; r < head->world; r++) {
        src[r] = source_ptr(p, r, i, head->rank, &s);
      }
      char *dst = (char *)item->recv + s.begin * (int64_t)dc_dtype_size(item->recv_dtype);
      const dc__reduction sum = dc__item_reduction(item, dst, src, head->world, s.count);
      dc__internal_reduce(p->stream, &sum);
      moved += s.count * (int64_t)dc_dtype_size(item->dtype) * (head->world - 1);
    }
  }
  return moved;
}

/* Verifies what was read from a rank: staged data in every round, data read in place after the last round. So memory
 * that its rank changed during the reads is found. */
static dc_status verify_part(const shm_plan *p, int32_t from, int64_t lo, int64_t size) {
  const dc__shm *self = p->self;
  const dc__shm_request *call = p->calls[from];
  int32_t part = p->reduce ? self->head.rank : from;
  const char *stage = (const char *)(self->group->bases[from] + call->stage);
  const uint64_t *sums = dc__shm_checksums(self, stage, call->staged ? self->seq : p->first) + part * DC__COMM_GROUP;
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll.count && (call->staged || lo + size >= p->largest); i++) {
    const dc__coll_item *item = &p->coll.items[i];
    dc__window_slice s = checksum_slice(item, part, call->staged, pos, lo, size);
    size_t bytes = (size_t)s.count * dc_dtype_size(item->dtype);
    if (bytes > 0 && dc__checksum(DC__CHECKSUM, source_ptr(p, from, i, part, &s), bytes) != sums[i]) {
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, p->coll.tag.op, item->id);
      int64_t begin = item->ranges[part].begin + s.begin;
      return dc__fail(DC_E_CORRUPT,
                      "%s: what rank %" PRId32 " read from rank %" PRId32
                      " is not what that rank offered: elements %" PRId64 " to %" PRId64 " (%s) have another checksum",
                      name, self->head.rank, from, begin, begin + s.count, dc_dtype_name(item->dtype));
    }
    pos += dc__item_stride(item, part);
  }
  return DC_OK;
}

static dc_status verify_window(const shm_plan *p, int64_t lo, int64_t size) {
  for (int32_t r = 0; r < p->self->head.world && p->has_checksums; r++) {
    if (r != p->self->head.rank && p->calls[r]->has_checksums) {
      DC__TRY(verify_part(p, r, lo, size));
    }
  }
  return DC_OK;
}

/* The ranks of a failed group may free memory that peers read. So a reader sets `reading` before it checks for failure,
 * and a failing rank sets the failure before it checks `reading` (dc__shm_wait_readers). */
static dc_status transfer_window(const shm_plan *p, int64_t lo, int64_t size) {
  dc_comm *head = &p->self->head;
  dc__shm_slot *slot = dc__shm_slot_of(p->self->group, p->self->channel, head->rank);
  int64_t moved = 0;
  atomic_store(&slot->reading, 1);
  if (atomic_load(&p->self->group->control->failed) != DC__SHM_HEALTHY) {
    atomic_store(&slot->reading, 0);
    return dc__shm_group_check(p->self->group);
  }
  if (p->reduce) {
    moved = reduce_own_part(p, lo, size);
  } else {
    for (int32_t i = 1; i <= head->world; i++) { /* starts at its neighbour, so that reads spread */
      moved += gather_part(p, (head->rank + i) % head->world, lo, size);
    }
  }
  dc_status status = dc__stream_sync(p->stream, 0);
  status = status != DC_OK ? status : verify_window(p, lo, size);
  atomic_store(&slot->reading, 0);
  atomic_fetch_add_explicit(&head->wire_bytes, moved, memory_order_relaxed);
  return status;
}

/* Enables this rank's device to read a peer's data on another device. */
static dc_status check_peer_access(const shm_plan *p, int32_t from) {
  const dc_device *device = p->coll.device;
  const dc__shm_request *call = p->calls[from];
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    int64_t count = item->ranges[p->reduce ? p->self->head.rank : from].count;
    dc_status status = count == 0 ? DC_OK
                                  : device->ops->enable_peer_access(p->coll.device, call->call.memory_space,
                                                                    (const void *)(uintptr_t)call->addresses[i]);
    if (status != DC_OK) {
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, p->coll.tag.op, item->id);
      return dc__fail(status, "%s: rank %" PRId32 " and rank %" PRId32 ": %s", name, p->self->head.rank, from,
                      dc_last_error());
    }
  }
  return DC_OK;
}

static dc_status check_all_peer_access(const shm_plan *p) {
  for (int32_t r = 0; r < p->self->head.world && p->stream != NULL; r++) {
    if (p->calls[r]->call.memory_space != p->coll.device->memory_space) {
      DC__TRY(check_peer_access(p, r));
    }
  }
  return DC_OK;
}

/* Publishes the call, waits for the peers' calls and compares them. */
static dc_status shm_handshake(shm_plan *p) {
  dc__shm *self = p->self;
  self->calls++;
  stage_round(p, 0);
  publish_call(p);
  DC__TRY(post_and_wait(p));
  const dc__signature *calls[DC__COMM_MAX_LOCAL];
  for (int32_t r = 0; r < self->head.world; r++) {
    p->calls[r] = &dc__shm_slot_of(self->group, self->channel, r)->calls[self->calls & 1];
    calls[r] = &p->calls[r]->call;
  }
  return dc__signature_compare(self->head.rank, self->head.world, calls);
}

static dc_status shm_run_collective(dc__shm *self, const dc__coll *coll) {
  shm_plan p;
  DC__TRY(plan_collective(&p, self, coll));
  DC__TRY(shm_handshake(&p));
  DC__TRY(check_all_peer_access(&p));
  bool any_staged = false;
  for (int32_t r = 0; r < self->head.world; r++) {
    any_staged = any_staged || p.calls[r]->staged;
  }
  int64_t size = any_staged ? p.window : INT64_MAX / 2;
  for (int64_t lo = 0; lo < p.largest; lo += size) {
    if (lo > 0) {
      stage_round(&p, lo);
      DC__TRY(post_and_wait(&p));
    }
    DC__TRY(transfer_window(&p, lo, size));
  }
  dc__shm_slot *slot = dc__shm_slot_of(self->group, self->channel, self->head.rank);
  dc__shm_signal(self->group, &slot->done, self->seq);
  return p.in_place ? dc__shm_wait_done(self, coll, self->seq) : DC_OK;
}

/* A handshake without data. */
static dc_status run_agree(dc__shm *self, const dc__coll *coll, uint64_t word, bool *same) {
  shm_plan p = {.self = self, .word = word};
  memcpy(&p.coll, coll, offsetof(dc__coll, items) + (size_t)coll->count * sizeof coll->items[0]);
  p.coll.device = NULL; /* each rank's data lies on its own card */
  DC__TRY(shm_handshake(&p));
  *same = true;
  for (int32_t r = 0; r < self->head.world; r++) {
    *same = *same && p.calls[r]->call.word == word;
  }
  dc__shm_signal(self->group, &dc__shm_slot_of(self->group, self->channel, self->head.rank)->done, self->seq);
  return DC_OK;
}

static void shm_finish_collective(dc__shm *self, dc_status status) {
  if (status != DC_OK) {
    dc__shm_group_fail(self->group, status);
    dc__shm_wait_readers(self);
    dc__comm_fail(&self->head, dc__shm_group_check(self->group)); /* the same error on every rank */
  }
  pthread_mutex_unlock(&self->collective_mutex);
}

void dc__shm_run(dc_comm *comm, const dc__coll *coll) {
  dc__shm *self = (dc__shm *)comm;
  pthread_mutex_lock(&self->collective_mutex);
  shm_finish_collective(self, shm_run_collective(self, coll));
}

bool dc__shm_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__shm *self = (dc__shm *)comm;
  bool same = false;
  pthread_mutex_lock(&self->collective_mutex);
  shm_finish_collective(self, run_agree(self, coll, word, &same));
  return same;
}
