/* The communicator over MPI, whose ranks are the processes of MPI_COMM_WORLD.
 *
 * Each communicator has a control communicator over TCP, made at an address that MPI told the ranks (meeting.c). In a
 * collective the ranks first compare their calls, so all have arrived with matching calls before MPI moves data
 * (collective.c). The control communicator does that, by messages of MPI (carrier.c). It also reports dead ranks
 * (wait.c): MPI itself may hang, or end the process. */
#ifndef DC_COMM_MPI_H
#define DC_COMM_MPI_H

#include "comm/host_transport.h"
#include "comm/mpi/library.h"
#include "comm/split.h"
#include "comm/tcp/tcp.h"

/* MPI in this process; runtime.c. */
typedef struct dc__mpi_runtime {
  pthread_mutex_t mutex; /* guards creation, and what follows */
  dc__mpi_library *library;
  dc__mpi_handle world; /* libdc's copy of MPI_COMM_WORLD */
  int32_t rank, size;
  bool ready;           /* `world` is valid */
  bool owned;           /* libdc initialised MPI, and finalizes it */
  atomic_int pid;       /* of the process that MPI belongs to, and not its forked children; 0: none yet */
  dc_comm *last;        /* the latest control communicator, kept until exit to notice dead ranks */
  atomic_int abandoned; /* requests that were given up: MPI must not be finalized */
} dc__mpi_runtime;

extern dc__mpi_runtime dc__mpi_runtime_state;

/* The communicators of one dc_comm_create_mpi() and its copies. */
typedef struct dc__mpi_group {
  atomic_int refs;
  pthread_mutex_t mutex; /* one copy at a time: a copy is a collective of `parent`, in one order on all ranks */
  dc__mpi_handle parent; /* the MPI communicator that is copied */
} dc__mpi_group;

/* Of messages; 0 is that of a probe which finds none. */
enum { DC__MPI_TAG_CALL = 1, DC__MPI_TAG_DATA = 2 };

/* Of the comparison of calls. */
typedef struct dc__mpi_message {
  uint64_t run; /* of the communicator: another one's may have the same handle of MPI later */
  unsigned char data[DC__TCP_SWAP_BYTES];
} dc__mpi_message;

typedef struct dc__mpi {
  struct dc_comm head;
  const dc__mpi_library *mpi;
  dc__mpi_group *group;
  dc_comm *control;
  dc__mpi_handle comm;
  bool has_comm;
  pthread_mutex_t collective_mutex; /* one collective at a time; guards what follows */
  char *scratch[2];                 /* packed data to send, and received data */
  size_t scratch_bytes[2];
  int *vectors;            /* counts and offsets of each item, which MPI reads until the request is done */
  int64_t max_bytes;       /* of a tensor that MPI moves in place: its offsets are ints; larger ones are packed */
  bool abandoned;          /* MPI may still use all this memory */
  dc__tcp_carrier carrier; /* of the control communicator, whose mutex guards what follows */
  dc__mpi_message sent, received;
  bool unmatched;         /* a comparison ended early: its messages may not be received */
  bool message_abandoned; /* as `abandoned`, of the comparison's messages */
} dc__mpi;

/* ---- runtime.c ---- */

/* DC_E_STATE in a forked child of the process that MPI belongs to. Takes no mutex, since a thread that the child lacks
 * may hold it. */
dc_status dc__mpi_check_process(const char *fn);
/* Initialises MPI if the process has not, and copies its world. Requires the mutex. */
dc_status dc__mpi_start(int64_t timeout_ns);
/* Keeps a control communicator until exit, in place of an earlier one. Requires the mutex. */
void dc__mpi_keep(dc_comm *control);
bool dc__mpi_is_usable(const dc__mpi_library *mpi);
/* DC_E_STATE once MPI has been finalized, or a request was abandoned. */
dc_status dc__mpi_check_usable(const dc__mpi_library *mpi, const char *fn);

/* ---- progress.c ---- */

/* For each communicator that is made: the first one starts the thread that lets MPI make progress. */
void dc__mpi_progress_join(void);
/* For each communicator that is destroyed: the last one stops the thread. */
void dc__mpi_progress_leave(void);
/* Bracket a wait over TCP or shared memory, during which the thread may call MPI. After the second call it does not. */
void dc__mpi_progress_begin(void);
void dc__mpi_progress_end(void);
/* Whether any thread is between the two. */
bool dc__mpi_progress_is_needed(void);

/* ---- meeting.c ---- */

/* Collective. Makes the TCP communicator of all ranks, at an address that rank 0 chooses. Requires the runtime's
 * mutex. */
dc_status dc__mpi_meet(const dc_comm_options *options, dc_comm **control);

/* ---- wait.c ---- */

enum { DC__MPI_REQUESTS = 2 * DC__COMM_GROUP };

typedef struct dc__mpi_wait {
  const dc__mpi_library *mpi;
  dc_comm *control; /* reports dead ranks; NULL if there is none yet */
  int32_t rank;
  int64_t timeout_ns;
  int64_t grace_ns; /* how long requests may still end after the group has failed; 0: they are given up at once */
  const char *what; /* for error texts */
  dc_status (*check)(void *arg); /* instead of looking at the control communicator and the deadline; NULL: none */
  void *arg;
  int32_t count;
  dc__mpi_handle requests[DC__MPI_REQUESTS];
  const atomic_bool *call; /* instead of a request: whether a call that another thread makes is done; NULL: none */
} dc__mpi_wait;

/* Turns MPI's error into a status: DC_OK for 0. If the control communicator reports a dead rank, the error names
 * that. */
dc_status dc__mpi_check_result(const dc__mpi_wait *wait, const char *call, int error);
/* Waits until all requests are done. On an error the others remain in the count. */
dc_status dc__mpi_wait_requests(dc__mpi_wait *wait);
/* The same, and abandons them. */
dc_status dc__mpi_wait_all(dc__mpi_wait *wait);
/* Gives up the requests, which MPI may still work on. Then MPI can neither be finalized nor used again. */
void dc__mpi_abandon(const dc__mpi_wait *wait);

/* ---- carrier.c ---- */

/* From now on the control communicator compares calls over MPI. */
void dc__mpi_carry(dc__mpi *self);
void dc__mpi_stop_carrying(dc__mpi *self);

/* ---- split.c ---- */

/* Collective. Makes this rank's part of the MPI communicator, which returns errors. Requires the collective mutex. */
dc_status dc__mpi_split_comm(dc__mpi *self, const dc__split *split, dc__mpi_handle *part);

/* ---- collective.c ---- */

/* The window [lo, lo + size) of every rank's part. */
typedef struct dc__mpi_round {
  dc__mpi *self;
  const dc__coll *coll;
  dc__mpi_wait *wait;
  int64_t lo;
  int64_t size;
  int64_t largest; /* bytes of the largest part */
  bool packed;
} dc__mpi_round;

/* Counts or offsets of an item, one for each rank: which = 0 to 3. */
int *dc__mpi_vector(const dc__mpi *self, int32_t item, int32_t which);
dc_status dc__mpi_reserve_scratch(dc__mpi *self, int32_t which, int64_t bytes);
/* Bytes of each rank's window, if the largest part has `largest` bytes. */
int64_t dc__mpi_round_bytes(const dc__mpi *self, int64_t largest);
/* The place of the next request. When MPI has started it there, the second function adds it, or abandons those before
 * it. */
dc__mpi_handle *dc__mpi_next_request(const dc__mpi_round *r);
dc_status dc__mpi_add_request(const dc__mpi_round *r, const char *call, int error);
/* Fails the group on all ranks with this thread's last error, unless it has failed, and the communicator with it. */
void dc__mpi_fail(dc__mpi *self, dc_status status);
int *dc__mpi_alloc_vectors(int32_t world);
void dc__mpi_run(dc_comm *comm, const dc__coll *coll);

/* ---- all_to_all.c ---- */

/* Reserves memory for it, before the ranks compare their calls. */
dc_status dc__mpi_plan_all_to_all(dc__mpi_round *r);
dc_status dc__mpi_all_to_all(dc__mpi_round *r);

#endif
