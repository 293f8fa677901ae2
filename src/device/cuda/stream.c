/* CUDA streams: work is issued at once, or, behind a host function, by the stream's worker (cuda.h). */
#include <string.h>

#include "device/cuda/cuda.h"

/* A task of a worker: a host function, or work to issue. */
typedef struct queued {
  dc__cuda_stream *stream;
  dc__task_fn fn; /* NULL: issue */
  dc__cuda_issue_fn issue;
  _Alignas(max_align_t) unsigned char args[DC__TASK_BYTES];
} queued;

_Static_assert(offsetof(queued, args) <= DC__TASK_HEAD, "the head must fit before a task's arguments");

/* The stream whose worker runs a task on this thread; 0: none. */
static _Thread_local uint64_t own;
/* The stream to which this thread issues work just now: what that asks of the stream is its part; 0: none. */
static _Thread_local uint64_t issuing;

bool dc__cuda_is_own(uint64_t serial) {
  return own == serial;
}

/* ---- life ---- */

static dc__cuda_stream *make(dc__cuda_device *device, dc__cu_stream native) {
  dc__cuda_stream *self = dc__calloc(1, sizeof *self);
  if (self != NULL) {
    self->head.device = &device->head;
    self->native = native;
    self->serial = atomic_fetch_add(&device->serials, 1) + 1;
    atomic_init(&self->refs, 1);
    atomic_init(&self->queued, 0);
    pthread_mutex_init(&self->mutex, NULL);
  }
  return self;
}

/* Of somebody else's stream, which lives on and may still run our kernels: the device must not close before. It cannot
 * wait for the whole context then, which would spoil whatever somebody captures. What a graph holds runs when its owner
 * launches it, which is his to know. */
static void let_go(dc__cuda_stream *stream) {
  dc__cuda_mark *mark;
  if (dc__cuda_stream_captures(&stream->head)) {
    return;
  }
  if (dc__cuda_mark_record(stream, &mark) != DC_OK) {
    (void)dc__cuda_stream_drain(stream);
    return;
  }
  (void)dc__cuda_mark_wait(mark, (dc__cuda_stream *)((dc__cuda_device *)stream->head.device)->others);
}

static void release(dc__cuda_stream *stream) {
  if (atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  bool keeps = !stream->inner;
  if (stream->wrapped) {
    let_go(stream);
  } else {
    dc__cuda_entry entry = dc__cuda_enter(device);
    (void)DC__CUDA_KEEP(device, cuStreamSynchronize, stream->native);
    (void)DC__CUDA_KEEP(device, cuStreamDestroy_v2, stream->native);
    dc__cuda_leave(entry);
  }
  pthread_mutex_destroy(&stream->mutex);
  dc__free(stream);
  if (keeps) {
    dc__device_release(&device->head);
  }
}

static dc_status create(dc__cuda_device *device, dc__cuda_stream **stream) {
  dc__cu_stream native;
  DC__TRY(dc__cuda_check(&device->head));
  dc__cuda_entry entry = dc__cuda_enter(device);
  dc__cu_result error = device->driver.cuStreamCreate(&native, DC__CU_STREAM_NON_BLOCKING);
  dc__cuda_leave(entry);
  if (error != 0) {
    return dc__cuda_refused(device, "cuStreamCreate", error);
  }
  *stream = make(device, native);
  if (*stream == NULL) {
    entry = dc__cuda_enter(device);
    (void)device->driver.cuStreamDestroy_v2(native);
    dc__cuda_leave(entry);
    return DC_E_NO_MEMORY;
  }
  return DC_OK;
}

dc_status dc__cuda_stream_create(dc_device *device, dc_stream **stream) {
  dc__cuda_stream *self;
  DC__TRY(create((dc__cuda_device *)device, &self));
  dc__device_retain(device);
  *stream = &self->head;
  return DC_OK;
}

dc_status dc__cuda_inner_create(dc__cuda_device *device, dc_stream **stream) {
  dc__cuda_stream *self;
  DC__TRY(create(device, &self));
  self->inner = true;
  *stream = &self->head;
  return DC_OK;
}

dc_status dc__cuda_stream_wrap(dc_device *device, void *native, dc_stream **stream) {
  dc__cuda_stream *self = make((dc__cuda_device *)device, native);
  if (self == NULL) {
    return DC_E_NO_MEMORY;
  }
  self->wrapped = true;
  dc__device_retain(device);
  *stream = &self->head;
  return DC_OK;
}

bool dc__cuda_stream_captures(dc_stream *stream) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  dc__cuda_device *device = (dc__cuda_device *)stream->device;
  if (!self->wrapped) { /* nobody else knows it */
    return false;
  }
  dc__cuda_entry entry = dc__cuda_enter(device);
  bool captures = dc__cuda_is_capturing(self);
  dc__cuda_leave(entry);
  return captures;
}

void dc__cuda_stream_destroy(dc_stream *stream) {
  dc__cuda_stream *self = (dc__cuda_stream *)stream;
  if (self->worker != NULL) {
    self->worker->device->ops->stream_destroy(self->worker); /* drains, unless this is a task of it */
  }
  release(self);
}

/* ---- work ---- */

static void issue_now(dc__cuda_stream *stream, dc__cuda_issue_fn issue, void *args) {
  dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  const uint64_t outer = issuing;
  dc__cuda_entry entry = dc__cuda_enter(device);
  issuing = stream->serial;
  issue(stream, args);
  issuing = outer;
  dc__cuda_leave(entry);
}

/* Until what was issued is done. */
static void issue_drain(dc__cuda_stream *stream, void *args) {
  (void)args;
  (void)DC__CUDA_KEEP((dc__cuda_device *)stream->head.device, cuStreamSynchronize, stream->native);
}

static void run_queued(void *args) {
  queued *task = args;
  dc__cuda_stream *stream = task->stream;
  own = stream->serial;
  issue_now(stream, task->fn != NULL ? issue_drain : task->issue, task->args);
  if (task->fn != NULL) {
    task->fn(task->args);
  }
  own = 0;
  atomic_fetch_sub_explicit(&stream->queued, 1, memory_order_release);
  release(stream);
}

dc_status dc__cuda_stream_drain(dc__cuda_stream *stream) {
  DC__TRY(dc__cuda_submit(stream, issue_drain, NULL, 0, false));
  if (issuing == stream->serial) {
    return DC_OK;
  }
  pthread_mutex_lock(&stream->mutex);
  dc_stream *worker = stream->worker;
  pthread_mutex_unlock(&stream->mutex);
  return dc__stream_sync(worker, 0);
}

static dc_status need_worker(dc__cuda_stream *stream) {
  const dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  return stream->worker != NULL ? DC_OK : device->cpu->ops->stream_create(device->cpu, &stream->worker);
}

/* The mutex is held, or this is a task of the worker itself. */
static dc_status queue(dc__cuda_stream *stream, queued *task, const void *args, size_t bytes) {
  task->stream = stream;
  if (bytes > 0) {
    memcpy(task->args, args, bytes);
  }
  atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&stream->queued, 1, memory_order_relaxed);
  dc_status status =
      stream->worker->device->ops->stream_call(stream->worker, run_queued, task, offsetof(queued, args) + bytes);
  if (status !=
      DC_OK) { /* refused: a task of this very stream, and the queue is full; it is running, so none was last */
    atomic_fetch_sub_explicit(&stream->queued, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_relaxed);
  }
  return status;
}

dc_status dc__cuda_submit(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes,
                          bool later) {
  queued task = {.issue = issue};
  if (issuing != stream->serial && dc__cuda_is_own(stream->serial)) {
    return queue(stream, &task, args, bytes);
  }
  if (bytes > 0) {
    memcpy(task.args, args, bytes);
  }
  if (issuing == stream->serial) { /* this is part of what is being issued, by whoever keeps the order */
    issue_now(stream, issue, task.args);
    return DC_OK;
  }
  dc_status status = DC_OK;
  pthread_mutex_lock(&stream->mutex);
  if (stream->wrapped || (!later && atomic_load_explicit(&stream->queued, memory_order_acquire) == 0)) {
    issue_now(stream, issue, task.args);
  } else {
    status = need_worker(stream);
    status = status != DC_OK ? status : queue(stream, &task, args, bytes);
  }
  pthread_mutex_unlock(&stream->mutex);
  return status;
}

/* Who owns a wrapped stream may queue behind our back, so nothing of it can wait for a worker: its host functions are
 * the calling thread's. */
static dc_status call_here(dc__cuda_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
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
  queued task = {.fn = fn};
  if (self->wrapped || issuing == self->serial) {
    return call_here(self, fn, args, bytes);
  }
  if (dc__cuda_is_own(self->serial)) {
    return queue(self, &task, args, bytes);
  }
  atomic_fetch_add_explicit(&self->refs, 1, memory_order_relaxed); /* the task may destroy the stream at once */
  pthread_mutex_lock(&self->mutex);
  dc_status status = need_worker(self);
  status = status != DC_OK ? status : queue(self, &task, args, bytes);
  pthread_mutex_unlock(&self->mutex);
  release(self);
  return status;
}
