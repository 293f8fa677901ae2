/* Data connections that are made when a collective first needs them. Ranks whose calls match need the same ones: the
 * higher rank connects, and the lower one waits for it. The watcher accepts, so that a rank may compute meanwhile. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/overlay/overlay.h"

/* ---- the watcher's side ---- */

int32_t dc__tcp_serve_polls(const dc__tcp_group *group, struct pollfd *polls) {
  int32_t count = 0;
  if (!group->overlay) {
    return 0;
  }
  polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
  for (int32_t i = 0; i < group->pending.count; i++) {
    polls[count++] = (struct pollfd){.fd = group->pending.candidates[i].fd, .events = POLLIN};
  }
  return count;
}

void dc__tcp_signal_arrival(const dc__tcp_group *group) {
  for (const dc__tcp *c = group->members; c != NULL; c = c->next) {
    if (c->arrival_event >= 0) {
      (void)eventfd_write(c->arrival_event, 1);
    }
  }
}

/* Whether this rank wants a connection: it has the communicator but not that connection, or will have the
 * communicator. */
static bool is_wanted(const dc__tcp_group *group, const dc__tcp_hello *hello) {
  const dc__tcp *c = group->members;
  while (c != NULL && c->mesh != hello->mesh) {
    c = c->next;
  }
  return hello->mesh >= DC__TCP_FIRST && (c == NULL ? hello->mesh >= group->meshes : c->fds[hello->rank] < 0);
}

/* Keeps a connection whose handshake is complete, which has checked its rank. An error fails the group. */
static dc_status keep_arrival(dc__tcp_group *group, const dc__tcp_hello *hello, int fd) {
  dc_status status = DC_OK;
  pthread_mutex_lock(&group->mutex);
  const bool wanted = is_wanted(group, hello);
  if (wanted) {
    const dc__tcp_early *other = dc__tcp_find_early(group, hello->mesh, hello->rank);
    status = dc__tcp_keep_early(group, hello, fd, other == NULL ? -1 : other->fd);
    dc__tcp_signal_arrival(group);
  }
  pthread_mutex_unlock(&group->mutex);
  if (!wanted || status != DC_OK) {
    dc__tcp_note_rejected(&group->pending, fd, "which came twice, or for a communicator that is no more");
    dc__tcp_close(&fd);
  }
  return status;
}

void dc__tcp_serve(dc__tcp_group *group, bool can_accept) {
  dc__tcp_hello hello;
  int fd = -1;
  dc_status status = DC_OK;
  while (status == DC_OK && dc__tcp_poll_hello(group, can_accept, &hello, &fd, &status)) {
    can_accept = false;
    if (hello.mesh != DC__TCP_RENDEZVOUS) {
      status = keep_arrival(group, &hello, fd);
    } else {
      dc__tcp_reject(fd, dc__tcp_fail_no_rendezvous(group, &hello));
      dc__tcp_close(&fd);
    }
  }
  if (status != DC_OK) {
    dc__tcp_group_fail_async(group, status);
  }
}

void dc__tcp_drop_early(dc__tcp_group *group, int32_t mesh) {
  for (int32_t i = group->early_count - 1; i >= 0; i--) {
    if (group->early[i].mesh == mesh) {
      dc__tcp_close(&group->early[i].fd);
      group->early[i] = group->early[--group->early_count];
    }
  }
}

/* ---- the collective's side ---- */

static void install_connection(dc__tcp *self, int32_t r, int fd) {
  self->fds[r] = self->transfers[r].fd = fd;
}

dc_status dc__tcp_take_connection(const dc__tcp_plan *p, int32_t r, bool *progress) {
  dc__tcp *self = p->self;
  if (self->fds[r] >= 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&self->group->mutex);
  const int fd = dc__tcp_take_early(self->group, self->mesh, r);
  if (fd >= 0) {
    install_connection(self, r, fd);
    *progress = true;
  }
  pthread_mutex_unlock(&self->group->mutex);
  return fd >= 0 || atomic_load(&self->group->closed[r]) == 0 ? DC_OK : dc__tcp_fail_closed(self->group, r, p->op_text);
}

/* Returns an error that names a rank that ended or left. If none did, returns `failure`, the connection's own error. */
static dc_status fail_unreached(const dc__tcp_plan *p, const dc__rank_set *ranks, const dc__failure *failure) {
  dc__tcp *self = p->self;
  DC__TRY(dc__tcp_group_check(self->group));
  if (failure->status == DC_E_PEER_DEAD) {
    dc__tcp_query_ranks(self, ranks);
    DC__TRY(dc__tcp_group_check(self->group));
    for (int32_t r = 0; r < self->head.world; r++) {
      if (dc__rank_set_has(ranks, r) && atomic_load(&self->group->closed[r]) != 0) {
        return dc__tcp_fail_closed(self->group, r, p->op_text);
      }
      if (dc__rank_set_has(ranks, r) && self->replies[r].state == DC__TCP_LEFT) {
        return dc__tcp_fail_left(self->group, r, p->op_text);
      }
    }
  }
  return dc__failure_raise(failure);
}

static dc_status connect_lower(dc__tcp_plan *p, const dc__rank_set *ranks) {
  dc__tcp *self = p->self;
  int *fds = dc__calloc((size_t)self->head.world, sizeof *fds);
  dc__failure failure = {DC_OK, ""};
  dc__rank_set failed = {{0}};
  if (fds == NULL) {
    return DC_E_NO_MEMORY;
  }
  for (int32_t r = 0; r < self->head.world; r++) {
    fds[r] = -1;
  }
  dc__tcp_wait_begin(&self->wait, ranks);
  dc__failure_keep(&failure,
                   dc__tcp_connect_ranks(self->group, self->mesh, dc__now_ns() + self->head.timeout_ns, ranks, fds));
  pthread_mutex_lock(&self->group->mutex);
  for (int32_t r = 0; r < self->head.world; r++) {
    if (fds[r] >= 0) {
      install_connection(self, r, fds[r]);
    } else if (dc__rank_set_has(ranks, r)) {
      dc__rank_set_add(&failed, r);
    }
  }
  pthread_mutex_unlock(&self->group->mutex);
  dc__free(fds);
  dc__tcp_note_progress(p);
  return failure.status == DC_OK ? DC_OK : fail_unreached(p, &failed, &failure);
}

dc_status dc__tcp_connect_lower(dc__tcp_plan *p, const dc__rank_set *ranks) {
  dc__rank_set lower = {{0}};
  for (int32_t r = 0; r < p->self->head.rank; r++) {
    if (p->self->fds[r] < 0 && dc__rank_set_has(ranks, r)) {
      dc__rank_set_add(&lower, r);
    }
  }
  return dc__rank_set_is_empty(&lower) ? DC_OK : connect_lower(p, &lower);
}
