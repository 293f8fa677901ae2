/* Heartbeats. Each watcher sends one to every rank. If a rank's are missing, its machine is asked: its kernel
 * acknowledges received bytes. While it does, the process is only stopped or starved, and the collective's deadline
 * decides. If it does not, the machine vanished or the network is cut, and the group fails. */
#define _GNU_SOURCE /* POLLRDHUP */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

#include "comm/tcp/collective.h"

enum { MISSED = 3 /* heartbeats that a machine may miss */ };

/* A silent rank's machine is only asked by keep-alive probes, every two seconds (socket.c). */
static const int64_t min_silence_ns = INT64_C(3000000000);

static int64_t machine_limit(const dc__tcp_group *group) {
  const int64_t limit_ns = MISSED * group->heartbeat_ns;
  return limit_ns > min_silence_ns ? limit_ns : min_silence_ns;
}

static bool is_connected(dc__tcp_group *group, int32_t r) {
  return group->control[r] >= 0 && atomic_load(&group->closed[r]) == 0;
}

void dc__tcp_start_heartbeats(dc__tcp_group *group) {
  /* The system's own limit, for a watcher that cannot run: twice the watcher's. */
  const int64_t limit_ms = 2 * machine_limit(group) / 1000000;
  const unsigned int timeout_ms = limit_ms < INT32_MAX ? (unsigned int)limit_ms : INT32_MAX;
  for (int32_t r = 0; r < group->world; r++) {
    atomic_store(&group->heard_ns[r], dc__now_ns());
    group->asked_ns[r] = 0;
    if (group->control[r] >= 0) {
      dc__tcp_start_probes(group->control[r]);
      (void)setsockopt(group->control[r], IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    }
  }
}

static int64_t silence_of(dc__tcp_group *group, int32_t r) {
  return dc__now_ns() - atomic_load_explicit(&group->heard_ns[r], memory_order_relaxed);
}

bool dc__tcp_is_silent(dc__tcp_group *group, int32_t r) {
  return silence_of(group, r) >= MISSED * group->heartbeat_ns;
}

/* Time since the machine at the other end acknowledged anything; INT64_MAX if the system cannot tell. */
static int64_t silence_of_connection(int fd, struct tcp_info *info) {
  socklen_t length = sizeof *info;
  const bool told = fd >= 0 && getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &length) == 0 &&
                    length >= offsetof(struct tcp_info, tcpi_last_ack_recv) + sizeof info->tcpi_last_ack_recv;
  return told ? (int64_t)info->tcpi_last_ack_recv * 1000000 : INT64_MAX;
}

/* Since when rank r's machine owes an answer to bytes or to a probe of the control connection; 0: it owes none. An
 * overloaded machine may send nothing for seconds, and then no answer is owed. Requires group->mutex. */
static int64_t owes_since(dc__tcp_group *group, int32_t r) {
  struct tcp_info info = {0};
  int unanswered = 0;
  const bool told = silence_of_connection(group->control[r], &info) != INT64_MAX;
  const bool owes = ioctl(group->control[r], SIOCOUTQ, &unanswered) != 0 || unanswered > 0 || info.tcpi_probes > 0;
  const int64_t since_ns = group->asked_ns[r] != 0 ? group->asked_ns[r] : dc__now_ns();
  group->asked_ns[r] = told && owes ? since_ns : 0;
  return group->asked_ns[r];
}

/* Time since rank r's machine last acknowledged anything. If a heartbeat waits in a slow link's queue, its
 * acknowledgement is late, but those of the data ahead of it show that the machine is alive. Requires group->mutex. */
static int64_t silence_of_machine(const dc__tcp_group *group, int32_t r) {
  struct tcp_info info;
  int64_t silence_ns = silence_of_connection(group->control[r], &info);
  for (const dc__tcp *c = group->members; c != NULL; c = c->next) {
    const int64_t data_ns = silence_of_connection(c->fds[r], &info);
    silence_ns = data_ns < silence_ns ? data_ns : silence_ns;
  }
  return silence_ns;
}

/* How long rank r's machine has not answered. 0 if it owes no answer, or was asked just now: a busy system sends a
 * probe late, and delivers the answer late. Requires group->mutex. */
static int64_t time_without_answer(dc__tcp_group *group, int32_t r) {
  const int64_t since_ns = owes_since(group, r);
  const bool proves = since_ns != 0 && dc__now_ns() - since_ns >= machine_limit(group) / MISSED * (MISSED - 1);
  return proves ? silence_of_machine(group, r) : 0;
}

void dc__tcp_host_text(const dc__tcp_group *group, int32_t r, char text[DC__TCP_PEER]) {
  const unsigned char *address = group->endpoints[r].address;
  const bool four = dc__tcp_is_mapped(address);
  if (inet_ntop(four ? AF_INET : AF_INET6, four ? address + 12 : address, text, DC__TCP_PEER) == NULL) {
    snprintf(text, DC__TCP_PEER, "an unknown one");
  }
}

static void fail_vanished(dc__tcp_group *group, int32_t r, int64_t silence_ns) {
  char host[DC__TCP_PEER];
  dc__tcp_host_text(group, r, host);
  pthread_mutex_lock(&group->mutex);
  int none = 0;
  atomic_store(&group->error[r], ETIMEDOUT);
  atomic_compare_exchange_strong(&group->closed[r], &none, DC__TCP_DISCONNECTED);
  dc__rank_set_add(&group->unresponsive, r);
  pthread_mutex_unlock(&group->mutex);
  dc__tcp_group_fail_async(group, dc__fail(DC_E_PEER_DEAD,
                                           "rank %" PRId32 " is dead or cut off: its machine, %s, has not answered "
                                           "rank %" PRId32 " for %.1f s",
                                           r, host, group->rank, (double)silence_ns / 1e9));
}

void dc__tcp_send_heartbeats(dc__tcp_group *group, bool was_late) {
  const dc__tcp_control_msg message = {.kind = DC__TCP_HEARTBEAT};
  const int64_t limit_ns = MISSED * group->heartbeat_ns;
  group->late_ns = was_late ? dc__now_ns() : group->late_ns;
  for (int32_t r = 0; r < group->world; r++) {
    if (!is_connected(group, r)) {
      continue;
    }
    /* A watcher that was late itself gives the others time to be heard. */
    const int64_t awake_ns = dc__now_ns() - group->late_ns, heard_ns = silence_of(group, r);
    const int64_t silence_ns = heard_ns < awake_ns ? heard_ns : awake_ns;
    pthread_mutex_lock(&group->mutex);
    const int64_t machine_ns = time_without_answer(group, r);
    const bool vanished = silence_ns >= limit_ns && machine_ns >= machine_limit(group);
    if (!vanished && silence_ns < limit_ns + group->heartbeat_ns) { /* must not fill a stopped process's buffers */
      dc__tcp_send_control(group, r, &message);
      group->asked_ns[r] = group->asked_ns[r] != 0 ? group->asked_ns[r] : dc__now_ns();
    }
    pthread_mutex_unlock(&group->mutex);
    if (vanished) {
      fail_vanished(group, r, machine_ns);
    }
  }
}

/* Requires group->mutex, which keeps the communicators' connections open. */
static bool has_data_connection(const dc__tcp_group *group, int32_t r) {
  for (const dc__tcp *c = group->members; c != NULL; c = c->next) {
    struct pollfd data = {.fd = c->fds[r], .events = POLLRDHUP};
    if (data.fd >= 0 && poll(&data, 1, 0) == 0) {
      return true;
    }
  }
  return false;
}

/* Without a control connection neither rank would notice if the other one's machine vanished. The first check is only
 * noted: the other rank may close its data connections before the second one. */
bool dc__tcp_check_ended(dc__tcp_group *group, int32_t r) {
  char host[DC__TCP_PEER], text[DC__TCP_ERROR];
  pthread_mutex_lock(&group->mutex);
  const bool has_data = has_data_connection(group, r);
  pthread_mutex_unlock(&group->mutex);
  if (!has_data || !atomic_exchange(&group->outlived[r], true)) {
    return has_data;
  }
  const int error = atomic_load(&group->error[r]);
  dc__tcp_host_text(group, r, host);
  dc__tcp_error_text(error, text);
  dc__tcp_group_fail_async(
      group, dc__fail(DC_E_PEER_DEAD,
                      "rank %" PRId32 " is cut off from rank %" PRId32
                      ": its control connection from %s %s%s, though one for data stands",
                      r, group->rank, host, error == 0 ? "was closed on the way" : "broke: ", error == 0 ? "" : text));
  return false;
}

void dc__tcp_describe_silence(dc__tcp_group *group, int32_t r, char *text, size_t cap) {
  char host[DC__TCP_PEER];
  size_t length = strlen(text);
  int64_t silence_ns = silence_of(group, r);
  if (is_connected(group, r) && dc__tcp_is_silent(group, r)) {
    dc__tcp_host_text(group, r, host);
    dc__print(text + length, cap - length,
              ", but its machine, %s, does: the process is alive but has been late for %.1f s", host,
              (double)silence_ns / 1e9);
  }
}
