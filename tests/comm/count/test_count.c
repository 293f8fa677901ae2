/* The counting device reports the memory and wire bytes of ranks that compute, to the byte. */
#include "address.h"
#include "compare.h"

static void compare(schedule s, int32_t world, int32_t choice) {
  const setup ranks = setup_of(&s, world, choice);
  const char *transport = getenv("LIBDC_TEST_COMM");
  schedule_job *computed = calloc(1, sizeof *computed), *counted = calloc(1, sizeof *counted);
  computed->s = counted->s = s;
  run_ranks(ranks, schedule_run, computed);
  for (int32_t number = 0; number < world; number++) {
    count_rank(counted, ranks, number, transport == NULL);
    assert_true(compare_stats(computed, counted, world, number, transport == NULL ? "threads" : transport));
  }
  free(computed);
  free(counted);
}

/* By default each stage takes one combination; COUNT_ALL=1 takes all. COUNT_RANKS=3 takes worlds of 3 ranks only. */
static void test_statistics_of_each_stage_and_number_of_ranks(void **state) {
  (void)state;
  const bool all = getenv("COUNT_ALL") != NULL;
  const int32_t only = getenv("COUNT_RANKS") != NULL ? atoi(getenv("COUNT_RANKS")) : 0;
  const int32_t worlds[] = {1, 2, 3, 4, SCHEDULE_RANKS};
  for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
    const int32_t world = worlds[i];
    for (int32_t cell = 0; cell < 4 * world * CHOICES && (only == 0 || only == world); cell++) {
      const int32_t choice = cell % CHOICES, stage = cell / CHOICES % 4, replicas = cell / CHOICES / 4 + 1;
      const bool across = test_node_ranks() > 0 && world < SCHEDULE_RANKS; /* gathers go over nodes at each stage */
      const int32_t some = stage % 2 == 0 || across ? 1 : world < 4 ? world : world / 2;
      const bool chosen = choice == (world * 7 + stage * 5) % CHOICES && replicas == some;
      if (world % replicas == 0 && (all || chosen)) {
        compare(schedule_of(stage, replicas, choice), world, choice);
      }
    }
  }
}

/* With an uneven split of a gradient, a rank alone does not know the other ranks' parts. */
static void test_a_split_that_no_rank_alone_knows_is_refused(void **state) {
  (void)state;
  dc_device *device;
  dc_comm *comm;
  dc_context *ctx;
  float memory[6];
  const int64_t numel = 6, own = 5, id = 1;
  assert_int_equal(dc_device_open("count", NULL, &device), DC_OK);
  assert_int_equal(dc_comm_create_count(device, 0, 2, 1, &comm), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &ctx), DC_OK);
  assert_int_equal(dc_init(ctx, comm, NULL, 1024), DC_OK);
  dc_tensor weights = flat(memory, &numel, DC_FLOAT32), grad = flat(memory, &own, DC_FLOAT32);
  assert_int_equal(dc_register_param(ctx, id, &numel, 1, &weights, &grad, 0), DC_OK);
  assert_int_equal(dc_register_graph_z2(ctx, 1, &id, 1), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "parameter 1"));
  dc_context_destroy(ctx);
  dc_comm_destroy(comm);
  dc_device_destroy(device);
}

/* A context's timestamps come from the device's virtual clock, so the context keeps the device alive. */
static void test_the_device_goes_with_its_context(void **state) {
  (void)state;
  dc_context *ctx;
  dc_device *device;
  float memory[6];
  dc_tensor out = DC_TENSOR_INIT;
  const int64_t numel = 6, id = 1;
  int64_t events = 0;
  dc_trace_event event;
  assert_int_equal(dc_device_open("count", NULL, &device), DC_OK);
  assert_int_equal(dc_count_set(device, "launch_ns", 7000), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &ctx), DC_OK);
  assert_int_equal(dc_init(ctx, NULL, NULL, 1024), DC_OK);
  dc_tensor weights = flat(memory, &numel, DC_FLOAT32);
  assert_int_equal(dc_register_z3_param(ctx, id, &numel, 1, &weights, NULL, 0, DC_DTYPE_NONE), DC_OK);
  assert_int_equal(dc_register_graph_z3(ctx, 1, &id, 1), DC_OK);
  assert_int_equal(dc_context_trace_start(ctx, 16), DC_OK);
  assert_int_equal(dc_allgather_param(ctx, NULL, 1, id, DC_BFLOAT16, &out), DC_OK);
  assert_int_equal(dc_context_trace_read(ctx, &event, sizeof event, 1, &events), DC_OK);
  assert_int_equal(events, 1);
  assert_in_range(event.begin_ns, 7000, 7002); /* a cast's launch by the device's clock; a stamp adds a nanosecond */
  assert_in_range(event.end_ns, 7000, 7002);
  dc_device_destroy(device);
  dc_context_destroy(ctx);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_statistics_of_each_stage_and_number_of_ranks),
                                     cmocka_unit_test(test_a_split_that_no_rank_alone_knows_is_refused),
                                     cmocka_unit_test(test_the_device_goes_with_its_context)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
