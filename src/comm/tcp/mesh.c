/* One connection between any two ranks. The higher rank of the two makes it; one that comes before it is expected is
 * kept. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/tcp.h"

/* ---- connections that come ---- */

static dc__tcp_early *find_early(const dc__tcp_group *group, int32_t mesh, int32_t rank) {
  for (int32_t i = 0; i < group->early_count; i++) {
    if (group->early[i].mesh == mesh && group->early[i].rank == rank) {
      return &group->early[i];
    }
  }
  return NULL;
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

/* One that wants to meet, where no meeting is. */
static dc_status say_why_not(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  DC__TRY(dc__tcp_hello_check(group, hello));
  return group->rank == 0
             ? dc__fail(DC_E_EXISTS,
                        "dc_comm_create_tcp: the group \"%s\" formed at this address %.1f s ago, with another rank "
                        "%" PRId32 "; no rank can join it now",
                        group->name, (double)(dc__now_ns() - group->formed) / 1e9, hello->rank)
             : dc__fail(DC_E_EXISTS,
                        "dc_comm_create_tcp: at this address listens rank %" PRId32 " of the group \"%s\", not rank 0",
                        group->rank, group->name);
}

/* Two connections for one place: this rank cannot know which of them is the rank's. */
static dc_status fail_twice(const dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int other) {
  char first[DC__TCP_PEER], second[DC__TCP_PEER];
  dc__tcp_peer(other, first);
  dc__tcp_peer(fd, second);
  return dc__fail(DC_E_EXISTS,
                  "group \"%s\": two connections to rank %" PRId32 " say that they are rank %" PRId32
                  "'s for communicator %" PRId32 ": from %s and from %s; one of them is a stranger's",
                  group->name, group->rank, hello->rank, hello->mesh, first, second);
}

/* Takes a connection in, into fds if it is for the mesh that is made now, or sends it away. fds NULL: none is made. An
 * error is the group's. */
static dc_status take_connection(dc__tcp_group *group, const dc__tcp_hello *hello, int fd, int *fds) {
  dc_status status = DC_OK;
  if (hello->mesh == DC__TCP_MEETING) {
    dc__tcp_refuse(fd, say_why_not(group, hello));
  } else if (dc__tcp_hello_fits(group, hello) && hello->rank > group->rank && hello->mesh >= group->meshes &&
             hello->mesh <= group->meshes + DC__TCP_AHEAD) {
    const dc__tcp_early *early = find_early(group, hello->mesh, hello->rank);
    bool now = fds != NULL && hello->mesh == group->meshes;
    int other = early != NULL ? early->fd : now ? fds[hello->rank] : -1;
    if (other >= 0) {
      status = fail_twice(group, hello, fd, other);
    } else if (now) {
      fds[hello->rank] = fd;
      return DC_OK;
    } else if (dc__grow((void **)&group->early, &group->early_room, group->early_count + 1, sizeof *group->early)) {
      group->early[group->early_count++] = (dc__tcp_early){fd, hello->mesh, hello->rank};
      return DC_OK;
    }
  }
  dc__tcp_note_stranger(&group->pending, fd, "which said that it was of another group, or came twice");
  dc__tcp_close(&fd);
  return status;
}

void dc__tcp_serve(dc__tcp_group *group, bool newcomers, bool *retry) {
  dc__tcp_hello hello;
  dc_status status;
  int fd;
  for (; dc__tcp_hello_now(group, newcomers, &hello, &fd, &status); newcomers = false) {
    dc_status failure = take_connection(group, &hello, fd, NULL);
    if (failure != DC_OK) {
      dc__tcp_group_begin_to_fail(group, failure);
    }
  }
  *retry = status != DC_OK;
}

/* ---- connections that this rank makes ---- */

typedef union endpoint {
  struct sockaddr any;
  struct sockaddr_in four;
  struct sockaddr_in6 six;
} endpoint;

static socklen_t endpoint_of(const dc__tcp_place *place, endpoint *to) {
  memset(to, 0, sizeof *to);
  to->six.sin6_family = AF_INET6;
  to->six.sin6_port = htons((uint16_t)place->port);
  memcpy(&to->six.sin6_addr, place->address, sizeof place->address);
  if (!IN6_IS_ADDR_V4MAPPED(&to->six.sin6_addr)) {
    return sizeof to->six;
  }
  memset(to, 0, sizeof *to);
  to->four.sin_family = AF_INET;
  to->four.sin_port = htons((uint16_t)place->port);
  memcpy(&to->four.sin_addr, place->address + 12, 4);
  return sizeof to->four;
}

/* To all lower ranks, which listen. */
static dc_status call(const dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  const dc__tcp_hello hello = dc__tcp_hello_of(group, mesh);
  for (int32_t r = 0; r < group->rank; r++) {
    endpoint to;
    socklen_t length = endpoint_of(&group->places[r], &to);
    fds[r] = dc__tcp_connect(&to.any, length, deadline);
    if (fds[r] < 0 || !dc__tcp_send_all(fds[r], &hello, sizeof hello, deadline)) {
      char where[DC__TCP_PEER];
      int error = errno;
      dc_status status = error == ETIMEDOUT ? DC_E_TIMEOUT : dc__tcp_is_own(error) ? DC_E_SYSTEM : DC_E_PEER_DEAD;
      dc__tcp_address_text(&to.any, where);
      return dc__fail(status, "group \"%s\": rank %" PRId32 " could not connect to rank %" PRId32 ": %s (at %s)",
                      group->name, group->rank, r, strerror(error), where);
    }
  }
  return DC_OK;
}

/* ---- a mesh ---- */

static dc__rank_set find_missing(const dc__tcp_group *group, const int *fds, int32_t *count) {
  dc__rank_set missing = {{0}};
  *count = 0;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (fds[r] < 0) {
      dc__rank_set_add(&missing, r);
      (*count)++;
    }
  }
  return missing;
}

static dc_status fail_late(const dc__tcp_group *group, const dc__rank_set *missing) {
  dc__ranks late = dc__ranks_of(missing, group->world);
  return dc__fail(DC_E_TIMEOUT, "group \"%s\": rank %" PRId32 " waited %.1f s for rank%s %s of %" PRId32 " to connect",
                  group->name, group->rank, (double)group->timeout_ns / 1e9, late.count > 1 ? "s" : "", late.text,
                  group->world);
}

/* While the control mesh forms, this rank looks itself whether another one failed. What it sees is left for the
 * watcher. A rank that goes or ends is none that this one waits for: it has connected. */
static dc_status check_control(const dc__tcp_group *group, const int *fds, dc__rank_set *ended) {
  for (int32_t r = 0; r < group->world; r++) {
    dc__tcp_notice notice;
    ssize_t got = fds[r] < 0 ? -1 : recv(fds[r], &notice, sizeof notice, MSG_PEEK | MSG_DONTWAIT);
    if (got == (ssize_t)sizeof notice && notice.kind == DC__TCP_FAILURE &&
        dc__tcp_is_failure(notice.status, notice.text)) {
      return dc__fail(notice.status, "%s", notice.text);
    }
    if (got >= 0) {
      dc__rank_set_add(ended, r);
    }
  }
  return DC_OK;
}

/* Why no more hellos are waited for, if so. */
static dc_status end_of_waiting(dc__tcp_group *group, int32_t mesh, int64_t deadline, const int *fds,
                                const dc__rank_set *missing, dc__rank_set *ended) {
  DC__TRY(dc__tcp_group_check(group));
  if (mesh == DC__TCP_CONTROL) {
    DC__TRY(check_control(group, fds, ended));
  }
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    if (dc__rank_set_has(missing, r) && atomic_load(&group->gone[r]) != 0) {
      return dc__tcp_fail_gone(group, r, "a new communicator");
    }
  }
  return dc__now_ns() < deadline ? DC_OK : fail_late(group, missing);
}

/* What is readable when a failure is known, or when a rank ends that is missing: the watcher hears why. */
static int32_t list_ends(const dc__tcp_group *group, int32_t mesh, const int *fds, const dc__rank_set *ended,
                         int *ends) {
  int32_t count = 0;
  ends[count++] = group->alarm;
  for (int32_t r = 0; r < group->world; r++) {
    if (mesh == DC__TCP_CONTROL && fds[r] >= 0 && !dc__rank_set_has(ended, r)) {
      ends[count++] = fds[r];
    } else if (group->watched && r > group->rank && fds[r] < 0) {
      ends[count++] = group->control[r];
    }
  }
  return count;
}

/* From all higher ranks. */
static dc_status await(dc__tcp_group *group, int32_t mesh, int64_t deadline, int *fds) {
  dc_status status = DC_OK;
  int32_t count;
  for (int32_t r = group->rank + 1; r < group->world; r++) {
    fds[r] = take_early(group, mesh, r);
  }
  dc__rank_set missing = find_missing(group, fds, &count), ended = {{0}};
  while (status == DC_OK && count > 0) {
    dc__tcp_hello hello;
    int fd = -1, ends[DC__COMM_MAX_WORLD + 1];
    int32_t extra = list_ends(group, mesh, fds, &ended, ends);
    dc__tcp_wait_begin(&group->joining, &missing);
    if (dc__tcp_next_hello(group, ends, extra, deadline, &hello, &fd, &status)) {
      status = take_connection(group, &hello, fd, fds);
    } else if (status == DC_OK) {
      status = end_of_waiting(group, mesh, deadline, fds, &missing, &ended);
    }
    missing = find_missing(group, fds, &count);
  }
  dc__tcp_wait_end(&group->joining);
  return status;
}

dc_status dc__tcp_mesh(dc__tcp_group *group, int64_t deadline, int *fds, int32_t *mesh) {
  for (int32_t r = 0; r < group->world; r++) {
    fds[r] = -1;
  }
  pthread_mutex_lock(&group->meeting);
  *mesh = group->meshes;
  dc_status status = call(group, *mesh, deadline, fds);
  status = status != DC_OK ? status : await(group, *mesh, deadline, fds);
  group->meshes += status == DC_OK;
  pthread_mutex_unlock(&group->meeting);
  (void)eventfd_write(group->wake, 1); /* the watcher reads the listener again */
  for (int32_t r = 0; status != DC_OK && *mesh != DC__TCP_CONTROL && r < group->world; r++) {
    dc__tcp_close(&fds[r]);
  }
  return status;
}
