/* The counting device has the memory and wire bytes of ranks that compute, to the byte. */
#include "address.h"
#include "schedule.h"

/* Runs the schedule as one rank of a group that is not there. */
static void count_rank(schedule_job *job, setup s, int32_t number) {
  rank r = {.rank = number, .world = s.world, .user = job};
  const char *transport = getenv("LIBDC_TEST_COMM");
  s.config.struct_size = sizeof s.config;
  assert_int_equal(dc_device_open("count", NULL, &r.device), DC_OK);
  assert_int_equal(dc_comm_create_count(r.device, number, s.world, transport == NULL, &r.comm), DC_OK);
  assert_int_equal(dc_context_create(r.device, NULL, &r.ctx), DC_OK);
  assert_int_equal(dc_init(r.ctx, r.comm, &s.config, s.bucket), DC_OK);
  schedule_run(&r);
  assert_string_equal(r.failure, "");
  dc_context_destroy(r.ctx);
  dc_device_memory left = DC_DEVICE_MEMORY_INIT;
  assert_int_equal(dc_device_get_memory(r.device, &left), DC_OK);
  assert_int_equal(left.reserved_bytes, 0);
  dc_comm_destroy(r.comm);
  dc_device_destroy(r.device);
}

static void compare_stats(const schedule *s, int32_t world, int32_t number, int step, const dc_memory_stats *computed,
                          const dc_memory_stats *counted) {
  static const char *const names[] = {
      "gathered_bytes",    "gathered_peak_bytes", "bucket_bytes", "offload_bytes",    "reload_bytes",
      "arena_bytes",       "allocations",         "gathers",      "gather_hits",      "gather_wire_bytes",
      "reductions",        "reduce_wire_bytes",   "flushes",      "copied_d2h_bytes", "copied_h2d_bytes",
      "registered_params", "registered_graphs"};
  const int64_t *a = &computed->gathered_bytes, *b = &counted->gathered_bytes;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (a[i] != b[i]) {
      fail_msg("stage %d, offload %d, %s, prefetch %d, rank %d of %d, step %d: %s is %lld, but %lld was counted",
               s->stage, s->offload, dc_dtype_name(s->dtype), s->prefetch, number, world, step, names[i],
               (long long)a[i], (long long)b[i]);
    }
  }
}

static void compare(schedule s, int32_t world, int64_t bucket) {
  const setup ranks = {.world = world, .bucket = bucket};
  schedule_job *computed = calloc(1, sizeof *computed), *counted = calloc(1, sizeof *counted);
  computed->s = counted->s = s;
  run_ranks(ranks, schedule_run, computed);
  for (int32_t number = 0; number < world; number++) {
    count_rank(counted, ranks, number);
    for (int step = 0; step < SCHEDULE_STEPS; step++) {
      compare_stats(&s, world, number, step, &computed->results[number].steps[step],
                    &counted->results[number].steps[step]);
    }
  }
  free(computed);
  free(counted);
}

/* COUNT_ALL=1 takes every combination, COUNT_RANKS=8 that many ranks. */
static void test_statistics_of_each_stage_and_number_of_ranks(void **state) {
  (void)state;
  const bool all = getenv("COUNT_ALL") != NULL;
  const int32_t most = getenv("COUNT_RANKS") != NULL ? atoi(getenv("COUNT_RANKS")) : 4;
  const int64_t buckets[] = {1 << 20, 1024};
  const int32_t dtypes[] = {DC_BFLOAT16, DC_FLOAT32};
  for (int32_t world = 1; world <= most && world <= SCHEDULE_RANKS; world++) {
    for (int32_t stage = 0; stage <= 3; stage++) {
      for (int32_t choice = 0; choice < 24; choice++) {
        const schedule s = {.stage = stage,
                            .offload = stage == 3 ? choice % 3 : 0,
                            .prefetch = choice / 3 % 2 == 1,
                            .dtype = dtypes[choice / 6 % 2]};
        if (all || choice == (world * 7 + stage * 5) % 24) {
          compare(s, world, buckets[choice / 12]);
        }
      }
    }
  }
}

/* An uneven split of a gradient says nothing of the other ranks' parts. */
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

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_statistics_of_each_stage_and_number_of_ranks),
                                     cmocka_unit_test(test_a_split_that_no_rank_alone_knows_is_refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
