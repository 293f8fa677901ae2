/* N: shards in host memory. */
#include "conformance.h"

enum { NUMEL = 40 };

static void with_and_without_reload(rank *r) {
  param p = {.id = 1, .shape = {NUMEL}, .stage = 3, .on_host = true};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full)); /* the gather reads the host's shard directly */
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0) && stats_of(r).copied_h2d_bytes == 0);
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1));
  CHECK(r, stats_of(r).copied_h2d_bytes == p.count * 4 && stats_of(r).reload_bytes == p.count * 4);
  for (int32_t dtype = DC_DTYPE_NONE; dtype <= DC_BFLOAT16; dtype += DC_BFLOAT16) {
    OK(r, gather(r, GRAPH, &p, dtype, &full));
    CHECK(r, is_whole(r, &full, &p, dtype, 0));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  }
}

static void check_109_a_host_shard_is_gathered_with_and_without_reload(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, with_and_without_reload, NULL);
  on_ranks((setup){.world = 3}, with_and_without_reload, NULL);
}

static void dropped_not_copied(rank *r) {
  param p = {.id = 1, .shape = {NUMEL}, .stage = 3, .on_host = true};
  OK(r, register_one(r, &p));
  for (int step = 0; step < 3; step++) {
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1));
    CHECK(r, stats_of(r).reload_bytes == p.count * 4);
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1));
    CHECK(r, stats_of(r).reload_bytes == 0 && stats_of(r).copied_d2h_bytes == 0);
  }
}

static void check_110_offloading_a_shard_copies_nothing(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, dropped_not_copied, NULL);
}

static void updated_on_the_host(rank *r) {
  param p = {.id = 1, .shape = {NUMEL}, .stage = 3, .on_host = true};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 4; step++) {
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1));
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, step));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
    if (step % 2 == 0) { /* with odd steps, the next reload overwrites a copy that was not dropped */
      OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1));
    }
    OK(r, set_weights(r, &p, step + 1));
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  }
}

static void check_111_the_next_reload_has_the_update(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, updated_on_the_host, NULL);
}

static void no_effect(rank *r) {
  param p = {.id = 1, .shape = {NUMEL}, .stage = 3, .on_host = true};
  OK(r, register_one(r, &p));
  OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1)); /* there is no copy to drop */
  OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1));
  dc_memory_stats before = stats_of(r);
  OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1)); /* it is on the device already */
  dc_memory_stats after = stats_of(r);
  CHECK(r, memcmp(&before, &after, sizeof before) == 0);
  OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1));
  OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1));
  CHECK(r, stats_of(r).reload_bytes == 0 && stats_of(r).copied_d2h_bytes == 0);
}

static void check_112_reload_and_offload_twice_are_once(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, no_effect, NULL);
}

/* A gather may still read the reloaded copy when it is dropped, and the next reload asks for memory. */
static void round_and_round(rank *r) {
  param p[2] = {{.id = 0, .shape = {NUMEL}, .stage = 3, .on_host = true},
                {.id = 1, .shape = {NUMEL}, .stage = 3, .on_host = true}};
  int64_t ids[2] = {0, 1};
  dc_stream *stream;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_param(r, &p[0]));
  OK(r, register_param(r, &p[1]));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, new_stream(r, &stream));
  for (int64_t step = 0; step < 6; step++) {
    const param *q = &p[step % 2];
    OK(r, dc_context_set_stream(r->ctx, step % 3 == 0 ? stream : NULL));
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, q->id));
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, q->id, step % 2 == 0 ? DC_BFLOAT16 : DC_FLOAT32, &full));
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, q->id));
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, 1 - q->id));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, q->id));
    OK(r, dc_stream_synchronize(stream, 0));
    CHECK(r, is_whole(r, &full, q, step % 2 == 0 ? DC_BFLOAT16 : DC_FLOAT32, 0));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, q->id, 1));
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, 1 - q->id));
  }
}

static void check_113_a_shard_dropped_while_it_is_gathered(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, round_and_round, NULL);
  on_ranks((setup){.world = 2}, round_and_round, NULL);
  on_ranks((setup){.world = 3, .config.symmetric_memory = 1}, round_and_round, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_109_a_host_shard_is_gathered_with_and_without_reload),
      cmocka_unit_test(check_110_offloading_a_shard_copies_nothing),
      cmocka_unit_test(check_111_the_next_reload_has_the_update),
      cmocka_unit_test(check_112_reload_and_offload_twice_are_once),
      cmocka_unit_test(check_113_a_shard_dropped_while_it_is_gathered),
  };
  return cmocka_run_group_tests_name("conformance: shards on the host", tests, NULL, NULL);
}
