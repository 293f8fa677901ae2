/* The caller's callbacks and their deadline. Only the caller's abort can end a callback that blocks, so a watchdog
 * calls it at the deadline. The callback's result is then ignored. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/external/external.h"

/* This function and the next ones require the mutex. */
static void external_keep_failure(dc__external_group *group, dc_status status) {
  dc__failure_keep(&group->failure, status);
  atomic_store_explicit(&group->failed, 1, memory_order_release);
}

static void abort_members(dc__external_group *group) {
  group->aborted = true;
  for (dc__external *member = group->members; member != NULL; member = member->next) {
    if (member->callbacks.abort != NULL) {
      member->callbacks.abort(member->callbacks.user);
    }
  }
}

/* Aborts a failed group, since other ranks may wait for a callback that this rank does not make or finish. */
static dc_status check_group(dc__external_group *group) {
  dc_status status = dc__failure_raise(&group->failure);
  if (status != DC_OK && !group->aborted) {
    abort_members(group);
  }
  return status;
}

/* Whether another thread is in a callback of a copy, which the other ranks no longer join. False inside a callback,
 * since abort may need a lock that the callback holds. */
static bool is_called_elsewhere(const dc__external_group *group) {
  bool elsewhere = false;
  for (const dc__external *member = group->members; member != NULL; member = member->next) {
    for (int i = 0; i < DC__EXTERNAL_SLOTS; i++) {
      const dc__external_callback *call = &member->running[i];
      if (call->name != NULL && pthread_equal(call->thread, pthread_self())) {
        return false;
      }
      elsewhere = elsewhere || call->name != NULL;
    }
  }
  return elsewhere;
}

void dc__external_fail(dc__external_group *group, dc_status status) {
  pthread_mutex_lock(&group->mutex);
  external_keep_failure(group, status);
  if (is_called_elsewhere(group)) {
    (void)check_group(group);
  }
  pthread_mutex_unlock(&group->mutex);
}

void dc__external_fail_alone(dc__external_group *group, dc_status status) {
  pthread_mutex_lock(&group->mutex);
  external_keep_failure(group, status);
  (void)check_group(group);
  pthread_mutex_unlock(&group->mutex);
}

/* Functions that the tables of all ranks have, or of none: ranks that call different functions wait for each other
 * forever. */
static const char *const shared_functions[] = {"reduce_scatter", "all_to_all", "dup", "split"};

int64_t dc__external_functions(const dc_comm_callbacks *c) {
  return (c->reduce_scatter != NULL) | (c->all_to_all != NULL) << 1 | (c->dup != NULL) << 2 | (c->split != NULL) << 3;
}

dc_status dc__external_fail_functions(int32_t rank, int64_t functions, int64_t zero_functions) {
  size_t i = 0;
  while (i + 1 < DC__COUNT(shared_functions) && ((functions ^ zero_functions) >> i & 1) == 0) {
    i++;
  }
  const bool zero_has = (zero_functions >> i & 1) != 0;
  return dc__fail(DC_E_MISMATCH,
                  "rank %" PRId32 "'s callbacks have no %s where those of rank %" PRId32
                  " have one; all ranks must give dc_comm_create_external the same functions",
                  zero_has ? rank : 0, shared_functions[i], zero_has ? 0 : rank);
}

static dc__external_callback *callback_slot(dc__external *self, const dc__coll *coll) {
  return &self->running[coll != NULL ? DC__EXTERNAL_COLLECTIVE : DC__EXTERNAL_DUP];
}

static void describe_callback(char text[DC__COLL_TEXT], const dc__external_callback *call) {
  if (call->op == 0) {
    snprintf(text, DC__COLL_TEXT, "dc_comm_%s", call->name);
  } else {
    dc__coll_describe_op(text, call->op, call->id);
  }
}

dc_status dc__external_callback_begin(dc__external *self, const dc__coll *coll, const char *callback) {
  const dc__external_callback call = {.name = callback,
                                      .since = dc__now_ns(),
                                      .thread = pthread_self(),
                                      .id = coll != NULL ? coll->tag.id : -1,
                                      .op = coll != NULL ? coll->tag.op : 0};
  pthread_mutex_lock(&self->group->mutex);
  dc_status status = check_group(self->group); /* an earlier abort would not end this callback */
  if (status == DC_OK) {
    *callback_slot(self, coll) = call;
  }
  pthread_mutex_unlock(&self->group->mutex);
  return status;
}

dc_status dc__external_callback_end(dc__external *self, const dc__coll *coll, int32_t error) {
  dc__external_group *group = self->group;
  char name[DC__COLL_TEXT];
  pthread_mutex_lock(&group->mutex);
  const dc__external_callback call = *callback_slot(self, coll);
  dc_status status = check_group(group);
  callback_slot(self, coll)->name = NULL;
  pthread_mutex_unlock(&group->mutex);
  if (status != DC_OK || error == 0) {
    return status;
  }
  describe_callback(name, &call);
  return dc__fail(DC_E_CALLBACK, "%s: the caller's %s returned %" PRId32 " on rank %" PRId32, name, call.name, error,
                  self->head.rank);
}

dc_status dc__external_check_reentry(dc__external *self, const dc__coll *coll) {
  char name[DC__COLL_TEXT];
  const char *callback = NULL;
  pthread_mutex_lock(&self->group->mutex);
  for (int i = 0; i < DC__EXTERNAL_SLOTS; i++) {
    const dc__external_callback *call = &self->running[i];
    callback = call->name != NULL && pthread_equal(call->thread, pthread_self()) ? call->name : callback;
  }
  pthread_mutex_unlock(&self->group->mutex);
  if (callback == NULL) {
    return DC_OK;
  }
  dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
  return dc__fail(DC_E_STATE,
                  "%s: called by the caller's %s on rank %" PRId32
                  ", which may call nothing of libdc but dc_dtype_size()",
                  name, callback, self->head.rank);
}

/* ---- the deadline ---- */

static void external_fail_timeout(dc__external_group *group, const dc__external *member, dc__external_callback *call) {
  char name[DC__COLL_TEXT];
  describe_callback(name, call);
  dc_status status = dc__fail(DC_E_TIMEOUT, "rank %" PRId32 " waited %.1f s at %s for the caller's %s to return",
                              member->head.rank, (double)member->head.timeout_ns / 1e9, name, call->name);
  call->timed_out = true;
  external_keep_failure(group, status);
}

/* Requires the mutex. Returns the time of the next check, early enough for a callback that begins now. */
static int64_t check_deadlines(dc__external_group *group) {
  int64_t now = dc__now_ns(), next = INT64_MAX;
  bool timed_out = false;
  for (dc__external *member = group->members; member != NULL; member = member->next) {
    for (int i = 0; i < DC__EXTERNAL_SLOTS; i++) {
      dc__external_callback *call = &member->running[i];
      bool runs = call->name != NULL && !call->timed_out;
      int64_t deadline = (runs ? call->since : now) + member->head.timeout_ns;
      if (runs && now >= deadline) {
        external_fail_timeout(group, member, call);
        timed_out = true;
      } else {
        next = deadline < next ? deadline : next;
      }
    }
  }
  if (timed_out) {
    abort_members(group);
  }
  return next;
}

static void *external_watchdog_main(void *arg) {
  dc__external_group *group = arg;
  pthread_mutex_lock(&group->mutex);
  while (!group->stopping) {
    int64_t next = check_deadlines(group);
    const struct timespec at = {next / 1000000000, next % 1000000000};
    (void)pthread_cond_timedwait(&group->changed, &group->mutex, &at);
  }
  pthread_mutex_unlock(&group->mutex);
  return NULL;
}

dc_status dc__external_start_watchdog(dc__external_group *group) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&group->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  int error = pthread_create(&group->watchdog, NULL, external_watchdog_main, group);
  return error == 0 ? DC_OK : dc__fail(DC_E_SYSTEM, "dc_comm_create_external: no thread: %s", strerror(error));
}

void dc__external_stop_watchdog(dc__external_group *group) {
  pthread_mutex_lock(&group->mutex);
  group->stopping = true;
  pthread_cond_signal(&group->changed);
  pthread_mutex_unlock(&group->mutex);
  pthread_join(group->watchdog, NULL);
}
