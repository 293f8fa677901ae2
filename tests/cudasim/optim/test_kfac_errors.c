/* K-FAC on a device that ranks share, and every call of the driver and of its libraries failing in turn; on the
 * simulated driver only. */
#include "kfac_pair.h"

#include "device_ranks.h"

#include "device/cuda/cublaslt.h"
#include "device/cuda/cusolver.h"
#include "device/cuda/driver.h"

/* The thread sanitizer makes kernels slow, so fewer of the calls fail in turn. */
#ifdef CUDASIM_TSAN
enum { FAILING = 53 };
#else
enum { FAILING = 11 };
#endif

static dc_status train(rank_of *r) {
  dc_kfac_options options = options_of();
  options.refresh_frequency = 2;
  dc_status status = make(&r->s, r->comm, &options, DC_KFAC_EXPAND);
  for (int number = 1; number <= STEPS && status == DC_OK; number++) {
    status = step(&r->s, number, floats);
  }
  return status;
}

/* If each rank has the whole batch, the bits are those of one rank. */
static void test_ranks(void **state) {
  (void)state;
  ranks_agree(train, NULL);
}

/* A failure of the solver affects one factor, and is tolerated. */
static void test_a_solver_that_fails(void **state) {
  (void)state;
  const dc_kfac_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  dc_tensor counts = DC_TENSOR_INIT;
  device_optimizer s;
  cudasim_reset();
  open_optimizer(&s, "cuda");
  assert_int_equal(make(&s, NULL, &options, DC_KFAC_EXPAND), DC_OK);
  cudasim_fail("cusolverDnXsyevd", 0, DC__CUSOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1, floats), DC_OK);
  assert_int_equal(dc_optimizer_get_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 1);
  assert_int_equal(step(&s, 4, floats), DC_OK);
  for (int p = 0; p < 4; p += p == 0 ? 2 : 1) { /* the weights of layers */
    assert_int_equal(dc_optimizer_get_state(s.optimizer, p, "counts", &counts), DC_OK);
    assert_int_equal(((int64_t *)counts.data)[2] + ((int64_t *)counts.data)[4], 0);
  }
  close_optimizer(&s);
}

/* Every call of the driver and of cuBLASLt fails in turn: the library reports it, and nothing leaks. */
static int use(const char *counted, const char *failing, int before) {
  dc_kfac_options options = options_of();
  device_optimizer s;
  cudasim_reset();
  open_optimizer(&s, "cuda");
  options.inverse = DC_KFAC_FACTORED;
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  dc_status status = make(&s, NULL, &options, DC_KFAC_REDUCE);
  status = status == DC_OK ? step(&s, 1, floats) : status;
  const int calls = cudasim_calls(counted) - begun;
  if ((status != DC_OK) != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  close_optimizer(&s);
  assert_int_equal(cudasim_live(), 0);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync",  "cuMemsetD8Async",
                                          "cuMemAllocFromPoolAsync", "cublasLtCreate", "cublasLtMatmul",
                                          "cuStreamSynchronize"};
  (void)state;
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    const int calls = use(functions[f], NULL, 0);
    assert_true(calls > 0);
    for (int before = 0; before < calls; before += FAILING) {
      (void)use(functions[f], functions[f], before);
    }
  }
  cudasim_reset();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_ranks),
      TEST(test_a_solver_that_fails),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
