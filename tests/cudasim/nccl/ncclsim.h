/* NCCL without cards: libnccl.so.2 as libdc uses it, between ranks that are threads of this process, on the streams of
 * the simulated driver. It is strict about:
 *
 *   calls        those that queue work need a current device. Communicators are non-blocking: calls stay in progress
 *                for a few polls, and meanwhile a communicator takes no other call
 *   threads      the end of a group of several ranks starts one, which puts the work on the stream 100 us later
 *   groups       wait on their stream until every rank's has arrived, move data, and end when all have moved. On a
 *                captured stream they run with each launch of the graph
 *   windows      all ranks register them together, in the same order and of the same size, in memory of ncclMemAlloc.
 *                If one rank's all-gather uses a window, all ranks' do, at the same offset, also for the send buffer
 *   registration a rank decides by its own memory whether to pass a peer's buffers. So the memory of matching calls is
 *                registered on both sides or on neither. Such are a send and its receive, a broadcast's root and the
 *                others, each side of an all-gather on all ranks. Otherwise NCCL would wait for ever
 *   memory       is neither freed nor deregistered while queued work uses it
 *   aborts       affect only the caller: the other ranks' groups wait until they are aborted too
 *   graphs       the end of a communicator waits until the graphs into which it was captured are destroyed
 *
 * Any function can be made to fail, as the driver's (cudasim_fail), and a rank's next group to break or to never come.
 * Its objects are counted with the driver's (cudasim_live). */
#ifndef TESTS_NCCLSIM_H
#define TESTS_NCCLSIM_H

#include <stdbool.h>
#include <stdint.h>

#define NCCLSIM_API __attribute__((visibility("default")))

/* Sets NCCL to its state after a process's start, version 2.29.7, and forgets what a lost device left behind. */
NCCLSIM_API void ncclsim_reset(void);
NCCLSIM_API void ncclsim_set_version(int version);
/* Sets whether the cards support windows; after the reset they do. */
NCCLSIM_API void ncclsim_set_windows(bool there);
/* Returns the number of all-gathers so far, over all ranks, whose result was in a window. */
NCCLSIM_API int ncclsim_through_windows(void);
/* Returns the number of this thread's calls of ncclCommGetAsyncError. */
NCCLSIM_API int ncclsim_thread_polls(void);
/* Returns the CLOCK_MONOTONIC time at which this thread last ended a group; 0: never. */
NCCLSIM_API int64_t ncclsim_group_ended_ns(void);
/* Makes the rank's next group end with an asynchronous error, without moving data. */
NCCLSIM_API void ncclsim_break(int rank, int error);
/* From now on the end of a rank's communicator waits for those of all ranks, as NCCL may do on one machine. */
NCCLSIM_API void ncclsim_end_together(void);
/* Makes the rank's next start or group never come. */
NCCLSIM_API void ncclsim_stall(int rank);

#endif
