/* Waiting for NCCL, which says neither that a rank is missing nor that time is up: between looks at it, the base and
 * the clock are looked at. */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "comm/nccl/nccl.h"

enum { YIELDS = 50, NAP_NS = 200000, SLICE_NS = 5000000 };

typedef struct job {
  dc__nccl *self;
  dc__nccl_work work;
  void *args;
  dc_status status;
} job;

static void run_job(void *native, void *args) {
  job *j = *(job **)args;
  j->status = j->work(j->self, native, j->args);
}

dc_status dc__nccl_issue(dc__nccl *self, dc__nccl_work work, void *args) {
  job j = {self, work, args, DC_E_INTERNAL};
  job *place = &j;
  DC__TRY(self->device->ops->stream_issue(self->stream, run_job, &place, sizeof place));
  return j.status;
}

dc_status dc__nccl_error(const dc__nccl *self, const char *call, dc__nccl_result error) {
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

/* What NCCL says of its own work, without waiting. */
static dc_status ask(dc__nccl *self, const char *call, dc__nccl_result *state) {
  pthread_mutex_lock(&self->calls);
  dc_status status =
      dc__nccl_error(self, "ncclCommGetAsyncError", self->library.ncclCommGetAsyncError(self->handle, state));
  status = status != DC_OK ? status : dc__nccl_error(self, call, *state);
  pthread_mutex_unlock(&self->calls);
  return status;
}

/* Why a wait should end in an error, if so. */
static dc_status look(dc__nccl *self, const char *call, const char *what, int64_t begun, int64_t timeout_ns) {
  if (self->base->ops->watch != NULL) {
    self->base->ops->watch(self->base);
  }
  DC__TRY(dc__comm_check(self->base));
  return dc__now_ns() - begun < timeout_ns
             ? DC_OK
             : dc__fail(DC_E_TIMEOUT,
                        "rank %" PRId32 " waited %.1f s at %s for NCCL (%s): a card or a rank does not answer",
                        self->head.rank, (double)timeout_ns / 1e9, what, call);
}

dc_status dc__nccl_settle(dc__nccl *self, const char *call, const char *what, int64_t timeout_ns) {
  int64_t begun = dc__now_ns();
  for (int i = 0;; i++) {
    dc__nccl_result state = DC__NCCL_OK;
    DC__TRY(ask(self, call, &state));
    if (state != DC__NCCL_IN_PROGRESS) {
      return DC_OK;
    }
    if (i < YIELDS) {
      sched_yield();
    } else {
      DC__TRY(look(self, call, what, begun, timeout_ns));
      nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    }
  }
}

dc_status dc__nccl_await(dc__nccl *self, const char *what) {
  int64_t begun = dc__now_ns();
  dc__nccl_result state;
  dc_status status;
  while ((status = dc__stream_sync(self->stream, SLICE_NS)) == DC_E_TIMEOUT) {
    DC__TRY(ask(self, "a collective", &state));
    DC__TRY(look(self, "its kernels", what, begun, self->head.timeout_ns));
  }
  return status != DC_OK ? status : ask(self, "a collective", &state); /* kernels that gave up end too */
}

static dc_status abort_handle(dc__nccl *self, void *native, void *args) {
  (void)native;
  (void)args;
  (void)self->library.ncclCommAbort(self->handle);
  self->handle = NULL;
  return DC_OK;
}

void dc__nccl_give_up(dc__nccl *self, dc_status status) {
  char text[400];
  snprintf(text, sizeof text, "%s", dc_last_error());
  dc__comm_fail(&self->head, status); /* before the group does: this rank knows more */
  pthread_mutex_lock(&self->calls);
  if (self->handle != NULL) {
    (void)dc__nccl_issue(self, abort_handle, NULL);
  }
  pthread_mutex_unlock(&self->calls);
  if (dc__comm_check(self->base) == DC_OK) {
    self->base->ops->abort(self->base, text);
  }
  (void)dc__stream_sync(self->stream, DC__NCCL_FLUSH_NS); /* from here on nothing of it touches the callers' memory */
  (void)dc__fail(status, "%s", text);
}
