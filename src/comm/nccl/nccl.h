/* Ranks on cards of their own, through NCCL. What NCCL does not know is another communicator's, the base, which is
 * whatever brought the processes together: before each collective the ranks meet there and compare their calls, so
 * that a difference, a rank that never comes or one that dies is found before NCCL waits for it; the id and the host's
 * own data go that way too, and who aborts, aborts there.
 *
 * A collective is done by a host thread (host.h): it meets, has NCCL queue its work on a stream of the communicator's
 * own, and looks at NCCL's and the base's failures until the work is done. So no collective is ever in another one's
 * way on a stream, which NCCL leaves to its user, and NCCL's communicator is in one thread's hands at a time.
 *
 * NCCL moves, and does not add: a rank gets the others' pieces of its range, in rounds of a window, and the device's
 * reduction kernel adds them in the order of every other transport, in float32 for 16-bit types. The bits are theirs;
 * what travels is what a ring would move. */
#ifndef DC_COMM_NCCL_NCCL_H
#define DC_COMM_NCCL_NCCL_H

#include "comm/host.h"
#include "comm/nccl/library.h"

/* The longest wait for what nobody else has a part in. */
#define DC__NCCL_FLUSH_NS INT64_C(10000000000)

/* Memory of ncclMemAlloc, registered with the communicator. */
typedef struct dc__nccl_block {
  struct dc__nccl_block *next;
  char *ptr;
  size_t bytes;
  void *registered; /* NULL: not */
} dc__nccl_block;

typedef struct dc__nccl {
  struct dc_comm head;
  dc_comm *base;
  dc_device *device;
  dc_stream *stream; /* NCCL's work and the reductions behind it; it gets no host functions */
  dc__nccl_library library;
  pthread_mutex_t turn;   /* one collective at a time; staging */
  pthread_mutex_t calls;  /* of NCCL with this handle; blocks */
  dc__nccl_handle handle; /* NULL: not yet, or aborted */
  dc__nccl_block *blocks;
  char *staging; /* a window for each rank */
  size_t staging_bytes;
} dc__nccl;

/* Work in the stream's turn, with the device current; on this thread, before it returns. */
typedef dc_status (*dc__nccl_work)(dc__nccl *self, void *native, void *args);
dc_status dc__nccl_issue(dc__nccl *self, dc__nccl_work work, void *args);

/* ---- wait.c ---- */

/* NCCL's error as a status and a sentence; in progress is none. */
dc_status dc__nccl_error(const dc__nccl *self, const char *call, dc__nccl_result error);
/* Until NCCL has done what it was asked for, its queueing: `call` on behalf of `what`. */
dc_status dc__nccl_settle(dc__nccl *self, const char *call, const char *what, int64_t timeout_ns);
/* Until the stream is done. */
dc_status dc__nccl_await(dc__nccl *self, const char *what);
/* Ends NCCL's communicator, fails this one with the last error, and the group. */
void dc__nccl_give_up(dc__nccl *self, dc_status status);

/* ---- memory.c ---- */

dc_status dc__nccl_heap_alloc(dc_comm *comm, size_t bytes, void **ptr);
void dc__nccl_heap_free(dc_comm *comm, void *ptr, size_t bytes);
bool dc__nccl_shares(dc_comm *comm, const void *ptr, size_t bytes);

/* ---- collective.c ---- */

void dc__nccl_run(dc_comm *comm, const dc__coll *coll);
void dc__nccl_drop_staging(dc__nccl *self);

#endif
