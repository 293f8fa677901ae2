/* The CUDA device on the simulated driver: order, events, memory, streams of others, graphs. The device's sources are
 * those of libdc_cuda.so, which is found and opened as in any program. */
#include "harness.h"

#include <time.h>

#include "cudasim.h"
#include "device/cuda/cuda.h"
#include "kernels/kernels.h"

enum { COUNT = 1000 };

typedef struct fixture {
  dc_device *device;
  dc_stream *a, *b;
  float *x, *y; /* on the device */
} fixture;

static int set_up(void **state) {
  static fixture f;
  void *ptr;
  cudasim_reset();
  assert_int_equal(dc_device_open("cuda", NULL, &f.device), DC_OK);
  assert_int_equal(dc_stream_create(f.device, &f.a), DC_OK);
  assert_int_equal(dc_stream_create(f.device, &f.b), DC_OK);
  assert_int_equal(f.device->ops->alloc(f.device, COUNT * sizeof(float), DC_MEMORY_DEVICE, &ptr), DC_OK);
  f.x = ptr;
  assert_int_equal(f.device->ops->alloc(f.device, COUNT * sizeof(float), DC_MEMORY_DEVICE, &ptr), DC_OK);
  f.y = ptr;
  *state = &f;
  return 0;
}

static int tear_down(void **state) {
  fixture *f = *state;
  f->device->ops->free(f->device, f->x, COUNT * sizeof(float), DC_MEMORY_DEVICE);
  f->device->ops->free(f->device, f->y, COUNT * sizeof(float), DC_MEMORY_DEVICE);
  dc_stream_destroy(f->a);
  dc_stream_destroy(f->b);
  dc_device_destroy(f->device);
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
  return 0;
}

/* ---- order ---- */

typedef struct gate {
  atomic_int open;
} gate;

static void pass_gate(void *user) {
  while (atomic_load(&((gate *)user)->open) == 0) {
    nanosleep(&(struct timespec){0, 100000}, NULL);
  }
}

static void test_host_functions_keep_their_place(void **state) {
  fixture *f = *state;
  gate g = {0};
  float in[COUNT], out[COUNT] = {0};
  for (int i = 0; i < COUNT; i++) {
    in[i] = (float)i;
  }
  dc__stream_zero(f->a, f->x, sizeof in);
  assert_int_equal(dc_stream_call(f->a, pass_gate, &g), DC_OK);
  dc__stream_copy(f->a, f->x, in, sizeof in); /* waits behind the gate */
  dc__stream_copy(f->b, out, f->x, 0);
  dc_event *event;
  int32_t passed = 1;
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_event_record(event, f->a), DC_OK);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 0);
  assert_int_equal(dc_event_wait(event, NULL, 1000000), DC_E_TIMEOUT);
  assert_int_equal(dc_stream_synchronize(f->a, 1000000), DC_E_TIMEOUT);
  assert_int_equal(dc_event_wait(event, f->b, 0), DC_OK); /* blocks no thread */
  dc__stream_copy(f->b, out, f->x, sizeof out);
  dc_event_destroy(event); /* the wait remains in force */
  atomic_store(&g.open, 1);
  assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
  assert_memory_equal(in, out, sizeof in);
}

static void copy_inside(void *user) {
  fixture *f = user;
  float ones[COUNT];
  for (int i = 0; i < COUNT; i++) {
    ones[i] = 1.0f;
  }
  dc__stream_copy(f->device->internal_stream, f->x, ones, sizeof ones); /* a host function may use the device */
  (void)dc__stream_sync(f->device->internal_stream, 0);
}

static void test_host_functions_may_use_the_device(void **state) {
  fixture *f = *state;
  float out[COUNT];
  dc__stream_zero(f->a, f->x, sizeof out);
  assert_int_equal(dc_stream_call(f->a, copy_inside, f), DC_OK);
  dc__stream_accumulate(f->a, f->x, DC_FLOAT32, f->x, DC_FLOAT32, COUNT);
  dc__stream_copy(f->a, out, f->x, sizeof out);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  for (int i = 0; i < COUNT; i++) {
    assert_true(out[i] == 2.0f);
  }
}

typedef struct self_wait {
  fixture *f;
  dc_event *event;
  dc_status sync, wait;
} self_wait;

static void wait_for_self(void *user) {
  self_wait *w = user;
  w->sync = dc_stream_synchronize(w->f->a, 0);
  (void)dc_event_record(w->event, w->f->a);
  w->wait = dc_event_wait(w->event, NULL, 0);
}

static void test_self_wait_is_refused(void **state) {
  fixture *f = *state;
  self_wait w = {f, NULL, DC_OK, DC_OK};
  assert_int_equal(dc_event_create(f->device, &w.event), DC_OK);
  assert_int_equal(dc_stream_call(f->a, wait_for_self, &w), DC_OK);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(w.sync, DC_E_STATE);
  assert_int_equal(w.wait, DC_E_STATE);
  dc_event_destroy(w.event);
}

static void destroy_own(void *user) {
  dc_stream_destroy(user);
}

static void test_destroy_by_its_own_task(void **state) {
  fixture *f = *state;
  dc_stream *c;
  dc_event *event;
  assert_int_equal(dc_stream_create(f->device, &c), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_stream_call(c, destroy_own, c), DC_OK);
  while (atomic_load(&f->device->refs) > 4) { /* the fixture's two streams, the handle, and the event */
    nanosleep(&(struct timespec){0, 100000}, NULL);
  }
  dc_event_destroy(event);
}

static int64_t ns_of(dc__timestamp *stamp) {
  return stamp->device->ops->timestamp_ns(stamp);
}

static void drop(dc__timestamp *stamp) {
  stamp->device->ops->timestamp_release(stamp);
}

/* Timestamps around a host function, so the stream's worker issues the second one. */
static void test_stamps(void **state) {
  fixture *f = *state;
  gate g = {0};
  dc__timestamp *stamps[3];
  const int64_t begun = dc__now_ns();
  stamps[0] = f->device->ops->stream_timestamp(f->a);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(dc_stream_call(f->a, pass_gate, &g), DC_OK);
  stamps[1] = f->device->ops->stream_timestamp(f->a);
  stamps[2] = f->device->ops->stream_timestamp(f->a);
  drop(stamps[2]); /* dropped before its time is read */
  assert_int_equal(ns_of(stamps[1]), 0);
  const int64_t opened = dc__now_ns();
  atomic_store(&g.open, 1);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  const int64_t ended = dc__now_ns();
  const int64_t slack = 60000000000; /* between the host's clock and the beginning of an epoch, on a busy machine */
  while (!((dc__cuda_device *)f->device)->epochs[1].passed) {
    assert_true(ns_of(stamps[0]) > 0); /* until the device finds that the epoch's event has passed, on another stream */
  }
  cudasim_fail("cuEventElapsedTime", 0, DC__CU_NOT_READY); /* as if the stamp's event passed right after the query */
  assert_int_equal(ns_of(stamps[0]), 0);
  assert_true(ns_of(stamps[0]) > begun - slack && ns_of(stamps[0]) < opened + slack);
  assert_true(ns_of(stamps[1]) > opened - slack && ns_of(stamps[1]) < ended + slack);
  assert_true(ns_of(stamps[1]) - ns_of(stamps[0]) > 0);
  drop(stamps[0]);
  drop(stamps[1]);
}

/* Each epoch is made to look long past. */
static void test_stamps_of_old_epochs(void **state) {
  fixture *f = *state;
  dc__cuda_device *device = (dc__cuda_device *)f->device;
  dc__timestamp *stamps[DC__CUDA_EPOCHS + 2];
  for (size_t i = 0; i < DC__COUNT(stamps); i++) {
    stamps[i] = f->device->ops->stream_timestamp(f->a);
    assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
    assert_true(ns_of(stamps[i]) > 0);
    assert_int_equal(device->epoch, i + 1);
    device->epochs[device->epoch % DC__CUDA_EPOCHS].ns -= INT64_C(8000000000);
  }
  assert_int_equal(ns_of(stamps[0]), ((dc__cuda_timestamp *)stamps[0])->ns);
  for (size_t i = 0; i < DC__COUNT(stamps); i++) {
    drop(stamps[i]);
  }
}

static void *use_event(void *arg) {
  void **args = arg;
  dc_event *event = args[0];
  for (int i = 0; i < 200; i++) {
    (void)dc_event_record(event, args[1]);
    (void)dc_event_wait(event, args[2], 0);
    int32_t passed;
    (void)dc_event_query(event, &passed);
  }
  return NULL;
}

static void test_one_event_from_many_threads(void **state) {
  fixture *f = *state;
  dc_event *event;
  pthread_t threads[4];
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  void *args[2][3] = {{event, f->a, f->b}, {event, f->b, f->a}};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_create(&threads[i], NULL, use_event, args[i % 2]), 0);
  }
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
  }
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_OK);
  dc_event_destroy(event);
}

/* ---- memory ---- */

static void test_pinned_memory_has_a_budget(void **state) {
  fixture *f = *state;
  void *ptr;
  int64_t total, left;
  assert_int_equal(f->device->ops->memory_info(f->device, &total, &left), DC_OK);
  assert_true(total == INT64_C(16) << 30 && left <= total);
  assert_int_equal(f->device->ops->alloc(f->device, (size_t)1 << 50, DC_MEMORY_HOST, &ptr), DC_E_NO_MEMORY);
  assert_non_null(strstr(dc_last_error(), "pinned"));
  assert_int_equal(cudasim_calls("cuMemHostAlloc"), 0);
  assert_int_equal(f->device->ops->alloc(f->device, 100, DC_MEMORY_HOST, &ptr), DC_OK);
  memset(ptr, 1, 100);
  dc__stream_copy(f->a, f->x, ptr, 100);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  f->device->ops->free(f->device, ptr, 100, DC_MEMORY_HOST);
  assert_int_equal(f->device->ops->alloc(f->device, (size_t)17 << 30, DC_MEMORY_DEVICE, &ptr), DC_E_NO_MEMORY);
  assert_non_null(strstr(dc_last_error(), "CUDA_ERROR_OUT_OF_MEMORY"));
  assert_int_equal(dc__device_check(f->device), DC_OK); /* running out of memory is no failure of the device */
}

static void test_tensors(void **state) {
  fixture *f = *state;
  const int64_t shape[] = {3, 5};
  dc_tensor t = DC_TENSOR_INIT;
  float out[15], zeros[15] = {0};
  assert_int_equal(dc_tensor_create(f->device, shape, 2, DC_FLOAT32, &t), DC_OK);
  dc__stream_copy(f->a, out, t.data, sizeof out);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_memory_equal(out, zeros, sizeof out);
  dc_buffer_release(t.buffer);
  assert_int_equal(dc_device_count("cuda"), 1);
  assert_int_equal(dc_is_cuda_available(), 1);
  assert_string_equal(dc_get_optimal_device(NULL), "cuda:0");
  assert_string_equal(dc_device_name(f->device), "cuda");
}

/* Once a first step has run, later steps ask the driver for no memory, streams or events. */
static void test_steady_state(void **state) {
  fixture *f = *state;
  static const char *const makers[] = {"cuStreamCreate", "cuEventCreate", "cuMemAllocFromPoolAsync", "cuMemHostAlloc"};
  int before[DC__COUNT(makers)] = {0};
  dc_event *event;
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  for (int step = 0; step < 5; step++) {
    for (int i = 0; i < 3; i++) {
      dc__stream_cast(f->a, f->y, DC_BFLOAT16, f->x, DC_FLOAT32, COUNT);
      assert_int_equal(dc_event_record(event, f->a), DC_OK);
      assert_int_equal(dc_event_wait(event, f->b, 0), DC_OK);
    }
    assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
    for (size_t i = 0; i < DC__COUNT(makers); i++) {
      int calls = cudasim_calls(makers[i]);
      assert_true(step < 2 || calls == before[i]);
      before[i] = calls;
    }
  }
  dc_event_destroy(event);
}

/* ---- streams of others ---- */

static void note_thread(void *user) {
  *(pthread_t *)user = pthread_self();
}

static void test_wrapped_streams(void **state) {
  fixture *f = *state;
  void *native = cudasim_stream();
  dc_stream *wrapped;
  dc_event *event;
  gate g = {0};
  float in[COUNT], out[COUNT];
  pthread_t ran_on;
  for (int i = 0; i < COUNT; i++) {
    in[i] = (float)i / 8;
  }
  assert_int_equal(dc_stream_wrap(f->device, native, &wrapped), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_stream_call(f->a, pass_gate, &g), DC_OK);
  dc__stream_copy(f->a, f->x, in, sizeof in);
  assert_int_equal(dc_event_record(event, f->a), DC_OK);
  atomic_store(&g.open, 1);
  assert_int_equal(dc_event_wait(event, wrapped, 0), DC_OK);
  dc__stream_copy(wrapped, out, f->x, sizeof out);
  assert_int_equal(dc_stream_call(wrapped, note_thread, &ran_on), DC_OK);
  assert_true(pthread_equal(ran_on, pthread_self()));
  assert_memory_equal(in, out, sizeof in); /* the call waited for earlier work */
  dc_event_destroy(event);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
  dc_device *cpu;
  assert_int_equal(dc_device_open("cpu", NULL, &cpu), DC_OK);
  assert_int_equal(dc_stream_wrap(cpu, native, &wrapped), DC_E_UNSUPPORTED);
  dc_device_destroy(cpu);
}

static void test_captured_into_a_graph(void **state) {
  fixture *f = *state;
  void *native = cudasim_stream();
  dc_stream *wrapped;
  dc_event *event, *other;
  void *ptr;
  int32_t passed = 1;
  float ones[COUNT], out[COUNT];
  for (int i = 0; i < COUNT; i++) {
    ones[i] = 1.0f;
  }
  assert_int_equal(dc_stream_wrap(f->device, native, &wrapped), DC_OK);
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  assert_int_equal(dc_event_create(f->device, &other), DC_OK);
  dc__stream_copy(f->a, f->x, ones, sizeof ones);
  dc__stream_zero(f->a, f->y, sizeof ones);
  assert_int_equal(dc_event_record(other, f->a), DC_OK);
  cudasim_capture(native);
  dc__stream_accumulate(wrapped, f->y, DC_FLOAT32, f->x, DC_FLOAT32, COUNT);
  dc__timestamp *stamp = f->device->ops->stream_timestamp(wrapped);
  assert_true(ns_of(stamp) > 0); /* the time of the capture */
  drop(stamp);
  assert_int_equal(dc_event_record(event, wrapped), DC_OK);
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  assert_int_equal(passed, 0);
  assert_int_equal(dc_event_wait(event, NULL, 0), DC_E_STATE);
  /* The host waits for work outside of the graph. A host function cannot be part of the graph. */
  assert_int_equal(dc_event_wait(other, wrapped, 0), DC_OK);
  assert_int_equal(dc_event_query(other, &passed), DC_OK);
  assert_int_equal(passed, 1);
  assert_int_equal(dc_stream_call(wrapped, pass_gate, NULL), DC_E_STATE);
  /* Calls for other streams and memory work during the capture. */
  assert_int_equal(dc_event_wait(other, NULL, 0), DC_OK);
  assert_int_equal(f->device->ops->alloc(f->device, 100, DC_MEMORY_HOST, &ptr), DC_OK);
  f->device->ops->free(f->device, ptr, 100, DC_MEMORY_HOST);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_true(cudasim_capture_end(native));
  for (int i = 0; i < 3; i++) {
    cudasim_launch(native);
  }
  dc__stream_copy(wrapped, out, f->y, sizeof out);
  assert_int_equal(dc_stream_synchronize(wrapped, 0), DC_OK);
  for (int i = 0; i < COUNT; i++) {
    assert_true(out[i] == 3.0f);
  }
  assert_int_equal(dc__device_check(f->device), DC_OK);
  dc_event_destroy(event);
  dc_event_destroy(other);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_host_functions_keep_their_place),
      TEST(test_host_functions_may_use_the_device),
      TEST(test_self_wait_is_refused),
      TEST(test_destroy_by_its_own_task),
      TEST(test_stamps),
      TEST(test_stamps_of_old_epochs),
      TEST(test_one_event_from_many_threads),
      TEST(test_pinned_memory_has_a_budget),
      TEST(test_tensors),
      TEST(test_steady_state),
      TEST(test_wrapped_streams),
      TEST(test_captured_into_a_graph),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
