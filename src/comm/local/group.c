/* What the communicators of one rank share, and which channel of the control block each of them has. */
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm/local/local.h"

enum { LOCK_LIMIT_NS = 1000000000 }; /* the lock is held for microseconds; its holder may have been killed */

dc_status dc__local_group_create(int32_t rank, int32_t world, size_t reserve, int64_t timeout_ns,
                                 dc__local_group **out) {
  dc__local_group *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&group->refs, 1);
  group->rank = rank;
  group->world = world;
  group->processes = reserve > 0;
  group->timeout_ns = timeout_ns;
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    group->pidfds[r] = -1;
  }
  dc_status status = dc__local_heap_init(&group->heap, reserve);
  if (status != DC_OK) {
    dc__free(group);
    return status;
  }
  *out = group;
  return DC_OK;
}

static void drop_control(dc__local_group *group) {
  dc__local_control *control = group->control;
  if (control == NULL) {
    return;
  }
  /* Each process has a mapping of its own; threads share the one. */
  if (group->processes || atomic_fetch_sub_explicit(&control->refs, 1, memory_order_acq_rel) == 1) {
    munmap(control, group->processes ? dc__local_control_bytes(group->world) : dc__local_threads_bytes(group->world));
  }
}

dc_status dc__local_stage(dc__local_group *group, int32_t channel, size_t bytes, char **stage) {
  void *memory = group->stages[channel];
  if (memory == NULL && group->processes) {
    DC__TRY(dc__local_heap_alloc(&group->heap, dc__local_stage_bytes(bytes, group->world), &memory));
  } else if (memory == NULL) {
    size_t place = (size_t)channel * (size_t)group->world + (size_t)group->rank;
    memory = (char *)group->control + dc__local_control_bytes(group->world) +
             place * dc__local_stage_bytes(DC__LOCAL_EAGER, group->world);
  }
  group->stages[channel] = memory;
  *stage = memory;
  return DC_OK;
}

void dc__local_group_release(dc__local_group *group) {
  if (atomic_fetch_sub_explicit(&group->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  if (group->control != NULL) {
    atomic_store(&group->control->gone[group->rank], 1);
  }
  for (int32_t r = 0; r < group->world; r++) {
    if (group->pidfds[r] >= 0) {
      close(group->pidfds[r]);
    }
    if (group->bases[r] != 0 && r != group->rank) {
      munmap((void *)group->bases[r], group->reserves[r]);
    }
  }
  drop_control(group);
  dc__local_heap_destroy(&group->heap);
  dc__free(group);
}

static dc_status lock(const dc__local_group *group) {
  int64_t limit = dc__now_ns() + LOCK_LIMIT_NS;
  int free = 0;
  while (!atomic_compare_exchange_weak_explicit(&group->control->lock, &free, group->rank + 1, memory_order_acquire,
                                                memory_order_relaxed)) {
    if (free != 0 && dc__now_ns() > limit) {
      return dc__fail(DC_E_PEER_DEAD, "rank %d stopped while it held the group's lock", free - 1);
    }
    free = 0;
    sched_yield();
  }
  return DC_OK;
}

static void unlock(const dc__local_group *group) {
  atomic_store_explicit(&group->control->lock, 0, memory_order_release);
}

/* The n-th communicator of each rank meets the others' n-th: on the channel that the first to come chose. */
dc_status dc__local_channel_join(dc__local_group *group, int32_t *channel) {
  DC__TRY(lock(group));
  dc__local_channel *channels = group->control->channels;
  int32_t found = -1;
  for (int32_t c = DC__COMM_MAX_DUPS - 1; c >= 0; c--) {
    if (channels[c].number == group->dups + 1) {
      found = c;
      break;
    }
    if (channels[c].number == 0) {
      found = c;
    }
  }
  if (found >= 0) {
    channels[found].number = ++group->dups;
    *channel = found;
  }
  unlock(group);
  if (found < 0) {
    return dc__fail(DC_E_INVALID, "dc_comm_dup: the group has %d communicators already, which is the most",
                    (int)DC__COMM_MAX_DUPS);
  }
  atomic_fetch_add_explicit(&group->refs, 1, memory_order_relaxed);
  return DC_OK;
}

static void reset_slots(const dc__local_group *group, int32_t channel) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__local_slot *slot = dc__local_slot_of(group, channel, r);
    atomic_store(&slot->posted.value, 0);
    atomic_store(&slot->posted.sleepers, 0);
    atomic_store(&slot->done.value, 0);
    atomic_store(&slot->done.sleepers, 0);
    atomic_store(&slot->last_op, 0);
    atomic_store(&slot->left, 0);
  }
}

/* A slower rank that waits for this one must not wait on, and one that does not must not notice. */
void dc__local_channel_leave(dc__local_group *group, int32_t channel) {
  dc__local_slot *slot = dc__local_slot_of(group, channel, group->rank);
  atomic_store(&slot->left, 1);
  dc__local_raise(group, &slot->posted, atomic_load(&slot->posted.value));
  dc__local_raise(group, &slot->done, atomic_load(&slot->done.value));
  /* Nobody comes to a channel of a group that has failed; who failed it may hold the lock for ever. */
  if (atomic_load(&group->control->failed) == DC__LOCAL_FINE && lock(group) == DC_OK) {
    dc__local_channel *entry = &group->control->channels[channel];
    if (++entry->leavers == group->world) {
      reset_slots(group, channel);
      *entry = (dc__local_channel){0, 0, 0};
    }
    unlock(group);
  }
  dc__local_group_release(group);
}
