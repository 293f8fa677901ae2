/* The device of simulated ranks: streams, events and memory as device/device.h requires. Recording an event queues work
 * on its stream, so the event passes when the scheduler reaches that work. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* A recorded point of an event, with the stream's clock when it was reached. */
typedef struct point {
  int32_t refs;
  bool passed;
  sim_clock clock;
} point;

typedef struct sim_event {
  struct dc_event head;
  point *latest; /* NULL: never recorded, so it has passed */
} sim_event;

typedef struct sim_device {
  struct dc_device head;
  int32_t rank;
} sim_device;

/* ---- points ---- */

static point *new_point(void) {
  point *m = calloc(1, sizeof *m);
  m->refs = 1;
  return m;
}

static void drop_point(point *m) {
  if (m != NULL && --m->refs == 0) {
    free(m);
  }
}

static bool point_passed(void *m) {
  return ((const point *)m)->passed;
}

static bool run_record(void *args) {
  point *m = *(point **)args;
  m->clock = sim_publish();
  m->passed = true;
  drop_point(m);
  return true;
}

/* Records a point at the end of a queue. Returns a reference for the caller. */
static point *record(dc_stream *stream) {
  point *m = new_point();
  m->refs++;
  sim_push(stream, &(sim_work){.step = run_record, .op = {"record", NULL, -1}}, &m, sizeof m);
  return m;
}

static bool wait_ready(void *args) {
  return (*(point **)args)->passed;
}

static bool run_wait(void *args) {
  point *m = *(point **)args;
  sim_join(&sim_me()->now, &m->clock);
  drop_point(m);
  return true;
}

/* Blocks the host until a point has passed. Takes over the reference. */
static dc_status await(point *m, const char *what) {
  sim_wait(point_passed, m, what);
  bool passed = m->passed;
  sim_join(&sim_me()->now, &m->clock);
  drop_point(m);
  return passed ? DC_OK : dc__fail(DC_E_TIMEOUT, "the simulated world stands still");
}

static dc_status stream_sync(dc_stream *stream, int64_t timeout_ns) {
  (void)timeout_ns;
  return await(record(stream), "a stream to drain");
}

static void stream_destroy(dc_stream *stream) {
  (void)stream_sync(stream, 0);
  sim_stream_close(stream);
}

static dc_status stream_create(dc_device *device, dc_stream **stream) {
  *stream = sim_stream_open(device, ((sim_device *)device)->rank);
  return DC_OK;
}

typedef struct call_args {
  dc__task_fn fn;
  _Alignas(max_align_t) unsigned char args[];
} call_args;

static bool run_call(void *args) {
  call_args *call = args;
  call->fn(call->args);
  return true;
}

static dc_status stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  _Alignas(max_align_t) unsigned char buffer[sizeof(call_args) + DC__TASK_BYTES];
  ((call_args *)(void *)buffer)->fn = fn;
  if (bytes > 0) {
    memcpy(((call_args *)(void *)buffer)->args, args, bytes);
  }
  sim_push(stream, &(sim_work){.step = run_call, .op = {"task", NULL, -1}}, buffer, sizeof(call_args) + bytes);
  return DC_OK;
}

typedef struct move_args {
  void *dst;
  const void *src; /* NULL: zeros */
  size_t bytes;
} move_args;

static bool run_move(void *args) {
  const move_args *m = args;
  if (m->src != NULL) {
    sim_note(SIM_READ, m->src, m->bytes, NULL);
  }
  sim_note(SIM_WRITE, m->dst, m->bytes, NULL);
  if (m->src != NULL) {
    memcpy(m->dst, m->src, m->bytes);
  } else {
    memset(m->dst, 0, m->bytes);
  }
  return true;
}

static void stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes) {
  move_args args = {dst, src, bytes};
  sim_push(stream, &(sim_work){.step = run_move, .op = {"copy", NULL, -1}}, &args, sizeof args);
}

static void stream_zero(dc_stream *stream, void *dst, size_t bytes) {
  move_args args = {dst, NULL, bytes};
  sim_push(stream, &(sim_work){.step = run_move, .op = {"zeroing", NULL, -1}}, &args, sizeof args);
}

/* ---- events ---- */

static dc_status event_create(dc_device *device, dc_event **event) {
  sim_event *self = calloc(1, sizeof *self);
  dc__event_head_init(&self->head, dc__device_retain(device));
  *event = &self->head;
  return DC_OK;
}

static void event_destroy(dc_event *event) {
  drop_point(((sim_event *)event)->latest);
  dc__device_release(event->device);
  free(event);
}

static void event_record(dc_event *event, dc_stream *stream) {
  point *m = record(stream);
  drop_point(((sim_event *)event)->latest);
  ((sim_event *)event)->latest = m;
}

static void event_set(dc_event *event) {
  point *m = new_point();
  m->clock = sim_publish();
  m->passed = true;
  drop_point(((sim_event *)event)->latest);
  ((sim_event *)event)->latest = m;
}

static dc_status event_wait(dc_event *event, dc_stream *stream) {
  point *m = ((sim_event *)event)->latest;
  if (m != NULL) {
    m->refs++;
    sim_push(stream, &(sim_work){wait_ready, run_wait, {"wait", NULL, -1}}, &m, sizeof m);
  }
  return DC_OK;
}

/* Not a scheduling point, since the arena calls this with its mutex held. If the event is found to have passed, its
 * work is ordered before what follows. */
static bool event_passed(dc_event *event) {
  const point *m = ((sim_event *)event)->latest;
  if (m != NULL && m->passed) {
    sim_join(&sim_me()->now, &m->clock);
  }
  return m == NULL || m->passed || sim_dead();
}

static dc_status event_sync(dc_event *event, int64_t timeout_ns) {
  (void)timeout_ns;
  point *m = ((sim_event *)event)->latest;
  if (m == NULL) {
    return DC_OK;
  }
  m->refs++;
  return await(m, "an event");
}

/* ---- the device ---- */

static dc_status device_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr) {
  (void)kind;
  atomic_fetch_add(&device->allocations, 1);
  *ptr = sim_map(bytes);
  return DC_OK;
}

static void device_free(dc_device *device, void *ptr, size_t bytes, int32_t kind) {
  (void)device;
  (void)kind;
  sim_note(SIM_FREE, ptr, bytes, "the device"); /* addresses are not reused, so that late accesses are found */
}

static void device_destroy(dc_device *device) {
  free(device);
}

static const dc__device_ops ops = {.alloc = device_alloc,
                                   .free = device_free,
                                   .stream_create = stream_create,
                                   .stream_destroy = stream_destroy,
                                   .stream_sync = stream_sync,
                                   .stream_call = stream_call,
                                   .stream_copy = stream_copy,
                                   .stream_zero = stream_zero,
                                   .event_create = event_create,
                                   .event_destroy = event_destroy,
                                   .event_record = event_record,
                                   .event_wait = event_wait,
                                   .event_passed = event_passed,
                                   .event_sync = event_sync,
                                   .event_set = event_set,
                                   .destroy = device_destroy};

dc_status sim_device_open(dc_device **device) {
  sim_device *self = calloc(1, sizeof *self);
  self->head.handle = DC__HANDLE_DEVICE;
  self->head.ops = &ops;
  snprintf(self->head.name, sizeof self->head.name, "sim");
  atomic_init(&self->head.refs, 1);
  self->rank = sim_rank();
  *device = &self->head;
  return DC_OK;
}
