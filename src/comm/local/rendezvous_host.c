/* Rank 0's side of the rendezvous: it hears who comes, and tells all when all are there or cannot be. */
#define _GNU_SOURCE /* accept4 */
#include "comm/local/rendezvous.h"
#include "comm/ranks.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MAX_GUESTS = DC__COMM_MAX_LOCAL + 16 };

/* What rank 0 knows of who connected. */
typedef struct guest {
  int fd;
  int32_t rank; /* -1: has not said */
} guest;

typedef struct host {
  const char *name;
  dc__local_group *group;
  int listener;
  int heaps[DC__COMM_MAX_LOCAL]; /* -1: the rank has not come */
  guest guests[MAX_GUESTS];
  int32_t guest_count;
  int32_t joined;
  int64_t deadline;
} host;

static void tell(const host *h, int fd, const dc__local_welcome *message) {
  int fds[DC__LOCAL_FDS];
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
  (void)dc__local_send_fds(fd, message, sizeof *message, fds,
                           count); /* who died meanwhile will be noticed by its pidfd */
}

static void tell_failure(const host *h, int fd, dc_status status) {
  dc__local_welcome message = {.status = status};
  snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  tell(h, fd, &message);
}

static void free_rank(host *h, guest *g) {
  if (g->rank >= 0) {
    dc__local_close_all(&h->heaps[g->rank], 1);
    dc__local_close_all(&h->group->pidfds[g->rank], 1);
    h->heaps[g->rank] = -1;
    h->group->pidfds[g->rank] = -1;
    h->joined--;
    g->rank = -1;
  }
}

static void forget_guest(host *h, int32_t at) {
  guest *g = &h->guests[at];
  free_rank(h, g);
  close(g->fd);
  *g = h->guests[--h->guest_count];
}

/* A rank that died may be started again, and its second process may be heard before the end of its first. */
static void free_rank_of_the_dead(host *h, int32_t rank) {
  for (int32_t i = 0; i < h->guest_count; i++) {
    struct pollfd end = {.fd = h->guests[i].fd};
    if (h->guests[i].rank == rank && poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0) {
      free_rank(h, &h->guests[i]);
    }
  }
}

/* Whether the one who said hello may come in: DC_OK; DC_E_EXISTS, DC_E_INVALID are its affair; DC_E_MISMATCH is the
 * whole group's. */
static dc_status examine(const host *h, const dc__local_hello *said, ssize_t got, int32_t fds) {
  if (got != (ssize_t)sizeof *said || memcmp(said->magic, "libdc\0\0", 8) != 0 ||
      said->protocol != DC__LOCAL_PROTOCOL) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": a rank uses another version of libdc than rank 0",
                    h->name);
  }
  if (said->world != h->group->world) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_processes: group \"%s\": rank %" PRId32 " says world_size = %" PRId32
                    " where rank 0 says %" PRId32,
                    h->name, said->rank, said->world, h->group->world);
  }
  if (said->rank < 1 || said->rank >= said->world || fds != 1 + (said->has_pidfd != 0)) {
    return dc__fail(DC_E_INVALID, "dc_comm_create_processes: group \"%s\": a malformed greeting", h->name);
  }
  if (h->heaps[said->rank] >= 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_processes: group \"%s\": rank %" PRId32 " is taken by another process",
                    h->name, said->rank);
  }
  return DC_OK;
}

static dc_status hear_guest(host *h, int32_t at) {
  guest *g = &h->guests[at];
  dc__local_hello said;
  int fds[DC__LOCAL_FDS];
  int32_t count;
  ssize_t got = dc__local_receive_fds(g->fd, &said, sizeof said, fds, &count);
  if (got <= 0 || g->rank >= 0) { /* it ended, or talks out of turn */
    dc__local_close_all(fds, count);
    forget_guest(h, at);
    return DC_OK;
  }
  if (got == (ssize_t)sizeof said) {
    free_rank_of_the_dead(h, said.rank);
  }
  dc_status status = examine(h, &said, got, count);
  if (status != DC_OK) {
    tell_failure(h, g->fd, status);
    dc__local_close_all(fds, count);
    forget_guest(h, at);
    return status == DC_E_MISMATCH ? status : DC_OK;
  }
  g->rank = said.rank;
  h->heaps[said.rank] = fds[0];
  h->group->pidfds[said.rank] = said.has_pidfd ? fds[1] : -1;
  h->group->reserves[said.rank] = (size_t)said.reserve;
  h->joined++;
  return DC_OK;
}

static void let_in(host *h) {
  int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    return;
  }
  if (h->guest_count == MAX_GUESTS || !dc__local_same_user(fd)) {
    close(fd);
    return;
  }
  h->guests[h->guest_count++] = (guest){fd, -1};
}

static dc_status fail_missing(const host *h) {
  dc__ranks missing = {.count = 0};
  for (int32_t r = 1; r < h->group->world; r++) {
    if (h->heaps[r] < 0) {
      dc__ranks_add(&missing, r);
    }
  }
  return dc__fail(DC_E_TIMEOUT,
                  "dc_comm_create_processes: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s", h->name,
                  missing.count > 1 ? "s" : "", missing.text, h->group->world, missing.count > 1 ? "have" : "has",
                  (double)h->group->timeout_ns / 1e9);
}

static dc_status receive_guests(host *h) {
  while (h->joined < h->group->world - 1) {
    struct pollfd polls[MAX_GUESTS + 1];
    polls[0] = (struct pollfd){.fd = h->listener, .events = POLLIN};
    int32_t count = h->guest_count;
    for (int32_t i = 0; i < count; i++) {
      polls[i + 1] = (struct pollfd){.fd = h->guests[i].fd, .events = POLLIN};
    }
    int ready = poll(polls, (nfds_t)count + 1, dc__milliseconds_to(h->deadline));
    if (ready < 0 && errno != EINTR) {
      return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: poll: %s", strerror(errno));
    }
    if (ready > 0) {
      for (int32_t i = count - 1; i >= 0; i--) { /* backwards: a guest that goes is replaced by the last */
        if (polls[i + 1].revents != 0) {
          DC__TRY(hear_guest(h, i));
        }
      }
      if (polls[0].revents != 0) {
        let_in(h);
      }
    } else if (dc__now_ns() >= h->deadline) {
      return fail_missing(h);
    }
  }
  return DC_OK;
}

static dc_status listen_as(host *h) {
  struct sockaddr_un address;
  socklen_t length = dc__local_address_of(h->name, &address);
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
  if (listen(h->listener, MAX_GUESTS) != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_processes: group \"%s\": listen: %s", h->name, strerror(errno));
  }
  return DC_OK;
}

static dc_status make_control(host *h) {
  dc__local_group *group = h->group;
  size_t bytes = dc__local_control_bytes();
  DC__TRY(dc__local_file_create("libdc-control", bytes, &group->control_fd));
  void *map = NULL;
  DC__TRY(dc__local_file_map("dc_comm_create_processes", group->control_fd, 0, bytes, true, &map));
  group->control = map;
  group->control->world = group->world;
  return dc__local_segment_add(group); /* the first ones: a full machine is the whole group's error */
}

static dc_status host_group(host *h) {
  dc__local_group *group = h->group;
  DC__TRY(listen_as(h));
  DC__TRY(make_control(h));
  dc_status status = receive_guests(h);
  if (status == DC_OK) {
    status = dc__local_map_peers(group, h->heaps);
  }
  dc__local_welcome message = {.status = status};
  if (status != DC_OK) {
    snprintf(message.text, sizeof message.text, "%s", dc_last_error());
  }
  for (int32_t r = 0; r < group->world; r++) {
    message.reserves[r] = group->reserves[r];
    message.has_pidfd[r] = group->pidfds[r] >= 0;
  }
  for (int32_t i = 0; i < h->guest_count; i++) {
    if (h->guests[i].rank >= 0) {
      tell(h, h->guests[i].fd, &message);
    }
  }
  return status;
}

dc_status dc__local_rendezvous_as_host(const char *name, dc__local_group *group, int64_t deadline) {
  host h = {.name = name, .group = group, .listener = -1, .deadline = deadline};
  for (int32_t r = 0; r < DC__COMM_MAX_LOCAL; r++) {
    h.heaps[r] = r == 0 ? group->heap.fd : -1;
  }
  dc_status status = host_group(&h);
  /* The listener first: a late comer is then refused, and may wait for another group of this name. */
  dc__local_close_all(&h.listener, 1);
  dc__local_close_all(h.heaps + 1, DC__COMM_MAX_LOCAL - 1);
  for (int32_t i = 0; i < h.guest_count; i++) {
    close(h.guests[i].fd);
  }
  return status;
}
