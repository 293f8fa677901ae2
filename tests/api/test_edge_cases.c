/* Edge cases of calls that other tests use: NULL, zero, the largest value, the last case of a switch. Also the text of
 * a log or a trace that has little to report. */
#include "harness.h"

enum { GRAPH = 7, WHOLE = 8, PARAM = 1, OTHER = 2, LENGTH = 12 };

/* ---- without a context ---- */

static void test_statuses_have_names_and_sentences(void **state) {
  (void)state;
  for (dc_status s = DC_OK; s <= DC_E_INTERNAL; s++) {
    assert_string_not_equal(dc_status_name(s), "DC_E_UNKNOWN");
    assert_string_not_equal(dc_status_string(s), "unknown status");
    assert_string_not_equal(dc_status_string(s), dc_status_string((dc_status)(s + 1)));
  }
  assert_string_equal(dc_status_name((dc_status)999), "DC_E_UNKNOWN");
  assert_string_equal(dc_status_string((dc_status)-1), "unknown status");
}

static void test_the_last_error_needs_a_buffer(void **state) {
  (void)state;
  int64_t needed = 0;
  assert_int_equal(dc_init(NULL, NULL, NULL, 1), DC_E_INVALID);
  assert_int_equal(dc_last_error_copy(NULL, 0, &needed), DC_E_BUFFER_TOO_SMALL);
  assert_int_equal(needed, strlen("dc_init: context is NULL") + 1);
  assert_int_equal(dc_last_error_copy(NULL, 100, NULL), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "buf is NULL, but cap = 100"));
}

static void test_no_context(void **state) {
  (void)state;
  dc_buffer *buffer = NULL;
  assert_int_equal(dc_context_create(NULL, NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_cleanup(NULL), DC_E_INVALID);
  assert_int_equal(dc_reset(NULL), DC_E_INVALID);
  assert_int_equal(dc_context_alloc(NULL, 1, DC_MEMORY_DEVICE, &buffer), DC_E_INVALID);
  assert_int_equal(dc_is_profiling(NULL), 0);
  dc_context_destroy(NULL);
}

/* ---- dry runs of every operator ---- */

static void every_dry_run(rank *r) {
  sharded p;
  int64_t id = PARAM, other = OTHER, twelve = LENGTH;
  static float whole[LENGTH];
  dc_tensor grad = flat(whole, &twelve, DC_FLOAT32), out = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, PARAM, LENGTH, 0));
  OK(r, dc_register_param(r->ctx, OTHER, &twelve, 1, NULL, r->world == 1 ? &grad : NULL, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_register_graph_z1(r->ctx, WHOLE, &other, 1));
  dc_op_info info = {.struct_size = sizeof info};
  for (int32_t op = DC_OP_ALLGATHER_PARAM; op <= DC_OP_END_BACKWARD; op++) {
    dc_status status = dc_context_dry_run(r->ctx, op, GRAPH, PARAM, DC_FLOAT32, &info);
    CHECK(r, status == DC_OK || strstr(dc_last_error(), "is none of the operators") != NULL);
  }
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, PARAM, DC_FLOAT32, NULL), DC_E_INVALID,
        "info is NULL");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_INIT, GRAPH, PARAM, 0, &info), DC_E_INVALID, "is none of the operators");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_REDUCE_GRAD, GRAPH, PARAM, DC_INT8, &info), DC_E_DTYPE, "grad is int8");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, PARAM, DC_BOOL, &info), DC_E_DTYPE, "bool");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_RELEASE_PARAM, GRAPH, OTHER, 0, &info), DC_E_NOT_FOUND, "not in graph");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_END_BACKWARD, 99, 0, 0, &info), DC_E_NOT_FOUND, "graph_id = 99");
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_TENSOR, 99, 1, 0, &info), DC_E_NOT_FOUND, "graph_id = 99");
  for (int32_t op = DC_OP_OFFLOAD_TENSOR; op <= DC_OP_WAIT_RELOAD; op++) { /* fails as the operator itself does */
    FAILS(r, dc_context_dry_run(r->ctx, op, WHOLE, 1, 0, &info), DC_E_STAGE, "must be of stage 3");
  }
  OK(r, dc_context_dry_run(r->ctx, DC_OP_FREE_TENSORS, 0, 0, 0, &info));
  CHECK(r, info.wire_bytes == 0 && info.ndim == -1);
  /* Stage 1 sends only at the boundary, and without a type the bytes of a gradient cannot be counted. */
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_REDUCE_GRAD, WHOLE, OTHER, DC_FLOAT32, &info));
  CHECK(r, info.wire_bytes == 0);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_REDUCE_GRAD, GRAPH, PARAM, DC_DTYPE_NONE, &info));
  CHECK(r, info.wire_bytes == 0);
  /* A dry run knows the shape of an offloaded tensor. */
  OK(r, dc_offload_tensor(r->ctx, &grad, GRAPH, 5, &out));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_TENSOR, GRAPH, 5, 0, &info));
  CHECK(r, info.ndim == 1 && info.shape[0] == LENGTH && info.dtype == DC_FLOAT32);
  CHECK(r, info.device_bytes == (int64_t)sizeof whole && info.host == 0);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_OFFLOAD_TENSOR, GRAPH, 5, 0, &info));
  CHECK(r, info.device_bytes == 0 && info.host == 1);
  free_sharded(&p);
}

static void test_every_dry_run(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, every_dry_run, NULL);
  run_ranks((setup){.world = 2}, every_dry_run, NULL);
}

/* Reductions receive the bytes that dry runs report. Stage 0 gathers means in the buffer's type. The end of a step
 * reduces the sums of stage 1 that no later gradient has flushed. */
static void dry_runs_tell_the_bytes(rank *r) {
  const int32_t stage = *(const int32_t *)r->user;
  const int64_t id = PARAM, twelve = LENGTH, half = LENGTH / 2, *length = stage == 0 ? &twelve : &half;
  double buffer[LENGTH];
  float values[LENGTH] = {0};
  dc_op_info first = {.struct_size = sizeof first}, second = first;
  dc_memory_stats stats = DC_MEMORY_STATS_INIT;
  dc_tensor grad = flat(values, &twelve, DC_FLOAT32), whole = flat(buffer, length, DC_FLOAT64);
  OK(r, dc_register_param(r->ctx, PARAM, &twelve, 1, NULL, &whole, stage == 0 ? 0 : r->rank * half));
  OK(r, stage == 0 ? dc_register_graph_z0(r->ctx, GRAPH, &id, 1) : dc_register_graph_z1(r->ctx, GRAPH, &id, 1));
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_REDUCE_GRAD, GRAPH, PARAM, DC_FLOAT32, &first));
  OK(r, dc_reduce_grad(r->ctx, &grad, GRAPH, PARAM));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_END_BACKWARD, GRAPH, 0, DC_DTYPE_NONE, &second));
  CHECK(r, first.wire_bytes == (stage == 0 ? half * 4 + half * 8 : 0));
  CHECK(r, second.wire_bytes == (stage == 0 ? 0 : half * 4));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_context_get_memory_stats(r->ctx, &stats));
  CHECK(r, stats.reduce_wire_bytes == first.wire_bytes + second.wire_bytes);
}

static void test_dry_runs_tell_the_bytes(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, dry_runs_tell_the_bytes, &(int32_t){0});
  run_ranks((setup){.world = 2}, dry_runs_tell_the_bytes, &(int32_t){1});
}

/* ---- edges of single calls ---- */

static void edges(rank *r) {
  sharded p;
  int64_t id = PARAM, ids[70];
  dc_tensor out = DC_TENSOR_INIT;
  dc_buffer *buffer = NULL;
  dc_trace_event event;
  int64_t count = 0;
  int32_t freed = 0;
  OK(r, register_sharded(r, &p, PARAM, LENGTH, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  for (size_t i = 0; i < 70; i++) {
    ids[i] = PARAM;
  }
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, 70)); /* more ids than its stack holds; all one parameter */
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, NULL, NULL, 0));
  FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, -1), DC_E_INVALID, "count = -1");
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, PARAM));
  OK(r, dc_invalidate_gathered_param(r->ctx, PARAM));
  FAILS(r, dc_take_param(r->ctx, GRAPH, PARAM, 0, NULL), DC_E_INVALID, "buffer is NULL");
  FAILS(r, dc_free_tensors(r->ctx, NULL, sizeof out, 1, &freed), DC_E_INVALID, "tensors is NULL");
  FAILS(r, dc_free_tensors(r->ctx, &out, sizeof out, 1, NULL), DC_E_INVALID, "freed is NULL");
  FAILS(r, dc_free_tensors(r->ctx, &out, 8, 1, &freed), DC_E_INVALID, "tensor_size = 8");
  FAILS(r, dc_free_tensors(r->ctx, &out, sizeof out, -1, &freed), DC_E_INVALID, "count = -1, must be >= 0");
  OK(r, dc_free_tensors(r->ctx, NULL, 0, 0, NULL));
  FAILS(r, dc_context_params_updated(r->ctx, NULL, 1), DC_E_INVALID, "count = 1 with ids NULL, must be 0 without ids");
  FAILS(r, dc_context_params_updated(r->ctx, &id, -1), DC_E_INVALID, "count = -1");
  FAILS(r, dc_context_trace_start(r->ctx, -1), DC_E_INVALID, "capacity = -1");
  FAILS(r, dc_context_trace_start(r->ctx, INT64_MAX), DC_E_INVALID, "capacity");
  FAILS(r, dc_context_trace_read(r->ctx, &event, sizeof event, 1, NULL), DC_E_INVALID, "count is NULL");
  FAILS(r, dc_context_trace_read(r->ctx, &event, sizeof event, -1, &count), DC_E_INVALID, "cap = -1, must be >= 0");
  FAILS(r, dc_context_trace_read(r->ctx, NULL, sizeof event, 1, &count), DC_E_INVALID, "events is NULL");
  FAILS(r, dc_context_trace_read(r->ctx, &event, 3, 1, &count), DC_E_INVALID, "event_size = 3, must be at least 48");
  FAILS(r, dc_context_alloc(r->ctx, INT64_MAX, DC_MEMORY_DEVICE, &buffer), DC_E_INVALID, "bytes = ");
  FAILS(r, dc_context_alloc(r->ctx, -1, DC_MEMORY_DEVICE, &buffer), DC_E_INVALID, "bytes = -1, must be 0 to ");
  FAILS(r, dc_context_alloc(r->ctx, 1, DC_MEMORY_DEVICE, NULL), DC_E_INVALID, "buffer is NULL");
  free_sharded(&p);
}

static void test_edges(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, edges, NULL);
  run_ranks((setup){.world = 2, .config.sync_before_reduce = 1, .config.sync_before_allgather = 1}, edges, NULL);
}

/* ---- calls that contradict earlier ones ---- */

static void too_late(rank *r) {
  int64_t other = OTHER, twelve = LENGTH, few = LENGTH / 2;
  static float whole[2][LENGTH];
  dc_tensor grad = flat(whole[r->rank], &twelve, DC_FLOAT32), part = flat(whole[r->rank], &few, DC_FLOAT32);
  OK(r, dc_register_param(r->ctx, OTHER, &twelve, 1, NULL, &part, r->rank * few));
  OK(r, dc_register_graph_z1(r->ctx, WHOLE, &other, 1));
  /* The graph was registered with each rank's part, so the buffer must have that part's shape. */
  FAILS(r, dc_context_update_param_grad_buffer(r->ctx, OTHER, &grad, 0), DC_E_SHAPE,
        "grad_buffer of parameter 2 covers elements 0 to 12");
  OK(r, dc_context_update_param_grad_buffer(r->ctx, OTHER, &part, r->rank * few));
}

static void test_late_calls_are_refused(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, too_late, NULL);
}

/* ---- messages of the log ---- */

typedef struct heard {
  int32_t level;
  char text[256];
} heard;

static void keep_log(int32_t level, const char *message, void *user) {
  heard *h = user;
  h->level = level;
  snprintf(h->text, sizeof h->text, "%s", message);
}

/* A forward that ends with a parameter only partly released is a mistake that costs memory, so it is logged. */
static void test_a_parameter_left_gathered_is_logged(void **state) {
  (void)state;
  heard said = {0};
  dc_device *device;
  dc_context *ctx;
  dc_context_options options = {.struct_size = sizeof options, .log = keep_log, .log_user = &said};
  float shard[LENGTH] = {0}, grad[LENGTH] = {0};
  int64_t id = PARAM, length = LENGTH;
  dc_tensor s = flat(shard, &length, DC_FLOAT32), g = flat(grad, &length, DC_FLOAT32), full = DC_TENSOR_INIT;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(device, &options, &ctx), DC_OK);
  assert_int_equal(dc_init(ctx, NULL, NULL, 16), DC_OK);
  assert_int_equal(dc_register_z3_param(ctx, PARAM, &length, 1, &s, &g, 0, DC_DTYPE_NONE), DC_OK);
  assert_int_equal(dc_register_graph_z3(ctx, GRAPH, &id, 1), DC_OK);
  assert_int_equal(dc_start_forward(ctx), DC_OK);
  assert_int_equal(dc_start_forward(ctx), DC_E_STATE);
  assert_int_equal(dc_allgather_param(ctx, NULL, GRAPH, PARAM, DC_DTYPE_NONE, &full), DC_OK);
  assert_int_equal(dc_release_param(ctx, NULL, GRAPH, PARAM, 2), DC_OK);
  assert_int_equal(dc_end_forward(ctx), DC_OK);
  assert_int_equal(said.level, DC_LOG_WARNING);
  assert_non_null(strstr(said.text, "parameter 1 is still gathered: released by 1 of 2 users"));
  assert_int_equal(dc_end_forward(ctx), DC_E_STATE);
  assert_int_equal(dc_is_profiling(ctx), 0);
  assert_int_equal(dc_enable_profiling(ctx, 1), DC_OK);
  assert_int_equal(dc_is_profiling(ctx), 1);
  dc_context_destroy(ctx);
  dc_device_destroy(device);
}

static void test_config_is_checked(void **state) {
  (void)state;
  dc_device *device;
  dc_context *ctx;
  dc_config config = DC_CONFIG_INIT;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &ctx), DC_OK);
  assert_int_equal(dc_cleanup(ctx), DC_E_STATE);
  config.free_activation_threshold = -2;
  assert_int_equal(dc_init(ctx, NULL, &config, 16), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "free_activation_threshold = -2"));
  config.free_activation_threshold = -1;
  assert_int_equal(dc_init(ctx, NULL, &config, 16), DC_OK);
  assert_int_equal(dc_init(ctx, NULL, &config, 16), DC_E_STATE);
  assert_int_equal(dc_cleanup(ctx), DC_OK);
  assert_int_equal(dc_cleanup(ctx), DC_OK);
  dc_context_destroy(ctx);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_statuses_have_names_and_sentences),
      cmocka_unit_test(test_the_last_error_needs_a_buffer),
      cmocka_unit_test(test_no_context),
      cmocka_unit_test(test_every_dry_run),
      cmocka_unit_test(test_dry_runs_tell_the_bytes),
      cmocka_unit_test(test_edges),
      cmocka_unit_test(test_late_calls_are_refused),
      cmocka_unit_test(test_a_parameter_left_gathered_is_logged),
      cmocka_unit_test(test_config_is_checked),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
