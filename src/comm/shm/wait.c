/* Waiting for other ranks. A wait spins briefly, then sleeps in slices. Between slices it checks for a failure of the
 * group or a parent, for a peer that left or died, and for the deadline. */
#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/rank_set.h"
#include "comm/shm/shm.h"

enum { SLICE_NS = 20000000 };

/* False if the time ran out. */
static bool futex_wait(const dc__shm_group *group, atomic_uint *counter, uint32_t value, int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  return 0 == syscall(SYS_futex, counter, group->processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, &t, NULL, 0) ||
         errno != ETIMEDOUT;
}

static void futex_wake(const dc__shm_group *group, atomic_uint *counter) {
  (void)syscall(SYS_futex, counter, group->processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* The store and the load are seq_cst, as are a waiter's increment and its load of the value. So one of the two sees the
 * other, and no wake-up is lost. */
void dc__shm_signal(const dc__shm_group *group, dc__shm_counter *counter, uint32_t seq) {
  atomic_store(&counter->value, seq);
  if (atomic_load(&counter->waiters) > 0) {
    futex_wake(group, &counter->value);
  }
}

static bool has_reached(dc__shm_counter *counter, uint32_t seq) {
  return (int32_t)(atomic_load(&counter->value) - seq) >= 0; /* sequence numbers wrap */
}

/* ---- the group's failure ---- */

static void futex_wake_all(const dc__shm_group *group) {
  /* A rank on an unmapped channel finds out after a slice. */
  for (int32_t c = 0; c < dc__shm_channel_count(group); c++) {
    for (int32_t r = 0; r < group->world; r++) {
      dc__shm_slot *slot = dc__shm_slot_of(group, c, r);
      if (atomic_load(&slot->posted.waiters) > 0) {
        futex_wake(group, &slot->posted.value);
      }
      if (atomic_load(&slot->done.waiters) > 0) {
        futex_wake(group, &slot->done.value);
      }
    }
  }
}

void dc__shm_group_fail(const dc__shm_group *group, dc_status status) {
  dc__shm_control *control = group->control;
  int healthy = DC__SHM_HEALTHY;
  if (atomic_compare_exchange_strong(&control->failed, &healthy, DC__SHM_FAILING)) {
    dc__failure_keep(&control->failure, status);
    atomic_store(&control->failed, DC__SHM_FAILED);
    futex_wake_all(group);
  }
}

dc_status dc__shm_group_check(const dc__shm_group *group) {
  dc__shm_control *control = group->control;
  int failed = atomic_load_explicit(&control->failed, memory_order_acquire);
  if (failed == DC__SHM_HEALTHY) {
    return DC_OK;
  }
  /* Writing the text takes microseconds, unless its writer was killed. */
  for (int i = 0; failed == DC__SHM_FAILING && i < 100; i++) {
    const struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
    failed = atomic_load_explicit(&control->failed, memory_order_acquire);
  }
  if (failed == DC__SHM_FAILING) {
    return dc__fail(DC_E_PEER_DEAD, "a rank ended while it reported a failure of the group");
  }
  return dc__failure_raise(&control->failure);
}

/* A read is a short copy. With processes peers read memory files only, which stay valid while mapped. */
void dc__shm_wait_readers(const dc__shm *self) {
  const dc__shm_group *group = self->group;
  for (int32_t r = 0; r < group->world && !group->processes; r++) {
    while (r != group->rank && atomic_load(&dc__shm_slot_of(group, self->channel, r)->reading) != 0) {
      sched_yield();
    }
  }
}

/* ---- waiting ---- */

typedef struct wait_state {
  dc__shm *self;
  const dc__coll *coll;
  uint32_t seq;
  bool posted; /* waits for the peers' posts, else for the end of their reads */
  int64_t deadline;
} wait_state;

static dc__shm_counter *counter_of(const wait_state *w, int32_t rank) {
  dc__shm_slot *slot = dc__shm_slot_of(w->self->group, w->self->channel, rank);
  return w->posted ? &slot->posted : &slot->done;
}

bool dc__shm_has_exited(const dc__shm_group *group, int32_t rank) {
  struct pollfd fd = {.fd = group->pidfds[rank], .events = POLLIN};
  return fd.fd >= 0 && poll(&fd, 1, 0) == 1;
}

/* A rank's last collective on each channel: usually the clue to why it is late. */
static void describe_rank(const dc__shm_group *group, int32_t rank, char *text, size_t cap) {
  size_t used = (size_t)snprintf(text, cap, "rank %" PRId32 " last started", rank);
  const char *separator = " ";
  for (int32_t c = 0; c < dc__shm_channel_count(group); c++) {
    dc__shm_slot *slot = dc__shm_slot_of(group, c, rank);
    int32_t op = atomic_load_explicit(&slot->last_op, memory_order_relaxed);
    if (op != 0 && used < cap) {
      char name[DC__COLL_TEXT];
      dc__coll_describe_op(name, op, atomic_load_explicit(&slot->last_id, memory_order_relaxed));
      used += (size_t)snprintf(text + used, cap - used, "%s%s on channel %" PRId32, separator, name, c);
      separator = ", ";
    }
  }
  if (separator[0] == ' ' && used < cap) {
    snprintf(text + used, cap - used, " nothing");
  }
}

/* Adds the ranks of a channel that have not posted, or finished, a round. */
static void add_missing(const dc__shm_group *group, int32_t channel, int32_t except, uint32_t seq, bool posted,
                        dc__rank_set *missing) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__shm_slot *slot = dc__shm_slot_of(group, channel, r);
    if (r != except && !has_reached(posted ? &slot->posted : &slot->done, seq)) {
      dc__rank_set_add(missing, r);
    }
  }
}

static dc__rank_set missing_of(const void *context, int32_t rank) {
  const dc__shm_group *group = context;
  dc__rank_set ranks = {{0}};
  for (int32_t c = 0; c < dc__shm_channel_count(group); c++) {
    int64_t round = atomic_load_explicit(&dc__shm_slot_of(group, c, rank)->waits, memory_order_relaxed);
    if (round != 0) {
      add_missing(group, c, rank, (uint32_t)(round < 0 ? -round : round), round > 0, &ranks);
    }
  }
  return ranks;
}

static dc_status shm_fail_timeout(const wait_state *w) {
  const dc__shm_group *group = w->self->group;
  dc__rank_set missing = {{0}};
  add_missing(group, w->self->channel, group->rank, w->seq, w->posted, &missing);
  if (dc__rank_set_is_empty(&missing)) {
    return DC_OK; /* the last one arrived meanwhile */
  }
  const dc__rank_set stragglers = dc__rank_set_stragglers(group->rank, group->world, &missing, missing_of, group);
  const dc__rank_list names = dc__rank_list_of(&stragglers, group->world);
  int32_t first = 0;
  while (!dc__rank_set_has(&stragglers, first)) {
    first++;
  }
  char name[DC__COLL_TEXT];
  char last[200];
  dc__coll_describe_op(name, w->coll->tag.op, w->coll->tag.id);
  describe_rank(group, first, last, sizeof last);
  bool reads = !w->posted && dc__rank_set_has(&missing, first);
  return dc__fail(DC_E_TIMEOUT,
                  "rank %" PRId32 " waited %.1f s at %s (channel %" PRId32 ") for rank%s %s of %" PRId32 " %s; %s",
                  group->rank, (double)w->self->head.timeout_ns / 1e9, name, w->self->channel,
                  names.count > 1 ? "s" : "", names.text, group->world, reads ? "to read" : "to come", last);
}

/* An error if the wait for `rank` should end. Only an idle slice checks the rank's process, which takes a system
 * call. */
static dc_status check_wait(const wait_state *w, int32_t rank, bool idle) {
  const dc__shm_group *group = w->self->group;
  DC__TRY(dc__shm_group_check(group));
  DC__TRY(dc__comm_check_parents(&w->self->head));
  bool left = atomic_load(&dc__shm_slot_of(group, w->self->channel, rank)->left) != 0 ||
              atomic_load(&group->control->released[rank]) != 0;
  bool died = !left && idle && dc__shm_has_exited(group, rank);
  if ((left || died) && !has_reached(counter_of(w, rank), w->seq)) {
    char name[DC__COLL_TEXT];
    dc__coll_describe_op(name, w->coll->tag.op, w->coll->tag.id);
    return dc__fail(DC_E_PEER_DEAD, "rank %" PRId32 " %s while rank %" PRId32 " waited for it at %s", rank,
                    left ? "destroyed its communicator" : "died (its process ended)", group->rank, name);
  }
  if (idle && w->posted) {
    DC__TRY(dc__shm_check_deadlock(w->self, w->coll));
  }
  return dc__now_ns() < w->deadline ? DC_OK : shm_fail_timeout(w);
}

void dc__shm_check_peers(const dc__shm *self) {
  const dc__shm_group *group = self->group;
  for (int32_t r = 0; r < group->world; r++) {
    if (r != group->rank && atomic_load(&group->control->released[r]) == 0 && dc__shm_has_exited(group, r)) {
      dc__shm_group_fail(group, dc__fail(DC_E_PEER_DEAD,
                                         "rank %" PRId32 " died (its process ended) while rank %" PRId32
                                         " waited for a collective of all",
                                         r, group->rank));
    }
  }
}

static dc_status sleep_until_reached(const wait_state *w, int32_t rank) {
  dc__shm_counter *counter = counter_of(w, rank);
  w->self->cycle.since = 0;
  dc_status status = DC_OK;
  bool idle = false;
  /* Lets peers that wait for this rank follow the chain of waits (missing_of). */
  dc__shm_slot *own = dc__shm_slot_of(w->self->group, w->self->channel, w->self->head.rank);
  atomic_store_explicit(&own->waits, w->posted ? (int64_t)w->seq : -(int64_t)w->seq, memory_order_relaxed);
  atomic_fetch_add(&counter->waiters, 1);
  while (status == DC_OK) {
    uint32_t value = atomic_load(&counter->value);
    if ((int32_t)(value - w->seq) >= 0) {
      break;
    }
    status = check_wait(w, rank, idle);
    if (status == DC_OK) {
      int64_t rest = w->deadline - dc__now_ns();
      idle = !futex_wait(w->self->group, &counter->value, value, rest < 1 ? 1 : rest < SLICE_NS ? rest : SLICE_NS);
    }
  }
  atomic_fetch_sub(&counter->waiters, 1);
  atomic_store_explicit(&own->usage.blocked_in, 0, memory_order_relaxed);
  atomic_store_explicit(&own->waits, 0, memory_order_relaxed);
  return status;
}

static bool shm_spin_until(dc__shm *self, dc__shm_counter *counter, uint32_t seq) {
  bool reached = has_reached(counter, seq);
  for (int spins = dc__spin_begin(&self->spin); spins > 0 && !reached; spins--) {
    dc__cpu_relax();
    reached = has_reached(counter, seq);
  }
  return dc__spin_end(&self->spin, reached);
}

static dc_status wait_for_all(wait_state *w) {
  const dc__shm_group *group = w->self->group;
  for (int32_t i = 1; i < group->world; i++) {
    int32_t rank = (group->rank + i) % group->world;
    dc__shm_counter *counter = counter_of(w, rank);
    if (!has_reached(counter, w->seq) && !shm_spin_until(w->self, counter, w->seq)) {
      if (w->deadline == 0) {
        w->deadline = dc__now_ns() + w->self->head.timeout_ns;
      }
      DC__TRY(sleep_until_reached(w, rank));
    }
  }
  return DC_OK;
}

dc_status dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq) {
  wait_state w = {.self = self, .coll = coll, .seq = seq, .posted = true};
  return wait_for_all(&w);
}

dc_status dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq) {
  wait_state w = {.self = self, .coll = coll, .seq = seq, .posted = false};
  return wait_for_all(&w);
}
