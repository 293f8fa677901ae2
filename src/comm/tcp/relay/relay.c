/* Small collectives of many ranks, in rounds. In round k a rank sends to the one 2^k after it, and receives from the
 * one 2^k before it. So it sends log2(world) messages, rounded up, and not one to each rank. In a world of 2^n ranks
 * both are the same rank (dc__tcp_relay_rank()).
 *
 * A message passes on what the sender has heard: whether all calls have one digest, and data. A barrier has no data. A
 * gather passes on the parts of 1, 2, 4... ranks (Bruck), and a broadcast follows a binomial tree. In a reduction each
 * part travels to its owner, in one hop for each binary digit of its distance that is 1. The owner adds the parts in
 * rank order, so results are bitwise equal to those of the direct exchange.
 *
 * Data waits in scratch memory until the last round has shown that all calls are alike. */
#include "comm/tcp/relay/relay.h"

#include <errno.h>

#include "comm/tcp/overlay/overlay.h"

/* ---- messages ---- */

static void begin_send(const dc__tcp_relay *c, const dc__tcp_round *round) {
  const dc__tcp_plan *p = c->plan;
  dc__tcp_transfer *transfer = &p->self->transfers[round->to];
  int64_t bytes = c->alike ? round->out_bytes : 0;
  transfer->relayed = (dc__tcp_relayed){.seq = p->self->seq,
                                        .bytes = (uint64_t)bytes,
                                        .has_checksum = p->has_checksums ? DC__TCP_CHECKSUM : 0,
                                        .kind = DC__TCP_RELAYED,
                                        .digest = c->digest,
                                        .word = p->call.word,
                                        .alike = c->alike,
                                        .same_words = p->same_words};
  transfer->out_count = transfer->out_pos = 0;
  transfer->sent_crc = 0;
  dc__tcp_add_iov(transfer->out, &transfer->out_count, &transfer->relayed, sizeof transfer->relayed);
  dc__tcp_add_iov(transfer->out, &transfer->out_count, round->out, bytes);
  if (p->has_checksums) {
    dc__tcp_add_iov(transfer->out, &transfer->out_count, &transfer->sent_crc, sizeof transfer->sent_crc);
  }
}

/* Prepares to receive and ignore data that belongs to another call. */
static dc_status receive_ignored(dc__tcp_relay *c, dc__tcp_round *round, int64_t bytes) {
  c->alike = false;
  dc__free(c->ignored);
  c->ignored = dc__calloc(1, (size_t)bytes + 1);
  round->in = c->ignored;
  round->in_bytes = bytes;
  return c->ignored == NULL ? DC_E_NO_MEMORY : DC_OK;
}

/* Handles the beginning of a message, after which its data comes. It may be a call in full, from a rank for which the
 * collective is not small; that is left for the exchange. */
static dc_status open_message(dc__tcp_relay *c, dc__tcp_round *round) {
  dc__tcp_transfer *transfer = &c->plan->self->transfers[round->from];
  const dc__tcp_relayed *message = &transfer->recv_relayed;
  round->opened = true;
  if (message->seq != c->plan->self->seq || (message->kind != 0 && message->kind != DC__TCP_RELAYED) ||
      message->bytes > (message->kind == 0 ? UINT64_MAX : DC__TCP_MAX_RELAYED) ||
      (message->has_checksum != 0 && message->has_checksum != DC__TCP_CHECKSUM)) {
    return dc__tcp_fail_garbled(c->plan, round->from);
  }
  if (message->kind == 0) {
    c->alike = false;
    round->received = true;
    return DC_OK;
  }
  c->plan->same_words = c->plan->same_words && message->same_words != 0 && message->word == c->plan->call.word;
  if (!c->alike || message->alike == 0 || message->digest != c->digest) {
    DC__TRY(receive_ignored(c, round, (int64_t)message->bytes));
  } else if (message->bytes != (uint64_t)round->in_bytes) {
    return dc__tcp_fail_size(c->plan, round->from, message->bytes, (uint64_t)round->in_bytes);
  }
  transfer->in_count = transfer->in_pos = 0;
  dc__tcp_add_iov(transfer->in, &transfer->in_count, round->in, round->in_bytes);
  if (message->has_checksum != 0) {
    transfer->received_crc = dc__crc32c(0, message, sizeof *message);
    dc__tcp_add_iov(transfer->in, &transfer->in_count, &transfer->peer_crc, sizeof transfer->peer_crc);
  }
  return DC_OK;
}

static dc_status receive_message(dc__tcp_relay *c, dc__tcp_round *round, bool *progress) {
  dc__tcp_plan *p = c->plan;
  dc__tcp_transfer *transfer = &p->self->transfers[round->from];
  if (!round->opened) {
    bool reads = dc__tcp_read_header(transfer, sizeof transfer->recv_relayed, progress);
    if (!reads || dc__tcp_has_left(transfer)) {
      return dc__tcp_fail_transfer(p, round->from, errno);
    }
    if (transfer->bytes_received < sizeof transfer->recv_relayed) {
      return DC_OK;
    }
    DC__TRY(open_message(c, round));
  }
  if (round->received) {
    return DC_OK;
  }
  DC__TRY(dc__tcp_receive_some(p, round->from, progress));
  if (transfer->in_pos == transfer->in_count) {
    DC__TRY(dc__tcp_compare_checksum(p, round->from));
    round->received = true;
    transfer->bytes_received = 0;
  }
  return DC_OK;
}

static dc_status wait_for_round(dc__tcp_plan *p, const dc__tcp_round *round, bool sent) {
  dc__tcp *self = p->self;
  dc__rank_set missing = {{0}};
  int32_t count = 0;
  if (!round->received) {
    self->polls[count++] = (struct pollfd){.fd = self->fds[round->from], .events = POLLIN};
    dc__rank_set_add(&missing, round->from);
  }
  if (!sent) {
    self->polls[count++] = (struct pollfd){.fd = self->fds[round->to], .events = POLLOUT};
  }
  if (round->received) {
    dc__rank_set_add(&missing, round->to);
  }
  return dc__tcp_wait_ready(p, count, &missing, round->received);
}

/* Sends and reads as much as it can, once there are connections. */
static dc_status move_round(dc__tcp_relay *c, dc__tcp_round *round, bool *sent_some, bool *received_some) {
  const dc__tcp_plan *p = c->plan;
  DC__TRY(dc__tcp_take_connection(p, round->to, sent_some));
  DC__TRY(dc__tcp_take_connection(p, round->from, received_some));
  if (p->self->fds[round->to] >= 0) {
    DC__TRY(dc__tcp_send_some(p, round->to, sent_some));
  }
  return round->received || p->self->fds[round->from] < 0 ? DC_OK : receive_message(c, round, received_some);
}

static dc_status run_round(dc__tcp_relay *c, dc__tcp_round *round) {
  dc__tcp_plan *p = c->plan;
  dc__rank_set both = {{0}};
  dc__rank_set_add(&both, round->to);
  dc__rank_set_add(&both, round->from);
  DC__TRY(dc__tcp_connect_lower(p, &both));
  begin_send(c, round);
  for (;;) {
    bool sent_some = false, received_some = false;
    const dc__tcp_transfer *out = &p->self->transfers[round->to];
    DC__TRY(move_round(c, round, &sent_some, &received_some));
    bool sent = out->out_pos == out->out_count;
    if (sent && round->received) {
      return DC_OK;
    }
    if (sent_some || received_some) {
      dc__tcp_note_progress(p);
    }
    if (!received_some) { /* sending alone brings no input, so it waits before it reads again */
      DC__TRY(wait_for_round(p, round, sent));
    }
  }
}

static dc_status run_rounds(dc__tcp_relay *c, bool has_data) {
  DC__TRY(has_data ? dc__tcp_relay_begin(c) : DC_OK);
  for (int32_t distance = 1; distance < c->world; distance *= 2) {
    dc__tcp_round round = {
        .distance = distance, .to = dc__tcp_relay_rank(c, distance), .from = dc__tcp_relay_rank(c, -distance)};
    if (has_data && c->alike) {
      dc__tcp_relay_fill(c, &round);
    }
    DC__TRY(run_round(c, &round));
    if (has_data && c->alike) {
      dc__tcp_relay_store(c, &round);
    }
  }
  if (has_data && c->alike) {
    dc__tcp_relay_end(c);
  }
  return DC_OK;
}

dc__tcp_relay dc__tcp_relay_make(dc__tcp_plan *p) {
  return (dc__tcp_relay){.plan = p,
                         .me = p->self->head.rank,
                         .world = p->self->head.world,
                         .digest = dc__signature_digest(&p->call),
                         .alike = p->call.missing_recv == 0}; /* else an error, which the exchange finds */
}

dc_status dc__tcp_run_small(dc__tcp_plan *p, bool with_data, bool *alike) {
  dc__tcp_relay c = dc__tcp_relay_make(p);
  dc_status status = run_rounds(&c, with_data && p->has_data);
  dc__free(c.ignored);
  *alike = c.alike;
  return status;
}

/* Runs as a gather of bytes, whose own calls all ranks take to be alike. */
dc_status dc__tcp_gather_calls(const dc__tcp_plan *p, dc__signature *calls) {
  const int64_t bytes = sizeof *calls, world = p->self->head.world;
  dc__coll gather = {.kind = DC__COLL_GATHER, .count = 1, .tag = p->coll->tag};
  dc__range *ranges = dc__calloc((size_t)world, sizeof *ranges);
  if (ranges == NULL) {
    return DC_E_NO_MEMORY;
  }
  for (int32_t r = 0; r < world; r++) {
    ranges[r] = (dc__range){.begin = r * bytes, .count = bytes};
  }
  gather.items[0] =
      (dc__coll_item){.send = &p->call, .recv = calls, .ranges = ranges, .total = world * bytes, .dtype = DC_UINT8};
  dc__tcp_plan all = *p;
  dc__tcp_relay c = {.plan = &all, .me = p->self->head.rank, .world = (int32_t)world, .alike = true};
  all.coll = &gather;
  const dc_status status = run_rounds(&c, true);
  dc__free(c.ignored);
  dc__free(ranges);
  return status != DC_OK || c.alike ? status : dc__tcp_fail_garbled(p, p->self->head.rank);
}
