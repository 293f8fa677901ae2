/* Threads for the kernels that are worth more than one.
 *
 * A pool is counted by reference. Holders that ask for the same number of threads share one, so many layers do not mean
 * many threads. Threads start with the first dc__parallel_for(). Work is cut by index alone: an index's result must not
 * depend on the number of threads, or on the thread that runs it. */
#ifndef DC_KERNELS_THREADPOOL_H
#define DC_KERNELS_THREADPOOL_H

#include "base/base.h"

enum { DC__SCRATCH_BYTES = 7 << 20, DC__SCRATCH_HEADER = 64, DC__THREADS_MAX = 1024 };

typedef struct dc__threadpool dc__threadpool;

/* Does index `index` of the work. scratch: DC__SCRATCH_BYTES of the running thread's own, 256-byte aligned. At a
 * thread's first index of a call its first DC__SCRATCH_HEADER bytes are 0, and the others are undefined. From index to
 * index everything stays, so that one index can leave data for the next. Must not call dc__parallel_for() on the same
 * pool. */
typedef void (*dc__parallel_fn)(void *arg, int64_t index, void *scratch);

/* threads: the callers' thread included; 0: as many as the process may run on (its affinity). Errors: DC_E_INVALID
 * (negative or over DC__THREADS_MAX), DC_E_NO_MEMORY. */
dc_status dc__threadpool_open(int32_t threads, dc__threadpool **pool);
/* One close for each open; the last one ends the threads. NULL does nothing. */
void dc__threadpool_close(dc__threadpool *pool);
int32_t dc__threadpool_threads(const dc__threadpool *pool);

/* fn(arg, 0 … n-1, scratch), each once, in any order and on any threads of the pool, the caller's among them; returns
 * when all are done. Any number of threads may call at once. Never fails: if threads cannot be started, or in a child
 * of fork(), it is slower. */
void dc__parallel_for(dc__threadpool *pool, int64_t n, dc__parallel_fn fn, void *arg);
/* The same for an index of about `cost` multiplications or loads: the caller alone does work too small to be worth a
 * wake-up. */
void dc__parallel_for_cost(dc__threadpool *pool, int64_t n, int64_t cost, dc__parallel_fn fn, void *arg);
/* The same with `block` as the caller's scratch. Several calls can share data there beyond the threads' own part: it
 * stays from call to call, but for the first DC__SCRATCH_HEADER bytes. */
void dc__parallel_for_scratch(dc__threadpool *pool, void *block, int64_t n, int64_t cost, dc__parallel_fn fn,
                              void *arg);

/* A block for dc__parallel_for_scratch(), which the caller returns. Never fails: if memory is short, it waits for the
 * blocks of other callers. */
void *dc__scratch_acquire(dc__threadpool *pool);
void dc__scratch_release(dc__threadpool *pool, void *block);

#endif
