/* K, continued: several graphs in a backward, types, and edge cases of a mean. */
#include "conformance.h"

enum { COUNT = 4, EACH = 30 };

static void has_all(rank *r, const param *p, int64_t step) {
  for (int64_t i = 0; i < COUNT; i++) {
    CHECK(r, has_grad(r, &p[i], step, step));
  }
}

/* ---- several graphs ---- */

/* Two graphs with two parameters each, reduced one after the other or alternately. */
static void graphs(rank *r) {
  const int64_t *order = r->user; /* order of the parameters; the first two belong to GRAPH */
  param p[COUNT];
  int64_t ids[COUNT] = {0, 1, 2, 3};
  for (int64_t i = 0; i < COUNT; i++) {
    p[i] = (param){.id = i, .shape = {EACH}, .stage = 3};
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, register_graph(r, GRAPH + 1, 3, ids + 2, 2));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, dc_context_reset_stats(r->ctx));
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, reduce(r, order[i] < 2 ? GRAPH : GRAPH + 1, &p[order[i]], step));
      if (i == 1 && order[4] == 1) {
        OK(r, dc_end_backward(r->ctx, order[i] < 2 ? GRAPH : GRAPH + 1, 0));
      }
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    OK(r, dc_end_backward(r->ctx, GRAPH + 1, 1));
    CHECK(r, stats_of(r).reductions == COUNT);
    has_all(r, p, step);
  }
}

static void check_91_two_graphs_in_one_backward(void **state) {
  (void)state;
  const int64_t one_then_other[] = {3, 2, 1, 0, 1};
  on_ranks((setup){.world = 2}, graphs, one_then_other);
  on_ranks((setup){.world = 2, .bucket = EACH}, graphs, one_then_other);
}

static void check_92_graphs_may_take_turns(void **state) {
  (void)state;
  const int64_t by_turns[] = {3, 1, 2, 0, 0};
  on_ranks((setup){.world = 2}, graphs, by_turns);
  on_ranks((setup){.world = 2, .bucket = 2 * EACH}, graphs, by_turns);
  on_ranks((setup){.world = 3, .bucket = EACH}, graphs, by_turns);
}

/* ---- numbers ---- */

static void every_type(rank *r) {
  static const int32_t types[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16, DC_FLOAT64};
  static const int32_t wrong[] = {DC_INT8, DC_INT32, DC_INT64, DC_BOOL};
  for (int k = 0; k < 4; k++) {
    for (int32_t stage = 0; stage <= 3; stage++) {
      param p = {.id = 10 * k + stage, .shape = {EACH}, .stage = stage, .grad = types[k]};
      OK(r, register_one(r, &p));
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, reduce_as(r, GRAPH, &p, 0, types[k]));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      CHECK(r, has_grad(r, &p, 0, 0));
    }
  }
  param p = {.id = 99, .shape = {EACH}, .stage = 3};
  OK(r, register_one(r, &p));
  for (int k = 0; k < 4; k++) {
    dc_tensor t = tensor_of(&p.source);
    t.dtype = wrong[k];
    FAILS(r, dc_reduce_grad(r->ctx, &t, GRAPH, 99), DC_E_DTYPE, "must be a floating-point type");
  }
}

static void check_94_the_mean_in_every_type(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_ranks((setup){.world = world}, every_type, NULL);
  }
}

static void near_the_top_of_float16(rank *r) {
  param p = {.id = 1, .shape = {EACH}, .stage = 3, .grad = DC_FLOAT16};
  array source;
  OK(r, register_one(r, &p));
  OK(r, new_array(r, &source, EACH, DC_FLOAT16));
  OK(r, set_all(r, &source, 60000));
  dc_tensor t = tensor_of(&source);
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  array part = {p.buffer.data, p.count, DC_FLOAT16};
  CHECK(r, is_all(r, &part, 60000));
}

static void check_95_a_sum_of_float16_does_not_overflow(void **state) {
  (void)state;
  on_ranks((setup){.world = 4}, near_the_top_of_float16, NULL);
}

static void world_of_one(rank *r) {
  for (int32_t stage = 0; stage <= 3; stage++) {
    param p = {.id = stage, .shape = {EACH}, .stage = stage};
    dc_tensor full = DC_TENSOR_INIT, host = DC_TENSOR_INIT;
    OK(r, register_one(r, &p));
    if (stage == 3) {
      OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, &p.id, NULL, 1));
      OK(r, gather(r, GRAPH, &p, DC_BFLOAT16, &full));
      CHECK(r, is_whole(r, &full, &p, DC_BFLOAT16, 0));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, stage, 1));
      OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, stage));
      OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, stage));
      dc_tensor t = tensor_of(&p.source);
      OK(r, dc_offload_tensor(r->ctx, &t, GRAPH, 1, &host));
      OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, 1, &host));
      OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &full));
      OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &full));
    }
    OK(r, backward(r, &p, 1, 0));
    CHECK(r, has_grad(r, &p, 0, 0));
  }
  CHECK(r, stats_of(r).gather_wire_bytes == 0 && stats_of(r).reduce_wire_bytes == 0);
}

static void check_96_a_world_of_one(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, world_of_one, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_91_two_graphs_in_one_backward),
      cmocka_unit_test(check_92_graphs_may_take_turns),
      cmocka_unit_test(check_94_the_mean_in_every_type),
      cmocka_unit_test(check_95_a_sum_of_float16_does_not_overflow),
      cmocka_unit_test(check_96_a_world_of_one),
  };
  return cmocka_run_group_tests_name("conformance: means", tests, NULL, NULL);
}
