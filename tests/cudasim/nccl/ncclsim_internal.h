/* Between the files of the simulated NCCL. */
#ifndef TESTS_NCCLSIM_INTERNAL_H
#define TESTS_NCCLSIM_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "comm/nccl/library.h"
#include "cudasim_internal.h"
#include "ncclsim.h"

/* NCCL's functions, exported by the names of the table. */
#define X(name, result, arguments) NCCLSIM_API result name arguments;
DC__NCCL_FUNCTIONS(X)
DC__NCCL_OPTIONAL_FUNCTIONS(X)
#undef X

enum {
  RANKS = 64,
  LOOKS = 3,
  WINDOWS = 64 /* of a world */,
  FIRST_DRIVERS_ERROR = 100 /* the lower ones that tests use are NCCL's */
};

/* Ranks that share an id. Guarded by the mutex, like all below. */
typedef struct world {
  struct world *next;
  dc__nccl_id id;
  int ranks, joined, members, moving, ending;
  bool aborted[RANKS];
  unsigned long posted[RANKS], done[RANKS];
  struct group *groups[RANKS]; /* the posted ones */
  int windows[RANKS];          /* registered so far */
  size_t window_bytes[WINDOWS];
} world;

/* Of which window, and where in it; 0: none. */
typedef struct spot {
  int window;
  size_t offset;
} spot;

typedef struct window {
  struct window *next; /* of its communicator's */
  char *ptr;
  size_t bytes;
  int number; /* the same on every rank */
} window;

/* Memory that one rank registered. */
typedef struct registration {
  struct registration *next; /* of its communicator's */
  char *ptr;
  size_t bytes;
} registration;

/* A window on its way. */
typedef struct opening {
  void **to; /* NULL: there is none */
  window window;
} opening;

typedef struct call {
  enum { ALL_GATHER, BROADCAST, SEND, RECV } kind;
  const char *send;
  char *recv;
  size_t bytes;
  int peer;      /* or root */
  spot from, to; /* an all-gather's */
  bool registered_send, registered_recv;
} call;

typedef struct group {
  struct group *next; /* of its communicator's */
  struct ncclComm *comm;
  void *stream;
  call *calls;
  int count, capacity;
  int breaks; /* the error */
  bool stalls;
  bool captured; /* into a graph: it runs with each launch */
  unsigned long graph;
} group;

struct ncclComm {
  struct ncclComm *next;
  world *world;
  int rank;
  int looks;     /* in progress for so many more */
  int launching; /* groups that a thread of NCCL's has not put on their stream yet */
  int device;
  int error;       /* asynchronous */
  const char *why; /* NULL: there is no text */
  group *groups;   /* on streams; of a lost device they never run */
  group *captured; /* in graphs, until the reset */
  registration *registrations;
  opening opening;
  window *windows;
  bool finalizes;
  bool ended; /* by its user; goes with the last group */
};

extern pthread_mutex_t ncclsim_mutex;
extern pthread_cond_t ncclsim_progress;
extern struct ncclComm *ncclsim_comms;

/* calls.c */
void ncclsim_calls_reset(void);
/* The error that this call returns before it does anything; 0: none. */
int ncclsim_enter(const char *function, bool needs_device);
/* Whether the fault that was set for the rank happens now; it is cleared then. Called with the mutex. */
bool ncclsim_takes_stall(int rank);
int ncclsim_takes_break(int rank);

/* collectives.c */
void ncclsim_free_groups(group *first);

/* windows.c; called with the mutex */
void ncclsim_windows_reset(void);
/* Whether a registration is under way that not all ranks have joined. */
bool ncclsim_opens(struct ncclComm *comm);
/* Of a communicator that ends: how much there was. */
int ncclsim_end_memory(struct ncclComm *comm);
void ncclsim_locate(const struct ncclComm *comm, call *c);
/* Whether two ranks' calls have their memory in the same places. */
bool ncclsim_alike(const call *a, const call *b);
/* Whether two ranks' calls that belong together have registered memory on both sides or on neither. */
bool ncclsim_both_registered(const call *own, const call *other);

/* communicators.c; called with the mutex */
void ncclsim_drop(struct ncclComm *comm);

#define NCCLSIM_ENTER(needs_device)                       \
  do {                                                    \
    int error_ = ncclsim_enter(__func__, (needs_device)); \
    if (error_ != 0) {                                    \
      return error_;                                      \
    }                                                     \
  } while (0)

#endif
