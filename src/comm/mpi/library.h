/* MPI, opened at run time: one table for the standard's ABI (MPI 5.0), MPICH's and Open MPI's. They differ in the type
 * of handles and in constants. So the build needs no mpi.h, and one library runs with every MPI. */
#ifndef DC_COMM_MPI_LIBRARY_H
#define DC_COMM_MPI_LIBRARY_H

#include <stdint.h>

#include "dc_api.h"

/* A communicator, type, request or error handler: an int for MPICH, a pointer for the others. */
typedef union dc__mpi_handle {
  void *pointer;
  int number;
} dc__mpi_handle;

enum dc__mpi_abi { DC__MPI_STANDARD = 0, DC__MPI_MPICH = 1, DC__MPI_OPEN_MPI = 2 };

/* Functions without handles. */
#define DC__MPI_PLAIN_FUNCTIONS(X)                                \
  X(MPI_Get_library_version, int, (char *text, int *length))      \
  X(MPI_Initialized, int, (int *flag))                            \
  X(MPI_Finalized, int, (int *flag))                              \
  X(MPI_Init_thread, int, (int *, char ***, int level, int *got)) \
  X(MPI_Query_thread, int, (int *level))                          \
  X(MPI_Finalize, int, (void))                                    \
  X(MPI_Error_class, int, (int error, int *class))                \
  X(MPI_Error_string, int, (int error, char *text, int *length))

typedef struct dc__mpi_library {
  enum dc__mpi_abi abi;
  void *module; /* of dlopen */
  char name[256];
  char version[512]; /* the text of dc_mpi_get_version() */
  dc__mpi_handle world, byte, errors_return;
  void *in_place;
  void *status_ignore;
  int thread_multiple;
#define X(name, result, arguments) result(*name) arguments;
  DC__MPI_PLAIN_FUNCTIONS(X)
#undef X
  void *functions; /* of calls_template.h, by the ABI's type of handles */
  const struct dc__mpi_calls *calls;
} dc__mpi_library;

/* MPI's functions with handles. Each returns MPI's error, 0 if there is none. Counts are bytes. */
typedef struct dc__mpi_calls {
  int (*comm_rank)(const dc__mpi_library *mpi, dc__mpi_handle comm, int *rank);
  int (*comm_size)(const dc__mpi_library *mpi, dc__mpi_handle comm, int *size);
  int (*comm_return_errors)(const dc__mpi_library *mpi, dc__mpi_handle comm);
  int (*comm_idup)(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *copy, dc__mpi_handle *request);
  /* Blocks until all ranks of `comm` have called. */
  int (*comm_split)(const dc__mpi_library *mpi, dc__mpi_handle comm, int color, int key, dc__mpi_handle *part);
  int (*comm_free)(const dc__mpi_library *mpi, dc__mpi_handle *comm);
  /* In place: this rank's part is in recv already. */
  int (*iallgatherv)(const dc__mpi_library *mpi, void *recv, const int *counts, const int *at, dc__mpi_handle comm,
                     dc__mpi_handle *request);
  int (*ialltoallv)(const dc__mpi_library *mpi, const void *send, const int *send_counts, const int *send_at,
                    void *recv, const int *recv_counts, const int *recv_at, dc__mpi_handle comm,
                    dc__mpi_handle *request);
  int (*ibcast)(const dc__mpi_library *mpi, void *data, int count, int root, dc__mpi_handle comm,
                dc__mpi_handle *request);
  int (*ibarrier)(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *request);
  int (*isend)(const dc__mpi_library *mpi, const void *data, int bytes, int to, int tag, dc__mpi_handle comm,
               dc__mpi_handle *request);
  int (*irecv)(const dc__mpi_library *mpi, void *data, int bytes, int from, int tag, dc__mpi_handle comm,
               dc__mpi_handle *request);
  /* Of a receive. */
  int (*cancel)(const dc__mpi_library *mpi, dc__mpi_handle *request);
  int (*test)(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done);
  /* Probes for a message of `rank` with tag 0, which libdc never sends: the call lets MPI make progress. */
  int (*iprobe)(const dc__mpi_library *mpi, int rank, dc__mpi_handle comm);
} dc__mpi_calls;

/* Opens MPI and fills the table, once per process; later calls return the same. DC_E_UNSUPPORTED, with the reason, if
 * there is none that can be used. The caller holds a lock. */
dc_status dc__mpi_open(dc__mpi_library **library);
/* DC_E_UNSUPPORTED if no launcher of MPI started this process, or one that does not fit the library. Sets *size to the
 * number of ranks that it started; 0 if it does not say. */
dc_status dc__mpi_check_launcher(const dc__mpi_library *library, int32_t *size);

/* calls.c: finds the functions with handles. Returns the name of a missing one, or NULL. */
const char *dc__mpi_load_calls(dc__mpi_library *library);

#endif
