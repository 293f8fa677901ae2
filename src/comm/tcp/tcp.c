/* The communicator over TCP: its table and its constructor. */
#include "comm/tcp/collective.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

static void tcp_free_comm(dc__tcp *self) {
  if (self != NULL) {
    dc__free(self->transfers);
    dc__free(self->fds);
    dc__free(self->polls);
    dc__free(self->replies);
    dc__free(self);
  }
}

static void tcp_destroy(dc_comm *comm) {
  dc__tcp *self = (dc__tcp *)comm;
  /* No leave message after a failure: a peer that the failure has not reached yet would report the leave instead. */
  if (atomic_load(&self->group->failed) == 0) {
    dc__tcp_leave(self);
  }
  dc__tcp_group_remove(self->group, self); /* before its connections close: peers may query why they did */
  for (int32_t r = 0; r < comm->world; r++) {
    dc__tcp_close(&self->fds[r]);
  }
  dc__tcp_close(&self->arrival_event);
  dc__tcp_group_release(self->group);
  dc__free(self->scratch);
  pthread_mutex_destroy(&self->collective_mutex);
  dc__comm_head_destroy(comm);
  tcp_free_comm(self);
}

static void tcp_poll_failure(dc_comm *comm) {
  dc_status status = dc__tcp_group_check(((dc__tcp *)comm)->group);
  if (status != DC_OK) {
    dc__comm_fail(comm, status);
  }
}

static void tcp_check_peers(dc_comm *comm) {
  dc__tcp_group *group = ((dc__tcp *)comm)->group;
  for (int32_t r = 0; r < group->world; r++) {
    if (atomic_load(&group->closed[r]) == DC__TCP_DISCONNECTED && atomic_load(&group->failed) == 0) {
      dc__tcp_group_fail(group, dc__tcp_fail_closed(group, r, "a collective of all"));
    }
  }
  tcp_poll_failure(comm);
}

static void tcp_fail_group(dc_comm *comm, dc_status status) {
  dc__tcp_group_fail(((dc__tcp *)comm)->group, status);
  tcp_poll_failure(comm);
}

static void tcp_abort_group(dc_comm *comm, const char *reason) {
  dc_status status = dc__fail(DC_E_ABORTED, "rank %" PRId32 " aborted the group%s%.300s", comm->rank,
                              reason != NULL ? ": " : "", reason != NULL ? reason : "");
  tcp_fail_group(comm, status);
}

static dc_status tcp_set_checksums(dc_comm *comm, bool enable) {
  atomic_store(&((dc__tcp *)comm)->group->checksums, enable ? 1 : 0);
  return DC_OK;
}

static bool tcp_has_checksums(const dc_comm *comm) {
  return atomic_load(&((const dc__tcp *)comm)->group->checksums) != 0;
}

static dc_status dup_mesh(dc_comm *comm, dc_comm **copy);

static const dc__comm_ops ops = {.name = "tcp",
                                 .all_gather = dc__host_all_gather,
                                 .reduce_scatter = dc__host_reduce_scatter,
                                 .broadcast = dc__host_broadcast,
                                 .all_to_all = dc__host_all_to_all,
                                 .barrier = dc__host_barrier,
                                 .run = dc__tcp_run,
                                 .agree = dc__tcp_agree,
                                 .check_peers = tcp_check_peers,
                                 .dup = dup_mesh,
                                 .split = dc__tcp_split,
                                 .set_checksums = tcp_set_checksums,
                                 .has_checksums = tcp_has_checksums,
                                 .abort = tcp_abort_group,
                                 .fail_group = tcp_fail_group,
                                 .poll = tcp_poll_failure,
                                 .destroy = tcp_destroy};

static dc__tcp *alloc_comm(int32_t ranks) {
  const size_t world = (size_t)ranks;
  dc__tcp *self = dc__calloc(1, sizeof *self);
  if (self == NULL) {
    return NULL;
  }
  self->arrival_event = -1;
  self->transfers = dc__calloc(world, sizeof *self->transfers);
  self->fds = dc__calloc(world, sizeof *self->fds);
  self->polls = dc__calloc(world + 2, sizeof *self->polls);
  self->replies = dc__calloc(world, sizeof *self->replies);
  if (self->transfers == NULL || self->fds == NULL || self->polls == NULL || self->replies == NULL) {
    tcp_free_comm(self);
    return NULL;
  }
  for (int32_t r = 0; r < ranks; r++) {
    self->fds[r] = -1;
  }
  return self;
}

/* Makes the communicator's connections: all of a mesh, or in an overlay none yet. */
static dc_status connect_comm(dc__tcp_group *group, dc__tcp *self) {
  if (group->overlay) {
    self->arrival_event = dc__above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return self->arrival_event >= 0 ? DC_OK
                                    : dc__fail(DC_E_SYSTEM, "a new communicator: no eventfd: %s", strerror(errno));
  }
  DC__TRY(dc__tcp_mesh_connect(group, self, dc__now_ns() + group->timeout_ns, self->fds));
  for (int32_t r = 0; r < group->world; r++) {
    self->transfers[r].fd = self->fds[r];
    if (self->fds[r] >= 0) {
      dc__tcp_start_probes(self->fds[r]);
    }
  }
  return DC_OK;
}

static dc_status create_comm(dc__tcp_group *group, dc_comm **comm) {
  dc__tcp *self = alloc_comm(group->world);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__comm_head_init(&self->head, &ops, group->rank, group->world, group->timeout_ns);
  if (status == DC_OK) {
    self->group = group;
    self->head.usage = &self->usage;
    dc__comm_note_request(&self->head, 0); /* its creator is a user */
    status = connect_comm(group, self);
    if (status != DC_OK) {
      dc__comm_head_destroy(&self->head);
    }
  }
  if (status != DC_OK) {
    tcp_free_comm(self);
    return status;
  }
  atomic_fetch_add_explicit(&group->refs, 1, memory_order_relaxed);
  pthread_mutex_init(&self->collective_mutex, NULL);
  dc__tcp_group_add(group, self);
  *comm = &self->head;
  return DC_OK;
}

/* Makes a communicator on the group's next mesh, which takes a reference to the group. */
static dc_status open_mesh(dc__tcp_group *group, dc_comm **comm) {
  dc_status status = create_comm(group, comm);
  if (status != DC_OK) {
    dc__tcp_group_fail(group, status); /* peers wait for this rank, or have a mesh that it lacks */
    status = dc__tcp_add_lack(group, dc__tcp_group_check(group));
    pthread_mutex_lock(&group->mesh_mutex);
    if (!group->overlay) { /* else the watcher still serves it */
      dc__tcp_stop_listening(group);
    }
    pthread_mutex_unlock(&group->mesh_mutex);
  }
  return status;
}

static dc_status dup_mesh(dc_comm *comm, dc_comm **copy) {
  dc__comm_note_request(comm, 0);
  return open_mesh(((dc__tcp *)comm)->group, copy);
}

dc_status dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank, int32_t world,
                                 const dc_comm_options *options, dc_comm **comm) {
  dc__tcp_group *group = NULL;
  DC__TRY(dc__tcp_group_create(listener, address, name, rank, world, options, &group));
  dc_status status = open_mesh(group, comm);
  dc__tcp_group_release(group);
  return status;
}

dc_status dc__comm_create_tcp(const char *address, const char *name, int32_t rank, int32_t world,
                              const dc_comm_options *options, dc_comm **comm) {
  return dc__comm_create_tcp_at(-1, address, name, rank, world, options, comm);
}
