/* symmetric_memory on NCCL: gathers use windows where all ranks' memory has the same layout, and broadcasts elsewhere.
 * Also with hosts ahead of their cards, in graphs, and with versions of NCCL and cards that have no windows. */
#include "nccl_ranks.h"

static const int64_t second = INT64_C(1000000000);

enum { PARAMS = 4, NUMEL = 6 * 5000, GRAPH = 1 };

static void nothing_left(void) {
  assert_int_equal(cudasim_live(), 0);
}

/* A rank's shards, contiguous in one block. */
typedef struct model {
  card_rank *c;
  dc_buffer *shards;
  float *grads;
  int64_t chunk;
} model;

static float weight(int64_t id, int64_t i) {
  return (float)((id * 131 + i) % 1009);
}

static dc_status make(card_rank *c, int32_t memory, model *m) {
  static const int64_t shape = NUMEL;
  const dc_config config = {.struct_size = sizeof config, .symmetric_memory = 1};
  int64_t ids[PARAMS];
  float host[NUMEL];
  *m = (model){.c = c, .chunk = NUMEL / c->r.world};
  size_t bytes = (size_t)m->chunk * sizeof(float);
  DC__TRY(dc_context_create(c->r.device, NULL, &c->r.ctx));
  DC__TRY(dc_init(c->r.ctx, c->r.comm, &config, 1000));
  DC__TRY(dc_context_set_stream(c->r.ctx, c->stream));
  DC__TRY(dc_context_alloc(c->r.ctx, (int64_t)(PARAMS * bytes), memory, &m->shards));
  m->grads = on_card(c, PARAMS * bytes);
  for (int64_t id = 0; id < PARAMS; id++) {
    for (int64_t i = 0; i < m->chunk; i++) {
      host[i] = weight(id, c->r.rank * m->chunk + i);
    }
    char *shard = (char *)dc_buffer_data(m->shards) + (size_t)id * bytes;
    DC__TRY(put(c, shard, host, bytes));
    dc_tensor w = flat(shard, &m->chunk, DC_FLOAT32), g = flat(m->grads + id * m->chunk, &m->chunk, DC_FLOAT32);
    DC__TRY(dc_register_z3_param(c->r.ctx, id, &shape, 1, &w, &g, 0, DC_DTYPE_NONE));
    ids[id] = id;
  }
  return dc_register_graph_z3(c->r.ctx, GRAPH, ids, PARAMS);
}

static void end(model *m) {
  card_rank *c = m->c;
  dc_buffer_release(m->shards);
  dc_context_destroy(c->r.ctx);
  c->r.ctx = NULL;
  off_card(c, m->grads, PARAMS * (size_t)m->chunk * sizeof(float));
}

static void check(card_rank *c, int64_t id, int32_t dtype, const float *copy) {
  float found[NUMEL], wanted[NUMEL];
  OK(&c->r, put(c, found, copy, sizeof found));
  for (int64_t i = 0; i < NUMEL; i++) {
    wanted[i] = weight(id, i);
  }
  if (dtype == DC_FLOAT16) {
    uint16_t half[NUMEL];
    dc__cast(half, DC_FLOAT16, wanted, DC_FLOAT32, NUMEL);
    dc__cast(wanted, DC_FLOAT32, half, DC_FLOAT16, NUMEL);
  }
  CHECK(&c->r, memcmp(found, wanted, sizeof found) == 0);
}

/* Gathers and releases all parameters, two at a time, without waiting, and copies the results. */
static void use_all(model *m, int32_t dtype, float *copies) {
  card_rank *c = m->c;
  rank *r = &c->r;
  for (int64_t id = 0; id < PARAMS; id += 2) {
    dc_tensor full[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
    for (int64_t k = 0; k < 2; k++) {
      OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id + k, dtype, &full[k]));
    }
    for (int64_t k = 0; k < 2; k++) {
      OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id + k));
      dc__stream_cast(c->stream, copies + (id + k) * NUMEL, DC_FLOAT32, full[k].data, dtype, NUMEL);
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, id + k, 1));
    }
  }
}

static void check_all(model *m, int32_t dtype, float *copies) {
  for (int64_t id = 0; id < PARAMS; id++) {
    check(m->c, id, dtype, copies + id * NUMEL);
  }
}

static void round_trip(model *m, int32_t dtype) {
  float *copies = on_card(m->c, PARAMS * NUMEL * sizeof(float));
  use_all(m, dtype, copies);
  check_all(m, dtype, copies);
  off_card(m->c, copies, PARAMS * NUMEL * sizeof(float));
}

static int32_t kind = DC_MEMORY_SHARED;
static bool ahead;

static void rounds(card_rank *c) {
  model m;
  OK(&c->r, make(c, kind, &m));
  OK(&c->r, dc_comm_barrier(c->r.comm));
  if (ahead && c->r.rank == 0) {
    cudasim_hold();
  }
  OK(&c->r, dc_comm_barrier(c->r.comm));
  round_trip(&m, DC_FLOAT32);
  int opened = cudasim_calls("ncclCommWindowRegister");
  OK(&c->r, dc_comm_barrier(c->r.comm));
  round_trip(&m, DC_FLOAT32);
  round_trip(&m, DC_FLOAT16);
  round_trip(&m, DC_FLOAT32);
  CHECK(&c->r, opened == cudasim_calls("ncclCommWindowRegister")); /* a steady step registers nothing */
  end(&m);
}

/* Checks how many gathers the ranks' runs of rounds() made, by call. */
static void all_went(int32_t world, int gathers, int broadcasts, int in_windows) {
  assert_int_equal(cudasim_calls("ncclAllGather"), world * gathers);
  assert_int_equal(cudasim_calls("ncclBroadcast"), world * broadcasts);
  assert_int_equal(ncclsim_through_windows(), world * in_windows);
  nothing_left();
}

static void test_gathers_go_through_windows(void **state) {
  for (int32_t world = 2; world <= 3; world++) {
    clean_state(state);
    on_cards(world, ON_PROCESSES, 100 * second, rounds);
    all_went(world, 4 * PARAMS, 0, 4 * PARAMS);
    assert_int_equal(cudasim_calls("ncclCommWindowRegister"), cudasim_calls("ncclCommWindowDeregister"));
  }
}

/* Gathers also use windows if the shards are in memory that is not registered. */
static void test_shards_on_the_host(void **state) {
  (void)state;
  kind = DC_MEMORY_DEVICE;
  on_cards(2, ON_PROCESSES, 100 * second, rounds);
  kind = DC_MEMORY_SHARED;
  all_went(2, 4 * PARAMS, 0, 4 * PARAMS);
}

/* An event that has passed on only one rank's card must not change that rank's layout of memory. */
static void test_hosts_ahead_of_their_cards(void **state) {
  (void)state;
  ahead = true;
  on_cards(2, ON_PROCESSES, 100 * second, rounds);
  ahead = false;
  all_went(2, 4 * PARAMS, 0, 4 * PARAMS);
}

static void one_shard_elsewhere(card_rank *c) {
  model m;
  OK(&c->r, make(c, c->r.rank == 0 ? DC_MEMORY_SHARED : DC_MEMORY_DEVICE, &m));
  round_trip(&m, DC_FLOAT32);
  end(&m);
}

static void test_without_windows(void **state) {
  ncclsim_set_version(22606);
  on_cards(2, ON_PROCESSES, 100 * second, rounds);
  all_went(2, 4 * PARAMS, 0, 0);
  assert_int_equal(cudasim_calls("ncclCommWindowRegister"), 0);
  clean_state(state);
  ncclsim_set_version(22606);
  on_cards(2, ON_PROCESSES, 100 * second, one_shard_elsewhere);
  all_went(2, 0, 2 * PARAMS, 0); /* no gather from shards of which only some are registered */
  clean_state(state);
  ncclsim_set_windows(false);
  on_cards(2, ON_PROCESSES, 100 * second, rounds);
  all_went(2, 4 * PARAMS, 0, 0);
  assert_true(cudasim_calls("ncclCommWindowRegister") > 0);
  assert_int_equal(cudasim_calls("ncclCommWindowDeregister"), 0);
}

/* ---- ranks out of step ---- */

/* Rank 1 takes a parameter, so its later ones lie elsewhere until it gives the memory back. */
static void out_of_step(card_rank *c) {
  model m;
  dc_tensor full = DC_TENSOR_INIT;
  dc_buffer *kept = NULL;
  OK(&c->r, make(c, DC_MEMORY_SHARED, &m));
  round_trip(&m, DC_FLOAT32);
  OK(&c->r, dc_allgather_param(c->r.ctx, NULL, GRAPH, 0, DC_DTYPE_NONE, &full));
  if (c->r.rank == 1) {
    OK(&c->r, dc_take_param(c->r.ctx, GRAPH, 0, DC_DTYPE_NONE, &kept));
  } else {
    OK(&c->r, dc_release_param(c->r.ctx, NULL, GRAPH, 0, 1));
  }
  round_trip(&m, DC_FLOAT32);
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  dc_buffer_release(kept);
  round_trip(&m, DC_FLOAT32);
  end(&m);
}

static void test_ranks_out_of_step(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, out_of_step);
  all_went(2, 2 * PARAMS + 1, 2 * PARAMS, 2 * PARAMS + 1);
}

static void test_one_rank_with_shards_on_the_host(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, one_shard_elsewhere);
  all_went(2, 0, 2 * PARAMS, 0);
}

/* Rank 0 gathers within one block, rank 1 from one block into another. None is a window yet, and all offsets agree. */
static void other_blocks(card_rank *c) {
  enum { BYTES = 8192, COUNT = 64 };
  int64_t count = COUNT, all = 2 * COUNT;
  float sent[2 * COUNT], found[2 * COUNT];
  void *from = NULL, *to = NULL;
  for (int i = 0; i < 2 * COUNT; i++) {
    sent[i] = weight(3, i);
  }
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, c->nccl->ops->heap_alloc(c->nccl, BYTES, &from));
  to = from;
  if (c->r.rank == 1) {
    OK(&c->r, c->nccl->ops->heap_alloc(c->nccl, BYTES, &to));
  }
  OK(&c->r, put(c, from, sent + c->r.rank * COUNT, COUNT * sizeof(float)));
  float *result = (float *)to + BYTES / 2 / sizeof(float);
  dc_tensor own = flat(from, &count, DC_FLOAT32), whole = flat(result, &all, DC_FLOAT32);
  OK(&c->r, dc_comm_all_gather(c->nccl, &own, &whole, NULL, c->stream));
  OK(&c->r, put(c, found, result, sizeof found));
  CHECK(&c->r, memcmp(found, sent, sizeof found) == 0);
  c->nccl->ops->heap_free(c->nccl, from, BYTES);
  if (to != from) {
    c->nccl->ops->heap_free(c->nccl, to, BYTES);
  }
}

static void test_ranks_with_other_blocks(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 30 * second, other_blocks);
  all_went(2, 0, 2, 0);
  assert_int_equal(cudasim_calls("ncclCommWindowRegister"), 0);
}

/* ---- graphs ---- */

/* A capture has its own memory, which is not registered, since no capture allows that. */
static void captured(card_rank *c) {
  model m;
  dc_stream *own = c->stream;
  void *native = cudasim_stream();
  OK(&c->r, dc_stream_wrap(c->r.device, native, &c->stream));
  OK(&c->r, make(c, DC_MEMORY_SHARED, &m));
  round_trip(&m, DC_FLOAT32);
  int opened = cudasim_calls("ncclCommWindowRegister");
  OK(&c->r, dc_comm_barrier(c->r.comm));
  float *copies = on_card(c, PARAMS * NUMEL * sizeof(float));
  cudasim_capture(native);
  use_all(&m, DC_FLOAT32, copies);
  CHECK(&c->r, cudasim_capture_end(native) && c->r.failure[0] == '\0');
  for (int i = 0; i < 2; i++) {
    cudasim_launch(native);
    check_all(&m, DC_FLOAT32, copies);
  }
  CHECK(&c->r, opened == cudasim_calls("ncclCommWindowRegister"));
  round_trip(&m, DC_FLOAT32);
  off_card(c, copies, PARAMS * NUMEL * sizeof(float));
  cudasim_graph_end();
  end(&m);
  dc_stream_destroy(c->stream);
  c->stream = own;
  cudasim_stream_end(native);
}

static void test_captures(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, captured);
  assert_int_equal(ncclsim_through_windows(), 2 * 2 * PARAMS);
  nothing_left();
}

/* ---- a rank that never comes ---- */

static void loses_one(card_rank *c) {
  model m;
  dc_tensor full = DC_TENSOR_INIT;
  OK(&c->r, make(c, DC_MEMORY_SHARED, &m));
  OK(&c->r, dc_comm_barrier(c->r.comm));
  if (c->r.rank == 0) {
    cudasim_fail("ncclCommWindowRegister", 0, 3);
  }
  OK(&c->r, dc_comm_barrier(c->r.comm));
  dc_status status = dc_allgather_param(c->r.ctx, NULL, GRAPH, 0, DC_DTYPE_NONE, &full);
  for (int64_t k = 0; status == DC_OK && k < 100000; k++) {
    usleep(1000);
    status = dc_context_check(c->r.ctx);
  }
  bool named = strstr(dc_last_error(), "ncclCommWindowRegister") != NULL;
  end(&m);
  CHECK(&c->r, status != DC_OK && named);
}

static void test_a_registration_fails(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, loses_one);
  nothing_left();
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_gathers_go_through_windows), TEST(test_shards_on_the_host),
      TEST(test_hosts_ahead_of_their_cards), TEST(test_without_windows),
      TEST(test_ranks_out_of_step),          TEST(test_one_rank_with_shards_on_the_host),
      TEST(test_ranks_with_other_blocks),    TEST(test_captures),
      TEST(test_a_registration_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
