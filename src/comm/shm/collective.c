/* One collective: publish the call, compare it with the peers' calls, pull the data, signal done. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/shm/collective.h"
#include "kernels/kernels.h"

static void publish_call(const dc__shm_plan *p) {
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

static dc_status post_and_wait(const dc__shm_plan *p) {
  dc__shm *self = p->self;
  dc__shm_slot *slot = dc__shm_slot_of(self->group, self->channel, self->head.rank);
  dc__shm_signal(self->group, &slot->posted, ++self->seq);
  return dc__shm_wait_posted(self, &p->coll, self->seq);
}

/* ---- transfer ---- */

/* Which of an item's ranges this rank reads from rank `from`. */
static int32_t range_from(const dc__shm_plan *p, int32_t from) {
  const dc_comm *head = &p->self->head;
  return p->coll.kind == DC__COLL_REDUCE ? head->rank : p->coll.kind == DC__COLL_ALL_TO_ALL ? head->world + from : from;
}

/* The address of slice s of an item's data that this rank reads, in the memory of rank `from`. */
static const void *source_ptr(const dc__shm_plan *p, int32_t from, int32_t item, const dc__window_slice *s) {
  const dc__shm *self = p->self;
  const dc__coll_item *own = &p->coll.items[item];
  const int64_t part = p->has_counts ? p->begins[from] : p->has_parts ? own->ranges[self->head.rank].begin : 0;
  const int64_t begin = part + s->begin;
  if (from == self->head.rank) {
    return dc__bytes_at(own->send, begin, own->dtype);
  }
  const dc__shm_request *call = p->calls[from];
  uintptr_t base = self->group->bases[from];
  if (call->staged) {
    uintptr_t buffer = base + call->stage + (self->seq & 1) * self->stage_bytes;
    return (const char *)buffer + (p->has_parts ? self->head.rank * p->window : 0) + s->at;
  }
  return dc__bytes_at((const void *)(base + call->addresses[item]), begin, own->dtype);
}

/* Returns the bytes read from other ranks. */
static int64_t gather_part(const dc__shm_plan *p, int32_t from, int64_t lo, int64_t size) {
  int64_t moved = 0;
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    const int32_t range = range_from(p, from);
    dc__window_slice s = dc__window_intersect(item, range, pos, lo, size);
    pos += dc__item_stride(item, range);
    if (s.count > 0) {
      const void *src = source_ptr(p, from, i, &s);
      char *dst = (char *)item->recv + (item->ranges[range].begin + s.begin) * (int64_t)dc_dtype_size(item->dtype);
      size_t bytes = (size_t)s.count * dc_dtype_size(item->dtype);
      if (src != dst) {
        dc__internal_copy(p->stream, dst, src, bytes);
      }
      moved += from == p->self->head.rank ? 0 : (int64_t)bytes;
    }
  }
  return moved;
}

static int64_t reduce_own_part(const dc__shm_plan *p, int64_t lo, int64_t size) {
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
        src[r] = source_ptr(p, r, i, &s);
      }
      char *dst = (char *)item->recv + s.begin * (int64_t)dc_dtype_size(item->recv_dtype);
      const dc__reduction sum = dc__item_reduction(item, dst, src, head->world, s.count);
      dc__internal_reduce(p->stream, &sum);
      moved += s.count * (int64_t)dc_dtype_size(item->dtype) * (head->world - 1);
    }
  }
  return moved;
}

/* Verifies the data read from a rank: staged data in every round, data read in place after the last round. That finds
 * data that its rank changed during the reads. */
static dc_status verify_part(const dc__shm_plan *p, int32_t from, int64_t lo, int64_t size) {
  const dc__shm *self = p->self;
  const dc__shm_request *call = p->calls[from];
  const int32_t part = p->has_parts ? self->head.rank : from, range = range_from(p, from);
  const char *stage = (const char *)(self->group->bases[from] + call->stage);
  const uint64_t *sums = dc__shm_checksums(self, stage, call->staged ? self->seq : p->first) + part * DC__COMM_GROUP;
  int64_t pos = 0;
  for (int32_t i = 0; i < p->coll.count && (call->staged || lo + size >= p->largest); i++) {
    const dc__coll_item *item = &p->coll.items[i];
    dc__window_slice s = dc__shm_checksum_slice(item, range, call->staged, pos, lo, size);
    size_t bytes = (size_t)s.count * dc_dtype_size(item->dtype);
    if (bytes > 0 && dc__checksum(DC__CHECKSUM, source_ptr(p, from, i, &s), bytes) != sums[i]) {
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, p->coll.tag.op, item->id);
      int64_t begin = item->ranges[range].begin + s.begin;
      return dc__fail(DC_E_CORRUPT,
                      "%s: what rank %" PRId32 " read from rank %" PRId32
                      " is not what that rank offered: elements %" PRId64 " to %" PRId64 " (%s) have another checksum",
                      name, self->head.rank, from, begin, begin + s.count, dc_dtype_name(item->dtype));
    }
    pos += dc__item_stride(item, range);
  }
  return DC_OK;
}

static dc_status verify_window(const dc__shm_plan *p, int64_t lo, int64_t size) {
  for (int32_t r = 0; r < p->self->head.world && p->has_checksums; r++) {
    if (r != p->self->head.rank && p->calls[r]->has_checksums) {
      DC__TRY(verify_part(p, r, lo, size));
    }
  }
  return DC_OK;
}

/* The ranks of a failed group may free memory that peers read. So a reader sets `reading` before it checks for failure,
 * and a failing rank sets the failure before it checks `reading` (dc__shm_wait_readers). */
static dc_status transfer_window(const dc__shm_plan *p, int64_t lo, int64_t size) {
  dc_comm *head = &p->self->head;
  dc__shm_slot *slot = dc__shm_slot_of(p->self->group, p->self->channel, head->rank);
  int64_t moved = 0;
  atomic_store(&slot->reading, 1);
  if (atomic_load(&p->self->group->control->failed) != DC__SHM_HEALTHY) {
    atomic_store(&slot->reading, 0);
    return dc__shm_group_check(p->self->group);
  }
  if (p->coll.kind == DC__COLL_REDUCE) {
    moved = reduce_own_part(p, lo, size);
  } else {
    for (int32_t i = 1; i <= head->world; i++) { /* starts at the next rank, so that the reads spread */
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
static dc_status check_peer_access(const dc__shm_plan *p, int32_t from) {
  const dc_device *device = p->coll.device;
  const dc__shm_request *call = p->calls[from];
  for (int32_t i = 0; i < p->coll.count; i++) {
    const dc__coll_item *item = &p->coll.items[i];
    int64_t count = item->ranges[range_from(p, from)].count;
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

static dc_status check_all_peer_access(const dc__shm_plan *p) {
  for (int32_t r = 0; r < p->self->head.world && p->stream != NULL; r++) {
    if (p->calls[r]->call.memory_space != p->coll.device->memory_space) {
      DC__TRY(check_peer_access(p, r));
    }
  }
  return DC_OK;
}

/* Publishes the call, waits for the peers' calls and compares them. */
static dc_status shm_handshake(dc__shm_plan *p) {
  dc__shm *self = p->self;
  self->calls++;
  dc__shm_stage_round(p, 0);
  publish_call(p);
  DC__TRY(post_and_wait(p));
  const dc__signature *calls[DC__COMM_MAX_LOCAL];
  p->in_rounds = false;
  for (int32_t r = 0; r < self->head.world; r++) {
    p->calls[r] = &dc__shm_slot_of(self->group, self->channel, r)->calls[self->calls & 1];
    p->in_rounds = p->in_rounds || p->calls[r]->staged;
    calls[r] = &p->calls[r]->call;
  }
  return dc__signature_compare(self->head.rank, self->head.world, calls);
}

/* All ranks find the same difference. */
static dc_status find_other_part(const dc__shm_plan *p, const uint64_t *const *words) {
  const int32_t world = p->self->head.world;
  for (int32_t i = 0; i < world * world; i++) {
    const int32_t from = i / world, to = i % world;
    const int64_t sent = (int64_t)words[from][to * DC__COMM_GROUP + DC__SHM_PART_SENT];
    const int64_t expected = (int64_t)words[to][from * DC__COMM_GROUP + DC__SHM_PART_EXPECTED];
    if (sent != expected) {
      return dc__coll_fail_counts(&p->coll, from, sent, to, expected);
    }
  }
  return DC_OK;
}

/* Compares the sizes of an all-to-all, after the handshake. Each rank checks its own parts and the sum of all ranks'
 * hashes, which is faster than reading all parts. */
static dc_status compare_parts(dc__shm_plan *p) {
  const dc__shm *self = p->self;
  const int32_t rank = self->head.rank, world = self->head.world;
  const uint64_t *words[DC__COMM_MAX_LOCAL];
  uint64_t sum = 0;
  bool same = true;
  p->in_rounds = false;
  for (int32_t r = 0; r < world; r++) {
    words[r] = dc__shm_checksums(self, (const char *)(self->group->bases[r] + p->calls[r]->stage), p->first);
    const uint64_t *part = words[r] + (size_t)rank * DC__COMM_GROUP;
    const int64_t largest = (int64_t)words[r][DC__SHM_PARTS_LARGEST];
    p->begins[r] = (int64_t)part[DC__SHM_PART_BEGIN];
    p->largest = largest > p->largest ? largest : p->largest;
    p->in_rounds = p->in_rounds || (p->calls[r]->staged && largest > p->window);
    sum += words[r][DC__SHM_PARTS_SUM];
    same = same && (int64_t)part[DC__SHM_PART_SENT] == p->coll.items[0].ranges[world + r].count;
  }
  return same && sum == 0 ? DC_OK : find_other_part(p, words);
}

static dc_status shm_run_collective(dc__shm *self, const dc__coll *coll) {
  dc__shm_plan p;
  DC__TRY(dc__shm_plan_collective(&p, self, coll));
  DC__TRY(shm_handshake(&p));
  DC__TRY(p.has_counts ? compare_parts(&p) : DC_OK);
  DC__TRY(check_all_peer_access(&p));
  const int64_t size = p.in_rounds ? p.window : INT64_MAX / 2;
  for (int64_t lo = 0; lo < p.largest; lo += size) {
    if (lo > 0) {
      dc__shm_stage_round(&p, lo);
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
  dc__shm_plan p = {.self = self, .word = word};
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
