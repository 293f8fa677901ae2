/* Collectives in flight, and who watches them. What a stream has before a collective is the caller's, and has no
 * deadline; so the clock of a collective runs from when its stream has come to it, which an event tells. It includes
 * that other ranks' cards come later, which is what the deadline is for. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/nccl/nccl.h"

/* Between looks: while something is in flight, and at graphs that may be launched. */
static const int64_t slice = INT64_C(5000000);
static const int64_t beat = INT64_C(100000000);

/* ---- departures; under `turn` ---- */

/* Those that are seldom enough in flight together to be used again and again. */
static dc__nccl_flight *take(dc__nccl *self) {
  pthread_mutex_lock(&self->watch);
  dc__nccl_flight *flight = self->spare;
  if (flight != NULL) {
    self->spare = flight->next;
  }
  pthread_mutex_unlock(&self->watch);
  if (flight != NULL) {
    return flight;
  }
  const dc__device_ops *ops = self->device->ops;
  flight = dc__calloc(1, sizeof *flight);
  if (flight != NULL && (ops->event_create(self->device, &flight->begun) != DC_OK ||
                         ops->event_create(self->device, &flight->done) != DC_OK)) {
    if (flight->begun != NULL) {
      ops->event_destroy(flight->begun);
    }
    dc__free(flight);
    flight = NULL;
  }
  return flight;
}

/* The one before is done before the event of it is used again, so waiting for that is never too little. */
static void wait_for_last(dc__nccl *self, dc_stream *stream) {
  pthread_mutex_lock(&self->watch);
  dc_event *before = self->last != NULL ? self->last->done : NULL;
  pthread_mutex_unlock(&self->watch);
  if (before != NULL) {
    dc__event_wait(before, stream);
  }
}

dc_status dc__nccl_depart(dc__nccl *self, const dc__coll *coll, const char *name, dc__nccl_flight **flight) {
  dc__nccl_flight *f = take(self);
  if (f == NULL) {
    return DC_E_NO_MEMORY;
  }
  snprintf(f->name, sizeof f->name, "%s", name);
  f->next = NULL;
  f->since = 0;
  f->span = coll->tag.span;
  wait_for_last(self, coll->stream);
  dc__event_record(f->begun, coll->stream);
  *flight = f;
  return DC_OK;
}

void dc__nccl_departed(dc__nccl *self, dc_stream *stream, dc__nccl_flight *flight) {
  dc__event_record(flight->done, stream);
  pthread_mutex_lock(&self->watch);
  if (self->last != NULL) {
    self->last->next = flight;
  } else {
    self->first = flight;
    pthread_cond_signal(&self->news);
  }
  self->last = flight;
  atomic_fetch_add(&self->watched, 1);
  pthread_mutex_unlock(&self->watch);
}

void dc__nccl_mark_failed(dc__nccl *self) {
  pthread_mutex_lock(&self->watch);
  for (dc__nccl_flight *f = self->first; f != NULL; f = f->next) {
    if (f->span != NULL && !dc__event_passed(f->done)) {
      atomic_store(&f->span->failed, 1);
    }
  }
  pthread_mutex_unlock(&self->watch);
}

void dc__nccl_captured(dc__nccl *self) {
  pthread_mutex_lock(&self->watch);
  if (!self->captured) {
    self->captured = true;
    atomic_fetch_add(&self->watched, 1);
    pthread_cond_signal(&self->news);
  }
  pthread_mutex_unlock(&self->watch);
}

/* ---- arrivals ---- */

static dc__nccl_flight *get_first(dc__nccl *self) {
  pthread_mutex_lock(&self->watch);
  dc__nccl_flight *first = self->first;
  pthread_mutex_unlock(&self->watch);
  return first;
}

/* The first one has passed its event. Kernels that gave up have too, so NCCL is asked before it counts as done. */
static dc_status arrive(dc__nccl *self) {
  dc_status status = dc__nccl_ask(self, "a collective", NULL);
  pthread_mutex_lock(&self->watch);
  dc__nccl_flight *flight = self->first;
  self->first = flight->next;
  self->last = self->first == NULL ? NULL : self->last;
  flight->next = self->spare;
  self->spare = flight;
  atomic_fetch_sub(&self->watched, 1);
  pthread_mutex_unlock(&self->watch);
  return status;
}

/* ---- the watcher ---- */

void dc__nccl_fail(dc__nccl *self, dc_status status) {
  dc__comm_fail(&self->head, status);
  pthread_mutex_lock(&self->watch);
  pthread_cond_signal(&self->news);
  pthread_mutex_unlock(&self->watch);
}

static bool has_failed(const dc__nccl *self) {
  return atomic_load_explicit(&self->head.failed, memory_order_acquire) != 0;
}

/* Until it is time for a look. False: there is nothing to look at any more. */
static bool sleep_until_news(dc__nccl *self) {
  pthread_mutex_lock(&self->watch);
  while (self->first == NULL && !self->captured && !self->ends && !has_failed(self)) {
    pthread_cond_wait(&self->news, &self->watch);
  }
  if (!self->ends && !has_failed(self)) {
    int64_t until = dc__now_ns() + (self->first != NULL ? slice : beat);
    const struct timespec end = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    (void)pthread_cond_timedwait(&self->news, &self->watch, &end);
  }
  bool goes_on = !self->ends;
  pthread_mutex_unlock(&self->watch);
  return goes_on;
}

static dc_status look(dc__nccl *self) {
  dc__nccl_flight *f;
  while ((f = get_first(self)) != NULL && dc__event_passed(f->done)) {
    DC__TRY(arrive(self));
  }
  if (f != NULL && f->since == 0 && dc__event_passed(f->begun)) {
    f->since = dc__now_ns();
  }
  DC__TRY(dc__device_check(self->device)); /* it computes nothing any more that the others wait for */
  DC__TRY(dc__nccl_ask(self, "a collective", NULL));
  return dc__nccl_look(self, "its kernels", f != NULL ? f->name : "a graph", f != NULL ? f->since : 0,
                       self->head.timeout_ns);
}

/* Once the communicator has failed nobody is left to be told. */
static void *watch(void *arg) {
  dc__nccl *self = arg;
  dc_status status = DC_OK;
  while (status == DC_OK && sleep_until_news(self)) {
    status = dc__comm_check(&self->head);
    status = status != DC_OK ? status : look(self);
  }
  if (has_failed(self) || status != DC_OK) {
    status = status != DC_OK ? status : dc__comm_check(&self->head);
    dc__nccl_give_up(self, status);
  }
  return NULL;
}

dc_status dc__nccl_watcher_start(dc__nccl *self) {
  int error = pthread_create(&self->watcher, NULL, watch, self);
  return error == 0 ? DC_OK
                    : dc__fail(DC_E_SYSTEM, "the thread that watches NCCL could not be started: %s", strerror(error));
}

/* What is in flight passes, or the watcher notices why not, and NCCL's kernels end. Then the watcher goes, and what it
 * has left to itself is waited for, also on a device whose events say nothing any more. */
void dc__nccl_watcher_end(dc__nccl *self) {
  const dc__device_ops *ops = self->device->ops;
  pthread_mutex_lock(&self->watch);
  dc_event *last = self->last != NULL ? self->last->done : NULL;
  pthread_mutex_unlock(&self->watch);
  if (last != NULL) {
    (void)ops->event_sync(last, 0);
  }
  pthread_mutex_lock(&self->watch);
  self->ends = true;
  pthread_cond_signal(&self->news);
  pthread_mutex_unlock(&self->watch);
  pthread_join(self->watcher, NULL);
  while (self->first != NULL) {
    (void)ops->event_sync(self->first->done, 0);
    dc_status status = arrive(self);
    if (status != DC_OK) {
      dc__nccl_give_up(self, status);
    }
  }
  while (self->spare != NULL) {
    dc__nccl_flight *next = self->spare->next;
    ops->event_destroy(self->spare->begun);
    ops->event_destroy(self->spare->done);
    dc__free(self->spare);
    self->spare = next;
  }
}
