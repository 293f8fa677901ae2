/* Ranks that wait for each other in different communicators. A rank whose user is held in a collective asks the others
 * once, after a second, where theirs is held. The later one of two that are crossed learns it so. */
#include "comm/tcp/tcp.h"

/* What is read first lasts at least until the rank that asks makes the call, for which it is held itself. */
void dc__tcp_add_held(const dc__tcp_group *group, const dc__tcp *asked, const dc__tcp_notice *question,
                      dc__tcp_notice *answer) {
  uint64_t user = asked == NULL ? 0 : atomic_load(&asked->use.user);
  for (const dc__tcp *c = group->members; c != NULL && user != 0 && user != DC__COMM_USERS; c = c->next) {
    uint64_t held = atomic_load(&c->use.held);
    if (c != asked && held != 0 && atomic_load(&c->use.user) == user &&
        atomic_load(&asked->use.asked) < question->seq) {
      answer->mesh = c->mesh;
      answer->seq = held;
      answer->op = atomic_load_explicit(&c->op, memory_order_relaxed);
      answer->id = atomic_load_explicit(&c->id, memory_order_relaxed);
    }
  }
}

/* Whether a rank is held in a collective to which this rank's user, held in this one, has not come. */
static bool is_crossed(const dc__tcp *self, uint64_t user, const dc__tcp_answer *answer) {
  for (const dc__tcp *c = self->group->members; c != NULL && answer->held != 0; c = c->next) {
    if (c != self && c->mesh == answer->mesh) {
      return atomic_load(&c->use.user) == user && atomic_load(&c->use.asked) < answer->held;
    }
  }
  return false;
}

dc_status dc__tcp_fail_crossed(dc__tcp *self, const char *doing) {
  uint64_t user = atomic_load(&self->use.held) == self->seq ? dc__comm_held_user(&self->head) : 0;
  dc__rank_set here = {{0}}, there = {{0}};
  const dc__tcp_answer *first = NULL;
  dc__rank_set_add(&here, self->head.rank);
  pthread_mutex_lock(&self->group->mutex);
  for (int32_t r = 0; r < self->head.world && user != 0; r++) {
    const dc__tcp_answer *answer = &self->answers[r];
    if (answer->state == DC__TCP_CAME) {
      dc__rank_set_add(&here, r);
    } else if (is_crossed(self, user, answer)) {
      first = first == NULL ? answer : first;
      if (answer->mesh == first->mesh && answer->held == first->held) {
        dc__rank_set_add(&there, r);
      }
    }
  }
  pthread_mutex_unlock(&self->group->mutex);
  if (first == NULL) {
    return DC_OK;
  }
  char theirs[DC__COLL_TEXT];
  dc__coll_describe_tag(theirs, first->op, first->id);
  return dc__call_fail_crossed(self->head.world, &here, doing, &there, theirs);
}

dc_status dc__tcp_look_crossed(dc__tcp *self, const char *doing) {
  if (dc__comm_held_user(&self->head) == 0 || atomic_exchange(&self->use.held, self->seq) == self->seq) {
    return DC_OK;
  }
  dc__tcp_ask_all(self);
  return dc__tcp_fail_crossed(self, doing);
}
