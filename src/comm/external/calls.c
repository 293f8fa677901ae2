/* Calls of the caller's functions, and their deadline: nothing can end a function that blocks but the caller's abort.
 * So a thread calls that when time is up, and what the function returns after that is late, whatever it is. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/external/external.h"

void dc__external_fail(dc__external_family *f, dc_status status) {
  pthread_mutex_lock(&f->mutex);
  dc__failure_keep(&f->failure, status);
  atomic_store_explicit(&f->failed, 1, memory_order_release);
  pthread_mutex_unlock(&f->mutex);
}

static dc__external_call *slot_of(dc__external *self, const dc__coll *coll) {
  return &self->calls[coll != NULL ? DC__EXTERNAL_COLLECTIVE : DC__EXTERNAL_DUP];
}

static void describe(char text[DC__COLL_TEXT], const dc__external_call *call) {
  if (call->op == 0) {
    snprintf(text, DC__COLL_TEXT, "dc_comm_dup");
  } else {
    dc__coll_describe_tag(text, call->op, call->id);
  }
}

void dc__external_enter(dc__external *self, const dc__coll *coll, const char *callback) {
  const dc__external_call call = {
      callback, dc__now_ns(), pthread_self(), coll != NULL ? coll->tag.id : -1, coll != NULL ? coll->tag.op : 0, false};
  pthread_mutex_lock(&self->family->mutex);
  *slot_of(self, coll) = call;
  pthread_mutex_unlock(&self->family->mutex);
}

dc_status dc__external_leave(dc__external *self, const dc__coll *coll, int32_t error) {
  dc__external_family *f = self->family;
  char name[DC__COLL_TEXT];
  pthread_mutex_lock(&f->mutex);
  const dc__external_call call = *slot_of(self, coll);
  dc_status status = call.late ? dc__failure_raise(&f->failure) : DC_OK;
  slot_of(self, coll)->name = NULL;
  pthread_mutex_unlock(&f->mutex);
  if (status != DC_OK || error == 0) {
    return status;
  }
  describe(name, &call);
  return dc__fail(DC_E_CALLBACK, "%s: the caller's %s returned %" PRId32 " on rank %" PRId32, name, call.name, error,
                  self->head.rank);
}

dc_status dc__external_check_outside(dc__external *self, const dc__coll *coll) {
  char name[DC__COLL_TEXT];
  pthread_mutex_lock(&self->family->mutex);
  const dc__external_call call = self->calls[DC__EXTERNAL_COLLECTIVE];
  pthread_mutex_unlock(&self->family->mutex);
  if (call.name == NULL || !pthread_equal(call.thread, pthread_self())) {
    return DC_OK;
  }
  dc__coll_describe_tag(name, coll->tag.op, coll->tag.id);
  return dc__fail(DC_E_STATE,
                  "%s: called by the caller's %s on rank %" PRId32
                  ", which may call nothing of libdc but dc_dtype_size()",
                  name, call.name, self->head.rank);
}

/* ---- the deadline ---- */

static void abort_members(const dc__external_family *f) {
  for (dc__external *member = f->members; member != NULL; member = member->next) {
    if (member->callbacks.abort != NULL) {
      member->callbacks.abort(member->callbacks.user);
    }
  }
}

void dc__external_abort(dc__external_family *f) {
  pthread_mutex_lock(&f->mutex);
  abort_members(f);
  pthread_mutex_unlock(&f->mutex);
}

static void fail_late(dc__external_family *f, const dc__external *member, dc__external_call *call) {
  char name[DC__COLL_TEXT];
  describe(name, call);
  dc_status status = dc__fail(DC_E_TIMEOUT, "rank %" PRId32 " waited %.1f s at %s for the caller's %s to return",
                              member->head.rank, (double)member->head.timeout_ns / 1e9, name, call->name);
  call->late = true;
  dc__failure_keep(&f->failure, status);
  atomic_store_explicit(&f->failed, 1, memory_order_release);
}

/* Under the mutex: when to look next, since a callback that begins now would be late then. */
static int64_t look(dc__external_family *f) {
  int64_t now = dc__now_ns(), next = INT64_MAX;
  bool late = false;
  for (dc__external *member = f->members; member != NULL; member = member->next) {
    for (int i = 0; i < DC__EXTERNAL_CALLS; i++) {
      dc__external_call *call = &member->calls[i];
      bool runs = call->name != NULL && !call->late;
      int64_t deadline = (runs ? call->since : now) + member->head.timeout_ns;
      if (runs && now >= deadline) {
        fail_late(f, member, call);
        late = true;
      } else {
        next = deadline < next ? deadline : next;
      }
    }
  }
  if (late) {
    abort_members(f);
  }
  return next;
}

static void *watch(void *arg) {
  dc__external_family *f = arg;
  pthread_mutex_lock(&f->mutex);
  while (!f->ending) {
    int64_t next = look(f);
    const struct timespec at = {next / 1000000000, next % 1000000000};
    (void)pthread_cond_timedwait(&f->ends, &f->mutex, &at);
  }
  pthread_mutex_unlock(&f->mutex);
  return NULL;
}

dc_status dc__external_start_watchdog(dc__external_family *f) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&f->ends, &monotonic);
  pthread_condattr_destroy(&monotonic);
  int error = pthread_create(&f->watchdog, NULL, watch, f);
  return error == 0 ? DC_OK : dc__fail(DC_E_SYSTEM, "dc_comm_create_external: no thread: %s", strerror(error));
}

void dc__external_end_watchdog(dc__external_family *f) {
  pthread_mutex_lock(&f->mutex);
  f->ending = true;
  pthread_cond_signal(&f->ends);
  pthread_mutex_unlock(&f->mutex);
  pthread_join(f->watchdog, NULL);
}
