/* A communicator over the caller's collectives. Before each the ranks exchange what they are about to do, so that a
 * difference is an error and not whatever the caller's library makes of it. */
#include "comm/external/external.h"

#include <inttypes.h>
#include <string.h>

#include "comm/call.h"

/* What the ranks compare before a collective; the last two words may differ. */
enum {
  PRINT_OP,
  PRINT_KIND,
  PRINT_ID,
  PRINT_GRAPH,
  PRINT_TOTAL,
  PRINT_TYPE,
  PRINT_COUNT,
  PRINT_HASH,
  PRINT_CAPTURED,
  PRINT_OWN,
  PRINT_UNPLACED,
  PRINT_WORDS
};

/* ---- failures ---- */

static void adopt(dc_comm *comm) {
  dc__external_family *f = ((dc__external *)comm)->family;
  if (atomic_load_explicit(&f->failed, memory_order_acquire) != 0) {
    pthread_mutex_lock(&f->mutex);
    dc_status status = dc__failure_raise(&f->failure);
    pthread_mutex_unlock(&f->mutex);
    dc__comm_fail(comm, status);
  }
}

static void fail_family(dc__external *self, dc_status status) {
  dc__external_fail(self->family, status);
  adopt(&self->head);
}

/* ---- the comparison ---- */

static void make_print(const dc__external *self, const dc__coll *coll, int64_t print[PRINT_WORDS]) {
  uint64_t hash = (uint64_t)coll->root;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    hash = hash * 31 + dc__coll_ranges_hash(item, self->head.world);
    hash = hash * 31 + (uint64_t)item->total;
    hash = hash * 31 + (uint64_t)item->id;
    hash = hash * 31 + (uint64_t)item->dtype * 4 + (uint64_t)item->reduce_op;
  }
  const dc__coll_item none = {.total = 0};
  const dc__coll_item *first = coll->count > 0 ? &coll->items[0] : &none;
  print[PRINT_OP] = coll->tag.op;
  print[PRINT_KIND] = coll->kind;
  print[PRINT_ID] = coll->tag.id;
  print[PRINT_GRAPH] = coll->tag.graph_id;
  print[PRINT_TOTAL] = first->total;
  print[PRINT_TYPE] = first->dtype * 4 + first->reduce_op;
  print[PRINT_COUNT] = coll->count;
  print[PRINT_HASH] = (int64_t)hash;
  print[PRINT_CAPTURED] = coll->captured;
}

static void describe(char text[DC__COLL_TEXT], const int64_t *print, const dc__coll *coll) {
  const dc__coll_name name = {.graph_id = DC__COLL_NO_GRAPH,
                              .id = print[PRINT_ID],
                              .total = print[PRINT_TOTAL],
                              .op = (int32_t)print[PRINT_OP],
                              .kind = (int32_t)print[PRINT_KIND],
                              .count = (int32_t)print[PRINT_COUNT],
                              .dtype = (int32_t)(print[PRINT_TYPE] / 4),
                              .reduce_op = (int32_t)(print[PRINT_TYPE] % 4),
                              .root = coll->root};
  dc__coll_describe(text, &name);
}

static dc__tag tag_of(const int64_t *print) {
  return (dc__tag){print[PRINT_GRAPH], print[PRINT_ID], (int32_t)print[PRINT_OP], NULL};
}

/* *same: so was everybody's own word. */
static dc_status compare(dc__external *self, const dc__coll *coll, uint64_t own, bool *same) {
  int64_t mine[PRINT_WORDS];
  int64_t all[PRINT_WORDS * DC__COMM_MAX_WORLD];
  make_print(self, coll, mine);
  mine[PRINT_OWN] = (int64_t)own;
  mine[PRINT_UNPLACED] = 1 + dc__call_unplaced(coll, self->head.rank);
  *same = true;
  const dc_comm_callbacks *c = &self->callbacks;
  dc__external_enter(self, coll, "all_gather");
  DC__TRY(dc__external_leave(self, coll, c->all_gather(mine, all, PRINT_WORDS, DC_INT64, c->user)));
  for (int32_t r = 1; r < self->head.world; r++) {
    const int64_t *other = &all[(size_t)r * PRINT_WORDS];
    *same = *same && other[PRINT_OWN] == all[PRINT_OWN];
    if (all[PRINT_CAPTURED] != other[PRINT_CAPTURED]) {
      const dc__tag zero = tag_of(all), its = tag_of(other);
      return other[PRINT_CAPTURED] != 0 ? dc__coll_half_captured(r, &its, 0, &zero)
                                        : dc__coll_half_captured(0, &zero, r, &its);
    }
    if (memcmp(all, other, PRINT_OWN * sizeof *mine) != 0) {
      char zero_text[DC__COLL_TEXT];
      char other_text[DC__COLL_TEXT];
      describe(zero_text, all, coll);
      describe(other_text, other, coll);
      const char *rest = strcmp(zero_text, other_text) == 0 ? ", which differ in graph, split or a later tensor" : "";
      return dc__fail(DC_E_MISMATCH, "rank %" PRId32 " called %s where rank 0 called %s%s", r, other_text, zero_text,
                      rest);
    }
  }
  for (int32_t r = 0; r < self->head.world; r++) {
    int64_t unplaced = all[(size_t)r * PRINT_WORDS + PRINT_UNPLACED];
    if (unplaced > 0 && unplaced <= coll->count) {
      return dc__call_fail_unplaced(coll->items[unplaced - 1].id, r);
    }
  }
  return DC_OK;
}

/* ---- a collective ---- */

static dc_status run_kind(dc__external *self, const dc__coll *coll) {
  const dc_comm_callbacks *c = &self->callbacks;
  bool same;
  DC__TRY(compare(self, coll, 0, &same));
  if (coll->kind == DC__COLL_GATHER) {
    return dc__external_gather(self, coll);
  }
  if (coll->kind == DC__COLL_REDUCE) {
    return dc__external_reduce(self, coll);
  }
  if (coll->kind == DC__COLL_BROADCAST) {
    size_t bytes = (size_t)coll->items[0].total;
    atomic_fetch_add(&self->head.wire_bytes, coll->root == self->head.rank ? 0 : coll->items[0].total);
    if (bytes == 0) {
      return DC_OK;
    }
    dc__external_enter(self, coll, "broadcast");
    return dc__external_leave(self, coll, c->broadcast(coll->items[0].recv, bytes, coll->root, c->user));
  }
  dc__external_enter(self, coll, "barrier");
  return dc__external_leave(self, coll, c->barrier(c->user));
}

/* False: the family has failed, since this thread is in a callback of this communicator. */
static bool begin_turn(dc__external *self, const dc__coll *coll) {
  dc_status status = dc__external_check_outside(self, coll);
  if (status != DC_OK) {
    fail_family(self, status);
    return false;
  }
  pthread_mutex_lock(&self->turn);
  return true;
}

static void end_turn(dc__external *self, dc_status status) {
  pthread_mutex_unlock(&self->turn);
  if (status != DC_OK) {
    fail_family(self, status);
  }
}

static void run(dc_comm *comm, const dc__coll *coll) {
  dc__external *self = (dc__external *)comm;
  if (begin_turn(self, coll)) {
    end_turn(self, run_kind(self, coll));
  }
}

static bool agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__external *self = (dc__external *)comm;
  bool same = false;
  if (begin_turn(self, coll)) {
    end_turn(self, compare(self, coll, word, &same));
  }
  return same;
}

/* ---- the communicator ---- */

static dc_status dup(dc_comm *comm, dc_comm **copy);

static void abort_family(dc_comm *comm, const char *reason) {
  dc__external *self = (dc__external *)comm;
  fail_family(self, dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group%s%.300s", comm->rank,
                             reason != NULL ? ": " : "", reason != NULL ? reason : ""));
  dc__external_abort(self->family);
}

static void release_family(dc__external_family *f) {
  if (atomic_fetch_sub(&f->refs, 1) == 1) {
    dc__external_end_watchdog(f);
    pthread_cond_destroy(&f->ends);
    pthread_mutex_destroy(&f->mutex);
    dc__free(f);
  }
}

static void leave_family(dc__external *self) {
  pthread_mutex_lock(&self->family->mutex);
  dc__external **link = &self->family->members;
  while (*link != self) {
    link = &(*link)->next;
  }
  *link = self->next;
  pthread_mutex_unlock(&self->family->mutex);
  release_family(self->family);
}

static void destroy(dc_comm *comm) {
  dc__external *self = (dc__external *)comm;
  leave_family(self);
  if (self->callbacks.destroy_user != NULL) {
    self->callbacks.destroy_user(self->callbacks.user);
  }
  dc__free(self->scratch[0]);
  dc__free(self->scratch[1]);
  pthread_mutex_destroy(&self->turn);
  dc__comm_head_destroy(comm);
  dc__free(self);
}

static const dc__comm_ops ops = {.name = "external",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .barrier = dc__host_barrier,
                                 .run = run,
                                 .agree = agree,
                                 .dup = dup,
                                 .abort = abort_family,
                                 .poll = adopt,
                                 .destroy = destroy};

static dc_status create(const dc_comm_callbacks *callbacks, dc__external_family *f, int32_t rank, int32_t world,
                        int64_t timeout_ns, dc_comm **comm) {
  dc__external *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, rank, world, timeout_ns);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  pthread_mutex_init(&self->turn, NULL);
  self->callbacks = *callbacks;
  self->family = f;
  atomic_fetch_add(&f->refs, 1);
  pthread_mutex_lock(&f->mutex);
  self->next = f->members;
  f->members = self;
  pthread_cond_signal(&f->ends); /* it has a deadline of its own */
  pthread_mutex_unlock(&f->mutex);
  *comm = &self->head;
  return DC_OK;
}

static dc_status dup(dc_comm *comm, dc_comm **copy) {
  dc__external *self = (dc__external *)comm;
  dc_comm_callbacks callbacks = self->callbacks;
  if (callbacks.dup == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_dup: the caller's table has no dup");
  }
  dc__external_enter(self, NULL, "dup");
  int32_t error = callbacks.dup(self->callbacks.user, &callbacks.user);
  dc_status late = dc__external_leave(self, NULL, error);
  if (error != 0) {
    return late;
  }
  dc_status status =
      late != DC_OK ? late : create(&callbacks, self->family, comm->rank, comm->world, comm->timeout_ns, copy);
  if (status != DC_OK && callbacks.destroy_user != NULL) {
    callbacks.destroy_user(callbacks.user);
  }
  return status;
}

dc_status dc__comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world,
                                   const dc_comm_options *options, dc_comm **comm) {
  dc__external_family *f = dc__calloc(1, sizeof *f);
  if (f == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&f->refs, 1);
  pthread_mutex_init(&f->mutex, NULL);
  dc_status status = dc__external_start_watchdog(f);
  if (status != DC_OK) {
    pthread_cond_destroy(&f->ends);
    pthread_mutex_destroy(&f->mutex);
    dc__free(f);
    return status;
  }
  status = create(callbacks, f, rank, world, options->timeout_ns, comm);
  release_family(f);
  return status;
}
