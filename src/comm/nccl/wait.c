/* Waiting for NCCL, which reports neither a missing rank nor a timeout: between polls the bootstrap and the deadline
 * are checked. */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "comm/nccl/nccl.h"

/* NCCL starts a thread at each group's end, which takes tens of microseconds. A sleep takes longer than that. So the
 * host polls for as long as such a thread may need, and sleeps only if NCCL waits for a rank. */
enum { SPIN_NS = 2000000, SLEEP_NS = 200000 };

typedef struct nccl_call {
  dc__nccl *self;
  dc__nccl_call_fn work;
  void *args;
  dc_status status;
} nccl_call;

static void nccl_run_call(void *native, void *args) {
  nccl_call *call = *(nccl_call **)args;
  call->status = call->work(call->self, native, call->args);
}

dc_status dc__nccl_call_on(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args) {
  nccl_call call = {.self = self, .work = work, .args = args, .status = DC_E_INTERNAL};
  nccl_call *ptr = &call;
  DC__TRY(self->device->ops->stream_issue(stream, nccl_run_call, &ptr, sizeof ptr, false));
  return call.status;
}

dc_status dc__nccl_call(dc__nccl *self, dc__nccl_call_fn work, void *args) {
  return dc__nccl_call_on(self, self->stream, work, args);
}

dc_status dc__nccl_check_result(const dc__nccl *self, const char *call, dc__nccl_result error) {
  if (error == DC__NCCL_OK || error == DC__NCCL_IN_PROGRESS) {
    return DC_OK;
  }
  dc_status status = error == DC__NCCL_CUDA_ERROR                                            ? DC_E_DEVICE
                     : error == DC__NCCL_REMOTE_ERROR                                        ? DC_E_PEER_DEAD
                     : error == DC__NCCL_INVALID_ARGUMENT || error == DC__NCCL_INVALID_USAGE ? DC_E_INTERNAL
                                                                                             : DC_E_SYSTEM;
  const char *last = self->library.ncclGetLastError(self->handle);
  return dc__fail(status, "NCCL %d.%d.%d on rank %" PRId32 ": %s: %s (%d)%s%.200s", self->library.version / 10000,
                  self->library.version / 100 % 100, self->library.version % 100, self->head.rank, call,
                  self->library.ncclGetErrorString(error), error, last != NULL && last[0] != '\0' ? "; " : "",
                  last != NULL ? last : "");
}

/* The handle is gone only if the communicator has failed. */
dc_status dc__nccl_check_alive(dc__nccl *self) {
  return self->handle != NULL ? DC_OK : dc__comm_check(&self->head);
}

dc_status dc__nccl_get_async_error(dc__nccl *self, const char *call, dc__nccl_result *state) {
  dc__nccl_result found = DC__NCCL_OK;
  pthread_mutex_lock(&self->api_mutex);
  dc_status status = DC_OK;
  if (self->handle != NULL) {
    status =
        dc__nccl_check_result(self, "ncclCommGetAsyncError", self->library.ncclCommGetAsyncError(self->handle, &found));
    status = status != DC_OK ? status : dc__nccl_check_result(self, call, found);
  }
  pthread_mutex_unlock(&self->api_mutex);
  if (state != NULL) {
    *state = found;
  }
  return status;
}

dc_status dc__nccl_check_progress(dc__nccl *self, const char *call, const char *what, int64_t since,
                                  int64_t timeout_ns) {
  if (self->bootstrap->ops->check_peers != NULL) {
    self->bootstrap->ops->check_peers(self->bootstrap);
  }
  DC__TRY(dc__comm_check(self->bootstrap));
  return since == 0 || dc__now_ns() - since < timeout_ns
             ? DC_OK
             : dc__fail(DC_E_TIMEOUT,
                        "rank %" PRId32 " waited %.1f s at %s for NCCL (%s): a card or a rank does not answer",
                        self->head.rank, (double)timeout_ns / 1e9, what, call);
}

dc_status dc__nccl_wait_ready(dc__nccl *self, const char *call, const char *what, int64_t timeout_ns) {
  int64_t begun = dc__now_ns();
  while (true) {
    dc__nccl_result state;
    DC__TRY(dc__nccl_get_async_error(self, call, &state));
    if (state != DC__NCCL_IN_PROGRESS) {
      return DC_OK;
    }
    if (dc__now_ns() - begun < SPIN_NS) {
      sched_yield();
    } else {
      DC__TRY(dc__nccl_check_progress(self, call, what, begun, timeout_ns));
      nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    }
  }
}

dc_status dc__nccl_call_and_wait(dc__nccl *self, dc_stream *stream, dc__nccl_call_fn work, void *args, const char *call,
                                 const char *what) {
  pthread_mutex_lock(&self->pending_mutex);
  pthread_mutex_lock(&self->api_mutex);
  dc_status status = dc__nccl_call_on(self, stream, work, args);
  pthread_mutex_unlock(&self->api_mutex);
  status = status != DC_OK ? status : dc__nccl_wait_ready(self, call, what, self->head.timeout_ns);
  pthread_mutex_unlock(&self->pending_mutex);
  if (status != DC_OK) { /* NCCL's thread may yet queue work, on memory that the caller is about to free */
    dc__nccl_abort(self, status);
  }
  return status;
}

/* ---- the end of a handle ---- */

/* ncclCommAbort ends kernels at once. Then it waits until all graphs that captured the communicator are destroyed. And
 * it waits, as ncclCommDestroy does, until other ranks of the machine have ended theirs. So a thread of its own calls
 * them, which may outlive the communicator. */
struct dc__nccl_end_thread {
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t ended;
  dc__nccl_end_fn end;
  dc__nccl_handle handle;
  dc_device *device;
  int64_t wait_ns;
  bool done;
  bool left; /* left behind, with the staging memory */
  dc__nccl_staging *staging;
};

/* How long to wait for an end, and for one after a capture. Both are longer than an end takes that nothing delays. */
static const int64_t end_wait_ns = INT64_C(5000000000);
static const int64_t captured_wait_ns = INT64_C(2000000000);

static void end_thread_free(dc__nccl_end_thread *t) {
  pthread_cond_destroy(&t->ended);
  pthread_mutex_destroy(&t->mutex);
  dc__device_release(t->device);
  dc__free(t);
}

/* memory_info() enters the device, so that NCCL's calls to the driver spoil no other thread's capture. */
static void call_end(dc_device *device, dc__nccl_end_fn end, dc__nccl_handle handle) {
  int64_t total, free_bytes;
  dc__device_begin(device);
  (void)device->ops->memory_info(device, &total, &free_bytes);
  (void)end(handle);
  dc__device_end(device);
}

static void *end_thread_main(void *arg) {
  dc__nccl_end_thread *t = arg;
  call_end(t->device, t->end, t->handle);
  pthread_mutex_lock(&t->mutex);
  t->done = true;
  bool left = t->left;
  pthread_cond_signal(&t->ended);
  pthread_mutex_unlock(&t->mutex);
  if (left) {
    dc__nccl_free_staging(t->device, t->staging);
    end_thread_free(t);
  }
  return NULL;
}

static bool was_captured(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  bool captured = self->captured;
  pthread_mutex_unlock(&self->watch_mutex);
  return captured;
}

/* False if no thread could start. */
static bool end_thread_start(dc__nccl *self, dc__nccl_end_fn end) {
  dc__nccl_end_thread *t = dc__calloc(1, sizeof *t);
  if (t == NULL) {
    return false;
  }
  t->end = end;
  t->handle = self->handle;
  t->device = dc__device_retain(self->device);
  t->wait_ns = was_captured(self) ? captured_wait_ns : end_wait_ns;
  pthread_mutex_init(&t->mutex, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&t->ended, &attributes);
  pthread_condattr_destroy(&attributes);
  if (pthread_create(&t->thread, NULL, end_thread_main, t) != 0) {
    end_thread_free(t);
    return false;
  }
  self->end_thread = t;
  return true;
}

/* Requires the thread's mutex. True if the end is done. */
static bool end_thread_wait(dc__nccl_end_thread *t) {
  int64_t until = dc__now_ns() + t->wait_ns;
  const struct timespec end = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
  while (!t->done && pthread_cond_timedwait(&t->ended, &t->mutex, &end) == 0) {
  }
  return t->done;
}

void dc__nccl_end_handle(dc__nccl *self, dc__nccl_end_fn end) {
  if (!end_thread_start(self, end) && !was_captured(self)) { /* a captured one is leaked: the call might hang */
    call_end(self->device, end, self->handle);
  }
  self->handle = NULL;
}

static void wait_for_end(dc__nccl *self) {
  if (self->end_thread != NULL) {
    pthread_mutex_lock(&self->end_thread->mutex);
    (void)end_thread_wait(self->end_thread);
    pthread_mutex_unlock(&self->end_thread->mutex);
  }
}

bool dc__nccl_leave_end(dc__nccl *self) {
  dc__nccl_end_thread *t = self->end_thread;
  if (t == NULL) {
    return false;
  }
  pthread_mutex_lock(&t->mutex);
  bool left = t->left = !end_thread_wait(t);
  if (left) {
    t->staging = self->staging;
    pthread_detach(t->thread);
  }
  pthread_mutex_unlock(&t->mutex);
  if (!left) { /* joined: the thread's CUDA and NCCL destructors must not run beside the process's */
    pthread_join(t->thread, NULL);
    end_thread_free(t);
  }
  return left;
}

/* NCCL is aborted last: its kernels end then, and threads that waited for them must find the failure set. */
void dc__nccl_abort(dc__nccl *self, dc_status status) {
  char text[400];
  snprintf(text, sizeof text, "%s", dc_last_error());
  dc__comm_fail(&self->head, status); /* before the group fails: this rank's error says more */
  if (dc__comm_check(self->bootstrap) == DC_OK) {
    self->bootstrap->ops->abort(self->bootstrap, text);
  }
  dc__nccl_mark_failed(self);
  pthread_mutex_lock(&self->api_mutex);
  if (self->handle != NULL) {
    dc__nccl_end_handle(self, self->library.ncclCommAbort);
    wait_for_end(self);
  }
  pthread_mutex_unlock(&self->api_mutex);
  (void)dc__fail(status, "%s", text);
}
