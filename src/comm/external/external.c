/* A communicator over the caller's collectives. The ranks first exchange signatures, so that a mismatch is an error and
 * not whatever the caller's library makes of it. */
#include "comm/external/external.h"

#include <inttypes.h>
#include <string.h>

#include "comm/signature.h"
#include "comm/split.h"

/* The words that ranks compare before a collective; those from SIG_AGREE_WORD on may differ. */
enum {
  SIG_FUNCTIONS,
  SIG_OP,
  SIG_KIND,
  SIG_ID,
  SIG_GRAPH,
  SIG_TOTAL,
  SIG_DTYPE,
  SIG_COUNT,
  SIG_ROOT,
  SIG_HASH,
  SIG_CAPTURED,
  SIG_ORIGIN,
  SIG_NUMBER,
  SIG_AGREE_WORD,
  SIG_MISSING_RECV,
  SIG_WORDS
};

/* ---- failures ---- */

static void external_poll_failure(dc_comm *comm) {
  dc__external_group *group = ((dc__external *)comm)->group;
  if (atomic_load_explicit(&group->failed, memory_order_acquire) != 0) {
    pthread_mutex_lock(&group->mutex);
    dc_status status = dc__failure_raise(&group->failure);
    pthread_mutex_unlock(&group->mutex);
    dc__comm_fail(comm, status);
  }
}

static void fail_group(dc__external *self, dc_status status) {
  dc__external_fail(self->group, status);
  external_poll_failure(&self->head);
}

/* For failures that other ranks may not see, such as in this rank's part of a collective, for which they may wait. */
static dc_status fail_alone(dc__external *self, dc_status status) {
  if (status != DC_OK) {
    dc__external_fail_alone(self->group, status);
    external_poll_failure(&self->head);
  }
  return status;
}

/* ---- the comparison ---- */

static void make_signature(const dc__external *self, const dc__coll *coll, int64_t signature[SIG_WORDS]) {
  uint64_t hash = 0;
  const bool shared = coll->kind != DC__COLL_ALL_TO_ALL; /* an all-to-all's sizes differ by rank */
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    hash = hash * 31 + (shared ? dc__coll_ranges_hash(item, self->head.world) : 0);
    hash = hash * 31 + (shared ? (uint64_t)item->total : 0);
    hash = hash * 31 + (uint64_t)item->id;
    hash = hash * 31 + (uint64_t)item->dtype * 4 + (uint64_t)item->reduce_op;
  }
  const dc__coll_item none = {.total = 0};
  const dc__coll_item *first = coll->count > 0 ? &coll->items[0] : &none;
  signature[SIG_FUNCTIONS] = dc__external_functions(&self->callbacks);
  signature[SIG_OP] = coll->tag.op;
  signature[SIG_KIND] = coll->kind;
  signature[SIG_ID] = coll->tag.id;
  signature[SIG_GRAPH] = coll->tag.graph_id;
  signature[SIG_TOTAL] = shared ? first->total : 0;
  signature[SIG_DTYPE] = first->dtype * 4 + first->reduce_op;
  signature[SIG_COUNT] = coll->count;
  signature[SIG_ROOT] = coll->root;
  signature[SIG_HASH] = (int64_t)hash;
  signature[SIG_CAPTURED] = coll->captured;
  signature[SIG_ORIGIN] = (int64_t)self->head.origin;
  signature[SIG_NUMBER] = (int64_t)coll->tag.number;
}

static void external_describe_signature(char text[DC__COLL_TEXT], const int64_t *signature) {
  const dc__coll_name name = {.graph_id = DC__COLL_NO_GRAPH,
                              .id = signature[SIG_ID],
                              .total = signature[SIG_TOTAL],
                              .op = (int32_t)signature[SIG_OP],
                              .kind = (int32_t)signature[SIG_KIND],
                              .count = (int32_t)signature[SIG_COUNT],
                              .dtype = (int32_t)(signature[SIG_DTYPE] / 4),
                              .reduce_op = (int32_t)(signature[SIG_DTYPE] % 4),
                              .root = (int32_t)signature[SIG_ROOT]};
  dc__coll_describe(text, &name);
}

static dc__call_order order_of(const int64_t *signature) {
  return (dc__call_order){.origin = (uint64_t)signature[SIG_ORIGIN], .number = (uint64_t)signature[SIG_NUMBER]};
}

static dc__tag external_tag_of(const int64_t *signature) {
  return (dc__tag){.graph_id = signature[SIG_GRAPH], .id = signature[SIG_ID], .op = (int32_t)signature[SIG_OP]};
}

static dc_status exchange_signatures(dc__external *self, const dc__coll *coll, uint64_t word) {
  const dc_comm_callbacks *c = &self->callbacks;
  int64_t own[SIG_WORDS];
  make_signature(self, coll, own);
  own[SIG_AGREE_WORD] = (int64_t)word;
  own[SIG_MISSING_RECV] = 1 + dc__coll_missing_recv(coll, self->head.rank);
  DC__TRY(dc__external_callback_begin(self, coll, "all_gather"));
  return dc__external_callback_end(self, coll, c->all_gather(own, self->signatures, SIG_WORDS, DC_INT64, c->user));
}

static dc_status compare_with_rank_zero(const int64_t *zero, int32_t r, const int64_t *other) {
  char zero_text[DC__COLL_TEXT];
  char other_text[DC__COLL_TEXT];
  if (zero[SIG_FUNCTIONS] != other[SIG_FUNCTIONS]) {
    return dc__external_fail_functions(r, other[SIG_FUNCTIONS], zero[SIG_FUNCTIONS]);
  }
  if (zero[SIG_CAPTURED] != other[SIG_CAPTURED]) {
    const dc__tag zero_tag = external_tag_of(zero), other_tag = external_tag_of(other);
    return other[SIG_CAPTURED] != 0 ? dc__coll_fail_capture_mismatch(r, &other_tag, 0, &zero_tag)
                                    : dc__coll_fail_capture_mismatch(0, &zero_tag, r, &other_tag);
  }
  external_describe_signature(zero_text, zero);
  external_describe_signature(other_text, other);
  if (memcmp(zero, other, SIG_ORIGIN * sizeof *zero) == 0) {
    return dc__call_order_compare(zero_text, 0, order_of(zero), r, order_of(other));
  }
  return dc__fail(DC_E_MISMATCH, "rank %" PRId32 " called %s where rank 0 called %s%s", r, other_text, zero_text,
                  strcmp(zero_text, other_text) == 0 ? ", which differ in graph, split or a later tensor" : "");
}

/* Sets *same if all ranks passed the same word. All ranks find the same differences. */
static dc_status external_compare_signatures(dc__external *self, const dc__coll *coll, uint64_t word, bool *same) {
  const int64_t *all = self->signatures;
  *same = true;
  DC__TRY(fail_alone(self, exchange_signatures(self, coll, word)));
  for (int32_t r = 1; r < self->head.world; r++) {
    const int64_t *other = &all[(size_t)r * SIG_WORDS];
    *same = *same && other[SIG_AGREE_WORD] == all[SIG_AGREE_WORD];
    DC__TRY(memcmp(all, other, SIG_AGREE_WORD * sizeof *all) == 0 ? DC_OK : compare_with_rank_zero(all, r, other));
  }
  for (int32_t r = 0; r < self->head.world; r++) {
    int64_t missing_recv = all[(size_t)r * SIG_WORDS + SIG_MISSING_RECV];
    if (missing_recv > 0 && missing_recv <= coll->count) {
      return dc__coll_fail_missing_recv(coll->items[missing_recv - 1].id, r);
    }
  }
  return DC_OK;
}

/* ---- a collective ---- */

static dc_status external_move_data(dc__external *self, const dc__coll *coll) {
  const dc_comm_callbacks *c = &self->callbacks;
  if (coll->kind == DC__COLL_GATHER) {
    return dc__external_gather(self, coll);
  }
  if (coll->kind == DC__COLL_REDUCE) {
    return dc__external_reduce(self, coll);
  }
  if (coll->kind == DC__COLL_ALL_TO_ALL) {
    return dc__external_all_to_all(self, coll);
  }
  if (coll->kind == DC__COLL_BROADCAST) {
    const int64_t bytes = coll->items[0].total;
    atomic_fetch_add(&self->head.wire_bytes, coll->root == self->head.rank ? 0 : bytes);
    if (bytes == 0) {
      return DC_OK;
    }
    DC__TRY(dc__external_callback_begin(self, coll, "broadcast"));
    return dc__external_callback_end(self, coll, c->broadcast(coll->items[0].recv, bytes, coll->root, c->user));
  }
  DC__TRY(dc__external_callback_begin(self, coll, "barrier"));
  return dc__external_callback_end(self, coll, c->barrier(c->user));
}

static dc_status external_run_collective(dc__external *self, const dc__coll *coll) {
  bool same;
  DC__TRY(external_compare_signatures(self, coll, 0, &same));
  if (coll->kind == DC__COLL_ALL_TO_ALL) {
    DC__TRY(fail_alone(self, dc__external_exchange_counts(self, coll)));
    DC__TRY(dc__external_compare_counts(self, coll));
  }
  return fail_alone(self, external_move_data(self, coll));
}

/* False if this thread is in a callback of this communicator. That fails the group, and dc__external_callback_end()
 * aborts it. */
static bool external_begin_collective(dc__external *self, const dc__coll *coll) {
  dc_status status = dc__external_check_reentry(self, coll);
  if (status != DC_OK) {
    fail_group(self, status);
    return false;
  }
  pthread_mutex_lock(&self->collective_mutex);
  return true;
}

static void external_finish_collective(dc__external *self, dc_status status) {
  pthread_mutex_unlock(&self->collective_mutex);
  if (status != DC_OK) {
    fail_group(self, status);
  }
}

static void external_run(dc_comm *comm, const dc__coll *coll) {
  dc__external *self = (dc__external *)comm;
  if (external_begin_collective(self, coll)) {
    external_finish_collective(self, external_run_collective(self, coll));
  }
}

static bool external_agree(dc_comm *comm, const dc__coll *coll, uint64_t word) {
  dc__external *self = (dc__external *)comm;
  bool same = false;
  if (external_begin_collective(self, coll)) {
    external_finish_collective(self, external_compare_signatures(self, coll, word, &same));
  }
  return same;
}

/* ---- the communicator ---- */

static dc_status external_dup(dc_comm *comm, dc_comm **copy);
static dc_status external_split(dc_comm *comm, const dc__split *split, dc_comm **part);

static void external_fail_group(dc_comm *comm, dc_status status) {
  (void)fail_alone((dc__external *)comm, status);
}

static void external_abort_group(dc_comm *comm, const char *reason) {
  dc__external *self = (dc__external *)comm;
  (void)fail_alone(self, dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group%s%.300s", comm->rank,
                                  reason != NULL ? ": " : "", reason != NULL ? reason : ""));
}

static void release_group(dc__external_group *group) {
  if (atomic_fetch_sub(&group->refs, 1) == 1) {
    dc__external_stop_watchdog(group);
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->mutex);
    dc__free(group);
  }
}

static void leave_group(dc__external *self) {
  pthread_mutex_lock(&self->group->mutex);
  dc__external **link = &self->group->members;
  while (*link != self) {
    link = &(*link)->next;
  }
  *link = self->next;
  pthread_mutex_unlock(&self->group->mutex);
  release_group(self->group);
}

static void external_destroy(dc_comm *comm) {
  dc__external *self = (dc__external *)comm;
  leave_group(self);
  if (self->callbacks.destroy_user != NULL) {
    self->callbacks.destroy_user(self->callbacks.user);
  }
  for (size_t i = 0; i < DC__COUNT(self->scratch); i++) {
    dc__free(self->scratch[i]);
  }
  dc__free(self->signatures);
  pthread_mutex_destroy(&self->collective_mutex);
  dc__comm_head_destroy(comm);
  dc__free(self);
}

static const dc__comm_ops ops = {.name = "external",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__host_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = external_run,
                                 .agree = external_agree,
                                 .dup = external_dup,
                                 .split = external_split,
                                 .abort = external_abort_group,
                                 .fail_group = external_fail_group,
                                 .poll = external_poll_failure,
                                 .destroy = external_destroy};

static dc_status external_create(const dc_comm_callbacks *callbacks, dc__external_group *group, int32_t rank,
                                 int32_t world, int64_t timeout_ns, dc_comm **comm) {
  dc__external *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  self->signatures = dc__calloc((size_t)world * SIG_WORDS, sizeof *self->signatures);
  dc_status status =
      self->signatures == NULL ? DC_E_NO_MEMORY : dc__comm_head_init(&self->head, &ops, rank, world, timeout_ns);
  if (status != DC_OK) {
    dc__free(self->signatures);
    dc__free(self);
    return status;
  }
  pthread_mutex_init(&self->collective_mutex, NULL);
  self->callbacks = *callbacks;
  self->group = group;
  atomic_fetch_add(&group->refs, 1);
  pthread_mutex_lock(&group->mutex);
  self->next = group->members;
  group->members = self;
  pthread_cond_signal(&group->changed); /* for the watchdog: the member has its own deadline */
  pthread_mutex_unlock(&group->mutex);
  *comm = &self->head;
  return DC_OK;
}

static dc_status external_dup(dc_comm *comm, dc_comm **copy) {
  dc__external *self = (dc__external *)comm;
  dc_comm_callbacks callbacks = self->callbacks;
  if (callbacks.dup == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_dup: the caller's table has no dup");
  }
  DC__TRY(dc__external_callback_begin(self, NULL, "dup"));
  int32_t error = callbacks.dup(self->callbacks.user, &callbacks.user);
  dc_status ended = dc__external_callback_end(self, NULL, error);
  if (error != 0) {
    return ended;
  }
  dc_status status = ended != DC_OK
                         ? ended
                         : external_create(&callbacks, self->group, comm->rank, comm->world, comm->timeout_ns, copy);
  if (status != DC_OK && callbacks.destroy_user != NULL) {
    callbacks.destroy_user(callbacks.user);
  }
  return status;
}

/* Makes a communicator in a group of its own. */
static dc_status external_create_group(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world,
                                       int64_t timeout_ns, dc_comm **comm) {
  dc__external_group *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&group->refs, 1);
  pthread_mutex_init(&group->mutex, NULL);
  dc_status status = dc__external_start_watchdog(group);
  if (status != DC_OK) {
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->mutex);
    dc__free(group);
    return status;
  }
  status = external_create(callbacks, group, rank, world, timeout_ns, comm);
  release_group(group);
  return status;
}

dc_status dc__comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world,
                                   const dc_comm_options *options, dc_comm **comm) {
  return external_create_group(callbacks, rank, world, options->timeout_ns, comm);
}

/* All ranks' callbacks run, also that of a rank without a color. */
static dc_status external_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  dc__external *self = (dc__external *)comm;
  dc_comm_callbacks callbacks = self->callbacks;
  if (callbacks.split == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_split: the caller's table has no split");
  }
  callbacks.user = NULL;
  DC__TRY(dc__external_callback_begin(self, NULL, "split"));
  int32_t error = callbacks.split(split->members, split->world, self->callbacks.user, &callbacks.user);
  dc_status ended = dc__external_callback_end(self, NULL, error);
  if (error != 0 || split->world == 0) {
    return ended;
  }
  dc_status status =
      ended != DC_OK ? ended : external_create_group(&callbacks, split->rank, split->world, comm->timeout_ns, part);
  if (status != DC_OK && callbacks.destroy_user != NULL) {
    callbacks.destroy_user(callbacks.user);
  }
  return status;
}
