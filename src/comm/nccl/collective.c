/* One collective: the handshake over the bootstrap communicator, then NCCL's work on the stream. */
#include <inttypes.h>

#include "comm/nccl/nccl.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

enum { STAGING_BYTES = 64 << 20 }; /* bytes that one round receives from all peers */

/* A round of a reduction, which moves the window [lo, lo + size) of every rank's part; or all of another collective. */
typedef struct nccl_round {
  const dc__coll *coll;
  int64_t lo;
  int64_t size;
  bool staged;     /* a reduction whose sends are copied out of registered memory first */
  bool asymmetric; /* a gather whose buffers lie at different offsets on different ranks */
} nccl_round;

static size_t nccl_bytes(int64_t count, int32_t dtype) {
  return (size_t)count * dc_dtype_size(dtype);
}

/* ---- NCCL's groups ---- */

bool dc__nccl_is_even(const dc__coll_item *item, int32_t world) {
  for (int32_t r = 0; r < world; r++) {
    if (item->ranges[r].count != item->ranges[0].count || item->ranges[r].begin != r * item->ranges[0].count) {
      return false;
    }
  }
  return true;
}

static bool is_gathered_by_broadcasts(const dc__nccl *self, const nccl_round *r, const dc__coll_item *item) {
  return r->asymmetric || !dc__nccl_is_even(item, self->head.world);
}

/* Copies shards to where the other ranks receive them, so that each root broadcasts in place. NCCL requires that all of
 * a broadcast's memory is registered or none, and a shard may lie elsewhere. */
static void place_shards(dc__nccl *self, const nccl_round *r) {
  for (int32_t i = 0; i < r->coll->count; i++) {
    const dc__coll_item *item = &r->coll->items[i];
    const dc__range own = item->ranges[self->head.rank];
    char *dst = (char *)item->recv + nccl_bytes(own.begin, item->dtype);
    if (is_gathered_by_broadcasts(self, r, item) && own.count > 0 && item->send != dst) {
      dc__internal_copy(r->coll->stream, dst, item->send, nccl_bytes(own.count, item->dtype));
    }
  }
}

/* Uses broadcasts: NCCL has no windows for them, so the buffers may lie anywhere. */
static dc_status gather_ragged(dc__nccl *self, void *native, const dc__coll_item *item) {
  for (int32_t r = 0; r < self->head.world; r++) {
    size_t bytes = nccl_bytes(item->ranges[r].count, item->dtype);
    char *dst = (char *)item->recv + nccl_bytes(item->ranges[r].begin, item->dtype);
    if (bytes > 0) {
      DC__TRY(dc__nccl_check_result(
          self, "ncclBroadcast", self->library.ncclBroadcast(dst, dst, bytes, DC__NCCL_INT8, r, self->handle, native)));
    }
  }
  return DC_OK;
}

static dc_status gather_all(dc__nccl *self, void *native, const nccl_round *r) {
  for (int32_t i = 0; i < r->coll->count; i++) {
    const dc__coll_item *item = &r->coll->items[i];
    if (is_gathered_by_broadcasts(self, r, item)) {
      DC__TRY(gather_ragged(self, native, item));
    } else {
      size_t bytes = nccl_bytes(item->ranges[0].count, item->dtype);
      DC__TRY(dc__nccl_check_result(
          self, "ncclAllGather",
          self->library.ncclAllGather(item->send, item->recv, bytes, DC__NCCL_INT8, self->handle, native)));
    }
  }
  return DC_OK;
}

static dc_status nccl_broadcast(dc__nccl *self, void *native, const nccl_round *r) {
  const dc__coll_item *item = &r->coll->items[0];
  return dc__nccl_check_result(self, "ncclBroadcast",
                               self->library.ncclBroadcast(item->recv, item->recv, (size_t)item->total, DC__NCCL_INT8,
                                                           r->coll->root, self->handle, native));
}

/* Staged slices lie behind the received ones. */
static char *staged_slice(const dc__nccl *self, const nccl_round *r, int32_t peer, const dc__window_slice *out) {
  return self->staging->ptr + (self->head.world + peer) * r->size + out->at;
}

/* Sends a peer its slices of the window, and receives the peer's slices of this rank's part. */
static dc_status send_recv_peer(dc__nccl *self, void *native, const nccl_round *r, int32_t peer) {
  int64_t to = 0;
  int64_t from = 0;
  for (int32_t i = 0; i < r->coll->count; i++) {
    const dc__coll_item *item = &r->coll->items[i];
    dc__window_slice out = dc__window_intersect(item, peer, to, r->lo, r->size);
    dc__window_slice in = dc__window_intersect(item, self->head.rank, from, r->lo, r->size);
    if (out.count > 0) {
      const void *data = r->staged ? staged_slice(self, r, peer, &out)
                                   : dc__bytes_at(item->send, item->ranges[peer].begin + out.begin, item->dtype);
      DC__TRY(dc__nccl_check_result(
          self, "ncclSend",
          self->library.ncclSend(data, nccl_bytes(out.count, item->dtype), DC__NCCL_INT8, peer, self->handle, native)));
    }
    if (in.count > 0) {
      DC__TRY(dc__nccl_check_result(
          self, "ncclRecv",
          self->library.ncclRecv(self->staging->ptr + peer * r->size + in.at, nccl_bytes(in.count, item->dtype),
                                 DC__NCCL_INT8, peer, self->handle, native)));
    }
    to += dc__item_stride(item, peer);
    from += dc__item_stride(item, self->head.rank);
  }
  return DC_OK;
}

static dc_status send_recv_all(dc__nccl *self, void *native, const nccl_round *r) {
  for (int32_t i = 1; i < self->head.world; i++) { /* starts at the next rank, so that traffic spreads */
    DC__TRY(send_recv_peer(self, native, r, (self->head.rank + i) % self->head.world));
  }
  return DC_OK;
}

/* Makes the round's calls as one NCCL group, which is ended even if a call fails. */
static dc_status enqueue_group(dc__nccl *self, void *native, void *args) {
  const nccl_round *r = args;
  DC__TRY(dc__nccl_check_alive(self));
  DC__TRY(dc__nccl_check_result(self, "ncclGroupStart", self->library.ncclGroupStart()));
  dc_status status = r->coll->kind == DC__COLL_GATHER       ? gather_all(self, native, r)
                     : r->coll->kind == DC__COLL_REDUCE     ? send_recv_all(self, native, r)
                     : r->coll->kind == DC__COLL_ALL_TO_ALL ? dc__nccl_send_parts(self, native, &r->coll->items[0])
                                                            : nccl_broadcast(self, native, r);
  dc__nccl_result ended = self->library.ncclGroupEnd();
  return status != DC_OK ? status : dc__nccl_check_result(self, "ncclGroupEnd", ended);
}

static dc_status submit_group(dc__nccl *self, nccl_round *r, const char *name) {
  /* The first group connects the ranks. */
  return dc__nccl_call_and_wait(self, r->coll->stream, enqueue_group, r, "ncclGroupEnd", name);
}

dc_status dc__nccl_submit(dc__nccl *self, const dc__coll *coll, const char *name) {
  nccl_round r = {.coll = coll};
  return submit_group(self, &r, name);
}

/* ---- reductions ---- */

void dc__nccl_free_staging(dc_device *device, dc__nccl_staging *staging) {
  while (staging != NULL) {
    dc__nccl_staging *older = staging->older;
    device->ops->free(device, staging->ptr, staging->bytes, DC_MEMORY_DEVICE);
    dc__free(staging);
    staging = older;
  }
}

dc_status dc__nccl_reserve_staging(dc__nccl *self, size_t bytes) {
  size_t before = self->staging == NULL ? 0 : self->staging->bytes;
  if (before >= bytes) {
    return DC_OK;
  }
  size_t doubled = 2 * before > STAGING_BYTES && bytes <= STAGING_BYTES ? STAGING_BYTES : 2 * before;
  dc__nccl_staging *grown = dc__calloc(1, sizeof *grown);
  if (grown == NULL) {
    return DC_E_NO_MEMORY;
  }
  void *ptr;
  grown->bytes = bytes > doubled ? bytes : doubled;
  dc_status status = self->device->ops->alloc(self->device, grown->bytes, DC_MEMORY_DEVICE, &ptr);
  if (status != DC_OK) {
    dc__free(grown);
    return status;
  }
  grown->ptr = ptr;
  grown->older = self->staging;
  self->staging = grown;
  return DC_OK;
}

/* NCCL requires registered memory on both sides of an exchange or on neither, and staging is not registered. */
static void stage_sends(dc__nccl *self, const nccl_round *r) {
  for (int32_t peer = 0; peer < self->head.world; peer++) {
    int64_t pos = 0;
    for (int32_t i = 0; i < r->coll->count; i++) {
      const dc__coll_item *item = &r->coll->items[i];
      dc__window_slice out = dc__window_intersect(item, peer, pos, r->lo, r->size);
      pos += dc__item_stride(item, peer);
      if (peer != self->head.rank && out.count > 0) {
        const void *data = dc__bytes_at(item->send, item->ranges[peer].begin + out.begin, item->dtype);
        dc__internal_copy(r->coll->stream, staged_slice(self, r, peer, &out), data, nccl_bytes(out.count, item->dtype));
      }
    }
  }
}

/* Adds the received slices to this rank's own, in the order of dc__reduce(). */
static void add_received(dc__nccl *self, const nccl_round *r) {
  int32_t rank = self->head.rank;
  int64_t pos = 0;
  for (int32_t i = 0; i < r->coll->count; i++) {
    const dc__coll_item *item = &r->coll->items[i];
    dc__window_slice piece = dc__window_intersect(item, rank, pos, r->lo, r->size);
    pos += dc__item_stride(item, rank);
    if (piece.count > 0) {
      const void *src[DC__NCCL_MAX_WORLD];
      for (int32_t peer = 0; peer < self->head.world; peer++) {
        src[peer] = peer == rank ? dc__bytes_at(item->send, item->ranges[rank].begin + piece.begin, item->dtype)
                                 : self->staging->ptr + peer * r->size + piece.at;
      }
      char *dst = (char *)item->recv + nccl_bytes(piece.begin, item->recv_dtype);
      const dc__reduction sum = dc__item_reduction(item, dst, src, self->head.world, piece.count);
      dc__internal_reduce(r->coll->stream, &sum);
    }
  }
}

/* Stream order serialises the rounds and their use of the staging memory. */
static dc_status reduce_rounds(dc__nccl *self, const dc__coll *coll, const char *name) {
  int32_t world = self->head.world;
  int64_t largest = dc__max_part_bytes(coll, world);
  int64_t max_bytes = (STAGING_BYTES / world) & ~(int64_t)(DC__PART_ALIGN - 1);
  nccl_round r = {.coll = coll,
                  .size = largest < max_bytes ? largest : max_bytes, /* the same on all ranks */
                  .staged = dc__nccl_sends_registered(self, coll)};
  if (world > 1) {
    DC__TRY(dc__nccl_reserve_staging(self, (size_t)(r.size * world) * (r.staged ? 2 : 1)));
  }
  for (; r.lo < largest; r.lo += r.size) {
    if (world > 1) {
      if (r.staged) {
        stage_sends(self, &r);
      }
      DC__TRY(submit_group(self, &r, name));
    }
    add_received(self, &r);
  }
  return DC_OK;
}

/* ---- the collective ---- */

static dc_status nccl_enqueue(dc__nccl *self, const dc__coll *coll, const char *name) {
  DC__TRY(dc__comm_check(&self->head));
  bool unregistered;
  uint64_t hash = dc__nccl_buffers_hash(self, coll, &unregistered);
  bool same = self->bootstrap->ops->agree(self->bootstrap, coll, hash);
  DC__TRY(dc__comm_check(self->bootstrap));
  if (same && unregistered && coll->captured == 0) { /* a capture allows no registration */
    DC__TRY(dc__nccl_register_windows(self, coll, name));
  }
  if (coll->kind == DC__COLL_REDUCE) {
    DC__TRY(reduce_rounds(self, coll, name));
  } else if (coll->kind == DC__COLL_ALL_TO_ALL) {
    DC__TRY(dc__nccl_all_to_all(self, coll, name));
  } else {
    nccl_round r = {.coll = coll, .asymmetric = !same};
    if (coll->kind == DC__COLL_GATHER) {
      place_shards(self, &r);
    }
    DC__TRY(submit_group(self, &r, name));
  }
  atomic_fetch_add_explicit(&self->head.wire_bytes, dc__received_bytes(coll, self->head.rank, self->head.world),
                            memory_order_relaxed);
  return dc__device_check(self->device); /* peers would wait for work that it refused */
}

static void enqueue_or_fail(dc__nccl *self, const dc__coll *coll, const char *name) {
  dc_status status = nccl_enqueue(self, coll, name);
  if (status != DC_OK) {
    dc__nccl_fail(self, status);
  }
}

/* The collective is in flight until the stream has passed it. */
static void run_on_stream(dc__nccl *self, const dc__coll *coll, const char *name) {
  dc__nccl_inflight *inflight;
  dc_status status = dc__nccl_begin(self, coll, name, &inflight);
  if (status != DC_OK) {
    dc__nccl_fail(self, status);
    dc__op_timing_begin(coll->tag.span);
    return;
  }
  dc__op_timing_begin_on(coll->tag.span, coll->stream);
  enqueue_or_fail(self, coll, name);
  dc__op_timing_end_on(coll->tag.span, coll->stream);
  dc__nccl_end(self, coll->stream, inflight);
}

/* ---- captures ---- */

/* NCCL connects ranks at their first exchange, which must precede a capture. So this runs an even gather, a ragged one
 * and an exchange, of a byte or two each. */
static dc_status connect_ranks(dc__nccl *self, const dc__tag *tag) {
  enum { BUFFER_BYTES = 2 * DC__NCCL_MAX_WORLD };
  int32_t world = self->head.world;
  dc__range even[DC__NCCL_MAX_WORLD], ragged[DC__NCCL_MAX_WORLD];
  for (int32_t r = 0; r < world; r++) {
    even[r] = (dc__range){r, 1};
    ragged[r] = (dc__range){r + (r > 0), 1 + (r == 0)};
  }
  const struct {
    int32_t kind;
    const dc__range *ranges;
    int64_t total;
  } calls[] = {{DC__COLL_GATHER, even, world}, {DC__COLL_GATHER, ragged, world + 1}, {DC__COLL_REDUCE, even, world}};
  void *send;
  DC__TRY(self->device->ops->alloc(self->device, 2 * BUFFER_BYTES, DC_MEMORY_DEVICE, &send));
  dc__stream_zero(self->stream, send, 2 * BUFFER_BYTES);
  dc__comm_note_handshakes(&self->head, DC__COUNT(calls));
  dc__coll coll = {
      .comm = &self->head,
      .device = self->device,
      .stream = self->stream,
      .tag = {.graph_id = tag->graph_id, .id = tag->id, .op = tag->op},
      .count = 1,
      .captured = 1,
      .items = {
          {.send = send, .recv = (char *)send + BUFFER_BYTES, .id = -1, .dtype = DC_INT8, .recv_dtype = DC_INT8}}};
  for (size_t i = 0; i < DC__COUNT(calls); i++) {
    coll.kind = calls[i].kind;
    coll.items[0].ranges = calls[i].ranges;
    coll.items[0].total = calls[i].total;
    run_on_stream(self, &coll, "a capture's begin");
  }
  (void)dc__stream_sync(self->stream, 0); /* the watchdog enforces the deadline */
  self->device->ops->free(self->device, send, 2 * BUFFER_BYTES, DC_MEMORY_DEVICE);
  return dc__comm_check(&self->head);
}

/* Captured work is not tracked in flight, has no deadline of its own and no order with work outside the graph. */
static void run_captured(dc__nccl *self, const dc__coll *coll, const char *name) {
  dc_status status = self->connected ? DC_OK : connect_ranks(self, &coll->tag);
  self->connected = status == DC_OK;
  dc__nccl_note_capture(self);
  dc__op_timing_begin_on(coll->tag.span, coll->stream);
  if (status == DC_OK) {
    enqueue_or_fail(self, coll, name);
  } else {
    dc__nccl_fail(self, status);
  }
  dc__op_timing_end_on(coll->tag.span, coll->stream);
}

/* ---- host memory ---- */

static void run_on_hosts(dc__nccl *self, const dc__coll *coll) {
  dc_status status = dc__comm_check(&self->head);
  if (status == DC_OK) {
    int64_t before = atomic_load(&self->bootstrap->wire_bytes);
    self->bootstrap->ops->run(self->bootstrap, coll);
    atomic_fetch_add_explicit(&self->head.wire_bytes, atomic_load(&self->bootstrap->wire_bytes) - before,
                              memory_order_relaxed);
    status = dc__comm_check(self->bootstrap);
  }
  if (status != DC_OK) {
    dc__nccl_fail(self, status);
  }
}

void dc__nccl_run(dc_comm *comm, const dc__coll *coll) {
  dc__nccl *self = (dc__nccl *)comm;
  char name[DC__COLL_TEXT];
  dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
  pthread_mutex_lock(&self->collective_mutex);
  if (coll->stream == NULL) {
    run_on_hosts(self, coll);
  } else if (coll->captured != 0) {
    run_captured(self, coll, name);
  } else {
    run_on_stream(self, coll, name);
  }
  pthread_mutex_unlock(&self->collective_mutex);
}
