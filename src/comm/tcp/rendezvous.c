/* How ranks of several machines find each other: rank 0 listens where everybody was told, the others say where they
 * listen, and rank 0 tells all of them. A rank is where rank 0 sees it; one on rank 0's own machine may be seen at an
 * address that means another machine elsewhere, so it is where rank 0 is. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/ranks.h"
#include "comm/tcp/tcp.h"

enum {
  RETRY_NS = 20000000,
  GRACE_NS = 1000000000 /* rank 0 knows best who is missing: its word has this much longer to arrive */
};

static dc__tcp_place place_of(const struct sockaddr_storage *address, int32_t port) {
  dc__tcp_place place = {.port = port};
  if (address->ss_family == AF_INET6) {
    memcpy(place.address, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
  } else {
    memset(place.address + 10, 0xff, 2);
    memcpy(place.address + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
  }
  struct in6_addr six;
  memcpy(&six, place.address, 16);
  place.here = IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && place.address[12] == 127);
  return place;
}

/* port 0: any. */
static dc_status listen_at(dc__tcp_group *group, int32_t port) {
  DC__TRY(dc__tcp_listen(&port, &group->listener));
  group->places[group->rank].port = port;
  return DC_OK;
}

/* ---- rank 0 ---- */

typedef struct host {
  dc__tcp_group *group;
  int guests[DC__COMM_MAX_WORLD]; /* -1: not come */
  int32_t come;
} host;

static void answer(int fd, dc_status status, const dc__tcp_place *places) {
  dc__tcp_welcome welcome = {.status = status};
  if (status != DC_OK) {
    snprintf(welcome.text, sizeof welcome.text, "%s", dc_last_error());
  } else {
    memcpy(welcome.places, places, sizeof welcome.places);
  }
  (void)dc__tcp_send_all(fd, &welcome, sizeof welcome, dc__now_ns() + GRACE_NS);
}

/* Somebody of another group, or of another build: he hears why, and this group waits on. */
static dc_status refuse(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const dc__tcp_hello own = dc__tcp_hello_of(group, 0);
  if (hello->order != own.order || hello->protocol != own.protocol) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_tcp: rank 0 is another version of libdc, or of another machine type");
  }
  if (memcmp(hello->name, own.name, sizeof own.name) != 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: another group meets at this address");
  }
  return DC_OK;
}

/* Takes a guest in; an error ends the rendezvous for all. */
static dc_status welcome(host *h, const dc__tcp_hello *hello, int fd) {
  dc__tcp_group *group = h->group;
  struct sockaddr_storage address;
  socklen_t length = sizeof address;
  if (hello->world != group->world) {
    return dc__fail(DC_E_MISMATCH,
                    "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " has world_size %" PRId32
                    ", but rank 0 has %" PRId32,
                    group->name, hello->rank, hello->world, group->world);
  }
  if (hello->rank <= 0 || hello->rank >= group->world || h->guests[hello->rank] >= 0) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " came twice", group->name,
                    hello->rank);
  }
  if (getpeername(fd, (struct sockaddr *)&address, &length) != 0) {
    return DC_OK; /* it ended already, and will be missing */
  }
  group->places[hello->rank] = place_of(&address, hello->port);
  h->guests[hello->rank] = fd;
  h->come++;
  return DC_OK;
}

static dc_status fail_missing(const host *h) {
  dc__ranks missing = {.count = 0};
  for (int32_t r = 1; r < h->group->world; r++) {
    if (h->guests[r] < 0) {
      dc__ranks_add(&missing, r);
    }
  }
  return dc__fail(DC_E_TIMEOUT, "dc_comm_create_tcp: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s",
                  h->group->name, missing.count > 1 ? "s" : "", missing.text, h->group->world,
                  missing.count > 1 ? "have" : "has", (double)h->group->timeout_ns / 1e9);
}

/* A guest says nothing while it waits: what can be read is its end. */
static dc_status ended(const host *h) {
  for (int32_t r = 1; r < h->group->world; r++) {
    char byte;
    if (h->guests[r] >= 0 &&
        (recv(h->guests[r], &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR))) {
      return dc__fail(DC_E_PEER_DEAD, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " ended before all had come",
                      h->group->name, r);
    }
  }
  return DC_OK;
}

static dc_status gather(host *h, int64_t deadline) {
  dc_status status = DC_OK;
  while (status == DC_OK && h->come < h->group->world - 1) {
    dc__tcp_hello hello;
    int fd = -1;
    int extra[DC__COMM_MAX_WORLD];
    int32_t extras = 0;
    for (int32_t r = 1; r < h->group->world; r++) {
      if (h->guests[r] >= 0) {
        extra[extras++] = h->guests[r];
      }
    }
    if (!dc__tcp_next_hello(h->group, extra, extras, deadline, &hello, &fd, &status)) {
      status = status != DC_OK ? status : ended(h);
      status = status != DC_OK || dc__now_ns() < deadline ? status : fail_missing(h);
    } else if (refuse(h->group, &hello) != DC_OK) {
      answer(fd, refuse(h->group, &hello), NULL);
      dc__tcp_close(&fd);
    } else if (hello.mesh == DC__TCP_MEETING) {
      status = welcome(h, &hello, fd);
      if (status != DC_OK) {
        answer(fd, status, NULL);
      }
      if (h->guests[hello.rank > 0 && hello.rank < h->group->world ? hello.rank : 0] != fd) {
        dc__tcp_close(&fd);
      }
    } else {
      dc__tcp_close(&fd);
    }
  }
  dc__tcp_pending_close(&h->group->pending); /* strangers: all ranks have said theirs */
  return status;
}

static dc_status as_host(dc__tcp_group *group, int32_t port, int64_t deadline) {
  host h = {.group = group};
  DC__TRY(listen_at(group, port));
  for (int32_t r = 0; r < DC__COMM_MAX_WORLD; r++) {
    h.guests[r] = -1;
  }
  group->places[0].here = 1;
  dc_status status = gather(&h, deadline);
  for (int32_t r = 1; r < group->world; r++) {
    if (h.guests[r] >= 0) {
      answer(h.guests[r], status, group->places);
      dc__tcp_close(&h.guests[r]);
    }
  }
  return status;
}

/* ---- the others ---- */

static int try_all(const struct addrinfo *found, int64_t deadline, struct sockaddr_storage *reached) {
  for (const struct addrinfo *a = found; a != NULL; a = a->ai_next) {
    int fd = dc__tcp_connect(a->ai_addr, a->ai_addrlen, deadline);
    if (fd >= 0) {
      memset(reached, 0, sizeof *reached);
      memcpy(reached, a->ai_addr, a->ai_addrlen);
      return fd;
    }
  }
  return -1;
}

static dc_status reach(const dc__tcp_group *group, const dc__tcp_address *to, int64_t deadline,
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
  *fd = try_all(found, deadline, reached);
  while (*fd < 0 && !dc__tcp_is_own(errno) && dc__now_ns() < deadline) {
    const struct timespec pause = {0, RETRY_NS};
    nanosleep(&pause, NULL);
    *fd = try_all(found, deadline, reached);
  }
  error = errno;
  freeaddrinfo(found);
  if (*fd < 0 && dc__tcp_is_own(error)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": no socket: %s", group->name, strerror(error));
  }
  return *fd >= 0 ? DC_OK
                  : dc__fail(DC_E_TIMEOUT,
                             "dc_comm_create_tcp: group \"%s\": rank 0 of %" PRId32 " has not come to %s:%" PRId32
                             " after %.1f s: %s",
                             group->name, group->world, to->host, to->port, (double)group->timeout_ns / 1e9,
                             strerror(error));
}

static dc_status hear_host(const dc__tcp_group *group, int fd, int64_t deadline, dc__tcp_welcome *word) {
  if (!dc__tcp_receive_all(fd, word, sizeof *word, deadline + GRACE_NS)) {
    return errno == ETIMEDOUT
               ? dc__fail(DC_E_TIMEOUT,
                          "dc_comm_create_tcp: group \"%s\": rank 0 still waits for other ranks after %.1f s",
                          group->name, (double)group->timeout_ns / 1e9)
               : dc__fail(DC_E_PEER_DEAD,
                          "dc_comm_create_tcp: group \"%s\": rank 0 ended, or began without this rank %" PRId32,
                          group->name, group->rank);
  }
  word->text[sizeof word->text - 1] = '\0';
  if (word->status == DC_OK) {
    return DC_OK;
  }
  return dc__tcp_is_failure(word->status, word->text)
             ? dc__fail(word->status, "%s", word->text)
             : dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": a malformed word from rank 0", group->name);
}

static dc_status say_hello(const dc__tcp_group *group, int fd, int64_t deadline) {
  const dc__tcp_hello hello = dc__tcp_hello_of(group, DC__TCP_MEETING);
  return dc__tcp_send_all(fd, &hello, sizeof hello, deadline)
             ? DC_OK
             : dc__fail(DC_E_PEER_DEAD, "dc_comm_create_tcp: group \"%s\": rank 0 ended", group->name);
}

/* It listens only when rank 0 does: on rank 0's machine the system might give it rank 0's port. */
static dc_status as_guest(dc__tcp_group *group, const dc__tcp_address *to, int64_t deadline) {
  struct sockaddr_storage reached;
  dc__tcp_welcome word;
  int fd = -1;
  DC__TRY(reach(group, to, deadline, &reached, &fd));
  dc_status status = listen_at(group, 0);
  status = status == DC_OK ? say_hello(group, fd, deadline) : status;
  status = status == DC_OK ? hear_host(group, fd, deadline, &word) : status;
  dc__tcp_close(&fd);
  for (int32_t r = 0; status == DC_OK && r < group->world; r++) {
    int32_t port = r == 0 ? to->port : word.places[r].port;
    group->places[r] = word.places[r].here != 0 ? place_of(&reached, port) : word.places[r];
    if (port < 1 || port > 65535) {
      status = dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": a malformed word from rank 0", group->name);
    }
  }
  return status;
}

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline) {
  return group->rank == 0 ? as_host(group, address->port, deadline) : as_guest(group, address, deadline);
}
