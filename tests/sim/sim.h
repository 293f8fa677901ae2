/* A simulated device and communicator for ranks that are threads of one process. The same runtime code runs on them as
 * on real ones. But a seed decides the order, and every access to memory is checked.
 *
 *   world.c    the scheduler, the queues that it draws from, memory
 *   device.c   streams and events on it: the table of device/device.h
 *   comm.c     a communicator whose collectives are steps on those streams: the table of comm/comm.h
 *   checker.c  which agent accessed which bytes, and whether two accesses are ordered
 *   wrap.c     tells the checker of the runtime's accesses (the linker's --wrap, so production code has no hooks)
 *
 * One world at a time; exactly one thread of it runs, so nothing here is locked. docs/simulation.md explains it. */
#ifndef TESTS_SIM_H
#define TESTS_SIM_H

#include "comm/comm.h"

/* ---- for tests ---- */

typedef struct sim_options {
  uint64_t seed;
  int32_t world;
  bool no_heap;     /* no memory that peers read in place, as with the caller's own collectives */
  bool one_channel; /* dup is refused, so gathers and reductions share a communicator and a stream */
} sim_options;

/* Runs body(rank, user) as each rank's host thread until all have returned. Returns false if the checker has a
 * report. */
bool sim_run(const sim_options *options, void (*body)(int32_t rank, void *user), void *user);
/* Returns the first failure in the last world, with its seed; "": there was none. */
const char *sim_report(void);
/* In a world: open this rank's device and communicator, which the caller releases. */
dc_status sim_device_open(dc_device **device);
dc_status sim_comm_open(dc_comm **comm);
/* Allocates memory of the test, uninitialised, which lives until the world ends, so that no address is reused. */
void *sim_new(size_t bytes);
/* The test itself accesses memory, on the host or in a task of a stream. `what` names the access in reports. */
void sim_reads(const void *ptr, size_t bytes, const char *what);
void sim_writes(const void *ptr, size_t bytes, const char *what);
/* Returns a random number from the world's sequence of choices. */
uint64_t sim_random(uint64_t below);

/* ---- shared by the files ---- */

enum { SIM_AGENTS = 64, SIM_RANKS = 8 };

/* A vector clock: how many actions of each agent (a rank's host thread, or a stream) are known. */
typedef struct sim_clock {
  uint32_t at[SIM_AGENTS];
} sim_clock;

/* The action that an agent is making, for reports. */
typedef struct sim_op {
  const char *what; /* "cast", "gather", … */
  const char *fn;   /* the public function that made it; NULL: none */
  int64_t id;       /* a parameter's id; -1: none */
} sim_op;

typedef struct sim_agent {
  sim_clock now;
  sim_op op;
  const dc_stream *stream; /* NULL: a host thread */
  int32_t rank;
  int32_t number; /* index among the rank's streams, in the order of their creation */
} sim_agent;

typedef enum sim_kind { SIM_READ, SIM_WRITE, SIM_ALLOC, SIM_RETIRE, SIM_FREE } sim_kind;

/* checker.c */
void sim_checker_begin(void);
void sim_checker_end(void);
void sim_checker_mute(void); /* no more reports in this world */
void sim_note(sim_kind kind, const void *ptr, size_t bytes, const char *what);
/* The system has reused these addresses, for instance for a thread's stack: older records of them no longer apply. */
void sim_forget(const void *ptr, size_t bytes);
void sim_forget_freed(const void *ptr, size_t bytes); /* forgets only records of the arena's freed memory */
void sim_join(sim_clock *to, const sim_clock *from);
void sim_reportf(const char *format, ...) DC__PRINTF(1, 2);

/* comm.c */
void sim_comm_end(void);

/* world.c */
sim_agent *sim_me(void); /* the running agent: a stream while it runs a task, otherwise the host thread */
sim_agent *sim_agent_of(int32_t agent);
int32_t sim_agent_number(const sim_agent *agent);
/* Publishes an order for others: returns a copy of this agent's clock, which then ticks. */
sim_clock sim_publish(void);
const sim_options *sim_world(void);
int32_t sim_rank(void);
/* If no thread can continue, every wait ends from now on, as at its deadline. */
bool sim_dead(void);
/* Runs others until ready(args), which only their work may change. */
void sim_wait(bool (*ready)(void *args), void *args, const char *what);
/* Work in several steps on a stream: the scheduler calls step() while ready(), until it returns true. */
typedef struct sim_work {
  bool (*ready)(void *args); /* NULL: always */
  bool (*step)(void *args);
  sim_op op;
} sim_work;
dc_stream *sim_stream_open(dc_device *device, int32_t rank);
void sim_stream_close(dc_stream *stream); /* its queue must be empty */
void sim_push(dc_stream *stream, const sim_work *work, const void *args, size_t bytes);
/* wrap.c, for arena.c as compiled for the simulator */
void dc__arena_poison(const void *ptr, size_t bytes);
void dc__arena_unpoison(const void *ptr, size_t bytes);
void dc__arena_unpoison_on(dc_stream *stream, const void *ptr, size_t bytes);

/* world.c */
void *sim_map(size_t bytes); /* memory that the checker watches until the world ends */

#endif
