/* K-FAC on a device that ranks share, and every call of the driver and of its libraries failing in turn; on the
 * simulated driver alone. */
#include "layers.h"

#include "device/cuda/cublaslt.h"
#include "device/cuda/cusolver.h"
#include "device/cuda/driver.h"

/* The thread sanitizer makes kernels slow: fewer of the calls fail in turn. */
#ifdef CUDASIM_TSAN
enum { FAILING = 53 };
#else
enum { FAILING = 11 };
#endif

/* Ranks that have a part of each parameter, on one device, which some of them share. */
typedef struct rank_of {
  pthread_t thread;
  dc_comm *comm;
  side s;
  char *failed;
} rank_of;

static void *run_one(void *arg) {
  rank_of *r = arg;
  dc_kfac_options options = options_of();
  options.refresh_frequency = 2;
  dc_status status = make(&r->s, r->comm, &options, DC_KFAC_EXPAND);
  for (int number = 1; number <= STEPS && status == DC_OK; number++) {
    status = step(&r->s, number, floats);
  }
  if (status != DC_OK) {
    r->failed = strdup(dc_last_error());
    dc_comm_abort(r->comm, "failed");
  }
  dc_optimizer_destroy(r->s.optimizer);
  r->s.optimizer = NULL;
  dc_comm_destroy(r->comm);
  return NULL;
}

/* Where each has the whole batch, the bits of one rank. */
static void test_ranks(void **state) {
  (void)state;
  static rank_of ranks[3];
  static char one[PARAMS][4 * MOST], part[4 * MOST];
  for (int32_t world = 1; world <= 3; world++) {
    dc_comm *comms[3];
    assert_int_equal(dc_comm_create_threads(world, NULL, comms), DC_OK);
    for (int32_t r = 0; r < world; r++) {
      ranks[r] = (rank_of){.comm = comms[r]};
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

/* The solver's own failure is that of one factor, and tolerated. */
static void test_a_solver_that_fails(void **state) {
  (void)state;
  const dc_kfac_options options = options_of();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  dc_tensor counts = DC_TENSOR_INIT;
  side s;
  cudasim_reset();
  open_side(&s, "cuda");
  assert_int_equal(make(&s, NULL, &options, DC_KFAC_EXPAND), DC_OK);
  cudasim_fail("cusolverDnXsyevd", 0, DC__SOLVER_ALLOC_FAILED);
  assert_int_equal(step(&s, 1, floats), DC_OK);
  assert_int_equal(dc_get_optimizer_stats(s.optimizer, &stats), DC_OK);
  assert_int_equal(stats.failed_refreshes, 1);
  assert_int_equal(step(&s, 4, floats), DC_OK);
  for (int p = 0; p < 4; p += p == 0 ? 2 : 1) { /* the layers' weights */
    assert_int_equal(dc_optimizer_state(s.optimizer, p, "counts", &counts), DC_OK);
    assert_int_equal(((int64_t *)counts.data)[2] + ((int64_t *)counts.data)[4], 0);
  }
  close_side(&s);
}

/* Every call of the driver and of cuBLASLt in turn: something fails, and nothing stays behind. */
static int use(const char *counted, const char *failing, int before) {
  dc_kfac_options options = options_of();
  side s;
  cudasim_reset();
  open_side(&s, "cuda");
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
  close_side(&s);
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
