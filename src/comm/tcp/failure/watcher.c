/* The watcher thread: reads the control mesh and answers queries, whatever the rank itself does. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/overlay/overlay.h"

/* A process that ends closes its connections one by one, and a lost packet of one of them is sent again after 0.2 s. */
static const int64_t first_check_ns = INT64_C(50000000), second_check_ns = INT64_C(250000000);

/* A control connection. */
typedef struct watched_rank {
  int32_t rank;
  size_t bytes_received; /* of the message */
  dc__tcp_control_msg message;
  int64_t check_ns; /* when to check why the connection ended; 0: never */
} watched_rank;

typedef struct tcp_watcher {
  dc__tcp_group *group;
  int64_t next_heartbeat_ns;
  int32_t count;
  struct pollfd polls[DC__COMM_MAX_WORLD + DC__TCP_MAX_PENDING + 2]; /* ranks, the event, and what an overlay accepts */
  watched_rank ranks[];
} tcp_watcher;

static void handle_message(dc__tcp_group *group, int32_t r, dc__tcp_control_msg *message) {
  pthread_mutex_lock(&group->mutex);
  if (dc__tcp_route(group, r, message)) {
    pthread_mutex_unlock(&group->mutex);
    return;
  }
  const int32_t from = group->overlay ? message->from : r;
  if (message->kind == DC__TCP_GOODBYE) {
    atomic_store(&group->closed[r], DC__TCP_CLOSED);
    dc__tcp_decide_failure(group);
  } else if (message->kind == DC__TCP_FAILURE) {
    dc__tcp_handle_vote(group, r, message);
  } else if (message->kind == DC__TCP_QUERY) {
    dc__tcp_handle_query(group, from, message);
  } else if (message->kind == DC__TCP_REPLY) {
    dc__tcp_handle_reply(group, from, message);
  } else if (message->kind == DC__TCP_ENDED && group->overlay) {
    dc__tcp_handle_ended(group, message);
  } else if (message->kind == DC__TCP_LISTENING) {
    dc__tcp_handle_listening(group, r, message);
  }
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

static void handle_disconnect(dc__tcp_group *group, int32_t r, int error) {
  int none = 0;
  pthread_mutex_lock(&group->mutex);
  atomic_store(&group->error[r], error);
  if (atomic_compare_exchange_strong(&group->closed[r], &none, DC__TCP_DISCONNECTED)) {
    dc__tcp_add_ended(group, r, error);
  }
  dc__tcp_decide_failure(group);
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

/* Reads what is there. False once the connection has ended. */
static bool receive_message(tcp_watcher *w, watched_rank *rank) {
  dc__tcp_group *group = w->group;
  const int32_t r = rank->rank;
  char *at = (char *)&rank->message + rank->bytes_received;
  ssize_t got = dc__tcp_read(group->control[r], at, sizeof rank->message - rank->bytes_received);
  if (got > 0) {
    rank->bytes_received += (size_t)got;
    atomic_store_explicit(&group->heard_ns[r], dc__now_ns(), memory_order_relaxed);
    if (rank->bytes_received == sizeof rank->message) {
      rank->bytes_received = 0;
      handle_message(group, r, &rank->message);
    }
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return true;
  }
  handle_disconnect(group, r, got == 0 ? 0 : errno);
  rank->check_ns = atomic_load(&group->closed[r]) == DC__TCP_DISCONNECTED ? dc__now_ns() + first_check_ns : 0;
  return false;
}

/* Time until the vote deadline, the next heartbeat, or the check of a connection that ended. */
static int poll_timeout(const tcp_watcher *w) {
  dc__tcp_group *group = w->group;
  int64_t until = w->next_heartbeat_ns;
  pthread_mutex_lock(&group->mutex);
  if (group->voted && atomic_load(&group->failed) == 0 && group->vote_deadline < until) {
    until = group->vote_deadline;
  }
  if ((group->voted ? group->votes_grew : group->ended_grew) && group->pass_ns < until) {
    until = group->pass_ns;
  }
  pthread_mutex_unlock(&group->mutex);
  for (int32_t i = 0; i < w->count; i++) {
    until = w->ranks[i].check_ns != 0 && w->ranks[i].check_ns < until ? w->ranks[i].check_ns : until;
  }
  if (group->overlay && dc__tcp_pending_expiry(&group->pending) < until) {
    until = dc__tcp_pending_expiry(&group->pending);
  }
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

static void check_ended_if_due(tcp_watcher *w) {
  for (int32_t i = 0; i < w->count; i++) {
    watched_rank *rank = &w->ranks[i];
    if (rank->check_ns != 0 && dc__now_ns() >= rank->check_ns) {
      rank->check_ns = dc__tcp_check_ended(w->group, rank->rank) ? dc__now_ns() + second_check_ns : 0;
    }
  }
}

static void watcher_begin(tcp_watcher *w) {
  for (int32_t i = 0; i < w->count; i++) {
    w->polls[i] = (struct pollfd){.fd = w->group->control[w->ranks[i].rank], .events = POLLIN};
    if (!receive_message(w, &w->ranks[i])) { /* TLS may hold a message that the mesh peeked at */
      w->polls[i].fd = -1;
    }
  }
  w->polls[w->count] = (struct pollfd){.fd = w->group->wake_event, .events = POLLIN};
  w->next_heartbeat_ns = dc__now_ns();
}

static void watcher_read(tcp_watcher *w) {
  for (int32_t i = 0; i < w->count; i++) {
    if (w->polls[i].fd >= 0 && w->polls[i].revents != 0 && !receive_message(w, &w->ranks[i])) {
      w->polls[i].fd = -1;
    }
  }
  if (w->polls[w->count].revents != 0) {
    eventfd_t any;
    (void)eventfd_read(w->group->wake_event, &any);
  }
}

static void *watcher_main(void *arg) {
  tcp_watcher *w = arg;
  dc__tcp_group *group = w->group;
  watcher_begin(w);
  while (atomic_load(&group->stopping) == 0) {
    struct pollfd *accepted = &w->polls[w->count + 1];
    const int32_t accepts = dc__tcp_serve_polls(group, accepted);
    const int ready = poll(w->polls, (nfds_t)w->count + 1 + (nfds_t)accepts, poll_timeout(w));
    if (ready < 0) {
      continue;
    }
    watcher_read(w);
    if (accepts > 0 && (ready > 0 || dc__now_ns() >= dc__tcp_pending_expiry(&group->pending))) {
      dc__tcp_serve(group, accepted->revents != 0);
    }
    send_heartbeats_if_due(w);
    check_ended_if_due(w);
    for (int32_t i = 0; i < w->count; i++) {
      w->polls[i].fd = atomic_load(&group->closed[w->ranks[i].rank]) == DC__TCP_DISCONNECTED ? -1 : w->polls[i].fd;
    }
    pthread_mutex_lock(&group->mutex);
    dc__tcp_pass_ended(group);
    dc__tcp_pass_votes(group);
    dc__tcp_decide_failure(group); /* at the vote deadline */
    pthread_mutex_unlock(&group->mutex);
  }
  dc__free(w);
  return NULL;
}

dc_status dc__tcp_start_watcher(dc__tcp_group *group) {
  tcp_watcher *w = dc__calloc(1, sizeof *w + (size_t)group->world * sizeof w->ranks[0]); /* most of it is not touched */
  if (w == NULL) {
    return DC_E_NO_MEMORY;
  }
  w->group = group;
  for (int32_t r = 0; r < group->world; r++) {
    if (group->control[r] >= 0) {
      w->ranks[w->count++].rank = r;
    }
  }
  group->watcher_running = true;
  int error = pthread_create(&group->watcher, NULL, watcher_main, w);
  if (error != 0) {
    group->watcher_running = false;
    dc__free(w);
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no thread: %s", strerror(error));
  }
  return DC_OK;
}
