/* The communicator over shared memory: its table and its two constructors. */
#include "comm/shm/shm.h"
#include "comm/split.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void shm_destroy(dc_comm *comm) {
  dc__shm *self = (dc__shm *)comm;
  dc__shm_channel_leave(self->group, self->channel);
  pthread_mutex_destroy(&self->collective_mutex);
  dc__comm_head_destroy(comm);
  dc__free(self);
}

static void shm_poll_failure(dc_comm *comm) {
  dc_status status = dc__shm_group_check(((dc__shm *)comm)->group);
  if (status != DC_OK) {
    dc__comm_fail(comm, status);
  }
}

static void shm_check_peers(dc_comm *comm) {
  dc__shm_check_peers((dc__shm *)comm);
  shm_poll_failure(comm);
}

static void shm_fail_group(dc_comm *comm, dc_status status) {
  dc__shm_group_fail(((dc__shm *)comm)->group, status);
  shm_poll_failure(comm);
}

static void shm_abort_group(dc_comm *comm, const char *reason) {
  dc_status status = dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group%s%.300s", comm->rank,
                              reason != NULL ? ": " : "", reason != NULL ? reason : "");
  shm_fail_group(comm, status);
}

static dc_status shm_heap_alloc(dc_comm *comm, size_t bytes, void **ptr) {
  return dc__shm_heap_alloc(&((dc__shm *)comm)->group->heap, bytes, ptr);
}

static void shm_heap_free(dc_comm *comm, void *ptr, size_t bytes) {
  dc__shm_heap_free(&((dc__shm *)comm)->group->heap, ptr, bytes);
}

static bool shm_peer_accessible(dc_comm *comm, const void *ptr, size_t bytes) {
  return dc__shm_heap_contains(&((dc__shm *)comm)->group->heap, ptr, bytes);
}

static dc_status shm_set_checksums(dc_comm *comm, bool enable) {
  atomic_store(&((dc__shm *)comm)->group->checksums, enable ? 1 : 0);
  return DC_OK;
}

static bool shm_has_checksums(const dc_comm *comm) {
  return atomic_load(&((const dc__shm *)comm)->group->checksums) != 0;
}

static dc_status dup_channel(dc_comm *comm, dc_comm **copy);
static dc_status shm_split(dc_comm *comm, const dc__split *split, dc_comm **part);

static const dc__comm_ops ops = {.name = "local",
                                 .all_gather = dc__shm_all_gather,
                                 .reduce_scatter = dc__shm_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__shm_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = dc__shm_run,
                                 .agree = dc__shm_agree,
                                 .check_peers = shm_check_peers,
                                 .dup = dup_channel,
                                 .split = shm_split,
                                 .abort = shm_abort_group,
                                 .fail_group = shm_fail_group,
                                 .poll = shm_poll_failure,
                                 .heap_alloc = shm_heap_alloc,
                                 .heap_free = shm_heap_free,
                                 .peer_accessible = shm_peer_accessible,
                                 .set_checksums = shm_set_checksums,
                                 .has_checksums = shm_has_checksums,
                                 .destroy = shm_destroy};

/* Makes a communicator on the group's next channel, which takes a reference to the group. */
static dc_status open_channel(dc__shm_group *group, dc_comm **comm) {
  dc__shm *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, group->rank, group->world, group->timeout_ns);
  if (status != DC_OK) {
    dc__free(self);
    return status;
  }
  self->head.supports_device = !group->processes; /* device addresses are valid in one process only */
  self->head.single_rank = self->head.supports_device && self->head.world == 1;
  pthread_mutex_init(&self->collective_mutex, NULL);
  self->group = group;
  self->stage_bytes = group->processes ? DC__SHM_STAGING_BYTES : DC__SHM_EAGER_BYTES;
  status = dc__shm_channel_join(group, &self->channel);
  if (status != DC_OK) {
    pthread_mutex_destroy(&self->collective_mutex);
    dc__comm_head_destroy(&self->head);
    dc__free(self);
    return status;
  }
  self->head.usage = &dc__shm_slot_of(group, self->channel, group->rank)->usage;
  *comm = &self->head;
  return DC_OK;
}

static dc_status dup_channel(dc_comm *comm, dc_comm **copy) {
  DC__TRY(open_channel(((dc__shm *)comm)->group, copy));
  dc__comm_note_request(comm, 0);
  dc__comm_note_request(*copy, 0);
  return DC_OK;
}

static dc_status create_thread(dc__shm_control *control, int32_t rank, int64_t timeout_ns, dc_comm **comm) {
  dc__shm_group *group = NULL;
  DC__TRY(dc__shm_group_create(rank, control->world, 0, timeout_ns, &group));
  group->control = control;
  atomic_fetch_add(&control->refs, 1);
  dc_status status = open_channel(group, comm);
  dc__shm_group_release(group);
  return status;
}

/* Makes a control block with `refs` references. */
static dc_status create_control(int32_t world, int32_t refs, dc__shm_control **control) {
  size_t bytes = dc__shm_control_bytes();
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    return dc__fail(DC_E_NO_MEMORY, "dc_comm_create_threads: %zu bytes: %s", bytes, strerror(errno));
  }
  *control = map;
  (*control)->world = world;
  atomic_store(&(*control)->refs, refs);
  return DC_OK;
}

dc_status dc__comm_create_threads(int32_t world, const dc_comm_options *options, dc_comm **comms) {
  dc__shm_control *control = NULL;
  DC__TRY(create_control(world, 1, &control)); /* a reference that is held until every rank has its own */
  dc_status status = DC_OK;
  int32_t made = 0;
  while (status == DC_OK && made < world) {
    status = create_thread(control, made, options->timeout_ns, &comms[made]);
    made += status == DC_OK;
  }
  while (status != DC_OK && made > 0) {
    dc__comm_release(comms[--made]);
    comms[made] = NULL;
  }
  dc__shm_control_release(control);
  return status;
}

static size_t machine_memory(void) {
  return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

dc_status dc__comm_create_processes(const char *name, int32_t rank, int32_t world, const dc_comm_options *options,
                                    dc_comm **comm) {
  size_t reserve = options->heap_bytes > 0 ? (size_t)options->heap_bytes : machine_memory();
  dc__shm_group *group = NULL;
  DC__TRY(dc__shm_group_create(rank, world, reserve, options->timeout_ns, &group));
  dc_status status = dc__shm_rendezvous(name, group);
  if (status == DC_OK) {
    status = open_channel(group, comm);
  }
  if (status == DC_OK) {
    dc__comm_note_request(*comm, 0);
  }
  dc__shm_group_release(group);
  return status;
}

/* ---- parts ---- */

/* If the leader's exchange fails, other ranks may or may not know its control block. So the block is kept as long as
 * the group that was to be split, which the failure ends. */
static void keep_unused(dc__shm_control *group, dc__shm_control *control) {
  if (control != NULL) {
    dc__shm_control *next = atomic_load(&group->unused);
    do {
      atomic_store(&control->unused, next);
    } while (!atomic_compare_exchange_weak(&group->unused, &next, control));
  }
}

/* The part's leader makes the control block, with a reference for each rank, and tells the others its address. */
static dc_status split_threads(dc_comm *comm, const dc__split *split, dc_comm **part) {
  dc__shm_control *control = NULL;
  int64_t addresses[DC__COMM_MAX_LOCAL], own = 0;
  dc_status status = DC_OK;
  if (split->world > 0 && split->leader == comm->rank) {
    status = create_control(split->world, split->world, &control);
    own = (int64_t)(uintptr_t)control;
  }
  dc__failure failure = {DC_OK, ""};
  dc__failure_keep(&failure, status);
  dc_status met = dc__split_exchange(comm, &own, 1, addresses);
  if (met != DC_OK) {
    keep_unused(((dc__shm *)comm)->group->control, control);
    return met;
  }
  control = (dc__shm_control *)(uintptr_t)addresses[split->leader];
  if (split->world == 0 || control == NULL) {
    return split->world == 0 ? DC_OK
           : status != DC_OK ? dc__failure_raise(&failure)
                             : dc__fail(DC_E_NO_MEMORY, "dc_comm_split: rank %" PRId32 " has no memory", split->leader);
  }
  status = create_thread(control, split->rank, comm->timeout_ns, part);
  dc__shm_control_release(control);
  return status;
}

static dc_status shm_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  const dc__shm_group *group = ((dc__shm *)comm)->group;
  if (!group->processes) {
    return split_threads(comm, split, part);
  }
  char name[64];
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = comm->timeout_ns, .heap_bytes = (int64_t)group->heap.reserve};
  snprintf(name, sizeof name, "split-%016" PRIx64 "%016" PRIx64, split->name[0], split->name[1]);
  return split->world == 0 ? DC_OK : dc__comm_create_processes(name, split->rank, split->world, &options, part);
}
