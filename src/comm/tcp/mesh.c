/* One connection between any two ranks. The higher rank of the two makes it; who comes before he is expected is kept.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "comm/tcp/tcp.h"

static const char magic[8] = "libdc/t";

dc__tcp_hello dc__tcp_hello_of(const dc__tcp_group *group, int32_t mesh) {
  dc__tcp_hello hello = {.order = 1,
                         .protocol = DC__TCP_PROTOCOL << 24 | sizeof(struct dc__tcp_head),
                         .rank = group->rank,
                         .world = group->world,
                         .mesh = mesh,
                         .port = group->places[group->rank].port};
  memcpy(hello.magic, magic, sizeof magic);
  memcpy(hello.name, group->name, sizeof hello.name);
  return hello;
}

bool dc__tcp_hello_fits(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const dc__tcp_hello own = dc__tcp_hello_of(group, 0);
  return hello->order == own.order && hello->protocol == own.protocol && hello->rank >= 0 &&
         hello->rank < group->world && hello->world == group->world &&
         memcmp(hello->name, own.name, sizeof own.name) == 0;
}

/* ---- who comes ---- */

static void drop(dc__tcp_pending *p, int32_t i) {
  p->count--;
  memmove(&p->fds[i], &p->fds[i + 1], (size_t)(p->count - i) * sizeof p->fds[0]);
  memmove(&p->heard[i], &p->heard[i + 1], (size_t)(p->count - i) * sizeof p->heard[0]);
  memmove(&p->hellos[i], &p->hellos[i + 1], (size_t)(p->count - i) * sizeof p->hellos[0]);
}

void dc__tcp_pending_close(dc__tcp_pending *p) {
  while (p->count > 0) {
    dc__tcp_close(&p->fds[p->count - 1]);
    p->count--;
  }
}

/* Whoever says nothing makes room for who comes later. */
static dc_status take_in(dc__tcp_group *group) {
  dc__tcp_pending *p = &group->pending;
  int fd = 0;
  for (int32_t i = 0; i < DC__TCP_PENDING && (fd = dc__tcp_accept(group->listener)) >= 0; i++) {
    if (p->count == DC__TCP_PENDING) {
      dc__tcp_close(&p->fds[0]);
      drop(p, 0);
    }
    p->heard[p->count] = 0;
    p->fds[p->count++] = fd;
  }
  return fd >= 0 || !dc__tcp_is_own(errno)
             ? DC_OK
             : dc__fail(DC_E_SYSTEM, "group \"%s\": rank %" PRId32 " cannot accept a connection: %s", group->name,
                        group->rank, strerror(errno));
}

/* Reads what is there; true: all of a hello. */
static bool hear(dc__tcp_pending *p, int32_t i) {
  char *at = (char *)&p->hellos[i] + p->heard[i];
  ssize_t got = recv(p->fds[i], at, sizeof p->hellos[i] - p->heard[i], MSG_DONTWAIT);
  if (got > 0) {
    p->heard[i] += (size_t)got;
  }
  size_t known = p->heard[i] < sizeof magic ? p->heard[i] : sizeof magic;
  bool ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (ended || memcmp(p->hellos[i].magic, magic, known) != 0) {
    dc__tcp_close(&p->fds[i]);
    drop(p, i);
    return false;
  }
  return p->heard[i] == sizeof p->hellos[i];
}

static bool hear_one(dc__tcp_pending *p, dc__tcp_hello *hello, int *fd) {
  for (int32_t i = p->count - 1; i >= 0; i--) {
    if (hear(p, i)) {
      *hello = p->hellos[i];
      *fd = p->fds[i];
      drop(p, i);
      return true;
    }
  }
  return false;
}

bool dc__tcp_next_hello(dc__tcp_group *group, const int *extra, int32_t extra_count, int64_t deadline,
                        dc__tcp_hello *hello, int *fd, dc_status *status) {
  dc__tcp_pending *p = &group->pending;
  bool ended = false;
  *status = DC_OK;
  while (!ended) {
    struct pollfd polls[DC__TCP_PENDING + DC__COMM_MAX_WORLD + 1];
    int32_t count = 0;
    polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
    for (int32_t i = 0; i < extra_count; i++) {
      polls[count++] = (struct pollfd){.fd = extra[i], .events = POLLIN};
    }
    for (int32_t i = 0; i < p->count; i++) {
      polls[count++] = (struct pollfd){.fd = p->fds[i], .events = POLLIN};
    }
    if (poll(polls, (nfds_t)count, dc__milliseconds_to(deadline)) < 0) {
      if (errno != EINTR) {
        *status = dc__fail(DC_E_SYSTEM, "group \"%s\": poll: %s", group->name, strerror(errno));
        return false;
      }
      continue;
    }
    ended = dc__now_ns() >= deadline; /* however many strangers come */
    for (int32_t i = 0; i < extra_count; i++) {
      ended = ended || polls[1 + i].revents != 0;
    }
    if (hear_one(p, hello, fd)) { /* before anybody makes room */
      return true;
    }
    if (polls[0].revents != 0) {
      *status = take_in(group);
      ended = ended || *status != DC_OK;
    }
    if (hear_one(p, hello, fd)) { /* who has come is heard before what else there is */
      *status = DC_OK;
      return true;
    }
  }
  return false;
}

/* ---- a mesh ---- */

static dc__tcp_early *find_early(const dc__tcp_group *group, int32_t mesh, int32_t rank) {
  for (int32_t i = 0; i < group->early_count; i++) {
    if (group->early[i].mesh == mesh && group->early[i].rank == rank) {
      return &group->early[i];
    }
  }
  return NULL;
}

/* Keeps a connection for the mesh that it is for, one that there may be: a mesh has one of each rank. False: it is the
 * caller's to close. */
static bool keep_early(dc__tcp_group *group, const dc__tcp_hello *hello, int fd) {
  if (!dc__tcp_hello_fits(group, hello) || hello->mesh < group->meshes ||
      hello->mesh > group->meshes + DC__COMM_MAX_DUPS || find_early(group, hello->mesh, hello->rank) != NULL ||
      !dc__grow((void **)&group->early, &group->early_room, group->early_count + 1, sizeof *group->early)) {
    return false;
  }
  group->early[group->early_count++] = (dc__tcp_early){fd, hello->mesh, hello->rank};
  return true;
}

static int take_early(dc__tcp_group *group, int32_t mesh, int32_t rank) {
  dc__tcp_early *early = find_early(group, mesh, rank);
  if (early == NULL) {
    return -1;
  }
  int fd = early->fd;
  *early = group->early[--group->early_count];
  return fd;
}

static int connect_to(const dc__tcp_place *place, int64_t deadline) {
  struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)place->port)};
  struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)place->port)};
  memcpy(&six.sin6_addr, place->address, sizeof place->address);
  if (!IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) {
    return dc__tcp_connect((const struct sockaddr *)&six, sizeof six, deadline);
  }
  memcpy(&four.sin_addr, place->address + 12, 4);
  return dc__tcp_connect((const struct sockaddr *)&four, sizeof four, deadline);
}

/* To all lower ranks, which listen. */
static dc_status call(const dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  const dc__tcp_hello hello = dc__tcp_hello_of(group, mesh);
  for (int32_t r = 0; r < group->rank; r++) {
    fds[r] = connect_to(&group->places[r], deadline);
    if (fds[r] < 0 || !dc__tcp_send_all(fds[r], &hello, sizeof hello, deadline)) {
      dc_status status = errno == ETIMEDOUT ? DC_E_TIMEOUT : dc__tcp_is_own(errno) ? DC_E_SYSTEM : DC_E_PEER_DEAD;
      return dc__fail(status, "group \"%s\": rank %" PRId32 " could not connect to rank %" PRId32 ": %s", group->name,
                      group->rank, r, strerror(errno));
    }
  }
  return DC_OK;
}

static int32_t first_missing(const dc__tcp_group *group, const int *fds) {
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (fds[r] < 0) {
      return r;
    }
  }
  return -1;
}

static dc_status fail_late(const dc__tcp_group *group, int32_t missing) {
  return dc__fail(DC_E_TIMEOUT,
                  "group \"%s\": rank %" PRId32 " waited %.1f s for rank %" PRId32 " of %" PRId32 " to connect",
                  group->name, group->rank, (double)group->timeout_ns / 1e9, missing, group->world);
}

/* Why no more hellos are waited for, if so. */
static dc_status end_of_waiting(dc__tcp_group *group, int64_t deadline, const int *fds) {
  DC__TRY(dc__tcp_group_check(group));
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (fds[r] < 0 && atomic_load(&group->gone[r]) != 0) {
      return dc__tcp_group_lost(group, r, false, "a new communicator");
    }
  }
  return dc__now_ns() < deadline ? DC_OK : fail_late(group, first_missing(group, fds));
}

/* What is readable when a failure is known, or when a rank ends that is missing: the watcher hears why. */
static int32_t list_ends(const dc__tcp_group *group, const int *fds, int *ends) {
  int32_t count = 0;
  ends[count++] = group->alarm;
  for (int32_t r = group->rank + 1; group->watched && r < group->world; r++) {
    if (fds[r] < 0) {
      ends[count++] = group->control[r];
    }
  }
  return count;
}

/* From all higher ranks. */
static dc_status await(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  dc_status status = DC_OK;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    fds[r] = take_early(group, mesh, r);
  }
  while (status == DC_OK && first_missing(group, fds) >= 0) {
    dc__tcp_hello hello;
    int fd = -1, ends[DC__COMM_MAX_WORLD];
    int32_t count = list_ends(group, fds, ends);
    if (!dc__tcp_next_hello(group, ends, count, deadline, &hello, &fd, &status)) {
      status = status != DC_OK ? status : end_of_waiting(group, deadline, fds);
    } else if (dc__tcp_hello_fits(group, &hello) && hello.mesh == mesh && hello.rank > group->rank &&
               fds[hello.rank] < 0) {
      fds[hello.rank] = fd;
    } else if (!keep_early(group, &hello, fd)) {
      dc__tcp_close(&fd);
    }
  }
  return status;
}

dc_status dc__tcp_mesh(dc__tcp_group *group, int64_t deadline, int *fds) {
  for (int32_t r = 0; r < group->world; r++) {
    fds[r] = -1;
  }
  pthread_mutex_lock(&group->meeting);
  int32_t mesh = group->meshes;
  dc_status status = call(group, mesh, deadline, fds);
  status = status != DC_OK ? status : await(group, mesh, deadline, fds);
  group->meshes += status == DC_OK;
  pthread_mutex_unlock(&group->meeting);
  for (int32_t r = 0; status != DC_OK && r < group->world; r++) {
    dc__tcp_close(&fds[r]);
  }
  return status;
}
