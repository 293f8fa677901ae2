/* Shampoo and SOAP on a device that ranks share, and every call of the driver and of its libraries failing in turn; on
 * the simulated driver only. */
#include "optim_pair_ranks.h"

#include <math.h>

static void test_ranks(void **state) {
  (void)state;
  const dc_shampoo_options shampoo = options_of();
  const dc_soap_options soap = {sizeof soap, .precondition_frequency = 2, .max_block = 6};
  compare_ranks_with_one(make_shampoo, &shampoo);
  compare_ranks_with_one(make_soap, &soap);
}

/* If a QR fails, or cannot be started, one basis stays as it was. */
static void test_a_qr_that_fails(void **state) {
  static const char *const calls[] = {"cusolverDnSgeqrf", "cusolverDnSorgqr", "cusolver: QR"};
  const dc_soap_options options = {sizeof options, .precondition_frequency = 1};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(calls); i++) {
    dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
    device_optimizer s;
    open_optimizer(&s, "cuda");
    assert_int_equal(make_soap(&s, NULL, &options), DC_OK);
    assert_int_equal(add_params(&s, 0, 1), DC_OK);
    assert_int_equal(step(&s, 1), DC_OK);
    cudasim_fail(calls[i], 0, DC__CUSOLVER_ALLOC_FAILED);
    for (int number = 3; number < 5; number++) {
      assert_int_equal(step(&s, number), DC_OK);
      assert_int_equal(dc_optimizer_get_stats(s.optimizer, &stats), DC_OK);
      assert_int_equal(stats.failed_refreshes, 1);
    }
    dc_optimizer_destroy(s.optimizer);
    close_optimizer(&s);
  }
}

/* Without cuSOLVER the host computes the QR, with the same result within rounding. */
static void test_no_qr(void **state) {
  const dc_soap_options options = {sizeof options, .precondition_frequency = 1};
  float weights[2][64];
  (void)state;
  cudasim_reset();
  for (int k = 0; k < 2; k++) {
    const int begun = cudasim_calls("cusolverDnSgeqrf");
    device_optimizer s;
    open_optimizer(&s, "cuda");
    assert_int_equal(make_soap(&s, NULL, &options), DC_OK);
    assert_int_equal(add_params(&s, 0, 1), DC_OK);
    if (k == 0) {
      setenv("LIBDC_CUDA_LIB_DIR", "/nowhere", 1);
    }
    for (int number = 3; number < 6; number++) {
      assert_int_equal(step(&s, number), DC_OK);
    }
    unsetenv("LIBDC_CUDA_LIB_DIR");
    assert_int_equal(cudasim_calls("cusolverDnSgeqrf") > begun, k);
    move(&s, weights[k], s.weights[0], sizeof weights[k]);
    dc_optimizer_destroy(s.optimizer);
    close_optimizer(&s);
  }
  for (int i = 0; i < 64; i++) {
    assert_true(fabsf(weights[0][i] - weights[1][i]) <= 2e-4f);
  }
}

/* A failure of the solver affects one root, and is tolerated. */
static void test_a_solver_that_fails(void **state) {
  (void)state;
  const dc_shampoo_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  dc_tensor failures = DC_TENSOR_INIT;
  device_optimizer s;
  open_optimizer(&s, "cuda");
  assert_int_equal(make_shampoo(&s, NULL, &options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  cudasim_fail("cusolverDnXsyevd", 0, DC__CUSOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1), DC_OK);
  assert_int_equal(dc_optimizer_get_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 1);
  assert_int_equal(step(&s, 3), DC_OK);
  assert_int_equal(dc_optimizer_get_state(s.optimizer, 0, "failures.0.0", &failures), DC_OK);
  assert_int_equal(*(int64_t *)failures.data, 0);
  dc_optimizer_destroy(s.optimizer);
  close_optimizer(&s);
}

/* If there is no memory for a batch, each of its roots is computed alone. */
static void test_a_batch_that_fails(void **state) {
  (void)state;
  const dc_shampoo_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  device_optimizer s;
  open_optimizer(&s, "cuda");
  assert_int_equal(make_shampoo(&s, NULL, &options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  const int begun = cudasim_calls("cusolverDnXsyevBatched");
  cudasim_fail("cusolverDnXsyevBatched", 0, DC__CUSOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1), DC_OK);
  assert_true(cudasim_calls("cusolverDnXsyevBatched") > begun);
  assert_int_equal(dc_optimizer_get_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 0);
  dc_optimizer_destroy(s.optimizer);
  close_optimizer(&s);
}

static void *train_alone(void *arg) {
  rank_of *r = arg;
  r->failed = train(r) == DC_OK ? NULL : strdup(dc_last_error());
  return NULL;
}

/* A rank's device fails within a step, and its caller does not abort the group: no other rank waits for a deadline. */
static void test_a_rank_fails(void **state) {
  const dc_shampoo_options options = options_of();
  const job what = {make_shampoo, &options};
  dc_comm_options limit = DC_COMM_OPTIONS_INIT;
  limit.timeout_ns = 60000000000;
  (void)state;
  for (int before = 0; before < 4; before++) {
    rank_of ranks[2] = {{.train = NULL}};
    dc_comm *comms[2];
    cudasim_reset();
    assert_int_equal(dc_comm_create_threads(2, &limit, comms), DC_OK);
    for (int r = 0; r < 2; r++) {
      ranks[r] = (rank_of){.comm = comms[r], .job = &what};
      open_optimizer(&ranks[r].s, "cuda");
    }
    cudasim_fail("cublasLtMatmul", before, DC__LT_ALLOC_FAILED);
    for (int r = 0; r < 2; r++) {
      assert_int_equal(pthread_create(&ranks[r].thread, NULL, train_alone, &ranks[r]), 0);
    }
    for (int r = 0; r < 2; r++) {
      pthread_join(ranks[r].thread, NULL);
      assert_non_null(ranks[r].failed);
      assert_null(strstr(ranks[r].failed, "waited"));
      free(ranks[r].failed);
    }
    for (int r = 1; r >= 0; r--) {
      dc_optimizer_destroy(ranks[r].s.optimizer);
      dc_comm_destroy(comms[r]);
      close_optimizer(&ranks[r].s);
    }
  }
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync",  "cuMemsetD8Async",
                                          "cuMemAllocFromPoolAsync", "cublasLtCreate", "cublasLtMatmul",
                                          "cuStreamSynchronize"};
  (void)state;
  const dc_shampoo_options shampoo = options_of();
  const dc_soap_options soap = {sizeof soap, .precondition_frequency = 1, .max_block = 6};
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
      TEST(test_ranks), TEST(test_a_solver_that_fails), TEST(test_a_batch_that_fails), TEST(test_a_qr_that_fails),
      TEST(test_no_qr), TEST(test_a_rank_fails),        TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
