/* O: the step, profiling, and gathered parameters over several steps. */
#include "conformance.h"

/* ---- backward ---- */

/* A stage-1 graph in each of two contexts: only the context whose backward has update = 1 averages. */
static void own_update(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 1};
  rank other = *r;
  OK(r, dc_context_create(r->device, NULL, &other.ctx));
  OK(r, dc_init(other.ctx, r->comm, NULL, 100));
  param q = p;
  OK(r, register_one(r, &p));
  OK(r, register_one(&other, &q));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 0));
  OK(r, reduce(&other, GRAPH, &q, 0));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_end_backward(other.ctx, GRAPH, 0));
  CHECK(r, stats_of(r).reductions == 1 && stats_of(&other).reductions == 0);
  CHECK(r, has_grad(r, &p, 0, 0) && is_all(r, &q.buffer, 0));
  OK(r, backward(&other, &q, 1, 1));
  CHECK(r, has_grad(r, &q, 0, 1) && has_grad(r, &p, 0, 0));
  dc_context_destroy(other.ctx);
}

static void check_114_start_backward_is_the_contexts_own(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, own_update, NULL);
}

static void without_start(rank *r) {
  for (int32_t stage = 0; stage <= 3; stage++) {
    param p = {.id = stage, .shape = {30}, .stage = stage};
    OK(r, register_one(r, &p));
    OK(r, dc_context_reset_stats(r->ctx));
    OK(r, reduce(r, GRAPH, &p, 0));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, stats_of(r).reductions == (stage != 1));
    OK(r, dc_context_step_abort(r->ctx)); /* the local sums of stage 1 are never averaged now */
    CHECK(r, stage == 1 ? is_all(r, &p.buffer, 0) : has_grad(r, &p, 0, 0));
  }
}

static void check_115_without_start_backward_nothing_is_updated(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, without_start, NULL);
}

static void profiled(rank *r) {
  for (int32_t stage = 0; stage <= 3; stage++) {
    param p = {.id = stage, .shape = {30}, .stage = stage};
    OK(r, register_one(r, &p));
    OK(r, backward(r, &p, 1, 0));
    CHECK(r, dc_is_profiling(r->ctx) == 0);
    OK(r, dc_enable_profiling(r->ctx, 1));
    CHECK(r, dc_is_profiling(r->ctx) == 1);
    dc_memory_stats before = stats_of(r);
    if (r->rank == 0) {
      OK(r, backward(r, &p, 1, 1)); /* rank 0 alone: nothing is sent */
    }
    dc_memory_stats after = stats_of(r);
    OK(r, dc_enable_profiling(r->ctx, 0));
    CHECK(r, dc_is_profiling(r->ctx) == 0);
    CHECK(r, memcmp(&before, &after, sizeof before) == 0 && has_grad(r, &p, 0, 0));
    OK(r, backward(r, &p, 1, 2));
    CHECK(r, has_grad(r, &p, 2, 2));
  }
}

static void check_116_profiling_reduces_nothing(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, profiled, NULL);
}

/* ---- what is gathered ---- */

static void invalidated(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 3}, q = {.id = 2, .shape = {30}, .stage = 3, .persistent = 1};
  int64_t ids[2] = {1, 2};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, dc_invalidate_gathered_param(r->ctx, 1)); /* nothing is gathered yet */
  for (int64_t round = 1; round <= 3; round++) {
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full)); /* the second gather after an invalidation */
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
    OK(r, gather(r, GRAPH, &q, DC_DTYPE_NONE, &full));
    CHECK(r, stats_of(r).gathers == round + 1 && is_whole(r, &full, &q, DC_DTYPE_NONE, 0));
    OK(r, dc_invalidate_gathered_param(r->ctx, 1));
    OK(r, dc_invalidate_gathered_param(r->ctx, 2));
    FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1), DC_E_STATE, "is not gathered");
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 2));
  }
}

static void check_117_an_invalidated_parameter_is_gathered_anew(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, invalidated, NULL);
}

static void cleared(rank *r) {
  param p[3];
  int64_t ids[3] = {0, 1, 2};
  dc_tensor full = DC_TENSOR_INIT;
  for (int64_t i = 0; i < 3; i++) {
    p[i] = (param){.id = i, .shape = {64}, .stage = 3, .persistent = i == 1};
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, 3));
  for (int64_t i = 0; i < 3; i++) {
    OK(r, gather(r, GRAPH, &p[i], DC_DTYPE_NONE, &full));
  }
  CHECK(r, stats_of(r).gathered_bytes == 3 * 256);
  OK(r, dc_clear_all_gathered_params(r->ctx));
  CHECK(r, stats_of(r).gathered_bytes == 256);
  OK(r, gather(r, GRAPH, &p[1], DC_DTYPE_NONE, &full));
  CHECK(r, stats_of(r).gathers == 3 && is_whole(r, &full, &p[1], DC_DTYPE_NONE, 0));
  OK(r, gather(r, GRAPH, &p[0], DC_DTYPE_NONE, &full));
  CHECK(r, stats_of(r).gathers == 4 && is_whole(r, &full, &p[0], DC_DTYPE_NONE, 0));
}

static void check_118_clearing_keeps_what_is_persistent(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, cleared, NULL);
}

static void made_persistent(rank *r) {
  param p = {.id = 1, .shape = {64}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, dc_set_persistent(r->ctx, 1));
  CHECK(r, stats_of(r).gathers == 1 && stats_of(r).gathered_bytes == 256);
  OK(r, dc_set_persistent(r->ctx, 1)); /* the parameter is persistent already */
  for (int64_t step = 0; step < 3; step++) {
    for (int use = 0; use < 3; use++) {
      OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
      CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, step));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
    }
    CHECK(r, stats_of(r).gathers == step + 1);
    OK(r, set_weights(r, &p, step + 1));
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  }
  OK(r, dc_clear_persistent(r->ctx, 1));
  CHECK(r, stats_of(r).gathered_bytes == 0);
}

static void check_119_persistence_gathers_once_an_update_and_can_be_undone(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, made_persistent, NULL);
}

static void not_sharded(rank *r) {
  for (int32_t stage = 0; stage <= 2; stage++) {
    param p = {.id = stage, .shape = {9}, .stage = stage};
    OK(r, register_one(r, &p));
    FAILS(r, dc_set_persistent(r->ctx, stage), DC_E_STAGE, "is not sharded");
    FAILS(r, dc_clear_persistent(r->ctx, stage), DC_E_STAGE, "is not sharded");
    FAILS(r, dc_invalidate_gathered_param(r->ctx, stage), DC_E_STAGE, "is not sharded");
  }
}

static void check_120_only_stage_3_has_persistence(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, not_sharded, NULL);
}

/* ---- forward ---- */

typedef struct lines {
  int count;
  int32_t level;
  char text[512];
} lines;

static void keep_line(int32_t level, const char *message, void *user) {
  lines *l = user;
  l->count++;
  l->level = level;
  snprintf(l->text, sizeof l->text, "%s", message);
}

static void forwards(rank *r) {
  param p = {.id = 1, .shape = {64}, .stage = 3};
  rank logged = *r;
  lines l = {0};
  dc_context_options options = DC_CONTEXT_OPTIONS_INIT;
  dc_tensor full = DC_TENSOR_INIT;
  options.log = keep_line;
  options.log_user = &l;
  OK(r, dc_context_create(r->device, &options, &logged.ctx));
  OK(r, dc_init(logged.ctx, r->comm, NULL, 100));
  OK(r, register_one(&logged, &p));
  FAILS(r, dc_end_forward(logged.ctx), DC_E_STATE, "no forward has begun");
  for (int n_users = 1; n_users <= 2; n_users++) {
    OK(r, dc_start_forward(logged.ctx));
    FAILS(r, dc_start_forward(logged.ctx), DC_E_STATE, "a forward has begun already");
    OK(r, gather(&logged, GRAPH, &p, DC_DTYPE_NONE, &full));
    OK(r, dc_release_param(logged.ctx, NULL, GRAPH, 1, n_users));
    OK(r, dc_end_forward(logged.ctx));
    CHECK(r, l.count == n_users - 1); /* of two users, one is left in the second round */
  }
  CHECK(r, l.level == DC_LOG_WARNING && strstr(l.text, "parameter 1 is still gathered: released by 1 of 2 users"));
  dc_context_destroy(logged.ctx);
}

static void check_121_forwards_come_in_pairs_and_are_checked(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, forwards, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_114_start_backward_is_the_contexts_own),
      cmocka_unit_test(check_115_without_start_backward_nothing_is_updated),
      cmocka_unit_test(check_116_profiling_reduces_nothing),
      cmocka_unit_test(check_117_an_invalidated_parameter_is_gathered_anew),
      cmocka_unit_test(check_118_clearing_keeps_what_is_persistent),
      cmocka_unit_test(check_119_persistence_gathers_once_an_update_and_can_be_undone),
      cmocka_unit_test(check_120_only_stage_3_has_persistence),
      cmocka_unit_test(check_121_forwards_come_in_pairs_and_are_checked),
  };
  return cmocka_run_group_tests_name("conformance: steps", tests, NULL, NULL);
}
