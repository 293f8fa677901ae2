/* One card per rank, through NCCL. Services that NCCL does not provide come from another communicator, the bootstrap.
 * Before each collective the ranks do a handshake there and compare their calls. So a mismatch, a missing rank or a
 * dead one is found before NCCL waits for it. The id, host data and aborts go over it too.
 *
 * A collective is issued in order on the caller's stream (host_transport.h). After the handshake NCCL queues its work
 * on that stream, and the host goes on. So hosts run ahead of their cards. Collectives of one communicator on several
 * streams are serialised, as NCCL requires and the staging memory needs.
 *
 * NCCL reports neither a missing rank nor a timeout, so a watchdog thread runs while collectives are in flight
 * (watchdog.c). It checks for failures of NCCL, the bootstrap and the device, and for the deadline. A rank that fails
 * aborts NCCL's communicator, which ends its kernels, and the group.
 *
 * On a captured stream NCCL's work becomes part of the graph. The handshake is done at capture and not at launch, of
 * which the host is not told. The watchdog then polls, at longer intervals, as long as the communicator lives.
 *
 * NCCL moves data and does not add. A rank receives its peers' slices of its range in rounds of a window. The device's
 * reduction kernel adds them in the order of every other transport, in float32 for 16-bit types. So results are bitwise
 * equal; the traffic is that of a ring. */
#ifndef DC_COMM_NCCL_NCCL_H
#define DC_COMM_NCCL_NCCL_H

#include "comm/host_transport.h"
#include "comm/nccl/library.h"

enum { DC__NCCL_MAX_WORLD = 256 }; /* ranks; the device's reduction kernel takes no more sources */

/* Timeout of the flush at destruction, in which NCCL may wait for ranks of the machine. */
#define DC__NCCL_FLUSH_NS INT64_C(10000000000)

/* Memory of ncclMemAlloc, registered on this rank, and as a window on all ranks (memory.c). */
typedef struct dc__nccl_block {
  struct dc__nccl_block *next;
  char *ptr;
  size_t bytes;
  void *registered;       /* NULL if not */
  dc__nccl_window window; /* NULL if NCCL has none, or number is 0 */
  uint64_t number;        /* of the collective registration; 0: not yet */
} dc__nccl_block;

/* A collective in flight on a stream. */
typedef struct dc__nccl_inflight {
  struct dc__nccl_inflight *next; /* the next one in flight, or in free_list */
  dc_event *begun, *done;
  int64_t since;       /* when the watchdog saw it begin; 0: not yet */
  dc__op_timing *span; /* stays until `done` has passed; NULL if not recorded */
  char name[DC__COLL_TEXT];
} dc__nccl_inflight;

/* Staging memory, kept until destruction: queued or captured work may use it. */
typedef struct dc__nccl_staging {
  struct dc__nccl_staging *older;
  char *ptr;
  size_t bytes;
} dc__nccl_staging;

/* A thread that ends the handle. The communicator shares it until it is done, or leaves it behind. */
typedef struct dc__nccl_end_thread dc__nccl_end_thread;
typedef dc__nccl_result (*dc__nccl_end_fn)(dc__nccl_handle handle);

typedef struct dc__nccl {
  struct dc_comm head;
  dc_comm *bootstrap;
  dc_device *device;
  dc_stream *stream; /* its own, for NCCL calls that need the device current, and for connect_ranks() */
  dc__nccl_library library;
  pthread_mutex_t collective_mutex; /* one collective at a time; guards staging and windows */
  pthread_mutex_t pending_mutex;    /* held while an NCCL operation is in progress; guards blocks */
  pthread_mutex_t api_mutex;        /* one NCCL call with this handle at a time */
  dc__nccl_handle handle;           /* NULL before init and after an abort */
  dc__nccl_end_thread *end_thread;  /* NULL until the handle ends, and if no thread could start */
  dc__nccl_block *blocks;
  dc__nccl_window window;      /* where NCCL writes a new one */
  uint64_t num_windows;        /* registered so far: the same on every rank */
  dc__nccl_staging *staging;   /* a window per rank; the current one first, then those it replaced */
  bool connected;              /* connect_ranks() was done */
  pthread_mutex_t watch_mutex; /* guards all below */
  pthread_cond_t changed;
  pthread_t watchdog;
  dc__nccl_inflight *first, *last, *free_list; /* in the card's order */
  atomic_int num_watched;                      /* collectives in flight, plus 1 after a capture */
  bool captured;
  bool stopping;
  int64_t num_wakeups; /* of the watchdog, so that tests can bound them */
} dc__nccl;

/* Calls work in stream order with the device current, on this thread, before it returns. */
typedef dc_status (*dc__nccl_call_fn)(dc__nccl *self, void *native, void *args);
dc_status dc__nccl_call_on(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args);
/* On the communicator's own stream. */
dc_status dc__nccl_call(dc__nccl *self, dc__nccl_call_fn work, void *args);

/* ---- wait.c ---- */

/* Turns NCCL's result into a status with text; ncclInProgress is no error. */
dc_status dc__nccl_check_result(const dc__nccl *self, const char *call, dc__nccl_result error);
/* An error if the handle is gone. Requires api_mutex. */
dc_status dc__nccl_check_alive(dc__nccl *self);
/* Returns NCCL's asynchronous error, without waiting; state may be NULL. */
dc_status dc__nccl_get_async_error(dc__nccl *self, const char *call, dc__nccl_result *state);
/* An error if a wait for NCCL should end. If since is 0, there is no deadline. */
dc_status dc__nccl_check_progress(dc__nccl *self, const char *call, const char *what, int64_t since,
                                  int64_t timeout_ns);
/* Waits until NCCL has finished queueing `call` for `what`. */
dc_status dc__nccl_wait_ready(dc__nccl *self, const char *call, const char *what, int64_t timeout_ns);
/* dc__nccl_call_on() and dc__nccl_wait_ready(), for work that NCCL continues after it has returned. A failure aborts
 * the communicator, so that NCCL queues nothing any more. */
dc_status dc__nccl_call_and_wait(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args, const char *call,
                                 const char *what);
/* Aborts NCCL's communicator; fails this one, with the last error, and the group. */
void dc__nccl_abort(dc__nccl *self, dc_status status);
/* Ends the handle by ncclCommAbort, or a finalized one by ncclCommDestroy, and does not wait. Requires api_mutex, or
 * that no other thread uses it. */
void dc__nccl_end_handle(dc__nccl *self, dc__nccl_end_fn end);
/* Waits a while for the handle's end, before the communicator's memory goes. True if the end goes on; then it frees the
 * staging memory. */
bool dc__nccl_leave_end(dc__nccl *self);

/* ---- watchdog.c ---- */

dc_status dc__nccl_watchdog_start(dc__nccl *self);
/* Waits for the collectives in flight. */
void dc__nccl_watchdog_stop(dc__nccl *self);
/* Fails the communicator with the last error; the watchdog aborts it. */
void dc__nccl_fail(dc__nccl *self, dc_status status);
/* Bracket a collective's work on the stream: order it behind the communicator's other work and put it under the
 * watchdog. */
dc_status dc__nccl_begin(dc__nccl *self, const dc__coll *coll, const char *name, dc__nccl_inflight **inflight);
void dc__nccl_end(dc__nccl *self, dc_stream *stream, dc__nccl_inflight *inflight);
/* Marks the collectives in flight as failed, before their kernels end. */
void dc__nccl_mark_failed(dc__nccl *self);
/* Keeps the watchdog polling: a graph may be launched at any time. */
void dc__nccl_note_capture(dc__nccl *self);

/* ---- memory.c ---- */

dc_status dc__nccl_heap_alloc(dc_comm *comm, size_t bytes, void **ptr);
void dc__nccl_heap_free(dc_comm *comm, void *ptr, size_t bytes);
/* A hash of where a gather's heap memory lies, for ranks to compare; 0 if none of it is in the heap. Sets *unregistered
 * if some of it is not in a window yet. */
uint64_t dc__nccl_buffers_hash(dc__nccl *self, const dc__coll *coll, bool *unregistered);
/* If all ranks have the same hash: registers the gather's blocks as windows. */
dc_status dc__nccl_register_windows(dc__nccl *self, const dc__coll *coll, const char *name);
/* Whether any item's send lies in the heap. */
bool dc__nccl_sends_registered(dc__nccl *self, const dc__coll *coll);
bool dc__nccl_is_registered(dc__nccl *self, const void *ptr);
bool dc__nccl_peer_accessible(dc_comm *comm, const void *ptr, size_t bytes);

/* ---- collective.c ---- */

void dc__nccl_run(dc_comm *comm, const dc__coll *coll);
/* Submits a whole collective as one NCCL group on its stream. */
dc_status dc__nccl_submit(dc__nccl *self, const dc__coll *coll, const char *name);
/* Whether the ranges are equal and in rank order, as NCCL's all-gather requires. */
bool dc__nccl_is_even(const dc__coll_item *item, int32_t world);
/* Grows by doubling: replaced buffers stay for queued work, and together are smaller than the current one. */
dc_status dc__nccl_reserve_staging(dc__nccl *self, size_t bytes);
void dc__nccl_free_staging(dc_device *device, dc__nccl_staging *staging);

/* ---- all_to_all.c ---- */

dc_status dc__nccl_all_to_all(dc__nccl *self, const dc__coll *coll, const char *name);
/* Makes an all-to-all's NCCL calls, inside a group. */
dc_status dc__nccl_send_parts(dc__nccl *self, void *native, const dc__coll_item *item);

#endif
