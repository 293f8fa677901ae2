/* NCCL without cards: libnccl.so.2 as libdc uses it, between ranks that are threads of this process, on the streams of
 * the simulated driver. It is strict about:
 *
 *   calls        those that queue work need a current device; communicators are non-blocking, and calls stay in
 *                progress for a few polls. Meanwhile a communicator takes no other
 *   threads      the end of a group of several ranks starts one, which puts the work on the stream 100 us later
 *   groups       wait on their stream until every rank's has arrived, move data, and end when all have moved. On a
 *                captured stream they run with each launch of the graph
 *   windows      all ranks register them together, in the same order and of the same size, in memory of ncclMemAlloc.
 *                An all-gather in a window is in one on all ranks, at the same offset, and so is its send buffer
 *   registration a rank decides by its own memory whether to pass a peer's buffers. So the memory of calls that belong
 *                together is registered on both sides or on neither. Those are a send and its receive, a broadcast's
 *                root and the others, each side of an all-gather on all ranks. NCCL would wait for ever otherwise
 *   memory       is neither freed nor deregistered while queued work uses it
 *   aborts       are the caller's own: the other ranks' groups wait until they are aborted too
 *   graphs       a communicator that was captured ends when they are destroyed: its end waits for that
 *
 * Any function can be made to fail, as the driver's (cudasim_fail), and a rank's next group to break or to stay away.
 * Its objects are counted with the driver's (cudasim_live). */
#ifndef TESTS_NCCLSIM_H
#define TESTS_NCCLSIM_H

#include <stdbool.h>
#include <stdint.h>

#define NCCLSIM_API __attribute__((visibility("default")))

/* NCCL 2.29.7 as after a process's start; forgets what a lost device left behind. */
NCCLSIM_API void ncclsim_reset(void);
NCCLSIM_API void ncclsim_set_version(int version);
/* Whether the cards have windows; they do after the reset. */
NCCLSIM_API void ncclsim_set_windows(bool there);
/* All-gathers so far, of all ranks, whose result lay in a window. */
NCCLSIM_API int ncclsim_through_windows(void);
/* This thread's calls of ncclCommGetAsyncError, since it began. */
NCCLSIM_API int ncclsim_thread_polls(void);
/* When this thread last ended a group, as CLOCK_MONOTONIC has it; 0: never. */
NCCLSIM_API int64_t ncclsim_group_ended_ns(void);
/* The rank's next group ends with an asynchronous error, and moves nothing. */
NCCLSIM_API void ncclsim_break(int rank, int error);
/* From now on a rank's end waits for those of all ranks, as it may where they are on one machine. */
NCCLSIM_API void ncclsim_end_together(void);
/* The rank's next start or group never comes. */
NCCLSIM_API void ncclsim_stall(int rank);

#endif
