/* Agreement on one failure for the whole group, since several ranks may fail at once with different texts. Each rank
 * broadcasts one vote: its own failure, or the first one it received. Once all reachable ranks have voted, all ranks
 * know the same votes and pick the same one. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include "comm/escape.h"
#include "comm/tcp/overlay/overlay.h"

enum { SEND_NS = 1000000000 /* send timeout of a message, for a peer that does not read */ };
/* How long to wait for the votes of silent ranks, whose machine is gone or whose process is stopped. */
static const int64_t vote_timeout_ns = INT64_C(2000000000);
static const int64_t overlay_vote_timeout_ns = INT64_C(3000000000); /* votes pass through other ranks */

dc_status dc__tcp_group_check(dc__tcp_group *group) {
  if (atomic_load_explicit(&group->failed, memory_order_acquire) == 0) {
    return DC_OK;
  }
  pthread_mutex_lock(&group->mutex);
  dc_status status = dc__failure_raise(&group->failure);
  pthread_mutex_unlock(&group->mutex);
  return status;
}

bool dc__tcp_is_failure(int32_t status, char text[DC__TCP_TEXT]) {
  text[DC__TCP_TEXT - 1] = '\0';
  dc__escape(text, DC__TCP_TEXT, text, strlen(text));
  return status != DC_OK && strcmp(dc_status_name(status), "DC_E_UNKNOWN") != 0 && text[0] != '\0';
}

/* ---- control messages ---- */

static void failure_send(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message, int64_t deadline) {
  if (group->control[r] >= 0 && !group->unreachable[r]) {
    /* A partial message breaks the framing, so nothing more is sent. */
    group->unreachable[r] = !dc__tcp_send_all(group->control[r], message, sizeof *message, deadline);
  }
}

void dc__tcp_send_directly(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message) {
  failure_send(group, r, message, dc__now_ns() + SEND_NS);
}

void dc__tcp_send_control(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *message) {
  dc__tcp_control_msg addressed = *message;
  addressed.from = group->rank;
  addressed.to = r;
  if (r != group->rank) {
    dc__tcp_pass_on(group, &addressed, -1);
  }
}

void dc__tcp_broadcast_control(dc__tcp_group *group, const dc__tcp_control_msg *message) {
  int64_t deadline = dc__now_ns() + SEND_NS;
  for (int32_t r = 0; r < group->world; r++) {
    failure_send(group, r, message, deadline);
  }
}

/* ---- votes ---- */

/* A timeout or a death is often the consequence of another rank's failure, which is preferred. */
static int32_t severity_of(int32_t status) {
  return status == DC_E_TIMEOUT ? 2 : status == DC_E_PEER_DEAD ? 1 : 0;
}

bool dc__tcp_vote_outranks(const dc__tcp_control_msg *a, const dc__tcp_control_msg *b) {
  int32_t first = severity_of(a->status), second = severity_of(b->status);
  return first != second ? first < second : a->rank < b->rank;
}

static void cast_vote(dc__tcp_group *group, const dc__tcp_control_msg *vote) {
  group->vote = *vote;
  dc__tcp_begin_votes(group, vote);
  group->voted = true;
  group->vote_deadline = dc__now_ns() + (group->overlay ? overlay_vote_timeout_ns : vote_timeout_ns);
  dc__tcp_broadcast_control(group, &group->vote);
}

static bool has_all_votes(const dc__tcp_group *group) {
  for (int32_t r = 0; r < group->world; r++) {
    if (r != group->rank && atomic_load(&group->closed[r]) == 0 && !dc__rank_set_has(&group->votes, r) &&
        !dc__rank_set_has(&group->vote.ranks, r)) {
      return false;
    }
  }
  return true;
}

/* Without a watcher no votes are received. */
void dc__tcp_decide_failure(dc__tcp_group *group) {
  bool due = !group->watcher_running || dc__now_ns() >= group->vote_deadline;
  if (!group->voted || atomic_load(&group->failed) != 0 || !(due || has_all_votes(group))) {
    return;
  }
  dc__tcp_pass_votes_to_all(group); /* before this rank leaves */
  (void)dc__fail(group->vote.status, "%s", group->vote.text);
  dc__failure_keep(&group->failure, group->vote.status);
  atomic_store_explicit(&group->failed, 1, memory_order_release);
  (void)eventfd_write(group->failure_event, 1); /* cannot block: the counter is far from full */
  pthread_cond_broadcast(&group->changed);
}

void dc__tcp_handle_vote(dc__tcp_group *group, int32_t r, dc__tcp_control_msg *vote) {
  if (atomic_load(&group->failed) != 0 || !dc__tcp_is_failure(vote->status, vote->text)) {
    return;
  }
  dc__rank_set_add(&group->votes, r);
  if (!group->voted) {
    cast_vote(group, vote);
  } else {
    const bool better = dc__tcp_vote_outranks(vote, &group->vote);
    dc__tcp_merge_votes(group, r, vote);
    if (better) {
      group->vote = *vote; /* few are better than all before */
      dc__tcp_pass_votes_to_all(group);
    }
  }
  dc__tcp_decide_failure(group);
}

/* Requires group->mutex. */
static void propose_failure(dc__tcp_group *group, dc_status status) {
  if (!group->voted) {
    dc__tcp_control_msg own = {
        .kind = DC__TCP_FAILURE, .status = status, .rank = group->rank, .ranks = group->unresponsive};
    const char *text = dc_last_error()[0] != '\0' ? dc_last_error() : dc_status_string(status);
    dc__escape(own.text, sizeof own.text, text, strlen(text));
    cast_vote(group, &own);
  }
  dc__tcp_decide_failure(group);
}

void dc__tcp_group_fail_async(dc__tcp_group *group, dc_status status) {
  pthread_mutex_lock(&group->mutex);
  propose_failure(group, status);
  pthread_mutex_unlock(&group->mutex);
}

void dc__tcp_group_fail(dc__tcp_group *group, dc_status status) {
  pthread_mutex_lock(&group->mutex);
  propose_failure(group, status);
  while (atomic_load(&group->failed) == 0) {
    dc__tcp_wait_change(group, group->vote_deadline);
    dc__tcp_decide_failure(group);
  }
  pthread_mutex_unlock(&group->mutex);
}

void dc__tcp_wait_change(dc__tcp_group *group, int64_t until) {
  const struct timespec at = {until / 1000000000, until % 1000000000};
  (void)pthread_cond_timedwait(&group->changed, &group->mutex, &at);
}
