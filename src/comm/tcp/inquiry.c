/* Which rank is the reason why others wait. A rank that waits may wait for one that is held up by a third; so at a
 * deadline, and when a connection broke, it asks the others over the control mesh. Their watchers answer, also while
 * the ranks themselves compute, sleep or wait. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/tcp/tcp.h"

/* Watchers answer at once; what does not answer for so long is stopped, or cut off. */
static const int64_t answer_ns = INT64_C(1000000000);
/* The connections of a process that ended close one after the other; what is sent to it meanwhile makes resets of ends.
 */
static const int64_t end_ns = INT64_C(50000000);

/* ---- what a rank says of itself ---- */

void dc__tcp_wait_begin(dc__tcp_wait *wait, const dc__rank_set *ranks) {
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    atomic_store_explicit(&wait->ranks[i], ranks->words[i], memory_order_relaxed);
  }
  atomic_store_explicit(&wait->waits, 1, memory_order_release);
}

void dc__tcp_wait_end(dc__tcp_wait *wait) {
  atomic_store_explicit(&wait->waits, 0, memory_order_relaxed);
}

/* Adds those for whom it waits, if it does. */
static bool add_wait(dc__tcp_wait *wait, dc__rank_set *ranks) {
  if (atomic_load_explicit(&wait->waits, memory_order_acquire) == 0) {
    return false;
  }
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    ranks->words[i] |= atomic_load_explicit(&wait->ranks[i], memory_order_relaxed);
  }
  return true;
}

static void name_call(const dc__tcp *comm, dc__tcp_notice *answer) {
  answer->op = atomic_load_explicit(&comm->op, memory_order_relaxed);
  answer->id = atomic_load_explicit(&comm->id, memory_order_relaxed);
}

/* What the rank does in communicators other than the one that was asked about: where it waits, else its latest call. */
static void look_elsewhere(dc__tcp_group *group, const dc__tcp *asked, dc__tcp_notice *answer) {
  bool found = false;
  uint64_t latest = 0;
  for (dc__tcp *c = group->members; c != NULL; c = c->next) {
    uint64_t number = atomic_load_explicit(&c->number, memory_order_relaxed);
    bool waits = c != asked && add_wait(&c->wait, &answer->ranks);
    if (waits > found || (waits == found && number > latest)) {
      name_call(c, answer);
      found = waits;
      latest = number;
    }
  }
  if (!found && add_wait(&group->joining, &answer->ranks)) {
    answer->op = 0; /* a communicator that it makes has no operator */
    found = true;
  }
  answer->status = found ? DC__TCP_ELSEWHERE : DC__TCP_AWAY;
}

void dc__tcp_take_question(dc__tcp_group *group, int32_t r, const dc__tcp_notice *question) {
  dc__tcp_notice answer = {.kind = DC__TCP_ANSWER, .mesh = question->mesh, .question = question->question};
  dc__tcp *asked = group->members;
  while (asked != NULL && asked->mesh != question->mesh) {
    asked = asked->next;
  }
  uint64_t reached = asked == NULL ? 0 : atomic_load_explicit(&asked->reached, memory_order_relaxed);
  if (asked == NULL && question->mesh < group->joined) {
    answer.status = DC__TCP_LEFT;
  } else if (asked != NULL && reached >= question->seq) {
    answer.status = DC__TCP_CAME;
    name_call(asked, &answer);
    if (reached == question->seq) {
      (void)add_wait(&asked->wait, &answer.ranks);
    }
  } else if (asked != NULL && add_wait(&asked->wait, &answer.ranks)) {
    answer.status = DC__TCP_ELSEWHERE;
    name_call(asked, &answer);
  } else {
    look_elsewhere(group, asked, &answer);
  }
  if (answer.status == DC__TCP_AWAY || answer.status == DC__TCP_ELSEWHERE) {
    dc__tcp_add_held(group, asked, question, &answer);
  }
  dc__tcp_tell(group, r, &answer);
}

/* ---- asking ---- */

void dc__tcp_take_answer(dc__tcp_group *group, int32_t r, const dc__tcp_notice *answer) {
  if (group->answers != NULL && answer->question == group->question && answer->status >= DC__TCP_AWAY &&
      answer->status <= DC__TCP_LEFT) {
    group->answers[r] = (dc__tcp_answer){.state = answer->status,
                                         .op = answer->op,
                                         .id = answer->id,
                                         .held = answer->seq,
                                         .mesh = answer->mesh,
                                         .waits_for = answer->ranks};
  }
}

/* The ranks asked that are there and have not answered. */
static dc__rank_set unanswered(const dc__tcp_group *group, const dc__rank_set *whom) {
  dc__rank_set silent = {{0}};
  for (int32_t r = 0; r < group->world; r++) {
    bool asked = r != group->rank && dc__rank_set_has(whom, r) && atomic_load(&group->gone[r]) == 0;
    if (asked && group->answers[r].state == DC__TCP_SILENT) {
      dc__rank_set_add(&silent, r);
    }
  }
  return silent;
}

void dc__tcp_ask(dc__tcp *self, const dc__rank_set *whom) {
  dc__tcp_group *group = self->group;
  dc__tcp_notice question = {.kind = DC__TCP_QUESTION, .mesh = self->mesh, .seq = self->seq};
  memset(self->answers, 0, (size_t)group->world * sizeof *self->answers);
  pthread_mutex_lock(&group->asking);
  pthread_mutex_lock(&group->mutex);
  group->answers = self->answers;
  question.question = ++group->question;
  for (int32_t r = 0; r < group->world && !group->voted; r++) {
    if (dc__rank_set_has(whom, r)) {
      dc__tcp_tell(group, r, &question);
    }
  }
  int64_t until = dc__now_ns() + answer_ns;
  group->silent = unanswered(group, whom);
  while (!group->voted && !dc__rank_set_is_empty(&group->silent) && dc__now_ns() < until) {
    dc__tcp_await_news(group, until);
    group->silent = unanswered(group, whom);
  }
  self->silent = group->silent;
  group->answers = NULL;
  pthread_mutex_unlock(&group->mutex);
  pthread_mutex_unlock(&group->asking);
}

void dc__tcp_ask_all(dc__tcp *self) {
  dc__rank_set all;
  memset(&all, 0xff, sizeof all);
  dc__tcp_ask(self, &all);
}

/* ---- who is late ---- */

static dc__rank_set waits_for(const void *context, int32_t r) {
  const dc__tcp *self = context;
  return self->answers[r].waits_for;
}

static int32_t first_of(const dc__rank_set *set, int32_t world) {
  int32_t r = 0;
  while (r < world - 1 && !dc__rank_set_has(set, r)) {
    r++;
  }
  return r;
}

/* What is known of the first of those that are late. */
static void explain(const dc__tcp *self, int32_t r, bool called, char *text, size_t cap) {
  const dc__tcp_answer *answer = &self->answers[r];
  char call[DC__COLL_TEXT];
  dc__coll_describe_tag(call, answer->op, answer->id);
  dc__ranks silent = dc__ranks_of(&self->silent, self->head.world);
  dc__ranks others = dc__ranks_of(&answer->waits_for, self->head.world);
  if (dc__rank_set_has(&self->silent, r)) {
    snprintf(text, cap, "; rank%s %s %s not answer", silent.count > 1 ? "s" : "", silent.text,
             silent.count > 1 ? "do" : "does");
  } else if (answer->state == DC__TCP_SILENT) {
    snprintf(text, cap, "; rank %" PRId32 " cannot be asked: its control connection ended", r);
  } else if (answer->state == DC__TCP_AWAY) {
    snprintf(text, cap, "; rank %" PRId32 " last started %s", r, answer->op == 0 ? "nothing" : call);
  } else if (answer->state == DC__TCP_LEFT) {
    snprintf(text, cap, "; rank %" PRId32 " destroyed its communicator", r);
  } else if (others.count > 0) {
    snprintf(text, cap, "; rank %" PRId32 " waits at %s for rank%s %s", r,
             answer->op == 0 ? "a new communicator" : call, others.count > 1 ? "s" : "", others.text);
  } else if (!called) {
    snprintf(text, cap, "; rank %" PRId32 " says that it came, but what it sent does not arrive", r);
  }
}

dc_status dc__tcp_fail_late(const dc__tcp *self, const dc__rank_set *lacking, bool called, const char *doing) {
  const dc__rank_set late = dc__ranks_late(self->head.rank, self->head.world, lacking, waits_for, self);
  int32_t first = first_of(&late, self->head.world);
  dc__ranks names = dc__ranks_of(&late, self->head.world);
  char more[400] = "";
  called = called && dc__rank_set_has(lacking, first);
  explain(self, first, called, more, sizeof more);
  return dc__fail(DC_E_TIMEOUT, "rank %" PRId32 " waited %.1f s at %s for rank%s %s of %" PRId32 " to %s%s",
                  self->head.rank, (double)self->head.timeout_ns / 1e9, doing, names.count > 1 ? "s" : "", names.text,
                  self->head.world, called ? "send and read all of it" : "come", more);
}

/* ---- connections that ended ---- */

static dc_status fail_destroyed(const dc__tcp_group *group, int32_t r, const char *doing) {
  return dc__fail(DC_E_PEER_DEAD,
                  "rank %" PRId32 " destroyed its communicator while rank %" PRId32 " waited for it at %s", r,
                  group->rank, doing);
}

dc_status dc__tcp_fail_gone(dc__tcp_group *group, int32_t r, const char *doing) {
  char text[DC__TCP_ERROR];
  int error = atomic_load(&group->error[r]);
  if (atomic_load(&group->gone[r]) != DC__TCP_ENDED) {
    return fail_destroyed(group, r, doing);
  }
  dc__tcp_error_text(error, text);
  return dc__fail(DC_E_PEER_DEAD,
                  "rank %" PRId32 " died%s (its connection %s%s) while rank %" PRId32 " waited for it at %s", r,
                  error != 0 ? ", or is cut off" : "", error != 0 ? "broke: " : "ended", error != 0 ? text : "",
                  group->rank, doing);
}

/* A moment, for the end of a rank's control connection, or its vote. */
static void await_end(dc__tcp_group *group, int32_t r) {
  int64_t until = dc__now_ns() + end_ns;
  pthread_mutex_lock(&group->mutex);
  while (!group->voted && atomic_load(&group->gone[r]) == 0 && dc__now_ns() < until) {
    dc__tcp_await_news(group, until);
  }
  pthread_mutex_unlock(&group->mutex);
}

dc_status dc__tcp_fail_lost(dc__tcp *self, int32_t r, int error, bool left, const char *doing) {
  dc__tcp_group *group = self->group;
  char text[DC__TCP_ERROR];
  if (left) {
    DC__TRY(dc__tcp_group_check(group));
    return fail_destroyed(group, r, doing);
  }
  await_end(group, r);
  dc__rank_set whom = {{0}};
  dc__rank_set_add(&whom, r);
  dc__tcp_ask(self, &whom); /* its failure, or its end, may be under way as well */
  DC__TRY(dc__tcp_group_check(group));
  if (atomic_load(&group->gone[r]) != 0) {
    return dc__tcp_fail_gone(group, r, doing);
  }
  if (self->answers[r].state == DC__TCP_LEFT) {
    return fail_destroyed(group, r, doing);
  }
  dc__tcp_error_text(error, text);
  bool silent = self->answers[r].state == DC__TCP_SILENT;
  return dc__fail(silent ? DC_E_PEER_DEAD : DC_E_SYSTEM,
                  "rank %" PRId32 " at %s: the connection to rank %" PRId32 " broke: %s%s", self->head.rank, doing, r,
                  error == 0 ? "it was closed on the way" : text, silent ? "; the rank does not answer" : "");
}
