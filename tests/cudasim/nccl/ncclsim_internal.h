/* Shared by the files of the simulated NCCL. */
#ifndef TESTS_NCCLSIM_INTERNAL_H
#define TESTS_NCCLSIM_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "comm/nccl/library.h"
#include "cudasim_internal.h"
#include "ncclsim.h"

/* NCCL's functions, exported under the names in the table. */
#define X(name, result, arguments) NCCLSIM_API result name arguments;
DC__NCCL_FUNCTIONS(X)
DC__NCCL_OPTIONAL_FUNCTIONS(X)
#undef X

enum {
  RANKS = 64,
  LOOKS = 3,
  WINDOWS = 64 /* most of a world */,
  FIRST_DRIVERS_ERROR = 100 /* lower numbers that tests use are NCCL's errors */
};

/* Ranks that share an id. Guarded by the mutex, like all below. */
typedef struct world {
  struct world *next;
  dc__nccl_id id;
  int ranks, joined, members, moving, ending;
  bool aborted[RANKS];
  unsigned long posted[RANKS], done[RANKS];
  struct group *groups[RANKS]; /* posted groups, by rank */
  int windows[RANKS];          /* number registered so far, by rank */
  size_t window_bytes[WINDOWS];
} world;

/* The window in which memory lies, and the offset there. window 0: none. */
typedef struct spot {
  int window;
  size_t offset;
} spot;

typedef struct window {
  struct window *next; /* in its communicator's list */
  char *ptr;
  size_t bytes;
  int number; /* the same on all ranks */
} window;

/* Memory that one rank registered. */
typedef struct registration {
  struct registration *next; /* in its communicator's list */
  char *ptr;
  size_t bytes;
} registration;

/* A window that is being registered. */
typedef struct opening {
  void **to; /* where its handle goes; NULL: none is being registered */
  window window;
} opening;

typedef struct call {
  enum { ALL_GATHER, BROADCAST, SEND, RECV } kind;
  const char *send;
  char *recv;
  size_t bytes;
  int peer;      /* the peer, or a broadcast's root */
  spot from, to; /* of an all-gather */
  bool registered_send, registered_recv;
} call;

typedef struct group {
  struct group *next; /* in its communicator's list */
  struct ncclComm *comm;
  void *stream;
  call *calls;
  int count, capacity;
  int breaks; /* the error with which it breaks; 0: none */
  bool stalls;
  bool captured; /* into a graph, with each launch of which it runs */
  unsigned long graph;
} group;

struct ncclComm {
  struct ncclComm *next;
  world *world;
  int rank;
  int looks;     /* for how many more polls it is in progress */
  int launching; /* groups that a thread of NCCL has yet to put on their stream */
  int device;
  int error;       /* the asynchronous error */
  const char *why; /* the error's text; NULL: none */
  group *groups;   /* on streams; those of a lost device never run */
  group *captured; /* captured groups, kept until the reset */
  registration *registrations;
  opening opening;
  window *windows;
  bool finalizes;
  bool ended; /* by its user; freed with its last group */
};

extern pthread_mutex_t ncclsim_mutex;
extern pthread_cond_t ncclsim_progress;
extern struct ncclComm *ncclsim_comms;

/* calls.c */
void ncclsim_calls_reset(void);
/* Returns the error with which this call must fail before it does anything; 0: none. */
int ncclsim_enter(const char *function, bool needs_device);
/* Returns whether the fault that was set for the rank happens now, and clears it. Called with the mutex held. */
bool ncclsim_takes_stall(int rank);
int ncclsim_takes_break(int rank);

/* collectives.c */
void ncclsim_free_groups(group *first);

/* windows.c; called with the mutex held */
void ncclsim_windows_reset(void);
/* Whether a registration is under way that not all ranks have joined yet. */
bool ncclsim_opens(struct ncclComm *comm);
/* Frees the registrations and windows of a communicator that ends, and returns their number. */
int ncclsim_end_memory(struct ncclComm *comm);
void ncclsim_locate(const struct ncclComm *comm, call *c);
/* Whether two ranks' calls use the same places in windows. */
bool ncclsim_alike(const call *a, const call *b);
/* Whether two ranks' matching calls have registered memory on both sides or on neither. */
bool ncclsim_both_registered(const call *own, const call *other);

/* communicators.c; called with the mutex held */
void ncclsim_drop(struct ncclComm *comm);

#define NCCLSIM_ENTER(needs_device)                       \
  do {                                                    \
    int error_ = ncclsim_enter(__func__, (needs_device)); \
    if (error_ != 0) {                                    \
      return error_;                                      \
    }                                                     \
  } while (0)

#endif
