/* Detects ranks that wait for each other on different channels. The values read here are stable: counters only grow,
 * and a blocked thread stays blocked until the reading rank, itself blocked, joins its collective. So reads at
 * different times form a consistent snapshot. */
#include "comm/rank_set.h"
#include "comm/shm/shm.h"

static dc__comm_usage *usage_of(const dc__shm *self, int32_t channel, int32_t rank) {
  return &dc__shm_slot_of(self->group, channel, rank)->usage;
}

/* Whether `user`, a blocked thread of rank r, is the only one that could call on a channel. Either it alone has used
 * the channel. Or the rank has not joined the channel, and this thread alone has used all that it has joined. */
static bool is_only_user(const dc__shm *self, int32_t channel, int32_t r, uint64_t user) {
  uint64_t joined = atomic_load(&usage_of(self, channel, r)->user);
  if (joined != 0) {
    return joined == user;
  }
  for (int32_t c = 0; c < dc__shm_channel_count(self->group); c++) {
    uint64_t of_channel = atomic_load(&usage_of(self, c, r)->user);
    if (of_channel != 0 && of_channel != user) {
      return false;
    }
  }
  return true;
}

/* The collective on another channel that blocks rank r's user and that this rank's blocked user has not requested; 0:
 * none. */
static uint64_t blocked_collective(const dc__shm *self, uint64_t user, int32_t channel, int32_t r) {
  const dc__comm_usage *peer = usage_of(self, channel, r), *own = usage_of(self, channel, self->head.rank);
  uint64_t number = atomic_load(&peer->blocked_in);
  uint64_t other = atomic_load(&peer->user);
  bool same_users =
      other != DC__COMM_SEVERAL_USERS && is_only_user(self, self->channel, r, other) && user == atomic_load(&own->user);
  return number != 0 && same_users && atomic_load(&own->requested) < number ? number : 0;
}

static bool find_cycle(const dc__shm *self, uint64_t user, dc__shm_wait_cycle *found) {
  for (int32_t r = 0; r < self->head.world; r++) {
    for (int32_t c = 0; r != self->head.rank && c < dc__shm_channel_count(self->group); c++) {
      uint64_t number = c == self->channel ? 0 : blocked_collective(self, user, c, r);
      if (number != 0 && atomic_load(&usage_of(self, self->channel, r)->requested) < self->calls) {
        *found = (dc__shm_wait_cycle){.rank = r, .channel = c, .number = number};
        return true;
      }
    }
  }
  return false;
}

/* The ranks that are blocked in a collective. */
static dc__rank_set blocked_ranks(const dc__shm *self, int32_t channel, uint64_t number) {
  dc__rank_set set = {{0}};
  for (int32_t r = 0; r < self->head.world; r++) {
    if (atomic_load(&usage_of(self, channel, r)->blocked_in) == number) {
      dc__rank_set_add(&set, r);
    }
  }
  return set;
}

static dc_status fail_deadlock(const dc__shm *self, const dc__coll *coll, const dc__shm_wait_cycle *cycle) {
  dc__rank_set own = blocked_ranks(self, self->channel, self->calls);
  dc__rank_set peer = blocked_ranks(self, cycle->channel, cycle->number);
  dc__rank_set_add(&peer, cycle->rank); /* another failure may have unblocked it meanwhile */
  char own_text[DC__COLL_TEXT];
  char peer_text[DC__COLL_TEXT];
  const dc__shm_slot *slot = dc__shm_slot_of(self->group, cycle->channel, cycle->rank);
  dc__coll_describe_op(own_text, coll->tag.op, coll->tag.id);
  dc__coll_describe_op(peer_text, atomic_load(&slot->last_op), atomic_load(&slot->last_id));
  return dc__signature_fail_deadlock(self->head.world, &own, own_text, &peer, peer_text);
}

dc_status dc__shm_check_deadlock(dc__shm *self, const dc__coll *coll) {
  dc__shm_wait_cycle *seen = &self->cycle;
  uint64_t user = dc__comm_blocked_user(&self->head);
  dc__shm_wait_cycle now = {.since = 0};
  if (user != 0) {
    atomic_store(&self->head.usage->blocked_in, self->calls);
  }
  if (user == 0 || !find_cycle(self, user, &now)) {
    seen->since = 0;
    return DC_OK;
  }
  if (seen->since == 0 || seen->rank != now.rank || seen->channel != now.channel || seen->number != now.number) {
    now.since = dc__now_ns();
    *seen = now;
    return DC_OK;
  }
  return dc__now_ns() - seen->since < DC__COMM_DEADLOCK_NS ? DC_OK : fail_deadlock(self, coll, seen);
}
