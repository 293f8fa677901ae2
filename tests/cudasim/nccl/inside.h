/* Between the files of the simulated NCCL. */
#ifndef TESTS_NCCLSIM_INSIDE_H
#define TESTS_NCCLSIM_INSIDE_H

#include <pthread.h>
#include <stdbool.h>

#include "../inside.h"
#include "comm/nccl/library.h"
#include "ncclsim.h"

/* NCCL's functions, exported by the names of the table. */
#define X(name, result, arguments) NCCLSIM_API result name arguments;
DC__NCCL_FUNCTIONS(X)
#undef X

enum { RANKS = 64, LOOKS = 3, FIRST_DRIVERS_ERROR = 100 /* the lower ones that tests use are NCCL's */ };

/* Ranks that share an id. Guarded by the mutex, like all below. */
typedef struct world {
  struct world *next;
  dc__nccl_id id;
  int ranks, joined, members, moving;
  bool aborted[RANKS];
  unsigned long posted[RANKS], done[RANKS];
  struct group *groups[RANKS]; /* the posted ones */
} world;

typedef struct call {
  enum { ALL_GATHER, BROADCAST, SEND, RECV } kind;
  const char *send;
  char *recv;
  size_t bytes;
  int peer; /* or root */
} call;

typedef struct group {
  struct group *next; /* of its communicator's */
  struct ncclComm *comm;
  void *stream;
  call *calls;
  int count, capacity;
  int breaks; /* the error */
  bool stalls;
  bool captured; /* into a graph, with each of whose launches it runs */
} group;

struct ncclComm {
  struct ncclComm *next;
  world *world;
  int rank;
  int looks;       /* in progress for so many more */
  int error;       /* asynchronous */
  group *groups;   /* on streams; of a lost device they never run */
  group *captured; /* in graphs, until the reset */
  bool ended;      /* by its user; goes with the last group */
};

extern pthread_mutex_t ncclsim_mutex;
extern pthread_cond_t ncclsim_progress;

/* calls.c */
void ncclsim_calls_reset(void);
/* The error that this call returns before it does anything; 0: none. */
int ncclsim_enter(const char *function, bool needs_device);
/* Whether what was asked of the rank happens now; it is forgotten then. Called with the mutex. */
bool ncclsim_takes_stall(int rank);
int ncclsim_takes_break(int rank);

/* moves.c */
void ncclsim_free_groups(group *first);

/* world.c; called with the mutex */
void ncclsim_drop(struct ncclComm *comm);

#define NCCLSIM_ENTER(needs_device)                       \
  do {                                                    \
    int error_ = ncclsim_enter(__func__, (needs_device)); \
    if (error_ != 0) {                                    \
      return error_;                                      \
    }                                                     \
  } while (0)

#endif
