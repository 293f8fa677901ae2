/* Recorded points in streams. Each owns an event of the driver's, and returns to the device's pool with its last
 * reference. A wait that was issued keeps its target, so the driver's event may be recorded again. */
#include <errno.h>
#include <sched.h>
#include <time.h>

#include "device/cuda/cuda.h"

/* One lock for all devices: a card may be open several times, and a thread may wait on one handle for a record that
 * another handle's stream issues. */
static struct {
  pthread_once_t once;
  pthread_mutex_t mutex; /* protects changes of state from DC__EVENT_QUEUED */
  pthread_cond_t changed;
} issued = {.once = PTHREAD_ONCE_INIT, .mutex = PTHREAD_MUTEX_INITIALIZER};

static void issued_init(void) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&issued.changed, &attributes);
  pthread_condattr_destroy(&attributes);
}

void dc__cuda_event_pool_init(void) {
  (void)pthread_once(&issued.once, issued_init);
}

static dc__cuda_device *pool_event_device(const dc__cuda_stream *stream) {
  return (dc__cuda_device *)stream->head.device;
}

/* ---- allocation ---- */

/* Works for a failed device too. */
static dc_status pool_event_alloc(dc__cuda_device *device, dc__cuda_pool_event **point) {
  pthread_mutex_lock(&device->mutex);
  dc__cuda_pool_event *m = device->free_events;
  if (m != NULL) {
    device->free_events = m->next;
  }
  pthread_mutex_unlock(&device->mutex);
  if (m == NULL) {
    m = dc__calloc(1, sizeof *m);
    if (m == NULL) {
      return DC_E_NO_MEMORY;
    }
    dc__cuda_context_guard entry = dc__cuda_context_enter(device);
    if (DC__CUDA_KEEP(device, cuEventCreate, &m->native, DC__CU_EVENT_BLOCKING_SYNC | DC__CU_EVENT_NO_TIMING) !=
        DC_OK) {
      m->native = NULL;
    }
    dc__cuda_context_leave(entry);
  }
  *point = m;
  return DC_OK;
}

void dc__cuda_pool_event_release(dc__cuda_device *device, dc__cuda_pool_event *point) {
  if (point == NULL || atomic_fetch_sub_explicit(&point->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  if (point->native == NULL) {
    dc__free(point);
  } else {
    pthread_mutex_lock(&device->mutex);
    point->next = device->free_events;
    device->free_events = point;
    pthread_mutex_unlock(&device->mutex);
  }
}

void dc__cuda_event_pool_destroy(dc__cuda_device *device) {
  while (device->free_events != NULL) {
    dc__cuda_pool_event *next = device->free_events->next;
    (void)device->driver.cuEventDestroy_v2(device->free_events->native);
    dc__free(device->free_events);
    device->free_events = next;
  }
}

/* ---- record and wait ---- */

static void issue_record(dc__cuda_stream *stream, void *args) {
  dc__cuda_pool_event *point = *(dc__cuda_pool_event **)args;
  dc__cuda_device *device = pool_event_device(stream);
  point->captured = dc__cuda_is_capturing(stream);
  bool recorded =
      point->native != NULL && DC__CUDA_KEEP_ON(stream, cuEventRecord, point->native, stream->native) == DC_OK;
  pthread_mutex_lock(&issued.mutex);
  atomic_store(&point->state, recorded ? DC__EVENT_ISSUED : DC__EVENT_LOST);
  pthread_cond_broadcast(&issued.changed);
  pthread_mutex_unlock(&issued.mutex);
  dc__cuda_pool_event_release(device, point);
}

dc_status dc__cuda_pool_event_record(dc__cuda_stream *stream, dc__cuda_pool_event **point) {
  dc__cuda_device *device = pool_event_device(stream);
  dc__cuda_pool_event *m;
  DC__TRY(pool_event_alloc(device, &m));
  atomic_store(&m->refs, 2); /* references of the caller and of the record */
  atomic_store(&m->state, DC__EVENT_QUEUED);
  m->stream = stream->serial;
  dc_status status = dc__cuda_submit(stream, issue_record, &m, sizeof m, false);
  if (status != DC_OK) {
    dc__cuda_pool_event_release(device, m);
    dc__cuda_pool_event_release(device, m);
    return status;
  }
  *point = m;
  return DC_OK;
}

/* Waits until the point's record was issued. Returns false if the deadline, in nanoseconds, passes first; 0 is none. */
static bool wait_until_issued(dc__cuda_pool_event *point, int64_t deadline) {
  const struct timespec end = {.tv_sec = (time_t)(deadline / 1000000000), .tv_nsec = (long)(deadline % 1000000000)};
  bool is_late = false;
  pthread_mutex_lock(&issued.mutex);
  while (atomic_load(&point->state) == DC__EVENT_QUEUED && !is_late) {
    if (deadline == 0) {
      pthread_cond_wait(&issued.changed, &issued.mutex);
    } else {
      is_late = pthread_cond_timedwait(&issued.changed, &issued.mutex, &end) == ETIMEDOUT;
    }
  }
  is_late = is_late && atomic_load(&point->state) == DC__EVENT_QUEUED;
  pthread_mutex_unlock(&issued.mutex);
  return !is_late;
}

/* Waits for an issued or lost point. It has passed afterwards, unless the driver could wait neither for it nor for the
 * device. */
static void wait_until_passed(dc__cuda_device *device, dc__cuda_pool_event *point) {
  bool passed = false;
  if (atomic_load(&point->state) == DC__EVENT_ISSUED) {
    dc__cuda_context_guard entry = dc__cuda_context_enter(device);
    dc__cu_result error = device->driver.cuEventSynchronize(point->native);
    dc__cuda_context_leave(entry);
    (void)dc__cuda_keep_error(device, "cuEventSynchronize", error);
    passed = error == 0 || dc__cuda_is_lost(error);
  }
  if (passed || dc__cuda_synchronize(device)) {
    atomic_store(&point->state, DC__EVENT_PASSED);
  }
}

/* A graph cannot wait for work outside of it, so the host waits for such work during the capture. The host also waits
 * if the driver refuses the stream's wait, unless that is for work of a capture, which never passes. */
static void issue_wait(dc__cuda_stream *stream, void *args) {
  dc__cuda_pool_event *point = *(dc__cuda_pool_event **)args;
  dc__cuda_device *device = pool_event_device(stream);
  (void)wait_until_issued(point, 0);
  int state = atomic_load(&point->state);
  bool by_host = state == DC__EVENT_LOST || (!point->captured && dc__cuda_is_capturing(stream));
  if (point->captured) {
    dc__cuda_join_capture(stream);
  }
  if (state != DC__EVENT_PASSED &&
      (by_host ||
       (DC__CUDA_KEEP_ON(stream, cuStreamWaitEvent, stream->native, point->native, 0) != DC_OK && !point->captured))) {
    wait_until_passed(device, point);
  }
  dc__cuda_pool_event_release(device, point);
}

static dc_status own_stream_error(void) {
  return dc__fail(DC_E_STATE, "a task must not wait for its own stream, which waits for the task");
}

/* The caller has read `state` before, since the issuing thread writes it last. A spoiled capture takes no record, so
 * its point is lost. */
static bool is_in_capture(const dc__cuda_pool_event *point, int state) {
  return (state == DC__EVENT_ISSUED || state == DC__EVENT_LOST) && point->captured;
}

dc_status dc__cuda_pool_event_wait(dc__cuda_pool_event *point, dc__cuda_stream *stream) {
  dc__cuda_device *device = pool_event_device(stream);
  int state = atomic_load(&point->state);
  dc_status status = DC_OK;
  if (state == DC__EVENT_PASSED || point->stream == stream->serial) { /* a stream is in order with its own points */
    dc__cuda_pool_event_release(device, point);
    return DC_OK;
  }
  if (stream->is_foreign && state == DC__EVENT_QUEUED && dc__cuda_is_own_worker(point->stream)) {
    status = own_stream_error();
  } else if (state == DC__EVENT_LOST && is_in_capture(point, state)) { /* later work would run outside of the capture */
    status = dc__fail(DC_E_STATE, "the event was recorded in a capture of a CUDA graph that had failed");
  } else {
    status = dc__cuda_submit(stream, issue_wait, &point, sizeof point, state == DC__EVENT_QUEUED);
  }
  if (status != DC_OK) {
    dc__cuda_pool_event_release(device, point);
  }
  return status;
}

/* ---- on the host ---- */

bool dc__cuda_pool_event_query(dc__cuda_device *device, dc__cuda_pool_event *point) {
  int state = atomic_load(&point->state);
  if (state != DC__EVENT_ISSUED) {
    return state == DC__EVENT_PASSED;
  }
  if (point->captured) {
    return false; /* it passes at each run of the graph, unseen by the host */
  }
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  dc__cu_result error = device->driver.cuEventQuery(point->native);
  dc__cuda_context_leave(entry);
  if (error == DC__CU_NOT_READY) {
    return false;
  }
  (void)dc__cuda_keep_error(device, "cuEventQuery", error);
  bool passed = error == 0 || dc__cuda_is_lost(error);
  if (passed) {
    atomic_store(&point->state, DC__EVENT_PASSED);
  }
  return passed;
}

/* The driver has no wait with a deadline, so the event is polled at growing intervals of at most a millisecond. Returns
 * false if the deadline passes first. */
static bool poll_until(dc__cuda_device *device, dc__cuda_pool_event *point, int64_t deadline) {
  for (int64_t pause = 0; atomic_load(&point->state) != DC__EVENT_LOST && !dc__cuda_pool_event_query(device, point);) {
    if (dc__now_ns() >= deadline) {
      return false;
    }
    if (pause < 50000) {
      sched_yield();
      pause += 1000;
    } else {
      nanosleep(&(struct timespec){0, (long)pause}, NULL);
      pause = pause * 2 < 1000000 ? pause * 2 : 1000000;
    }
  }
  return true;
}

static dc_status timeout_error(int64_t timeout_ns) {
  return dc__fail(DC_E_TIMEOUT, "work was still pending after timeout_ns = %lld", (long long)timeout_ns);
}

dc_status dc__cuda_pool_event_sync(dc__cuda_device *device, dc__cuda_pool_event *point, int64_t timeout_ns) {
  if (atomic_load(&point->state) == DC__EVENT_QUEUED && dc__cuda_is_own_worker(point->stream)) {
    return own_stream_error();
  }
  int64_t now = dc__now_ns();
  int64_t deadline = timeout_ns == 0 ? 0 : timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
  if (!wait_until_issued(point, deadline)) {
    return timeout_error(timeout_ns);
  }
  if (is_in_capture(point, atomic_load(&point->state))) {
    return dc__fail(DC_E_STATE, "the event was recorded in a capture of a CUDA graph, so the host cannot wait for it");
  }
  if (deadline != 0) {
    return poll_until(device, point, deadline) ? dc__cuda_check(&device->head) : timeout_error(timeout_ns);
  }
  if (atomic_load(&point->state) != DC__EVENT_PASSED) {
    wait_until_passed(device, point);
  }
  return dc__cuda_check(&device->head);
}

dc_status dc__cuda_stream_sync(dc_stream *stream, int64_t timeout_ns) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  if (dc__cuda_is_own_worker(self->serial)) {
    return own_stream_error();
  }
  dc__cuda_pool_event *point;
  dc_status status = dc__cuda_pool_event_record(self, &point);
  if (status != DC_OK) {
    return timeout_ns == 0 ? dc__cuda_stream_drain(self) : status;
  }
  status = dc__cuda_pool_event_sync(pool_event_device(self), point, timeout_ns);
  dc__cuda_pool_event_release(pool_event_device(self), point);
  return status;
}
