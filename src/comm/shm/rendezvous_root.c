/* Rank 0's side of the rendezvous: collects the ranks' hellos, and answers all of them once the group is complete or
 * has failed. */
#define _GNU_SOURCE /* accept4 */
#include "comm/rank_set.h"
#include "comm/shm/rendezvous.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PEERS = DC__COMM_MAX_LOCAL + 16, RESEND_NS = 1000000, WELCOME_NS = 1000000000 };

typedef struct shm_peer {
  int fd;
  int32_t rank; /* -1 before its hello */
} shm_peer;

typedef struct shm_root {
  const char *name;
  dc__shm_group *group;
  int listener;
  int heaps[DC__COMM_MAX_LOCAL]; /* -1 if the rank has not joined */
  shm_peer peers[MAX_PEERS];
  int32_t peer_count;
  int32_t joined;
  int64_t deadline;
} shm_root;

/* Without privileges, a user's processes may have only so many descriptors in flight (ulimit -n). Beyond that, sending
 * fails with ETOOMANYREFS until ranks have received some. */
static void shm_send_welcome(const shm_root *root, int fd, const dc__shm_welcome *message) {
  static const struct timespec pause = {0, RESEND_NS};
  const int64_t end = root->deadline + WELCOME_NS;
  int fds[DC__SHM_MAX_FDS];
  int32_t count = 0;
  if (message->status == DC_OK) {
    fds[count++] = root->group->control_fd;
    for (int32_t r = 0; r < root->group->world; r++) {
      fds[count++] = root->heaps[r];
      if (message->has_pidfd[r]) {
        fds[count++] = root->group->pidfds[r];
      }
    }
  }
  while (dc__shm_send_fds(fd, message, sizeof *message, fds, count) < 0 && errno == ETOOMANYREFS &&
         dc__now_ns() < end) { /* a rank that died meanwhile shows in its pidfd */
    nanosleep(&pause, NULL);
  }
}

static void send_failure(const shm_root *root, int fd, dc_status status) {
  dc__shm_welcome message = {.status = status};
  snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  shm_send_welcome(root, fd, &message);
}

static void release_rank(shm_root *root, shm_peer *peer) {
  if (peer->rank >= 0) {
    dc__shm_close_fds(&root->heaps[peer->rank], 1);
    dc__shm_close_fds(&root->group->pidfds[peer->rank], 1);
    root->heaps[peer->rank] = -1;
    root->group->pidfds[peer->rank] = -1;
    root->joined--;
    peer->rank = -1;
  }
}

static void remove_peer(shm_root *root, int32_t at) {
  shm_peer *peer = &root->peers[at];
  release_rank(root, peer);
  close(peer->fd);
  *peer = root->peers[--root->peer_count];
}

/* A rank that died may be restarted, and the hello of its new process may arrive before the end of the old one. */
static void release_dead_rank(shm_root *root, int32_t rank) {
  for (int32_t i = 0; i < root->peer_count; i++) {
    struct pollfd end = {.fd = root->peers[i].fd};
    if (root->peers[i].rank == rank && poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0) {
      release_rank(root, &root->peers[i]);
    }
  }
}

/* DC_OK admits the peer. DC_E_EXISTS and DC_E_INVALID reject it alone; DC_E_MISMATCH fails the whole group. */
static dc_status check_hello(const shm_root *root, const dc__shm_hello *hello, ssize_t got, int32_t fds) {
  if (got != (ssize_t)sizeof *hello || memcmp(hello->magic, "libdc\0\0", 8) != 0 ||
      hello->protocol != DC__SHM_PROTOCOL) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": a rank uses another version of libdc than rank 0",
                    root->name);
  }
  if (hello->world != root->group->world) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": rank %" PRId32 " says world_size = %" PRId32
                    " where rank 0 says %" PRId32,
                    root->name, hello->rank, hello->world, root->group->world);
  }
  if (hello->rank < 1 || hello->rank >= hello->world || fds != 1 + (hello->has_pidfd != 0)) {
    return dc__fail(DC_E_INVALID, "dc_comm_create_processes: group \"%s\": a malformed greeting", root->name);
  }
  if (root->heaps[hello->rank] >= 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_processes: group \"%s\": rank %" PRId32 " is taken by another process",
                    root->name, hello->rank);
  }
  return DC_OK;
}

static dc_status shm_fail_descriptors(const shm_root *root) {
  return dc__fail(DC_E_SYSTEM,
                  "dc_comm_create_processes: group \"%s\": rank 0's process has no descriptors left for the other "
                  "ranks' memory: a higher limit (ulimit -n) or fewer groups help",
                  root->name);
}

static dc_status shm_receive_hello(shm_root *root, int32_t at) {
  shm_peer *peer = &root->peers[at];
  dc__shm_hello hello;
  int fds[DC__SHM_MAX_FDS];
  int32_t count;
  ssize_t got = dc__shm_receive_fds(peer->fd, &hello, sizeof hello, fds, &count);
  if (got < 0 && errno == EMFILE) {
    dc__shm_close_fds(fds, count);
    const dc_status failed = shm_fail_descriptors(root);
    send_failure(root, peer->fd, failed);
    return failed;
  }
  if (got <= 0 || peer->rank >= 0) { /* it ended, or sent a second message */
    dc__shm_close_fds(fds, count);
    remove_peer(root, at);
    return DC_OK;
  }
  if (got == (ssize_t)sizeof hello) {
    release_dead_rank(root, hello.rank);
  }
  dc_status status = check_hello(root, &hello, got, count);
  if (status != DC_OK) {
    send_failure(root, peer->fd, status);
    dc__shm_close_fds(fds, count);
    remove_peer(root, at);
    return status == DC_E_MISMATCH ? status : DC_OK;
  }
  peer->rank = hello.rank;
  root->heaps[hello.rank] = fds[0];
  root->group->pidfds[hello.rank] = hello.has_pidfd ? fds[1] : -1;
  root->group->reserves[hello.rank] = (size_t)hello.reserve;
  root->joined++;
  return DC_OK;
}

static dc_status accept_peer(shm_root *root) {
  int fd = dc__above_streams(accept4(root->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd < 0) {
    return errno == EMFILE || errno == ENFILE ? shm_fail_descriptors(root) : DC_OK;
  }
  if (root->peer_count == MAX_PEERS || !dc__shm_same_user(fd)) {
    close(fd);
    return DC_OK;
  }
  root->peers[root->peer_count++] = (shm_peer){fd, -1};
  return DC_OK;
}

static dc_status shm_fail_missing(const shm_root *root) {
  dc__rank_list missing = {.count = 0};
  for (int32_t r = 1; r < root->group->world; r++) {
    if (root->heaps[r] < 0) {
      dc__rank_list_add(&missing, r);
    }
  }
  return dc__fail(DC_E_TIMEOUT,
                  "dc_comm_create_processes: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s",
                  root->name, missing.count > 1 ? "s" : "", missing.text, root->group->world,
                  missing.count > 1 ? "have" : "has", (double)root->group->timeout_ns / 1e9);
}

static dc_status receive_peers(shm_root *root) {
  while (root->joined < root->group->world - 1) {
    struct pollfd polls[MAX_PEERS + 1];
    polls[0] = (struct pollfd){.fd = root->listener, .events = POLLIN};
    int32_t count = root->peer_count;
    for (int32_t i = 0; i < count; i++) {
      polls[i + 1] = (struct pollfd){.fd = root->peers[i].fd, .events = POLLIN};
    }
    int ready = poll(polls, (nfds_t)count + 1, dc__poll_timeout_ms(root->deadline));
    if (ready < 0 && errno != EINTR) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: poll: %s", strerror(errno));
    }
    if (ready > 0) {
      for (int32_t i = count - 1; i >= 0; i--) { /* backwards: remove_peer() moves the last one down */
        if (polls[i + 1].revents != 0) {
          DC__TRY(shm_receive_hello(root, i));
        }
      }
      if (polls[0].revents != 0) {
        DC__TRY(accept_peer(root));
      }
    } else if (dc__now_ns() >= root->deadline) {
      return shm_fail_missing(root);
    }
  }
  return DC_OK;
}

static dc_status open_listener(shm_root *root) {
  struct sockaddr_un address;
  socklen_t length = dc__shm_socket_address(root->name, &address);
  root->listener = dc__above_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (root->listener < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: no socket: %s", strerror(errno));
  }
  if (bind(root->listener, (struct sockaddr *)&address, length) != 0) {
    return errno == EADDRINUSE
               ? dc__fail(DC_E_EXISTS, "dc_comm_create_processes: the name \"%s\" is taken by another group that forms",
                          root->name)
               : dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": bind: %s", root->name, strerror(errno));
  }
  if (listen(root->listener, MAX_PEERS) != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": listen: %s", root->name, strerror(errno));
  }
  return DC_OK;
}

static dc_status make_control(shm_root *root) {
  dc__shm_group *group = root->group;
  size_t bytes = dc__shm_control_bytes();
  DC__TRY(dc__shm_file_create("libdc-control", bytes, &group->control_fd));
  void *map = NULL;
  DC__TRY(dc__shm_file_map("dc_comm_create_processes", group->control_fd, 0, bytes, true, &map));
  group->control = map;
  group->control->world = group->world;
  return dc__shm_segment_add(group); /* now, so that a lack of memory fails the whole group */
}

static dc_status run_rendezvous(shm_root *root) {
  dc__shm_group *group = root->group;
  DC__TRY(open_listener(root));
  DC__TRY(make_control(root));
  dc_status status = receive_peers(root);
  if (status == DC_OK) {
    status = dc__shm_map_peers(group, root->heaps);
  }
  dc__shm_welcome message = {.status = status};
  if (status != DC_OK) {
    snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  }
  for (int32_t r = 0; r < group->world; r++) {
    message.reserves[r] = group->reserves[r];
    message.has_pidfd[r] = group->pidfds[r] >= 0;
  }
  for (int32_t i = 0; i < root->peer_count; i++) {
    if (root->peers[i].rank >= 0) {
      shm_send_welcome(root, root->peers[i].fd, &message);
    }
  }
  return status;
}

dc_status dc__shm_rendezvous_root(const char *name, dc__shm_group *group, int64_t deadline) {
  shm_root root = {.name = name, .group = group, .listener = -1, .deadline = deadline};
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    root.heaps[r] = r == 0 ? group->heap.fd : -1;
  }
  dc_status status = run_rendezvous(&root);
  /* The listener first: a late rank is then refused, and may wait for another group of this name. */
  dc__shm_close_fds(&root.listener, 1);
  dc__shm_close_fds(root.heaps + 1, DC__COMM_MAX_LOCAL - 1);
  for (int32_t i = 0; i < root.peer_count; i++) {
    close(root.peers[i].fd);
  }
  return status;
}
