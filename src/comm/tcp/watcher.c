/* The thread of a rank that reads the control mesh and answers questions, whatever the rank itself does; and between
 * meetings the listener, so that a newcomer hears at once why it is not let in. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/tcp.h"

enum { RETRY_NS = 100000000 /* where nothing can be accepted */ };

typedef struct watcher {
  dc__tcp_group *group;
  size_t heard[DC__COMM_MAX_WORLD];
  dc__tcp_notice notices[DC__COMM_MAX_WORLD];
  struct pollfd polls[DC__COMM_MAX_WORLD + 2 + DC__TCP_PENDING];
  bool busy;           /* a mesh is made, whose maker reads the listener */
  int64_t retry_after; /* the listener; 0: at once */
} watcher;

static void take_notice(dc__tcp_group *group, int32_t r, dc__tcp_notice *notice) {
  pthread_mutex_lock(&group->mutex);
  if (notice->kind == DC__TCP_GOES) {
    atomic_store(&group->gone[r], DC__TCP_GONE);
    dc__tcp_settle(group);
  } else if (notice->kind == DC__TCP_FAILURE) {
    dc__tcp_take_vote(group, r, notice);
  } else if (notice->kind == DC__TCP_QUESTION) {
    dc__tcp_take_question(group, r, notice);
  } else if (notice->kind == DC__TCP_ANSWER) {
    dc__tcp_take_answer(group, r, notice);
  }
  pthread_cond_broadcast(&group->news);
  pthread_mutex_unlock(&group->mutex);
}

static void take_end(dc__tcp_group *group, int32_t r, int error) {
  int none = 0;
  pthread_mutex_lock(&group->mutex);
  atomic_store(&group->error[r], error);
  atomic_compare_exchange_strong(&group->gone[r], &none, DC__TCP_ENDED);
  dc__tcp_settle(group);
  pthread_cond_broadcast(&group->news);
  pthread_mutex_unlock(&group->mutex);
}

/* What is there from rank r; false: nothing more will come. */
static bool listen_to(watcher *w, int32_t r) {
  dc__tcp_group *group = w->group;
  char *at = (char *)&w->notices[r] + w->heard[r];
  ssize_t got = recv(group->control[r], at, sizeof w->notices[r] - w->heard[r], MSG_DONTWAIT);
  if (got > 0) {
    w->heard[r] += (size_t)got;
    if (w->heard[r] == sizeof w->notices[r]) {
      w->heard[r] = 0;
      take_notice(group, r, &w->notices[r]);
    }
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return true;
  }
  take_end(group, r, got == 0 ? 0 : errno);
  return false;
}

/* The listener and those that have not said their hello, after the control mesh and the event. */
static nfds_t list(watcher *w) {
  dc__tcp_group *group = w->group;
  nfds_t count = (nfds_t)group->world + 1;
  w->busy = w->retry_after > dc__now_ns() || pthread_mutex_trylock(&group->meeting) != 0;
  if (!w->busy) {
    w->polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
    for (int32_t i = 0; i < group->pending.count; i++) {
      w->polls[count++] = (struct pollfd){.fd = group->pending.fds[i], .events = POLLIN};
    }
    pthread_mutex_unlock(&group->meeting);
  }
  return count;
}

static void serve(watcher *w, nfds_t count) {
  dc__tcp_group *group = w->group;
  nfds_t first = (nfds_t)group->world + 1;
  bool any = false, retry = false;
  for (nfds_t i = first; i < count; i++) {
    any = any || w->polls[i].revents != 0;
  }
  if (any && pthread_mutex_trylock(&group->meeting) == 0) {
    dc__tcp_serve(group, w->polls[first].revents != 0, &retry);
    pthread_mutex_unlock(&group->meeting);
  }
  w->retry_after = retry ? dc__now_ns() + RETRY_NS : 0;
}

/* When it must look without having heard anything. */
static int patience(watcher *w) {
  dc__tcp_group *group = w->group;
  int64_t until = w->busy && w->retry_after != 0 ? w->retry_after : INT64_MAX;
  pthread_mutex_lock(&group->mutex);
  if (group->voted && atomic_load(&group->failed) == 0 && group->settled_by < until) {
    until = group->settled_by;
  }
  pthread_mutex_unlock(&group->mutex);
  return until == INT64_MAX ? -1 : dc__milliseconds_to(until);
}

static void *watch(void *arg) {
  watcher *w = arg;
  dc__tcp_group *group = w->group;
  int32_t world = group->world;
  for (int32_t r = 0; r < world; r++) {
    w->polls[r] = (struct pollfd){.fd = group->control[r], .events = POLLIN};
  }
  w->polls[world] = (struct pollfd){.fd = group->wake, .events = POLLIN};
  while (atomic_load(&group->ends) == 0) {
    nfds_t count = list(w);
    if (poll(w->polls, count, patience(w)) < 0) {
      continue;
    }
    for (int32_t r = 0; r < world; r++) {
      if (w->polls[r].fd >= 0 && w->polls[r].revents != 0 && !listen_to(w, r)) {
        w->polls[r].fd = -1;
      }
    }
    if (w->polls[world].revents != 0) {
      eventfd_t any;
      (void)eventfd_read(group->wake, &any);
    }
    serve(w, count);
    pthread_mutex_lock(&group->mutex);
    dc__tcp_settle(group); /* if it waited long enough */
    pthread_mutex_unlock(&group->mutex);
  }
  dc__free(w);
  return NULL;
}

dc_status dc__tcp_start_watcher(dc__tcp_group *group) {
  watcher *w = dc__calloc(1, sizeof *w);
  if (w == NULL) {
    return DC_E_NO_MEMORY;
  }
  w->group = group;
  group->watched = true;
  int error = pthread_create(&group->watcher, NULL, watch, w);
  if (error != 0) {
    group->watched = false;
    dc__free(w);
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no thread: %s", strerror(error));
  }
  return DC_OK;
}
