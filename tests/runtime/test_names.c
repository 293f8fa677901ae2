/* Names of parameters in error texts, log lines and dumps. */
#include "harness.h"

#include <unistd.h>

enum { GRAPH = 7 };

static void in_errors(rank *r) {
  enum { COUNT = 3 };
  sharded p[COUNT];
  const int64_t ids[COUNT] = {3, -4, 4};
  dc_tensor full = DC_TENSOR_INIT;
  for (int i = 0; i < COUNT; i++) {
    OK(r, register_sharded(r, &p[i], ids[i], 11, 0));
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, COUNT));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 3), DC_E_STATE, "parameter 3 is not gathered");
  OK(r, dc_context_set_param_name(r->ctx, 3, "encoder.layer.0.weight"));
  OK(r, dc_context_set_param_name(r->ctx, -4, "bias"));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 3), DC_E_STATE,
        "dc_wait_allgather: parameter 3 (encoder.layer.0.weight) is not gathered; call dc_allgather_param first");
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, -4), DC_E_STATE, "parameter -4 (bias) is not gathered");
  FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, 3, 0), DC_E_INVALID,
        "n_users = 0 for parameter 3 (encoder.layer.0.weight), must be >= 1");
  OK(r, dc_context_set_param_name(r->ctx, -4, NULL));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, -4), DC_E_STATE, "parameter -4 is not gathered");
  FAILS(r, dc_context_set_param_name(r->ctx, 99, "x"), DC_E_NOT_FOUND, "id = 99");
  FAILS(r, dc_context_set_param_name(r->ctx, 3, "a\nb"), DC_E_INVALID,
        "name of parameter 3 (encoder.layer.0.weight) has byte 0x0a at 1, must have no control bytes");
  /* The end of a long name is shown, in whole characters. */
  char longer[300];
  memset(longer, 'a', sizeof longer);
  memcpy(longer + 202, "\xc3\xa4", 2); /* cutting inside it would leave no valid character */
  memcpy(longer + sizeof longer - 8, ".weight", 8);
  OK(r, dc_context_set_param_name(r->ctx, 3, longer));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 3), DC_E_STATE, "parameter 3 (...aaaa");
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 3), DC_E_STATE, ".weight) is not gathered; call dc_allgather_param");
  CHECK(r, strstr(dc_last_error(), "\xa4") == NULL);
  /* Ranks that call different operators see the names of both. */
  OK(r, dc_context_set_param_name(r->ctx, 3, "weight"));
  OK(r, dc_context_set_param_name(r->ctx, 4, "bias"));
  const int64_t own = r->rank == 0 ? 3 : 4;
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, own, DC_DTYPE_NONE, &full));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, own), DC_E_MISMATCH,
        "rank 1 called allgather_param of parameter 4 (bias) (11 elements, float32) where rank 0 called "
        "allgather_param of parameter 3 (weight) (11 elements, float32)");
  FAILS(r, dc_end_backward(r->ctx, GRAPH, 0), DC_E_MISMATCH, "parameter 3 (weight) (11");
  for (int i = 0; i < COUNT; i++) {
    free_sharded(&p[i]);
  }
}

static void test_in_errors(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, in_errors, NULL);
}

/* A name is dropped with its parameter. */
static void ends_with_its_parameter(rank *r) {
  sharded p;
  const int64_t id = 3;
  OK(r, register_sharded(r, &p, id, 11, 0));
  OK(r, dc_context_set_param_name(r->ctx, id, "first"));
  OK(r, dc_unregister_param(r->ctx, id));
  free_sharded(&p);
  OK(r, register_sharded(r, &p, id, 11, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id), DC_E_STATE, "parameter 3 is not gathered");
  free_sharded(&p);
}

static void test_ends_with_its_parameter(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, ends_with_its_parameter, NULL);
}

static void in_dumps(rank *r) {
  sharded p;
  const int64_t id = 3;
  dc_tensor full = DC_TENSOR_INIT;
  char folder[] = "/tmp/libdc-names-XXXXXX", path[64], text[1 << 16] = "";
  OK(r, register_sharded(r, &p, id, 11, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_context_set_param_name(r->ctx, id, "say \"weight\""));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
  CHECK(r, mkdtemp(folder) != NULL);
  OK(r, dc_context_trace_dump(r->ctx, folder));
  snprintf(path, sizeof path, "%s/rank-0.json", folder);
  FILE *file = fopen(path, "r");
  CHECK(r, file != NULL);
  size_t got = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  CHECK(r, unlink(path) == 0 && rmdir(folder) == 0);
  CHECK(r, got > 0 &&
               strstr(text, "\"op\":\"allgather_param\",\"graph\":0,\"id\":3,\"name\":\"say \\u0022weight\\u0022\"") !=
                   NULL);
  free_sharded(&p);
}

static void test_in_dumps(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, in_dumps, NULL);
}

static void keep_line(int32_t level, const char *line, void *user) {
  (void)level;
  snprintf(user, 512, "%s", line);
}

static void test_in_the_log(void **state) {
  (void)state;
  char line[512] = "";
  float shard[4] = {0};
  const int64_t id = 3, four = 4;
  dc_device *device;
  dc_context *ctx;
  dc_context_options options = DC_CONTEXT_OPTIONS_INIT;
  options.log = keep_line;
  options.log_user = line;
  dc_tensor t = flat(shard, &four, DC_FLOAT32), full = DC_TENSOR_INIT;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(device, &options, &ctx), DC_OK);
  assert_int_equal(dc_init(ctx, NULL, NULL, 100), DC_OK);
  assert_int_equal(dc_register_z3_param(ctx, id, &four, 1, &t, NULL, 0, DC_DTYPE_NONE), DC_OK);
  assert_int_equal(dc_context_set_param_name(ctx, id, "weight"), DC_OK);
  assert_int_equal(dc_register_graph_z3(ctx, GRAPH, &id, 1), DC_OK);
  assert_int_equal(dc_start_forward(ctx), DC_OK);
  assert_int_equal(dc_allgather_param(ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full), DC_OK);
  assert_int_equal(dc_release_param(ctx, NULL, GRAPH, id, 2), DC_OK);
  assert_int_equal(dc_end_forward(ctx), DC_OK);
  assert_non_null(strstr(line, "parameter 3 (weight) is still gathered: released by 1 of 2 users"));
  dc_context_destroy(ctx);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_in_errors),
      cmocka_unit_test(test_ends_with_its_parameter),
      cmocka_unit_test(test_in_dumps),
      cmocka_unit_test(test_in_the_log),
  };
  return cmocka_run_group_tests_name("names", tests, NULL, NULL);
}
