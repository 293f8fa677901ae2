/* The watcher thread: reads the control mesh and answers queries, whatever the rank itself does. Between meshes it
 * serves the listener, so that a late rank gets a reason at once. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/tcp.h"

enum { RETRY_NS = 100000000 /* pause after accept lacked resources */ };

typedef struct tcp_watcher {
  dc__tcp_group *group;
  size_t bytes_received[DC__COMM_MAX_WORLD];
  dc__tcp_control_msg messages[DC__COMM_MAX_WORLD];
  struct pollfd polls[DC__COMM_MAX_WORLD + 2 + DC__TCP_MAX_PENDING];
  bool mesh_in_progress; /* another thread makes a mesh and serves the listener, or accept is paused */
  int64_t retry_after;   /* when accept resumes; 0: at once */
  int64_t pending_expiry;
  int64_t next_heartbeat_ns;
} tcp_watcher;

static void handle_message(dc__tcp_group *group, int32_t r, dc__tcp_control_msg *message) {
  pthread_mutex_lock(&group->mutex);
  if (message->kind == DC__TCP_GOODBYE) {
    atomic_store(&group->closed[r], DC__TCP_CLOSED);
    dc__tcp_decide_failure(group);
  } else if (message->kind == DC__TCP_FAILURE) {
    dc__tcp_handle_vote(group, r, message);
  } else if (message->kind == DC__TCP_QUERY) {
    dc__tcp_handle_query(group, r, message);
  } else if (message->kind == DC__TCP_REPLY) {
    dc__tcp_handle_reply(group, r, message);
  }
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

static void handle_disconnect(dc__tcp_group *group, int32_t r, int error) {
  int none = 0;
  pthread_mutex_lock(&group->mutex);
  atomic_store(&group->error[r], error);
  atomic_compare_exchange_strong(&group->closed[r], &none, DC__TCP_DISCONNECTED);
  dc__tcp_decide_failure(group);
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

/* Reads from rank r. False once the connection has ended. */
static bool receive_message(tcp_watcher *w, int32_t r) {
  dc__tcp_group *group = w->group;
  char *at = (char *)&w->messages[r] + w->bytes_received[r];
  ssize_t got = recv(group->control[r], at, sizeof w->messages[r] - w->bytes_received[r], MSG_DONTWAIT);
  if (got > 0) {
    w->bytes_received[r] += (size_t)got;
    atomic_store_explicit(&group->heard_ns[r], dc__now_ns(), memory_order_relaxed);
    if (w->bytes_received[r] == sizeof w->messages[r]) {
      w->bytes_received[r] = 0;
      handle_message(group, r, &w->messages[r]);
    }
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return true;
  }
  handle_disconnect(group, r, got == 0 ? 0 : errno);
  return false;
}

/* Appends the listener and the pending connections to the control mesh and the event. */
static nfds_t list_polls(tcp_watcher *w) {
  dc__tcp_group *group = w->group;
  nfds_t count = (nfds_t)group->world + 1;
  w->pending_expiry = INT64_MAX;
  w->mesh_in_progress = w->retry_after > dc__now_ns() || pthread_mutex_trylock(&group->mesh_mutex) != 0;
  if (!w->mesh_in_progress) {
    w->polls[count++] = (struct pollfd){.fd = group->listener, .events = POLLIN};
    w->pending_expiry = dc__tcp_pending_expiry(&group->pending);
    for (int32_t i = 0; i < group->pending.count; i++) {
      w->polls[count++] = (struct pollfd){.fd = group->pending.candidates[i].fd, .events = POLLIN};
    }
    pthread_mutex_unlock(&group->mesh_mutex);
  }
  return count;
}

static void serve_listener(tcp_watcher *w, nfds_t count) {
  dc__tcp_group *group = w->group;
  nfds_t first = (nfds_t)group->world + 1;
  bool any = dc__now_ns() >= w->pending_expiry, retry = false;
  for (nfds_t i = first; i < count; i++) {
    any = any || w->polls[i].revents != 0;
  }
  if (any && pthread_mutex_trylock(&group->mesh_mutex) == 0) {
    dc__tcp_serve_listener(group, w->polls[first].revents != 0, &retry);
    pthread_mutex_unlock(&group->mesh_mutex);
  }
  w->retry_after = retry ? dc__now_ns() + RETRY_NS : 0;
}

/* Time until the vote deadline, the next accept or the next heartbeat. */
static int poll_timeout(tcp_watcher *w) {
  dc__tcp_group *group = w->group;
  int64_t until = w->mesh_in_progress && w->retry_after != 0 ? w->retry_after : w->pending_expiry;
  until = until < w->next_heartbeat_ns ? until : w->next_heartbeat_ns;
  pthread_mutex_lock(&group->mutex);
  if (group->voted && atomic_load(&group->failed) == 0 && group->vote_deadline < until) {
    until = group->vote_deadline;
  }
  pthread_mutex_unlock(&group->mutex);
  return dc__poll_timeout_ms(until);
}

static void send_heartbeats_if_due(tcp_watcher *w) {
  int64_t now = dc__now_ns();
  if (now < w->next_heartbeat_ns) {
    return;
  }
  dc__tcp_send_heartbeats(w->group, now - w->next_heartbeat_ns > w->group->heartbeat_ns);
  w->next_heartbeat_ns = dc__now_ns() + w->group->heartbeat_ns;
}

static void *watcher_main(void *arg) {
  tcp_watcher *w = arg;
  dc__tcp_group *group = w->group;
  int32_t world = group->world;
  for (int32_t r = 0; r < world; r++) {
    w->polls[r] = (struct pollfd){.fd = group->control[r], .events = POLLIN};
  }
  w->next_heartbeat_ns = dc__now_ns();
  w->polls[world] = (struct pollfd){.fd = group->wake_event, .events = POLLIN};
  while (atomic_load(&group->stopping) == 0) {
    nfds_t count = list_polls(w);
    if (poll(w->polls, count, poll_timeout(w)) < 0) {
      continue;
    }
    for (int32_t r = 0; r < world; r++) {
      if (w->polls[r].fd >= 0 && w->polls[r].revents != 0 && !receive_message(w, r)) {
        w->polls[r].fd = -1;
      }
    }
    if (w->polls[world].revents != 0) {
      eventfd_t any;
      (void)eventfd_read(group->wake_event, &any);
    }
    serve_listener(w, count);
    send_heartbeats_if_due(w);
    for (int32_t r = 0; r < world; r++) {
      w->polls[r].fd = atomic_load(&group->closed[r]) == DC__TCP_DISCONNECTED ? -1 : w->polls[r].fd;
    }
    pthread_mutex_lock(&group->mutex);
    dc__tcp_decide_failure(group); /* at the vote deadline */
    pthread_mutex_unlock(&group->mutex);
  }
  dc__free(w);
  return NULL;
}

dc_status dc__tcp_start_watcher(dc__tcp_group *group) {
  tcp_watcher *w = dc__calloc(1, sizeof *w);
  if (w == NULL) {
    return DC_E_NO_MEMORY;
  }
  w->group = group;
  group->watcher_running = true;
  int error = pthread_create(&group->watcher, NULL, watcher_main, w);
  if (error != 0) {
    group->watcher_running = false;
    dc__free(w);
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no thread: %s", strerror(error));
  }
  return DC_OK;
}
