/* Events of the simulated driver. */
#include <stdlib.h>

#include "stream.h"

struct CUevent_st {
  moment *latest; /* the latest record; NULL: none */
  bool captured, timed;
  int device;
};

static void drop(moment *m) {
  if (m != NULL && --m->refs == 0) {
    free(m);
  }
}

int cuEventCreate(dc__cu_event *event, unsigned flags) {
  ENTER(true);
  if ((flags & ~(unsigned)(DC__CU_EVENT_BLOCKING_SYNC | DC__CU_EVENT_NO_TIMING)) != 0) {
    return INVALID_VALUE;
  }
  *event = calloc(1, sizeof **event);
  (*event)->timed = (flags & DC__CU_EVENT_NO_TIMING) == 0;
  (*event)->device = cudasim_current();
  count_live(1);
  return 0;
}

int cuEventDestroy_v2(dc__cu_event event) {
  int error = enter(__func__, true);
  pthread_mutex_lock(&queue_mutex);
  drop(event->latest);
  free(event);
  pthread_mutex_unlock(&queue_mutex);
  count_live(-1);
  return error;
}

static void run_record(void *args) {
  moment *m = *(moment **)args;
  pthread_mutex_lock(&queue_mutex);
  m->on = NULL;
  clock_gettime(CLOCK_MONOTONIC, &m->time);
  drop(m);
  queue_progress();
  pthread_mutex_unlock(&queue_mutex);
}

int cuEventRecord(dc__cu_event event, dc__cu_stream on) {
  ENTER(true);
  dc__cu_stream stream = queue_of(on);
  if (stream->device != ANYBODY && stream->device != event->device) {
    return INVALID_HANDLE;
  }
  pthread_mutex_lock(&queue_mutex);
  if (queue_refuses(stream)) {
    pthread_mutex_unlock(&queue_mutex);
    return CAPTURE_INVALIDATED;
  }
  drop(event->latest);
  event->latest = NULL;
  event->captured = stream->captures != NULL;
  moment *m = event->captured ? NULL : calloc(1, sizeof *m);
  if (m != NULL) {
    *m = (moment){.refs = 2, .on = stream}; /* one reference of the event, one of the record */
    event->latest = m;
  }
  pthread_mutex_unlock(&queue_mutex);
  if (m != NULL) {
    (void)push(stream, run_record, &m, sizeof m);
  }
  return 0;
}

static void run_wait(void *args) {
  moment *m = *(moment **)args;
  pthread_mutex_lock(&queue_mutex);
  queue_await(NULL, m);
  drop(m);
  pthread_mutex_unlock(&queue_mutex);
}

int cuStreamWaitEvent(dc__cu_stream of, dc__cu_event event, unsigned flags) {
  ENTER(true);
  dc__cu_stream stream = queue_of(of);
  if (flags != 0) {
    return INVALID_VALUE;
  }
  pthread_mutex_lock(&queue_mutex);
  const bool refused = queue_refuses(stream);
  moment *m = event->latest;
  bool outside =
      event->captured != (stream->captures != NULL); /* a capture cannot wait for outside work, nor the reverse */
  bool waits = m != NULL && stream->captures == NULL;
  queue_spoiled = queue_spoiled || outside;
  if (waits) {
    m->refs++;
  }
  pthread_mutex_unlock(&queue_mutex);
  if (waits) {
    (void)push(stream, run_wait, &m, sizeof m);
  }
  return refused ? CAPTURE_INVALIDATED : outside ? CAPTURE_ISOLATION : 0;
}

static int query_event(dc__cu_event event, bool wait) {
  int error = unsafe();
  pthread_mutex_lock(&queue_mutex);
  if (event->captured) {
    queue_spoiled = true;
    error = CAPTURE_UNSUPPORTED;
  }
  moment *m = event->latest;
  if (m != NULL && error == 0) {
    m->refs++;
    if (wait) {
      queue_await(NULL, m);
    }
    error = m->on != NULL ? DC__CU_NOT_READY : 0;
    drop(m);
  }
  pthread_mutex_unlock(&queue_mutex);
  return error != 0 ? error : lost();
}

int cuEventQuery(dc__cu_event event) {
  ENTER(true);
  return query_event(event, false);
}

int cuEventSynchronize(dc__cu_event event) {
  ENTER(true);
  return query_event(event, true);
}

int cuEventElapsedTime(float *milliseconds, dc__cu_event from, dc__cu_event to) {
  ENTER(true);
  pthread_mutex_lock(&queue_mutex);
  const moment *a = from->latest, *b = to->latest;
  int error = DC__CU_NOT_READY;
  if (!from->timed || !to->timed || a == NULL || b == NULL) {
    error = INVALID_HANDLE;
  } else if (a->on == NULL && b->on == NULL) {
    *milliseconds =
        (float)((double)(b->time.tv_sec - a->time.tv_sec) * 1e3 + (double)(b->time.tv_nsec - a->time.tv_nsec) / 1e6);
    error = 0;
  }
  pthread_mutex_unlock(&queue_mutex);
  return error != 0 ? error : lost();
}
