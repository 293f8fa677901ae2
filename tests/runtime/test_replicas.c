/* Hybrid sharding: with any number of replicas, at every stage, a training has the bits of plain ZeRO on as many ranks.
 * On threads, processes and TCP. Gradients are added over micro-batches, of 16 bits too, and larger than a bucket. */
#include "comm_data.h"

enum { PARAMS = 4, STEPS = 3, BUCKET = 4096, LARGEST = 70001 };

static const int64_t numels[PARAMS] = {185, 7, LARGEST, 1};
static const int32_t grad_types[PARAMS] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT32, DC_FLOAT64};

typedef struct setting {
  int32_t stage, replicas;
  uint64_t *hashes; /* one a rank */
  int64_t *wire;    /* of reductions, one a rank; NULL: not wanted */
} setting;

typedef struct trainer {
  const setting *s;
  dc_comm *comm, *group; /* all ranks; those that share the parameters */
  dc_device *device;
  dc_context *context;
  float *whole[PARAMS]; /* weights, as all ranks know them */
  float *own[PARAMS];   /* this rank's part */
  float *grad[PARAMS];  /* of its part; stage 0: whole */
  int64_t offsets[PARAMS], counts[PARAMS];
} trainer;

static int open_trainer(trainer *t) {
  const int32_t replicas = t->s->replicas, size = dc_comm_size(t->comm) / replicas;
  dc_config config = {.struct_size = sizeof config, .replicas = replicas, .check_finite = 1};
  CHECK_OK(dc_comm_split(t->comm, dc_comm_rank(t->comm) / size, 0, &t->group));
  CHECK_OK(dc_device_open("cpu", NULL, &t->device));
  CHECK_OK(dc_context_create(t->device, NULL, &t->context));
  CHECK_OK(dc_init(t->context, t->comm, &config, BUCKET));
  for (int64_t i = 0; i < PARAMS; i++) {
    CHECK_OK(dc_shard_range(numels[i], dc_comm_rank(t->group), size, &t->offsets[i], &t->counts[i]));
    t->whole[i] = make(DC_FLOAT32, 50 + (int32_t)i, numels[i]);
    t->own[i] = malloc((size_t)numels[i] * sizeof(float));
    t->grad[i] = calloc((size_t)numels[i], sizeof(float));
    memcpy(t->own[i], t->whole[i] + t->offsets[i], (size_t)t->counts[i] * sizeof(float));
    const bool sharded = t->s->stage == 3;
    const dc_tensor weights = flat(sharded ? t->own[i] : t->whole[i], sharded ? &t->counts[i] : &numels[i], DC_FLOAT32);
    dc_tensor grad = flat(t->grad[i], t->s->stage == 0 ? &numels[i] : &t->counts[i], DC_FLOAT32);
    CHECK_OK(sharded ? dc_register_z3_param(t->context, i, &numels[i], 1, &weights, &grad, 0, DC_DTYPE_NONE)
                     : dc_register_param(t->context, i, &numels[i], 1, &weights, &grad,
                                         t->s->stage == 0 ? 0 : t->offsets[i]));
  }
  const int64_t ids[PARAMS] = {0, 1, 2, 3};
  CHECK_OK(t->s->stage == 0   ? dc_register_graph_z0(t->context, 1, ids, PARAMS)
           : t->s->stage == 1 ? dc_register_graph_z1(t->context, 1, ids, PARAMS)
           : t->s->stage == 2 ? dc_register_graph_z2(t->context, 1, ids, PARAMS)
                              : dc_register_graph_z3(t->context, 1, ids, PARAMS));
  return 0;
}

static void close_trainer(trainer *t) {
  dc_context_destroy(t->context);
  dc_device_destroy(t->device);
  dc_comm_destroy(t->group);
  for (int i = 0; i < PARAMS; i++) {
    free(t->whole[i]);
    free(t->own[i]);
    free(t->grad[i]);
  }
}

/* A gradient that depends on weights, rank and step. */
static int reduce_param(const trainer *t, int64_t i, const float *weights, int step, int micro) {
  float *values = make(DC_FLOAT32, dc_comm_rank(t->comm) * 7 + step * 3 + micro, numels[i]);
  void *grad = malloc((size_t)numels[i] * 8);
  for (int64_t k = 0; k < numels[i]; k++) {
    values[k] = values[k] / 90.0f + weights[k] * 0.01f;
  }
  dc__cast(grad, grad_types[i], values, DC_FLOAT32, numels[i]);
  const dc_tensor tensor = flat(grad, &numels[i], grad_types[i]);
  CHECK_OK(dc_reduce_grad(t->context, &tensor, 1, i));
  free(grad);
  free(values);
  return 0;
}

static int run_backward(trainer *t, int step, int micro, bool update) {
  CHECK_OK(dc_start_backward(t->context, update));
  for (int64_t i = PARAMS - 1; i >= 0; i--) {
    const float *weights = t->whole[i];
    if (t->s->stage == 3) {
      dc_tensor full = DC_TENSOR_INIT;
      CHECK_OK(dc_allgather_param(t->context, NULL, 1, i, DC_DTYPE_NONE, &full));
      CHECK_OK(dc_wait_allgather(t->context, NULL, 1, i));
      weights = full.data;
      CHECK(memcmp(weights, t->whole[i], (size_t)numels[i] * sizeof(float)) == 0);
    }
    CHECK(reduce_param(t, i, weights, step, micro) == 0);
    if (t->s->stage == 3) {
      CHECK_OK(dc_release_param(t->context, NULL, 1, i, 1));
    }
  }
  CHECK_OK(dc_end_backward(t->context, 1, 0));
  return 0;
}

/* Each rank changes its part; the group's ranks tell each other. */
static int update_weights(trainer *t) {
  for (int64_t i = 0; i < PARAMS; i++) {
    const float *grad = t->grad[i] + (t->s->stage == 0 ? t->offsets[i] : 0);
    int64_t counts[DC__COMM_MAX_WORLD];
    for (int32_t r = 0; r < dc_comm_size(t->group); r++) {
      int64_t offset;
      CHECK_OK(dc_shard_range(numels[i], r, dc_comm_size(t->group), &offset, &counts[r]));
    }
    for (int64_t k = 0; k < t->counts[i]; k++) {
      t->own[i][k] -= 0.1f * grad[k];
    }
    const dc_tensor part = flat(t->own[i], &t->counts[i], DC_FLOAT32);
    dc_tensor whole = flat(t->whole[i], &numels[i], DC_FLOAT32);
    CHECK_OK(dc_comm_all_gather(t->group, &part, &whole, counts, NULL));
  }
  CHECK_OK(dc_context_params_updated(t->context, NULL, 0));
  return 0;
}

static int run_steps(trainer *t) {
  int32_t finite = 0;
  for (int step = 0; step < STEPS; step++) {
    CHECK(run_backward(t, step, 0, step == 2) == 0); /* the last step has one micro-batch */
    CHECK(step == 2 || run_backward(t, step, 1, true) == 0);
    CHECK_OK(dc_context_grads_finite(t->context, &finite, NULL));
    CHECK(finite == 1 && update_weights(t) == 0);
  }
  return 0;
}

static int train(dc_comm *comm, void *arg) {
  trainer t = {.s = arg, .comm = comm};
  uint64_t hash = UINT64_C(14695981039346656037);
  dc_memory_stats stats = {.struct_size = sizeof stats};
  CHECK(open_trainer(&t) == 0 && run_steps(&t) == 0);
  CHECK_OK(dc_context_get_memory_stats(t.context, &stats));
  for (int i = 0; i < PARAMS; i++) {
    const unsigned char *bytes = (const unsigned char *)t.whole[i];
    for (size_t k = 0; k < (size_t)numels[i] * sizeof(float); k++) {
      hash = (hash ^ bytes[k]) * UINT64_C(1099511628211);
    }
  }
  t.s->hashes[dc_comm_rank(comm)] = hash;
  if (t.s->wire != NULL) {
    t.s->wire[dc_comm_rank(comm)] = stats.reduce_wire_bytes;
  }
  close_trainer(&t);
  return 0;
}

typedef int (*group_fn)(int32_t world, int64_t timeout_ns, rank_fn fn, void *arg);

static uint64_t train_on(group_fn on, int32_t world, int32_t stage, int32_t replicas) {
  uint64_t hashes[16] = {0};
  setting s = {.stage = stage, .replicas = replicas, .hashes = hashes};
  assert_int_equal(on(world, 60000 * MS, train, &s), 0);
  for (int32_t r = 1; r < world; r++) {
    assert_true(hashes[r] == hashes[0]);
  }
  return hashes[0];
}

/* Replicas and their groups' sizes: even and uneven, a replica a rank, one group. */
static void test_the_bits_of_plain_zero(void **state) {
  static const int32_t layouts[][2] = {{4, 2}, {4, 4}, {6, 2}, {6, 3}};
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    for (size_t i = 0; i < DC__COUNT(layouts); i++) {
      const uint64_t plain = train_on(on_threads, layouts[i][0], stage, 1);
      assert_true(train_on(on_threads, layouts[i][0], stage, layouts[i][1]) == plain);
    }
    assert_true(train_on(on_tcp, 4, stage, 2) == train_on(on_threads, 4, stage, 1));
  }
}

/* ---- memory ---- */

static atomic_int allocations;

void *__real_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __real_dc__calloc(count, bytes);
}

/* Blocks of ranges are used again: at most as many are made as a step has flushes, however many steps there are. */
static int train_long(dc_comm *comm, void *arg) {
  enum { MORE = 10 };
  trainer t = {.s = arg, .comm = comm};
  dc_memory_stats stats = {.struct_size = sizeof stats}, later = {.struct_size = sizeof later};
  CHECK(open_trainer(&t) == 0 && run_steps(&t) == 0);
  CHECK_OK(dc_context_get_memory_stats(t.context, &stats));
  CHECK_OK(dc_comm_barrier(comm));
  const int before = atomic_load(&allocations);
  CHECK_OK(dc_comm_barrier(comm));
  for (int i = 0; i < MORE; i++) {
    CHECK(run_steps(&t) == 0);
  }
  CHECK_OK(dc_comm_barrier(comm));
  const int made = atomic_load(&allocations) - before;
  CHECK_OK(dc_comm_barrier(comm));
  CHECK_OK(dc_context_get_memory_stats(t.context, &later));
  const int64_t flushes = (later.flushes - stats.flushes) / MORE; /* of STEPS steps */
  if (made > dc_comm_size(comm) * flushes) {
    fprintf(stderr, "%d ranks made %d blocks in %d flushes\n", dc_comm_size(comm), made, MORE * (int)flushes);
    return 1;
  }
  close_trainer(&t);
  return 0;
}

static void test_steady_steps_allocate_nothing(void **state) {
  uint64_t hashes[4];
  setting s = {.stage = 2, .replicas = 2, .hashes = hashes};
  (void)state;
  assert_int_equal(on_threads(4, 60000 * MS, train_long, &s), 0);
}

/* ---- bytes ---- */

static int64_t piece(int64_t count, int32_t parts, int32_t at) {
  int64_t offset, own;
  return dc_shard_range(count, at, parts, &offset, &own) == DC_OK ? own : -1;
}

/* Of stage 2 a rank gets three other ranks' data of its piece, and its replica's means. */
static void test_bytes(void **state) {
  uint64_t hashes[4];
  int64_t wire[4];
  const setting s = {.stage = 2, .replicas = 2, .hashes = hashes, .wire = wire};
  (void)state;
  assert_int_equal(on_threads(4, 0, train, (void *)(uintptr_t)&s), 0);
  for (int32_t r = 0; r < 4; r++) {
    int64_t expected = 0;
    for (int i = 0; i < PARAMS; i++) {
      const int64_t part = piece(numels[i], 2, r % 2);
      const int64_t width = 65536 / 2, cut = part < width ? part : width; /* a large part goes in pieces of `width` */
      const int64_t own = piece(cut, 2, r / 2) + piece(part - cut, 2, r / 2);
      expected += 5 * (own * 3 * (int64_t)dc_dtype_size(grad_types[i]) + (part - own) * 4);
    }
    assert_true(wire[r] == expected);
  }
}

/* ---- errors ---- */

static int refuse(dc_comm *comm, void *arg) {
  dc_device *device = NULL;
  dc_context *contexts[3] = {NULL};
  dc_config config = DC_CONFIG_INIT;
  (void)arg;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  for (int i = 0; i < 3; i++) {
    CHECK_OK(dc_context_create(device, NULL, &contexts[i]));
  }
  config.replicas = 3;
  CHECK(dc_init(contexts[0], comm, &config, BUCKET) == DC_E_INVALID);
  CHECK_SAYS("dc_init: config.replicas = 3 does not divide the number of ranks, which is 4");
  config.replicas = -1;
  CHECK(dc_init(contexts[1], comm, &config, BUCKET) == DC_E_INVALID);
  config.replicas = dc_comm_rank(comm) == 2 ? 4 : 2;
  CHECK(dc_init(contexts[2], comm, &config, BUCKET) == DC_E_MISMATCH);
  CHECK_SAYS("dc_init: replicas = ");
  for (int i = 0; i < 3; i++) {
    dc_context_destroy(contexts[i]);
  }
  dc_device_destroy(device);
  return 0;
}

static void test_errors(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, refuse, NULL), 0);
}

/* Rank 3 aborts: the ranks of both groups end with its reason. */
static int one_group_fails(dc_comm *comm, void *arg) {
  uint64_t hashes[4];
  const setting s = {.stage = 3, .replicas = 2, .hashes = hashes};
  trainer t = {.s = &s, .comm = comm};
  (void)arg;
  CHECK(open_trainer(&t) == 0);
  dc_status status = dc_comm_barrier(comm); /* which may end with rank 3's reason already */
  if (dc_comm_rank(comm) == 3) {
    dc_comm_abort(comm, "rank 3 has enough");
  }
  for (int i = 0; status == DC_OK; i++) {
    status = dc_start_backward(t.context, 1);
    for (int64_t id = 0; status == DC_OK && id < PARAMS; id++) {
      const dc_tensor tensor = flat(t.whole[id], &numels[id], DC_FLOAT32);
      status = dc_reduce_grad(t.context, &tensor, 1, id);
    }
    status = status != DC_OK ? status : dc_end_backward(t.context, 1, 0);
  }
  CHECK(status == DC_E_ABORTED);
  CHECK_SAYS("rank 3 has enough");
  close_trainer(&t);
  return 0;
}

static void test_a_failure_reaches_all(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, one_group_fails, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_bits_of_plain_zero),
      cmocka_unit_test(test_steady_steps_allocate_nothing),
      cmocka_unit_test(test_bytes),
      cmocka_unit_test(test_errors),
      cmocka_unit_test(test_a_failure_reaches_all),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
