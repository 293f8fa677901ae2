/* The flight recorder's state. flight_recorder.c writes it, flight_recorder_dump.c reads it from any thread, and
 * names.c keeps the names of parameters in it. */
#ifndef DC_RUNTIME_FLIGHT_RECORDER_INTERNAL_H
#define DC_RUNTIME_FLIGHT_RECORDER_INTERNAL_H

#include "runtime/runtime.h"

enum { DC__RECORDER_ENTRIES = 4096 }; /* minimum size of the ring; only the latest so many have timestamps */

typedef struct dc__recorder_entry {
  atomic_llong serial; /* from 1; 0: never used, or being written */
  atomic_llong queued; /* dc__ticks() of the call */
  dc__op_timing span;
  atomic_llong id;
  atomic_llong bytes; /* of the whole tensors: the same on every rank */
  atomic_llong moved; /* by this rank */
  atomic_int graph;   /* ordinal; -1: none */
  atomic_int seq;     /* number of the collective in its group; 0: not a collective */
  atomic_int op;
  atomic_int kind;  /* lane | group << 8 | dtype << 16 */
  atomic_int count; /* tensors */
} dc__recorder_entry;

typedef struct dc__ring {
  int64_t capacity;
  dc__recorder_entry entries[]; /* serial s at (s - 1) % capacity */
} dc__ring;

struct dc__recorder {
  pthread_mutex_t mutex; /* guards ring, failure, folder and names against dumps from other threads */
  dc__ring *ring;
  atomic_llong recorded; /* the latest serial */
  atomic_llong dropped;
  uint32_t seq[DC__GROUPS];
  int64_t trace_capacity; /* 0: traces are not read */
  int64_t trace_next;     /* the first serial not yet read */
  int64_t first_ticks;    /* both clocks at creation, to compute their rate */
  int64_t first_ns;
  atomic_int rank;
  atomic_int world; /* 0: no group yet */
  _Atomic(const char *) transport;
  dc__failure failure; /* the first one of the context */
  char *folder;        /* where a failure is dumped; NULL: nowhere */
  dc__map names;       /* of parameters that have one: id → char * */
};

void dc__names_free(dc__recorder *r);

dc__recorder_entry *dc__ring_entry(dc__ring *ring, int64_t serial);

/* A reading of both clocks, to convert ticks to ns. */
typedef struct dc__clocks {
  int64_t ticks;
  int64_t ns;
  double rate; /* ns per tick */
} dc__clocks;
dc__clocks dc__recorder_clocks(const dc__recorder *r);
int64_t dc__clocks_ns(const dc__clocks *c, int64_t ticks); /* 0 for 0 */
/* When a span began and ended, in ns; 0: not yet. */
typedef struct dc__span_interval {
  int64_t begun;
  int64_t ended;
} dc__span_interval;
dc__span_interval dc__span_times(dc__op_timing *span, const dc__clocks *c);

#endif
