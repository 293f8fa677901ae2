/* Shared by the simulated driver's files about streams. */
#ifndef TESTS_STREAM_H
#define TESTS_STREAM_H

#include <time.h>

#include "cudasim_internal.h"

struct CUstream_st {
  dc__cu_stream next; /* in the list of all streams */
  operation *head, **tail;
  bool busy, ends;
  pthread_cond_t more;       /* wakes its thread: for an operation, or when the host waits while streams are held */
  int device;                /* ANYBODY: runs on any card */
  struct captured *captures; /* the graph into which it is being captured; NULL: none */
  pthread_t thread;
};

/* The latest graph of a thread. */
typedef struct captured {
  struct captured *next;
  pthread_t by;
  unsigned long number;
  bool ended; /* the capture has ended */
  operation *first, **tail;
} captured;

/* A record of an event, until it is done. */
typedef struct moment {
  int refs;
  dc__cu_stream on;     /* the stream that will reach it; NULL: done */
  struct timespec time; /* when it was done */
} moment;

extern pthread_mutex_t queue_mutex; /* protects all streams and events */
extern bool queue_spoiled;          /* a forbidden call has invalidated all captures under way */

/* Called with the mutex held. Awaited work also runs while streams are held. If both are NULL, waits for all
 * streams. */
void queue_await(dc__cu_stream stream, const moment *m);
void queue_progress(void);                    /* with the mutex held: makes waiters check again */
dc__cu_stream queue_of(dc__cu_stream stream); /* maps NULL to the default stream */
bool queue_refuses(dc__cu_stream stream);     /* with the mutex held: the stream is part of an invalidated capture */

#endif
