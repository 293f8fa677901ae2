/* Shared by the simulated driver's files about streams. */
#ifndef TESTS_STREAM_H
#define TESTS_STREAM_H

#include <time.h>

#include "cudasim_internal.h"

struct CUstream_st {
  dc__cu_stream next; /* all */
  operation *head, **tail;
  bool busy, ends;
  pthread_cond_t more;       /* wakes its thread: for an operation, or when the host waits for one that is held */
  int device;                /* or ANYBODY's */
  struct captured *captures; /* into this graph; NULL: not */
  pthread_t thread;
};

/* A thread's latest graph. */
typedef struct captured {
  struct captured *next;
  pthread_t by;
  unsigned long number;
  bool ended; /* the capture */
  operation *first, **tail;
} captured;

/* A record: where it is, until it is done. */
typedef struct moment {
  int refs;
  dc__cu_stream on;     /* NULL: done */
  struct timespec time; /* then */
} moment;

extern pthread_mutex_t queue_mutex; /* all of all streams and events */
extern bool queue_spoiled;          /* all captures under way, by a call that no capture allows */

/* With the mutex held. Awaited work runs also while streams are held. If both are NULL, all streams are awaited. */
void queue_await(dc__cu_stream stream, const moment *m);
void queue_progress(void);                    /* with the mutex held: waiters check again */
dc__cu_stream queue_of(dc__cu_stream stream); /* NULL is the default stream */
bool queue_refuses(dc__cu_stream stream);     /* with the mutex held: it is part of a spoiled capture */

#endif
