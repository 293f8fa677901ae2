/* A mesh's outgoing connections: to several lower ranks at once. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "comm/tcp/bootstrap/auth.h"

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
  const bool may_drop = !(group->overlay && group->watcher_running); /* else the watcher owns pending connections */
  do {
    call->fd = dc__tcp_connect(&to.any, length, group->failure_event, deadline);
  } while (call->fd < 0 && dc__tcp_is_resource_error(errno) && may_drop && dc__tcp_drop_pending(group));
  call->error = errno;
  call->challenged = call->accepted = false;
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

static enum dc__tcp_call_result mesh_call_finish(const dc__tcp_group *group, int32_t r, int64_t deadline,
                                                 dc__tcp_call *call) {
  char where[DC__TCP_PEER];
  endpoint_text(group, r, where);
  return dc__tcp_call_finish(group, call, deadline, where);
}

/* Completes the handshake. Under a flood of connections a rank may drop one that has not proved itself yet; then this
 * rank connects again. */
static dc_status mesh_call_complete(dc__tcp_group *group, int32_t r, int64_t deadline, dc__tcp_call *call,
                                    enum dc__tcp_call_result result) {
  char where[DC__TCP_PEER];
  endpoint_text(group, r, where);
  for (int32_t attempt = 1;; attempt++) {
    result = result == DC__TCP_CALL_OK && !call->challenged ? dc__tcp_call_prove(group, call, deadline, where) : result;
    result = result == DC__TCP_CALL_OK && !call->accepted ? dc__tcp_call_finish(group, call, deadline, where) : result;
    result = result == DC__TCP_CALL_OK ? dc__tcp_call_encrypt(group, call, deadline, where) : result;
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
    if (!dc__tcp_may_return(call, attempt)) {
      return mesh_fail_connect(group, r, call->error, where);
    }
    dc__tcp_close(&call->fd);
    dc__tcp_back_off(group, attempt, deadline);
    result = mesh_call_open(group, r, deadline, call);
  }
}

/* The steps of the handshakes overlap, so that they take the time of one round trip, and not of one per rank. */
static dc_status mesh_call_ranks(dc__tcp_group *group, int32_t mesh, int64_t deadline, const int32_t *ranks,
                                 int32_t count, dc__tcp_call *calls, int *fds) {
  enum dc__tcp_call_result results[DC__COMM_MAX_WORLD];
  dc_status status = DC_OK;
  for (int32_t i = 0; i < count; i++) {
    calls[i].hello = dc__tcp_hello_make(group, mesh);
    calls[i].to = ranks[i];
    results[i] = mesh_call_open(group, ranks[i], deadline, &calls[i]);
  }
  bool failed = false; /* then this thread's last error must stay */
  for (int32_t i = 0; i < count && !failed; i++) {
    if (results[i] == DC__TCP_CALL_OK) {
      results[i] = mesh_call_prove(group, ranks[i], deadline, &calls[i]);
      failed = results[i] == DC__TCP_CALL_FAILED;
    }
  }
  for (int32_t i = 0; i < count && group->tls && !failed; i++) {
    if (results[i] == DC__TCP_CALL_OK) {
      results[i] = mesh_call_finish(group, ranks[i], deadline, &calls[i]);
      failed = results[i] == DC__TCP_CALL_FAILED;
    }
  }
  for (int32_t i = 0; i < count; i++) {
    int *fd = &fds[ranks[i]];
    status = status != DC_OK ? status : mesh_call_complete(group, ranks[i], deadline, &calls[i], results[i]);
    *fd = calls[i].fd;
    if (status != DC_OK) {
      dc__tcp_close(fd); /* a connection without a complete handshake carries no messages */
    }
  }
  return status;
}

dc_status dc__tcp_connect_ranks(dc__tcp_group *group, int32_t mesh, int64_t deadline, const dc__rank_set *ranks,
                                int *fds) {
  int32_t list[DC__COMM_MAX_WORLD], count = 0;
  for (int32_t r = 0; r < group->rank; r++) {
    if (dc__rank_set_has(ranks, r)) {
      list[count++] = r;
    }
  }
  dc__tcp_call *calls = dc__calloc((size_t)count + 1, sizeof *calls);
  if (calls == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = mesh_call_ranks(group, mesh, deadline, list, count, calls, fds);
  dc__free(calls);
  return status;
}
