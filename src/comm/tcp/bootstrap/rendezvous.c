/* Rendezvous over TCP. Rank 0 listens at the given address, and the others send it the ports of their listeners. Rank 0
 * then sends the table of endpoints to all. A rank's address is the one that rank 0 sees. For ranks on rank 0's machine
 * that may be a loopback address, so they get the address by which rank 0 was reached. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/escape.h"
#include "comm/tcp/bootstrap/auth.h"

enum {
  RETRY_NS = 20000000,
  MAX_CONNECT_MS = 5000, /* of one attempt: another address, or a later attempt, may be answered */
  GRACE_NS = 1000000000, /* rank 0 knows which ranks are missing: its answer has this much longer to arrive */
  MAX_QUOTED = 48        /* bytes quoted from another service */
};

static dc__tcp_endpoint endpoint_of(const struct sockaddr_storage *address, int32_t port) {
  dc__tcp_endpoint endpoint = {.port = port};
  if (address->ss_family == AF_INET6) {
    memcpy(endpoint.address, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
  } else {
    memset(endpoint.address + 10, 0xff, 2);
    memcpy(endpoint.address + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
  }
  endpoint.on_root_machine = dc__tcp_is_loopback(endpoint.address);
  return endpoint;
}

/* ---- rank 0 ---- */

typedef struct tcp_root {
  dc__tcp_group *group;
  int peers[DC__COMM_MAX_WORLD]; /* -1 if not joined */
  int32_t joined;
} tcp_root;

static void tcp_send_welcome(int fd, dc_status status, int32_t more, const unsigned char *run, const char *text) {
  dc__tcp_welcome welcome = {.magic = DC__TCP_MAGIC, .status = status, .more = more};
  if (run != NULL) {
    memcpy(welcome.run, run, sizeof welcome.run);
  }
  snprintf(welcome.text, sizeof welcome.text, "%s", text);
  (void)dc__tcp_send_all(fd, &welcome, sizeof welcome, dc__now_ns() + GRACE_NS);
}

void dc__tcp_reject(int fd, dc_status status) {
  tcp_send_welcome(fd, status, 0, NULL, dc_last_error());
}

static void send_endpoints(int fd, const dc__tcp_group *group) {
  tcp_send_welcome(fd, DC_OK, 0, group->run, "");
  (void)dc__tcp_send_all(fd, group->endpoints, (size_t)group->world * sizeof *group->endpoints,
                         dc__now_ns() + GRACE_NS);
}

static dc_status root_fail_duplicate(const tcp_root *root, const dc__tcp_hello *hello, int fd) {
  char first[DC__TCP_PEER], second[DC__TCP_PEER];
  dc__tcp_peer_text(root->peers[hello->rank], first);
  dc__tcp_peer_text(fd, second);
  return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " came twice, from %s and from %s",
                  root->group->name, hello->rank, first, second);
}

/* Admits a rank; an error ends the rendezvous for all. */
static dc_status admit_peer(tcp_root *root, const dc__tcp_hello *hello, int fd) {
  dc__tcp_group *group = root->group;
  static const unsigned char none[16] = {0};
  struct sockaddr_storage address;
  socklen_t length = sizeof address;
  if (hello->world != group->world) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " has world_size %" PRId32
                    ", but rank 0 has %" PRId32,
                    group->name, hello->rank, hello->world, group->world);
  }
  if (hello->rank <= 0 || hello->rank >= group->world) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " of %" PRId32 " came twice",
                    group->name, hello->rank, group->world);
  }
  if (root->peers[hello->rank] >= 0) {
    return root_fail_duplicate(root, hello, fd);
  }
  if (getpeername(fd, (struct sockaddr *)&address, &length) != 0) {
    return DC_OK; /* it has ended, and will be missing */
  }
  group->endpoints[hello->rank] = endpoint_of(&address, hello->port);
  if (memcmp(hello->address, none, sizeof none) != 0) {
    memcpy(group->endpoints[hello->rank].address, hello->address, sizeof hello->address);
    group->endpoints[hello->rank].on_root_machine = dc__tcp_is_loopback(hello->address);
  }
  root->peers[hello->rank] = fd;
  root->joined++;
  tcp_send_welcome(fd, DC_OK, 1, NULL, ""); /* lets the peer tell rank 0 from a silent service */
  return DC_OK;
}

static dc_status tcp_fail_missing(const tcp_root *root) {
  const dc__tcp_pending *p = &root->group->pending;
  dc__rank_list missing = {.count = 0};
  char others[240] = "";
  for (int32_t r = 1; r < root->group->world; r++) {
    if (root->peers[r] < 0) {
      dc__rank_list_add(&missing, r);
    }
  }
  if (p->rejected > 0) {
    snprintf(others, sizeof others, "; sent away: %" PRId64 " connection%s, the last from %s", p->rejected,
             p->rejected > 1 ? "s" : "", p->last);
  }
  return dc__fail(DC_E_TIMEOUT, "dc_comm_create_tcp: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s%s",
                  root->group->name, missing.count > 1 ? "s" : "", missing.text, root->group->world,
                  missing.count > 1 ? "have" : "has", (double)root->group->timeout_ns / 1e9, others);
}

/* Peers send nothing while they wait, so a readable connection has ended. */
static dc_status check_peers_alive(const tcp_root *root) {
  for (int32_t r = 1; r < root->group->world; r++) {
    char byte;
    if (root->peers[r] >= 0 &&
        (recv(root->peers[r], &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR))) {
      return dc__fail(DC_E_PEER_DEAD, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " ended before all had come",
                      root->group->name, r);
    }
  }
  return DC_OK;
}

/* Handles a complete hello; an error ends the rendezvous for all. */
static dc_status handle_hello(tcp_root *root, const dc__tcp_hello *hello, int fd) {
  dc__tcp_group *group = root->group;
  dc_status status = dc__tcp_hello_check(group, hello);
  if (status != DC_OK) {
    dc__tcp_reject(fd, status);
    dc__tcp_note_rejected(&group->pending, fd, "a rank of another group");
    dc__tcp_close(&fd);
    return DC_OK; /* the group keeps waiting */
  }
  if (hello->mesh == DC__TCP_RENDEZVOUS) {
    status = admit_peer(root, hello, fd);
    if (status != DC_OK) {
      dc__tcp_reject(fd, status);
    }
  }
  if (root->peers[hello->rank > 0 && hello->rank < group->world ? hello->rank : 0] != fd) {
    dc__tcp_close(&fd);
  }
  return status;
}

static dc_status collect_peers(tcp_root *root, int64_t deadline) {
  dc_status status = DC_OK;
  while (status == DC_OK && root->joined < root->group->world - 1) {
    dc__tcp_hello hello;
    int fd = -1;
    int extra[DC__COMM_MAX_WORLD];
    int32_t extras = 0;
    for (int32_t r = 1; r < root->group->world; r++) {
      if (root->peers[r] >= 0) {
        extra[extras++] = root->peers[r];
      }
    }
    if (dc__tcp_wait_hello(root->group, extra, extras, deadline, &hello, &fd, &status)) {
      status = handle_hello(root, &hello, fd);
    } else if (status == DC_OK) {
      status = check_peers_alive(root);
      status = status != DC_OK || dc__now_ns() < deadline ? status : tcp_fail_missing(root);
    }
  }
  dc__tcp_pending_close(&root->group->pending); /* no rank's is among them */
  return dc__tcp_add_lack(root->group, status);
}

static dc_status rendezvous_root(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline) {
  tcp_root root = {.group = group};
  DC__TRY(dc__tcp_listen_root(group, address));
  for (int32_t r = 0; r < DC__COMM_MAX_WORLD; r++) {
    root.peers[r] = -1;
  }
  if (!dc__random_bytes(group->run, sizeof group->run)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no random bytes: %s", strerror(errno));
  }
  group->endpoints[0].on_root_machine = 1;
  dc_status status = collect_peers(&root, deadline);
  if (status == DC_OK && group->overlay) { /* an overlay listens for long, so not at the address that others know */
    status = dc__tcp_listen_again(group);
  }
  for (int32_t r = 1; r < group->world; r++) {
    if (root.peers[r] >= 0 && status == DC_OK) {
      send_endpoints(root.peers[r], group);
    } else if (root.peers[r] >= 0) {
      dc__tcp_reject(root.peers[r], status);
    }
    dc__tcp_close(&root.peers[r]);
  }
  return status;
}

/* ---- the other ranks ---- */

typedef struct tcp_peer {
  dc__tcp_group *group;
  const dc__tcp_address *to;
  int fd;
  bool answered; /* rank 0 has answered */
} tcp_peer;

static int connect_any(const struct addrinfo *found, int64_t deadline, struct sockaddr_storage *reached) {
  for (const struct addrinfo *a = found; a != NULL; a = a->ai_next) {
    const int64_t end = dc__now_ns() + MAX_CONNECT_MS * INT64_C(1000000);
    int fd = dc__tcp_connect(a->ai_addr, a->ai_addrlen, -1, end < deadline ? end : deadline);
    if (fd >= 0) {
      memset(reached, 0, sizeof *reached);
      memcpy(reached, a->ai_addr, a->ai_addrlen);
      return fd;
    }
  }
  return -1;
}

/* Nothing listens before rank 0 comes, nor after its group has formed. */
static dc_status fail_no_root(const dc__tcp_group *group, const dc__tcp_address *to, int error) {
  if (dc__tcp_is_resource_error(error)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": no socket: %s", group->name, strerror(error));
  }
  char text[DC__TCP_ERROR];
  dc__tcp_error_text(error, text);
  return dc__fail(DC_E_TIMEOUT,
                  "dc_comm_create_tcp: group \"%s\": %s %s:%" PRId32 " after %.1f s: rank 0 of %" PRId32
                  " has not come there%s; the last attempt: %s",
                  group->name, error == ECONNREFUSED ? "nothing listens at" : "no connection to", to->host, to->port,
                  (double)group->timeout_ns / 1e9, group->world,
                  error == ECONNREFUSED ? ", or its group has formed already" : ", or cannot be reached", text);
}

static dc_status tcp_connect_to_root(const dc__tcp_group *group, const dc__tcp_address *to, int64_t deadline,
                                     struct sockaddr_storage *reached, int *fd) {
  char port[8];
  struct addrinfo *found = NULL;
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  snprintf(port, sizeof port, "%" PRId32, to->port);
  int error = getaddrinfo(to->host, port, &hints, &found);
  if (error != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": host \"%s\": %s", group->name, to->host,
                    gai_strerror(error));
  }
  *fd = connect_any(found, deadline, reached);
  while (*fd < 0 && !dc__tcp_is_resource_error(errno) && dc__now_ns() < deadline) {
    const struct timespec pause = {0, RETRY_NS};
    nanosleep(&pause, NULL);
    *fd = connect_any(found, deadline, reached);
  }
  error = errno;
  freeaddrinfo(found);
  return *fd >= 0 ? DC_OK : fail_no_root(group, to, error);
}

/* The answer from rank 0's address does not start with libdc's magic. */
static dc_status fail_not_libdc(const tcp_peer *peer, const void *data, size_t bytes) {
  char text[4 * MAX_QUOTED + 1];
  dc__escape(text, sizeof text, data, bytes < MAX_QUOTED ? bytes : MAX_QUOTED);
  return dc__fail(DC_E_EXISTS,
                  "dc_comm_create_tcp: group \"%s\": what listens at %s:%" PRId32
                  " is not libdc, or another version of it; it sent \"%s\"",
                  peer->group->name, peer->to->host, peer->to->port, text);
}

/* error is errno, or 0 if the connection was closed. */
static dc_status fail_no_answer(const tcp_peer *peer, int error) {
  const dc__tcp_group *group = peer->group;
  double seconds = (double)group->timeout_ns / 1e9;
  char text[DC__TCP_ERROR];
  if (error == ETIMEDOUT && peer->answered) {
    return dc__fail(DC_E_TIMEOUT, "dc_comm_create_tcp: group \"%s\": rank 0 still waits for other ranks after %.1f s",
                    group->name, seconds);
  }
  if (error == ETIMEDOUT) {
    return dc__fail(DC_E_TIMEOUT,
                    "dc_comm_create_tcp: group \"%s\": what listens at %s:%" PRId32
                    " took the connection and said nothing for %.1f s: another service, or a rank 0 that is stopped",
                    group->name, peer->to->host, peer->to->port, seconds);
  }
  dc__tcp_error_text(error, text);
  return dc__fail(
      DC_E_PEER_DEAD, "dc_comm_create_tcp: group \"%s\": rank 0 ended%s: %s:%" PRId32 " closed the connection%s%s%s",
      group->name, peer->answered ? "" : ", or began without this rank, or another service is there", peer->to->host,
      peer->to->port, error == 0 ? "" : " (", error == 0 ? "" : text, error == 0 ? "" : ")");
}

/* Receives rank 0's next answer. */
static dc_status tcp_receive_welcome(tcp_peer *peer, int64_t deadline, dc__tcp_welcome *welcome) {
  static const char magic[8] = DC__TCP_MAGIC;
  size_t first, rest;
  bool whole = dc__tcp_receive_all(peer->fd, welcome->magic, sizeof magic, deadline, &first);
  int error = errno;
  if (memcmp(welcome->magic, magic, first) != 0) {
    /* The bytes that follow help to identify the service. */
    ssize_t got = whole ? recv(peer->fd, (char *)welcome + first, MAX_QUOTED - sizeof magic, MSG_DONTWAIT) : 0;
    return fail_not_libdc(peer, welcome, first + (got > 0 ? (size_t)got : 0));
  }
  if (!whole || !dc__tcp_receive_all(peer->fd, &welcome->status, sizeof *welcome - sizeof magic, deadline, &rest)) {
    return fail_no_answer(peer, whole ? errno : error);
  }
  if (welcome->status == DC_OK || dc__tcp_is_failure(welcome->status, welcome->text)) {
    return welcome->status == DC_OK ? DC_OK : dc__fail(welcome->status, "%s", welcome->text);
  }
  return fail_not_libdc(peer, welcome, sizeof *welcome);
}

static dc_status receive_endpoints(tcp_peer *peer, int64_t deadline) {
  dc__tcp_welcome welcome;
  size_t got;
  DC__TRY(tcp_receive_welcome(peer, deadline, &welcome));
  peer->answered = true;
  if (welcome.more != 0) {
    DC__TRY(tcp_receive_welcome(peer, deadline, &welcome));
  }
  memcpy(peer->group->run, welcome.run, sizeof welcome.run);
  dc__tcp_endpoint *endpoints = peer->group->endpoints;
  return dc__tcp_receive_all(peer->fd, endpoints, (size_t)peer->group->world * sizeof *endpoints, deadline, &got)
             ? DC_OK
             : fail_no_answer(peer, errno);
}

static enum dc__tcp_call_result peer_call(const tcp_peer *peer, dc__tcp_call *call, int64_t deadline) {
  char where[sizeof peer->to->host + 8];
  snprintf(where, sizeof where, "%s:%" PRId32, peer->to->host, peer->to->port);
  enum dc__tcp_call_result result = dc__tcp_call_open(peer->group, call, deadline);
  result = result == DC__TCP_CALL_OK ? dc__tcp_call_prove(peer->group, call, deadline, where) : result;
  return result == DC__TCP_CALL_OK ? dc__tcp_call_finish(peer->group, call, deadline, where) : result;
}

/* The handshake with rank 0. Under a flood of connections rank 0 may drop this one before it has proved itself; then it
 * connects again. */
static dc_status peer_authenticate(tcp_peer *peer, int64_t deadline) {
  for (int32_t attempt = 1;; attempt++) {
    struct sockaddr_storage reached;
    dc__tcp_call call = {.fd = peer->fd, .hello = dc__tcp_hello_make(peer->group, DC__TCP_RENDEZVOUS)};
    enum dc__tcp_call_result result = peer_call(peer, &call, deadline);
    if (result == DC__TCP_CALL_OK) {
      return DC_OK;
    }
    if (result == DC__TCP_CALL_FOREIGN) {
      return fail_not_libdc(peer, call.quoted, call.quoted_bytes);
    }
    if (result == DC__TCP_CALL_FAILED) {
      return call.status;
    }
    if (!dc__tcp_may_return(&call, attempt)) {
      return fail_no_answer(peer, call.error);
    }
    dc__tcp_close(&peer->fd);
    dc__tcp_back_off(peer->group, attempt, deadline);
    DC__TRY(tcp_connect_to_root(peer->group, peer->to, deadline, &reached, &peer->fd));
  }
}

/* Listens only once rank 0 does: on rank 0's machine the system might otherwise give it rank 0's port. */
static dc_status tcp_rendezvous_peer(dc__tcp_group *group, const dc__tcp_address *to, int64_t deadline) {
  struct sockaddr_storage reached;
  dc__tcp_endpoint *endpoints = group->endpoints;
  tcp_peer peer = {.group = group, .to = to, .fd = -1};
  DC__TRY(tcp_connect_to_root(group, to, deadline, &reached, &peer.fd));
  dc_status status = dc__tcp_listen_peer(group, peer.fd);
  status = status == DC_OK ? peer_authenticate(&peer, deadline) : status;
  status = status == DC_OK ? receive_endpoints(&peer, deadline + GRACE_NS) : status;
  dc__tcp_close(&peer.fd);
  for (int32_t r = 0; status == DC_OK && r < group->world; r++) {
    int32_t port = r == 0 && !group->overlay ? to->port : endpoints[r].port;
    endpoints[r] = endpoints[r].on_root_machine != 0 ? endpoint_of(&reached, port) : endpoints[r];
    endpoints[r].port = port;
    if (port < 1 || port > 65535) {
      status = dc__fail(DC_E_SYSTEM,
                        "dc_comm_create_tcp: group \"%s\": rank 0 says that rank %" PRId32 " listens at port %" PRId32,
                        group->name, r, port);
    }
  }
  return status;
}

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline) {
  return group->rank == 0 ? rendezvous_root(group, address, deadline) : tcp_rendezvous_peer(group, address, deadline);
}
