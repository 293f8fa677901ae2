/* The state that the communicators of one rank share. */
#include <sys/mman.h>
#include <unistd.h>

#include "comm/shm/shm.h"

dc_status dc__shm_group_create(int32_t rank, int32_t world, size_t reserve, int64_t timeout_ns, dc__shm_group **out) {
  dc__shm_group *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&group->refs, 1);
  group->rank = rank;
  group->world = world;
  group->processes = reserve > 0;
  group->timeout_ns = timeout_ns;
  group->control_fd = -1;
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    group->pidfds[r] = -1;
  }
  dc_status status = dc__shm_heap_init(&group->heap, reserve);
  if (status != DC_OK) {
    dc__free(group);
    return status;
  }
  *out = group;
  return DC_OK;
}

void dc__shm_group_release(dc__shm_group *group) {
  if (atomic_fetch_sub_explicit(&group->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  if (group->control != NULL) {
    atomic_store(&group->control->released[group->rank], 1);
  }
  for (int32_t r = 0; r < group->world; r++) {
    if (group->pidfds[r] >= 0) {
      close(group->pidfds[r]);
    }
    if (group->bases[r] != 0 && r != group->rank) {
      munmap((void *)group->bases[r], group->reserves[r]);
    }
  }
  dc__shm_segments_close(group);
  if (group->control != NULL && group->processes) {
    munmap(group->control, dc__shm_control_bytes());
  } else if (group->control != NULL) {
    dc__shm_control_release(group->control);
  }
  dc__shm_close_fds(&group->control_fd, 1);
  dc__shm_heap_destroy(&group->heap);
  dc__free(group);
}
