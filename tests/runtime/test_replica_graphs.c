/* Hybrid sharding: what the ranks of all groups must have in common when they register parameters, and gradients that
 * several graphs reduce. */
#include "runtime/runtime.h"

#include "replica_trainer.h"

typedef struct registration {
  dc_device *device;
  dc_context *context;
  float shard[8], grad[8];
  int64_t numel, count;
} registration;

/* A parameter of `numel` elements in two groups of two. */
static int open_registration(registration *r, dc_comm *comm, int64_t numel) {
  dc_config config = DC_CONFIG_INIT;
  *r = (registration){.numel = numel};
  config.replicas = 2;
  CHECK_OK(dc_device_open("cpu", NULL, &r->device));
  CHECK_OK(dc_context_create(r->device, NULL, &r->context));
  CHECK_OK(dc_init(r->context, comm, &config, BUCKET));
  int64_t offset;
  return dc_shard_range(numel, dc_comm_rank(comm) % 2, 2, &offset, &r->count);
}

static void close_registration(registration *r) {
  dc_context_destroy(r->context);
  dc_device_destroy(r->device);
}

/* The groups register a parameter at different stages, then with and without a gradient. */
static int groups_differ(dc_comm *comm, void *arg) {
  registration r;
  const bool second = dc_comm_rank(comm) >= 2;
  const int64_t id = 7;
  (void)arg;
  CHECK(open_registration(&r, comm, 8) == 0);
  dc_tensor whole = flat(r.grad, &r.numel, DC_FLOAT32);
  CHECK_OK(dc_register_param(r.context, id, &r.numel, 1, NULL, second ? NULL : &whole, 0));
  CHECK((second ? dc_register_graph_z2 : dc_register_graph_z1)(r.context, 1, &id, 1) == DC_E_MISMATCH);
  CHECK_SAYS("parameter 7 has stage ");
  CHECK(dc_register_graph_z0(r.context, 1, &id, 1) == DC_E_MISMATCH);
  CHECK_SAYS("parameter 7 has number of gradient elements ");
  CHECK_OK(dc_unregister_param(r.context, id));
  CHECK_OK(dc_register_param(r.context, id, &r.numel, 1, NULL, &whole, 0));
  CHECK_OK(dc_register_graph_z0(r.context, 1, &id, 1));
  close_registration(&r);
  return 0;
}

/* Both groups register the same elements, but split them differently. */
static int groups_split_otherwise(dc_comm *comm, void *arg) {
  registration r;
  const int64_t id = 7, own = dc_comm_rank(comm) % 2 == dc_comm_rank(comm) / 2 ? 5 : 3;
  (void)arg;
  CHECK(open_registration(&r, comm, 8) == 0);
  dc_tensor grad = flat(r.grad, &own, DC_FLOAT32);
  CHECK_OK(dc_register_param(r.context, id, &r.numel, 1, NULL, &grad, dc_comm_rank(comm) % 2 == 0 ? 0 : 8 - own));
  CHECK(dc_register_graph_z1(r.context, 1, &id, 1) == DC_E_MISMATCH);
  CHECK_SAYS("parameter 7 has ");
  close_registration(&r);
  return 0;
}

static void test_groups_that_differ(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, groups_differ, NULL), 0);
  assert_int_equal(on_threads(4, 0, groups_split_otherwise, NULL), 0);
}

/* A rank of each group owns nothing of the gradient, and does not know that the buffer was taken away. All ranks took
 * it away, or only rank 2, which has no piece of the one element: its replica has it. */
static int take_the_buffer_away(dc_comm *comm, void *arg) {
  registration r;
  const int64_t id = 7, one = 1;
  const int32_t alone = *(const int32_t *)arg; /* -1: all ranks */
  CHECK(open_registration(&r, comm, 1) == 0);
  dc_tensor shard = flat(r.shard, &one, DC_FLOAT32), grad = flat(r.grad, &one, DC_FLOAT32);
  CHECK_OK(dc_register_z3_param(r.context, id, &r.numel, 1, &shard, &grad, 0, DC_DTYPE_NONE));
  CHECK_OK(dc_register_graph_z3(r.context, 1, &id, 1));
  if (alone < 0 || dc_comm_rank(comm) == alone) {
    CHECK_OK(dc_context_update_param_grad_buffer(r.context, id, NULL, 0));
  }
  CHECK_OK(dc_start_backward(r.context, 1));
  dc_status status = dc_reduce_grad(r.context, &shard, 1, id);
  status = status != DC_OK ? status : dc_end_backward(r.context, 1, 0);
  CHECK(status == DC_E_STATE);
  CHECK_SAYS(alone < 0 ? "parameter 7" : "parameter 7 was taken away by dc_context_update_param_grad_buffer on rank 2");
  close_registration(&r);
  return 0;
}

static void test_a_buffer_that_was_taken_away(void **state) {
  (void)state;
  int32_t all = -1, alone = 2;
  assert_int_equal(on_threads(4, 0, take_the_buffer_away, &all), 0);
  assert_int_equal(on_threads(4, 0, take_the_buffer_away, &alone), 0);
  assert_int_equal(on_tcp(4, 0, take_the_buffer_away, &alone), 0);
}

/* Graphs of stage 0 and of another stage share a parameter. Then replicas sum different pieces of its gradients, and
 * none is lost when they wait for one flush. */
static int reduce_in_two_graphs(dc_comm *comm, void *arg) {
  registration r;
  float values[8];
  const int64_t id = 7;
  (void)arg;
  CHECK(open_registration(&r, comm, 8) == 0);
  dc_tensor whole = flat(r.grad, &r.numel, DC_FLOAT32), grad = flat(values, &r.numel, DC_FLOAT32);
  CHECK_OK(dc_register_param(r.context, id, &r.numel, 1, NULL, &whole, 0));
  CHECK_OK(dc_register_graph_z0(r.context, 0, &id, 1));
  CHECK_OK(dc_register_graph_z2(r.context, 1, &id, 1));
  CHECK_OK(dc_start_backward(r.context, 1));
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < 8; i++) {
      values[i] = (float)(1 << k);
    }
    CHECK_OK(dc_reduce_grad(r.context, &grad, k % 2, id));
  }
  CHECK_OK(dc_end_backward(r.context, 0, 0));
  for (int i = 0; i < 8; i++) {
    CHECK(r.grad[i] == 15.0f);
  }
  close_registration(&r);
  return 0;
}

static void test_two_graphs_of_a_parameter(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, reduce_in_two_graphs, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_groups_that_differ),
      cmocka_unit_test(test_a_buffer_that_was_taken_away),
      cmocka_unit_test(test_two_graphs_of_a_parameter),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
