/* E, continued: what gathers refuse, failures, flags, and parameters that graphs share. */
#include "conformance.h"

static void wrong_stage(rank *r) {
  for (int32_t stage = 0; stage <= 2; stage++) {
    param p = {.id = stage, .shape = {9}, .stage = stage};
    dc_tensor full = DC_TENSOR_INIT;
    OK(r, register_one(r, &p));
    FAILS(r, dc_allgather_param(r->ctx, NULL, GRAPH, stage, 0, &full), DC_E_STAGE, "must be of stage 3");
    FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH, &p.id, NULL, 1), DC_E_STAGE, "must be of stage 3");
    FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, stage), DC_E_STAGE, "must be of stage 3");
    FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, stage, 1), DC_E_STAGE, "must be of stage 3");
  }
}

static void check_44_only_stage_3_gathers(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, wrong_stage, NULL);
}

static void three_missing_gathers(rank *r) {
  param p = {.id = 1, .shape = {9}, .stage = 3}, q = {.id = 2, .shape = {9}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, register_param(r, &q));
  FAILS(r, dc_allgather_param(r->ctx, NULL, 5, 1, 0, &full), DC_E_NOT_FOUND, "graph_id = 5 is not a registered graph");
  FAILS(r, dc_allgather_param(r->ctx, NULL, GRAPH, 99, 0, &full), DC_E_NOT_FOUND, "id = 99 is not a registered param");
  FAILS(r, dc_allgather_param(r->ctx, NULL, GRAPH, 2, 0, &full), DC_E_NOT_FOUND, "parameter 2 is not in graph 7");
}

static void check_45_three_errors_for_what_is_not_there(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, three_missing_gathers, NULL);
}

static void unsupported_type(rank *r) {
  static const int32_t wrong[] = {DC_BOOL, DC_UINT8, DC_INT16, 77, -1};
  param p = {.id = 1, .shape = {9}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  dc_memory_stats before = stats_of(r);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) { /* on one rank only: nothing is sent */
    if (r->rank == 0) {
      FAILS(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, wrong[i], &full), DC_E_DTYPE, "dtype = ");
    }
  }
  dc_memory_stats after = stats_of(r);
  CHECK(r, memcmp(&before, &after, sizeof before) == 0 && full.data == NULL);
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1), DC_E_STATE, "is not gathered");
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
}

static void check_46_an_unsupported_type_changes_nothing(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, unsupported_type, NULL);
}

/* After a failed gather, every later call returns its status and text. */
static void poisoned(rank *r, dc_context *ctx, dc_status status, const char *text) {
  dc_tensor full = DC_TENSOR_INIT;
  FAILS(r, dc_context_check(ctx), status, text);
  FAILS(r, dc_wait_allgather(ctx, NULL, GRAPH, 1), status, text);
  FAILS(r, dc_allgather_param(ctx, NULL, GRAPH, 1, 0, &full), status, text);
  FAILS(r, dc_end_backward(ctx, GRAPH, 0), status, text);
  OK(r, dc_cleanup(ctx));
}

/* Shows on one rank that a new context is unaffected by the old one's failure. */
static void starts_anew(rank *r) {
  rank solo = *r;
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  solo.world = 1;
  OK(r, dc_context_create(r->device, NULL, &solo.ctx));
  OK(r, dc_init(solo.ctx, NULL, NULL, 10));
  OK(r, register_one(&solo, &p));
  OK(r, gather(&solo, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(&solo, &full, &p, DC_DTYPE_NONE, 0));
  dc_context_destroy(solo.ctx);
}

static void aborted_gather(rank *r) {
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  if (r->rank == 1) {
    OK(r, await_flag());
    dc_comm_abort(r->comm, "the cable was cut");
    return;
  }
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full)); /* in flight: rank 1 never comes */
  raise_flag();
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1), DC_E_ABORTED, "the cable was cut");
  poisoned(r, r->ctx, DC_E_ABORTED, "the cable was cut");
  CHECK(r, r->failure[0] == '\0');
  starts_anew(r);
}

static void check_47_a_failed_gather_poisons_the_context(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, aborted_gather, NULL);
}

#ifndef ON_SIM
static void failed_callback(rank *r) {
  echo e = {0};
  dc_comm *comm;
  rank two = *r;
  param p = {.id = 1, .shape = {50}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  two.world = 2;
  if (echo_is_without_cards(r)) {
    return;
  }
  OK(r, echo_comm(&e, &comm));
  OK(r, dc_context_create(r->device, NULL, &two.ctx));
  OK(r, dc_init(two.ctx, comm, NULL, 10));
  OK(r, register_one(&two, &p));
  atomic_store(&e.fail, 71);
  OK(r, dc_allgather_param(two.ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  FAILS(r, dc_wait_allgather(two.ctx, NULL, GRAPH, 1), DC_E_CALLBACK, "all_gather returned 71 on rank 0");
  atomic_store(&e.fail, 0); /* the first failure must persist */
  poisoned(r, two.ctx, DC_E_CALLBACK, "allgather_param");
  dc_context_destroy(two.ctx);
  dc_comm_destroy(comm);
  CHECK(r, r->failure[0] == '\0');
  starts_anew(r);
}

static void check_47_a_failed_callback_poisons_the_context(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, failed_callback, NULL);
}
#endif

/* ---- shared parameters, flags, order ---- */

static void gathered_by_another_graph(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_stream *stream;
  OK(r, register_one(r, &p));
  OK(r, register_graph(r, GRAPH + 1, 3, &p.id, 1));
  OK(r, new_stream(r, &stream));
  for (int step = 0; step < 6; step++) {
    OK(r, dc_context_set_stream(r->ctx, step % 2 == 0 ? stream : NULL)); /* a stream and the host in turn */
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH + 1, 1));
    OK(r, dc_stream_synchronize(stream, 0));
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH + 1, 1, 1));
  }
}

static void check_48_a_graph_waits_for_anothers_gather(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, gathered_by_another_graph, NULL);
}

/* How often one call drains the context's streams. */
static void drains(rank *r) {
  const setup *s = r->user;
  int usual = s->config.sync_before_allgather + s->config.sync_after_allgather;
  param p = {.id = 1, .shape = {50}, .stage = 3}, q = {.id = 2, .shape = {50}, .stage = 3};
  int64_t ids[2] = {1, 2};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  watch *w = watch_device(r);
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  CHECK(r, atomic_load(&w->drained) == usual);
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  CHECK(r, atomic_load(&w->drained) == usual); /* already gathered, so nothing is drained */
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, 2));
  CHECK(r, atomic_load(&w->drained) == 2 * usual);
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
}

static void check_49_each_sync_flag_drains_once(void **state) {
  (void)state;
  for (int flags = 0; flags < 4; flags++) {
    setup s = {.world = 2};
    s.config.sync_before_allgather = flags & 1;
    s.config.sync_after_allgather = flags >> 1;
    on_ranks(s, drains, &s);
  }
}

static void waits_without_gather(rank *r) {
  param p = {.id = 1, .shape = {9}, .stage = 3};
  OK(r, register_one(r, &p));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1), DC_E_STATE, "parameter 1 is not gathered");
}

static void check_50_a_wait_without_a_gather_is_an_error(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, waits_without_gather, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_44_only_stage_3_gathers),
      cmocka_unit_test(check_45_three_errors_for_what_is_not_there),
      cmocka_unit_test(check_46_an_unsupported_type_changes_nothing),
      cmocka_unit_test(check_47_a_failed_gather_poisons_the_context),
#ifndef ON_SIM
      cmocka_unit_test(check_47_a_failed_callback_poisons_the_context),
#endif
      cmocka_unit_test(check_48_a_graph_waits_for_anothers_gather),
      cmocka_unit_test(check_49_each_sync_flag_drains_once),
      cmocka_unit_test(check_50_a_wait_without_a_gather_is_an_error),
  };
  return cmocka_run_group_tests_name("conformance: errors of gathers", tests, NULL, NULL);
}
