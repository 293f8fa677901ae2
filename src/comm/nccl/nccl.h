/* Ranks on cards of their own, through NCCL. What NCCL does not know is another communicator's, the base, which is
 * whatever brought the processes together: before each collective the ranks meet there and compare their calls, so
 * that a difference, a rank that never comes or one that dies is found before NCCL waits for it; the id and the host's
 * own data go that way too, and who aborts, aborts there.
 *
 * A collective is issued in its turn on the caller's stream (host.h): the hosts meet, NCCL queues its work on that very
 * stream, and the host goes on. So hosts run ahead of their cards, and whoever needs the result waits on the card.
 * Collectives of one communicator on several streams follow each other there, as NCCL demands and the staging memory
 * needs. NCCL says neither that a rank is missing nor that time is up, so a thread watches while collectives are in
 * flight (watchdog.c): NCCL's and the base's failures, the device and the clock. Who fails aborts NCCL's communicator,
 * which ends its kernels, and the group.
 *
 * On a stream that is captured NCCL's work becomes part of the graph. The ranks meet when it is captured and not when
 * it is launched, of which nobody tells the host: the watcher looks at longer intervals as long as the communicator
 * lives.
 *
 * NCCL moves, and does not add: a rank gets the others' pieces of its range, in rounds of a window, and the device's
 * reduction kernel adds them in the order of every other transport, in float32 for 16-bit types. The bits are theirs;
 * what travels is what a ring would move. */
#ifndef DC_COMM_NCCL_NCCL_H
#define DC_COMM_NCCL_NCCL_H

#include "comm/host_transport.h"
#include "comm/nccl/library.h"

/* The longest wait for what nobody else has a part in. */
#define DC__NCCL_FLUSH_NS INT64_C(10000000000)

/* Memory of ncclMemAlloc, registered with the communicator on this rank; windows are everybody's (memory.c). */
typedef struct dc__nccl_block {
  struct dc__nccl_block *next;
  char *ptr;
  size_t bytes;
  void *registered;       /* NULL: not */
  dc__nccl_window window; /* NULL: none, for NCCL has none, or the ranks' number is still 0 */
  uint64_t number;        /* of the ranks' registrations of windows; 0: not yet */
} dc__nccl_block;

/* A collective on its way through a stream. */
typedef struct dc__nccl_inflight {
  struct dc__nccl_inflight *next; /* the one behind it, or a spare one */
  dc_event *begun, *done;
  int64_t since;       /* when it was seen to have begun; 0: not yet */
  dc__op_timing *span; /* stays until `done` has passed; NULL: not recorded */
  char name[DC__COLL_TEXT];
} dc__nccl_inflight;

/* Memory that outlives what was queued, or captured, with it. */
typedef struct dc__nccl_staging {
  struct dc__nccl_staging *older;
  char *ptr;
  size_t bytes;
} dc__nccl_staging;

typedef struct dc__nccl {
  struct dc_comm head;
  dc_comm *bootstrap;
  dc_device *device;
  dc_stream *stream; /* of its own, for NCCL's calls that want the device current, and what precedes a capture */
  dc__nccl_library library;
  pthread_mutex_t collective_mutex; /* one collective at a time; staging, windows */
  pthread_mutex_t pending_mutex;    /* NCCL does what it was asked for, and is let alone with it; blocks */
  pthread_mutex_t api_mutex;        /* of NCCL with this handle */
  dc__nccl_handle handle;           /* NULL: not yet, or aborted */
  dc__nccl_block *blocks;
  dc__nccl_window window;      /* what NCCL writes a new one to */
  uint64_t num_windows;        /* registered so far: the same on every rank */
  dc__nccl_staging *staging;   /* a window for each rank; the largest one, before those that it replaced */
  bool connected;              /* all that NCCL sets up when it is first used, before a capture */
  pthread_mutex_t watch_mutex; /* all below */
  pthread_cond_t changed;
  pthread_t watchdog;
  dc__nccl_inflight *first, *last, *free_list; /* in the card's order */
  atomic_int num_watched;                      /* how many there are, and one more once there was a capture */
  bool captured;
  bool stopping;
} dc__nccl;

/* Work in the stream's turn, with the device current; on this thread, before it returns. */
typedef dc_status (*dc__nccl_call_fn)(dc__nccl *self, void *native, void *args);
dc_status dc__nccl_call_on(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args);
/* On the communicator's own stream. */
dc_status dc__nccl_call(dc__nccl *self, dc__nccl_call_fn work, void *args);

/* ---- wait.c ---- */

/* NCCL's error as a status and a sentence; in progress is none. */
dc_status dc__nccl_check_result(const dc__nccl *self, const char *call, dc__nccl_result error);
/* The handle is there, with `calls` held. */
dc_status dc__nccl_check_alive(dc__nccl *self);
/* NCCL's asynchronous error, without waiting; *state may be NULL. */
dc_status dc__nccl_get_async_error(dc__nccl *self, const char *call, dc__nccl_result *state);
/* Why who waits for NCCL should do so no longer, if so. since 0: the clock does not run. */
dc_status dc__nccl_check_progress(dc__nccl *self, const char *call, const char *what, int64_t since,
                                  int64_t timeout_ns);
/* Until NCCL has done what it was asked for, its queueing: `call` on behalf of `what`. */
dc_status dc__nccl_wait_ready(dc__nccl *self, const char *call, const char *what, int64_t timeout_ns);
/* Work in the stream's turn that NCCL goes on with for a while after it has returned, until that is done. */
dc_status dc__nccl_call_and_wait(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args, const char *call,
                                 const char *what);
/* Ends NCCL's communicator, fails this one with the last error, and the group. */
void dc__nccl_abort(dc__nccl *self, dc_status status);

/* ---- watchdog.c ---- */

dc_status dc__nccl_watchdog_start(dc__nccl *self);
/* Waits for what is in flight. */
void dc__nccl_watchdog_stop(dc__nccl *self);
/* Fails the communicator with the last error; the watcher gives up. */
void dc__nccl_fail(dc__nccl *self, dc_status status);
/* Around what a collective queues on the stream: behind all others of this communicator, and seen by the watcher. */
dc_status dc__nccl_begin(dc__nccl *self, const dc__coll *coll, const char *name, dc__nccl_inflight **inflight);
void dc__nccl_end(dc__nccl *self, dc_stream *stream, dc__nccl_inflight *inflight);
/* Those in flight have failed, before their kernels end. */
void dc__nccl_mark_failed(dc__nccl *self);
/* There is a graph that may be launched at any time. */
void dc__nccl_note_capture(dc__nccl *self);

/* ---- memory.c ---- */

dc_status dc__nccl_heap_alloc(dc_comm *comm, size_t bytes, void **ptr);
void dc__nccl_heap_free(dc_comm *comm, void *ptr, size_t bytes);
/* Where a gather's memory of the heap lies, as ranks compare it; 0: nothing of it is the heap's. *fresh: not all of
 * that lies in windows yet. */
uint64_t dc__nccl_buffers_hash(dc__nccl *self, const dc__coll *coll, bool *unregistered);
/* Where all ranks found the same place: it lies in windows from here on. */
dc_status dc__nccl_register_windows(dc__nccl *self, const dc__coll *coll, const char *name);
bool dc__nccl_peer_accessible(dc_comm *comm, const void *ptr, size_t bytes);

/* ---- collective.c ---- */

void dc__nccl_run(dc_comm *comm, const dc__coll *coll);
/* Equal ranges in rank order, which NCCL's all-gather knows. */
bool dc__nccl_is_even(const dc__coll_item *item, int32_t world);
void dc__nccl_free_staging(dc__nccl *self);

#endif
