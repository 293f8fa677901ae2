/* MPI's functions as libdc calls them, some of which a test replaces. */
#ifndef DC_TESTS_MPI_CALLS_H
#define DC_TESTS_MPI_CALLS_H

#include "comm/mpi/mpi.h"

static const dc__mpi_calls *real_calls;
static dc__mpi_calls calls;

/* To be called once there is a communicator. */
static inline void replace_calls(void) {
  real_calls = dc__mpi_runtime_state.library->calls;
  calls = *real_calls;
  dc__mpi_runtime_state.library->calls = &calls;
}

#endif
