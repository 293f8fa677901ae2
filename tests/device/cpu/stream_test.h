/* Shared by the tests of the CPU device: tasks that wait or record their order, and a device with two streams and an
 * event. */
#ifndef TESTS_STREAM_TEST_H
#define TESTS_STREAM_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include "device/device.h"

enum { MS = 1000000 };

static inline void sleep_ns(int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  nanosleep(&t, NULL);
}

/* ---- tasks ---- */

/* A task that waits until the test opens it, so tests need no sleeps to keep work pending. */
typedef struct gate {
  atomic_bool open;
  atomic_bool entered;
} gate;

static inline void pass_gate(void *user) {
  gate *g = user;
  atomic_store(&g->entered, true);
  while (!atomic_load(&g->open)) {
    sleep_ns(50000);
  }
}

/* Records numbers in the order in which tasks ran. */
typedef struct log {
  atomic_int count;
  int entries[4096];
} log;

typedef struct append_args {
  log *to;
  int value;
} append_args;

static inline void append(void *args) {
  append_args *a = args;
  a->to->entries[atomic_fetch_add(&a->to->count, 1)] = a->value;
}

static inline void queue_append(dc_stream *stream, log *to, int value) {
  dc__stream_call(stream, append, &(append_args){to, value}, sizeof(append_args));
}

static inline void meet(void *barrier) {
  pthread_barrier_wait(barrier);
}

/* ---- one device and two streams for each test ---- */

typedef struct fixture {
  dc_device *device;
  dc_stream *a;
  dc_stream *b;
  dc_event *event;
  gate gate;
  atomic_bool filled;
} fixture;

static inline int set_up(void **state) {
  fixture *f = calloc(1, sizeof(*f));
  assert_int_equal(dc_device_open("cpu", NULL, &f->device), DC_OK);
  assert_int_equal(dc_stream_create(f->device, &f->a), DC_OK);
  assert_int_equal(dc_stream_create(f->device, &f->b), DC_OK);
  assert_int_equal(dc_event_create(f->device, &f->event), DC_OK);
  *state = f;
  return 0;
}

static inline int tear_down(void **state) {
  fixture *f = *state;
  dc_device_destroy(f->device); /* first, since streams and events keep it alive */
  dc_event_destroy(f->event);
  dc_stream_destroy(f->a);
  dc_stream_destroy(f->b);
  free(f);
  return 0;
}

static inline int32_t query(dc_event *event) {
  int32_t passed = -1;
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  return passed;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
