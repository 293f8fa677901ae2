/* The flight recorder's memory, for its two files: flight_recorder.c writes, flight_recorder_dump.c reads from any
 * thread. */
#ifndef DC_RUNTIME_FLIGHT_RECORDER_INTERNAL_H
#define DC_RUNTIME_FLIGHT_RECORDER_INTERNAL_H

#include "runtime/runtime.h"

enum { DC__RECORDER_ENTRIES = 4096 }; /* entries a context keeps at least; the latest ones may have a device's stamps */

typedef struct dc__recorder_entry {
  atomic_llong serial; /* from 1; 0: never used, or being written */
  atomic_llong queued; /* dc__ticks() of the call */
  dc__op_timing span;
  atomic_llong id;
  atomic_llong bytes; /* of the whole tensors: the same on every rank */
  atomic_llong moved; /* by this rank */
  atomic_int graph;   /* ordinal; -1: none */
  atomic_int seq;     /* which collective of its group; 0: it is none */
  atomic_int op;
  atomic_int kind;  /* lane | group << 8 | dtype << 16 */
  atomic_int count; /* tensors */
} dc__recorder_entry;

typedef struct dc__ring {
  int64_t capacity;
  dc__recorder_entry entries[]; /* serial s at (s - 1) % capacity */
} dc__ring;

struct dc__recorder {
  pthread_mutex_t mutex; /* the ring's place, the failure, the folder and names, against a dump from another thread */
  dc__ring *ring;
  atomic_llong recorded; /* the latest serial */
  atomic_llong dropped;
  uint32_t seq[DC__GROUPS];
  int64_t trace_capacity; /* 0: traces are not read */
  int64_t trace_next;     /* the first serial not yet read */
  int64_t first_ticks;    /* the two clocks at the beginning; at a reading they are taken again */
  int64_t first_ns;
  atomic_int rank;
  atomic_int world; /* 0: no group yet */
  _Atomic(const char *) transport;
  dc__failure failure; /* the context's first */
  char *folder;        /* where a failure is dumped; NULL: nowhere */
  dc__map names;       /* of parameters that have one: id → char * */
};

void dc__names_free(dc__recorder *r);

dc__recorder_entry *dc__ring_entry(dc__ring *ring, int64_t serial);

/* Both clocks now. */
typedef struct dc__clocks {
  int64_t ticks;
  int64_t ns;
  double rate; /* ns a tick */
} dc__clocks;
dc__clocks dc__recorder_clocks(const dc__recorder *r);
int64_t dc__clocks_ns(const dc__clocks *c, int64_t ticks); /* of 0: 0 */
/* When a span began and ended, in ns; 0: not yet. */
typedef struct dc__span_interval {
  int64_t begun;
  int64_t ended;
} dc__span_interval;
dc__span_interval dc__span_times(dc__op_timing *span, const dc__clocks *c);

#endif
