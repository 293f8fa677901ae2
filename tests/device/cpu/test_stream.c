/* The CPU device: order within and across streams, overlap, full queues, and streams that are destroyed. */
#include "stream_test.h"

/* ---- order ---- */

static void test_order_in_a_stream(void **state) {
  fixture *f = *state;
  log *seen = calloc(1, sizeof(*seen));
  for (int i = 0; i < 4096; i++) { /* the ring wraps around many times */
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
  for (int i = 0; i < 500; i++) { /* each stream waits for the other in turn */
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

/* Three tasks meet at a barrier, so if one had to wait for another to end, none would. */
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
  memset(a->bytes, 0, sizeof(a->bytes)); /* the task has its own copy */
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
  assert_int_equal(to.queued, 255); /* with the gate, 256 */
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
  dc_event_wait(f->event, f->a, 0); /* a waits for an event of a stream that is destroyed */
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

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_order_in_a_stream), TEST(test_order_across_streams),       TEST(test_tasks_overlap_the_caller),
      TEST(test_copy_and_zero),     TEST(test_arguments_are_copied_whole), TEST(test_full_queue_blocks),
      TEST(test_destroy_drains),    TEST(test_destroy_by_its_own_task),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
