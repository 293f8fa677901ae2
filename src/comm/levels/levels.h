/* Collectives in two levels, for ranks that lie on several machines.
 *
 * The ranks are divided into blocks of 2^k consecutive ranks, each on one machine. A rank has a communicator for its
 * block, over shared memory, and one for its column, over the network: the ranks at the same place in all blocks.
 * Reductions add along a tree, in which each block is a complete subtree and the blocks form the rest. So sums in
 * blocks, and then in columns, are bitwise equal to those of the direct exchange. */
#ifndef DC_COMM_LEVELS_H
#define DC_COMM_LEVELS_H

#include "comm/host_transport.h"

enum {
  DC__LEVELS_DIRECT_BYTES = 1 << 14 /* smaller collectives gain less from fewer bytes than two more handshakes cost */
};

typedef struct dc__levels {
  struct dc_comm head;
  dc_comm *whole;                   /* all ranks, over the network: handshakes, and the direct exchange */
  dc_comm *block;                   /* rank % length is this rank's place in it */
  dc_comm *column;                  /* rank / length is this rank's place in it */
  int32_t length, blocks;           /* ranks in a block; blocks in the world */
  uint64_t node[2];                 /* a hash of the machine's name */
  pthread_mutex_t collective_mutex; /* one collective at a time; guards what follows */
  dc__range *ranges;                /* dc__levels_range_count() of them: a group's in a column, or an all-to-all's */
  dc__coll_item *items;             /* a group's items, once for every block */
  char *scratch;                    /* partial sums of this block, and sums over all ranks */
  int64_t scratch_bytes;
} dc__levels;

static inline size_t dc__levels_range_count(const dc__levels *self) {
  const size_t group = (size_t)self->blocks * DC__COMM_GROUP;
  const size_t all_to_all = 2 * (size_t)self->length * ((size_t)self->blocks + 1); /* of the whole, and of the block */
  return group > all_to_all ? group : all_to_all;
}

/* levels.c: brackets a wait in the block, during which the network must make progress. It may have accepted data that
 * it has not sent yet. A rank of another machine waits for that data, and ranks of this machine wait for that rank. */
void dc__levels_progress(const dc__levels *self, bool waits);

/* collective.c */
void dc__levels_run(dc_comm *comm, const dc__coll *coll);

/* Whether two levels with blocks of this length save enough network traffic to pay for their handshakes. */
bool dc__levels_pay(const dc__coll *coll, int32_t length);

/* The type of partial sums. */
int32_t dc__levels_sum_dtype(const dc__coll_item *item);

#endif
