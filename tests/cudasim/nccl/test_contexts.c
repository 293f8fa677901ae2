/* Contexts on simulated cards: processes use NCCL by default, with one communicator for gathers and one for reductions.
 * Also registered memory with symmetric_memory, and the caller's collectives as the bootstrap. */
#include "nccl_ranks.h"

static const int64_t second = INT64_C(1000000000);

enum { GRAPH = 1, NUMEL = 103 };

static void nothing_left(void) {
  assert_int_equal(cudasim_live(), 0);
}

/* One step of a stage-3 parameter on a ready context: gathers its weights, reduces its gradient, checks both. */
static void one_step(card_rank *c, int32_t memory) {
  rank *r = &c->r;
  int64_t shape[] = {NUMEL}, ids[] = {7}, chunk = ceil_div(NUMEL, r->world);
  size_t bytes = (size_t)chunk * sizeof(float);
  dc_buffer *shard;
  float host[NUMEL + 8] = {0}, found[NUMEL];
  for (int64_t i = 0; i < chunk; i++) {
    host[i] = value_of(7, r->rank * chunk + i);
  }
  OK(r, dc_context_alloc(r->ctx, (int64_t)bytes, memory, &shard));
  OK(r, put(c, dc_buffer_data(shard), host, bytes));
  float *grad = on_card(c, bytes), *whole = on_card(c, sizeof found);
  dc_tensor weights = flat(dc_buffer_data(shard), &chunk, DC_FLOAT32), sum = flat(grad, &chunk, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, 7, shape, 1, &weights, &sum, 0, DC_DTYPE_NONE));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, 1));
  dc_tensor full = DC_TENSOR_INIT, gradient = flat(whole, shape, DC_FLOAT32);
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 7, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 7));
  OK(r, put(c, found, full.data, sizeof found));
  for (int64_t i = 0; i < NUMEL; i++) {
    CHECK(r, found[i] == value_of(7, i));
    found[i] = (float)(i + r->rank);
  }
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 7, 1));
  OK(r, put(c, whole, found, sizeof found));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, &gradient, GRAPH, 7));
  OK(r, dc_end_backward(r->ctx, 1, 0));
  OK(r, put(c, host, grad, bytes));
  for (int64_t i = 0; i < chunk && r->rank * chunk + i < NUMEL; i++) {
    CHECK(r, host[i] == (float)(r->rank * chunk + i) + (float)(r->world - 1) / 2);
  }
  off_card(c, grad, bytes);
  off_card(c, whole, sizeof found);
  dc_buffer_release(shard);
}

static void by_itself(card_rank *c) {
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  OK(&c->r, dc_init(c->r.ctx, c->r.comm, NULL, 1000));
  one_step(c, DC_MEMORY_DEVICE);
}

static void test_processes_get_nccl(void **state) {
  (void)state;
  for (meeting meet = ON_PROCESSES; meet <= ON_TCP; meet++) {
    (void)clean_state(NULL);
    on_cards(2, meet, 100 * second, by_itself);
    assert_int_equal(cudasim_calls("ncclCommInitRankConfig"), 2 * 2);
    assert_int_equal(cudasim_calls("ncclMemAlloc"), 0);
    nothing_left();
  }
}

static void is_refused(card_rank *c) {
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  FAILS(&c->r, dc_init(c->r.ctx, c->r.comm, NULL, 1000), DC_E_UNSUPPORTED,
        "dc_init: ranks of this communicator (local) exchange memory of device \"cuda:");
  CHECK(&c->r, strstr(dc_last_error(), "2.18.5, 2.19 or later is needed") != NULL);
}

static void test_without_nccl_init_says_why(void **state) {
  (void)state;
  ncclsim_set_version(21805);
  on_cards(2, ON_PROCESSES, 100 * second, is_refused);
  nothing_left();
}

static int32_t shards = DC_MEMORY_SHARED;

static void registered(card_rank *c) {
  const dc_config config = {.struct_size = sizeof config, .symmetric_memory = 1};
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  OK(&c->r, dc_init(c->r.ctx, c->r.comm, &config, 1000));
  one_step(c, shards);
}

static void test_symmetric_memory_is_registered(void **state) {
  (void)state;
  on_cards(2, ON_TCP, 100 * second, registered);
  (void)clean_state(NULL);
  on_cards(2, ON_PROCESSES, 100 * second, registered);
  assert_true(cudasim_calls("ncclCommRegister") >= 2 * 2); /* for the shards, and for the gathered weights */
  assert_int_equal(cudasim_calls("ncclCommRegister"), cudasim_calls("ncclMemFree"));
  nothing_left();
}

/* The parts are ragged, so broadcasts move them into registered memory. */
static void test_shards_that_are_not_registered(void **state) {
  (void)state;
  shards = DC_MEMORY_DEVICE;
  on_cards(2, ON_PROCESSES, 100 * second, registered);
  shards = DC_MEMORY_SHARED;
  assert_true(cudasim_calls("ncclBroadcast") > 0);
  nothing_left();
}

/* ---- over the caller's collectives ---- */

static int32_t call_gather(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  dc_comm *host = user;
  int64_t all = count * dc_comm_size(host);
  dc_tensor from = flat((void *)(uintptr_t)send, &count, dtype), to = flat(recv, &all, dtype);
  return dc_comm_all_gather(host, &from, &to, NULL, NULL);
}

static int32_t call_reduce(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  dc_comm *host = user;
  int64_t all = count * dc_comm_size(host);
  dc_tensor from = flat((void *)(uintptr_t)send, &all, dtype), to = flat(recv, &count, dtype);
  return dc_comm_reduce_scatter(host, &from, &to, NULL, DC_SUM, NULL);
}

static int32_t call_broadcast(void *data, int64_t bytes, int32_t root, void *user) {
  dc_tensor tensor = flat(data, &bytes, DC_INT8);
  return dc_comm_broadcast(user, &tensor, root, NULL);
}

static int32_t call_barrier(void *user) {
  return dc_comm_barrier(user);
}

static void over_callers(card_rank *c) {
  dc_comm_callbacks table = DC_COMM_CALLBACKS_INIT;
  dc_comm *own;
  table.all_gather = call_gather;
  table.reduce_scatter = call_reduce;
  table.broadcast = call_broadcast;
  table.barrier = call_barrier;
  table.user = c->r.comm;
  OK(&c->r, dc_comm_create_external(&table, c->r.rank, c->r.world, NULL, &own));
  dc_status status = dc_context_create(c->r.device, NULL, &c->r.ctx);
  status = status != DC_OK ? status : dc_init(c->r.ctx, own, NULL, 1000);
  dc_comm_destroy(own);
  OK(&c->r, status);
  one_step(c, DC_MEMORY_DEVICE);
  dc_context_destroy(c->r.ctx);
  c->r.ctx = NULL;
}

static void test_over_the_callers_collectives(void **state) {
  (void)state;
  on_cards(2, ON_THREADS, 100 * second, over_callers);
  assert_int_equal(cudasim_calls("ncclCommInitRankConfig"), 2); /* one per rank: the caller provides no second group */
  nothing_left();
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_processes_get_nccl),
      TEST(test_without_nccl_init_says_why),
      TEST(test_symmetric_memory_is_registered),
      TEST(test_shards_that_are_not_registered),
      TEST(test_over_the_callers_collectives),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
