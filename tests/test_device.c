/* The CPU device: order within and across streams, overlap, what an event's mark means, deadlines, memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include "device/device.h"

enum { MS = 1000000 };

static void sleep_ns(int64_t ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  nanosleep(&t, NULL);
}

/* ---- tasks ---- */

/* A task that waits until the test opens it, so that tests need no sleeps to have work pending. */
typedef struct gate {
  atomic_bool open;
  atomic_bool entered;
} gate;

static void pass_gate(void *user) {
  gate *g = user;
  atomic_store(&g->entered, true);
  while (!atomic_load(&g->open)) {
    sleep_ns(50000);
  }
}

/* Writes numbers in the order in which tasks ran. */
typedef struct log {
  atomic_int count;
  int entries[4096];
} log;

typedef struct append_args {
  log *to;
  int value;
} append_args;

static void append(void *args) {
  append_args *a = args;
  a->to->entries[atomic_fetch_add(&a->to->count, 1)] = a->value;
}

static void queue_append(dc_stream *stream, log *to, int value) {
  dc__stream_call(stream, append, &(append_args){to, value}, sizeof(append_args));
}

static void sleep_50ms(void *user) {
  (void)user;
  sleep_ns(50 * MS);
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

static int set_up(void **state) {
  fixture *f = calloc(1, sizeof(*f));
  assert_int_equal(dc_device_open("cpu", NULL, &f->device), DC_OK);
  assert_int_equal(dc_stream_create(f->device, &f->a), DC_OK);
  assert_int_equal(dc_stream_create(f->device, &f->b), DC_OK);
  assert_int_equal(dc_event_create(f->device, &f->event), DC_OK);
  *state = f;
  return 0;
}

static int tear_down(void **state) {
  fixture *f = *state;
  dc_device_destroy(f->device); /* first: streams and events keep it alive */
  dc_event_destroy(f->event);
  dc_stream_destroy(f->a);
  dc_stream_destroy(f->b);
  free(f);
  return 0;
}

static int32_t query(dc_event *event) {
  int32_t passed = -1;
  assert_int_equal(dc_event_query(event, &passed), DC_OK);
  return passed;
}

/* ---- order ---- */

static void test_order_in_a_stream(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  for (int i = 0; i < 4096; i++) { /* many times round the ring */
    queue_append(f->a, seen, i);
  }
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(seen->count, 4096);
  for (int i = 0; i < 4096; i++) {
    assert_int_equal(seen->entries[i], i);
  }
  free(seen);
}

static void test_order_across_streams(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  for (int i = 0; i < 500; i++) { /* ping-pong: each stream waits for the other */
    dc_stream *from = i % 2 == 0 ? f->a : f->b;
    dc_stream *to = i % 2 == 0 ? f->b : f->a;
    queue_append(from, seen, i);
    assert_int_equal(dc_event_record(f->event, from), DC_OK);
    assert_int_equal(dc_event_wait(f->event, to, -1), DC_OK); /* timeout_ns is not used with a stream */
  }
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(seen->count, 500);
  for (int i = 0; i < 500; i++) {
    assert_int_equal(seen->entries[i], i);
  }
  free(seen);
}

static void test_tasks_overlap_the_caller(void **state) {
  fixture *f = *state;
  int64_t best = INT64_MAX; /* of some tries, since the machine may be busy */
  for (int i = 0; i < 5 && best >= 95 * (int64_t)MS; i++) {
    int64_t begin = dc__now_ns();
    assert_int_equal(dc_stream_call(f->a, sleep_50ms, NULL), DC_OK);
    assert_int_equal(dc_stream_call(f->b, sleep_50ms, NULL), DC_OK);
    sleep_50ms(NULL);
    assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
    assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
    int64_t took = dc__now_ns() - begin;
    best = took < best ? took : best;
  }
  assert_true(best < 95 * (int64_t)MS); /* two in a row take 100 */
}

static void test_copy_and_zero(void **state) {
  fixture *f = *state;
  dc_stream *streams[] = {f->a, NULL};
  for (size_t i = 0; i < DC__COUNT(streams); i++) {
    char text[8] = "abcdefg";
    char copy[8] = "0000000";
    dc__stream_copy(streams[i], copy, text, sizeof(text));
    dc__stream_zero(streams[i], text, 4);
    dc__stream_copy(streams[i], NULL, NULL, 0);
    dc__stream_zero(streams[i], NULL, 0);
    assert_int_equal(dc__stream_sync(streams[i], 0), DC_OK);
    assert_memory_equal(copy, "abcdefg", 8);
    assert_memory_equal(text, "\0\0\0\0efg", 8);
  }
}

static void sum_bytes(void *args) {
  struct {
    int *sum;
    unsigned char bytes[DC__TASK_BYTES - sizeof(int *)];
  } *a = args;
  for (size_t i = 0; i < sizeof(a->bytes); i++) {
    *a->sum += a->bytes[i];
  }
  memset(a->bytes, 0, sizeof(a->bytes)); /* a task owns its copy */
}

static void test_arguments_are_copied_whole(void **state) {
  fixture *f = *state;
  int sum = 0;
  struct {
    int *sum;
    unsigned char bytes[DC__TASK_BYTES - sizeof(int *)];
  } args = {.sum = &sum};
  assert_int_equal(sizeof(args), DC__TASK_BYTES);
  memset(args.bytes, 1, sizeof(args.bytes));
  dc__stream_call(NULL, sum_bytes, &args, sizeof(args));
  assert_int_equal(args.bytes[0], 1);
  dc__stream_call(f->a, sum_bytes, &args, sizeof(args));
  memset(args.bytes, 0, sizeof(args.bytes));
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(sum, 2 * (int)sizeof(args.bytes));
}

/* ---- queue ---- */

typedef struct filler {
  dc_stream *stream;
  log *seen;
  atomic_int queued;
} filler;

static void *fill(void *arg) {
  filler *to = arg;
  for (int i = 0; i < 1000; i++) {
    queue_append(to->stream, to->seen, i);
    atomic_fetch_add(&to->queued, 1);
  }
  return NULL;
}

static void test_full_queue_blocks(void **state) {
  fixture *f = *state;
  gate g = {false, false};
  filler to = {f->a, calloc(1, sizeof(log)), 0};
  assert_int_equal(dc_stream_call(f->a, pass_gate, &g), DC_OK);
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) {
    pthread_create(&threads[i], NULL, fill, &to);
  }
  while (atomic_load(&to.queued) < 255) {
    sleep_ns(MS);
  }
  sleep_ns(20 * MS);
  assert_int_equal(to.queued, 255); /* and the gate: 256 */
  atomic_store(&g.open, true);
  for (int i = 0; i < 3; i++) {
    pthread_join(threads[i], NULL);
  }
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(to.seen->count, 3000);
  free(to.seen);
}

static void open_gate_later(void *user) {
  sleep_ns(5 * MS);
  atomic_store(&((gate *)user)->open, true);
}

static void test_destroy_drains(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  gate g = {false, false};
  dc_stream *stream = NULL;
  assert_int_equal(dc_stream_create(f->device, &stream), DC_OK);
  dc_stream_call(stream, pass_gate, &g);
  for (int i = 0; i < 200; i++) {
    queue_append(stream, seen, i);
  }
  dc_event_record(f->event, stream);
  dc_event_wait(f->event, f->a, 0); /* a waits for a mark of a stream that goes */
  queue_append(f->a, seen, 200);
  dc_stream_call(f->b, open_gate_later, &g);
  dc_stream_destroy(stream);
  assert_true(atomic_load(&seen->count) >= 200);
  assert_int_equal(query(f->event), 1);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(seen->count, 201);
  assert_int_equal(seen->entries[200], 200);
  free(seen);
}

static void destroy_stream(void *user) {
  dc_stream_destroy(user);
}

static void test_destroy_by_its_own_task(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  gate g = {false, false};
  dc_stream *stream = NULL;
  assert_int_equal(dc_stream_create(f->device, &stream), DC_OK);
  dc_stream_call(stream, pass_gate, &g);
  dc_stream_call(stream, destroy_stream, stream);
  queue_append(stream, seen, 1);
  dc_event_record(f->event, stream);
  atomic_store(&g.open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(seen->count, 1);
  free(seen);
}

/* ---- events ---- */

static void test_events(void **state) {
  fixture *f = *state;
  gate first = {false, false};
  gate second = {false, false};
  assert_int_equal(query(f->event), 1); /* never recorded: passed */
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  dc_event_record(f->event, f->a); /* on an empty stream: passed */
  assert_int_equal(query(f->event), 1);

  dc_stream_call(f->a, pass_gate, &first);
  dc_event_record(f->event, f->a);
  assert_int_equal(query(f->event), 0);
  dc_stream_call(f->a, pass_gate, &second); /* behind the mark */
  atomic_store(&first.open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(query(f->event), 1);

  dc_event_record(f->event, f->a); /* the later mark replaces the earlier one */
  assert_int_equal(query(f->event), 0);
  dc_event_record(f->event, NULL); /* the calling thread's past is past */
  assert_int_equal(query(f->event), 1);
  atomic_store(&second.open, true);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
}

static void test_waiting_binds_to_the_mark_of_then(void **state) {
  fixture *f = *state;
  gate early = {false, false};
  gate late = {false, false};
  dc_stream_call(f->a, pass_gate, &early);
  dc_event_record(f->event, f->a);
  dc_event_wait(f->event, f->b, 0);
  dc_stream_call(f->a, pass_gate, &late);
  dc_event_record(f->event, f->a); /* b must not wait for this one */
  assert_int_equal(dc_stream_synchronize(f->b, 2 * MS), DC_E_TIMEOUT);
  atomic_store(&early.open, true);
  assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
  assert_int_equal(query(f->event), 0);
  atomic_store(&late.open, true);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
}

static void test_destroyed_event_still_holds_back(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  gate g = {false, false};
  dc_event *event = NULL;
  assert_int_equal(dc_event_create(f->device, &event), DC_OK);
  dc_stream_call(f->a, pass_gate, &g);
  dc_event_record(event, f->a);
  dc_event_wait(event, f->b, 0);
  dc_event_wait(event, f->a, 0); /* its own stream: in order already */
  dc_event_destroy(event);
  queue_append(f->b, seen, 1);
  assert_int_equal(dc_stream_synchronize(f->b, 2 * MS), DC_E_TIMEOUT);
  assert_int_equal(seen->count, 0);
  atomic_store(&g.open, true);
  assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
  assert_int_equal(seen->count, 1);
  free(seen);
}

static void *use_event(void *arg) {
  fixture *f = arg;
  log *seen = calloc(1, sizeof(*seen));
  for (int i = 0; i < 300; i++) {
    queue_append(f->a, seen, i);
    dc_event_record(f->event, f->a);
    dc_event_wait(f->event, f->b, 0);
    (void)query(f->event);
    if (i % 16 == 0) {
      dc_event_wait(f->event, NULL, 0);
    }
  }
  dc_stream_synchronize(f->a, 0);
  assert_int_equal(seen->count, 300);
  free(seen);
  return NULL;
}

static void test_one_event_from_many_threads(void **state) {
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) {
    pthread_create(&threads[i], NULL, use_event, *state);
  }
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
  }
}

/* ---- deadlines ---- */

static void test_deadlines(void **state) {
  fixture *f = *state;
  gate g = {false, false};
  dc_stream_call(f->a, pass_gate, &g);
  dc_event_record(f->event, f->a);
  int64_t begin = dc__now_ns();
  assert_int_equal(dc_stream_synchronize(f->a, 20 * MS), DC_E_TIMEOUT);
  assert_true(dc__now_ns() - begin >= 20 * (int64_t)MS);
  assert_string_equal(dc_last_error(), "dc_stream_synchronize: work was still pending after timeout_ns = 20000000");
  assert_int_equal(dc_event_wait(f->event, NULL, 1), DC_E_TIMEOUT);
  assert_string_equal(dc_last_error(), "dc_event_wait: work was still pending after timeout_ns = 1");
  atomic_store(&g.open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, INT64_MAX), DC_OK);
}

static void wait_for_self(void *user) {
  fixture *f = user;
  dc_event_record(f->event, f->a);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_E_STATE);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_E_STATE);
  assert_string_equal(dc_last_error(),
                      "dc_stream_synchronize: a task must not wait for its own stream, which waits for the task");
}

static void fill_own_queue(void *user) {
  fixture *f = user;
  for (int i = 0; i < 255; i++) { /* this task is the 256th */
    assert_int_equal(dc_stream_call(f->a, pass_gate, &f->gate), DC_OK);
  }
  assert_int_equal(dc_stream_call(f->a, pass_gate, &f->gate), DC_E_STATE);
  assert_string_equal(dc_last_error(),
                      "dc_stream_call: a task must not wait for room in its own stream's queue (256 entries)");
  dc_event_record(f->event, f->b);
  assert_int_equal(dc_event_wait(f->event, f->a, 0), DC_E_STATE); /* b is pending */
  atomic_store(&f->filled, true);
}

static void test_waiting_for_oneself_is_refused(void **state) {
  fixture *f = *state;
  assert_int_equal(dc_stream_call(f->a, wait_for_self, f), DC_OK);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(dc_stream_call(f->b, pass_gate, &f->gate), DC_OK);
  assert_int_equal(dc_stream_call(f->a, fill_own_queue, f), DC_OK);
  while (!atomic_load(&f->filled)) {
    sleep_ns(MS);
  }
  atomic_store(&f->gate.open, true);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
}

/* ---- memory ---- */

static void test_memory(void **state) {
  fixture *f = *state;
  const size_t sizes[] = {0, 1, 255, 4097, (2u << 20) - 1, 2u << 20, (4u << 20) + 1};
  for (size_t i = 0; i < DC__COUNT(sizes); i++) {
    for (int32_t kind = DC_MEMORY_DEVICE; kind <= DC_MEMORY_HOST; kind += DC_MEMORY_HOST - DC_MEMORY_DEVICE) {
      void *ptr = NULL;
      assert_int_equal(f->device->ops->alloc(f->device, sizes[i], kind, &ptr), DC_OK);
      assert_non_null(ptr);
      assert_int_equal((uintptr_t)ptr % 256, 0);
      memset(ptr, 7, sizes[i]);
      f->device->ops->free(f->device, ptr, sizes[i], kind);
    }
  }
  assert_int_equal(f->device->allocations, 2 * DC__COUNT(sizes));
  void *none = NULL;
  assert_int_equal(f->device->ops->alloc(f->device, SIZE_MAX, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_int_equal(f->device->ops->alloc(f->device, SIZE_MAX / 8, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_null(none);
}

typedef struct counting {
  int64_t live_bytes;
  int live;
  int calls;
  int destroyed;
  size_t skew; /* added to what alloc returns */
  bool empty;
} counting;

static void *counting_alloc(size_t bytes, size_t align, void *user) {
  counting *c = user;
  assert_true(align > 0 && align <= 4096 && (align & (align - 1)) == 0);
  c->calls++;
  if (c->empty) {
    return NULL;
  }
  c->live++;
  c->live_bytes += (int64_t)bytes;
  return (char *)aligned_alloc(align, (bytes + 2 * align - 1) / align * align) + c->skew;
}

static void counting_free(void *ptr, size_t bytes, size_t align, void *user) {
  counting *c = user;
  assert_int_equal(align, 256); /* as alloc was asked */
  c->live--;
  c->live_bytes -= (int64_t)bytes;
  free((char *)ptr - c->skew);
}

static void counting_destroy(void *user) {
  counting *c = user;
  assert_int_equal(c->live, 0);
  c->destroyed++;
}

static void test_callers_allocator(void **state) {
  (void)state;
  counting c = {0};
  dc_allocator allocator = {sizeof(allocator), counting_alloc, counting_free, counting_destroy, &c};
  dc_device_options options = DC_DEVICE_OPTIONS_INIT;
  options.allocator = &allocator;
  dc_device *device = NULL;
  assert_int_equal(dc_device_open("cpu", &options, &device), DC_OK);
  memset(&allocator, 0, sizeof(allocator)); /* it was copied */
  void *small = NULL;
  void *large = NULL;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &small), DC_OK);
  assert_int_equal(device->ops->alloc(device, (3u << 20) + 5, DC_MEMORY_HOST, &large), DC_OK);
  assert_int_equal(c.live, 2);
  device->ops->free(device, small, 10, DC_MEMORY_DEVICE);
  device->ops->free(device, large, (3u << 20) + 5, DC_MEMORY_HOST);
  assert_int_equal(c.live, 0);
  assert_int_equal(c.live_bytes, 0);

  void *none = NULL;
  c.skew = 64;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &none), DC_E_CALLBACK);
  assert_non_null(strstr(dc_last_error(), "must be 256-byte aligned"));
  assert_int_equal(c.live, 0);
  c.empty = true;
  assert_int_equal(device->ops->alloc(device, 10, DC_MEMORY_DEVICE, &none), DC_E_NO_MEMORY);
  assert_string_equal(dc_last_error(), "device \"cpu\": the caller's allocator gave no 256 bytes");
  assert_null(none);

  dc_stream *stream;
  assert_int_equal(dc_stream_create(device, &stream), DC_OK);
  dc_device_destroy(device);
  assert_int_equal(c.destroyed, 0); /* the stream keeps the device */
  dc_stream_destroy(stream);
  assert_int_equal(c.destroyed, 1);
}

/* ---- bad arguments ---- */

#define assert_fails(call, status, text)        \
  do {                                          \
    assert_int_equal(call, status);             \
    assert_string_equal(dc_last_error(), text); \
  } while (0)

static void test_open_arguments(void **state) {
  (void)state;
  dc_device *device = (dc_device *)&device;
  assert_fails(dc_device_open("cpu", NULL, NULL), DC_E_INVALID, "dc_device_open: device is NULL");
  assert_fails(dc_device_open("tpu", NULL, &device), DC_E_NO_DEVICE,
               "dc_device_open: name = \"tpu\", must be \"cpu\", \"cuda\" or \"cuda:N\"");
  assert_null(device);
  assert_fails(dc_device_open(NULL, NULL, &device), DC_E_INVALID, "dc_device_open: name is NULL");
  dc_device_options options = {0};
  assert_int_equal(dc_device_open("cpu", &options, &device), DC_E_INVALID);
  dc_device_options_init(&options, sizeof(options));
  dc_allocator allocator = DC_ALLOCATOR_INIT;
  allocator.alloc = counting_alloc;
  options.allocator = &allocator;
  assert_fails(dc_device_open("cpu", &options, &device), DC_E_INVALID,
               "dc_device_open: options.allocator.free is NULL, must be a function");
  allocator.alloc = NULL;
  assert_fails(dc_device_open("cpu", &options, &device), DC_E_INVALID,
               "dc_device_open: options.allocator.alloc is NULL, must be a function");
  assert_null(device);
  assert_string_equal(dc_device_name(NULL), "");
}

static void test_arguments(void **state) {
  fixture *f = *state;
  dc_stream *stream = f->a;
  dc_event *event = f->event;
  int32_t passed = 7;
  assert_string_equal(dc_device_name(f->device), "cpu");
  assert_fails(dc_stream_create(f->device, NULL), DC_E_INVALID, "dc_stream_create: stream is NULL");
  assert_fails(dc_stream_create(NULL, &stream), DC_E_INVALID, "dc_stream_create: device is NULL");
  assert_null(stream);
  assert_fails(dc_stream_synchronize(NULL, 0), DC_E_INVALID, "dc_stream_synchronize: stream is NULL");
  assert_fails(dc_stream_synchronize(f->a, -1), DC_E_INVALID, "dc_stream_synchronize: timeout_ns = -1, must be >= 0");
  assert_fails(dc_stream_call(f->a, NULL, NULL), DC_E_INVALID, "dc_stream_call: fn is NULL");
  assert_fails(dc_event_create(f->device, NULL), DC_E_INVALID, "dc_event_create: event is NULL");
  assert_fails(dc_event_create(NULL, &event), DC_E_INVALID, "dc_event_create: device is NULL");
  assert_null(event);
  assert_fails(dc_event_record(NULL, f->a), DC_E_INVALID, "dc_event_record: event is NULL");
  assert_fails(dc_event_wait(NULL, f->a, 0), DC_E_INVALID, "dc_event_wait: event is NULL");
  assert_fails(dc_event_wait(f->event, NULL, -5), DC_E_INVALID, "dc_event_wait: timeout_ns = -5, must be >= 0");
  assert_fails(dc_event_query(NULL, &passed), DC_E_INVALID, "dc_event_query: event is NULL");
  assert_fails(dc_event_query(f->event, NULL), DC_E_INVALID, "dc_event_query: passed is NULL");
  assert_int_equal(passed, 7);
  dc_stream_destroy(NULL);
  dc_event_destroy(NULL);
  dc_device_destroy(NULL);
  gate g = {true, false};
  assert_int_equal(dc_stream_call(NULL, pass_gate, &g), DC_OK); /* NULL: now, here */
  assert_true(g.entered);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_order_in_a_stream),
      TEST(test_order_across_streams),
      TEST(test_tasks_overlap_the_caller),
      TEST(test_copy_and_zero),
      TEST(test_arguments_are_copied_whole),
      TEST(test_full_queue_blocks),
      TEST(test_destroy_drains),
      TEST(test_destroy_by_its_own_task),
      TEST(test_events),
      TEST(test_waiting_binds_to_the_mark_of_then),
      TEST(test_destroyed_event_still_holds_back),
      TEST(test_one_event_from_many_threads),
      TEST(test_deadlines),
      TEST(test_waiting_for_oneself_is_refused),
      TEST(test_memory),
      cmocka_unit_test(test_callers_allocator),
      cmocka_unit_test(test_open_arguments),
      TEST(test_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
