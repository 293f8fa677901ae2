/* Tests the simulator itself: it finds planted faults with every seed, whatever order that gives, and reports nothing
 * for correct programs. A seed replays exactly. */
#include "sim/sim_ranks.h"

enum { SEEDS = 40, BYTES = 64 };

/* One world, with a planted fault or without. */
typedef struct scene {
  bool fault;
  uint64_t log; /* of what happened, in order */
} scene;

static void expect(void (*body)(int32_t by, void *user), int32_t world, const char *report) {
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    scene s = {.fault = true};
    sim_options options = {.seed = seed, .world = world};
    if (sim_run(&options, body, &s) || strstr(sim_report(), report) == NULL) {
      fail_msg("seed %d: \"%s\" is not in \"%s\"", (int)seed, report, sim_report());
    }
    s.fault = false;
    if (!sim_run(&options, body, &s)) {
      fail_msg("nothing is wrong, but: %s", sim_report());
    }
  }
}

/* A device, two streams and memory, for scenes without the library's upper layers. */
typedef struct tools {
  dc_device *device;
  dc_stream *a, *b;
  dc_event *event;
  dc__arena *arena;
  char *x, *y;
} tools;

static void open_tools(tools *t) {
  sim_device_open(&t->device);
  dc_stream_create(t->device, &t->a);
  dc_stream_create(t->device, &t->b);
  dc_event_create(t->device, &t->event);
  dc__arena_create(t->device, NULL, &t->arena);
  t->x = sim_new(BYTES);
  t->y = sim_new(BYTES);
  sim_writes(t->x, BYTES, "the scene");
  sim_writes(t->y, BYTES, "the scene");
}

static void close_tools(tools *t) {
  dc_stream_destroy(t->a);
  dc_stream_destroy(t->b);
  dc__arena_release(t->arena);
  dc_event_destroy(t->event);
  dc_device_destroy(t->device);
}

/* ---- streams and events ---- */

static void two_streams(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  dc__stream_zero(t.a, t.x, BYTES);
  if (!s->fault) {
    dc__event_record(t.event, t.a);
    dc__event_wait(t.event, t.b);
  }
  dc__stream_copy(t.b, t.y, t.x, BYTES);
  close_tools(&t);
}

static void test_missing_wait(void **state) {
  (void)state;
  expect(two_streams, 1, "race");
}

static void recorded_early(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  dc__stream_zero(t.a, t.y, BYTES);
  if (s->fault) {
    dc__event_record(t.event, t.a);
  }
  dc__stream_zero(t.a, t.x, BYTES);
  if (!s->fault) {
    dc__event_record(t.event, t.a);
  }
  dc__event_wait(t.event, NULL);
  sim_reads(t.x, BYTES, "the scene");
  close_tools(&t);
}

static void test_event_recorded_early(void **state) {
  (void)state;
  expect(recorded_early, 1, "race");
}

static void unsynchronized(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  dc__stream_copy(t.a, t.x, t.y, BYTES);
  if (!s->fault) {
    dc_stream_synchronize(t.a, 0);
  }
  sim_writes(t.y, 1, "the scene"); /* one byte of the memory that is read is enough */
  close_tools(&t);
}

static void test_host_without_wait(void **state) {
  (void)state;
  expect(unsynchronized, 1, "race");
}

/* ---- memory ---- */

static void freed_early(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  void *block, *next;
  dc__arena_alloc(t.arena, NULL, BYTES, &block);
  dc__stream_copy(t.a, block, t.x, BYTES);
  dc__event_record(t.event, t.a);
  dc__arena_free(t.arena, block, s->fault ? NULL : t.event, NULL);
  dc__arena_alloc(t.arena, NULL, BYTES, &next);
  dc__stream_copy(t.b, next, t.x, BYTES);
  dc_stream_synchronize(t.b, 0);
  close_tools(&t);
}

/* Found when the memory is freed, or when it is used afterwards, whichever comes first. */
static void test_memory_freed_early(void **state) {
  (void)state;
  scene wrong = {.fault = true}, right = {.fault = false};
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    sim_options options = {.seed = seed, .world = 1};
    assert_false(sim_run(&options, freed_early, &wrong));
    assert_true(sim_run(&options, freed_early, &right));
  }
}

static void used_after(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  void *block;
  dc__arena_alloc(t.arena, NULL, BYTES, &block);
  dc__stream_zero(NULL, block, BYTES);
  if (!s->fault) {
    sim_reads(block, BYTES, "the scene");
  }
  dc__arena_free(t.arena, block, NULL, NULL);
  if (s->fault) {
    sim_reads(block, BYTES, "the scene");
  }
  close_tools(&t);
}

static void test_use_after_free(void **state) {
  (void)state;
  expect(used_after, 1, "use after free: read by the scene");
}

static void never_written(int32_t by, void *user) {
  (void)by;
  const scene *s = user;
  tools t;
  open_tools(&t);
  char *block;
  dc__arena_alloc(t.arena, NULL, BYTES, (void **)&block);
  dc__stream_zero(NULL, block, s->fault ? BYTES - 1 : BYTES);
  sim_reads(block, BYTES, "the scene");
  close_tools(&t);
}

static void test_read_of_what_was_never_written(void **state) {
  (void)state;
  expect(never_written, 1, "never written");
}

/* ---- collectives ---- */

static void gathers(int32_t by, void *user) {
  const scene *s = user;
  tools t;
  dc_comm *comm;
  int64_t one = 1, two = 2;
  open_tools(&t);
  sim_comm_open(&comm);
  *(float *)(void *)t.x = (float)by;
  dc_tensor send = flat(t.x, &one, DC_FLOAT32), recv = flat(t.y, &two, DC_FLOAT32);
  dc_comm_all_gather(comm, &send, &recv, NULL, t.a);
  if (!s->fault) {
    dc_stream_synchronize(t.a, 0);
  }
  sim_reads(t.y, 2 * sizeof(float), "the scene");
  dc_stream_synchronize(t.a, 0);
  if (((float *)(void *)t.y)[1] != 1.0f) {
    sim_reportf("rank %d received %g", (int)by, (double)((float *)(void *)t.y)[1]);
  }
  sim_writes(t.x, sizeof(float), "the next step"); /* this rank is done, so its send buffer may be overwritten */
  close_tools(&t);
  dc_comm_destroy(comm);
}

static void test_gather_without_wait(void **state) {
  (void)state;
  expect(gathers, 2, "race");
}

static void one_stays_away(int32_t by, void *user) {
  const scene *s = user;
  dc_comm *comm;
  sim_comm_open(&comm);
  if (by != 1 || !s->fault) {
    (void)dc_comm_barrier(comm);
  }
  dc_comm_destroy(comm);
}

static void test_deadlock(void **state) {
  (void)state;
  expect(one_stays_away, 3, "deadlock: rank 0 waits for barrier");
}

static void reduces_in_parts(int32_t by, void *user) {
  dc_comm *comm, *part = NULL;
  (void)user;
  sim_comm_open(&comm);
  if (dc_comm_split(comm, by == 3 ? -1 : by % 2, -by, &part) != DC_OK || (part == NULL) != (by == 3)) {
    sim_reportf("rank %d: %s", (int)by, dc_last_error());
  }
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  const int64_t own = by;
  int64_t all[2] = {0};
  if (part != NULL && (dc__comm_all_gather_int64(part, &tag, &own, 1, all) != DC_OK || all[dc_comm_rank(part)] != by ||
                       all[0] != (by % 2 == 0 ? 2 : 1))) {
    sim_reportf("rank %d has gathered %d, %d", (int)by, (int)all[0], (int)all[1]);
  }
  dc_comm_destroy(part);
  dc_comm_destroy(comm);
}

static void test_parts(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    const sim_options options = {.seed = seed, .world = 4};
    if (!sim_run(&options, reduces_in_parts, NULL)) {
      fail_msg("seed %d: %s", (int)seed, sim_report());
    }
  }
}

/* ---- seeds ---- */

static void log_it(void *user) {
  scene *s = user;
  s->log = s->log * 31 + (uint64_t)sim_agent_number(sim_me());
}

static void races_for_the_log(int32_t by, void *user) {
  (void)by;
  tools t;
  open_tools(&t);
  for (int i = 0; i < 5; i++) {
    dc_stream_call(t.a, log_it, user);
    dc_stream_call(t.b, log_it, user);
    log_it(user);
  }
  close_tools(&t);
}

static void test_a_seed_replays(void **state) {
  (void)state;
  int different = 0;
  uint64_t last = 0;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    scene first = {0}, second = {0};
    sim_options options = {.seed = seed, .world = 3};
    sim_run(&options, races_for_the_log, &first);
    sim_run(&options, races_for_the_log, &second);
    assert_true(first.log == second.log);
    different += first.log != last;
    last = first.log;
  }
  assert_true(different > SEEDS / 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_missing_wait),
      cmocka_unit_test(test_event_recorded_early),
      cmocka_unit_test(test_host_without_wait),
      cmocka_unit_test(test_memory_freed_early),
      cmocka_unit_test(test_use_after_free),
      cmocka_unit_test(test_read_of_what_was_never_written),
      cmocka_unit_test(test_gather_without_wait),
      cmocka_unit_test(test_deadlock),
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_a_seed_replays),
  };
  return cmocka_run_group_tests_name("sim", tests, NULL, NULL);
}
