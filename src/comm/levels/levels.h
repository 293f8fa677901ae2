/* Collectives in two levels, for ranks that lie on several machines.
 *
 * The ranks are cut into blocks of 2^k that follow each other, each on one machine. A rank has a communicator of its
 * block over shared memory, and one of its column: the ranks at the same place of all blocks, over the network. A block
 * is a complete subtree of the tree in which reductions add, and the tree over blocks has the shape of the rest. So
 * sums in blocks, then in columns, have the bits of the direct exchange. */
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
  int32_t length, blocks;           /* of a block; of the world */
  uint64_t node[2];                 /* of the machine */
  pthread_mutex_t collective_mutex; /* one collective at a time; guards what follows */
  dc__range *ranges;                /* dc__levels_range_count(): of a group in a column, or of an all-to-all */
  dc__coll_item *items;             /* of a group, for every block */
  char *scratch;                    /* partial sums of this block, and sums over all ranks */
  int64_t scratch_bytes;
} dc__levels;

static inline size_t dc__levels_range_count(const dc__levels *self) {
  const size_t group = (size_t)self->blocks * DC__COMM_GROUP;
  const size_t all_to_all = 2 * (size_t)self->length * ((size_t)self->blocks + 1); /* of the whole, and of the block */
  return group > all_to_all ? group : all_to_all;
}

/* levels.c: brackets a wait in the block. A rank of another machine may wait for data of the network, which has taken
 * them, but not yet sent them. With it wait this machine's ranks that need its part. */
void dc__levels_progress(const dc__levels *self, bool waits);

/* collective.c */
void dc__levels_run(dc_comm *comm, const dc__coll *coll);

/* Whether two levels with blocks of this length bring fewer bytes to a machine, and so many fewer that it pays. */
bool dc__levels_pay(const dc__coll *coll, int32_t length);

/* The type of partial sums. */
int32_t dc__levels_sum_dtype(const dc__coll_item *item);

#endif
