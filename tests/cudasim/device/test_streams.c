/* Streams of the CUDA device on the simulated driver. A host function queues more than the queue holds. Streams and
 * events of two handles of one card meet, and those of other devices. A capture fails. */
#include "harness.h"

#include <time.h>

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"

enum { LINKS = 600 };

typedef struct fixture {
  dc_device *device;
  dc_stream *a;
  float *x; /* LINKS + 1 elements on the device */
} fixture;

static int set_up(void **state) {
  static fixture f;
  void *ptr;
  cudasim_reset();
  assert_int_equal(dc_device_open("cuda", NULL, &f.device), DC_OK);
  assert_int_equal(dc_stream_create(f.device, &f.a), DC_OK);
  assert_int_equal(f.device->ops->alloc(f.device, (LINKS + 1) * sizeof(float), DC_MEMORY_DEVICE, &ptr), DC_OK);
  f.x = ptr;
  *state = &f;
  return 0;
}

static int tear_down(void **state) {
  fixture *f = *state;
  f->device->ops->free(f->device, f->x, (LINKS + 1) * sizeof(float), DC_MEMORY_DEVICE);
  dc_stream_destroy(f->a);
  dc_device_destroy(f->device);
  assert_int_equal(cudasim_live(), 0);
  return 0;
}

static void pass_gate(void *user) {
  while (atomic_load((atomic_int *)user) == 0) {
    nanosleep(&(struct timespec){0, 100000}, NULL);
  }
}

static void note(void *user) {
  atomic_fetch_add((atomic_int *)user, 1);
}

/* ---- a full queue ---- */

typedef struct chain {
  fixture *f;
  atomic_int calls;
} chain;

static void copy_along(void *user) {
  chain *c = user;
  for (int i = 0; i < LINKS; i++) {
    dc__stream_copy(c->f->a, c->f->x + i + 1, c->f->x + i, sizeof(float));
    if (i % 2 == 0) {
      assert_int_equal(dc_stream_call(c->f->a, note, &c->calls), DC_OK);
    }
  }
}

static void test_a_host_function_queues_beyond_the_queue(void **state) {
  fixture *f = *state;
  chain c = {f, 0};
  float in = 7, out = 0;
  dc__stream_zero(f->a, f->x, (LINKS + 1) * sizeof(float));
  dc__stream_copy(f->a, f->x, &in, sizeof in);
  assert_int_equal(dc_stream_call(f->a, copy_along, &c), DC_OK);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK); /* waits for the function */
  dc__stream_copy(f->a, &out, f->x + LINKS, sizeof out);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_true(out == 7);
  assert_int_equal(c.calls, LINKS / 2);
  assert_int_equal(dc__device_check(f->device), DC_OK);
}

/* ---- other handles, other devices ---- */

/* The first streams of two handles have the same index in their handles, but are different streams. */
static void test_two_handles_of_one_card(void **state) {
  fixture *f = *state;
  dc_device *again;
  dc_stream *b;
  dc_event *event, *other;
  atomic_int open = 0, seen = 0;
  assert_int_equal(dc_device_open("cuda", NULL, &again), DC_OK);
  assert_int_equal(dc_stream_create(again, &b), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_event_create(again, &other), DC_OK);
  assert_int_equal(dc_stream_call(f->a, pass_gate, &open), DC_OK);
  assert_int_equal(dc_event_record(event, f->a), DC_OK);
  assert_int_equal(dc_event_record(other, f->a), DC_OK);
  assert_int_equal(dc_event_wait(event, b, 0), DC_OK);
  assert_int_equal(dc_stream_call(b, note, &seen), DC_OK);
  assert_int_equal(dc_stream_synchronize(b, 100000000), DC_E_TIMEOUT);
  assert_int_equal(seen, 0);
  atomic_store(&open, 1);
  assert_int_equal(dc_event_wait(other, NULL, INT64_C(20000000000)), DC_OK);
  assert_int_equal(dc_stream_synchronize(b, 0), DC_OK);
  assert_int_equal(seen, 1);
  dc_event_destroy(other);
  dc_event_destroy(event);
  dc_stream_destroy(b);
  dc_device_destroy(again);
}

static void *open_later(void *user) {
  nanosleep(&(struct timespec){0, 20000000}, NULL);
  atomic_store((atomic_int *)user, 1);
  return NULL;
}

/* The waiting thread is asleep when the other handle's stream records the event. */
static void test_a_wait_on_another_handle_wakes(void **state) {
  fixture *f = *state;
  dc_device *again;
  dc_event *event;
  pthread_t thread;
  atomic_int open = 0;
  assert_int_equal(dc_device_open("cuda", NULL, &again), DC_OK);
  assert_int_equal(dc_event_create(again, &event), DC_OK);
  assert_int_equal(dc_stream_call(f->a, pass_gate, &open), DC_OK);
  assert_int_equal(dc_event_record(event, f->a), DC_OK);
  pthread_create(&thread, NULL, open_later, &open);
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_OK);
  pthread_join(thread, NULL);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  dc_event_destroy(event);
  dc_device_destroy(again);
}

static void test_streams_of_other_devices_are_refused(void **state) {
  fixture *f = *state;
  dc_device *cpu;
  dc_stream *computes;
  dc_event *event;
  dc_context *context;
  assert_int_equal(dc_device_open("cpu", NULL, &cpu), DC_OK);
  assert_int_equal(dc_stream_create(cpu, &computes), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_context_create(f->device, NULL, &context), DC_OK);
  assert_int_equal(dc_init(context, NULL, NULL, 1024), DC_OK);
  assert_int_equal(dc_event_record(event, computes), DC_E_INVALID);
  assert_int_equal(dc_event_wait(event, computes, 0), DC_E_INVALID);
  assert_int_equal(dc_context_set_stream(context, computes), DC_E_INVALID);
  assert_string_equal(dc_last_error(),
                      "dc_context_set_stream: stream is of device \"cpu\", must be of the context's, \"cuda\"");
  assert_int_equal(dc_context_set_stream(context, f->a), DC_OK);
  dc_context_destroy(context);
  dc_event_destroy(event);
  dc_stream_destroy(computes);
  dc_device_destroy(cpu);
}

/* ---- captures ---- */

/* The library refuses waits that would let work of the capture run outside of it, and the device stays usable. */
static void test_events_of_a_spoiled_capture(void **state) {
  fixture *f = *state;
  void *native = cudasim_stream();
  dc_stream *wrapped;
  dc_event *event;
  int32_t passed = 1;
  assert_int_equal(dc_stream_wrap(f->device, native, &wrapped), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  cudasim_capture(native);
  cudasim_spoil();
  dc__stream_zero(wrapped, f->x, sizeof(float));
  assert_int_equal(dc_event_record(event, wrapped), DC_OK);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 0);
  assert_int_equal(dc_event_wait(event, wrapped, 0), DC_OK); /* the captured stream itself may wait */
  assert_int_equal(dc_event_wait(event, f->a, 0), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "recorded in a capture of a CUDA graph that had failed"));
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_E_STATE);
  assert_int_equal(cudasim_capture_end(native), 0);
  assert_int_equal(dc__device_check(f->device), DC_OK);
  assert_int_equal(cudasim_calls("cuCtxSynchronize"), 0);
  assert_int_equal(dc_event_record(event, wrapped), DC_OK);
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_OK);
  dc_event_destroy(event);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
}

/* Outside of a capture, the same error of the driver means that the work is lost, and no end of a capture would report
 * it. */
static void test_a_stream_outside_of_a_spoiled_capture(void **state) {
  fixture *f = *state;
  cudasim_fail("cuMemsetD8Async", 0, DC__CU_CAPTURE_INVALIDATED);
  dc__stream_zero(f->a, f->x, sizeof(float));
  assert_int_equal(dc__device_check(f->device), DC_E_DEVICE);
  assert_non_null(strstr(dc_last_error(), "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_host_function_queues_beyond_the_queue),
      TEST(test_two_handles_of_one_card),
      TEST(test_a_wait_on_another_handle_wakes),
      TEST(test_streams_of_other_devices_are_refused),
      TEST(test_events_of_a_spoiled_capture),
      TEST(test_a_stream_outside_of_a_spoiled_capture),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
