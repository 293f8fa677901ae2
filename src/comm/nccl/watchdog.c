/* Collectives in flight and their watchdog. Earlier work on a stream is the caller's and has no deadline, so a
 * collective's deadline runs from the event that precedes it. It covers the wait for slower cards, which is its
 * purpose. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/nccl/nccl.h"

/* Poll intervals with collectives in flight, and with captured graphs only. */
static const int64_t poll_interval_ns = INT64_C(5000000);
static const int64_t idle_interval_ns = INT64_C(100000000);

/* ---- begin and end; under collective_mutex ---- */

static dc_status create_inflight(dc__nccl *self, dc__nccl_inflight **inflight) {
  const dc__device_ops *ops = self->device->ops;
  dc__nccl_inflight *f = dc__calloc(1, sizeof *f);
  if (f == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc_status status = ops->event_create(self->device, &f->begun);
  status = status != DC_OK ? status : ops->event_create(self->device, &f->done);
  if (status == DC_OK) {
    *inflight = f;
    return DC_OK;
  }
  if (f->begun != NULL) {
    ops->event_destroy(f->begun);
  }
  dc__free(f);
  return status;
}

/* Reuses slots: few collectives are in flight at once. */
static dc_status alloc_inflight(dc__nccl *self, dc__nccl_inflight **inflight) {
  pthread_mutex_lock(&self->watch_mutex);
  *inflight = self->free_list;
  if (*inflight != NULL) {
    self->free_list = (*inflight)->next;
  }
  pthread_mutex_unlock(&self->watch_mutex);
  return *inflight != NULL ? DC_OK : create_inflight(self, inflight);
}

/* An event is reused only after its collective is done, so a wait for a reused event still covers the previous one. */
static void wait_for_previous(dc__nccl *self, dc_stream *stream) {
  pthread_mutex_lock(&self->watch_mutex);
  dc_event *before = self->last != NULL ? self->last->done : NULL;
  pthread_mutex_unlock(&self->watch_mutex);
  if (before != NULL) {
    dc__event_wait(before, stream);
  }
}

dc_status dc__nccl_begin(dc__nccl *self, const dc__coll *coll, const char *name, dc__nccl_inflight **inflight) {
  dc__nccl_inflight *f;
  DC__TRY(alloc_inflight(self, &f));
  snprintf(f->name, sizeof f->name, "%s", name);
  f->next = NULL;
  f->since = 0;
  f->span = coll->tag.span;
  wait_for_previous(self, coll->stream);
  dc__event_record(f->begun, coll->stream);
  *inflight = f;
  return DC_OK;
}

void dc__nccl_end(dc__nccl *self, dc_stream *stream, dc__nccl_inflight *inflight) {
  dc__event_record(inflight->done, stream);
  pthread_mutex_lock(&self->watch_mutex);
  if (self->last != NULL) {
    self->last->next = inflight;
  } else {
    self->first = inflight;
    pthread_cond_signal(&self->changed);
  }
  self->last = inflight;
  atomic_fetch_add(&self->num_watched, 1);
  pthread_mutex_unlock(&self->watch_mutex);
}

void dc__nccl_mark_failed(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  for (dc__nccl_inflight *f = self->first; f != NULL; f = f->next) {
    if (f->span != NULL && !dc__event_passed(f->done)) {
      atomic_store(&f->span->failed, 1);
    }
  }
  pthread_mutex_unlock(&self->watch_mutex);
}

void dc__nccl_note_capture(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  if (!self->captured) {
    self->captured = true;
    atomic_fetch_add(&self->num_watched, 1);
    pthread_cond_signal(&self->changed);
  }
  pthread_mutex_unlock(&self->watch_mutex);
}

/* ---- completion ---- */

static dc__nccl_inflight *first_inflight(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  dc__nccl_inflight *first = self->first;
  pthread_mutex_unlock(&self->watch_mutex);
  return first;
}

/* Retires the first collective, whose event has passed. Events pass after aborted kernels too, so this returns NCCL's
 * error. */
static dc_status retire_first(dc__nccl *self) {
  dc_status status = dc__nccl_get_async_error(self, "a collective", NULL);
  pthread_mutex_lock(&self->watch_mutex);
  dc__nccl_inflight *inflight = self->first;
  self->first = inflight->next;
  self->last = self->first == NULL ? NULL : self->last;
  inflight->next = self->free_list;
  self->free_list = inflight;
  atomic_fetch_sub(&self->num_watched, 1);
  pthread_mutex_unlock(&self->watch_mutex);
  return status;
}

/* ---- the watchdog thread ---- */

void dc__nccl_fail(dc__nccl *self, dc_status status) {
  dc__comm_fail(&self->head, status);
  pthread_mutex_lock(&self->watch_mutex);
  pthread_cond_signal(&self->changed);
  pthread_mutex_unlock(&self->watch_mutex);
}

static bool has_failed(const dc__nccl *self) {
  return atomic_load_explicit(&self->head.failed, memory_order_acquire) != 0;
}

/* Waits for the next poll. False once the watchdog stops. */
static bool wait_for_poll(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  while (self->first == NULL && !self->captured && !self->stopping && !has_failed(self)) {
    pthread_cond_wait(&self->changed, &self->watch_mutex);
    self->num_wakeups++;
  }
  if (!self->stopping && !has_failed(self)) {
    int64_t until = dc__now_ns() + (self->first != NULL ? poll_interval_ns : idle_interval_ns);
    const struct timespec end = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    (void)pthread_cond_timedwait(&self->changed, &self->watch_mutex, &end);
    self->num_wakeups++;
  }
  bool goes_on = !self->stopping;
  pthread_mutex_unlock(&self->watch_mutex);
  return goes_on;
}

static dc_status check_inflight(dc__nccl *self) {
  dc__nccl_inflight *f;
  while ((f = first_inflight(self)) != NULL && dc__event_passed(f->done)) {
    DC__TRY(retire_first(self));
  }
  if (f != NULL && f->since == 0 && dc__event_passed(f->begun)) {
    f->since = dc__now_ns();
  }
  DC__TRY(dc__device_check(self->device)); /* peers wait for what a failed device never computes */
  DC__TRY(dc__nccl_get_async_error(self, "a collective", NULL));
  return dc__nccl_check_progress(self, "its kernels", f != NULL ? f->name : "a graph", f != NULL ? f->since : 0,
                                 self->head.timeout_ns);
}

/* Polls until it is stopped or the communicator fails. A failure aborts the communicator. */
static void *nccl_watchdog_main(void *arg) {
  dc__nccl *self = arg;
  dc_status status = DC_OK;
  while (status == DC_OK && wait_for_poll(self)) {
    status = dc__comm_check(&self->head);
    status = status != DC_OK ? status : check_inflight(self);
  }
  if (has_failed(self) || status != DC_OK) {
    status = status != DC_OK ? status : dc__comm_check(&self->head);
    dc__nccl_abort(self, status);
  }
  return NULL;
}

dc_status dc__nccl_watchdog_start(dc__nccl *self) {
  int error = pthread_create(&self->watchdog, NULL, nccl_watchdog_main, self);
  return error == 0 ? DC_OK
                    : dc__fail(DC_E_SYSTEM, "the thread that watches NCCL could not be started: %s", strerror(error));
}

/* Waits until the last collective passes, or the watchdog aborts it and NCCL's kernels end. Then stops the thread and
 * retires the rest, also on a device whose events no longer work. */
void dc__nccl_watchdog_stop(dc__nccl *self) {
  const dc__device_ops *ops = self->device->ops;
  pthread_mutex_lock(&self->watch_mutex);
  dc_event *last = self->last != NULL ? self->last->done : NULL;
  pthread_mutex_unlock(&self->watch_mutex);
  if (last != NULL) {
    (void)ops->event_sync(last, 0);
  }
  pthread_mutex_lock(&self->watch_mutex);
  self->stopping = true;
  pthread_cond_signal(&self->changed);
  pthread_mutex_unlock(&self->watch_mutex);
  pthread_join(self->watchdog, NULL);
  while (self->first != NULL) {
    (void)ops->event_sync(self->first->done, 0);
    dc_status status = retire_first(self);
    if (status != DC_OK) {
      dc__nccl_abort(self, status);
    }
  }
  while (self->free_list != NULL) {
    dc__nccl_inflight *next = self->free_list->next;
    ops->event_destroy(self->free_list->begun);
    ops->event_destroy(self->free_list->done);
    dc__free(self->free_list);
    self->free_list = next;
  }
}
