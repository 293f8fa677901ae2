/* E: all-gather and wait. */
#include "conformance.h"

static void whole(rank *r) {
  param p = {.id = 1, .shape = {7, 3, 5}, .ndim = 3, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0)); /* the ranks' shards one after the other, without padding */
}

static void check_35_the_shards_one_after_the_other(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_ranks((setup){.world = world}, whole, NULL);
  }
  on_ranks((setup){.world = 4, .config.symmetric_memory = 1}, whole, NULL);
}

/* ---- asynchronous, and in order ---- */

/* A gather cannot be complete before all ranks have called it; the others call it once rank 0's call has returned. */
static void returns_before_it_is_done(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  if (r->rank != 0) {
    OK(r, await_flag());
  }
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  if (r->rank == 0) {
    raise_flag();
  }
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
}

static void check_36_a_gather_does_not_wait(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, returns_before_it_is_done, NULL);
  on_ranks((setup){.world = 3}, returns_before_it_is_done, NULL);
}

/* The caller uses a stream: after the wait, work on that stream reads the weights, and no other stream needs to be
 * ordered. */
static void waits_on_a_stream(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_stream *stream;
  array to;
  OK(r, register_one(r, &p));
  OK(r, new_array(r, &to, 50, DC_FLOAT32));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  for (int64_t version = 0; version < 3; version++) {
    OK(r, set_weights(r, &p, version));
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
    dc__stream_copy(stream, to.data, full.data, 50 * sizeof(float));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
    OK(r, dc_stream_synchronize(stream, 0));
    full.data = to.data;
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, version));
  }
}

static void check_37_after_the_wait_the_stream_may_read(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, waits_on_a_stream, NULL);
  on_ranks((setup){.world = 3}, waits_on_a_stream, NULL);
}

#ifdef ON_SIM
/* Rank 0 reads the weights while the gather still waits for the others. */
static void reads_without_wait(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  if (r->rank != 0) {
    OK(r, await_flag());
  }
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  if (r->rank == 0) {
    double values[50];
    OK(r, read_from(r, full.data, DC_FLOAT32, values, 50));
    raise_flag();
  }
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
}

static void check_36_a_read_before_the_wait_is_reported(void **state) {
  (void)state;
  on_ranks_reported((setup){.world = 2}, reads_without_wait, "read by copy");
}

/* One stream waits for the gather, and another reads the weights. */
static void waits_on_the_wrong_stream(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_stream *waits, *reads;
  array to;
  OK(r, register_one(r, &p));
  OK(r, new_array(r, &to, 50, DC_FLOAT32));
  OK(r, new_stream(r, &waits));
  OK(r, new_stream(r, &reads));
  OK(r, dc_context_set_stream(r->ctx, waits));
  if (r->rank != 0) {
    OK(r, await_flag());
  }
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  if (r->rank == 0) {
    dc__stream_copy(reads, to.data, full.data, 50 * sizeof(float));
    OK(r, dc_stream_synchronize(reads, 0));
    raise_flag();
  }
}

static void check_37_a_read_on_another_stream_is_reported(void **state) {
  (void)state;
  on_ranks_reported((setup){.world = 2}, waits_on_the_wrong_stream, "read by copy");
}
#endif

/* The caller's stream is held back, and then writes the shard: the gather must bring what it wrote. */
static void follows_the_callers_work(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_stream *stream;
  OK(r, register_one(r, &p));
  param next = p;
  OK(r, new_array(r, &next.weights, p.padded, DC_FLOAT32));
  OK(r, set_weights(r, &next, 1));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  close_gate(r, stream);
  dc__stream_copy(stream, p.weights.data, next.weights.data, (size_t)p.padded * sizeof(float));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  open_gate(r);
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 1));
}

static void check_38_a_gather_follows_what_the_caller_queued(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, follows_the_callers_work, NULL);
  on_ranks((setup){.world = 2, .config.symmetric_memory = 1}, follows_the_callers_work, NULL);
}

/* ---- copies that are current ---- */

static void already_gathered(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor a = DC_TENSOR_INIT, b = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &a));
  if (r->rank == 0) { /* rank 0 alone, before and after the first gather is complete */
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &b));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_FLOAT32, &b));
    dc_memory_stats s = stats_of(r);
    CHECK(r, a.data == b.data && s.gathers == 1 && s.gather_hits == 2 && s.gathered_bytes <= 256);
  }
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  CHECK(r, is_whole(r, &a, &p, DC_DTYPE_NONE, 0));
}

static void check_39_a_second_gather_finds_the_first(void **state) {
  (void)state;
  on_ranks((setup){.world = 3}, already_gathered, NULL);
}

/* ---- types ---- */

/* Values that are rounded in bfloat16. */
static void cast_then_gathered(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  double values[99], expected[99];
  OK(r, register_one(r, &p));
  for (int64_t i = 0; i < 99; i++) {
    expected[i] = rounded(1.0 + (double)i / 1000.0, DC_FLOAT32);
  }
  for (int64_t i = 0; i < p.padded; i++) {
    values[i] = p.begin + i < 99 ? expected[p.begin + i] : 0;
  }
  OK(r, write_to(r, p.weights.data, DC_FLOAT32, values, p.padded));
  OK(r, gather(r, GRAPH, &p, DC_BFLOAT16, &full));
  CHECK(r, full.dtype == DC_BFLOAT16 && holds(r, full.data, DC_BFLOAT16, expected, 99));
  CHECK(r, stats_of(r).gather_wire_bytes == 2 * (99 - p.count));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  OK(r, dc_context_reset_stats(r->ctx));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, stats_of(r).gather_wire_bytes == 4 * (99 - p.count));
}

static void check_40_a_cast_comes_before_the_wire(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, cast_then_gathered, NULL);
  on_ranks((setup){.world = 3}, cast_then_gathered, NULL);
}

static void to_a_wider_type(rank *r) {
  static const int32_t narrow[] = {DC_BFLOAT16, DC_FLOAT16, DC_FLOAT32};
  static const int32_t wide[] = {DC_FLOAT32, DC_FLOAT32, DC_FLOAT64};
  for (int i = 0; i < 3; i++) {
    param p = {.id = i, .shape = {41}, .stage = 3, .dtype = narrow[i]};
    dc_tensor full = DC_TENSOR_INIT;
    OK(r, register_one(r, &p));
    OK(r, gather(r, GRAPH, &p, wide[i], &full));
    CHECK(r, is_whole(r, &full, &p, wide[i], 0));
  }
}

static void check_41_a_shard_can_be_gathered_in_a_wider_type(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, to_a_wider_type, NULL);
}

/* Another type is requested while the first gather may be in flight; on rank 0 it is, since the others come later. */
static void cast_of_what_is_coming(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor a = DC_TENSOR_INIT, b = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  if (r->rank != 0) {
    OK(r, await_flag());
  }
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &a));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_BFLOAT16, &b));
  if (r->rank == 0) {
    raise_flag();
  }
  OK(r, dc_wait_allgather(r->ctx, &b, GRAPH, 1));
  CHECK(r, is_whole(r, &b, &p, DC_BFLOAT16, 0) && is_whole(r, &a, &p, DC_FLOAT32, 0));
  CHECK(r, stats_of(r).gathers == 1);
}

static void check_42_a_cast_waits_for_the_gather(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, cast_of_what_is_coming, NULL);
  on_ranks((setup){.world = 3}, cast_of_what_is_coming, NULL);
}

static void another_type_after_an_update(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3, .persistent = 1};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_FLOAT32, &full));
  OK(r, set_weights(r, &p, 1));
  OK(r, dc_context_params_updated(r->ctx, &p.id, 1));
  for (int i = 0; i < 2; i++) {
    OK(r, gather(r, GRAPH, &p, DC_BFLOAT16, &full));
    CHECK(r, is_whole(r, &full, &p, DC_BFLOAT16, 1));
  }
  OK(r, gather(r, GRAPH, &p, DC_FLOAT32, &full));
  CHECK(r, is_whole(r, &full, &p, DC_FLOAT32, 1));
}

static void check_43_the_type_asked_for_also_after_an_update(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, another_type_after_an_update, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_35_the_shards_one_after_the_other),
      cmocka_unit_test(check_36_a_gather_does_not_wait),
      cmocka_unit_test(check_37_after_the_wait_the_stream_may_read),
#ifdef ON_SIM
      cmocka_unit_test(check_36_a_read_before_the_wait_is_reported),
      cmocka_unit_test(check_37_a_read_on_another_stream_is_reported),
#endif
      cmocka_unit_test(check_38_a_gather_follows_what_the_caller_queued),
      cmocka_unit_test(check_39_a_second_gather_finds_the_first),
      cmocka_unit_test(check_40_a_cast_comes_before_the_wire),
      cmocka_unit_test(check_41_a_shard_can_be_gathered_in_a_wider_type),
      cmocka_unit_test(check_42_a_cast_waits_for_the_gather),
      cmocka_unit_test(check_43_the_type_asked_for_also_after_an_update),
  };
  return cmocka_run_group_tests_name("conformance: gathers", tests, NULL, NULL);
}
