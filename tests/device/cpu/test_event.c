/* The CPU device's events: which work they stand for, deadlines, and waits that would never end. */
#include "stream_test.h"

static void test_events(void **state) {
  fixture *f = *state;
  gate first = {false, false};
  gate second = {false, false};
  assert_int_equal(query(f->event), 1); /* an event that was never recorded has passed */
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  dc_event_record(f->event, f->a); /* recorded on an empty stream: it has passed */
  assert_int_equal(query(f->event), 1);

  dc_stream_call(f->a, pass_gate, &first);
  dc_event_record(f->event, f->a);
  assert_int_equal(query(f->event), 0);
  dc_stream_call(f->a, pass_gate, &second); /* queued behind the record */
  atomic_store(&first.open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(query(f->event), 1);

  dc_event_record(f->event, f->a); /* the later record replaces the earlier one */
  assert_int_equal(query(f->event), 0);
  dc_event_record(f->event, NULL); /* all earlier work of the calling thread is done */
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
  dc_event_record(f->event, f->a); /* b must not wait for this record */
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
  dc_event_wait(event, f->a, 0); /* the event's own stream is ordered already */
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

static void test_self_wait_is_refused(void **state) {
  fixture *f = *state;
  assert_int_equal(dc_stream_call(f->a, wait_for_self, f), DC_OK);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
}

/* Streams of two handles of the same device. */
static void test_streams_of_two_handles(void **state) {
  fixture *f = *state;
  dc_device *again;
  dc_stream *stream;
  gate g = {false, false};
  log *seen = calloc(1, sizeof(*seen));
  assert_int_equal(dc_device_open("cpu", NULL, &again), DC_OK);
  assert_int_equal(dc_stream_create(again, &stream), DC_OK);
  assert_int_equal(dc_stream_call(stream, pass_gate, &g), DC_OK);
  assert_int_equal(dc_event_record(f->event, stream), DC_OK);
  assert_int_equal(dc_event_wait(f->event, f->a, 0), DC_OK);
  queue_append(f->a, seen, 1);
  assert_int_equal(dc_stream_synchronize(f->a, 2 * MS), DC_E_TIMEOUT);
  assert_int_equal(seen->count, 0);
  atomic_store(&g.open, true);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  assert_int_equal(seen->count, 1);
  dc_stream_destroy(stream);
  dc_device_destroy(again);
  free(seen);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_events),
      TEST(test_waiting_binds_to_the_mark_of_then),
      TEST(test_destroyed_event_still_holds_back),
      TEST(test_one_event_from_many_threads),
      TEST(test_deadlines),
      TEST(test_self_wait_is_refused),
      TEST(test_streams_of_two_handles),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
