/* The parts into which a communicator's ranks are divided by colors. Each transport makes its own new communicators. */
#ifndef DC_COMM_SPLIT_H
#define DC_COMM_SPLIT_H

#include "comm/comm.h"

/* This rank's part. world = 0: it is in none, and its function makes no communicator. */
struct dc__split {
  int32_t rank, world;    /* in the new communicator */
  int32_t leader;         /* the old rank of its rank 0 */
  const int32_t *members; /* the old ranks of all, in the new order; for the time of the call */
  uint64_t name[2];       /* random words of the leader's, the same on all ranks of the part */
};

/* For transports: `count` words of each rank, as dc__comm_all_gather_int64(). */
dc_status dc__split_exchange(dc_comm *comm, const int64_t *own, int64_t count, int64_t *table);
/* Collective. The status with which all ranks of comm have done a step: `status`, or an error that names another rank
 * where this one succeeded. what: the step, for that error. */
dc_status dc__split_agree(const char *what, dc_comm *comm, dc_status status);

#endif
