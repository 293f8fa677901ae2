/* The parts into which a communicator's ranks are divided by colors. Each transport makes its own new communicators. */
#ifndef DC_COMM_SPLIT_H
#define DC_COMM_SPLIT_H

#include "comm/comm.h"

/* This rank's part. If world is 0, it is in none, and ops->split makes no communicator for it. */
struct dc__split {
  int32_t rank, world;    /* in the new communicator */
  int32_t leader;         /* the old rank of its rank 0 */
  const int32_t *members; /* the members' old ranks, in the new order; valid during the call */
  uint64_t name[2];       /* random words from the leader, the same on all ranks of the part */
};

/* For transports: `count` words of each rank, as dc__comm_all_gather_int64(). */
dc_status dc__split_exchange(dc_comm *comm, const int64_t *own, int64_t count, int64_t *table);
/* Collective. Tells all ranks of comm whether a step failed on any of them. Returns `status` if that is an error, else
 * an error that names a failed rank, else DC_OK. `what` names the step in that error. */
dc_status dc__split_agree(const char *what, dc_comm *comm, dc_status status);

#endif
