/* Ranks that wait for each other in different channels. What is read here only grows or lasts: a thread that is held in
 * a collective stays so until the collective is done, and that needs a call of the rank that reads, which is held
 * itself. So what was true at different moments of one look was true at one moment as well. */
#include "comm/local/local.h"
#include "comm/ranks.h"

static dc__comm_use *use_of(const dc__local *self, int32_t channel, int32_t rank) {
  return &dc__local_slot_of(self->group, channel, rank)->use;
}

/* The collective on another channel in which rank r's user of this channel is held, and to which this rank's user, held
 * here, has not come; 0: none. */
static uint64_t held_on(const dc__local *self, uint64_t user, int32_t channel, int32_t r) {
  const dc__comm_use *there = use_of(self, channel, r), *here = use_of(self, channel, self->head.rank);
  uint64_t number = atomic_load(&there->held);
  uint64_t other = atomic_load(&there->user);
  bool same_users = other != DC__COMM_USERS && other == atomic_load(&use_of(self, self->channel, r)->user) &&
                    user == atomic_load(&here->user);
  return number != 0 && same_users && atomic_load(&here->asked) < number ? number : 0;
}

static bool find(const dc__local *self, uint64_t user, dc__local_crossing *found) {
  for (int32_t r = 0; r < self->head.world; r++) {
    for (int32_t c = 0; r != self->head.rank && c < dc__local_channel_count(self->group); c++) {
      uint64_t number = c == self->channel ? 0 : held_on(self, user, c, r);
      if (number != 0 && atomic_load(&use_of(self, self->channel, r)->asked) < self->calls) {
        *found = (dc__local_crossing){.rank = r, .channel = c, .number = number};
        return true;
      }
    }
  }
  return false;
}

/* The ranks that are held in a collective. */
static dc__rank_set held_in(const dc__local *self, int32_t channel, uint64_t number) {
  dc__rank_set set = {{0}};
  for (int32_t r = 0; r < self->head.world; r++) {
    if (atomic_load(&use_of(self, channel, r)->held) == number) {
      dc__rank_set_add(&set, r);
    }
  }
  return set;
}

static dc_status fail_crossed(const dc__local *self, const dc__coll *coll, const dc__local_crossing *crossing) {
  dc__rank_set here = held_in(self, self->channel, self->calls);
  dc__rank_set there = held_in(self, crossing->channel, crossing->number);
  dc__rank_set_add(&there, crossing->rank); /* it may have ended by now, for another failure */
  char mine[DC__COLL_TEXT];
  char theirs[DC__COLL_TEXT];
  const dc__local_slot *slot = dc__local_slot_of(self->group, crossing->channel, crossing->rank);
  dc__coll_describe_tag(mine, coll->tag.op, coll->tag.id);
  dc__coll_describe_tag(theirs, atomic_load(&slot->last_op), atomic_load(&slot->last_id));
  return dc__call_fail_crossed(self->head.world, &here, mine, &there, theirs);
}

dc_status dc__local_look_crossed(dc__local *self, const dc__coll *coll) {
  dc__local_crossing *seen = &self->crossing;
  uint64_t user = dc__comm_held_user(&self->head);
  dc__local_crossing now = {.since = 0};
  if (user != 0) {
    atomic_store(&self->head.use->held, self->calls);
  }
  if (user == 0 || !find(self, user, &now)) {
    seen->since = 0;
    return DC_OK;
  }
  if (seen->since == 0 || seen->rank != now.rank || seen->channel != now.channel || seen->number != now.number) {
    now.since = dc__now_ns();
    *seen = now;
    return DC_OK;
  }
  return dc__now_ns() - seen->since < DC__COMM_CROSSED_NS ? DC_OK : fail_crossed(self, coll, seen);
}
