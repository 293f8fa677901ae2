/* Rank 0's side of the rendezvous: it hears who comes, and tells all when all are there or cannot be. */
#define _GNU_SOURCE /* accept4 */
#include "comm/rank_set.h"
#include "comm/shm/rendezvous.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PEERS = DC__COMM_MAX_LOCAL + 16 };

/* What rank 0 knows of who connected. */
typedef struct shm_peer {
  int fd;
  int32_t rank; /* -1: has not said */
} shm_peer;

typedef struct shm_root {
  const char *name;
  dc__shm_group *group;
  int listener;
  int heaps[DC__COMM_MAX_LOCAL]; /* -1: the rank has not come */
  shm_peer peers[MAX_PEERS];
  int32_t peer_count;
  int32_t joined;
  int64_t deadline;
} shm_root;

static void send_welcome(const shm_root *h, int fd, const dc__shm_welcome *message) {
  int fds[DC__SHM_MAX_FDS];
  int32_t count = 0;
  if (message->status == DC_OK) {
    fds[count++] = h->group->control_fd;
    for (int32_t r = 0; r < h->group->world; r++) {
      fds[count++] = h->heaps[r];
      if (message->has_pidfd[r]) {
        fds[count++] = h->group->pidfds[r];
      }
    }
  }
  (void)dc__shm_send_fds(fd, message, sizeof *message, fds,
                         count); /* who died meanwhile will be noticed by its pidfd */
}

static void send_failure(const shm_root *h, int fd, dc_status status) {
  dc__shm_welcome message = {.status = status};
  snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  send_welcome(h, fd, &message);
}

static void release_rank(shm_root *h, shm_peer *g) {
  if (g->rank >= 0) {
    dc__shm_close_fds(&h->heaps[g->rank], 1);
    dc__shm_close_fds(&h->group->pidfds[g->rank], 1);
    h->heaps[g->rank] = -1;
    h->group->pidfds[g->rank] = -1;
    h->joined--;
    g->rank = -1;
  }
}

static void remove_peer(shm_root *h, int32_t at) {
  shm_peer *g = &h->peers[at];
  release_rank(h, g);
  close(g->fd);
  *g = h->peers[--h->peer_count];
}

/* A rank that died may be started again, and its second process may be heard before the end of its first. */
static void release_dead_rank(shm_root *h, int32_t rank) {
  for (int32_t i = 0; i < h->peer_count; i++) {
    struct pollfd end = {.fd = h->peers[i].fd};
    if (h->peers[i].rank == rank && poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0) {
      release_rank(h, &h->peers[i]);
    }
  }
}

/* Whether the one who said hello may come in: DC_OK; DC_E_EXISTS, DC_E_INVALID are its affair; DC_E_MISMATCH is the
 * whole group's. */
static dc_status check_hello(const shm_root *h, const dc__shm_hello *hello, ssize_t got, int32_t fds) {
  if (got != (ssize_t)sizeof *hello || memcmp(hello->magic, "libdc\0\0", 8) != 0 ||
      hello->protocol != DC__SHM_PROTOCOL) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": a rank uses another version of libdc than rank 0",
                    h->name);
  }
  if (hello->world != h->group->world) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": rank %" PRId32 " says world_size = %" PRId32
                    " where rank 0 says %" PRId32,
                    h->name, hello->rank, hello->world, h->group->world);
  }
  if (hello->rank < 1 || hello->rank >= hello->world || fds != 1 + (hello->has_pidfd != 0)) {
    return dc__fail(DC_E_INVALID, "dc_comm_create_processes: group \"%s\": a malformed greeting", h->name);
  }
  if (h->heaps[hello->rank] >= 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_processes: group \"%s\": rank %" PRId32 " is taken by another process",
                    h->name, hello->rank);
  }
  return DC_OK;
}

static dc_status receive_hello(shm_root *h, int32_t at) {
  shm_peer *g = &h->peers[at];
  dc__shm_hello hello;
  int fds[DC__SHM_MAX_FDS];
  int32_t count;
  ssize_t got = dc__shm_receive_fds(g->fd, &hello, sizeof hello, fds, &count);
  if (got <= 0 || g->rank >= 0) { /* it ended, or talks out of turn */
    dc__shm_close_fds(fds, count);
    remove_peer(h, at);
    return DC_OK;
  }
  if (got == (ssize_t)sizeof hello) {
    release_dead_rank(h, hello.rank);
  }
  dc_status status = check_hello(h, &hello, got, count);
  if (status != DC_OK) {
    send_failure(h, g->fd, status);
    dc__shm_close_fds(fds, count);
    remove_peer(h, at);
    return status == DC_E_MISMATCH ? status : DC_OK;
  }
  g->rank = hello.rank;
  h->heaps[hello.rank] = fds[0];
  h->group->pidfds[hello.rank] = hello.has_pidfd ? fds[1] : -1;
  h->group->reserves[hello.rank] = (size_t)hello.reserve;
  h->joined++;
  return DC_OK;
}

static void accept_peer(shm_root *h) {
  int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    return;
  }
  if (h->peer_count == MAX_PEERS || !dc__shm_same_user(fd)) {
    close(fd);
    return;
  }
  h->peers[h->peer_count++] = (shm_peer){fd, -1};
}

static dc_status fail_missing(const shm_root *h) {
  dc__rank_list missing = {.count = 0};
  for (int32_t r = 1; r < h->group->world; r++) {
    if (h->heaps[r] < 0) {
      dc__rank_list_add(&missing, r);
    }
  }
  return dc__fail(DC_E_TIMEOUT,
                  "dc_comm_create_processes: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s", h->name,
                  missing.count > 1 ? "s" : "", missing.text, h->group->world, missing.count > 1 ? "have" : "has",
                  (double)h->group->timeout_ns / 1e9);
}

static dc_status receive_peers(shm_root *h) {
  while (h->joined < h->group->world - 1) {
    struct pollfd polls[MAX_PEERS + 1];
    polls[0] = (struct pollfd){.fd = h->listener, .events = POLLIN};
    int32_t count = h->peer_count;
    for (int32_t i = 0; i < count; i++) {
      polls[i + 1] = (struct pollfd){.fd = h->peers[i].fd, .events = POLLIN};
    }
    int ready = poll(polls, (nfds_t)count + 1, dc__poll_timeout_ms(h->deadline));
    if (ready < 0 && errno != EINTR) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: poll: %s", strerror(errno));
    }
    if (ready > 0) {
      for (int32_t i = count - 1; i >= 0; i--) { /* backwards: a guest that goes is replaced by the last */
        if (polls[i + 1].revents != 0) {
          DC__TRY(receive_hello(h, i));
        }
      }
      if (polls[0].revents != 0) {
        accept_peer(h);
      }
    } else if (dc__now_ns() >= h->deadline) {
      return fail_missing(h);
    }
  }
  return DC_OK;
}

static dc_status open_listener(shm_root *h) {
  struct sockaddr_un address;
  socklen_t length = dc__shm_socket_address(h->name, &address);
  h->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (h->listener < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: no socket: %s", strerror(errno));
  }
  if (bind(h->listener, (struct sockaddr *)&address, length) != 0) {
    return errno == EADDRINUSE
               ? dc__fail(DC_E_EXISTS, "dc_comm_create_processes: the name \"%s\" is taken by another group that forms",
                          h->name)
               : dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": bind: %s", h->name, strerror(errno));
  }
  if (listen(h->listener, MAX_PEERS) != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": listen: %s", h->name, strerror(errno));
  }
  return DC_OK;
}

static dc_status make_control(shm_root *h) {
  dc__shm_group *group = h->group;
  size_t bytes = dc__shm_control_bytes();
  DC__TRY(dc__shm_file_create("libdc-control", bytes, &group->control_fd));
  void *map = NULL;
  DC__TRY(dc__shm_file_map("dc_comm_create_processes", group->control_fd, 0, bytes, true, &map));
  group->control = map;
  group->control->world = group->world;
  return dc__shm_segment_add(group); /* the first ones: a full machine is the whole group's error */
}

static dc_status run_rendezvous(shm_root *h) {
  dc__shm_group *group = h->group;
  DC__TRY(open_listener(h));
  DC__TRY(make_control(h));
  dc_status status = receive_peers(h);
  if (status == DC_OK) {
    status = dc__shm_map_peers(group, h->heaps);
  }
  dc__shm_welcome message = {.status = status};
  if (status != DC_OK) {
    snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  }
  for (int32_t r = 0; r < group->world; r++) {
    message.reserves[r] = group->reserves[r];
    message.has_pidfd[r] = group->pidfds[r] >= 0;
  }
  for (int32_t i = 0; i < h->peer_count; i++) {
    if (h->peers[i].rank >= 0) {
      send_welcome(h, h->peers[i].fd, &message);
    }
  }
  return status;
}

dc_status dc__shm_rendezvous_root(const char *name, dc__shm_group *group, int64_t deadline) {
  shm_root h = {.name = name, .group = group, .listener = -1, .deadline = deadline};
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    h.heaps[r] = r == 0 ? group->heap.fd : -1;
  }
  dc_status status = run_rendezvous(&h);
  /* The listener first: a late comer is then refused, and may wait for another group of this name. */
  dc__shm_close_fds(&h.listener, 1);
  dc__shm_close_fds(h.heaps + 1, DC__COMM_MAX_LOCAL - 1);
  for (int32_t i = 0; i < h.peer_count; i++) {
    close(h.peers[i].fd);
  }
  return status;
}
