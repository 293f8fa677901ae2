/* NCCL without cards: libnccl.so.2 as libdc uses it, between ranks that are threads of this process, on the streams of
 * the simulated driver. What it is strict about:
 *
 *   calls        that queue work want a current device; communicators are non-blocking, and calls stay in progress for
 *                a few looks
 *   groups       wait on their stream until every rank's has come, move, and end when all have moved; those of a stream
 *                that is captured run with each launch of the graph
 *   aborts       are the caller's own: the other ranks' groups wait until they are aborted too
 *
 * Any function can be made to fail, as the driver's (cudasim_fail), and a rank's next group to break or to stay away.
 * What exists is counted with what the driver has (cudasim_live). */
#ifndef TESTS_NCCLSIM_H
#define TESTS_NCCLSIM_H

#define NCCLSIM_API __attribute__((visibility("default")))

/* NCCL 2.29.7 as after a process's start; forgets what a lost device left behind. */
NCCLSIM_API void ncclsim_reset(void);
NCCLSIM_API void ncclsim_set_version(int version);
/* The rank's next group ends with an asynchronous error, and moves nothing. */
NCCLSIM_API void ncclsim_break(int rank, int error);
/* The rank's next start or group never comes. */
NCCLSIM_API void ncclsim_stall(int rank);

#endif
