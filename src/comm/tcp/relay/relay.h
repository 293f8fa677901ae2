/* The data of a small collective in rounds. relay.c sends and receives it; relay_data.c says what goes where. */
#ifndef DC_COMM_TCP_RELAY_H
#define DC_COMM_TCP_RELAY_H

#include "comm/tcp/collective.h"

typedef struct dc__tcp_relay {
  dc__tcp_plan *plan;
  int32_t me, world;
  uint64_t digest;                  /* of this rank's call */
  bool alike;                       /* all calls heard of have this digest */
  int64_t part[DC__COMM_MAX_WORLD]; /* bytes of each rank's part of all items, without padding */
  int64_t stride;                   /* the largest part */
  char *blocks;  /* gather: parts of this rank, the one before it, ...; reduction: parts of ways 0, 1, ... */
  char *packed;  /* reduction: blocks to send, and behind them those received */
  int64_t held;  /* bytes in blocks; gather and broadcast */
  char *ignored; /* data of a call that differs */
} dc__tcp_relay;

/* One message in each direction; bytes are 0 if it has no data. */
typedef struct dc__tcp_round {
  int32_t distance, to, from;
  const char *out;
  char *in;
  int64_t out_bytes, in_bytes;
  bool opened, received;
} dc__tcp_round;

/* The rank `steps` after this one, or before it if negative. In a world of 2^n ranks a step flips binary digits, so
 * each round is an exchange between two ranks. That takes half as many connections, and acknowledgements travel with
 * data. */
static inline int32_t dc__tcp_relay_rank(const dc__tcp_relay *c, int32_t steps) {
  if ((c->world & (c->world - 1)) == 0) {
    return c->me ^ (steps < 0 ? -steps : steps);
  }
  return (c->me + steps + c->world) % c->world;
}

dc__tcp_relay dc__tcp_relay_make(dc__tcp_plan *p);
/* Copies this rank's data to scratch memory. */
dc_status dc__tcp_relay_begin(dc__tcp_relay *c);
/* Sets the round's data to send, and where the received data goes. */
void dc__tcp_relay_fill(const dc__tcp_relay *c, dc__tcp_round *round);
/* Stores the data that the round has received. */
void dc__tcp_relay_store(dc__tcp_relay *c, const dc__tcp_round *round);
/* Moves the data to the caller's memory, after the last round. */
void dc__tcp_relay_end(const dc__tcp_relay *c);

#endif
