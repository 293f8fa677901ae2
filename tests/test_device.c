/* The CPU device: order within and across streams, overlap, what an event's mark means, deadlines. */
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

static void meet(void *barrier) {
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

/* Nobody leaves the barrier before all three have come: tasks that waited for each other would never end. */
static void test_tasks_overlap_the_caller(void **state) {
  fixture *f = *state;
  pthread_barrier_t barrier;
  assert_int_equal(pthread_barrier_init(&barrier, NULL, 3), 0);
  assert_int_equal(dc_stream_call(f->a, meet, &barrier), DC_OK);
  assert_int_equal(dc_stream_call(f->b, meet, &barrier), DC_OK);
  meet(&barrier);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
  pthread_barrier_destroy(&barrier);
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
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
