/* Bad input: each call returns the right status, and its text names the argument, the value and what is allowed. The
 * context stays usable. */
#include "harness.h"

enum { Z0 = 10, Z1, Z2, Z3, PARAM = 1, WHOLE = 2, OTHER = 3, UNKNOWN = 99 };

static sharded shard_a, shard_b;
static float whole_data[12], whole_grad[12];

/* Registers a stage-3 graph with PARAM, another with OTHER, and a stage-2 graph with WHOLE. */
static void fill(rank *r) {
  static const int64_t twelve = 12;
  int64_t ids[3] = {PARAM, OTHER, WHOLE};
  dc_tensor w = flat(whole_data, &twelve, DC_FLOAT32), g = flat(whole_grad, &twelve, DC_FLOAT32);
  OK(r, register_sharded(r, &shard_a, PARAM, 12, 0));
  OK(r, register_sharded(r, &shard_b, OTHER, 12, 0));
  OK(r, dc_register_param(r->ctx, WHOLE, &twelve, 1, &w, &g, 0));
  OK(r, dc_register_graph_z3(r->ctx, Z3, &ids[0], 1));
  OK(r, dc_register_graph_z3(r->ctx, Z3 + 1, &ids[1], 1));
  OK(r, dc_register_graph_z2(r->ctx, Z2, &ids[2], 1));
}

static void operators(rank *r) {
  fill(r);
  CHECK(r, r->failure[0] == '\0');
  dc_context *c = r->ctx;
  int64_t twelve = 12, eleven = 11, bad_id = UNKNOWN, other = OTHER, whole = WHOLE;
  float data[24] = {0};
  dc_tensor out = DC_TENSOR_INIT, a = flat(data, &twelve, DC_FLOAT32);
  dc_buffer *buffer;
#define EVERY(text, status, graph, id)                                     \
  FAILS(r, dc_allgather_param(c, NULL, graph, id, 0, &out), status, text); \
  FAILS(r, dc_wait_allgather(c, NULL, graph, id), status, text);           \
  FAILS(r, dc_release_param(c, NULL, graph, id, 1), status, text);         \
  FAILS(r, dc_take_param(c, graph, id, 0, &buffer), status, text);         \
  FAILS(r, dc_offload_parameter(c, NULL, graph, id), status, text);        \
  FAILS(r, dc_reload_parameter(c, NULL, graph, id), status, text)
  EVERY("graph_id = 5 is not a registered graph", DC_E_NOT_FOUND, 5, PARAM);
  EVERY("id = 99 is not a registered parameter", DC_E_NOT_FOUND, Z3, UNKNOWN);
  EVERY("parameter 3 is not in graph 13", DC_E_NOT_FOUND, Z3, OTHER);
  EVERY("graph 12 is of stage 2, must be of stage 3", DC_E_STAGE, Z2, WHOLE);
#undef EVERY
  FAILS(r, dc_prefetch_params_fused(c, 5, NULL, NULL, 0), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_prefetch_params_fused(c, Z3, &bad_id, NULL, 1), DC_E_NOT_FOUND, "id = 99");
  FAILS(r, dc_prefetch_params_fused(c, Z3, &other, NULL, 1), DC_E_NOT_FOUND, "is not in graph 13");
  FAILS(r, dc_prefetch_params_fused(c, Z2, &whole, NULL, 1), DC_E_STAGE, "stage 2");
  FAILS(r, dc_prefetch_params_fused(c, Z3, NULL, NULL, 1), DC_E_INVALID, "count = 1 with ids NULL");
  FAILS(r, dc_reduce_grad(c, &a, 5, PARAM), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_reduce_grad(c, &a, Z3, UNKNOWN), DC_E_NOT_FOUND, "id = 99");
  FAILS(r, dc_reduce_grad(c, &a, Z3, OTHER), DC_E_NOT_FOUND, "is not in graph 13");
  FAILS(r, dc_end_backward(c, 5, 0), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_end_backward(c, Z3, 2), DC_E_INVALID, "release_buckets = 2");
  FAILS(r, dc_offload_tensor(c, &a, 5, 1, &out), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_offload_tensor(c, &a, Z2, 1, &out), DC_E_STAGE, "stage 2");
  FAILS(r, dc_reload_tensor(c, &a, 5, 1, &out), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_wait_offload(c, &a, 5, 1, &out), DC_E_NOT_FOUND, "graph_id = 5");
  FAILS(r, dc_wait_reload(c, &a, 5, 1, &out), DC_E_NOT_FOUND, "graph_id = 5");
  /* Types and shapes. */
  FAILS(r, dc_allgather_param(c, NULL, Z3, PARAM, DC_BOOL, &out), DC_E_DTYPE, "dtype = 10 (bool) for parameter 1");
  FAILS(r, dc_allgather_param(c, NULL, Z3, PARAM, 77, &out), DC_E_DTYPE, "dtype = 77 (unknown)");
  FAILS(r, dc_allgather_param(c, NULL, Z3, PARAM, 0, NULL), DC_E_INVALID, "out is NULL");
  a.dtype = DC_INT32;
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_DTYPE, "grad is int32, must be a floating-point type");
  a.dtype = 77;
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_DTYPE, "grad.dtype = 77");
  a = flat(data, &eleven, DC_FLOAT32);
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_SHAPE, "grad has 11 elements, but parameter 1 has 12");
  int64_t shape[2] = {3, 4}, strides[2] = {1, 3}, negative = -1;
  a = flat(data, shape, DC_FLOAT32);
  a.ndim = 2;
  a.strides = strides;
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_SHAPE, "grad is not contiguous");
  a = flat(data, &negative, DC_FLOAT32);
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_SHAPE, "grad has length -1 in dimension 0");
  a = flat(NULL, &twelve, DC_FLOAT32);
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_INVALID, "grad.data is NULL");
  a.struct_size = 3;
  FAILS(r, dc_reduce_grad(c, &a, Z3, PARAM), DC_E_INVALID, "grad.struct_size = 3");
  FAILS(r, dc_reduce_grad(c, NULL, Z3, PARAM), DC_E_INVALID, "grad is NULL");
  /* Order of calls. */
  FAILS(r, dc_wait_allgather(c, NULL, Z3, PARAM), DC_E_STATE, "parameter 1 is not gathered");
  FAILS(r, dc_release_param(c, NULL, Z3, PARAM, 1), DC_E_STATE, "parameter 1 is not gathered");
  FAILS(r, dc_release_param(c, NULL, Z3, PARAM, 0), DC_E_INVALID, "n_users = 0 for parameter 1, must be >= 1");
  OK(r, dc_allgather_param(c, NULL, Z3, PARAM, 0, &out));
  OK(r, dc_wait_allgather(c, NULL, Z3, PARAM));
  CHECK(r, ((float *)out.data)[11] == value_of(PARAM, 11)); /* still usable after all that */
  OK(r, dc_release_param(c, NULL, Z3, PARAM, 1));
  FAILS(r, dc_release_param(c, NULL, Z3, PARAM, 1), DC_E_STATE, "released by its last user");
  FAILS(r, dc_end_forward(c), DC_E_STATE, "no forward has begun");
  OK(r, dc_start_forward(c));
  FAILS(r, dc_start_forward(c), DC_E_STATE, "has begun already");
  OK(r, dc_end_forward(c));
  FAILS(r, dc_start_backward(c, 7), DC_E_INVALID, "update = 7, must be 0 or 1");
  free_sharded(&shard_a);
  free_sharded(&shard_b);
}

static void test_operators(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, operators, NULL);
}

static void registration(rank *r) {
  dc_context *c = r->ctx;
  int64_t twelve = 12, six = 6, five = 5, negative = -4, ids[2] = {PARAM, PARAM};
  float data[24] = {0}, grads[24];
  dc_tensor shard = flat(data, &six, DC_FLOAT32), grad = flat(grads, &six, DC_FLOAT32);
  dc_tensor wrong = flat(data, &five, DC_FLOAT32), flags = flat(data, &six, DC_BOOL);
  char text[100];
  snprintf(text, sizeof text, "shard of parameter 1 on rank %d has 5 elements, must have 6", r->rank);
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &wrong, &grad, 0, 0), DC_E_SHAPE, text);
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &wrong, 0, 0), DC_E_SHAPE, "grad_buffer of parameter 1");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, NULL, &grad, 0, 0), DC_E_INVALID, "shard is NULL");
  FAILS(r, dc_register_z3_param(c, PARAM, &negative, 1, &shard, &grad, 0, 0), DC_E_SHAPE, "shape has length -4");
  FAILS(r, dc_register_z3_param(c, PARAM, NULL, 1, &shard, &grad, 0, 0), DC_E_INVALID, "its shape is NULL");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 65, &shard, &grad, 0, 0), DC_E_INVALID, "65 dimensions");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &flags, &grad, 0, 0), DC_E_DTYPE, "shard of parameter 1 is bool");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &flags, 0, 0), DC_E_DTYPE,
        "must be a floating-point type");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &grad, 2, 0), DC_E_INVALID, "persistent = 2");
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &grad, 0, DC_INT8), DC_E_DTYPE,
        "expected_grad_dtype = 5");
  OK(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &grad, 0, 0));
  grads[0] = 3.0f;
  FAILS(r, dc_register_z3_param(c, PARAM, &twelve, 1, &shard, &grad, 0, 0), DC_E_EXISTS,
        "id = 1 is registered already");
  CHECK(r, grads[0] == 3.0f); /* the failed call touched nothing */
  FAILS(r, dc_register_param(c, WHOLE, &twelve, 1, &shard, NULL, 0), DC_E_SHAPE,
        "tensor of parameter 2 has 6 elements");
  FAILS(r, dc_register_param(c, WHOLE, &twelve, 1, NULL, &grad, 7), DC_E_SHAPE, "covers elements 7 to 13");
  FAILS(r, dc_register_param(c, WHOLE, &twelve, 1, NULL, &grad, -1), DC_E_SHAPE, "covers elements -1 to 5");
  FAILS(r, dc_register_param(c, WHOLE, &twelve, 1, NULL, &grad, INT64_MAX), DC_E_SHAPE, "to 9223372036854775807,");
  OK(r, dc_register_param(c, WHOLE, &twelve, 1, NULL, &grad, r->rank == 0 ? 0 : 6));
  FAILS(r, dc_unregister_param(c, UNKNOWN), DC_E_NOT_FOUND, "id = 99");
  FAILS(r, dc_register_graph_z3(c, Z3, ids, 2), DC_E_INVALID, "ids has parameter 1 twice");
  ids[1] = UNKNOWN;
  FAILS(r, dc_register_graph_z3(c, Z3, ids, 2), DC_E_NOT_FOUND, "id = 99 is not a registered parameter");
  FAILS(r, dc_register_graph_z2(c, Z2, ids, 1), DC_E_STAGE, "dc_register_z3_param, which a stage-2 graph");
  ids[0] = WHOLE;
  FAILS(r, dc_register_graph_z3(c, Z3, ids, 1), DC_E_STAGE, "dc_register_param, which a stage-3 graph");
  FAILS(r, dc_register_graph_z0(c, Z0, ids, 1), DC_E_SHAPE, "stage 0 needs all 12");
  FAILS(r, dc_register_graph_z3(c, Z3, NULL, 1), DC_E_INVALID, "count = 1 with ids NULL");
  FAILS(r, dc_register_graph_z3(c, Z3, ids, -1), DC_E_INVALID, "count = -1");
  FAILS(r, dc_unregister_graph(c, Z3), DC_E_NOT_FOUND, "graph_id = 13");
  FAILS(r, dc_set_persistent(c, WHOLE), DC_E_STAGE, "parameter 2 is not sharded");
  FAILS(r, dc_invalidate_gathered_param(c, UNKNOWN), DC_E_NOT_FOUND, "id = 99");
  FAILS(r, dc_context_params_updated(c, ids, -1), DC_E_INVALID, "count = -1");
  ids[0] = UNKNOWN;
  FAILS(r, dc_context_params_updated(c, ids, 1), DC_E_NOT_FOUND, "id = 99");
}

static void test_registration(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, registration, NULL);
}

static void contexts(void **state) {
  (void)state;
  dc_device *device, *none = (dc_device *)&none;
  dc_context *c, *second;
  assert_int_equal(dc_device_open("tpu", NULL, &none), DC_E_NO_DEVICE);
  assert_non_null(strstr(dc_last_error(), "tpu"));
  assert_null(none);
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(NULL, NULL, &c), DC_E_INVALID);
  assert_int_equal(dc_context_create(device, NULL, &c), DC_OK);
  assert_int_equal(dc_start_forward(c), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "dc_start_forward: the context is not initialised"));
  assert_int_equal(dc_cleanup(c), DC_E_STATE);
  dc_config config = DC_CONFIG_INIT;
  config.symmetric_memory = 3;
  assert_int_equal(dc_init(c, NULL, &config, 10), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "config.symmetric_memory = 3, must be 0 or 1"));
  config.symmetric_memory = 0;
  config.double_buffer = 5;
  assert_int_equal(dc_init(c, NULL, &config, 10), DC_E_INVALID);
  assert_int_equal(dc_init(c, NULL, NULL, 0), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "initial_reduce_bucket_size = 0"));
  assert_int_equal(dc_init(c, NULL, NULL, 10), DC_OK); /* the failed ones left nothing behind */
  assert_int_equal(dc_init(c, NULL, NULL, 10), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "is initialised already"));
  assert_int_equal(dc_start_forward(c), DC_OK);                      /* the first init stays usable */
  assert_int_equal(dc_context_create(device, NULL, &second), DC_OK); /* a second context is independent */
  assert_int_equal(dc_init(second, NULL, NULL, 10), DC_OK);
  assert_int_equal(dc_register_graph_z3(c, 1, NULL, 0), DC_OK);
  assert_int_equal(dc_register_graph_z3(second, 1, NULL, 0), DC_OK);
  assert_int_equal(dc_reset(second), DC_OK);
  assert_int_equal(dc_end_backward(c, 1, 0), DC_OK);
  assert_int_equal(dc_end_backward(second, 1, 0), DC_E_NOT_FOUND);
  assert_int_equal(dc_cleanup(c), DC_OK);
  assert_int_equal(dc_cleanup(c), DC_OK); /* twice is harmless */
  assert_int_equal(dc_end_backward(c, 1, 0), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "was cleaned up"));
  assert_int_equal(dc_init(c, NULL, NULL, 10), DC_E_STATE);
  assert_int_equal(dc_start_forward(NULL), DC_E_INVALID);
  dc_context_destroy(c);
  dc_device_destroy(device); /* any order */
  assert_int_equal(dc_start_forward(second), DC_OK);
  dc_context_destroy(second);
  dc_context_destroy(NULL);
  dc_device_destroy(NULL);
  dc_comm_destroy(NULL);
  dc_buffer_release(NULL);
}

/* Ranks disagree on a value that must be the same: each error names the value and the rank. */
static void disagreeing_graphs(rank *r) {
  int64_t numel = r->rank == 0 ? 10 : 12, id = 1;
  float data[12] = {0};
  int64_t chunk = ceil_div(numel, r->world);
  dc_tensor shard = flat(data, &chunk, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, id, &numel, 1, &shard, NULL, 0, 0));
  FAILS(r, dc_register_graph_z3(r->ctx, 1, &id, 1), DC_E_MISMATCH, "parameter 1 has number of elements");
}

static void test_disagreeing_graphs(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, disagreeing_graphs, NULL);
}

static void disagreeing_configs(rank *r) {
  dc_context *other;
  dc_config config = DC_CONFIG_INIT;
  OK(r, dc_context_create(r->device, NULL, &other));
  config.double_buffer = r->rank == 0 ? 1 : -1;
  FAILS(r, dc_init(other, r->comm, &config, 100), DC_E_MISMATCH, "double_buffer");
  dc_context_destroy(other);
  OK(r, dc_context_create(r->device, NULL, &other));
  FAILS(r, dc_init(other, r->comm, NULL, 100 + r->rank), DC_E_MISMATCH, "initial_reduce_bucket_size");
  dc_context_destroy(other);
}

static void test_disagreeing_configs(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, disagreeing_configs, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_operators),          cmocka_unit_test(test_registration),        cmocka_unit_test(contexts),
      cmocka_unit_test(test_disagreeing_graphs), cmocka_unit_test(test_disagreeing_configs),
  };
  return cmocka_run_group_tests_name("bad input", tests, NULL, NULL);
}
