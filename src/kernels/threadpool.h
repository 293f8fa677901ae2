/* Threads for kernels whose work is worth more than one.
 *
 * Pools are reference-counted. Callers that ask for the same number of threads share a pool, so many layers do not mean
 * many threads. Threads start with the first dc__parallel_for(). Work is cut by index alone: an index's result must not
 * depend on the number of threads, or on the thread that runs it. */
#ifndef DC_KERNELS_THREADPOOL_H
#define DC_KERNELS_THREADPOOL_H

#include "base/base.h"

enum { DC__SCRATCH_BYTES = 7 << 20, DC__SCRATCH_HEADER = 64, DC__THREADS_MAX = 1024 };

typedef struct dc__threadpool dc__threadpool;

/* Computes index `index` of the work. scratch is the running thread's own DC__SCRATCH_BYTES bytes, 256-byte aligned. At
 * a thread's first index of a call, the first DC__SCRATCH_HEADER bytes are 0, and the others are undefined. Contents
 * stay from index to index, so that one can leave data for the next. Must not call dc__parallel_for() on the same
 * pool. */
typedef void (*dc__parallel_fn)(void *arg, int64_t index, void *scratch);

/* threads includes the caller's thread; 0 means one per processor in the caller's affinity. Errors: DC_E_INVALID
 * (negative or over DC__THREADS_MAX), DC_E_NO_MEMORY. */
dc_status dc__threadpool_open(int32_t threads, dc__threadpool **pool);
/* One close for each open; the last one ends the threads. NULL does nothing. */
void dc__threadpool_close(dc__threadpool *pool);
int32_t dc__threadpool_threads(const dc__threadpool *pool);

/* Calls fn(arg, index, scratch) once for each index from 0 to n - 1, in any order and on any threads of the pool, the
 * caller's among them. Returns when all are done. Any number of threads may call at once. Never fails: if threads
 * cannot be started, or in a child of fork(), it is slower. */
void dc__parallel_for(dc__threadpool *pool, int64_t n, dc__parallel_fn fn, void *arg);
/* The same where an index costs about `cost` multiplications or loads: the caller alone does work that is too small to
 * be worth waking threads. */
void dc__parallel_for_cost(dc__threadpool *pool, int64_t n, int64_t cost, dc__parallel_fn fn, void *arg);
/* The same with `block` as the caller's scratch. Beyond the part that the threads use, several calls can share data in
 * it. It stays from call to call, except for the first DC__SCRATCH_HEADER bytes. */
void dc__parallel_for_scratch(dc__threadpool *pool, void *block, int64_t n, int64_t cost, dc__parallel_fn fn,
                              void *arg);

/* Returns a block for dc__parallel_for_scratch(), which the caller releases. Never fails: if memory is short, it waits
 * for the blocks of other callers. */
void *dc__scratch_acquire(dc__threadpool *pool);
void dc__scratch_release(dc__threadpool *pool, void *block);

#endif
