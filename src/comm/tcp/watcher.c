/* The watcher thread: reads the control mesh and answers queries, whatever the rank itself does. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>

#include "comm/tcp/tcp.h"

/* A process that ends closes its connections one by one, and a lost packet of one of them comes again after 0.2 s. */
static const int64_t first_check_ns = INT64_C(50000000), second_check_ns = INT64_C(250000000);

/* A control connection. */
typedef struct watched_rank {
  size_t bytes_received; /* of the message */
  dc__tcp_control_msg message;
  int64_t check_ns; /* when to ask why the connection ended; 0: never */
} watched_rank;

typedef struct tcp_watcher {
  dc__tcp_group *group;
  struct pollfd polls[DC__COMM_MAX_WORLD + 1];
  int64_t next_heartbeat_ns;
  watched_rank ranks[]; /* of the group's world */
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
  atomic_compare_exchange_strong(&group->closed[r], &none, DC__TCP_DISCONNECTED);
  dc__tcp_decide_failure(group);
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

/* Reads from rank r. False once the connection has ended. */
static bool receive_message(tcp_watcher *w, int32_t r) {
  dc__tcp_group *group = w->group;
  watched_rank *rank = &w->ranks[r];
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
  pthread_mutex_unlock(&group->mutex);
  for (int32_t r = 0; r < group->world; r++) {
    until = w->ranks[r].check_ns != 0 && w->ranks[r].check_ns < until ? w->ranks[r].check_ns : until;
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
  for (int32_t r = 0; r < w->group->world; r++) {
    if (w->ranks[r].check_ns != 0 && dc__now_ns() >= w->ranks[r].check_ns) {
      w->ranks[r].check_ns = dc__tcp_check_ended(w->group, r) ? dc__now_ns() + second_check_ns : 0;
    }
  }
}

static void *watcher_main(void *arg) {
  tcp_watcher *w = arg;
  dc__tcp_group *group = w->group;
  int32_t world = group->world;
  for (int32_t r = 0; r < world; r++) {
    w->polls[r] = (struct pollfd){.fd = group->control[r], .events = POLLIN};
    if (w->polls[r].fd >= 0 && !receive_message(w, r)) { /* TLS has read a message that the mesh peeked at */
      w->polls[r].fd = -1;
    }
  }
  w->next_heartbeat_ns = dc__now_ns();
  w->polls[world] = (struct pollfd){.fd = group->wake_event, .events = POLLIN};
  while (atomic_load(&group->stopping) == 0) {
    if (poll(w->polls, (nfds_t)world + 1, poll_timeout(w)) < 0) {
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
    send_heartbeats_if_due(w);
    check_ended_if_due(w);
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
  tcp_watcher *w = dc__calloc(1, sizeof *w + (size_t)group->world * sizeof w->ranks[0]);
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
