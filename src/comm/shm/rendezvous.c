/* Rendezvous of processes: rank 0 listens on an abstract socket named after the group. The other ranks connect and pass
 * descriptors of their heap and process; rank 0 sends all descriptors to all. Abstract sockets and memory files have no
 * name in the file system and end with their processes. */
#define _GNU_SOURCE /* ucred */
#include "comm/shm/rendezvous.h"
#include "comm/escape.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  RETRY_NS = 5000000,
  GRACE_NS = 1000000000 /* rank 0 knows which ranks are missing: its answer has this much longer to arrive */
};

socklen_t dc__shm_socket_address(const char *name, struct sockaddr_un *address) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  /* The leading zero byte makes it abstract. */
  int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "libdc.%s", name);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

bool dc__shm_same_user(int fd) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

/* -1 if the kernel or sandbox has no pidfds: a death is then found at the deadline only. */
static int own_pidfd(void) {
  return dc__above_streams((int)syscall(SYS_pidfd_open, getpid(), 0));
}

dc_status dc__shm_map_peers(dc__shm_group *group, const int *heaps) {
  for (int32_t r = 0; r < group->world; r++) {
    if (r != group->rank) {
      void *base = NULL;
      DC__TRY(dc__shm_file_map("dc_comm_create_processes", heaps[r], 0, group->reserves[r], false, &base));
      (void)madvise(base, group->reserves[r], MADV_DONTDUMP); /* core files need no peer's heap */
      group->bases[r] = (uintptr_t)base;
    }
  }
  return DC_OK;
}

/* ---- the other ranks ---- */

static dc_status fail_root_missing(const char *name, const dc__shm_group *group) {
  return dc__fail(DC_E_TIMEOUT,
                  "dc_comm_create_processes: group \"%s\": rank 0 of %" PRId32
                  " has not come after %.1f s, or its group has formed already",
                  name, group->world, (double)group->timeout_ns / 1e9);
}

static dc_status shm_connect_to_root(const char *name, const dc__shm_group *group, int64_t deadline, int *fd) {
  struct sockaddr_un address;
  socklen_t length = dc__shm_socket_address(name, &address);
  *fd = dc__above_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (*fd < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: no socket: %s", strerror(errno));
  }
  while (connect(*fd, (struct sockaddr *)&address, length) != 0) {
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": connect: %s", name, strerror(errno));
    }
    if (dc__now_ns() >= deadline) {
      return fail_root_missing(name, group);
    }
    const struct timespec pause = {0, RETRY_NS};
    nanosleep(&pause, NULL);
  }
  if (!dc__shm_same_user(*fd)) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_processes: the name \"%s\" is taken by another user", name);
  }
  return DC_OK;
}

static dc_status shm_fail_without_root(const char *name, const dc__shm_group *group) {
  return dc__fail(DC_E_PEER_DEAD,
                  "dc_comm_create_processes: group \"%s\": rank 0 ended, or began without this rank %" PRId32, name,
                  group->rank);
}

static dc_status shm_send_hello(const char *name, const dc__shm_group *group, int fd) {
  int pidfd = group->pidfds[group->rank];
  const dc__shm_hello message = {.magic = "libdc\0\0",
                                 .protocol = DC__SHM_PROTOCOL,
                                 .rank = group->rank,
                                 .world = group->world,
                                 .has_pidfd = pidfd >= 0,
                                 .reserve = group->heap.reserve};
  const int fds[2] = {group->heap.fd, pidfd};
  if (dc__shm_send_fds(fd, &message, sizeof message, fds, 1 + (pidfd >= 0)) < 0) {
    return errno == ECONNRESET || errno == EPIPE
               ? shm_fail_without_root(name, group)
               : dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": no word to rank 0: %s", name,
                          strerror(errno));
  }
  return DC_OK;
}

static dc_status shm_receive_welcome(const char *name, const dc__shm_group *group, int fd, int64_t deadline,
                                     dc__shm_welcome *message, int *fds, int32_t *count) {
  struct pollfd wait = {.fd = fd, .events = POLLIN};
  int ready;
  do {
    ready = poll(&wait, 1, dc__poll_timeout_ms(deadline + GRACE_NS));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return dc__fail(DC_E_TIMEOUT,
                    "dc_comm_create_processes: group \"%s\": rank 0 still waits for other ranks after %.1f s", name,
                    (double)group->timeout_ns / 1e9);
  }
  ssize_t got = dc__shm_receive_fds(fd, message, sizeof *message, fds, count);
  if (got == 0 || (got < 0 && errno == ECONNRESET)) {
    return shm_fail_without_root(name, group);
  }
  if (got != (ssize_t)sizeof *message) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": no word from rank 0: %s", name,
                    got < 0 ? strerror(errno) : "another version of libdc");
  }
  message->text[sizeof message->text - 1] = '\0';
  dc__escape(message->text, sizeof message->text, message->text, strlen(message->text));
  if (message->status == DC_OK) {
    return DC_OK;
  }
  bool sensible = message->text[0] != '\0' && strcmp(dc_status_name(message->status), "DC_E_UNKNOWN") != 0;
  return sensible ? dc__fail(message->status, "%s", message->text)
                  : dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": a malformed word from rank 0", name);
}

/* Order of the descriptors: control block, then each rank's heap and, if it has one, pidfd. */
static dc_status unpack_fds(dc__shm_group *group, const dc__shm_welcome *message, int *fds, int32_t count) {
  int heaps[DC__COMM_MAX_LOCAL];
  int32_t at = 1;
  for (int32_t r = 0; r < group->world; r++) {
    if (at + (message->has_pidfd[r] != 0) >= count) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: rank 0 sent %" PRId32 " descriptors, which is too few",
                      count);
    }
    heaps[r] = fds[at++];
    group->reserves[r] = (size_t)message->reserves[r];
    if (message->has_pidfd[r]) {
      if (r != group->rank) {
        group->pidfds[r] = fds[at];
        fds[at] = -1; /* owned by the group */
      }
      at++;
    }
  }
  void *map = NULL;
  DC__TRY(dc__shm_file_map("dc_comm_create_processes", fds[0], 0, dc__shm_control_bytes(), false, &map));
  group->control = map;
  group->control_fd = fds[0];
  fds[0] = -1; /* owned by the group */
  return dc__shm_map_peers(group, heaps);
}

static dc_status shm_rendezvous_peer(const char *name, dc__shm_group *group, int64_t deadline) {
  int fd = -1;
  int fds[DC__SHM_MAX_FDS];
  int32_t count = 0;
  dc__shm_welcome message;
  dc_status status = shm_connect_to_root(name, group, deadline, &fd);
  if (status == DC_OK) {
    status = shm_send_hello(name, group, fd);
  }
  if (status == DC_OK) {
    status = shm_receive_welcome(name, group, fd, deadline, &message, fds, &count);
  }
  if (status == DC_OK) {
    status = unpack_fds(group, &message, fds, count);
  }
  dc__shm_close_fds(fds, count);
  dc__shm_close_fds(&fd, 1);
  return status;
}

dc_status dc__shm_rendezvous(const char *name, dc__shm_group *group) {
  int64_t deadline = dc__now_ns() + group->timeout_ns;
  group->bases[group->rank] = (uintptr_t)group->heap.base;
  group->reserves[group->rank] = group->heap.reserve;
  group->pidfds[group->rank] = own_pidfd();
  return group->rank == 0 ? dc__shm_rendezvous_root(name, group, deadline) : shm_rendezvous_peer(name, group, deadline);
}
