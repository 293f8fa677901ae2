/* Waiting for NCCL, which reports neither a missing rank nor a timeout: between polls the bootstrap and the deadline
 * are checked. */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "comm/nccl/nccl.h"

/* NCCL starts a thread at each group's end, which takes tens of microseconds. A nap takes longer than that, so the host
 * polls for as long as such a thread may need, and naps where NCCL waits for a rank. */
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

/* The handle goes only when the communicator has failed. */
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

/* ---- aborts ---- */

/* ncclCommAbort ends kernels at once, and then waits until all graphs that captured the communicator are destroyed. So
 * a thread of its own calls it, which may outlive the communicator. */
struct dc__nccl_abort_thread {
  pthread_mutex_t mutex;
  pthread_cond_t ended;
  dc__nccl_result (*abort)(dc__nccl_handle handle);
  dc__nccl_handle handle;
  bool done;
  bool left; /* behind, with all below */
  dc_device *device;
  dc__nccl_staging *staging;
};

/* Longer than an abort that no graph delays. */
static const int64_t abort_wait_ns = INT64_C(2000000000);

static void abort_thread_free(dc__nccl_abort_thread *a) {
  pthread_cond_destroy(&a->ended);
  pthread_mutex_destroy(&a->mutex);
  dc__free(a);
}

static void *abort_thread_main(void *arg) {
  dc__nccl_abort_thread *a = arg;
  (void)a->abort(a->handle);
  pthread_mutex_lock(&a->mutex);
  a->done = true;
  bool left = a->left;
  pthread_cond_signal(&a->ended);
  pthread_mutex_unlock(&a->mutex);
  if (left) {
    dc__nccl_free_staging(a->device, a->staging);
    dc__device_release(a->device);
    abort_thread_free(a);
  }
  return NULL;
}

/* False: there is no thread for it. */
static bool abort_thread_start(dc__nccl *self) {
  dc__nccl_abort_thread *a = dc__calloc(1, sizeof *a);
  pthread_t thread;
  if (a == NULL) {
    return false;
  }
  a->abort = self->library.ncclCommAbort;
  a->handle = self->handle;
  pthread_mutex_init(&a->mutex, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&a->ended, &attributes);
  pthread_condattr_destroy(&attributes);
  if (pthread_create(&thread, NULL, abort_thread_main, a) != 0) {
    abort_thread_free(a);
    return false;
  }
  pthread_detach(thread);
  self->abort_thread = a;
  return true;
}

/* With its mutex held. */
static bool abort_thread_wait(dc__nccl_abort_thread *a) {
  int64_t until = dc__now_ns() + abort_wait_ns;
  const struct timespec end = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
  while (!a->done && pthread_cond_timedwait(&a->ended, &a->mutex, &end) == 0) {
  }
  return a->done;
}

static dc_status call_abort(dc__nccl *self, void *native, void *args) {
  (void)native;
  (void)args;
  (void)self->library.ncclCommAbort(self->handle);
  return DC_OK;
}

static bool was_captured(dc__nccl *self) {
  pthread_mutex_lock(&self->watch_mutex);
  bool captured = self->captured;
  pthread_mutex_unlock(&self->watch_mutex);
  return captured;
}

void dc__nccl_abort_handle(dc__nccl *self) {
  if (!was_captured(self)) {
    (void)dc__nccl_call(self, call_abort, NULL);
  } else if (abort_thread_start(self)) { /* else the handle is kept: an abort here might not return */
    pthread_mutex_lock(&self->abort_thread->mutex);
    (void)abort_thread_wait(self->abort_thread);
    pthread_mutex_unlock(&self->abort_thread->mutex);
  }
  self->handle = NULL;
}

bool dc__nccl_leave_abort(dc__nccl *self) {
  dc__nccl_abort_thread *a = self->abort_thread;
  if (a == NULL) {
    return false;
  }
  pthread_mutex_lock(&a->mutex);
  bool left = a->left = !abort_thread_wait(a);
  if (left) {
    (void)dc__device_retain(self->device);
    a->device = self->device;
    a->staging = self->staging;
  }
  pthread_mutex_unlock(&a->mutex);
  if (!left) {
    abort_thread_free(a);
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
    dc__nccl_abort_handle(self);
  }
  pthread_mutex_unlock(&self->api_mutex);
  (void)dc__fail(status, "%s", text);
}
