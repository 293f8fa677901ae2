/* A mesh: one connection between any two ranks, made by the higher one. Early connections are kept for their mesh. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/auth.h"

/* ---- incoming connections ---- */

static dc__tcp_early *find_early(const dc__tcp_group *group, int32_t mesh, int32_t rank) {
  for (int32_t i = 0; i < group->early_count; i++) {
    if (group->early[i].mesh == mesh && group->early[i].rank == rank) {
      return &group->early[i];
    }
  }
  return NULL;
}

static int accept_early(dc__tcp_group *group, int32_t mesh, int32_t rank) {
  dc__tcp_early *early = find_early(group, mesh, rank);
  if (early == NULL) {
    return -1;
  }
  int fd = early->fd;
  *early = group->early[--group->early_count];
  return fd;
}

/* A rank asks for a rendezvous, but none is in progress. */
static dc_status fail_no_rendezvous(const dc__tcp_group *group, const dc__tcp_hello *hello) {
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

/* Accepts a connection, into fds if it is for the mesh in progress, or rejects it. fds is NULL if none is in progress.
 * An error fails the group. */
static dc_status dispatch_connection(dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int *fds) {
  dc_status status = DC_OK;
  if (hello->mesh == DC__TCP_RENDEZVOUS) {
    dc__tcp_reject(fd, fail_no_rendezvous(group, hello));
  } else if (hello->rank > group->rank && hello->rank < group->world && hello->mesh >= group->meshes &&
             hello->mesh <= group->meshes + DC__TCP_MAX_AHEAD) {
    const dc__tcp_early *early = find_early(group, hello->mesh, hello->rank);
    bool now = fds != NULL && hello->mesh == group->meshes;
    int other = early != NULL ? early->fd : now ? fds[hello->rank] : -1;
    if (other >= 0) {
      status = mesh_fail_duplicate(group, hello, fd, other);
    } else if (now) {
      fds[hello->rank] = fd;
      return DC_OK;
    } else if (dc__array_reserve((void **)&group->early, &group->early_capacity, group->early_count + 1,
                                 sizeof *group->early)) {
      group->early[group->early_count++] = (dc__tcp_early){fd, hello->mesh, hello->rank};
      return DC_OK;
    }
  }
  dc__tcp_note_rejected(&group->pending, fd, "which said that it was of another group, or came twice");
  dc__tcp_close(&fd);
  return status;
}

void dc__tcp_serve_listener(dc__tcp_group *group, bool can_accept, bool *retry) {
  dc__tcp_hello hello;
  dc_status status;
  int fd;
  for (; dc__tcp_poll_hello(group, can_accept, &hello, &fd, &status); can_accept = false) {
    dc_status failure = dispatch_connection(group, &hello, fd, NULL);
    if (failure != DC_OK) {
      dc__tcp_group_fail_async(group, failure);
    }
  }
  *retry = status != DC_OK;
}

/* ---- outgoing connections ---- */

typedef union socket_address {
  struct sockaddr any;
  struct sockaddr_in four;
  struct sockaddr_in6 six;
} socket_address;

static socklen_t sockaddr_of(const dc__tcp_endpoint *endpoint, socket_address *to) {
  memset(to, 0, sizeof *to);
  to->six.sin6_family = AF_INET6;
  to->six.sin6_port = htons((uint16_t)endpoint->port);
  memcpy(&to->six.sin6_addr, endpoint->address, sizeof endpoint->address);
  if (!IN6_IS_ADDR_V4MAPPED(&to->six.sin6_addr)) {
    return sizeof to->six;
  }
  memset(to, 0, sizeof *to);
  to->four.sin_family = AF_INET;
  to->four.sin_port = htons((uint16_t)endpoint->port);
  memcpy(&to->four.sin_addr, endpoint->address + 12, 4);
  return sizeof to->four;
}

static dc_status mesh_fail_connect(const dc__tcp_group *group, int32_t r, int error, const char *where) {
  dc_status status = error == ETIMEDOUT                 ? DC_E_TIMEOUT
                     : dc__tcp_is_resource_error(error) ? DC_E_SYSTEM
                                                        : DC_E_PEER_DEAD;
  return dc__fail(status, "group \"%s\": rank %" PRId32 " could not connect to rank %" PRId32 ": %s (at %s)",
                  group->name, group->rank, r, error == 0 ? "it closed the connection" : strerror(error), where);
}

static enum dc__tcp_call_result mesh_call_open(dc__tcp_group *group, int32_t r, int64_t deadline, dc__tcp_call *call) {
  socket_address to;
  socklen_t length = sockaddr_of(&group->endpoints[r], &to);
  do {
    call->fd = dc__tcp_connect(&to.any, length, deadline);
  } while (call->fd < 0 && dc__tcp_is_resource_error(errno) && dc__tcp_drop_pending(group));
  call->error = errno;
  call->challenged = false;
  return call->fd < 0 ? DC__TCP_CALL_LOST : dc__tcp_call_open(group, call, deadline);
}

static void endpoint_text(const dc__tcp_group *group, int32_t r, char where[DC__TCP_PEER]) {
  socket_address to;
  (void)sockaddr_of(&group->endpoints[r], &to);
  dc__tcp_address_text(&to.any, where);
}

static enum dc__tcp_call_result mesh_call_prove(const dc__tcp_group *group, int32_t r, int64_t deadline,
                                                dc__tcp_call *call) {
  char where[DC__TCP_PEER];
  endpoint_text(group, r, where);
  return dc__tcp_call_prove(group, call, deadline, where);
}

/* The rest of the handshake. Under a flood of connections a rank may drop one that has not proved itself yet; it comes
 * again. */
static dc_status mesh_call_complete(dc__tcp_group *group, int32_t r, int64_t deadline, dc__tcp_call *call,
                                    enum dc__tcp_call_result result) {
  char where[DC__TCP_PEER];
  endpoint_text(group, r, where);
  for (int32_t attempt = 1;; attempt++) {
    result = result == DC__TCP_CALL_OK && !call->challenged ? dc__tcp_call_prove(group, call, deadline, where) : result;
    result = result == DC__TCP_CALL_OK ? dc__tcp_call_finish(group, call, deadline, where) : result;
    if (result == DC__TCP_CALL_OK) {
      return DC_OK;
    }
    if (result == DC__TCP_CALL_FOREIGN) {
      return mesh_fail_connect(group, r, EPROTO, where);
    }
    if (result == DC__TCP_CALL_FAILED) {
      return call->status;
    }
    DC__TRY(dc__tcp_group_check(group));
    if (!call->challenged || call->error == ETIMEDOUT || attempt == DC__TCP_ATTEMPTS) {
      return mesh_fail_connect(group, r, call->error, where);
    }
    dc__tcp_close(&call->fd);
    result = mesh_call_open(group, r, deadline, call);
  }
}

/* The steps of all handshakes overlap, so that they take the time of one round trip and not of one a rank. */
static dc_status mesh_call_all(dc__tcp_group *group, int32_t mesh, int64_t deadline, dc__tcp_call *calls, int *fds) {
  enum dc__tcp_call_result results[DC__COMM_MAX_WORLD];
  dc_status status = DC_OK;
  for (int32_t r = 0; r < group->rank; r++) {
    calls[r].hello = dc__tcp_hello_make(group, mesh);
    results[r] = mesh_call_open(group, r, deadline, &calls[r]);
  }
  for (int32_t r = 0; r < group->rank; r++) {
    if (results[r] == DC__TCP_CALL_OK) {
      results[r] = mesh_call_prove(group, r, deadline, &calls[r]);
    }
  }
  for (int32_t r = 0; r < group->rank; r++) {
    status = status != DC_OK ? status : mesh_call_complete(group, r, deadline, &calls[r], results[r]);
    fds[r] = calls[r].fd;
    if (status != DC_OK) {
      dc__tcp_close(&fds[r]); /* a connection without a complete handshake carries no messages */
    }
  }
  return status;
}

static dc_status connect_to_lower(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  dc__tcp_call *calls = dc__calloc((size_t)group->rank + 1, sizeof *calls);
  if (calls == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = mesh_call_all(group, mesh, deadline, calls, fds);
  dc__free(calls);
  return status;
}

/* ---- a mesh ---- */

static dc__rank_set mesh_find_missing(const dc__tcp_group *group, const int *fds, int32_t *count) {
  dc__rank_set missing = {{0}};
  *count = 0;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (fds[r] < 0) {
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

/* Takes heartbeats, which would hide the message behind them, and looks at what comes next. */
static ssize_t peek_control(int fd, dc__tcp_control_msg *message) {
  for (;;) {
    const ssize_t got = recv(fd, message, sizeof *message, MSG_PEEK | MSG_DONTWAIT);
    if (got != (ssize_t)sizeof *message || message->kind != DC__TCP_HEARTBEAT) {
      return got;
    }
    (void)!recv(fd, message, sizeof *message, MSG_DONTWAIT);
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

/* An error if the wait for hellos should end. */
static dc_status check_waiting(dc__tcp_group *group, int32_t mesh, int64_t deadline, const int *fds,
                               const dc__rank_set *missing, dc__rank_set *ended) {
  DC__TRY(dc__tcp_group_check(group));
  if (mesh == DC__TCP_CONTROL) {
    DC__TRY(check_control(group, fds, ended));
  }
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (dc__rank_set_has(missing, r) && atomic_load(&group->closed[r]) != 0) {
      return dc__tcp_fail_closed(group, r, "a new communicator");
    }
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
    fds[r] = accept_early(group, mesh, r);
  }
  dc__rank_set missing = mesh_find_missing(group, fds, &count), ended = {{0}};
  while (status == DC_OK && count > 0) {
    dc__tcp_hello hello;
    int fd = -1, wakeups[DC__COMM_MAX_WORLD + 1];
    int32_t extra = list_wakeups(group, mesh, fds, &ended, wakeups);
    dc__tcp_wait_begin(&group->mesh_wait, &missing);
    if (dc__tcp_wait_hello(group, wakeups, extra, deadline, &hello, &fd, &status)) {
      status = dispatch_connection(group, &hello, fd, fds);
    } else if (status == DC_OK) {
      status = check_waiting(group, mesh, deadline, fds, &missing, &ended);
    }
    missing = mesh_find_missing(group, fds, &count);
  }
  dc__tcp_wait_end(&group->mesh_wait);
  return status;
}

dc_status dc__tcp_mesh_connect(dc__tcp_group *group, int64_t deadline, int *fds, int32_t *mesh) {
  for (int32_t r = 0; r < group->world; r++) {
    fds[r] = -1;
  }
  pthread_mutex_lock(&group->mesh_mutex);
  *mesh = group->meshes;
  dc_status status = connect_to_lower(group, *mesh, deadline, fds);
  status = status != DC_OK ? status : accept_from_higher(group, *mesh, deadline, fds);
  group->meshes += status == DC_OK;
  pthread_mutex_unlock(&group->mesh_mutex);
  (void)eventfd_write(group->wake_event, 1); /* the watcher polls the listener again */
  for (int32_t r = 0; status != DC_OK && *mesh != DC__TCP_CONTROL && r < group->world; r++) {
    dc__tcp_close(&fds[r]);
  }
  return status;
}
