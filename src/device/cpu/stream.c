/* CPU streams: a worker thread and a ring of tasks. The worker sleeps when it has nothing to do, because a machine
 * may run as many ranks as it has cores. */
#define _GNU_SOURCE /* pthread_setname_np */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "device/cpu/cpu.h"

enum { SPIN_NS = 5000 };

/* The stream whose worker this thread is, else NULL. A worker that waited for its own stream would wait forever. */
static _Thread_local dc__cpu_stream *own_stream;

dc__cpu_stream *dc__cpu_stream_retain(dc__cpu_stream *stream) {
  atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
  return stream;
}

void dc__cpu_stream_release(dc__cpu_stream *stream) {
  if (stream == NULL || atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  pthread_cond_destroy(&stream->progress);
  pthread_cond_destroy(&stream->work);
  pthread_mutex_destroy(&stream->mutex);
  dc__device_release(stream->head.device);
  dc__free(stream->ring);
  dc__free(stream);
}

/* A waiter yields while it spins, since the worker may need its core. */
static bool spin_until_reached(dc__cpu_stream *stream, uint64_t count) {
  int64_t end = dc__now_ns() + SPIN_NS;
  do {
    if (dc__cpu_stream_reached(stream, count)) {
      return true;
    }
    sched_yield();
  } while (dc__now_ns() < end);
  return false;
}

/* The worker does not yield: that would cost the program's thread two context switches for each task. */
static void spin_for_task(dc__cpu_stream *stream, uint64_t done) {
  bool queued = false;
  for (int spins = dc__spin_begin(&stream->spin); spins > 0 && !queued; spins--) {
    dc__cpu_relax();
    queued = atomic_load_explicit(&stream->queued, memory_order_acquire) > done;
  }
  (void)dc__spin_end(&stream->spin, queued);
}

/* Waits for the task after the first `done` ones, with the mutex held. NULL if there is none and the stream was
 * destroyed. */
static dc__cpu_task *next_task(dc__cpu_stream *stream, uint64_t done) {
  if (atomic_load_explicit(&stream->queued, memory_order_relaxed) == done && !stream->stop) {
    pthread_mutex_unlock(&stream->mutex);
    spin_for_task(stream, done);
    pthread_mutex_lock(&stream->mutex);
  }
  while (atomic_load_explicit(&stream->queued, memory_order_relaxed) == done) {
    if (stream->stop) {
      return NULL;
    }
    stream->asleep = true;
    pthread_cond_wait(&stream->work, &stream->mutex);
    stream->asleep = false;
  }
  return &stream->ring[done % DC__CPU_QUEUE];
}

static void cpu_task_set(dc__cpu_task *task, dc__task_fn fn, const void *args, size_t bytes) {
  task->fn = fn;
  if (bytes > 0) {
    memcpy(task->args, args, bytes);
  }
}

/* Queues a task behind the full ring. This is for calls by the stream's own tasks, which would wait for themselves if
 * they waited for a slot. */
static dc_status cpu_stream_spill(dc__cpu_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  dc__cpu_spill *last = dc__calloc(1, sizeof(*last) + bytes);
  if (last == NULL) {
    return DC_E_NO_MEMORY;
  }
  last->fn = fn;
  last->bytes = bytes;
  if (bytes > 0) {
    memcpy(last->args, args, bytes);
  }
  *stream->spill_end = last;
  stream->spill_end = &last->next;
  return DC_OK;
}

/* Gives a free slot to the first spilled task, before threads that wait for one can take it. So the spilled tasks
 * always follow the ring's. The mutex is held. */
static void cpu_stream_refill(dc__cpu_stream *stream, dc__cpu_task *slot) {
  dc__cpu_spill *first = stream->spilled;
  if (first == NULL) {
    return;
  }
  cpu_task_set(slot, first->fn, first->args, first->bytes);
  stream->spilled = first->next;
  if (first->next == NULL) {
    stream->spill_end = &stream->spilled;
  }
  dc__free(first);
}

static void *cpu_stream_worker_main(void *arg) {
  dc__cpu_stream *stream = arg;
  own_stream = stream;
  pthread_mutex_lock(&stream->mutex);
  uint64_t done = 0;
  for (dc__cpu_task *task = next_task(stream, done); task != NULL; task = next_task(stream, done)) {
    pthread_mutex_unlock(&stream->mutex);
    task->fn(task->args);
    pthread_mutex_lock(&stream->mutex);
    cpu_stream_refill(stream, task);
    done++;
    atomic_store_explicit(&stream->done, done, memory_order_release);
    if (done >= stream->wake_at) {
      stream->wake_at = UINT64_MAX; /* a waiter for a larger count sets it again */
      pthread_cond_broadcast(&stream->progress);
    }
  }
  /* Events may keep the struct for long, so its largest part is freed now. */
  dc__free(stream->ring);
  stream->ring = NULL;
  pthread_mutex_unlock(&stream->mutex);
  dc__cpu_stream_release(stream);
  return NULL;
}

/* Workers block the program's signals, which its own threads handle. Faults stay enabled in the thread that causes
 * them. */
static int start_worker(dc__cpu_stream *stream) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  sigset_t blocked;
  sigset_t before;
  sigfillset(&blocked);
  for (size_t i = 0; i < DC__COUNT(faults); i++) {
    sigdelset(&blocked, faults[i]);
  }
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  int error = pthread_create(&stream->worker, NULL, cpu_stream_worker_main, stream);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) {
    (void)pthread_setname_np(stream->worker, "dc-stream"); /* for debuggers only */
  }
  return error;
}

dc_status dc__cpu_stream_create(dc_device *device, dc_stream **stream) {
  dc__cpu_stream *self = dc__calloc(1, sizeof(*self));
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  self->ring = dc__calloc(DC__CPU_QUEUE, sizeof(*self->ring));
  if (self->ring == NULL) {
    dc__free(self);
    return DC_E_NO_MEMORY;
  }
  dc__stream_head_init(&self->head, dc__device_retain(device));
  self->wake_at = UINT64_MAX;
  self->spill_end = &self->spilled;
  atomic_init(&self->refs, 2); /* the handle and the worker */
  atomic_init(&self->queued, 0);
  atomic_init(&self->done, 0);
  pthread_mutex_init(&self->mutex, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&self->work, NULL);
  pthread_cond_init(&self->progress, &attributes);
  pthread_condattr_destroy(&attributes);
  int error = start_worker(self);
  if (error != 0) {
    atomic_store(&self->refs, 1);
    dc__cpu_stream_release(self);
    return dc__fail(DC_E_SYSTEM, "device \"cpu\": no thread for a stream: %s", strerror(error));
  }
  *stream = &self->head;
  return DC_OK;
}

void dc__cpu_stream_destroy(dc_stream *stream) {
  dc__cpu_stream *self = (dc__cpu_stream *)stream;
  pthread_mutex_lock(&self->mutex);
  self->stop = true;
  pthread_cond_signal(&self->work);
  pthread_mutex_unlock(&self->mutex);
  if (own_stream == self) {
    pthread_detach(pthread_self()); /* called by a task of this stream: the worker ends once the queue is empty */
  } else {
    pthread_join(self->worker, NULL);
  }
  dc__cpu_stream_release(self);
}

uint64_t dc__thread_id(void) {
  static atomic_ullong last;
  static _Thread_local uint64_t own;
  own = own != 0 ? own : atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
  return own;
}

bool dc__thread_is_blocked(uint64_t thread) {
  if (thread == dc__thread_id() || own_stream == NULL) {
    return thread == dc__thread_id();
  }
  bool held = false;
  pthread_mutex_lock(&own_stream->mutex);
  for (const dc__cpu_sleeper *s = own_stream->sleepers; s != NULL; s = s->next) {
    held = held || (s->thread == thread && !dc__cpu_stream_reached(own_stream, s->count));
  }
  pthread_mutex_unlock(&own_stream->mutex);
  return held;
}

static void remove_sleeper(dc__cpu_stream *stream, const dc__cpu_sleeper *sleeper) {
  dc__cpu_sleeper **link = &stream->sleepers;
  while (*link != sleeper) {
    link = &(*link)->next;
  }
  *link = sleeper->next;
}

/* Sleeps until `count` tasks are done, with the mutex held; false if the deadline (NULL: none) came first. */
static bool sleep_until(dc__cpu_stream *stream, uint64_t count, const struct timespec *deadline) {
  dc__cpu_sleeper self = {stream->sleepers, dc__thread_id(), count};
  if (deadline == NULL) {
    stream->sleepers = &self;
  }
  bool in_time = true;
  while (in_time && !dc__cpu_stream_reached(stream, count)) {
    if (count < stream->wake_at) {
      stream->wake_at = count;
    }
    if (deadline == NULL) {
      pthread_cond_wait(&stream->progress, &stream->mutex);
    } else {
      in_time = pthread_cond_timedwait(&stream->progress, &stream->mutex, deadline) != ETIMEDOUT;
    }
  }
  if (deadline == NULL) {
    remove_sleeper(stream, &self);
  }
  return dc__cpu_stream_reached(stream, count);
}

dc_status dc__cpu_stream_wait(dc__cpu_stream *stream, uint64_t count, int64_t timeout_ns) {
  if (dc__cpu_stream_reached(stream, count)) {
    return DC_OK;
  }
  if (own_stream == stream) {
    return dc__fail(DC_E_STATE, "a task must not wait for its own stream, which waits for the task");
  }
  if (spin_until_reached(stream, count)) {
    return DC_OK;
  }
  struct timespec deadline;
  if (timeout_ns > 0) {
    int64_t now = dc__now_ns();
    int64_t end = timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
    deadline = (struct timespec){.tv_sec = (time_t)(end / 1000000000), .tv_nsec = (long)(end % 1000000000)};
  }
  pthread_mutex_lock(&stream->mutex);
  bool reached = sleep_until(stream, count, timeout_ns > 0 ? &deadline : NULL);
  pthread_mutex_unlock(&stream->mutex);
  return reached ? DC_OK
                 : dc__fail(DC_E_TIMEOUT, "work was still pending after timeout_ns = %lld", (long long)timeout_ns);
}

dc_status dc__cpu_stream_sync(dc_stream *stream, int64_t timeout_ns) {
  dc__cpu_stream *self = (dc__cpu_stream *)stream;
  return dc__cpu_stream_wait(self, atomic_load_explicit(&self->queued, memory_order_acquire), timeout_ns);
}

/* Whether the ring has a slot for the ticket's task. */
static bool cpu_stream_has_room(dc__cpu_stream *stream, uint64_t ticket) {
  return ticket < DC__CPU_QUEUE || dc__cpu_stream_reached(stream, ticket - DC__CPU_QUEUE + 1);
}

dc_status dc__cpu_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  dc__cpu_stream *self = (dc__cpu_stream *)stream;
  dc_status status = DC_OK;
  pthread_mutex_lock(&self->mutex);
  uint64_t ticket = atomic_load_explicit(&self->queued, memory_order_relaxed);
  while (own_stream != self && !cpu_stream_has_room(self, ticket)) {
    (void)sleep_until(self, ticket - DC__CPU_QUEUE + 1, NULL);
    ticket = atomic_load_explicit(&self->queued, memory_order_relaxed); /* others queue meanwhile */
  }
  if (cpu_stream_has_room(self, ticket)) {
    cpu_task_set(&self->ring[ticket % DC__CPU_QUEUE], fn, args, bytes);
  } else {
    status = cpu_stream_spill(self, fn, args, bytes);
  }
  bool asleep = self->asleep;
  if (status == DC_OK) {
    atomic_store_explicit(&self->queued, ticket + 1, memory_order_release);
  }
  if (asleep) {
    (void)dc__cpu_stream_retain(self); /* the task may destroy the stream before the signal */
  }
  pthread_mutex_unlock(&self->mutex);
  if (asleep) { /* not under the mutex, which the worker takes first */
    pthread_cond_signal(&self->work);
    dc__cpu_stream_release(self);
  }
  return status;
}

typedef struct copy_task {
  void *dst;
  const void *src; /* NULL: zeros */
  size_t bytes;
} copy_task;

static void run_copy(void *args) {
  const copy_task *task = args;
  if (task->src != NULL) {
    memcpy(task->dst, task->src, task->bytes);
  } else {
    memset(task->dst, 0, task->bytes);
  }
}

void dc__cpu_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  dc_status status = dc__cpu_stream_call(stream, run_copy, &(copy_task){dst, src, bytes}, sizeof(copy_task));
  if (status != DC_OK) {
    dc__cpu_keep_failure(stream->device, status);
  }
}

void dc__cpu_stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  dc__cpu_stream_copy(stream, dst, NULL, bytes);
}
