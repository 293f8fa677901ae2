/* A device whose memory is counted and an arena on it, for the tests of arenas and buffers. */
#ifndef TESTS_ARENA_TEST_H
#define TESTS_ARENA_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include "device/device.h"

enum { KIB = 1024, MIB = 1024 * 1024 };

static inline void sleep_ms(int ms) {
  struct timespec t = {0, ms * 1000000L};
  nanosleep(&t, NULL);
}

typedef struct fixture {
  atomic_int live;
  atomic_int calls;
  dc_device *device;
  dc_stream *stream;
  dc_event *event;
  dc_event *other;
  dc__arena *arena;
  atomic_bool open; /* lets wait_for_open() pass */
} fixture;

static inline void *counting_alloc(int64_t bytes, int64_t align, void *user) {
  fixture *f = user;
  atomic_fetch_add(&f->live, 1);
  atomic_fetch_add(&f->calls, 1);
  return aligned_alloc((size_t)align, (size_t)bytes);
}

static inline void counting_free(void *ptr, int64_t bytes, int64_t align, void *user) {
  fixture *f = user;
  (void)bytes, (void)align;
  atomic_fetch_sub(&f->live, 1);
  free(ptr);
}

static inline int set_up(void **state) {
  fixture *f = calloc(1, sizeof(*f));
  dc_allocator allocator = {sizeof(allocator), counting_alloc, counting_free, NULL, f};
  dc_device_options options = DC_DEVICE_OPTIONS_INIT;
  options.allocator = &allocator;
  assert_int_equal(dc_device_open("cpu", &options, &f->device), DC_OK);
  assert_int_equal(dc_stream_create(f->device, &f->stream), DC_OK);
  assert_int_equal(dc_event_create(f->device, &f->event), DC_OK);
  assert_int_equal(dc_event_create(f->device, &f->other), DC_OK);
  assert_int_equal(dc__arena_create(f->device, NULL, &f->arena), DC_OK);
  *state = f;
  return 0;
}

static inline int tear_down(void **state) {
  fixture *f = *state;
  dc__arena_release(f->arena);
  dc_event_destroy(f->event);
  dc_event_destroy(f->other);
  dc_stream_destroy(f->stream);
  dc_device_destroy(f->device);
  assert_int_equal(f->live, 0);
  free(f);
  return 0;
}

static inline void wait_for_open(void *user) {
  while (!atomic_load(&((fixture *)user)->open)) {
    sleep_ms(1);
  }
}

/* Queues work that stays pending until f->open, and records an event behind it. */
static inline void record_pending(fixture *f, dc_event *event) {
  assert_int_equal(dc_stream_call(f->stream, wait_for_open, f), DC_OK);
  assert_int_equal(dc_event_record(event, f->stream), DC_OK);
}

static inline void *arena_alloc(fixture *f, size_t bytes) {
  void *ptr = NULL;
  assert_int_equal(dc__arena_alloc(f->arena, NULL, bytes, &ptr), DC_OK);
  assert_non_null(ptr);
  assert_int_equal((uintptr_t)ptr % 256, 0);
  memset(ptr, 1, bytes);
  return ptr;
}

static inline void arena_release(fixture *f, void *ptr) {
  dc__arena_free(f->arena, ptr, NULL, NULL);
}

static inline dc__arena_stats stats_of(fixture *f) {
  dc__arena_stats stats;
  dc__arena_get_stats(f->arena, &stats);
  return stats;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
