/* Waiting for other ranks. A wait spins briefly, then sleeps in slices: between them it looks whether the group has
 * failed, whether the rank it waits for has left or died, and whether time is up. */
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

#include "comm/local/local.h"
#include "comm/ranks.h"

enum { LONG_SPIN = 256, SHORT_SPIN = 16, PROBE = 32, HOPE = 8, SLICE_NS = 20000000 };

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

/* False: the time is over and nobody woke us. */
static bool sleep_on(const dc__local_group *group, atomic_uint *word, uint32_t value, int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  return 0 == syscall(SYS_futex, word, group->processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, &t, NULL, 0) ||
         errno != ETIMEDOUT;
}

static void wake(const dc__local_group *group, atomic_uint *word) {
  (void)syscall(SYS_futex, word, group->processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* The store and the load are seq_cst, as are a sleeper's counting and its look at the value: one of the two sees the
 * other. */
void dc__local_raise(const dc__local_group *group, dc__local_word *word, uint32_t seq) {
  atomic_store(&word->value, seq);
  if (atomic_load(&word->sleepers) > 0) {
    wake(group, &word->value);
  }
}

static bool reached(dc__local_word *word, uint32_t seq) {
  return (int32_t)(atomic_load(&word->value) - seq) >= 0; /* numbers wrap */
}

/* ---- the group's failure ---- */

static void wake_all(const dc__local_group *group) {
  for (int32_t c = 0; c < dc__local_channel_count(group); c++) { /* who sleeps on others looks after a slice */
    for (int32_t r = 0; r < group->world; r++) {
      dc__local_slot *slot = dc__local_slot_of(group, c, r);
      if (atomic_load(&slot->posted.sleepers) > 0) {
        wake(group, &slot->posted.value);
      }
      if (atomic_load(&slot->done.sleepers) > 0) {
        wake(group, &slot->done.value);
      }
    }
  }
}

void dc__local_group_fail(const dc__local_group *group, dc_status status) {
  dc__local_control *control = group->control;
  int fine = DC__LOCAL_FINE;
  if (atomic_compare_exchange_strong(&control->failed, &fine, DC__LOCAL_FAILING)) {
    dc__failure_keep(&control->failure, status);
    atomic_store(&control->failed, DC__LOCAL_FAILED);
    wake_all(group);
  }
}

dc_status dc__local_group_check(const dc__local_group *group) {
  dc__local_control *control = group->control;
  int failed = atomic_load_explicit(&control->failed, memory_order_acquire);
  if (failed == DC__LOCAL_FINE) {
    return DC_OK;
  }
  /* The text takes a microsecond to write, unless its writer was killed. */
  for (int i = 0; failed == DC__LOCAL_FAILING && i < 100; i++) {
    const struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
    failed = atomic_load_explicit(&control->failed, memory_order_acquire);
  }
  if (failed == DC__LOCAL_FAILING) {
    return dc__fail(DC_E_PEER_DEAD, "a rank ended while it reported a failure of the group");
  }
  return dc__failure_raise(&control->failure);
}

/* Reading is copying, which ends soon. Processes read nothing but memory files, which outlive everybody. */
void dc__local_await_readers(const dc__local *self) {
  const dc__local_group *group = self->group;
  for (int32_t r = 0; r < group->world && !group->processes; r++) {
    while (r != group->rank && atomic_load(&dc__local_slot_of(group, self->channel, r)->reading) != 0) {
      sched_yield();
    }
  }
}

/* ---- waiting ---- */

typedef struct waiting {
  dc__local *self;
  const dc__coll *coll;
  uint32_t seq;
  bool posted; /* for the rank's call, else for the end of its reading */
  int64_t deadline;
} waiting;

static dc__local_word *word_of(const waiting *w, int32_t rank) {
  dc__local_slot *slot = dc__local_slot_of(w->self->group, w->self->channel, rank);
  return w->posted ? &slot->posted : &slot->done;
}

static bool has_died(const dc__local_group *group, int32_t rank) {
  struct pollfd fd = {.fd = group->pidfds[rank], .events = POLLIN};
  return fd.fd >= 0 && poll(&fd, 1, 0) == 1;
}

/* What a rank did last, on every channel where it did anything: the usual clue to why it is late. */
static void describe_rank(const dc__local_group *group, int32_t rank, char *text, size_t cap) {
  size_t used = (size_t)snprintf(text, cap, "rank %" PRId32 " last started", rank);
  const char *separator = " ";
  for (int32_t c = 0; c < dc__local_channel_count(group); c++) {
    dc__local_slot *slot = dc__local_slot_of(group, c, rank);
    int32_t op = atomic_load_explicit(&slot->last_op, memory_order_relaxed);
    if (op != 0 && used < cap) {
      char name[DC__COLL_TEXT];
      dc__coll_describe_tag(name, op, atomic_load_explicit(&slot->last_id, memory_order_relaxed));
      used += (size_t)snprintf(text + used, cap - used, "%s%s on channel %" PRId32, separator, name, c);
      separator = ", ";
    }
  }
  if (separator[0] == ' ' && used < cap) {
    snprintf(text + used, cap - used, " nothing");
  }
}

/* Those of a channel that have not posted, or not done, a round. */
static void add_late(const dc__local_group *group, int32_t channel, int32_t but, uint32_t seq, bool posted,
                     dc__rank_set *late) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__local_slot *slot = dc__local_slot_of(group, channel, r);
    if (r != but && !reached(posted ? &slot->posted : &slot->done, seq)) {
      dc__rank_set_add(late, r);
    }
  }
}

static dc__rank_set waits_for(const void *context, int32_t rank) {
  const dc__local_group *group = context;
  dc__rank_set ranks = {{0}};
  for (int32_t c = 0; c < dc__local_channel_count(group); c++) {
    int64_t round = atomic_load_explicit(&dc__local_slot_of(group, c, rank)->waits, memory_order_relaxed);
    if (round != 0) {
      add_late(group, c, rank, (uint32_t)(round < 0 ? -round : round), round > 0, &ranks);
    }
  }
  return ranks;
}

static dc_status fail_late(const waiting *w) {
  const dc__local_group *group = w->self->group;
  dc__rank_set lacking = {{0}};
  add_late(group, w->self->channel, group->rank, w->seq, w->posted, &lacking);
  if (dc__rank_set_is_empty(&lacking)) {
    return DC_OK; /* the last one came while we looked */
  }
  const dc__rank_set late = dc__ranks_late(group->rank, group->world, &lacking, waits_for, group);
  const dc__ranks names = dc__ranks_of(&late, group->world);
  int32_t first = 0;
  while (!dc__rank_set_has(&late, first)) {
    first++;
  }
  char name[DC__COLL_TEXT];
  char last[200];
  dc__coll_describe_tag(name, w->coll->tag.op, w->coll->tag.id);
  describe_rank(group, first, last, sizeof last);
  bool reads = !w->posted && dc__rank_set_has(&lacking, first);
  return dc__fail(DC_E_TIMEOUT,
                  "rank %" PRId32 " waited %.1f s at %s (channel %" PRId32 ") for rank%s %s of %" PRId32 " %s; %s",
                  group->rank, (double)w->self->head.timeout_ns / 1e9, name, w->self->channel,
                  names.count > 1 ? "s" : "", names.text, group->world, reads ? "to read" : "to come", last);
}

/* Why a wait for `rank` should end in an error, if so. Whether its process lives takes a system call: only after a
 * slice without news. */
static dc_status look(const waiting *w, int32_t rank, bool quiet) {
  const dc__local_group *group = w->self->group;
  DC__TRY(dc__local_group_check(group));
  bool left = atomic_load(&dc__local_slot_of(group, w->self->channel, rank)->left) != 0 ||
              atomic_load(&group->control->gone[rank]) != 0;
  bool died = !left && quiet && has_died(group, rank);
  if ((left || died) && !reached(word_of(w, rank), w->seq)) {
    char name[DC__COLL_TEXT];
    dc__coll_describe_tag(name, w->coll->tag.op, w->coll->tag.id);
    return dc__fail(DC_E_PEER_DEAD, "rank %" PRId32 " %s while rank %" PRId32 " waited for it at %s", rank,
                    left ? "destroyed its communicator" : "died (its process ended)", group->rank, name);
  }
  if (quiet && w->posted) {
    DC__TRY(dc__local_look_crossed(w->self, w->coll));
  }
  return dc__now_ns() < w->deadline ? DC_OK : fail_late(w);
}

void dc__local_watch(const dc__local *self) {
  const dc__local_group *group = self->group;
  for (int32_t r = 0; r < group->world; r++) {
    if (r != group->rank && atomic_load(&group->control->gone[r]) == 0 && has_died(group, r)) {
      dc__local_group_fail(group, dc__fail(DC_E_PEER_DEAD,
                                           "rank %" PRId32 " died (its process ended) while rank %" PRId32
                                           " waited for a collective of all",
                                           r, group->rank));
    }
  }
}

static dc_status sleep_until(const waiting *w, int32_t rank) {
  dc__local_word *word = word_of(w, rank);
  w->self->crossing.since = 0;
  dc_status status = DC_OK;
  bool quiet = false;
  /* For ranks that wait for this one: whom it waits for in turn. */
  dc__local_slot *own = dc__local_slot_of(w->self->group, w->self->channel, w->self->head.rank);
  atomic_store_explicit(&own->waits, w->posted ? (int64_t)w->seq : -(int64_t)w->seq, memory_order_relaxed);
  atomic_fetch_add(&word->sleepers, 1);
  while (status == DC_OK) {
    uint32_t value = atomic_load(&word->value);
    if ((int32_t)(value - w->seq) >= 0) {
      break;
    }
    status = look(w, rank, quiet);
    if (status == DC_OK) {
      int64_t rest = w->deadline - dc__now_ns();
      quiet = !sleep_on(w->self->group, &word->value, value, rest < 1 ? 1 : rest < SLICE_NS ? rest : SLICE_NS);
    }
  }
  atomic_fetch_sub(&word->sleepers, 1);
  atomic_store_explicit(&own->use.held, 0, memory_order_relaxed);
  atomic_store_explicit(&own->waits, 0, memory_order_relaxed);
  return status;
}

/* Spinning pays when the other rank runs on another core, and robs it of its core otherwise. So a rank spins long while
 * that has worked lately, and else only once in a while, to find out. */
static bool spin_until(dc__local *self, dc__local_word *word, uint32_t seq) {
  int spins = self->hope > 0 || self->waits++ % PROBE == 0 ? LONG_SPIN : SHORT_SPIN;
  for (int i = 0; i < spins; i++) {
    if (reached(word, seq)) {
      self->hope = HOPE;
      return true;
    }
    relax();
  }
  self->hope -= self->hope > 0;
  return false;
}

static dc_status await(waiting *w) {
  const dc__local_group *group = w->self->group;
  for (int32_t i = 1; i < group->world; i++) {
    int32_t rank = (group->rank + i) % group->world;
    dc__local_word *word = word_of(w, rank);
    if (!reached(word, w->seq) && !spin_until(w->self, word, w->seq)) {
      if (w->deadline == 0) {
        w->deadline = dc__now_ns() + w->self->head.timeout_ns;
      }
      DC__TRY(sleep_until(w, rank));
    }
  }
  return DC_OK;
}

dc_status dc__local_await_posted(dc__local *self, const dc__coll *coll, uint32_t seq) {
  waiting w = {self, coll, seq, true, 0};
  return await(&w);
}

dc_status dc__local_await_done(dc__local *self, const dc__coll *coll, uint32_t seq) {
  waiting w = {self, coll, seq, false, 0};
  return await(&w);
}
