/* Assigns channels of the control block to communicators. Channels are reused, and segments are added when all are
 * taken, so a group may have any number of communicators. */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "comm/shm/shm.h"

enum { BRIEF_NS = 10000000 /* longer than the lock is held, unless its holder cannot run */ };

/* ---- segments ---- */

static size_t slot_bytes(int32_t world, int32_t segment) {
  return sizeof(dc__shm_slot) * (size_t)dc__shm_channels_in(segment) * (size_t)world;
}

/* A segment's slots and channels, in whole pages. */
static size_t shared_bytes(int32_t world, int32_t segment) {
  size_t bytes = slot_bytes(world, segment) + sizeof(dc__shm_channel) * (size_t)dc__shm_channels_in(segment);
  return (bytes + DC__SHM_PAGE_BYTES - 1) & ~(size_t)(DC__SHM_PAGE_BYTES - 1);
}

/* With threads the ranks' staging memory follows; unused pages take no memory. */
static size_t threads_bytes(int32_t world, int32_t segment) {
  return shared_bytes(world, segment) +
         dc__shm_staging_bytes(DC__SHM_EAGER_BYTES, world) * (size_t)dc__shm_channels_in(segment) * (size_t)world;
}

static size_t file_offset(int32_t world, int32_t segment) {
  size_t offset = dc__shm_control_bytes();
  for (int32_t s = 0; s < segment; s++) {
    offset += shared_bytes(world, s);
  }
  return offset;
}

static const char *api_name(int32_t segment) {
  return segment == 0 ? "dc_comm_create_processes" : "dc_comm_dup";
}

/* Maps the next segment for this rank. fill: the segment is new. */
static dc_status map_segment(dc__shm_group *group, bool fill) {
  int32_t s = atomic_load_explicit(&group->mapped, memory_order_relaxed);
  dc__shm_segment *segment = &group->segments[s];
  void *map = group->control->memory[s];
  if (group->processes) {
    segment->stages = dc__calloc((size_t)dc__shm_channels_in(s), sizeof *segment->stages);
    if (segment->stages == NULL) {
      return DC_E_NO_MEMORY;
    }
    dc_status status = dc__shm_file_map(api_name(s), group->control_fd, file_offset(group->world, s),
                                        shared_bytes(group->world, s), fill, &map);
    if (status != DC_OK) {
      dc__free(segment->stages);
      return status;
    }
  }
  segment->slots = map;
  segment->channels = (dc__shm_channel *)((char *)map + slot_bytes(group->world, s));
  atomic_store_explicit(&group->mapped, s + 1, memory_order_release);
  return DC_OK;
}

dc_status dc__shm_segment_add(dc__shm_group *group) {
  dc__shm_control *control = group->control;
  int32_t s = control->segments;
  if (s == DC__SHM_SEGMENTS) {
    return dc__fail(DC_E_NO_MEMORY, "dc_comm_dup: the group has %d communicators", dc__shm_first_channel(s));
  }
  if (!group->processes) {
    size_t bytes = threads_bytes(group->world, s);
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
      return dc__fail(DC_E_NO_MEMORY, "%s: %zu bytes: %s", s == 0 ? "dc_comm_create_threads" : "dc_comm_dup", bytes,
                      strerror(errno));
    }
    control->memory[s] = map;
  }
  DC__TRY(map_segment(group, true));
  control->segments++;
  return DC_OK;
}

void dc__shm_segments_close(dc__shm_group *group) {
  for (int32_t s = 0; s < atomic_load(&group->mapped) && group->processes; s++) {
    munmap(group->segments[s].slots, shared_bytes(group->world, s));
    dc__free(group->segments[s].stages);
  }
}

void dc__shm_control_release(dc__shm_control *control) {
  if (atomic_fetch_sub_explicit(&control->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  for (dc__shm_control *next; control != NULL; control = next) {
    next = atomic_load(&control->unused);
    for (int32_t s = 0; s < control->segments; s++) {
      munmap(control->memory[s], threads_bytes(control->world, s));
    }
    munmap(control, dc__shm_control_bytes());
  }
}

dc_status dc__shm_staging(dc__shm_group *group, int32_t channel, size_t bytes, char **stage) {
  int32_t s = dc__shm_segment_of(channel);
  int32_t index = channel - dc__shm_first_channel(s);
  dc__shm_segment *segment = &group->segments[s];
  if (!group->processes) {
    size_t before = (size_t)index * (size_t)group->world + (size_t)group->rank;
    *stage = (char *)segment->slots + shared_bytes(group->world, s) +
             before * dc__shm_staging_bytes(DC__SHM_EAGER_BYTES, group->world);
    return DC_OK;
  }
  if (segment->stages[index] == NULL) {
    void *memory = NULL;
    DC__TRY(dc__shm_heap_alloc(&group->heap, dc__shm_staging_bytes(bytes, group->world), &memory));
    segment->stages[index] = memory;
  }
  *stage = segment->stages[index];
  return DC_OK;
}

/* ---- joining and leaving ---- */

/* A rank on a busy machine, or one that a debugger stopped, may hold the lock for long. A rank that died never frees
 * it. */
static dc_status check_lock_holder(const dc__shm_group *group, int32_t holder, int64_t deadline) {
  if (dc__shm_has_exited(group, holder) && atomic_load(&group->control->lock) == holder + 1) {
    return dc__fail(DC_E_PEER_DEAD, "rank %" PRId32 " died while it held the group's lock", holder);
  }
  return dc__now_ns() < deadline ? DC_OK
                                 : dc__fail(DC_E_TIMEOUT, "rank %" PRId32 " has held the group's lock for %.1f s",
                                            holder, (double)group->timeout_ns / 1e9);
}

static dc_status lock_control(const dc__shm_group *group) {
  static const struct timespec pause = {0, 1000000};
  const int64_t begin = dc__now_ns();
  int free = 0;
  while (!atomic_compare_exchange_weak_explicit(&group->control->lock, &free, group->rank + 1, memory_order_acquire,
                                                memory_order_relaxed)) {
    if (free == 0) {
      continue;
    }
    if (dc__now_ns() - begin < BRIEF_NS) {
      sched_yield();
    } else {
      DC__TRY(check_lock_holder(group, free - 1, begin + group->timeout_ns));
      nanosleep(&pause, NULL);
    }
    free = 0;
  }
  return DC_OK;
}

static void unlock_control(const dc__shm_group *group) {
  atomic_store_explicit(&group->control->lock, 0, memory_order_release);
}

static dc__shm_channel *channel_of(const dc__shm_group *group, int32_t channel) {
  int32_t s = dc__shm_segment_of(channel);
  return &group->segments[s].channels[channel - dc__shm_first_channel(s)];
}

/* The channel that another rank has assigned to the group's number-th communicator, else the first free one. */
static dc_status find_channel(dc__shm_group *group, int64_t number, int32_t *channel) {
  int32_t free = -1;
  while (atomic_load_explicit(&group->mapped, memory_order_relaxed) < group->control->segments) {
    DC__TRY(map_segment(group, false));
  }
  for (int32_t c = 0; c < dc__shm_channel_count(group); c++) {
    int64_t carried = channel_of(group, c)->number;
    if (carried == number) {
      *channel = c;
      return DC_OK;
    }
    free = free < 0 && carried == 0 ? c : free;
  }
  if (free < 0) {
    free = dc__shm_channel_count(group);
    DC__TRY(dc__shm_segment_add(group));
  }
  *channel = free;
  return DC_OK;
}

/* The n-th communicators of all ranks share a channel, which the first rank to join chooses. */
dc_status dc__shm_channel_join(dc__shm_group *group, int32_t *channel) {
  DC__TRY(lock_control(group));
  dc_status status = find_channel(group, group->dups + 1, channel);
  if (status == DC_OK) {
    channel_of(group, *channel)->number = ++group->dups;
    atomic_fetch_add_explicit(&group->refs, 1, memory_order_relaxed);
  }
  unlock_control(group);
  return status;
}

static void reset_channel(const dc__shm_group *group, int32_t channel) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__shm_slot *slot = dc__shm_slot_of(group, channel, r);
    atomic_store(&slot->posted.value, 0);
    atomic_store(&slot->posted.waiters, 0);
    atomic_store(&slot->done.value, 0);
    atomic_store(&slot->done.waiters, 0);
    atomic_store(&slot->last_op, 0);
    atomic_store(&slot->waits, 0);
    atomic_store(&slot->usage.requested, 0);
    atomic_store(&slot->usage.user, 0);
    atomic_store(&slot->usage.blocked_in, 0);
    atomic_store(&slot->left, 0);
  }
}

/* The signals wake ranks that wait for this one. They repeat the counters' values, so no other rank is affected. */
void dc__shm_channel_leave(dc__shm_group *group, int32_t channel) {
  dc__shm_slot *slot = dc__shm_slot_of(group, channel, group->rank);
  atomic_store(&slot->left, 1);
  dc__shm_signal(group, &slot->posted, atomic_load(&slot->posted.value));
  dc__shm_signal(group, &slot->done, atomic_load(&slot->done.value));
  /* A failed group opens no more channels, and the rank that failed it may hold the lock forever. */
  if (atomic_load(&group->control->failed) == DC__SHM_HEALTHY && lock_control(group) == DC_OK) {
    dc__shm_channel *entry = channel_of(group, channel);
    if (++entry->leavers == group->world) {
      reset_channel(group, channel);
      *entry = (dc__shm_channel){0, 0, 0};
    }
    unlock_control(group);
  }
  dc__shm_group_release(group);
}
