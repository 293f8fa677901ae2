/* The comparison of calls over another network than the connections: MPI's, where it is the faster one. The rounds are
 * those of relay.c, without data. */
#include "comm/tcp/relay/relay.h"

#include <errno.h>
#include <stddef.h>

/* The messages of the other network and of the connections overtake each other. So a rank that has left may have sent
 * its message before. */
typedef struct carried_round {
  dc__tcp_plan *plan;
  int32_t from;
  int64_t query_ns; /* in an overlay: when to ask whether it left */
  bool left;        /* it said so; its message may be on the way */
} carried_round;

static const int64_t query_pause_ns = INT64_C(1000000000);

/* Without a connection, a rank cannot announce that it leaves. It fails the second time, since its message may have
 * arrived since the last test. */
static dc_status ask_whether_it_left(carried_round *round, const dc__rank_set *from) {
  dc__tcp *self = round->plan->self;
  const atomic_int *closed = &self->group->closed[round->from];
  if (atomic_load(closed) == DC__TCP_DISCONNECTED) {
    return dc__tcp_fail_closed(self->group, round->from, round->plan->op_text);
  }
  round->query_ns = round->query_ns != 0 ? round->query_ns : dc__now_ns() + query_pause_ns;
  if (dc__now_ns() < round->query_ns) {
    return DC_OK;
  }
  dc__tcp_query_ranks(self, from);
  const bool left = self->replies[round->from].state == DC__TCP_LEFT || atomic_load(closed) != 0;
  if (left && round->left) {
    return dc__tcp_fail_left(self->group, round->from, round->plan->op_text);
  }
  round->left = left;
  round->query_ns = 0;
  return DC_OK;
}

/* The rank that this one waits for may have destroyed its communicator, or ended. */
static dc_status check_peer_is_there(carried_round *round, const dc__rank_set *from) {
  const dc__tcp_plan *p = round->plan;
  uint64_t header[2] = {0}; /* its number, and if the rank leaves the last collective that it began */
  if (p->self->fds[round->from] < 0) {
    return ask_whether_it_left(round, from);
  }
  const ssize_t got = dc__tcp_peek(p->self->fds[round->from], header, sizeof header);
  if (got == sizeof header ? header[0] != DC__TCP_SEQ_LEAVE || header[1] >= p->self->seq
                           : got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) {
    return DC_OK;
  }
  return dc__tcp_fail_transfer(p, round->from, got < 0 ? errno : 0);
}

static dc_status check_carried_round(void *arg) {
  carried_round *round = arg;
  dc__rank_set missing = {{0}};
  dc__rank_set_add(&missing, round->from);
  DC__TRY(dc__tcp_check_wait(round->plan, &missing));
  return check_peer_is_there(round, &missing);
}

static dc_status run_carried_round(dc__tcp_relay *c, int32_t to, int32_t from) {
  dc__tcp_plan *p = c->plan;
  const dc__tcp_carrier *carrier = p->self->carrier;
  const dc__tcp_relayed out = {.seq = p->self->seq,
                               .kind = DC__TCP_RELAYED,
                               .digest = c->digest,
                               .word = p->call.word,
                               .alike = c->alike,
                               .same_words = p->same_words};
  dc__tcp_relayed in = {.seq = 0};
  carried_round round = {.plan = p, .from = from};
  const dc__tcp_swap swap = {
      .to = to, .from = from, .out = &out, .in = &in, .bytes = sizeof in, .check = check_carried_round, .arg = &round};
  DC__TRY(carrier->swap(carrier->context, &swap));
  if (in.seq != p->self->seq || in.kind != DC__TCP_RELAYED || in.bytes != 0) {
    p->self->transfers[from].recv_relayed = in; /* of which the error quotes the beginning */
    return dc__tcp_fail_garbled(p, from);
  }
  p->same_words = p->same_words && in.same_words != 0 && in.word == p->call.word;
  c->alike = c->alike && in.alike != 0 && in.digest == c->digest;
  dc__tcp_note_progress(p);
  return DC_OK;
}

dc_status dc__tcp_compare_carried(dc__tcp_plan *p, bool *alike) {
  dc__tcp_relay c = dc__tcp_relay_make(p);
  for (int32_t distance = 1; distance < c.world; distance *= 2) {
    DC__TRY(run_carried_round(&c, dc__tcp_relay_rank(&c, distance), dc__tcp_relay_rank(&c, -distance)));
  }
  *alike = c.alike;
  return DC_OK;
}
