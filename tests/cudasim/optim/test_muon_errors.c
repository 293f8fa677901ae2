/* Muon on a device that ranks share, and every call of the driver and of cuBLASLt failing in turn; on the simulated
 * driver only. */
#define MATRICES
#include "optim_pair_ranks.h"

static void test_ranks(void **state) {
  (void)state;
  const dc_muon_options wide = {sizeof wide, .precision = DC_FLOAT32}, narrow = {.struct_size = sizeof narrow};
  compare_ranks_with_one(make_muon, &wide);
  compare_ranks_with_one(make_muon, &narrow);
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel", "cuMemcpyAsync", "cuMemAllocFromPoolAsync",
                                          "cublasLtCreate", "cublasLtMatmul"};
  (void)state;
  const dc_muon_options options = {.struct_size = sizeof options};
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    const int calls = use(make_muon, &options, functions[f], NULL, 0);
    assert_true(calls > 0);
    for (int before = 0; before < calls; before += FAILING) {
      (void)use(make_muon, &options, functions[f], functions[f], before);
    }
  }
  cudasim_reset();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_ranks),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
