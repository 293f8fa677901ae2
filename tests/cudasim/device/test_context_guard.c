/* The thread's current device in an operator and after it. The device is made current only once, another device may be
 * used within the operator, and afterwards the caller's own is current again, whatever fails. */
#include "harness.h"

#include "comm/comm.h"
#include "cudasim.h"

typedef struct fixture {
  dc_device *device[2];
  dc_stream *stream[2];
} fixture;

static int set_up(void **state) {
  static fixture f;
  cudasim_reset();
  cudasim_set_devices(2, 9, 1);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(dc_device_open(i == 0 ? "cuda:0" : "cuda:1", NULL, &f.device[i]), DC_OK);
    assert_int_equal(dc_stream_create(f.device[i], &f.stream[i]), DC_OK);
  }
  *state = &f;
  return 0;
}

/* The thread's contexts and capture mode are as its caller left them. */
static void assert_left(void) {
  assert_int_equal(cudasim_depth(), 0);
  assert_int_equal(cudasim_mode(), 0);
}

static int tear_down(void **state) {
  fixture *f = *state;
  for (int i = 0; i < 2; i++) {
    dc_stream_destroy(f->stream[i]);
    dc_device_destroy(f->device[i]);
  }
  assert_int_equal(cudasim_live(), 0);
  assert_left();
  return 0;
}

static void get_current(void *native, void *args) {
  (void)native;
  **(int **)args = cudasim_current();
}

/* Returns the device that is current for work on the stream. */
static int current_on(dc_stream *stream) {
  int found = -2;
  int *to = &found;
  assert_int_equal(stream->device->ops->stream_issue(stream, get_current, &to, sizeof to, false), DC_OK);
  return found;
}

typedef struct within {
  dc_stream *here, *other;
  int found[3];
} within;

static void use_both(void *native, void *args) {
  within *w = *(within **)args;
  (void)native;
  w->found[0] = current_on(w->other);
  w->found[1] = cudasim_current();
  w->found[2] = current_on(w->here);
}

static int pushes(void) {
  return cudasim_calls("cuCtxPushCurrent_v2");
}

static void test_an_operator_enters_once(void **state) {
  fixture *f = *state;
  int before = pushes();
  for (int i = 0; i < 4; i++) {
    assert_int_equal(current_on(f->stream[0]), 0);
    assert_left();
  }
  assert_int_equal(pushes() - before, 4);
  before = pushes();
  dc__device_begin(f->device[0]);
  assert_int_equal(pushes() - before, 0); /* the context is pushed only when the device is used */
  for (int i = 0; i < 4; i++) {
    assert_int_equal(current_on(f->stream[0]), 0);
    assert_int_equal(cudasim_current(), 0);
  }
  dc__device_end(f->device[0]);
  assert_int_equal(pushes() - before, 1);
  assert_left();
}

static void test_two_devices(void **state) {
  fixture *f = *state;
  for (int outer = 0; outer < 2; outer++) { /* in the first device's operator, or in the second one's */
    dc__device_begin(f->device[outer]);
    for (int i = 0; i < 4; i++) {
      assert_int_equal(current_on(f->stream[i % 2]), i % 2);
    }
    assert_int_equal(cudasim_current(), outer);
    within w = {.here = f->stream[1], .other = f->stream[0]};
    within *place = &w;
    dc__device_begin(f->device[1]);
    assert_int_equal(f->device[1]->ops->stream_issue(f->stream[1], use_both, &place, sizeof place, false), DC_OK);
    dc__device_end(f->device[1]);
    assert_int_equal(w.found[0], 0);
    assert_int_equal(w.found[1], 1);
    assert_int_equal(w.found[2], 1);
    assert_int_equal(cudasim_current(), outer);
    dc__device_end(f->device[outer]);
    assert_left();
  }
}

/* The second device is used before the first one, so the first one's context is pushed on top of it, and must not
 * stay. */
static void test_entered_within_another(void **state) {
  fixture *f = *state;
  within w = {.here = f->stream[1], .other = f->stream[0]};
  within *place = &w;
  dc__device_begin(f->device[0]);
  assert_int_equal(f->device[1]->ops->stream_issue(f->stream[1], use_both, &place, sizeof place, false), DC_OK);
  assert_int_equal(w.found[0], 0);
  assert_int_equal(w.found[1], 1);
  assert_left();
  assert_int_equal(current_on(f->stream[0]), 0);
  assert_int_equal(cudasim_current(), 0);
  dc__device_end(f->device[0]);
  assert_left();
}

static void test_a_context_that_cannot_be_set(void **state) {
  static const char *const functions[] = {"cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode",
                                          "cuCtxPopCurrent_v2"};
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    fixture *f = *state;
    cudasim_fail(functions[i], 0, 201);
    dc__device_begin(f->device[0]);
    for (int k = 0; k < 3; k++) {
      (void)current_on(f->stream[0]);
    }
    dc__device_end(f->device[0]);
    assert_left();
    tear_down(state);
    set_up(state);
  }
}

/* A thread's current device does not affect other threads. */
static void call_current(void *args) {
  **(int **)args = cudasim_current();
}

static void test_threads_are_their_own(void **state) {
  fixture *f = *state;
  int found = 7;
  int *to = &found;
  dc__device_begin(f->device[0]);
  assert_int_equal(current_on(f->stream[0]), 0);
  dc__stream_call(f->stream[0], call_current, &to, sizeof to);
  assert_int_equal(dc__stream_sync(f->stream[0], 0), DC_OK);
  dc__device_end(f->device[0]);
  assert_int_equal(found, -1);
}

/* A communicator calls the caller's collectives with the thread's device unchanged. */
static int32_t record_context(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  memcpy(recv, send, (size_t)count * dc_dtype_size(dtype));
  assert_left();
  ++*(int *)user;
  return 0;
}
static int32_t tell(void *data, int64_t bytes, int32_t root, void *user) {
  (void)data, (void)bytes, (void)root, (void)user;
  return 0;
}
static int32_t wait_at_barrier(void *user) {
  (void)user;
  return 0;
}

static void test_the_callers_functions(void **state) {
  fixture *f = *state;
  int called = 0;
  dc_comm_callbacks callbacks = DC_COMM_CALLBACKS_INIT;
  callbacks.all_gather = callbacks.reduce_scatter = record_context;
  callbacks.broadcast = tell;
  callbacks.barrier = wait_at_barrier;
  callbacks.user = &called;
  dc_comm *comm;
  assert_int_equal(dc_comm_create_external(&callbacks, 0, 1, NULL, &comm), DC_OK);
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  const int64_t own = 7;
  int64_t table = 0;
  called = 0;
  const int before = pushes();
  dc__device_begin(f->device[0]);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(current_on(f->stream[0]), 0);
    assert_int_equal(dc__comm_all_gather_int64(comm, &tag, &own, 1, &table), DC_OK);
    assert_int_equal(current_on(f->stream[0]), 0);
    assert_int_equal(current_on(f->stream[0]), 0);
  }
  dc__device_end(f->device[0]);
  assert_int_equal(pushes() - before, 3);
  assert_true(table == own && called > 0);
  assert_left();
  dc_comm_destroy(comm);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_an_operator_enters_once),      TEST(test_two_devices),           TEST(test_entered_within_another),
      TEST(test_a_context_that_cannot_be_set), TEST(test_threads_are_their_own), TEST(test_the_callers_functions),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
