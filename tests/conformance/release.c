/* G: release. */
#include "conformance.h"

/* The caller reads on its stream, which is held back, and releases: the memory stays until the read is done. */
static void after_the_last_reader(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_stream *stream;
  array to;
  OK(r, register_one(r, &p));
  OK(r, new_array(r, &to, 99, DC_FLOAT32));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1));
  close_gate(r, stream);
  dc__stream_copy(stream, to.data, full.data, 99 * sizeof(float));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  CHECK(r, stats_of(r).gathered_bytes > 0);
  open_gate(r);
  OK(r, dc_stream_synchronize(stream, 0));
  full.data = to.data;
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
  OK(r, dc_context_set_stream(r->ctx, NULL));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full)); /* the arena checks for free memory when it is asked for some */
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  CHECK(r, stats_of(r).gathered_bytes == 0);
}

static void check_58_memory_goes_back_after_its_last_reader(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, after_the_last_reader, NULL);
  on_ranks((setup){.world = 2}, after_the_last_reader, NULL);
}

static void three_users(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  for (int step = 0; step < 3; step++) {
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
    for (int user = 0; user < 3; user++) {
      CHECK(r, stats_of(r).gathered_bytes > 0 && is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 3));
    }
    CHECK(r, stats_of(r).gathered_bytes == 0);
  }
}

static void check_59_the_last_of_three_users_gives_back(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, three_users, NULL);
}

static void persistent(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3, .persistent = 1};
  dc_tensor full = DC_TENSOR_INIT, again = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  int64_t bytes = stats_of(r).gathered_bytes;
  for (int64_t n = 1; n <= 9; n++) { /* three rounds of one user; then two rounds of three users */
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, n < 4 ? 1 : 3));
  }
  CHECK(r, stats_of(r).gathered_bytes == bytes && dc_buffer_data(full.buffer) == full.data);
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &again));
  CHECK(r, again.data == full.data && stats_of(r).gathers == 1 && is_whole(r, &again, &p, DC_DTYPE_NONE, 0));
}

static void check_60_a_persistent_parameter_stays(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, persistent, NULL);
}

static void too_often(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1), DC_E_STATE, "never gathered");
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 0), DC_E_INVALID, "n_users = 0 for parameter 1, must be >= 1");
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 1, -4), DC_E_INVALID, "n_users = -4");
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2));
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2), DC_E_STATE, "released by its last user");
}

static void check_61_one_release_too_many_is_an_error(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, too_often, NULL);
}

static void users_disagree(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 3));
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2), DC_E_INVALID, "but the first of its users said 3");
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 3)); /* the refused call did not count */
  CHECK(r, stats_of(r).gathered_bytes > 0);
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 3));
  CHECK(r, stats_of(r).gathered_bytes == 0);
}

static void check_62_users_must_agree_on_their_number(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, users_disagree, NULL);
}

static void again_in_the_same_step(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    for (int pass = 0; pass < 2; pass++) { /* first the forward, then the backward */
      OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
      CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, step));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
    }
    CHECK(r, stats_of(r).gathers == 2 * (step + 1) && stats_of(r).gathered_bytes == 0);
    OK(r, backward(r, &p, 1, step));
    CHECK(r, has_grad(r, &p, step, step));
    OK(r, set_weights(r, &p, step + 1));
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  }
}

static void check_63_a_released_parameter_can_be_gathered_again(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, again_in_the_same_step, NULL);
}

static void aborted_step(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, dc_start_forward(r->ctx));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 3)); /* one of three users, then something goes wrong */
  OK(r, dc_context_step_abort(r->ctx));
  CHECK(r, stats_of(r).gathered_bytes == 0);
  OK(r, dc_start_forward(r->ctx));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2)); /* another number of users starts a new count */
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 2));
  CHECK(r, stats_of(r).gathered_bytes == 0);
  OK(r, dc_end_forward(r->ctx));
}

static void check_64_an_aborted_step_leaves_no_count(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, aborted_step, NULL);
}

static void holds_a_view(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  dc_buffer *view = dc_buffer_retain(full.buffer);
  CHECK(r, dc_buffer_data(view) == full.data);
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  void *data = dc_buffer_data(view);
  dc_buffer_release(view);
  CHECK(r, data == NULL && stats_of(r).gathered_bytes == 0); /* a view does not keep the memory alive, and says so */
}

static void check_65_a_view_says_that_it_was_released(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, holds_a_view, NULL);
}

#ifdef ON_SIM
static void reads_a_view(rank *r) {
  param p = {.id = 1, .shape = {99}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
  double values[99];
  OK(r, read_from(r, full.data, DC_FLOAT32, values, 99));
}

static void check_65_reading_a_released_view_is_reported(void **state) {
  (void)state;
  on_ranks_reported((setup){.world = 1}, reads_a_view, "use after free: read by copy");
  on_ranks_reported((setup){.world = 2}, reads_a_view, "use after free: read by copy");
}
#endif

/* A chain of equal layers: each is gathered, used and released, with or without gathering the next one ahead. */
static void chain(rank *r) {
  enum { LAYERS = 6, NUMEL = 256 };
  int64_t ahead = *(const int64_t *)r->user;
  param p[LAYERS];
  int64_t ids[LAYERS];
  dc_tensor full = DC_TENSOR_INIT;
  for (int64_t i = 0; i < LAYERS; i++) {
    p[i] = (param){.id = i, .shape = {NUMEL}, .stage = 3};
    ids[i] = i;
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, LAYERS));
  for (int step = 0; step < 2; step++) {
    for (int64_t i = 0; i < LAYERS; i++) {
      for (int64_t k = i; k <= i + ahead && k < LAYERS; k++) {
        OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, k, DC_DTYPE_NONE, &full));
      }
      OK(r, gather(r, GRAPH, &p[i], DC_DTYPE_NONE, &full));
      CHECK(r, is_whole(r, &full, &p[i], DC_DTYPE_NONE, 0));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
    }
  }
  CHECK(r, stats_of(r).gathered_peak_bytes == (1 + ahead) * NUMEL * (int64_t)sizeof(float));
}

static void check_66_a_chain_needs_one_layer_or_two_with_one_ahead(void **state) {
  (void)state;
  for (int64_t ahead = 0; ahead < 3; ahead++) {
    on_ranks((setup){.world = 2}, chain, &ahead);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_58_memory_goes_back_after_its_last_reader),
      cmocka_unit_test(check_59_the_last_of_three_users_gives_back),
      cmocka_unit_test(check_60_a_persistent_parameter_stays),
      cmocka_unit_test(check_61_one_release_too_many_is_an_error),
      cmocka_unit_test(check_62_users_must_agree_on_their_number),
      cmocka_unit_test(check_63_a_released_parameter_can_be_gathered_again),
      cmocka_unit_test(check_64_an_aborted_step_leaves_no_count),
      cmocka_unit_test(check_65_a_view_says_that_it_was_released),
#ifdef ON_SIM
      cmocka_unit_test(check_65_reading_a_released_view_is_reported),
#endif
      cmocka_unit_test(check_66_a_chain_needs_one_layer_or_two_with_one_ahead),
  };
  return cmocka_run_group_tests_name("conformance: release", tests, NULL, NULL);
}
