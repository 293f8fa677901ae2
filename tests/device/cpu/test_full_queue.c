/* A stream's own task queues more than the stream's queue holds: nothing is lost, all is in order, and other threads'
 * calls keep their place. If memory for it is refused, the call fails, or else the device. */
#include "stream_test.h"

enum { OWN = 600, LATER = 200, OTHER = 300, OTHERS_FIRST = 10000 };

/* while it is set, this thread's allocations are refused */
static _Thread_local bool refuses;

void *__real_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes) {
  if (refuses) {
    (void)dc__fail(DC_E_NO_MEMORY, "refused by the test");
    return NULL;
  }
  return __real_dc__calloc(count, bytes);
}

/* Work that a task has queued is in the stream once the task has ended, so waits twice. */
static void drain(dc_stream *stream) {
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
}

/* ---- order ---- */

typedef struct crowd {
  dc_stream *stream;
  log *seen;
  dc_event *event;
  atomic_bool filled, joined;
} crowd;

static void queue_own(void *user) {
  crowd *c = user;
  for (int i = 0; i < OWN; i++) {
    queue_append(c->stream, c->seen, i);
  }
  atomic_store(&c->filled, true);
  while (!atomic_load(&c->joined)) {
    sleep_ns(MS / 20);
  }
  for (int i = OWN; i < OWN + LATER; i++) {
    queue_append(c->stream, c->seen, i);
  }
}

/* Comes when the queue is over-full, and waits for space like any other thread. */
static void *queue_other(void *user) {
  crowd *c = user;
  while (!atomic_load(&c->filled)) {
    sleep_ns(MS / 20);
  }
  atomic_store(&c->joined, true);
  for (int i = 0; i < OTHER; i++) {
    queue_append(c->stream, c->seen, OTHERS_FIRST + i);
  }
  return NULL;
}

static void test_own_work_keeps_the_order(void **state) {
  fixture *f = *state;
  for (int round = 0; round < 5; round++) { /* the ring is intact again after each round */
    crowd c = {.stream = f->a, .seen = calloc(1, sizeof(log))};
    pthread_t other;
    pthread_create(&other, NULL, queue_other, &c);
    assert_int_equal(dc_stream_call(f->a, queue_own, &c), DC_OK);
    pthread_join(other, NULL);
    drain(f->a);
    assert_int_equal(c.seen->count, OWN + LATER + OTHER);
    int own = 0, others = OTHERS_FIRST;
    for (int i = 0; i < c.seen->count; i++) {
      assert_int_equal(c.seen->entries[i], c.seen->entries[i] < OTHERS_FIRST ? own++ : others++);
      assert_true(others == OTHERS_FIRST || own >= OWN); /* the others' tasks were queued behind these */
    }
    free(c.seen);
  }
}

typedef struct chain {
  dc_stream *stream;
  int32_t links[OWN + 1];
} chain;

static void copy_along(void *user) {
  chain *c = user;
  for (int i = 0; i < OWN; i++) {
    dc__stream_copy(c->stream, &c->links[i + 1], &c->links[i], sizeof c->links[i]);
  }
  for (int i = 0; i < OWN; i++) {
    dc__stream_zero(c->stream, &c->links[i], sizeof c->links[i]);
  }
}

static void test_copies_beyond_the_queue(void **state) {
  fixture *f = *state;
  chain *c = calloc(1, sizeof *c);
  c->stream = f->a;
  memset(c->links, 1, sizeof c->links);
  c->links[0] = 7;
  assert_int_equal(dc_stream_call(f->a, copy_along, c), DC_OK);
  drain(f->a);
  for (int i = 0; i < OWN; i++) {
    assert_int_equal(c->links[i], 0);
  }
  assert_int_equal(c->links[OWN], 7);
  free(c);
}

typedef struct waiter {
  fixture *f;
  log *seen;
} waiter;

static void wait_behind_a_full_queue(void *user) {
  waiter *w = user;
  for (int i = 0; i < OWN; i++) {
    queue_append(w->f->a, w->seen, i);
  }
  assert_int_equal(dc_event_wait(w->f->event, w->f->a, 0), DC_OK);
  queue_append(w->f->a, w->seen, OWN);
  dc_event_record(w->f->event, w->f->a); /* recorded behind all of it */
  atomic_store(&w->f->filled, true);
}

static void test_waits_and_marks_beyond_the_queue(void **state) {
  fixture *f = *state;
  waiter w = {f, calloc(1, sizeof(log))};
  assert_int_equal(dc_stream_call(f->b, pass_gate, &f->gate), DC_OK);
  assert_int_equal(dc_event_record(f->event, f->b), DC_OK);
  assert_int_equal(dc_stream_call(f->a, wait_behind_a_full_queue, &w), DC_OK);
  while (!atomic_load(&f->filled) || atomic_load(&w.seen->count) < OWN) {
    sleep_ns(MS);
  }
  sleep_ns(5 * MS);
  assert_int_equal(w.seen->count, OWN);
  assert_int_equal(query(f->event), 0);
  atomic_store(&f->gate.open, true);
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(w.seen->count, OWN + 1);
  assert_int_equal(dc_stream_synchronize(f->a, 0), DC_OK);
  free(w.seen);
}

static void queue_and_destroy(void *user) {
  crowd *c = user;
  for (int i = 0; i < OWN; i++) {
    queue_append(c->stream, c->seen, i);
  }
  dc_event_record(c->event, c->stream);
  atomic_store(&c->filled, true);
  dc_stream_destroy(c->stream);
}

static void test_a_destroyed_stream_runs_it_all(void **state) {
  fixture *f = *state;
  crowd c = {.seen = calloc(1, sizeof(log)), .event = f->event};
  assert_int_equal(dc_stream_create(f->device, &c.stream), DC_OK);
  assert_int_equal(dc_stream_call(c.stream, queue_and_destroy, &c), DC_OK);
  while (!atomic_load(&c.filled)) {
    sleep_ns(MS);
  }
  assert_int_equal(dc_event_wait(f->event, NULL, 0), DC_OK);
  assert_int_equal(c.seen->count, OWN);
  for (int i = 0; i < OWN; i++) {
    assert_int_equal(c.seen->entries[i], i);
  }
  free(c.seen);
}

/* ---- without memory ---- */

static void fill_queue(fixture *f, log *seen) {
  for (int i = 0; i < 255; i++) { /* the task that calls is the 256th */
    queue_append(f->a, seen, i);
  }
  assert_int_equal(dc__device_check(f->device), DC_OK);
}

static void refuse_calls(void *user) {
  waiter *w = user;
  fill_queue(w->f, w->seen);
  refuses = true;
  assert_int_equal(dc_stream_call(w->f->a, pass_gate, &w->f->gate), DC_E_NO_MEMORY);
  assert_string_equal(dc_last_error(), "dc_stream_call: refused by the test");
  assert_int_equal(dc_event_wait(w->f->event, w->f->a, 0), DC_E_NO_MEMORY); /* b is pending */
  refuses = false;
  queue_append(w->f->a, w->seen, 255);
  atomic_store(&w->f->filled, true);
}

static void test_a_call_without_memory_does_nothing(void **state) {
  fixture *f = *state;
  waiter w = {f, calloc(1, sizeof(log))};
  assert_int_equal(dc_stream_call(f->b, pass_gate, &f->gate), DC_OK);
  assert_int_equal(dc_event_record(f->event, f->b), DC_OK);
  assert_int_equal(dc_stream_call(f->a, refuse_calls, &w), DC_OK);
  while (!atomic_load(&f->filled)) {
    sleep_ns(MS);
  }
  drain(f->a); /* does not wait at the gate or for b */
  assert_int_equal(w.seen->count, 256);
  assert_int_equal(dc__device_check(f->device), DC_OK);
  atomic_store(&f->gate.open, true);
  assert_int_equal(dc_stream_synchronize(f->b, 0), DC_OK);
  free(w.seen);
}

static void refuse_a_copy(void *user) {
  waiter *w = user;
  fill_queue(w->f, w->seen);
  refuses = true;
  dc__stream_copy(w->f->a, w->seen->entries, w->seen->entries + 1, sizeof(int));
  refuses = false;
}

static void refuse_a_wait(void *user) {
  waiter *w = user;
  fill_queue(w->f, w->seen);
  refuses = true;
  dc__event_wait(w->f->event, w->f->a);
  refuses = false;
}

/* No caller can be told of these losses, so the device has failed, and every later call reports it. */
static void test_lost_work_fails_the_device(void **state) {
  fixture *f = *state;
  dc_stream_fn tasks[] = {refuse_a_copy, refuse_a_wait};
  dc_stream_call(f->b, pass_gate, &f->gate);
  dc_event_record(f->event, f->b);
  for (size_t i = 0; i < DC__COUNT(tasks); i++) {
    dc_device *device;
    fixture own = {.event = f->event};
    waiter w = {&own, calloc(1, sizeof(log))};
    assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
    own.device = device;
    assert_int_equal(dc_stream_create(device, &own.a), DC_OK);
    assert_int_equal(dc_stream_call(own.a, tasks[i], &w), DC_OK);
    drain(own.a);
    assert_int_equal(dc__device_check(device), DC_E_NO_MEMORY);
    assert_string_equal(dc_last_error(), "refused by the test");
    dc_stream_destroy(own.a);
    dc_device_destroy(device);
    free(w.seen);
  }
  assert_int_equal(dc__device_check(f->device), DC_OK);
  atomic_store(&f->gate.open, true);
}

typedef struct lost_collective {
  fixture *f;
  log *seen;
  dc_comm *comm;
  bool broadcasts;
  double x;
} lost_collective;

static void refuse_a_collective(void *user) {
  lost_collective *l = user;
  const int64_t one = 1;
  dc_tensor t = {.struct_size = sizeof t, .data = &l->x, .shape = &one, .ndim = 1, .dtype = DC_FLOAT64};
  fill_queue(l->f, l->seen);
  refuses = true;
  assert_int_equal(
      l->broadcasts ? dc_comm_broadcast(l->comm, &t, 0, l->f->a) : dc_comm_all_reduce(l->comm, &t, DC_SUM, l->f->a),
      DC_OK);
  refuses = false;
}

/* The other ranks of the group must not wait for a collective that this rank cannot queue. */
static void test_a_lost_collective_aborts_the_group(void **state) {
  fixture *f = *state;
  for (int i = 0; i < 2; i++) {
    dc_comm *comms[2];
    assert_int_equal(dc_comm_create_threads(2, NULL, comms), DC_OK);
    lost_collective l = {f, calloc(1, sizeof(log)), comms[0], i == 1, 1};
    assert_int_equal(dc_stream_call(f->a, refuse_a_collective, &l), DC_OK);
    drain(f->a);
    for (int rank = 0; rank < 2; rank++) {
      assert_int_equal(dc_comm_check(comms[rank]), DC_E_ABORTED);
      assert_non_null(strstr(dc_last_error(), "refused by the test"));
      dc_comm_destroy(comms[rank]);
    }
    free(l.seen);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_own_work_keeps_the_order),           TEST(test_copies_beyond_the_queue),
      TEST(test_waits_and_marks_beyond_the_queue),   TEST(test_a_destroyed_stream_runs_it_all),
      TEST(test_a_call_without_memory_does_nothing), TEST(test_lost_work_fails_the_device),
      TEST(test_a_lost_collective_aborts_the_group),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
