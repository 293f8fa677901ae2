/* A device that counts and refuses allocations, and a group of one rank that counts and fails calls. */
#include "kernels/reference.h"

#include "conformance.h"

static watch watches[64]; /* one for each rank, as a context's streams may outlive the test's body */

static dc_status watched_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr) {
  watch *w = (watch *)(uintptr_t)device->ops; /* the table is its first member */
  if (atomic_load(&w->refuse[kind]) != 0) {
    return dc__fail(DC_E_NO_MEMORY, "the test refuses %zu bytes", bytes);
  }
  dc_status status = w->real->alloc(device, bytes, kind, ptr);
  atomic_fetch_add(&w->made[kind], status == DC_OK);
  atomic_fetch_add(&w->live[kind], status == DC_OK);
  return status;
}

static void watched_free(dc_device *device, void *ptr, size_t bytes, int32_t kind) {
  watch *w = (watch *)(uintptr_t)device->ops;
  atomic_fetch_sub(&w->live[kind], 1);
  w->real->free(device, ptr, bytes, kind);
}

static dc_status watched_event_sync(dc_event *event, int64_t timeout_ns) {
  watch *w = (watch *)(uintptr_t)event->device->ops;
  atomic_fetch_add(&w->drained, 1);
  return w->real->event_sync(event, timeout_ns);
}

watch *watch_device(rank *r) {
  watch *w = &watches[r->rank];
  memset(w, 0, sizeof *w);
  w->real = r->device->ops;
  w->ops = *w->real;
  w->ops.alloc = watched_alloc;
  w->ops.free = watched_free;
  w->ops.event_sync = watched_event_sync;
  r->device->ops = &w->ops;
  return w;
}

/* ---- a group of one rank that claims to have two ---- */

#ifndef ON_SIM

static int32_t echo_gather(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  size_t bytes = (size_t)count * dc_dtype_size(dtype);
  atomic_fetch_add(&((echo *)user)->gathers, 1);
  memcpy(recv, send, bytes);
  memcpy((char *)recv + bytes, send, bytes);
  return atomic_load(&((echo *)user)->fail);
}

static int32_t echo_reduce(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  atomic_fetch_add(&((echo *)user)->reductions, 1);
  for (int64_t i = 0; i < count; i++) {
    value v = get(send, dtype, i);
    put(recv, dtype, i, plus(v, v, dtype == DC_FLOAT64));
  }
  return atomic_load(&((echo *)user)->fail);
}

static int32_t echo_broadcast(void *data, int64_t bytes, int32_t root, void *user) {
  (void)data;
  (void)bytes;
  (void)root;
  atomic_fetch_add(&((echo *)user)->broadcasts, 1);
  return atomic_load(&((echo *)user)->fail);
}

static int32_t echo_barrier(void *user) {
  atomic_fetch_add(&((echo *)user)->barriers, 1);
  return atomic_load(&((echo *)user)->fail);
}

dc_status echo_comm(echo *e, dc_comm **comm) {
  dc_comm_callbacks calls = {.struct_size = sizeof calls,
                             .all_gather = echo_gather,
                             .reduce_scatter = echo_reduce,
                             .broadcast = echo_broadcast,
                             .barrier = echo_barrier,
                             .user = e};
  return dc_comm_create_external(&calls, 0, 2, NULL, comm);
}

bool echo_is_without_cards(const rank *r) {
  return r->device->memory_space != 0;
}

#endif
