/* The flight recorder: a ring of a context's latest operations, which traces read too. Recording writes one entry under
 * the context's mutex, and streams write their times into it. Nothing is allocated and nothing waits. An entry's fields
 * are atomics, and its serial number is written last. So dc__trace_dump (flight_recorder_dump.c) can read entries from
 * any thread while calls are blocked. */
#include <string.h>

#include "runtime/flight_recorder_internal.h"

/* ---- life ---- */

static dc__ring *make_ring(int64_t capacity) {
  dc__ring *ring = dc__calloc(1, sizeof *ring + (size_t)capacity * sizeof(dc__recorder_entry));
  if (ring != NULL) {
    ring->capacity = capacity;
  }
  return ring;
}

dc_status dc__recorder_create(dc_context *ctx) {
  dc__recorder *r = dc__calloc(1, sizeof *r);
  if (r == NULL) {
    return DC_E_NO_MEMORY;
  }
  r->ring = make_ring(DC__RECORDER_ENTRIES);
  if (r->ring == NULL) {
    dc__free(r);
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_init(&r->mutex, NULL);
  r->first_ticks = dc__ticks();
  r->first_ns = dc__now_ns();
  ctx->recorder = r;
  return DC_OK;
}

static void free_stamps(dc__op_timing *span) {
  dc__timestamp *stamps[] = {atomic_exchange(&span->first, NULL), atomic_exchange(&span->last, NULL)};
  for (size_t i = 0; i < DC__COUNT(stamps); i++) {
    if (stamps[i] != NULL) {
      stamps[i]->device->ops->timestamp_release(stamps[i]);
    }
  }
}

void dc__recorder_free(dc_context *ctx) {
  dc__recorder *r = ctx->recorder;
  for (int64_t i = 0; i < r->ring->capacity; i++) {
    free_stamps(&r->ring->entries[i].span);
  }
  pthread_mutex_destroy(&r->mutex);
  dc__names_free(r);
  dc__free(r->ring);
  dc__free(r->folder);
  dc__free(r);
}

void dc__recorder_set_group(dc_context *ctx) {
  dc__recorder *r = ctx->recorder;
  atomic_store(&r->transport, ctx->gather_comm->ops->name);
  atomic_store(&r->rank, ctx->gather_comm->rank);
  atomic_store(&r->world, ctx->gather_comm->world);
}

/* ---- times ---- */

dc__clocks dc__recorder_clocks(const dc__recorder *r) {
  dc__clocks c = {dc__ticks(), dc__now_ns(), 1.0};
  if (c.ticks > r->first_ticks) {
    c.rate = (double)(c.ns - r->first_ns) / (double)(c.ticks - r->first_ticks);
  }
  return c;
}

int64_t dc__clocks_ns(const dc__clocks *c, int64_t ticks) {
  return ticks == 0 ? 0 : c->ns - (int64_t)((double)(c->ticks - ticks) * c->rate);
}

/* 0 until the device has reached the timestamp. */
static int64_t timestamp_ns(dc__timestamp *stamp) {
  return stamp->device->ops->timestamp_ns(stamp);
}

dc__span_interval dc__span_times(dc__op_timing *span, const dc__clocks *c) {
  int32_t pending = atomic_load(&span->pending); /* read before the times: the last piece of work writes them first */
  dc__timestamp *first = atomic_load(&span->first);
  dc__timestamp *last = atomic_load(&span->last);
  dc__span_interval times = {dc__clocks_ns(c, atomic_load(&span->begun)), dc__clocks_ns(c, atomic_load(&span->ended))};
  if (last != NULL) { /* times.ended is so far when the host queued the work or ended a later piece */
    const int64_t ns = timestamp_ns(last);
    const bool is_virtual = dc__device_is_counting(last->device); /* its clock is not the host's */
    times.ended = ns == 0 || ns > times.ended || is_virtual ? ns : times.ended;
  }
  times.begun = first != NULL ? timestamp_ns(first) : times.begun; /* after `last`: once that has passed, so has this */
  times.ended = pending > 0 || times.ended == 0 ? 0 : times.ended < times.begun ? times.begun : times.ended;
  return times;
}

/* If the operation is done, moves the times of its timestamps to the span. Returns whether it is done. */
static bool resolve_stamps(const dc__recorder *r, dc__op_timing *span) {
  if (atomic_load(&span->first) == NULL && atomic_load(&span->last) == NULL) {
    return atomic_load_explicit(&span->pending, memory_order_acquire) == 0;
  }
  const dc__clocks c = dc__recorder_clocks(r);
  const dc__span_interval times = dc__span_times(span, &c);
  if (times.ended != 0) {
    atomic_store(&span->begun, c.ticks - (int64_t)((double)(c.ns - times.begun) / c.rate));
    atomic_store(&span->ended, c.ticks - (int64_t)((double)(c.ns - times.ended) / c.rate));
    free_stamps(span);
  }
  return times.ended != 0;
}

/* The same for a span that is about to be overwritten, so its times are not stored. */
static bool finish_span(dc__op_timing *span) {
  dc__timestamp *last = atomic_load(&span->last);
  if (atomic_load_explicit(&span->pending, memory_order_acquire) > 0 || (last != NULL && timestamp_ns(last) == 0)) {
    return false;
  }
  free_stamps(span);
  return true;
}

/* ---- recording ---- */

dc__recorder_entry *dc__ring_entry(dc__ring *ring, int64_t serial) {
  return &ring->entries[(serial - 1) % ring->capacity];
}

static void store_release_int64(atomic_llong *word, int64_t value) {
  atomic_store_explicit(word, value, memory_order_release);
}

static void store_release_int32(atomic_int *word, int32_t value) {
  atomic_store_explicit(word, value, memory_order_release);
}

dc__op_timing *dc__recorder_begin(dc_context *ctx, const dc__recorded_op *note) {
  dc__recorder *r = ctx->recorder;
  int32_t group =
      note->group == DC__GROUP_REDUCE && ctx->reduce_comm == ctx->gather_comm ? DC__GROUP_GATHER : note->group;
  int32_t seq = group == DC__GROUP_NONE ? 0 : (int32_t)++r->seq[group];
  int64_t serial = atomic_load_explicit(&r->recorded, memory_order_relaxed) + 1;
  dc__recorder_entry *e = dc__ring_entry(r->ring, serial);
  if (serial > DC__RECORDER_ENTRIES &&
      r->ring->capacity > DC__RECORDER_ENTRIES) { /* this many entries may hold timestamps, also in a larger ring */
    (void)resolve_stamps(r, &dc__ring_entry(r->ring, serial - DC__RECORDER_ENTRIES)->span);
  }
  if (!finish_span(&e->span)) {
    /* The operation of one ring ago is still running. A reader looks for it, so it keeps the entry. */
    atomic_fetch_add_explicit(&r->dropped, 1, memory_order_relaxed);
    return NULL;
  }
  int64_t now = dc__ticks();
  atomic_store_explicit(&e->serial, 0, memory_order_relaxed); /* tells readers that the entry is incomplete */
  store_release_int64(&e->queued, now);
  store_release_int64(&e->span.begun, note->lane == DC__LANE_CALLER && group == DC__GROUP_NONE ? now : 0);
  store_release_int64(&e->span.ended, 0);
  store_release_int32(&e->span.failed, 0);
  store_release_int64(&e->id, note->tag->id);
  store_release_int64(&e->bytes, note->bytes);
  store_release_int64(&e->moved, note->moved);
  store_release_int32(&e->graph, (int32_t)note->tag->graph_id);
  store_release_int32(&e->seq, seq);
  store_release_int32(&e->op, note->tag->op);
  store_release_int32(&e->kind, note->lane | group << 8 | note->dtype << 16);
  store_release_int32(&e->count, note->count);
  store_release_int64(&e->serial, serial);
  atomic_store_explicit(&r->recorded, serial, memory_order_release);
  return &e->span;
}

dc__op_timing *dc__recorder_begin_call(dc_context *ctx, const dc__tag *tag, int64_t bytes) {
  return dc__recorder_begin(
      ctx, &(dc__recorded_op){.tag = tag, .lane = DC__LANE_CALLER, .bytes = bytes, .moved = bytes, .count = 1});
}

dc_status dc__recorder_end_call(dc__op_timing *span, dc_status status) {
  if (span != NULL) {
    atomic_store_explicit(&span->ended, dc__ticks(), memory_order_relaxed);
    atomic_store_explicit(&span->failed, status != DC_OK, memory_order_relaxed);
  }
  return status;
}

void dc__recorder_submitted(dc__op_timing *span) {
  if (span != NULL && atomic_load_explicit(&span->pending, memory_order_acquire) == 0 &&
      atomic_load_explicit(&span->ended, memory_order_relaxed) == 0 && atomic_load(&span->last) == NULL) {
    dc__op_timing_expect(span);
    dc__op_timing_begin(span);
    dc__op_timing_end(span, false);
  }
}

void dc__recorded_copy(dc_context *ctx, const dc__tag *tag, int32_t lane, void *dst, const void *src, size_t bytes) {
  const dc__recorded_op note = {.tag = tag, .lane = lane, .count = 1, .bytes = (int64_t)bytes, .moved = (int64_t)bytes};
  dc_stream *stream = lane == DC__LANE_CALLER ? NULL : ctx->capturing ? ctx->lanes[DC__LANE_CALLER] : ctx->lanes[lane];
  dc__op_timing *span = dc__recorder_begin(ctx, &note);
  dc__op_timing_begin_on(span, stream);
  dc__stream_copy(dc__stream_or_internal(ctx->device, stream), dst, src, bytes);
  dc__device_sync_internal(ctx->device, stream);
  dc__op_timing_end_on(span, stream);
}

/* ---- traces ---- */

/* Changes the size and keeps the latest entries that fit. No work may be queued, as it points into the old ring. */
static dc_status resize_ring(dc__recorder *r, int64_t capacity) {
  dc__ring *old = r->ring;
  if (old->capacity == capacity) {
    return DC_OK;
  }
  dc__ring *ring = make_ring(capacity);
  if (ring == NULL) {
    return DC_E_NO_MEMORY;
  }
  int64_t last = atomic_load(&r->recorded);
  int64_t keep = capacity < old->capacity ? capacity : old->capacity;
  for (int64_t i = 0; i < old->capacity; i++) {
    if (!resolve_stamps(r, &old->entries[i].span)) {
      free_stamps(&old->entries[i].span); /* the device has failed and will not report times */
    }
  }
  for (int64_t serial = last > keep ? last - keep + 1 : 1; serial <= last; serial++) {
    memcpy(dc__ring_entry(ring, serial), dc__ring_entry(old, serial), sizeof(dc__recorder_entry));
  }
  pthread_mutex_lock(&r->mutex); /* a dump may be reading the old ring */
  r->ring = ring;
  pthread_mutex_unlock(&r->mutex);
  dc__free(old);
  return DC_OK;
}

dc_status dc__trace_start(dc_context *ctx, int64_t capacity) {
  dc__recorder *r = ctx->recorder;
  int64_t need = capacity < DC__RECORDER_ENTRIES ? DC__RECORDER_ENTRIES : capacity;
  if (r->ring->capacity != need) {
    DC__TRY(dc__context_synchronize(ctx));
    DC__TRY(resize_ring(r, need));
  }
  r->trace_capacity = capacity;
  r->trace_next = atomic_load(&r->recorded) + 1;
  return DC_OK;
}

int64_t dc__trace_read(dc_context *ctx, char *events, size_t event_size, int64_t cap) {
  dc__recorder *r = ctx->recorder;
  const dc__clocks c = dc__recorder_clocks(r);
  int64_t last = r->trace_capacity > 0 ? atomic_load(&r->recorded) : 0;
  int64_t count = 0;
  if (r->trace_next <= last - r->trace_capacity) {
    r->trace_next = last - r->trace_capacity + 1;
  }
  for (; count < cap && r->trace_next <= last; r->trace_next++, count++) {
    dc__recorder_entry *e = dc__ring_entry(r->ring, r->trace_next);
    const dc__span_interval times = dc__span_times(&e->span, &c);
    if (times.ended == 0) {
      break; /* an entry that has not ended holds back those after it, so that none is lost */
    }
    const dc_trace_event event = {.begin_ns = times.begun,
                                  .end_ns = times.ended,
                                  .graph_id = atomic_load(&e->graph),
                                  .id = atomic_load(&e->id),
                                  .bytes = atomic_load(&e->moved),
                                  .op = atomic_load(&e->op),
                                  .lane = atomic_load(&e->kind) & 255};
    memcpy(events + (size_t)count * event_size, &event, event_size < sizeof event ? event_size : sizeof event);
  }
  return count;
}
