/* Control messages of a group whose ranks are not all connected. */
#include "comm/tcp/overlay/overlay.h"

enum {
  MOST_HOPS = 40,   /* more than any detour around ended ranks takes */
  MOST_QUERIES = 16 /* to a silent neighbour */
};

/* The distance between two ranks on the ring, the shorter way. */
static int32_t ring_distance(int32_t from, int32_t to, int32_t world) {
  const int32_t ahead = (to - from + world) % world;
  return ahead < world - ahead ? ahead : world - ahead;
}

bool dc__tcp_is_neighbour(const dc__tcp_group *group, int32_t r) {
  const int32_t ahead = (r - group->rank + group->world) % group->world, behind = group->world - ahead;
  return !group->overlay || (ahead & (ahead - 1)) == 0 || (behind & (behind - 1)) == 0;
}

static bool overlay_is_open(dc__tcp_group *group, int32_t r) {
  return group->control[r] >= 0 && !group->unreachable[r] && atomic_load(&group->closed[r]) == 0;
}

static int32_t find_nearest(dc__tcp_group *group, int32_t to, int32_t avoided, bool with_silent) {
  int32_t nearest = -1;
  for (int32_t r = 0; r < group->world; r++) {
    if (r != avoided && overlay_is_open(group, r) && (with_silent || !dc__tcp_is_silent(group, r)) &&
        (nearest < 0 || ring_distance(r, to, group->world) < ring_distance(nearest, to, group->world))) {
      nearest = r;
    }
  }
  return nearest;
}

/* Avoids silent neighbours, since a stopped one would hold up messages for others. */
int32_t dc__tcp_next_hop(dc__tcp_group *group, int32_t to, int32_t came_from) {
  if (group->control[to] >= 0) {
    return overlay_is_open(group, to) ? to : -1;
  }
  const int32_t next = find_nearest(group, to, came_from, false);
  return next >= 0 ? next : find_nearest(group, to, came_from, true);
}

/* Whether a neighbour has enough queries: those of all ranks would fill a stopped process's buffers, and break its
 * connection. */
static bool has_many_queries(dc__tcp_group *group, int32_t r) {
  const int64_t heard_ns = atomic_load_explicit(&group->heard_ns[r], memory_order_relaxed);
  if (group->queries[r].heard_ns != heard_ns) {
    group->queries[r].heard_ns = heard_ns;
    group->queries[r].count = 0;
  }
  return group->overlay && ++group->queries[r].count > MOST_QUERIES;
}

/* Answers a query in the place of a neighbour that has left. */
static void answer_for(dc__tcp_group *group, const dc__tcp_control_msg *query) {
  const dc__tcp_control_msg reply = {.kind = DC__TCP_REPLY,
                                     .status = DC__TCP_LEFT,
                                     .mesh = query->mesh,
                                     .query = query->query,
                                     .from = query->to,
                                     .to = query->from};
  if (query->from != group->rank) {
    dc__tcp_pass_on(group, &reply, -1);
  } else {
    dc__tcp_handle_reply(group, query->to, &reply);
  }
}

void dc__tcp_pass_on(dc__tcp_group *group, const dc__tcp_control_msg *message, int32_t came_from) {
  const int32_t next = dc__tcp_next_hop(group, message->to, came_from);
  if (next == message->to && message->kind == DC__TCP_QUERY && has_many_queries(group, next)) {
    return;
  }
  if (next >= 0) {
    dc__tcp_send_directly(group, next, message);
  } else if (message->kind == DC__TCP_QUERY && atomic_load(&group->closed[message->to]) == DC__TCP_CLOSED) {
    answer_for(group, message);
  }
}

bool dc__tcp_route(dc__tcp_group *group, int32_t came_from, dc__tcp_control_msg *message) {
  if (!group->overlay || (message->kind != DC__TCP_QUERY && message->kind != DC__TCP_REPLY)) {
    return false;
  }
  const bool known = message->from >= 0 && message->from < group->world && message->to >= 0 &&
                     message->to < group->world && message->hops >= 0 && message->hops < MOST_HOPS;
  if (known && message->to != group->rank) {
    message->hops++;
    dc__tcp_pass_on(group, message, came_from);
  }
  return !known || message->to != group->rank;
}

void dc__tcp_add_ended(dc__tcp_group *group, int32_t r, int error) {
  if (group->overlay && !dc__rank_set_has(&group->ended, r)) {
    dc__rank_set_add(&group->ended, r);
    group->ended_error = error;
    group->ended_grew = true;
    dc__tcp_signal_arrival(group);
  }
}

void dc__tcp_pass_ended(dc__tcp_group *group) {
  const dc__tcp_control_msg message = {.kind = DC__TCP_ENDED, .status = group->ended_error, .ranks = group->ended};
  if (group->ended_grew && !group->voted && dc__now_ns() >= group->pass_ns) {
    group->ended_grew = false;
    group->pass_ns = dc__now_ns() + DC__TCP_PASS_NS;
    dc__tcp_broadcast_control(group, &message);
  }
}

/* This rank notices the end of a neighbour itself. */
void dc__tcp_handle_ended(dc__tcp_group *group, const dc__tcp_control_msg *message) {
  for (int32_t r = 0; r < group->world; r++) {
    if (r == group->rank || !dc__rank_set_has(&message->ranks, r)) {
      continue;
    }
    if (group->control[r] < 0 && atomic_load(&group->closed[r]) == 0) {
      atomic_store(&group->error[r], message->status);
      atomic_store(&group->closed[r], DC__TCP_DISCONNECTED);
    }
    dc__tcp_add_ended(group, r, message->status);
  }
  dc__tcp_decide_failure(group);
}
