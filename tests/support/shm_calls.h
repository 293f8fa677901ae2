/* The number of collectives that a rank on threads or processes has begun on a communicator, so that tests need not
 * wait for a fixed time. */
#ifndef DC_TESTS_SHM_CALLS_H
#define DC_TESTS_SHM_CALLS_H

#include <time.h>

#include "comm/shm/shm.h"

static inline uint32_t calls_of(const dc_comm *comm, int32_t rank) {
  const dc__shm *self = (const dc__shm *)comm;
  return atomic_load(&dc__shm_slot_of(self->group, self->channel, rank)->posted.value);
}

static inline void await_call(const dc_comm *comm, int32_t rank, uint32_t before) {
  while (calls_of(comm, rank) <= before) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
}

#endif
