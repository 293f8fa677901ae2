/* CUDA streams: work is issued at once or, after a host function, by the stream's worker (cuda.h). */
#include <string.h>

#include "device/cuda/cuda.h"

/* A task of a worker: a host function, or work to issue. */
typedef struct worker_task {
  dc__cuda_stream *stream;
  dc__task_fn fn; /* NULL: call `issue` */
  dc__cuda_issue_fn issue;
  _Alignas(max_align_t) unsigned char args[DC__TASK_BYTES];
} worker_task;

_Static_assert(offsetof(worker_task, args) <= DC__TASK_HEAD, "the head must fit before a task's arguments");

/* The latest stream's serial. All devices share it, since a card may be open several times, and its handles take each
 * other's streams. */
static atomic_ullong last_serial;
/* Serial of the stream whose worker runs a task on this thread; 0 if none. */
static _Thread_local uint64_t worker_serial;
/* Serial of the stream to which this thread is issuing work; 0 if none. Nested calls belong to that work. */
static _Thread_local uint64_t issuing_serial;

bool dc__cuda_is_own_worker(uint64_t serial) {
  return worker_serial == serial;
}

/* ---- creation and destruction ---- */

static dc__cuda_stream *stream_alloc(dc__cuda_device *device, dc__cu_stream native) {
  dc__cuda_stream *self = dc__calloc(1, sizeof *self);
  if (self != NULL) {
    dc__stream_head_init(&self->head, &device->head);
    self->native = native;
    self->serial = atomic_fetch_add(&last_serial, 1) + 1;
    atomic_init(&self->refs, 1);
    atomic_init(&self->num_queued, 0);
    pthread_mutex_init(&self->mutex, NULL);
  }
  return self;
}

/* A wrapped stream outlives its handle and may still run our kernels: the device must not close before they end. So
 * foreign_sync_stream waits for them, since a wait for the whole context would break captures of other code. A graph's
 * kernels run when its owner launches it, for which the owner is responsible. */
static void stream_sync_foreign(dc__cuda_stream *stream) {
  dc__cuda_pool_event *point;
  if (dc__cuda_stream_captures(&stream->head)) {
    return;
  }
  if (dc__cuda_pool_event_record(stream, &point) != DC_OK) {
    (void)dc__cuda_stream_drain(stream);
    return;
  }
  (void)dc__cuda_pool_event_wait(point,
                                 (dc__cuda_stream *)((dc__cuda_device *)stream->head.device)->foreign_sync_stream);
}

static void stream_unref(dc__cuda_stream *stream) {
  if (atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  bool keeps = !stream->is_internal;
  if (stream->is_foreign) {
    stream_sync_foreign(stream);
  } else {
    dc__cuda_context_guard entry = dc__cuda_context_enter(device);
    (void)DC__CUDA_KEEP_ON(stream, cuStreamSynchronize, stream->native);
    (void)DC__CUDA_KEEP(device, cuStreamDestroy_v2, stream->native);
    dc__cuda_context_leave(entry);
  }
  pthread_mutex_destroy(&stream->mutex);
  dc__free(stream);
  if (keeps) {
    dc__device_release(&device->head);
  }
}

static dc_status stream_open(dc__cuda_device *device, dc__cuda_stream **stream) {
  dc__cu_stream native;
  DC__TRY(dc__cuda_check(&device->head));
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  dc__cu_result error = device->driver.cuStreamCreate(&native, DC__CU_STREAM_NON_BLOCKING);
  dc__cuda_context_leave(entry);
  if (error != 0) {
    return dc__cuda_return_error(device, "cuStreamCreate", error);
  }
  *stream = stream_alloc(device, native);
  if (*stream == NULL) {
    entry = dc__cuda_context_enter(device);
    (void)device->driver.cuStreamDestroy_v2(native);
    dc__cuda_context_leave(entry);
    return DC_E_NO_MEMORY;
  }
  return DC_OK;
}

dc_status dc__cuda_stream_create(dc_device *device, dc_stream **stream) {
  dc__cuda_stream *self;
  DC__TRY(stream_open((dc__cuda_device *)device, &self));
  dc__device_retain(device);
  *stream = &self->head;
  return DC_OK;
}

dc_status dc__cuda_internal_stream_create(dc__cuda_device *device, dc_stream **stream) {
  dc__cuda_stream *self;
  DC__TRY(stream_open(device, &self));
  self->is_internal = true;
  *stream = &self->head;
  return DC_OK;
}

dc_status dc__cuda_stream_wrap(dc_device *device, void *native, dc_stream **stream) {
  dc__cuda_stream *self = stream_alloc((dc__cuda_device *)device, native);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  self->is_foreign = true;
  dc__device_retain(device);
  *stream = &self->head;
  return DC_OK;
}

bool dc__cuda_stream_captures(dc_stream *stream) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  dc__cuda_device *device = (dc__cuda_device *)stream->device;
  if (!self->is_foreign) { /* other code does not know the stream, so it begins no capture there */
    return false;
  }
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  bool captures = dc__cuda_is_capturing(self);
  dc__cuda_context_leave(entry);
  return captures;
}

void dc__cuda_stream_destroy(dc_stream *stream) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  if (self->worker != NULL) {
    self->worker->device->ops->stream_destroy(self->worker); /* drains, unless called from one of its tasks */
  }
  stream_unref(self);
}

/* ---- work ---- */

static void issue_now(dc__cuda_stream *stream, dc__cuda_issue_fn issue, void *args) {
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  const uint64_t outer = issuing_serial;
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  issuing_serial = stream->serial;
  issue(stream, args);
  issuing_serial = outer;
  dc__cuda_context_leave(entry);
}

/* Waits for the work that was issued. */
static void issue_drain(dc__cuda_stream *stream, void *args) {
  (void)args;
  (void)DC__CUDA_KEEP_ON(stream, cuStreamSynchronize, stream->native);
}

static void worker_run_task(void *args) {
  worker_task *task = args;
  dc__cuda_stream *stream = task->stream;
  worker_serial = stream->serial;
  issue_now(stream, task->fn != NULL ? issue_drain : task->issue, task->args);
  if (task->fn != NULL) {
    task->fn(task->args);
  }
  worker_serial = 0;
  atomic_fetch_sub_explicit(&stream->num_queued, 1, memory_order_release);
  stream_unref(stream);
}

dc_status dc__cuda_stream_drain(dc__cuda_stream *stream) {
  DC__TRY(dc__cuda_submit(stream, issue_drain, NULL, 0, false));
  if (issuing_serial == stream->serial) {
    return DC_OK;
  }
  pthread_mutex_lock(&stream->mutex);
  dc_stream *worker = stream->worker;
  pthread_mutex_unlock(&stream->mutex);
  return dc__stream_sync(worker, 0);
}

static dc_status ensure_worker(dc__cuda_stream *stream) {
  const dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  return stream->worker != NULL ? DC_OK : device->cpu->ops->stream_create(device->cpu, &stream->worker);
}

/* Called with the mutex held, or from a task of the worker. */
static dc_status worker_enqueue(dc__cuda_stream *stream, worker_task *task, const void *args, size_t bytes) {
  task->stream = stream;
  if (bytes > 0) {
    memcpy(task->args, args, bytes);
  }
  atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&stream->num_queued, 1, memory_order_relaxed);
  dc_status status = stream->worker->device->ops->stream_call(stream->worker, worker_run_task, task,
                                                              offsetof(worker_task, args) + bytes);
  if (status != DC_OK) { /* the queue is full, the caller is one of its tasks, and memory is short */
    atomic_fetch_sub_explicit(&stream->num_queued, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_relaxed);
  }
  return status;
}

dc_status dc__cuda_submit(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes,
                          bool later) {
  worker_task task = {.issue = issue};
  if (issuing_serial != stream->serial && dc__cuda_is_own_worker(stream->serial)) {
    return worker_enqueue(stream, &task, args, bytes);
  }
  if (bytes > 0) {
    memcpy(task.args, args, bytes);
  }
  if (issuing_serial == stream->serial) { /* part of the work being issued, whose issuer keeps the order */
    issue_now(stream, issue, task.args);
    return DC_OK;
  }
  dc_status status = DC_OK;
  pthread_mutex_lock(&stream->mutex);
  if (stream->is_foreign || (!later && atomic_load_explicit(&stream->num_queued, memory_order_acquire) == 0)) {
    issue_now(stream, issue, task.args);
  } else {
    status = ensure_worker(stream);
    status = status != DC_OK ? status : worker_enqueue(stream, &task, args, bytes);
  }
  pthread_mutex_unlock(&stream->mutex);
  return status;
}

void dc__cuda_submit_kept(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes) {
  dc_status status = dc__cuda_submit(stream, issue, args, bytes, false);
  if (status != DC_OK) {
    dc__cuda_keep_failure(stream->head.device, status);
  }
}

/* The owner of a wrapped stream may queue work of its own, so libdc's work on it cannot wait for a worker. Its host
 * functions run on the calling thread. */
static dc_status call_inline(dc__cuda_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  _Alignas(max_align_t) unsigned char copy[DC__TASK_BYTES];
  if (dc__cuda_stream_captures(&stream->head)) {
    return dc__fail(DC_E_STATE, "the stream is captured into a CUDA graph, which cannot hold a host function");
  }
  if (bytes > 0) {
    memcpy(copy, args, bytes);
  }
  issue_now(stream, issue_drain, NULL);
  fn(copy);
  return DC_OK;
}

dc_status dc__cuda_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  worker_task task = {.fn = fn};
  if (self->is_foreign || issuing_serial == self->serial) {
    return call_inline(self, fn, args, bytes);
  }
  if (dc__cuda_is_own_worker(self->serial)) {
    return worker_enqueue(self, &task, args, bytes);
  }
  atomic_fetch_add_explicit(&self->refs, 1, memory_order_relaxed); /* the task may destroy the stream at any moment */
  pthread_mutex_lock(&self->mutex);
  dc_status status = ensure_worker(self);
  status = status != DC_OK ? status : worker_enqueue(self, &task, args, bytes);
  pthread_mutex_unlock(&self->mutex);
  stream_unref(self);
  return status;
}
