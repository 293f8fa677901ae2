/* Shampoo and SOAP on a device that ranks share, and every call of the driver and of its libraries failing in turn; on
 * the simulated driver alone. */
#include "sides.h"

#include "device/cuda/cublaslt.h"
#include "device/cuda/cusolver.h"
#include "device/cuda/driver.h"

/* The thread sanitizer makes kernels slow: fewer of the calls fail in turn. */
#ifdef CUDASIM_TSAN
enum { FAILING = 41 };
#else
enum { FAILING = 7 };
#endif

/* Ranks that have a part of each parameter, on one device, which some of them share. */
typedef struct rank_of {
  pthread_t thread;
  dc_comm *comm;
  int32_t rank, world;
  make_fn make;
  const void *options;
  side s;
  char *failed;
} rank_of;

static void *run_one(void *arg) {
  rank_of *r = arg;
  dc_status status = r->make(&r->s, r->comm, r->options);
  status = status == DC_OK ? add_params(&r->s, r->rank, r->world) : status;
  for (int number = 1; number <= STEPS && status == DC_OK; number++) {
    status = step(&r->s, number);
  }
  if (status != DC_OK) {
    r->failed = strdup(dc_last_error());
    dc_comm_abort(r->comm, "failed");
  }
  dc_optimizer_destroy(r->s.optimizer);
  dc_comm_destroy(r->comm);
  return NULL;
}

/* The bits of one rank. */
static void agree(make_fn make, const void *options) {
  rank_of ranks[3];
  char one[PARAMS][4 * MOST], part[4 * MOST];
  for (int32_t world = 1; world <= 3; world++) {
    dc_comm *comms[3];
    assert_int_equal(dc_comm_create_threads(world, NULL, comms), DC_OK);
    for (int32_t r = 0; r < world; r++) {
      ranks[r] = (rank_of){.comm = comms[r], .rank = r, .world = world, .make = make, .options = options};
      open_side(&ranks[r].s, "cuda");
      if (r == 2) { /* on the first one's */
        dc_linalg_destroy(ranks[r].s.linalg);
        assert_int_equal(dc_linalg_create(ranks[0].s.device, NULL, &ranks[r].s.linalg), DC_OK);
      }
    }
    for (int32_t r = 0; r < world; r++) {
      assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_one, &ranks[r]), 0);
    }
    for (int32_t r = 0; r < world; r++) {
      pthread_join(ranks[r].thread, NULL);
    }
    for (int32_t r = 0; r < world; r++) {
      side *s = &ranks[r].s;
      if (ranks[r].failed != NULL) {
        fail_msg("rank %d of %d: %s", r, world, ranks[r].failed);
      }
      for (int p = 0; p < PARAMS; p++) {
        const size_t size = dc_dtype_size(shapes[p].dtype), bytes = (size_t)s->count[p] * size;
        move(s, world == 1 ? one[p] : part, s->weights[p], bytes);
        if (world > 1 && memcmp(one[p] + (size_t)s->offset[p] * size, part, bytes) != 0) {
          fail_msg("parameter %d of rank %d of %d has other bits", p, r, world);
        }
      }
    }
    for (int32_t r = world - 1; r >= 0; r--) {
      close_side(&ranks[r].s);
    }
  }
}

static void test_ranks(void **state) {
  (void)state;
  const dc_shampoo_options shampoo = options_of();
  const dc_soap_options soap = {sizeof soap, .precondition_frequency = 2, .max_block = 6};
  agree(make_shampoo, &shampoo);
  agree(make_soap, &soap);
}

/* Every call of the driver and of cuBLASLt in turn: the step fails or did not need it, and nothing stays behind. */
static int use(make_fn make, const void *options, const char *counted, const char *failing, int before) {
  side s;
  dc_tensor weight, grad;
  dc_status status;
  cudasim_reset();
  open_side(&s, "cuda");
  s.count[0] = numel_of(0);
  fill(&s, 0, false, 0);
  fill(&s, 0, true, 1);
  weight = flat(s.weights[0], &s.count[0], DC_FLOAT32);
  grad = flat(s.grads[0], &s.count[0], DC_FLOAT32);
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  status = make(&s, NULL, options);
  if (status == DC_OK) {
    status = dc_optimizer_add_param(s.optimizer, 0, shapes[0].sizes, 2, 0, s.count[0], DC_FLOAT32, NULL);
  }
  if (status == DC_OK) {
    status = dc_optimizer_step(s.optimizer, &weight, &grad, sizeof weight, 1, 1);
  }
  const int calls = cudasim_calls(counted) - begun;
  if ((status != DC_OK) != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  dc_optimizer_destroy(s.optimizer);
  close_side(&s);
  assert_int_equal(cudasim_live(), 0);
  return calls;
}

/* The solver's own failure is that of one root, and tolerated. */
static void test_a_solver_that_fails(void **state) {
  (void)state;
  const dc_shampoo_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  dc_tensor failures = DC_TENSOR_INIT;
  side s;
  open_side(&s, "cuda");
  assert_int_equal(make_shampoo(&s, NULL, &options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  cudasim_fail("cusolverDnXsyevd", 0, DC__SOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1), DC_OK);
  assert_int_equal(dc_get_optimizer_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 1);
  assert_int_equal(step(&s, 3), DC_OK);
  assert_int_equal(dc_optimizer_state(s.optimizer, 0, "failures.0.0", &failures), DC_OK);
  assert_int_equal(*(int64_t *)failures.data, 0);
  dc_optimizer_destroy(s.optimizer);
  close_side(&s);
}

/* A batch that there is no memory for: each root of it is computed alone. */
static void test_a_batch_that_fails(void **state) {
  (void)state;
  const dc_shampoo_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  side s;
  open_side(&s, "cuda");
  assert_int_equal(make_shampoo(&s, NULL, &options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  const int begun = cudasim_calls("cusolverDnXsyevBatched");
  cudasim_fail("cusolverDnXsyevBatched", 0, DC__SOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1), DC_OK);
  assert_true(cudasim_calls("cusolverDnXsyevBatched") > begun);
  assert_int_equal(dc_get_optimizer_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 0);
  dc_optimizer_destroy(s.optimizer);
  close_side(&s);
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync",  "cuMemsetD8Async",
                                          "cuMemAllocFromPoolAsync", "cublasLtCreate", "cublasLtMatmul",
                                          "cuStreamSynchronize"};
  (void)state;
  const dc_shampoo_options shampoo = options_of();
  const dc_soap_options soap = {sizeof soap, .max_block = 6};
  for (size_t f = 0; f < 2 * DC__COUNT(functions); f++) {
    const char *function = functions[f / 2];
    const make_fn make = f % 2 == 0 ? make_shampoo : make_soap;
    const void *options = f % 2 == 0 ? (const void *)&shampoo : &soap;
    const int calls = use(make, options, function, NULL, 0);
    assert_true(calls > 0);
    for (int before = 0; before < calls; before += FAILING) {
      (void)use(make, options, function, function, before);
    }
  }
  cudasim_reset();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_ranks),
      TEST(test_a_solver_that_fails),
      TEST(test_a_batch_that_fails),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
