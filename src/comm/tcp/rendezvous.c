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

#include "comm/escape.h"
#include "comm/tcp/tcp.h"

enum {
  RETRY_NS = 20000000,
  GRACE_NS = 1000000000, /* rank 0 knows best who is missing: its answer has this much longer to arrive */
  SHOWN = 48             /* bytes of what another service says */
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

static void answer(int fd, dc_status status, int32_t more, const char *text) {
  dc__tcp_welcome welcome = {.magic = DC__TCP_MAGIC, .status = status, .more = more};
  snprintf(welcome.text, sizeof welcome.text, "%s", text);
  (void)dc__tcp_send_all(fd, &welcome, sizeof welcome, dc__now_ns() + GRACE_NS);
}

void dc__tcp_refuse(int fd, dc_status status) {
  answer(fd, status, 0, dc_last_error());
}

static void tell_places(int fd, const dc__tcp_group *group) {
  answer(fd, DC_OK, 0, "");
  (void)dc__tcp_send_all(fd, group->places, sizeof group->places, dc__now_ns() + GRACE_NS);
}

static dc_status fail_twice(const host *h, const dc__tcp_hello *hello, int fd) {
  char first[DC__TCP_PEER], second[DC__TCP_PEER];
  dc__tcp_peer(h->guests[hello->rank], first);
  dc__tcp_peer(fd, second);
  return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " came twice, from %s and from %s",
                  h->group->name, hello->rank, first, second);
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
  if (hello->rank <= 0 || hello->rank >= group->world) {
    return dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: group \"%s\": rank %" PRId32 " of %" PRId32 " came twice",
                    group->name, hello->rank, group->world);
  }
  if (h->guests[hello->rank] >= 0) {
    return fail_twice(h, hello, fd);
  }
  if (getpeername(fd, (struct sockaddr *)&address, &length) != 0) {
    return DC_OK; /* it ended already, and will be missing */
  }
  group->places[hello->rank] = place_of(&address, hello->port);
  h->guests[hello->rank] = fd;
  h->come++;
  answer(fd, DC_OK, 1, ""); /* so that a guest can tell rank 0 from a service that says nothing */
  return DC_OK;
}

static dc_status fail_missing(const host *h) {
  const dc__tcp_pending *p = &h->group->pending;
  dc__ranks missing = {.count = 0};
  char others[240] = "";
  for (int32_t r = 1; r < h->group->world; r++) {
    if (h->guests[r] < 0) {
      dc__ranks_add(&missing, r);
    }
  }
  if (p->strangers > 0) {
    snprintf(others, sizeof others, "; sent away: %" PRId64 " connection%s, the last from %s", p->strangers,
             p->strangers > 1 ? "s" : "", p->last);
  }
  return dc__fail(DC_E_TIMEOUT, "dc_comm_create_tcp: group \"%s\": rank%s %s of %" PRId32 " %s not come after %.1f s%s",
                  h->group->name, missing.count > 1 ? "s" : "", missing.text, h->group->world,
                  missing.count > 1 ? "have" : "has", (double)h->group->timeout_ns / 1e9, others);
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

/* Of one that said its hello: an error ends the meeting for all. */
static dc_status hear(host *h, const dc__tcp_hello *hello, int fd) {
  dc__tcp_group *group = h->group;
  dc_status status = dc__tcp_hello_check(group, hello);
  if (status != DC_OK) {
    dc__tcp_refuse(fd, status);
    dc__tcp_note_stranger(&group->pending, fd,
                          status == DC_E_EXISTS ? "a rank of another group" : "a rank of another version of libdc");
    dc__tcp_close(&fd);
    return DC_OK; /* this group waits on */
  }
  if (hello->mesh == DC__TCP_MEETING) {
    status = welcome(h, hello, fd);
    if (status != DC_OK) {
      dc__tcp_refuse(fd, status);
    }
  }
  if (h->guests[hello->rank > 0 && hello->rank < group->world ? hello->rank : 0] != fd) {
    dc__tcp_close(&fd);
  }
  return status;
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
    if (dc__tcp_next_hello(h->group, extra, extras, deadline, &hello, &fd, &status)) {
      status = hear(h, &hello, fd);
    } else if (status == DC_OK) {
      status = ended(h);
      status = status != DC_OK || dc__now_ns() < deadline ? status : fail_missing(h);
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
    if (h.guests[r] >= 0 && status == DC_OK) {
      tell_places(h.guests[r], group);
    } else if (h.guests[r] >= 0) {
      dc__tcp_refuse(h.guests[r], status);
    }
    dc__tcp_close(&h.guests[r]);
  }
  return status;
}

/* ---- the others ---- */

typedef struct guest {
  dc__tcp_group *group;
  const dc__tcp_address *to;
  int fd;
  bool met; /* rank 0 has answered */
} guest;

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

/* What came from the address where rank 0 should be does not begin as libdc does. */
static dc_status fail_strange(const guest *g, const void *said, size_t bytes) {
  char text[4 * SHOWN + 1];
  dc__escape(text, sizeof text, said, bytes < SHOWN ? bytes : SHOWN);
  return dc__fail(DC_E_EXISTS,
                  "dc_comm_create_tcp: group \"%s\": what listens at %s:%" PRId32
                  " is not libdc, or another version of it; it sent \"%s\"",
                  g->group->name, g->to->host, g->to->port, text);
}

/* error: errno, 0: the connection was closed. */
static dc_status fail_silent(const guest *g, int error) {
  const dc__tcp_group *group = g->group;
  double seconds = (double)group->timeout_ns / 1e9;
  char text[DC__TCP_ERROR];
  if (error == ETIMEDOUT && g->met) {
    return dc__fail(DC_E_TIMEOUT, "dc_comm_create_tcp: group \"%s\": rank 0 still waits for other ranks after %.1f s",
                    group->name, seconds);
  }
  if (error == ETIMEDOUT) {
    return dc__fail(DC_E_TIMEOUT,
                    "dc_comm_create_tcp: group \"%s\": what listens at %s:%" PRId32
                    " took the connection and said nothing for %.1f s: another service, or a rank 0 that is stopped",
                    group->name, g->to->host, g->to->port, seconds);
  }
  dc__tcp_error_text(error, text);
  return dc__fail(DC_E_PEER_DEAD,
                  "dc_comm_create_tcp: group \"%s\": rank 0 ended%s: %s:%" PRId32 " closed the connection%s%s%s",
                  group->name, g->met ? "" : ", or began without this rank, or another service is there", g->to->host,
                  g->to->port, error == 0 ? "" : " (", error == 0 ? "" : text, error == 0 ? "" : ")");
}

/* The next of rank 0's answers. */
static dc_status hear_answer(guest *g, int64_t deadline, dc__tcp_welcome *word) {
  static const char magic[8] = DC__TCP_MAGIC;
  size_t first, rest;
  bool whole = dc__tcp_receive_all(g->fd, word->magic, sizeof magic, deadline, &first);
  int error = errno;
  if (memcmp(word->magic, magic, first) != 0) {
    /* What is there already says more of what it is. */
    ssize_t got = whole ? recv(g->fd, (char *)word + first, SHOWN - sizeof magic, MSG_DONTWAIT) : 0;
    return fail_strange(g, word, first + (got > 0 ? (size_t)got : 0));
  }
  if (!whole || !dc__tcp_receive_all(g->fd, &word->status, sizeof *word - sizeof magic, deadline, &rest)) {
    return fail_silent(g, whole ? errno : error);
  }
  if (word->status == DC_OK || dc__tcp_is_failure(word->status, word->text)) {
    return word->status == DC_OK ? DC_OK : dc__fail(word->status, "%s", word->text);
  }
  return fail_strange(g, word, sizeof *word);
}

static dc_status hear_host(guest *g, int64_t deadline, dc__tcp_place *places) {
  dc__tcp_welcome word;
  size_t got;
  DC__TRY(hear_answer(g, deadline, &word));
  g->met = true;
  if (word.more != 0) {
    DC__TRY(hear_answer(g, deadline, &word));
  }
  return dc__tcp_receive_all(g->fd, places, DC__COMM_MAX_WORLD * sizeof *places, deadline, &got)
             ? DC_OK
             : fail_silent(g, errno);
}

static dc_status say_hello(const guest *g, int64_t deadline) {
  const dc__tcp_hello hello = dc__tcp_hello_of(g->group, DC__TCP_MEETING);
  return dc__tcp_send_all(g->fd, &hello, sizeof hello, deadline) ? DC_OK : fail_silent(g, errno);
}

/* It listens only when rank 0 does: on rank 0's machine the system might give it rank 0's port. */
static dc_status as_guest(dc__tcp_group *group, const dc__tcp_address *to, int64_t deadline) {
  struct sockaddr_storage reached;
  dc__tcp_place places[DC__COMM_MAX_WORLD];
  guest g = {.group = group, .to = to, .fd = -1};
  DC__TRY(reach(group, to, deadline, &reached, &g.fd));
  dc_status status = listen_at(group, 0);
  status = status == DC_OK ? say_hello(&g, deadline) : status;
  status = status == DC_OK ? hear_host(&g, deadline + GRACE_NS, places) : status;
  dc__tcp_close(&g.fd);
  for (int32_t r = 0; status == DC_OK && r < group->world; r++) {
    int32_t port = r == 0 ? to->port : places[r].port;
    group->places[r] = places[r].here != 0 ? place_of(&reached, port) : places[r];
    group->places[r].port = port;
    if (port < 1 || port > 65535) {
      status = dc__fail(DC_E_SYSTEM,
                        "dc_comm_create_tcp: group \"%s\": rank 0 says that rank %" PRId32 " listens at port %" PRId32,
                        group->name, r, port);
    }
  }
  return status;
}

dc_status dc__tcp_rendezvous(dc__tcp_group *group, const dc__tcp_address *address, int64_t deadline) {
  return group->rank == 0 ? as_host(group, address->port, deadline) : as_guest(group, address, deadline);
}
