/* Detects ranks that wait for each other in different communicators. A rank whose user is blocked in a collective, or
 * in the creation of a communicator, queries its peers once, after a second. Of two ranks in a deadlock, the one that
 * blocked later finds it this way. */
#include <stdio.h>

#include "comm/tcp/tcp.h"

static const char forming_text[] = "init or dup"; /* which create communicators */

/* Whether one thread alone has used all communicators of this rank, so that no other can create the next one. */
static bool is_only_user(const dc__tcp_group *group, uint64_t user) {
  bool alone = group->forming == NULL || atomic_load(&group->forming->usage.user) == user;
  for (const dc__tcp *c = group->members; c != NULL; c = c->next) {
    alone = alone && atomic_load(&c->usage.user) == user;
  }
  return alone;
}

/* The one thread that could join the query's collective, or create its communicator. 0: there may be several. */
static uint64_t find_only_user(const dc__tcp_group *group, const dc__tcp *queried) {
  const dc__tcp *used = queried != NULL ? queried : group->members;
  uint64_t user = used == NULL ? 0 : atomic_load(&used->usage.user);
  return user != DC__COMM_SEVERAL_USERS && (queried != NULL || is_only_user(group, user)) ? user : 0;
}

static bool has_requested(const dc__tcp *queried, const dc__tcp_control_msg *query) {
  return queried != NULL && atomic_load(&queried->usage.requested) >= query->seq;
}

/* The values read first are stable: they change only after the querying rank, which is blocked, joins the
 * collective. */
void dc__tcp_add_blocked(const dc__tcp_group *group, const dc__tcp *queried, const dc__tcp_control_msg *query,
                         dc__tcp_control_msg *reply) {
  uint64_t user = find_only_user(group, queried);
  const dc__tcp *forming = group->forming;
  if (forming != NULL && user != 0 && atomic_load(&forming->usage.user) == user && !has_requested(queried, query)) {
    reply->mesh = forming->mesh;
    reply->seq = DC__TCP_FORMING;
  }
  for (const dc__tcp *c = group->members; c != NULL && user != 0; c = c->next) {
    uint64_t blocked_in = atomic_load(&c->usage.blocked_in);
    if (c != queried && blocked_in != 0 && atomic_load(&c->usage.user) == user && !has_requested(queried, query)) {
      reply->mesh = c->mesh;
      reply->seq = blocked_in;
      reply->op = atomic_load_explicit(&c->op, memory_order_relaxed);
      reply->id = atomic_load_explicit(&c->id, memory_order_relaxed);
    }
  }
}

/* Whether the replying rank is blocked in a collective that this rank's blocked user has not requested. The same holds
 * for the creation of a communicator that this rank lacks, if no other thread here could join it. */
static bool is_deadlocked(const dc__tcp *self, uint64_t user, const dc__tcp_reply *reply) {
  for (const dc__tcp *c = self->group->members; c != NULL && reply->blocked_in != 0; c = c->next) {
    if (c != self && c->mesh == reply->mesh) {
      return reply->blocked_in != DC__TCP_FORMING && atomic_load(&c->usage.user) == user &&
             atomic_load(&c->usage.requested) < reply->blocked_in;
    }
  }
  return reply->blocked_in == DC__TCP_FORMING && reply->mesh >= self->group->joined && is_only_user(self->group, user);
}

dc_status dc__tcp_fail_deadlock(dc__tcp *self, const char *op_text) {
  uint64_t user = atomic_load(&self->usage.blocked_in) == self->seq ? dc__comm_blocked_user(&self->head) : 0;
  dc__rank_set own = {{0}}, peer = {{0}};
  const dc__tcp_reply *first = NULL;
  dc__rank_set_add(&own, self->head.rank);
  pthread_mutex_lock(&self->group->mutex);
  for (int32_t r = 0; r < self->head.world && user != 0; r++) {
    const dc__tcp_reply *reply = &self->replies[r];
    if (reply->state == DC__TCP_ARRIVED) {
      dc__rank_set_add(&own, r);
    } else if (is_deadlocked(self, user, reply)) {
      first = first == NULL ? reply : first;
      if (reply->mesh == first->mesh && reply->blocked_in == first->blocked_in) {
        dc__rank_set_add(&peer, r);
      }
    }
  }
  pthread_mutex_unlock(&self->group->mutex);
  if (first == NULL) {
    return DC_OK;
  }
  char peer_text[DC__COLL_TEXT];
  if (first->blocked_in == DC__TCP_FORMING) {
    snprintf(peer_text, sizeof peer_text, "%s", forming_text);
  } else {
    dc__coll_describe_op(peer_text, first->op, first->id);
  }
  return dc__signature_fail_deadlock(self->head.world, &own, op_text, &peer, peer_text);
}

/* Checks the missing ranks without a connection, over which they would have announced that they left. */
static dc_status deadlock_check_left(const dc__tcp *self, const dc__rank_set *missing, const char *op_text) {
  for (int32_t r = 0; self->group->overlay && self->carrier == NULL && r < self->head.world; r++) {
    if (dc__rank_set_has(missing, r) && self->fds[r] < 0 && self->replies[r].state == DC__TCP_LEFT) {
      return dc__tcp_fail_left(self->group, r, op_text);
    }
  }
  return DC_OK;
}

dc_status dc__tcp_check_deadlock(dc__tcp *self, const dc__rank_set *missing, const char *op_text) {
  if (dc__comm_blocked_user(&self->head) == 0 || atomic_exchange(&self->usage.blocked_in, self->seq) == self->seq) {
    return DC_OK;
  }
  dc__tcp_query_missing(self, missing);
  DC__TRY(deadlock_check_left(self, missing, op_text));
  return dc__tcp_fail_deadlock(self, op_text);
}

dc_status dc__tcp_check_forming(dc__tcp *self) {
  dc__tcp_query_all(self);
  return dc__tcp_fail_deadlock(self, forming_text);
}
