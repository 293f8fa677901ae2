/* Muon on the device compared with the CPU, within rounding, and its saved states; gradients that are not finite. On
 * the simulated driver, or on a card (tests/card). */
#define MATRICES
#include "optim_pair.h"

/* The largest difference of the weights; 16-bit weights may differ by a last bit more. */
static double apart(const device_optimizer *pair) {
  double most = 0;
  for (int p = 0; p < PARAMS; p++) {
    char copy[4 * MOST];
    double cpu[MOST], cuda[MOST];
    const double bit = shapes[p].dtype == DC_BFLOAT16 ? 1.0 / 64 : 0;
    move(&pair[1], copy, pair[1].weights[p], (size_t)pair[1].count[p] * dc_dtype_size(shapes[p].dtype));
    dc__cast(cpu, DC_FLOAT64, pair[0].weights[p], shapes[p].dtype, pair[0].count[p]);
    dc__cast(cuda, DC_FLOAT64, copy, shapes[p].dtype, pair[1].count[p]);
    for (int64_t i = 0; i < pair[0].count[p]; i++) {
      const double difference = (cpu[i] > cuda[i] ? cpu[i] - cuda[i] : cuda[i] - cpu[i]) - bit;
      most = difference > most ? difference : most;
    }
  }
  return most;
}

static void run(const dc_muon_options *options, double gate) {
  device_optimizer pair[2];
  for (int k = 0; k < 2; k++) {
    open_optimizer(&pair[k], k == 0 ? "cpu" : "cuda");
    assert_int_equal(make_muon(&pair[k], NULL, options), DC_OK);
    assert_int_equal(add_params(&pair[k], 0, 1), DC_OK);
  }
  for (int number = 1; number <= STEPS + 1; number++) {
    for (int k = 0; k < 2; k++) {
      assert_int_equal(step(&pair[k], number), DC_OK);
    }
    const double most = apart(pair);
    if (!(most <= gate)) {
      fail_msg("step %d: %g off", number, most);
    }
    if (number == STEPS) {
      swap_states(pair);
    }
  }
  for (int k = 0; k < 2; k++) {
    dc_optimizer_destroy(pair[k].optimizer);
    close_optimizer(&pair[k]);
  }
}

static void test_beside_the_cpu(void **state) {
  (void)state;
  dc_muon_options o = {.struct_size = sizeof o, .weight_decay = 0.1, .precision = DC_FLOAT32};
  run(&o, 2e-4);
  o.polynomial = DC_ORTHOGONAL_MUON;
  o.adjust = DC_MUON_MATCH_RMS;
  o.num_splits = 3;
  o.nesterov = -1;
  run(&o, 2e-4);
  o.momentum = -1;
  run(&o, 2e-4);
  o.precision = DC_DTYPE_NONE; /* means bfloat16 */
  run(&o, 0.1);
}

static void test_gradients_that_are_not_finite(void **state) {
  (void)state;
  refuses_gradient(make_muon, NULL, 2, __builtin_nanf(""));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_beside_the_cpu),
      TEST(test_gradients_that_are_not_finite),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
