/* Incoming connections: accepts them, keeps those with an incomplete hello pending, and checks hellos. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/escape.h"
#include "comm/tcp/tcp.h"

dc__tcp_hello dc__tcp_hello_make(const dc__tcp_group *group, int32_t mesh) {
  dc__tcp_hello hello = {.magic = DC__TCP_MAGIC,
                         .byte_order = 1,
                         .protocol = DC__TCP_PROTOCOL << 24 | sizeof(struct dc__tcp_header),
                         .rank = group->rank,
                         .world = group->world,
                         .mesh = mesh,
                         .port = group->endpoints[group->rank].port};
  memcpy(hello.name, group->name, sizeof hello.name);
  return hello;
}

dc_status dc__tcp_hello_check(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const dc__tcp_hello own = dc__tcp_hello_make(group, 0);
  if (hello->byte_order != own.byte_order || hello->protocol != own.protocol) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_tcp: rank %" PRId32 " is another version of libdc, or of another machine type",
                    group->rank);
  }
  if (memcmp(hello->name, own.name, sizeof own.name) != 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: another group meets at this address");
  }
  return DC_OK;
}

bool dc__tcp_hello_matches(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const dc__tcp_hello own = dc__tcp_hello_make(group, 0);
  return hello->byte_order == own.byte_order && hello->protocol == own.protocol && hello->rank >= 0 &&
         hello->rank < group->world && hello->world == group->world &&
         memcmp(hello->name, own.name, sizeof own.name) == 0;
}

void dc__tcp_note_rejected(dc__tcp_pending *p, int fd, const char *what) {
  char peer[DC__TCP_PEER];
  dc__tcp_peer_text(fd, peer);
  p->rejected++;
  snprintf(p->last, sizeof p->last, "%s, %.90s", peer, what);
}

/* Notes what a rejected connection sent. */
static void note_garbage(dc__tcp_pending *p, int32_t i) {
  char quoted[64], what[96];
  dc__escape(quoted, sizeof quoted, (const char *)&p->hellos[i], p->bytes_received[i] < 32 ? p->bytes_received[i] : 32);
  snprintf(what, sizeof what, "which sent \"%s\"", quoted);
  dc__tcp_note_rejected(p, p->fds[i], what);
}

static void remove_pending(dc__tcp_pending *p, int32_t i) {
  p->count--;
  memmove(&p->fds[i], &p->fds[i + 1], (size_t)(p->count - i) * sizeof p->fds[0]);
  memmove(&p->bytes_received[i], &p->bytes_received[i + 1], (size_t)(p->count - i) * sizeof p->bytes_received[0]);
  memmove(&p->hellos[i], &p->hellos[i + 1], (size_t)(p->count - i) * sizeof p->hellos[0]);
}

void dc__tcp_pending_close(dc__tcp_pending *p) {
  while (p->count > 0) {
    dc__tcp_close(&p->fds[p->count - 1]);
    p->count--;
  }
}

/* If the pending list is full, the oldest connection is closed for a new one. */
static dc_status accept_pending(dc__tcp_group *group) {
  dc__tcp_pending *p = &group->pending;
  int fd = 0;
  for (int32_t i = 0; i < DC__TCP_MAX_PENDING && (fd = dc__tcp_accept(group->listener)) >= 0; i++) {
    if (p->count == DC__TCP_MAX_PENDING) {
      dc__tcp_note_rejected(p, p->fds[0], "which said nothing");
      dc__tcp_close(&p->fds[0]);
      remove_pending(p, 0);
    }
    p->bytes_received[p->count] = 0;
    p->fds[p->count++] = fd;
  }
  return fd >= 0 || !dc__tcp_is_resource_error(errno)
             ? DC_OK
             : dc__fail(DC_E_SYSTEM, "group \"%s\": rank %" PRId32 " cannot accept a connection: %s", group->name,
                        group->rank, strerror(errno));
}

/* Reads what has arrived. True if the hello is complete. */
static bool tcp_receive_hello(dc__tcp_pending *p, int32_t i) {
  static const char magic[8] = DC__TCP_MAGIC;
  char *at = (char *)&p->hellos[i] + p->bytes_received[i];
  ssize_t got = recv(p->fds[i], at, sizeof p->hellos[i] - p->bytes_received[i], MSG_DONTWAIT);
  if (got > 0) {
    p->bytes_received[i] += (size_t)got;
  }
  size_t known = p->bytes_received[i] < sizeof magic ? p->bytes_received[i] : sizeof magic;
  bool ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (ended || memcmp(p->hellos[i].magic, magic, known) != 0) {
    note_garbage(p, i);
    dc__tcp_close(&p->fds[i]);
    remove_pending(p, i);
    return false;
  }
  return p->bytes_received[i] == sizeof p->hellos[i];
}

static bool receive_any_hello(dc__tcp_pending *p, dc__tcp_hello *hello, int *fd) {
  for (int32_t i = p->count - 1; i >= 0; i--) {
    if (tcp_receive_hello(p, i)) {
      *hello = p->hellos[i];
      *fd = p->fds[i];
      remove_pending(p, i);
      return true;
    }
  }
  return false;
}

/* Serves pending connections before it accepts new ones, which may evict them. */
bool dc__tcp_poll_hello(dc__tcp_group *group, bool can_accept, dc__tcp_hello *hello, int *fd, dc_status *status) {
  dc__tcp_pending *p = &group->pending;
  *status = DC_OK;
  if (receive_any_hello(p, hello, fd)) {
    return true;
  }
  *status = can_accept ? accept_pending(group) : DC_OK;
  if (receive_any_hello(p, hello, fd)) {
    *status = DC_OK;
    return true;
  }
  return false;
}

bool dc__tcp_wait_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status) {
  dc__tcp_pending *p = &group->pending;
  bool ended = false;
  *status = DC_OK;
  while (!ended) {
    struct pollfd polls[DC__TCP_MAX_PENDING + 2 * DC__COMM_MAX_WORLD + 2];
    int32_t count = 0;
    polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
    for (int32_t i = 0; i < extra_count; i++) {
      polls[count++] = (struct pollfd){.fd = extra[i], .events = POLLIN};
    }
    for (int32_t i = 0; i < p->count; i++) {
      polls[count++] = (struct pollfd){.fd = p->fds[i], .events = POLLIN};
    }
    if (poll(polls, (nfds_t)count, dc__poll_timeout_ms(deadline)) < 0) {
      if (errno != EINTR) {
        *status = dc__fail(DC_E_SYSTEM, "group \"%s\": poll: %s", group->name, strerror(errno));
        return false;
      }
      continue;
    }
    ended = dc__now_ns() >= deadline; /* even under a flood of connections */
    for (int32_t i = 0; i < extra_count; i++) {
      ended = ended || polls[1 + i].revents != 0;
    }
    if (dc__tcp_poll_hello(group, polls[0].revents != 0, hello, fd, status)) {
      return true;
    }
    ended = ended || *status != DC_OK;
  }
  return false;
}
