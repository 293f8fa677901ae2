/* A mesh: one connection between any two ranks, made by the higher one. The control mesh and the first communicator's
 * connect to the rendezvous' listeners. For a later mesh each rank listens until it is made, and tells the higher ranks
 * its port over the control mesh. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "comm/tcp/bootstrap/auth.h"
#include "comm/tcp/overlay/overlay.h"

/* ---- incoming connections ---- */

dc__tcp_early *dc__tcp_find_early(const dc__tcp_group *group, int32_t mesh, int32_t rank) {
  for (int32_t i = 0; i < group->early_count; i++) {
    if (group->early[i].mesh == mesh && group->early[i].rank == rank) {
      return &group->early[i];
    }
  }
  return NULL;
}

int dc__tcp_take_early(dc__tcp_group *group, int32_t mesh, int32_t rank) {
  dc__tcp_early *early = dc__tcp_find_early(group, mesh, rank);
  if (early == NULL) {
    return -1;
  }
  int fd = early->fd;
  *early = group->early[--group->early_count];
  return fd;
}

dc_status dc__tcp_fail_no_rendezvous(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  DC__TRY(dc__tcp_hello_check(group, hello));
  return group->rank == 0
             ? dc__fail(DC_E_EXISTS,
                        "dc_comm_create_tcp: the group \"%s\" formed at this address %.1f s ago, with another rank "
                        "%" PRId32 "; no rank can join it now",
                        group->name, (double)(dc__now_ns() - group->formed_ns) / 1e9, hello->rank)
             : dc__fail(DC_E_EXISTS,
                        "dc_comm_create_tcp: at this address listens rank %" PRId32 " of the group \"%s\", not rank 0",
                        group->rank, group->name);
}

/* Two connections claim the same rank, and this rank cannot tell which is genuine. */
static dc_status mesh_fail_duplicate(const dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int other) {
  char first[DC__TCP_PEER], second[DC__TCP_PEER];
  dc__tcp_peer_text(other, first);
  dc__tcp_peer_text(fd, second);
  return dc__fail(DC_E_EXISTS,
                  "group \"%s\": two connections to rank %" PRId32 " say that they are rank %" PRId32
                  "'s for communicator %" PRId32 ": from %s and from %s; one of them is not of this group",
                  group->name, group->rank, hello->rank, hello->mesh, first, second);
}

dc_status dc__tcp_keep_early(dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int other) {
  if (other >= 0) {
    return mesh_fail_duplicate(group, hello, fd, other);
  }
  if (!dc__array_reserve((void **)&group->early, &group->early_capacity, group->early_count + 1,
                         sizeof *group->early)) {
    return DC_E_NO_MEMORY;
  }
  group->early[group->early_count++] = (dc__tcp_early){fd, hello->mesh, hello->rank};
  return DC_OK;
}

/* Whether the connection is for the mesh in progress, or for the next one, which the other rank may have begun already.
 * In an overlay it may have begun any later one. */
static bool mesh_expects(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const bool ahead = hello->mesh > group->meshes && (group->overlay || hello->mesh == group->meshes + 1);
  return hello->rank > group->rank && hello->rank < group->world &&
         (ahead || (hello->mesh == group->meshes && dc__tcp_is_neighbour(group, hello->rank)));
}

/* Accepts a connection, into fds if it is for the mesh in progress, or rejects it. An error fails the group. */
static dc_status dispatch_connection(dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int *fds) {
  dc_status status = DC_OK;
  if (hello->mesh == DC__TCP_RENDEZVOUS) {
    dc__tcp_reject(fd, dc__tcp_fail_no_rendezvous(group, hello));
  } else if (mesh_expects(group, hello)) {
    const dc__tcp_early *early = dc__tcp_find_early(group, hello->mesh, hello->rank);
    bool now = hello->mesh == group->meshes;
    int other = early != NULL ? early->fd : now ? fds[hello->rank] : -1;
    if (now && other < 0) {
      fds[hello->rank] = fd;
      return DC_OK;
    }
    status = dc__tcp_keep_early(group, hello, fd, other);
    if (status == DC_OK) {
      return DC_OK;
    }
  }
  dc__tcp_note_rejected(&group->pending, fd, "which said that it was of another group, or came twice");
  dc__tcp_close(&fd);
  return status;
}

/* ---- a mesh ---- */

static dc__rank_set mesh_find_missing(const dc__tcp_group *group, const int *fds, int32_t *count) {
  dc__rank_set missing = {{0}};
  *count = 0;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (fds[r] < 0 && dc__tcp_is_neighbour(group, r)) {
      dc__rank_set_add(&missing, r);
      (*count)++;
    }
  }
  return missing;
}

static dc_status mesh_fail_timeout(const dc__tcp_group *group, const dc__rank_set *missing) {
  dc__rank_list missing_list = dc__rank_list_of(missing, group->world);
  return dc__fail(DC_E_TIMEOUT, "group \"%s\": rank %" PRId32 " waited %.1f s for rank%s %s of %" PRId32 " to connect",
                  group->name, group->rank, (double)group->timeout_ns / 1e9, missing_list.count > 1 ? "s" : "",
                  missing_list.text, group->world);
}

/* Consumes heartbeats, which would hide the message behind them, and peeks at the next message. */
static ssize_t peek_control(int fd, dc__tcp_control_msg *message) {
  for (;;) {
    const ssize_t got = dc__tcp_peek(fd, message, sizeof *message);
    if (got != (ssize_t)sizeof *message || message->kind != DC__TCP_HEARTBEAT) {
      return got;
    }
    (void)dc__tcp_read(fd, message, sizeof *message);
  }
}

/* While the control mesh forms there is no watcher. So this rank peeks for failures itself and leaves the messages for
 * the watcher. A peer that leaves or ends has connected already, so this rank does not wait for it. */
static dc_status check_control(const dc__tcp_group *group, const int *fds, dc__rank_set *ended) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__tcp_control_msg message;
    ssize_t got = fds[r] < 0 ? -1 : peek_control(fds[r], &message);
    if (got == (ssize_t)sizeof message && message.kind == DC__TCP_FAILURE &&
        dc__tcp_is_failure(message.status, message.text)) {
      return dc__fail(message.status, "%s", message.text);
    }
    if (got >= 0) {
      dc__rank_set_add(ended, r);
    }
  }
  return DC_OK;
}

/* The first of these ranks that has left or ended; -1: none. */
static int32_t find_closed(const dc__tcp_group *group, const dc__rank_set *ranks) {
  for (int32_t r = 0; r < group->world; r++) {
    if (dc__rank_set_has(ranks, r) && atomic_load(&group->closed[r]) != 0) {
      return r;
    }
  }
  return -1;
}

/* The time of the next check in a wait for other ranks. */
static int64_t next_check(const dc__tcp_group *group, int64_t deadline) {
  return group->query_ns < deadline ? group->query_ns : deadline;
}

/* An error if the wait for other ranks should end. */
static dc_status check_waiting(dc__tcp_group *group, int32_t mesh, int64_t deadline, const int *fds,
                               const dc__rank_set *missing, dc__rank_set *ended) {
  DC__TRY(dc__tcp_group_check(group));
  if (mesh == DC__TCP_CONTROL) {
    DC__TRY(check_control(group, fds, ended));
  }
  const int32_t gone = find_closed(group, missing);
  if (gone >= 0) {
    return dc__tcp_fail_closed(group, gone, "a new communicator");
  }
  if (dc__now_ns() >= group->query_ns) {
    group->query_ns = INT64_MAX;
    DC__TRY(dc__tcp_check_forming(group->forming));
  }
  return dc__now_ns() < deadline ? DC_OK : mesh_fail_timeout(group, missing);
}

/* Descriptors that end the wait: readable when the group fails or a missing rank ends. The watcher reads the reason. */
static int32_t list_wakeups(const dc__tcp_group *group, int32_t mesh, const int *fds, const dc__rank_set *ended,
                            int *wakeups) {
  int32_t count = 0;
  wakeups[count++] = group->failure_event;
  for (int32_t r = 0; r < group->world; r++) {
    if (mesh == DC__TCP_CONTROL && fds[r] >= 0 && !dc__rank_set_has(ended, r)) {
      wakeups[count++] = fds[r];
    } else if (group->watcher_running && r > group->rank && fds[r] < 0) {
      wakeups[count++] = group->control[r];
    }
  }
  return count;
}

static dc_status accept_from_higher(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  dc_status status = DC_OK;
  int32_t count;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    fds[r] = dc__tcp_take_early(group, mesh, r);
  }
  dc__rank_set missing = mesh_find_missing(group, fds, &count), ended = {{0}};
  while (status == DC_OK && count > 0) {
    dc__tcp_hello hello;
    int fd = -1, wakeups[DC__COMM_MAX_WORLD + 1];
    int32_t extra = list_wakeups(group, mesh, fds, &ended, wakeups);
    dc__tcp_wait_begin(&group->mesh_wait, &missing);
    if (dc__tcp_wait_hello(group, wakeups, extra, next_check(group, deadline), &hello, &fd, &status)) {
      status = dispatch_connection(group, &hello, fd, fds);
    } else if (status == DC_OK) {
      status = check_waiting(group, mesh, deadline, fds, &missing, &ended);
    }
    missing = mesh_find_missing(group, fds, &count);
  }
  dc__tcp_wait_end(&group->mesh_wait);
  return dc__tcp_add_lack(group, status);
}

/* ---- a mesh after the rendezvous ---- */

void dc__tcp_handle_listening(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message) {
  if (r < group->rank && message->status >= 1 && message->status <= 65535) {
    group->listens_for[r] = message->mesh;
    group->listens_on[r] = message->status;
  }
}

/* Requires group->mutex. Divides the lower ranks without a connection into those that listen and the others. A lower
 * rank cannot make a later mesh without this rank, so its latest message is about this mesh or an earlier one. */
static void find_lower(dc__tcp_group *group, int32_t mesh, const int *fds, dc__rank_set *ready, dc__rank_set *missing) {
  *ready = *missing = (dc__rank_set){{0}};
  for (int32_t r = 0; r < group->rank; r++) {
    const bool anew = mesh > DC__TCP_FIRST && group->listens_for[r] == mesh;
    group->endpoints[r].port = anew ? group->listens_on[r] : group->endpoints[r].port;
    if (fds[r] < 0 && dc__tcp_is_neighbour(group, r)) {
      dc__rank_set_add(mesh <= DC__TCP_FIRST || anew ? ready : missing, r);
    }
  }
}

/* Waits until a lower rank listens, unless all of them are connected. */
static dc_status await_lower(dc__tcp_group *group, int32_t mesh, int64_t deadline, const int *fds,
                             dc__rank_set *ready) {
  dc__rank_set missing, ended = {{0}};
  dc_status status = DC_OK;
  pthread_mutex_lock(&group->mutex);
  for (;;) {
    find_lower(group, mesh, fds, ready, &missing);
    if (status != DC_OK || !dc__rank_set_is_empty(ready) || dc__rank_set_is_empty(&missing)) {
      break;
    }
    dc__tcp_wait_begin(&group->mesh_wait, &missing);
    const int64_t until = next_check(group, deadline);
    if (atomic_load(&group->failed) == 0 && find_closed(group, &missing) < 0 && dc__now_ns() < until) {
      dc__tcp_wait_change(group, until);
      continue;
    }
    pthread_mutex_unlock(&group->mutex);
    status = check_waiting(group, mesh, deadline, fds, &missing, &ended);
    pthread_mutex_lock(&group->mutex);
  }
  pthread_mutex_unlock(&group->mutex);
  dc__tcp_wait_end(&group->mesh_wait);
  return status;
}

/* Connects to each lower rank as soon as it listens, so that it does not wait for this one. */
static dc_status connect_to_lower(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  dc__rank_set ready;
  DC__TRY(await_lower(group, mesh, deadline, fds, &ready));
  while (!dc__rank_set_is_empty(&ready)) {
    DC__TRY(dc__tcp_connect_ranks(group, mesh, deadline, &ready, fds));
    DC__TRY(await_lower(group, mesh, deadline, fds, &ready));
  }
  return DC_OK;
}

static dc_status listen_for_higher(dc__tcp_group *group, int32_t mesh) {
  if (mesh <= DC__TCP_FIRST || group->rank == group->world - 1) {
    return DC_OK;
  }
  DC__TRY(dc__tcp_listen_again(group));
  const dc__tcp_control_msg message = {
      .kind = DC__TCP_LISTENING, .mesh = mesh, .status = group->endpoints[group->rank].port};
  pthread_mutex_lock(&group->mutex);
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    dc__tcp_send_control(group, r, &message);
  }
  pthread_mutex_unlock(&group->mutex);
  return DC_OK;
}

static dc_status mesh_connect(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  DC__TRY(listen_for_higher(group, mesh));
  DC__TRY(connect_to_lower(group, mesh, deadline, fds));
  return accept_from_higher(group, mesh, deadline, fds);
}

static void set_forming(dc__tcp_group *group, dc__tcp *comm) {
  pthread_mutex_lock(&group->mutex);
  group->forming = comm;
  pthread_mutex_unlock(&group->mutex);
}

dc_status dc__tcp_mesh_connect(dc__tcp_group *group, dc__tcp *comm, int64_t deadline, int *fds) {
  for (int32_t r = 0; r < group->world; r++) {
    fds[r] = -1;
  }
  pthread_mutex_lock(&group->mesh_mutex);
  const int32_t mesh = group->meshes;
  group->query_ns = mesh > DC__TCP_FIRST ? dc__now_ns() + DC__COMM_DEADLOCK_NS : INT64_MAX;
  if (comm != NULL) {
    comm->mesh = mesh;
    set_forming(group, comm);
  }
  const dc_status status = mesh_connect(group, mesh, deadline, fds);
  set_forming(group, NULL);
  group->meshes += status == DC_OK;
  if (mesh >= DC__TCP_FIRST && status == DC_OK) {
    dc__tcp_stop_listening(group);
  }
  pthread_mutex_unlock(&group->mesh_mutex);
  for (int32_t r = 0; status != DC_OK && mesh != DC__TCP_CONTROL && r < group->world; r++) {
    dc__tcp_close(&fds[r]);
  }
  return status;
}
