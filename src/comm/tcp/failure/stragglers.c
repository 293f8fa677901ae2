/* Finds the ranks that delay the others. A missing rank may itself wait for a third one. So at a deadline, and after a
 * broken connection, a rank queries its peers over the control mesh. Their watchers answer even while the ranks
 * compute, sleep or wait. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/tcp/tcp.h"

enum { MOST_ASKED = 16 /* ranks at a time, in an overlay */ };

/* Watchers answer at once: a rank that is silent this long is stopped or cut off. */
static const int64_t reply_timeout_ns = INT64_C(1000000000);
/* A process that ends closes its connections one by one; data sent meanwhile turns a close into a reset. */
static const int64_t close_grace_ns = INT64_C(50000000);

/* ---- this rank's state ---- */

void dc__tcp_wait_begin(dc__tcp_wait *wait, const dc__rank_set *ranks) {
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    atomic_store_explicit(&wait->ranks[i], ranks->words[i], memory_order_relaxed);
  }
  atomic_store_explicit(&wait->waits, 1, memory_order_release);
}

void dc__tcp_wait_end(dc__tcp_wait *wait) {
  atomic_store_explicit(&wait->waits, 0, memory_order_relaxed);
}

/* Adds the ranks that are waited for. False if there is no wait. */
static bool add_wait(dc__tcp_wait *wait, dc__rank_set *ranks) {
  if (atomic_load_explicit(&wait->waits, memory_order_acquire) == 0) {
    return false;
  }
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    ranks->words[i] |= atomic_load_explicit(&wait->ranks[i], memory_order_relaxed);
  }
  return true;
}

static void set_op(const dc__tcp *comm, dc__tcp_control_msg *reply) {
  reply->op = atomic_load_explicit(&comm->op, memory_order_relaxed);
  reply->id = atomic_load_explicit(&comm->id, memory_order_relaxed);
}

/* Reports the other communicators: the one where the rank waits, else its latest call. */
static void find_other_wait(dc__tcp_group *group, const dc__tcp *queried, dc__tcp_control_msg *reply) {
  bool found = false;
  uint64_t latest = 0;
  for (dc__tcp *c = group->members; c != NULL; c = c->next) {
    uint64_t number = atomic_load_explicit(&c->number, memory_order_relaxed);
    bool waits = c != queried && add_wait(&c->wait, &reply->ranks);
    if (waits > found || (waits == found && number > latest)) {
      set_op(c, reply);
      found = waits;
      latest = number;
    }
  }
  if (!found && add_wait(&group->mesh_wait, &reply->ranks)) {
    reply->op = 0; /* a communicator in creation has no operator */
    found = true;
  }
  reply->status = found ? DC__TCP_WAITS_ELSEWHERE : DC__TCP_NOT_WAITING;
}

void dc__tcp_handle_query(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *query) {
  dc__tcp_control_msg reply = {.kind = DC__TCP_REPLY, .mesh = query->mesh, .query = query->query};
  dc__tcp *queried = group->members;
  while (queried != NULL && queried->mesh != query->mesh) {
    queried = queried->next;
  }
  uint64_t reached = queried == NULL ? 0 : atomic_load_explicit(&queried->reached, memory_order_relaxed);
  if (queried == NULL && query->mesh < group->joined) {
    reply.status = DC__TCP_LEFT;
  } else if (group->forming != NULL && group->forming->mesh == query->mesh) {
    reply.status = DC__TCP_ARRIVED;
  } else if (queried != NULL && reached >= query->seq) {
    reply.status = DC__TCP_ARRIVED;
    set_op(queried, &reply);
    if (reached == query->seq) {
      (void)add_wait(&queried->wait, &reply.ranks);
    }
  } else if (queried != NULL && add_wait(&queried->wait, &reply.ranks)) {
    reply.status = DC__TCP_WAITS_ELSEWHERE;
    set_op(queried, &reply);
  } else {
    find_other_wait(group, queried, &reply);
  }
  if (reply.status == DC__TCP_NOT_WAITING || reply.status == DC__TCP_WAITS_ELSEWHERE) {
    dc__tcp_add_blocked(group, queried, query, &reply);
  }
  dc__tcp_send_control(group, r, &reply);
}

/* ---- queries ---- */

void dc__tcp_handle_reply(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *reply) {
  if (group->replies != NULL && reply->query == group->query && reply->status >= DC__TCP_NOT_WAITING &&
      reply->status <= DC__TCP_LEFT) {
    group->replies[r] = (dc__tcp_reply){.state = reply->status,
                                        .op = reply->op,
                                        .id = reply->id,
                                        .blocked_in = reply->seq,
                                        .mesh = reply->mesh,
                                        .waits_for = reply->ranks};
  }
}

/* The connected ranks of the query that have not replied. */
static dc__rank_set find_unanswered(const dc__tcp_group *group, const dc__rank_set *ranks) {
  dc__rank_set unresponsive = {{0}};
  for (int32_t r = 0; r < group->world; r++) {
    bool queried = r != group->rank && dc__rank_set_has(ranks, r) && atomic_load(&group->closed[r]) == 0;
    if (queried && group->replies[r].state == DC__TCP_NO_REPLY) {
      dc__rank_set_add(&unresponsive, r);
    }
  }
  return unresponsive;
}

/* Queries ranks, and adds their replies to those of earlier queries. */
static void query_more(dc__tcp *self, const dc__rank_set *ranks) {
  dc__tcp_group *group = self->group;
  dc__tcp_control_msg query = {.kind = DC__TCP_QUERY, .mesh = self->mesh, .seq = self->seq};
  pthread_mutex_lock(&group->query_mutex);
  pthread_mutex_lock(&group->mutex);
  group->replies = self->replies;
  query.query = ++group->query;
  for (int32_t r = 0; r < group->world && !group->voted; r++) {
    if (dc__rank_set_has(ranks, r)) {
      dc__tcp_send_control(group, r, &query);
    }
  }
  int64_t until = dc__now_ns() + reply_timeout_ns;
  group->unresponsive = find_unanswered(group, ranks);
  while (!group->voted && !dc__rank_set_is_empty(&group->unresponsive) && dc__now_ns() < until) {
    dc__tcp_wait_change(group, until);
    group->unresponsive = find_unanswered(group, ranks);
  }
  dc__rank_set_unite(&self->unresponsive, &group->unresponsive);
  group->replies = NULL;
  pthread_mutex_unlock(&group->mutex);
  pthread_mutex_unlock(&group->query_mutex);
}

static void forget_replies(dc__tcp *self) {
  memset(self->replies, 0, (size_t)self->group->world * sizeof *self->replies);
  self->unresponsive = (dc__rank_set){{0}};
}

void dc__tcp_query_ranks(dc__tcp *self, const dc__rank_set *ranks) {
  forget_replies(self);
  query_more(self, ranks);
}

/* Returns the lowest ranks of a set that were not asked yet, and clears the set. */
static dc__rank_set take_unasked(dc__rank_set *from, dc__rank_set *asked, int32_t world) {
  dc__rank_set some = {{0}};
  for (int32_t r = 0, count = 0; r < world && count < MOST_ASKED; r++) {
    if (dc__rank_set_has(from, r) && !dc__rank_set_has(asked, r)) {
      dc__rank_set_add(&some, r);
      dc__rank_set_add(asked, r);
      count++;
    }
  }
  *from = (dc__rank_set){{0}};
  return some;
}

/* Queries along the chain of waits: many ranks reach their deadline at once, and must not all query all others. */
static void query_along(dc__tcp *self, const dc__rank_set *missing) {
  const int32_t world = self->head.world;
  dc__rank_set next = *missing, asked = {{0}};
  dc__rank_set_add(&asked, self->head.rank);
  forget_replies(self);
  for (;;) {
    const dc__rank_set now = take_unasked(&next, &asked, world);
    if (dc__rank_set_is_empty(&now)) {
      return;
    }
    query_more(self, &now);
    for (int32_t r = 0; r < world; r++) {
      if (dc__rank_set_has(&now, r)) {
        dc__rank_set_unite(&next, &self->replies[r].waits_for);
      }
    }
  }
}

void dc__tcp_query_all(dc__tcp *self) {
  dc__rank_set all;
  memset(&all, 0xff, sizeof all);
  dc__tcp_query_ranks(self, &all);
}

void dc__tcp_query_missing(dc__tcp *self, const dc__rank_set *missing) {
  if (self->group->overlay) {
    query_along(self, missing);
  } else {
    dc__tcp_query_all(self);
  }
}

/* ---- timeouts ---- */

static dc__rank_set waits_for(const void *context, int32_t r) {
  const dc__tcp *self = context;
  return self->replies[r].waits_for;
}

static int32_t lowest_straggler(const dc__rank_set *set, int32_t world) {
  int32_t r = 0;
  while (r < world - 1 && !dc__rank_set_has(set, r)) {
    r++;
  }
  return r;
}

/* Describes the state of a straggler. */
static void describe_straggler(const dc__tcp *self, int32_t r, bool has_header, char *text, size_t cap) {
  const dc__tcp_reply *reply = &self->replies[r];
  char call[DC__COLL_TEXT];
  dc__coll_describe_op(call, reply->op, reply->id);
  dc__rank_list unresponsive = dc__rank_list_of(&self->unresponsive, self->head.world);
  dc__rank_list others = dc__rank_list_of(&reply->waits_for, self->head.world);
  if (dc__rank_set_has(&self->unresponsive, r)) {
    snprintf(text, cap, "; rank%s %s %s not answer", unresponsive.count > 1 ? "s" : "", unresponsive.text,
             unresponsive.count > 1 ? "do" : "does");
    dc__tcp_describe_silence(self->group, r, text, cap);
  } else if (reply->state == DC__TCP_NO_REPLY && atomic_load(&self->group->closed[r]) != 0) {
    snprintf(text, cap, "; rank %" PRId32 " cannot be asked: its control connection ended", r);
  } else if (reply->state == DC__TCP_NOT_WAITING) {
    snprintf(text, cap, "; rank %" PRId32 " last started %s", r, reply->op == 0 ? "nothing" : call);
  } else if (reply->state == DC__TCP_LEFT) {
    snprintf(text, cap, "; rank %" PRId32 " destroyed its communicator", r);
  } else if (others.count > 0) {
    snprintf(text, cap, "; rank %" PRId32 " waits at %s for rank%s %s", r, reply->op == 0 ? "a new communicator" : call,
             others.count > 1 ? "s" : "", others.text);
  } else if (!has_header) {
    snprintf(text, cap, "; rank %" PRId32 " says that it came, but what it sent does not arrive", r);
  }
}

dc_status dc__tcp_fail_timeout(const dc__tcp *self, const dc__rank_set *missing, bool has_header, const char *op_text) {
  const dc__rank_set stragglers = dc__rank_set_stragglers(self->head.rank, self->head.world, missing, waits_for, self);
  int32_t first = lowest_straggler(&stragglers, self->head.world);
  dc__rank_list names = dc__rank_list_of(&stragglers, self->head.world);
  char more[400] = "";
  has_header = has_header && dc__rank_set_has(missing, first);
  describe_straggler(self, first, has_header, more, sizeof more);
  return dc__fail(DC_E_TIMEOUT, "rank %" PRId32 " waited %.1f s at %s for rank%s %s of %" PRId32 " to %s%s",
                  self->head.rank, (double)self->head.timeout_ns / 1e9, op_text, names.count > 1 ? "s" : "", names.text,
                  self->head.world, has_header ? "send and read all of it" : "come", more);
}

/* ---- connections that ended ---- */

dc_status dc__tcp_fail_left(const dc__tcp_group *group, int32_t r, const char *op_text) {
  return dc__fail(DC_E_PEER_DEAD,
                  "rank %" PRId32 " destroyed its communicator while rank %" PRId32 " waited for it at %s", r,
                  group->rank, op_text);
}

dc_status dc__tcp_fail_closed(dc__tcp_group *group, int32_t r, const char *op_text) {
  char text[DC__TCP_ERROR], host[DC__TCP_PEER];
  const int error = atomic_load(&group->error[r]);
  const bool outlived = atomic_load(&group->outlived[r]);
  if (atomic_load(&group->closed[r]) != DC__TCP_DISCONNECTED) {
    return dc__tcp_fail_left(group, r, op_text);
  }
  dc__tcp_error_text(error, text);
  dc__tcp_host_text(group, r, host);
  return dc__fail(DC_E_PEER_DEAD,
                  "rank %" PRId32 " died%s (its connection from %s %s%s%s) while rank %" PRId32 " waited for it at %s",
                  r, error != 0 || outlived ? ", or is cut off" : "", host, error != 0 ? "broke: " : "ended",
                  error != 0 ? text : "", outlived ? ", before those for data" : "", group->rank, op_text);
}

/* Waits briefly for a rank's control connection to end, or for a vote. */
static void wait_closed(dc__tcp_group *group, int32_t r) {
  int64_t until = dc__now_ns() + close_grace_ns;
  pthread_mutex_lock(&group->mutex);
  while (!group->voted && atomic_load(&group->closed[r]) == 0 && dc__now_ns() < until) {
    dc__tcp_wait_change(group, until);
  }
  pthread_mutex_unlock(&group->mutex);
}

dc_status dc__tcp_fail_lost(dc__tcp *self, int32_t r, int error, bool left, const char *op_text) {
  dc__tcp_group *group = self->group;
  char text[DC__TCP_ERROR];
  if (left) {
    DC__TRY(dc__tcp_group_check(group));
    return dc__tcp_fail_left(group, r, op_text);
  }
  wait_closed(group, r);
  dc__rank_set ranks = {{0}};
  dc__rank_set_add(&ranks, r);
  dc__tcp_query_ranks(self, &ranks); /* its vote or its end may still be on the way */
  DC__TRY(dc__tcp_group_check(group));
  if (atomic_load(&group->closed[r]) != 0) {
    return dc__tcp_fail_closed(group, r, op_text);
  }
  if (self->replies[r].state == DC__TCP_LEFT) {
    return dc__tcp_fail_left(group, r, op_text);
  }
  dc__tcp_error_text(error, text);
  bool unresponsive = self->replies[r].state == DC__TCP_NO_REPLY;
  return dc__fail(unresponsive ? DC_E_PEER_DEAD : DC_E_SYSTEM,
                  "rank %" PRId32 " at %s: the connection to rank %" PRId32 " broke: %s%s", self->head.rank, op_text, r,
                  error == 0 ? "it was closed on the way" : text, unresponsive ? "; the rank does not answer" : "");
}
