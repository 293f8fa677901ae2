/* What the communicators of one rank share: how it fails, and how it hears that others failed or went. A thread listens
 * to the group's own mesh; who waits for data waits for the alarm too. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "comm/tcp/tcp.h"

enum {
  NOTICE_NS = 1000000000 /* for a notice to leave, where a rank does not read */
};
/* For a word why a connection ended; it comes at once, unless the watcher does not run, or its rank keeps others. */
static const int64_t last_words_ns = INT64_C(10000000000);

/* ---- failures ---- */

dc_status dc__tcp_group_check(dc__tcp_group *group) {
  if (atomic_load_explicit(&group->failed, memory_order_acquire) == 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&group->mutex);
  dc_status status = dc__failure_raise(&group->failure);
  pthread_mutex_unlock(&group->mutex);
  return status;
}

/* Holds the mutex, so that notices do not mix. */
static void tell_all(const dc__tcp_group *group, const dc__tcp_notice *notice) {
  int64_t deadline = dc__now_ns() + NOTICE_NS;
  for (int32_t r = 0; r < group->world; r++) {
    if (group->control[r] >= 0) {
      (void)dc__tcp_send_all(group->control[r], notice, sizeof *notice, deadline);
    }
  }
}

void dc__tcp_group_fail(dc__tcp_group *group, dc_status status, bool tell) {
  pthread_mutex_lock(&group->mutex);
  if (atomic_load(&group->failed) == 0) {
    dc__failure_keep(&group->failure, status);
    atomic_store_explicit(&group->failed, 1, memory_order_release);
    (void)eventfd_write(group->alarm, 1); /* the counter is far from full */
    if (tell) {
      dc__tcp_notice notice = {.status = status};
      snprintf(notice.text, sizeof notice.text, "%s", dc_last_error());
      tell_all(group, &notice);
    }
  }
  pthread_mutex_unlock(&group->mutex);
}

dc_status dc__tcp_group_lost(dc__tcp_group *group, int32_t r, bool left, const char *doing) {
  int64_t until = dc__now_ns() + (left ? 0 : last_words_ns);
  while (atomic_load(&group->failed) == 0 && atomic_load(&group->gone[r]) == 0 && dc__now_ns() < until) {
    const struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
  }
  DC__TRY(dc__tcp_group_check(group));
  return dc__fail(DC_E_PEER_DEAD, "rank %" PRId32 " %s while rank %" PRId32 " waited for it at %s", r,
                  !left && atomic_load(&group->gone[r]) == DC__TCP_ENDED ? "died (its connection ended)"
                                                                         : "destroyed its communicator",
                  group->rank, doing);
}

/* ---- the watcher ---- */

typedef struct listener {
  dc__tcp_group *group;
  size_t heard[DC__COMM_MAX_WORLD];
  dc__tcp_notice notices[DC__COMM_MAX_WORLD];
} listener;

bool dc__tcp_is_failure(int32_t status, const char *text) {
  return status != DC_OK && strcmp(dc_status_name(status), "DC_E_UNKNOWN") != 0 && text[0] != '\0';
}

static void take_notice(dc__tcp_group *group, int32_t r, dc__tcp_notice *notice) {
  notice->text[sizeof notice->text - 1] = '\0';
  if (notice->status == DC_OK) {
    atomic_store(&group->gone[r], DC__TCP_GONE);
  } else if (dc__tcp_is_failure(notice->status, notice->text)) {
    dc__tcp_group_fail(group, dc__fail(notice->status, "%s", notice->text), false);
  }
}

/* What is there from rank r; false: nothing more will come. */
static bool listen_to(listener *l, int32_t r) {
  dc__tcp_group *group = l->group;
  char *at = (char *)&l->notices[r] + l->heard[r];
  ssize_t got = recv(group->control[r], at, sizeof l->notices[r] - l->heard[r], MSG_DONTWAIT);
  if (got > 0) {
    l->heard[r] += (size_t)got;
    if (l->heard[r] == sizeof l->notices[r]) {
      l->heard[r] = 0;
      take_notice(group, r, &l->notices[r]);
    }
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return true;
  }
  int none = 0;
  atomic_compare_exchange_strong(&group->gone[r], &none, DC__TCP_ENDED);
  return false;
}

static void *watch(void *arg) {
  listener *l = arg;
  dc__tcp_group *group = l->group;
  struct pollfd polls[DC__COMM_MAX_WORLD + 1];
  for (int32_t r = 0; r < group->world; r++) {
    polls[r] = (struct pollfd){.fd = group->control[r], .events = POLLIN};
  }
  polls[group->world] = (struct pollfd){.fd = group->stop, .events = POLLIN};
  while (polls[group->world].revents == 0) {
    if (poll(polls, (nfds_t)group->world + 1, -1) < 0) {
      polls[group->world].revents = 0;
      continue;
    }
    for (int32_t r = 0; r < group->world; r++) {
      if (polls[r].fd >= 0 && polls[r].revents != 0 && !listen_to(l, r)) {
        polls[r].fd = -1;
      }
    }
  }
  dc__free(l);
  return NULL;
}

static dc_status start_watcher(dc__tcp_group *group) {
  listener *l = dc__calloc(1, sizeof *l);
  if (l == NULL) {
    return DC_E_NO_MEMORY;
  }
  l->group = group;
  int error = pthread_create(&group->watcher, NULL, watch, l);
  if (error != 0) {
    dc__free(l);
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no thread: %s", strerror(error));
  }
  group->watched = true;
  return DC_OK;
}

/* ---- the group ---- */

void dc__tcp_group_release(dc__tcp_group *group) {
  if (atomic_fetch_sub_explicit(&group->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  const dc__tcp_notice goes = {.status = DC_OK};
  pthread_mutex_lock(&group->mutex);
  tell_all(group, &goes);
  pthread_mutex_unlock(&group->mutex);
  if (group->watched && eventfd_write(group->stop, 1) == 0) {
    pthread_join(group->watcher, NULL);
  }
  for (int32_t r = 0; r < group->world; r++) {
    dc__tcp_close(&group->control[r]);
  }
  for (int32_t i = 0; i < group->early_count; i++) {
    dc__tcp_close(&group->early[i].fd);
  }
  dc__free(group->early);
  dc__tcp_pending_close(&group->pending);
  dc__tcp_close(&group->listener);
  dc__tcp_close(&group->alarm);
  dc__tcp_close(&group->stop);
  pthread_mutex_destroy(&group->meeting);
  pthread_mutex_destroy(&group->mutex);
  dc__free(group);
}

static dc_status open_group(dc__tcp_group *group, const dc__tcp_address *address) {
  group->alarm = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  group->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (group->alarm < 0 || group->stop < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no eventfd: %s", strerror(errno));
  }
  if (group->world == 1) {
    return DC_OK;
  }
  int64_t deadline = dc__now_ns() + group->timeout_ns;
  DC__TRY(dc__tcp_rendezvous(group, address, deadline));
  DC__TRY(dc__tcp_mesh(group, deadline + NOTICE_NS, group->control));
  return start_watcher(group);
}

dc_status dc__tcp_group_create(const char *address, const char *name, int32_t rank, int32_t world, int64_t timeout_ns,
                               dc__tcp_group **out) {
  dc__tcp_address at;
  DC__TRY(dc__tcp_parse("dc_comm_create_tcp", address, &at));
  dc__tcp_group *group = dc__calloc(1, sizeof *group);
  if (group == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&group->refs, 1);
  pthread_mutex_init(&group->meeting, NULL);
  pthread_mutex_init(&group->mutex, NULL);
  group->rank = rank;
  group->world = world;
  group->timeout_ns = timeout_ns;
  snprintf(group->name, sizeof group->name, "%s", name);
  group->listener = group->alarm = group->stop = -1;
  for (int32_t r = 0; r < world; r++) {
    group->control[r] = -1;
  }
  dc_status status = open_group(group, &at);
  if (status != DC_OK) {
    dc__tcp_group_fail(group, status, true);
    dc__tcp_group_release(group);
    return status;
  }
  *out = group;
  return DC_OK;
}
