/* A communicator for simulated ranks. The n-th collective of a channel is one meeting of all ranks; each rank walks
 * through it in steps on its own stream, or on its host thread:
 *
 *   post    its data becomes readable by others, in place, or from a copy made here
 *   move    once all have posted: it reads its own part, piece by piece, in an order that is drawn
 *   leave   at once where copies were made, else once no rank reads its data any more
 *
 * comm.h promises these orders and no others, so a runtime that relies on more is caught. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/signature.h"
#include "comm/split.h"
#include "comm/windows.h"
#include "kernels/kernels.h"
#include "sim.h"

enum { CHANNELS = 64 };

typedef struct part {
  dc__coll coll;
  uint64_t ranges[DC__COMM_GROUP];    /* hashes, because a rank may leave while others compare */
  int32_t missing_recv;               /* from dc__coll_missing_recv, copied for the same reason */
  const void *copies[DC__COMM_GROUP]; /* memory that others read: the sender's own, or copies */
  sim_clock posted, moved;
} part;

typedef struct meeting {
  struct meeting *next;
  int32_t posted, moved, left;
  bool in_place;
  part parts[SIM_RANKS];
} meeting;

typedef struct sim_comm {
  dc_comm head;
  int64_t calls, begun; /* number of meetings that this rank has called, and has started */
  meeting **at;         /* where the pointer to this rank's next meeting is, if it exists */
} sim_comm;

static struct {
  meeting *channels[CHANNELS];
  int32_t made[SIM_RANKS]; /* number of communicators that each rank has made */
  struct {
    uint64_t name; /* the name of dc__split; 0: none */
    meeting *first;
  } parts[CHANNELS];
  dc__failure failure; /* of the whole group */
} group;

/* ---- failures ---- */

/* From here on collectives deliver nothing, and reads of the missing data are not reported. */
static void fail_group(dc_status status) {
  dc__failure_keep(&group.failure, status);
  sim_checker_mute();
}

static void poll_group(dc_comm *comm) {
  if (group.failure.status != DC_OK) {
    dc__comm_fail(comm, dc__failure_raise(&group.failure));
  }
}

static void abort_group(dc_comm *comm, const char *reason) {
  fail_group(dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group: %.300s", comm->rank,
                      reason != NULL ? reason : "no reason given"));
  poll_group(comm);
}

/* ---- a rank's way through a meeting ---- */

typedef struct walk {
  sim_comm *comm;
  meeting *m;
  int64_t number;
  enum { POST, MOVE, LEAVE } phase;
  int32_t pieces, moves; /* pieces: number in all; moves: those left, -1: not started */
  int32_t piece, stride; /* the next piece, and the distance to the one after it */
} walk;

static size_t bytes_of(int64_t count, int32_t dtype) {
  return (size_t)count * dc_dtype_size(dtype);
}

/* The part of an item's send that others may read. */
static size_t offered(const dc__coll *coll, const dc__coll_item *item, int32_t rank) {
  return bytes_of(coll->kind == DC__COLL_REDUCE ? item->total : item->ranges[rank].count, item->dtype);
}

static void post(walk *w) {
  part *mine = &w->m->parts[w->comm->head.rank];
  if (w->number != w->comm->begun++) {
    sim_reportf("%s of parameter %" PRId64 " overtakes an earlier collective of its communicator (rank %" PRId32 ")",
                dc_op_name(mine->coll.tag.op), mine->coll.tag.id, w->comm->head.rank);
  }
  for (int32_t i = 0; i < mine->coll.count; i++) {
    const dc__coll_item *item = &mine->coll.items[i];
    mine->copies[i] = item->send;
    if (!w->m->in_place) {
      size_t bytes = offered(&mine->coll, item, w->comm->head.rank);
      void *copy = sim_new(bytes);
      sim_note(SIM_READ, item->send, bytes, "staging");
      sim_note(SIM_WRITE, copy, bytes, "staging");
      memcpy(copy, bytes == 0 ? copy : item->send, bytes);
      mine->copies[i] = copy;
    }
  }
  mine->posted = sim_publish();
  w->m->posted++;
}

static bool same_call(const part *p, const part *q) {
  const dc__coll *a = &p->coll, *b = &q->coll;
  bool same = a->kind == b->kind && a->count == b->count && a->tag.op == b->tag.op && a->tag.id == b->tag.id &&
              a->tag.graph_id == b->tag.graph_id;
  for (int32_t i = 0; i < a->count && same; i++) {
    const dc__coll_item *x = &a->items[i], *y = &b->items[i];
    same = x->total == y->total && x->id == y->id && x->dtype == y->dtype && x->reduce_op == y->reduce_op &&
           p->ranges[i] == q->ranges[i];
  }
  return same;
}

/* All have posted: their clocks are joined to this one, and the calls must agree. */
static void meet(walk *w) {
  const dc_comm *head = &w->comm->head;
  const dc__coll *mine = &w->m->parts[head->rank].coll;
  for (int32_t r = 0; r < head->world; r++) {
    const part *peer_part = &w->m->parts[r];
    sim_join(&sim_me()->now, &peer_part->posted);
    if (!same_call(&w->m->parts[head->rank], peer_part)) {
      fail_group(dc__fail(DC_E_MISMATCH,
                          "rank %" PRId32 " called %s of parameter %" PRId64 ", rank %" PRId32
                          " %s of parameter %" PRId64 ", or with other sizes",
                          head->rank, dc_op_name(mine->tag.op), mine->tag.id, r, dc_op_name(peer_part->coll.tag.op),
                          peer_part->coll.tag.id));
    }
  }
  for (int32_t r = 0; r < head->world; r++) {
    if (w->m->parts[r].missing_recv >= 0) {
      fail_group(dc__coll_fail_missing_recv(mine->items[w->m->parts[r].missing_recv].id, r));
    }
  }
  w->pieces = w->moves = mine->count * (mine->kind == DC__COLL_GATHER ? head->world : 1);
  w->stride = 1;
  if (mine->kind == DC__COLL_GATHER) { /* items of a reduction may add to the same memory */
    w->piece = (int32_t)sim_random((uint64_t)w->pieces);
    w->stride = sim_random(2) == 0 ? 1 : w->pieces - 1;
  }
}

static void gather_piece(const walk *w, int32_t i, int32_t from) {
  const int32_t rank = w->comm->head.rank;
  const dc__coll_item *item = &w->m->parts[rank].coll.items[i];
  size_t bytes = bytes_of(item->ranges[from].count, item->dtype);
  const void *src = from == rank ? item->send : w->m->parts[from].copies[i];
  char *dst = (char *)item->recv + bytes_of(item->ranges[from].begin, item->dtype);
  if (src != dst && bytes > 0) {
    sim_note(SIM_READ, src, bytes, "gather");
    sim_note(SIM_WRITE, dst, bytes, "gather");
    memcpy(dst, src, bytes);
  }
}

static void reduce_piece(const walk *w, int32_t i) {
  const dc_comm *head = &w->comm->head;
  const dc__coll_item *item = &w->m->parts[head->rank].coll.items[i];
  const dc__range own = item->ranges[head->rank];
  const void *src[SIM_RANKS];
  for (int32_t r = 0; r < head->world; r++) {
    const void *whole = r == head->rank ? item->send : w->m->parts[r].copies[i];
    src[r] = (const char *)whole + bytes_of(own.begin, item->dtype);
  }
  if (own.count > 0) {
    const dc__reduction sum = dc__item_reduction(item, item->recv, src, head->world, own.count);
    dc__reduce(&sum);
  }
}

static void move(walk *w) {
  const dc_comm *head = &w->comm->head;
  if (w->m->parts[head->rank].coll.kind == DC__COLL_GATHER) {
    gather_piece(w, w->piece / head->world, w->piece % head->world);
  } else {
    reduce_piece(w, w->piece);
  }
  w->piece = (w->piece + w->stride) % w->pieces;
  w->moves--;
}

static bool ready(void *args) {
  const walk *w = args;
  int32_t world = w->comm->head.world;
  if (group.failure.status != DC_OK || w->phase == POST) {
    return true;
  }
  return w->phase == MOVE ? w->m->posted == world : !w->m->in_place || w->m->moved == world;
}

static void leave(walk *w) {
  dc__op_timing_end(w->m->parts[w->comm->head.rank].coll.tag.span, group.failure.status != DC_OK);
  w->m->left++;
  poll_group(&w->comm->head);
  dc__comm_release(&w->comm->head);
}

static bool step(void *args) {
  walk *w = args;
  if (!ready(args)) { /* no thread can continue, so the others will never come */
    fail_group(dc__fail(DC_E_TIMEOUT, "a collective was not joined by all ranks"));
  }
  if (group.failure.status != DC_OK) {
    leave(w);
    return true;
  }
  if (w->phase == POST) {
    dc__op_timing_begin(w->m->parts[w->comm->head.rank].coll.tag.span);
    post(w);
    w->phase = MOVE;
    return false;
  }
  if (w->phase == MOVE) {
    if (w->moves < 0) {
      meet(w);
    }
    if (w->moves > 0 && group.failure.status == DC_OK) { /* ranks that disagree read none of each other's data */
      move(w);
    }
    if (w->moves == 0) {
      w->m->parts[w->comm->head.rank].moved = sim_publish();
      w->m->moved++;
      w->phase = LEAVE;
    }
    return false;
  }
  for (int32_t r = 0; r < w->comm->head.world && w->m->in_place; r++) {
    sim_join(&sim_me()->now, &w->m->parts[r].moved);
  }
  leave(w);
  return true;
}

/* ---- the table ---- */

static meeting *next_meeting(sim_comm *self) {
  meeting *m = *self->at;
  if (m == NULL) {
    m = calloc(1, sizeof *m);
    m->in_place = sim_random(2) == 0;
    *self->at = m;
  }
  self->at = &m->next;
  return m;
}

static void call(dc_comm *comm, dc_stream *stream, int32_t kind, const dc__tag *tag, const dc__coll_item *items,
                 int32_t count) {
  sim_comm *self = (sim_comm *)comm;
  if (dc__comm_check(comm) != DC_OK) {
    return;
  }
  dc__op_timing_expect(tag->span);
  walk w = {(sim_comm *)dc__comm_retain(comm), next_meeting(self), self->calls++, POST, 0, -1, 0, 0};
  dc__coll *coll = &w.m->parts[comm->rank].coll;
  *coll = (dc__coll){.comm = comm, .tag = *tag, .kind = kind, .count = count};
  if (count > 0) {
    memcpy(coll->items, items, (size_t)count * sizeof *items);
  }
  for (int32_t i = 0; i < count; i++) {
    w.m->parts[comm->rank].ranges[i] = dc__coll_ranges_hash(&items[i], comm->world);
  }
  w.m->parts[comm->rank].missing_recv = dc__coll_missing_recv(coll, comm->rank);
  static const char *const names[] = {NULL, "gather", "reduction", "broadcast", "barrier"};
  if (stream != NULL) {
    sim_push(stream, &(sim_work){ready, step, {names[kind], NULL, tag->id}}, &w, sizeof w);
    return;
  }
  do {
    sim_wait(ready, &w, names[kind]);
  } while (!step(&w));
}

static void all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                       int32_t count) {
  call(comm, stream, DC__COLL_GATHER, tag, items, count);
}

static void reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                           int32_t count) {
  call(comm, stream, DC__COLL_REDUCE, tag, items, count);
}

static void barrier(dc_comm *comm, const dc__tag *tag) {
  call(comm, NULL, DC__COLL_BARRIER, tag, NULL, 0);
}

static dc_status heap_alloc(dc_comm *comm, size_t bytes, void **ptr) {
  (void)comm;
  *ptr = sim_map(bytes);
  return DC_OK;
}

static void heap_free(dc_comm *comm, void *ptr, size_t bytes) {
  (void)comm;
  sim_note(SIM_FREE, ptr, bytes, "the heap");
}

static bool peer_accessible(dc_comm *comm, const void *ptr, size_t bytes) {
  (void)comm;
  (void)ptr;
  (void)bytes;
  return true; /* ranks are threads */
}

static dc_status open_comm(dc_comm **comm);

static dc_status dup(dc_comm *comm, dc_comm **copy) {
  (void)comm;
  return sim_world()->one_channel ? dc__fail(DC_E_UNSUPPORTED, "the simulated group has one channel") : open_comm(copy);
}

static dc_status split_comm(dc_comm *comm, const dc__split *split, dc_comm **new_comm);

static void destroy(dc_comm *comm) {
  dc__comm_head_destroy(comm);
  free(comm);
}

void sim_comm_end(void) {
  for (int32_t i = 0; i < 2 * CHANNELS; i++) {
    for (meeting *m = i < CHANNELS ? group.channels[i] : group.parts[i - CHANNELS].first, *next; m != NULL; m = next) {
      next = m->next;
      free(m);
    }
  }
  memset(&group, 0, sizeof group);
}

static const dc__comm_ops with_heap = {.name = "sim",
                                       .all_gather = all_gather,
                                       .reduce_scatter = reduce_scatter,
                                       .barrier = barrier,
                                       .dup = dup,
                                       .split = split_comm,
                                       .abort = abort_group,
                                       .poll = poll_group,
                                       .heap_alloc = heap_alloc,
                                       .heap_free = heap_free,
                                       .peer_accessible = peer_accessible,
                                       .destroy = destroy};

static const dc__comm_ops without_heap = {.name = "sim",
                                          .all_gather = all_gather,
                                          .reduce_scatter = reduce_scatter,
                                          .barrier = barrier,
                                          .dup = dup,
                                          .split = split_comm,
                                          .abort = abort_group,
                                          .poll = poll_group,
                                          .destroy = destroy};

static dc_status open_channel(meeting **first, int32_t rank, int32_t world, dc_comm **comm) {
  sim_comm *self = calloc(1, sizeof *self);
  self->at = first;
  *comm = &self->head;
  return dc__comm_head_init(&self->head, sim_world()->no_heap ? &without_heap : &with_heap, rank, world, INT64_C(1));
}

static dc_status open_comm(dc_comm **comm) {
  int32_t rank = sim_rank();
  if (group.made[rank] == CHANNELS) {
    return dc__fail(DC_E_INVALID, "a simulated world has %d channels", (int)CHANNELS);
  }
  return open_channel(&group.channels[group.made[rank]++], rank, sim_world()->world, comm);
}

/* The ranks of a part share the channel of its name. */
static dc_status split_comm(dc_comm *comm, const dc__split *split, dc_comm **new_comm) {
  (void)comm;
  for (int32_t i = 0; i < CHANNELS && split->world > 0; i++) {
    if (group.parts[i].name == 0 || group.parts[i].name == split->name[0]) {
      group.parts[i].name = split->name[0];
      return open_channel(&group.parts[i].first, split->rank, split->world, new_comm);
    }
  }
  return split->world == 0 ? DC_OK : dc__fail(DC_E_INVALID, "a simulated world has %d parts", (int)CHANNELS);
}

dc_status sim_comm_open(dc_comm **comm) {
  return open_comm(comm);
}
