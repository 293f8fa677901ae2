/* The comparison of calls over another network than the connections: MPI's, where it is the faster one. The rounds are
 * those of relay.c, without data. */
#include "comm/tcp/relay/relay.h"

#include <errno.h>
#include <stddef.h>

typedef struct carried_round {
  dc__tcp_plan *plan;
  int32_t from;
} carried_round;

/* The rank that this one waits for may have destroyed its communicator, or ended. */
static dc_status check_peer_is_there(const dc__tcp_plan *p, int32_t r) {
  uint64_t seq = 0;
  const int fd = p->self->fds[r];
  const ssize_t got = fd < 0 ? (ssize_t)sizeof seq : dc__tcp_peek(fd, &seq, sizeof seq);
  if ((got < 0 && (errno == EAGAIN || errno == EINTR)) || (got > 0 && seq != DC__TCP_SEQ_LEAVE)) {
    return DC_OK;
  }
  return dc__tcp_fail_transfer(p, r, got == 0 ? 0 : errno);
}

static dc_status check_carried_round(void *arg) {
  const carried_round *round = arg;
  dc__rank_set missing = {{0}};
  dc__rank_set_add(&missing, round->from);
  DC__TRY(dc__tcp_check_wait(round->plan, &missing));
  return check_peer_is_there(round->plan, round->from);
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
  carried_round round = {p, from};
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
