/* Hybrid sharding: with any number of replicas, at every stage, a training has the bits of plain ZeRO on as many ranks.
 * On threads, processes and TCP. Gradients are added over micro-batches, also 16-bit ones, and are larger than a
 * bucket. */
#include "runtime/runtime.h"

#include "replica_trainer.h"

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

/* Replicas and group sizes: even and uneven, one rank per replica, a single group. */
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
static _Thread_local int32_t allocations_left; /* allocations of this thread until one fails; 0: all succeed */

void *__real_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  if (allocations_left > 0 && --allocations_left == 0) {
    return NULL;
  }
  return __real_dc__calloc(count, bytes);
}

/* Blocks of ranges are reused: their number is at most that of a step's flushes, however many steps there are. */
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

/* At stage 2 a rank receives three other ranks' data for its piece, and its replica's means. */
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
      const int64_t width = 65536 / 2, cut = part < width ? part : width; /* a large part moves in pieces of `width` */
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

static int32_t failing_allocation;
static atomic_bool has_failed;

/* On rank 1 an allocation fails. The other ranks may have finished by then, but none waits for it. */
static int begin_without_memory(dc_comm *comm, void *arg) {
  dc_device *device = NULL;
  dc_context *context = NULL;
  dc_config config = DC_CONFIG_INIT;
  (void)arg;
  config.replicas = 2;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &context));
  allocations_left = dc_comm_rank(comm) == 1 ? failing_allocation : 0;
  const dc_status status = dc_init(context, comm, &config, BUCKET);
  if (dc_comm_rank(comm) == 1) {
    atomic_store(&has_failed, allocations_left == 0);
  }
  allocations_left = 0;
  CHECK(status != DC_E_TIMEOUT);
  dc_context_destroy(context);
  dc_device_destroy(device);
  return 0;
}

static void test_a_rank_without_memory(void **state) {
  (void)state;
  do {
    failing_allocation++;
    assert_int_equal(on_threads(4, 60000 * MS, begin_without_memory, NULL), 0);
  } while (atomic_load(&has_failed));
  assert_true(failing_allocation > 5);
}

/* Giving a default explicitly means the same as leaving it out. */
static int means_the_default(dc_comm *comm, void *arg) {
  dc_device *device = NULL;
  dc_context *context = NULL;
  const dc_config config = {
      .struct_size = sizeof config, .double_buffer = dc_comm_rank(comm) % 2, .replicas = dc_comm_rank(comm) / 2};
  (void)arg;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &context));
  CHECK_OK(dc_init(context, comm, &config, BUCKET));
  dc_context_destroy(context);
  dc_device_destroy(device);
  return 0;
}

static void test_defaults(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, means_the_default, NULL), 0);
}

static bool verifies(const dc_comm *comm) {
  return comm->ops->has_checksums(comm);
}

/* The groups that a context makes for its replicas also verify data, even if the caller turns that on later. */
static int verify(dc_comm *comm, void *arg) {
  uint64_t hashes[4];
  const setting s = {.stage = 3, .replicas = 2, .hashes = hashes};
  trainer t = {.s = &s, .comm = comm};
  (void)arg;
  CHECK(open_trainer(&t) == 0);
  for (int32_t on = 1; on >= 0; on--) {
    CHECK_OK(dc_comm_set_checksums(comm, on));
    CHECK_OK(dc_comm_barrier(comm));
    CHECK(run_steps(&t) == 0);
    CHECK(verifies(t.context->gather_comm) == on && verifies(t.context->replica_comm) == on);
    CHECK_OK(dc_comm_barrier(comm));
  }
  close_trainer(&t);
  return 0;
}

static void test_checksums(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, verify, NULL), 0);
  assert_int_equal(on_tcp(4, 0, verify, NULL), 0);
}

static void test_errors(void **state) {
  (void)state;
  assert_int_equal(on_threads(4, 0, refuse, NULL), 0);
}

/* Rank 3 aborts: the ranks of both groups get its reason. */
static int one_group_fails(dc_comm *comm, void *arg) {
  uint64_t hashes[4];
  const setting s = {.stage = 3, .replicas = 2, .hashes = hashes};
  trainer t = {.s = &s, .comm = comm};
  (void)arg;
  CHECK(open_trainer(&t) == 0);
  dc_status status = dc_comm_barrier(comm); /* rank 3's abort may already end it */
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

static atomic_int begins, ends;

/* Rank 0 gathers in its group, which rank 1 does not join. Rank 3, in the other group, aborts meanwhile. */
static int another_group_aborts(dc_comm *comm, void *arg) {
  uint64_t hashes[4];
  const setting s = {.stage = 3, .replicas = 2, .hashes = hashes};
  trainer t = {.s = &s, .comm = comm};
  const int32_t rank = dc_comm_rank(comm);
  dc_tensor full = DC_TENSOR_INIT;
  (void)arg;
  CHECK(open_trainer(&t) == 0);
  dc_status status = dc_comm_barrier(comm); /* rank 3's abort may already end it on other ranks, but not on rank 0 */
  if (rank == 0) {
    status = status != DC_OK ? status : dc_allgather_param(t.context, NULL, 1, 0, DC_DTYPE_NONE, &full);
    atomic_store(&begins, 1);
    status = status != DC_OK ? status : dc_wait_allgather(t.context, NULL, 1, 0);
    atomic_store(&ends, 1);
  }
  while (rank == 3 && atomic_load(&begins) == 0) {
    sleep_ms(1);
  }
  if (rank == 3) {
    dc_comm_abort(comm, "rank 3 has enough");
  }
  CHECK(rank != 0 || status == DC_E_ABORTED);
  while (atomic_load(&ends) == 0 || dc_comm_check(comm) == DC_OK) {
    sleep_ms(1); /* ending the context would tell its group */
  }
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  CHECK_SAYS("rank 3 aborted the group: rank 3 has enough");
  close_trainer(&t);
  return 0;
}

static void test_an_abort_ends_another_groups_wait(void **state) {
  static const group_fn transports[] = {on_threads, on_tcp};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(transports); i++) {
    atomic_store(&begins, 0);
    atomic_store(&ends, 0);
    assert_int_equal(transports[i](4, 60000 * MS, another_group_aborts, NULL), 0);
  }
}

/* Rank 2 gathers in its group, which rank 3 does not join. */
static int one_rank_is_late(dc_comm *comm, void *arg) {
  uint64_t hashes[4];
  const setting s = {.stage = 3, .replicas = 2, .hashes = hashes};
  trainer t = {.s = &s, .comm = comm};
  dc_tensor full = DC_TENSOR_INIT;
  (void)arg;
  CHECK(open_trainer(&t) == 0);
  if (dc_comm_rank(comm) == 2) {
    CHECK_OK(dc_allgather_param(t.context, NULL, 1, 0, DC_DTYPE_NONE, &full));
    const dc_status status = dc_wait_allgather(t.context, NULL, 1, 0);
    atomic_store(&ends, 1); /* before the text is compared, so that the others end */
    CHECK(status == DC_E_TIMEOUT);
    CHECK_SAYS("ranks 2 to 3, numbered from 0: rank 0 waited 2.0 s at allgather_param of parameter 0");
  }
  while (atomic_load(&ends) == 0) {
    sleep_ms(1);
  }
  close_trainer(&t);
  return 0;
}

static void test_an_error_in_a_group_names_its_ranks(void **state) {
  (void)state;
  atomic_store(&ends, 0);
  assert_int_equal(on_threads(4, 2000 * MS, one_rank_is_late, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_bits_of_plain_zero),
      cmocka_unit_test(test_steady_steps_allocate_nothing),
      cmocka_unit_test(test_bytes),
      cmocka_unit_test(test_defaults),
      cmocka_unit_test(test_checksums),
      cmocka_unit_test(test_errors),
      cmocka_unit_test(test_a_rank_without_memory),
      cmocka_unit_test(test_a_failure_reaches_all),
      cmocka_unit_test(test_an_abort_ends_another_groups_wait),
      cmocka_unit_test(test_an_error_in_a_group_names_its_ranks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
