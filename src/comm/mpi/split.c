/* Splits MPI communicators with a deadline. MPI_Comm_split blocks, and has no nonblocking variant. So a separate thread
 * calls it, which is left behind if a rank is lost meanwhile. */
#include <pthread.h>
#include <string.h>

#include "comm/mpi/mpi.h"

/* A call of MPI_Comm_split, which may outlive its caller. */
typedef struct split_call {
  atomic_int refs; /* the caller's and the thread's */
  atomic_bool done;
  const dc__mpi_library *mpi;
  dc__mpi_handle comm, part;
  int color, key, error;
} split_call;

static void split_call_release(split_call *call) {
  if (atomic_fetch_sub(&call->refs, 1) == 1) {
    dc__free(call);
  }
}

static void *split_call_main(void *arg) {
  split_call *call = arg;
  call->error = call->mpi->calls->comm_split(call->mpi, call->comm, call->color, call->key, &call->part);
  atomic_store(&call->done, true);
  split_call_release(call);
  return NULL;
}

/* A rank in no part gets an MPI communicator of its own. */
static dc_status start_split_call(const dc__mpi *self, const dc__split *split, split_call **out) {
  pthread_t thread;
  split_call *call = dc__calloc(1, sizeof *call);
  if (call == NULL) {
    return DC_E_NO_MEMORY;
  }
  atomic_init(&call->refs, 2);
  atomic_init(&call->done, false);
  call->mpi = self->mpi;
  call->comm = self->comm;
  call->color = split->world > 0 ? split->leader : self->head.world + self->head.rank;
  call->key = split->rank;
  const int error = pthread_create(&thread, NULL, split_call_main, call);
  if (error != 0) {
    dc__free(call);
    return dc__fail(DC_E_SYSTEM, "dc_comm_split: pthread_create: %s", strerror(error));
  }
  (void)pthread_detach(thread);
  *out = call;
  return DC_OK;
}

/* A rank that cannot make the call, or leaves it behind, fails the group: the others wait for it in MPI. */
static dc_status call_split(dc__mpi *self, const dc__split *split, dc__mpi_wait *wait, dc__mpi_handle *part) {
  split_call *call = NULL;
  dc_status status = start_split_call(self, split, &call);
  wait->count = 1;
  if (status == DC_OK) {
    wait->call = &call->done;
    status = dc__mpi_wait_all(wait);
  } else {
    dc__mpi_abandon(wait); /* the others' calls, which wait for this rank's */
  }
  if (status != DC_OK) {
    dc__mpi_fail(self, status);
    status = dc__comm_check(self->control);
  } else {
    status = dc__mpi_check_result(wait, "MPI_Comm_split", call->error);
    *part = call->part;
  }
  if (call != NULL) {
    split_call_release(call);
  }
  return status;
}

dc_status dc__mpi_split_comm(dc__mpi *self, const dc__split *split, dc__mpi_handle *part) {
  const dc__mpi_library *mpi = self->mpi;
  dc__mpi_wait wait = {.mpi = mpi,
                       .control = self->control,
                       .rank = self->head.rank,
                       .timeout_ns = self->head.timeout_ns,
                       .what = "dc_comm_split"};
  DC__TRY(call_split(self, split, &wait, part));
  const dc_status status =
      dc__mpi_check_result(&wait, "MPI_Comm_set_errhandler", mpi->calls->comm_return_errors(mpi, *part));
  if (status != DC_OK) {
    (void)mpi->calls->comm_free(mpi, part);
  }
  return status;
}
