/* Shampoo's steps by the conformance list (points 40 to 43), compared with a float64 reference and with results by
 * hand. */
#include "shampoo_test.h"
/* after the headers that it needs */
#include "shampoo_reference.h"
#include "support/steps.h"

/* ---- against the reference ---- */

static void compare_with_reference(dc_shampoo_options options) {
  model m;
  reference r[PARAMS];
  float grads[PARAMS][MOST];
  open_model(&m, shampoo(linalg, NULL, &options), 0, 1, false);
  for (int64_t p = 0; p < PARAMS; p++) {
    reference_open(&r[p], &options, shapes[p].sizes, shapes[p].ndim, m.weights[p]);
  }
  for (int64_t step = 1; step <= STEPS; step++) {
    gradients_of(step, grads);
    bool skip[PARAMS] = {false};
    skip[3] = step == 2; /* the parameter counts its own steps */
    OK(step_with(&m, grads, skip));
    for (int64_t p = 0; p < PARAMS; p++) {
      if (!skip[p]) {
        reference_step(&r[p], grads[p], 0.5, 0.1);
      }
      for (int64_t i = 0; i < m.numel[p]; i++) {
        if (!(fabs((double)m.weights[p][i] - r[p].weights[i]) <= 2e-4 * (1 + fabs(r[p].weights[i])))) {
          fail_msg("step %d, parameter %d, element %d: %g, want %g", (int)step, (int)p, (int)i, (double)m.weights[p][i],
                   r[p].weights[i]);
        }
      }
    }
  }
  for (int64_t p = 0; p < PARAMS; p++) {
    reference_close(&r[p]);
  }
  dc_optimizer_destroy(m.optimizer);
}

static void point_40_the_definition(void **state) {
  (void)state;
  compare_with_reference(plain_options());
  dc_shampoo_options o = plain_options();
  o.beta1 = -1;
  o.graft = DC_GRAFT_NONE;
  o.eps_rel = 1e-3;
  compare_with_reference(o);
  o.beta2 = 0.9; /* so that the bias correction shows */
  o.eps_abs = 1e-2;
  compare_with_reference(o);
  o.root = 2;
  compare_with_reference(o);
}

static void point_40_refreshes(void **state) {
  (void)state;
  for (int64_t frequency = 1; frequency <= 4; frequency++) {
    for (int64_t start = 0; start <= 3; start++) {
      dc_shampoo_options o = plain_options();
      o.precondition_frequency = frequency;
      o.start_preconditioning_step = start;
      compare_with_reference(o);
    }
  }
}

static void point_41_blocks_and_merging(void **state) {
  (void)state;
  for (int64_t block = 1; block <= 5; block++) {
    dc_shampoo_options o = plain_options();
    o.max_block = block;
    o.merge_below = block == 3 ? -1 : 6;
    compare_with_reference(o);
  }
}

static void point_42_grafts_and_momentum(void **state) {
  (void)state;
  for (int32_t graft = DC_GRAFT_ADAM; graft <= DC_GRAFT_RMSPROP; graft++) {
    dc_shampoo_options o = plain_options();
    o.graft = graft;
    o.graft_beta2 = 0.9;
    o.graft_eps = 1e-3;
    o.beta1 = graft % 2 == 0 ? 0.8 : -1;
    o.momentum = 0.7;
    o.nesterov = graft % 2;
    o.precondition_frequency = 2;
    compare_with_reference(o);
  }
}

static void point_43_weight_decay(void **state) {
  (void)state;
  for (int32_t decay = DC_DECAY_DECOUPLED; decay <= DC_DECAY_L2; decay++) {
    dc_shampoo_options o = plain_options();
    o.weight_decay = 0.3;
    o.decay = decay;
    compare_with_reference(o);
  }
}

static void warm_refreshes_are_near(void **state) {
  (void)state;
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.tolerance = 1e-6;
  compare_with_reference(o);
}

/* ---- by hand ---- */

/* (G G^T)^(-1/4) G (G^T G)^(-1/4) is the orthogonal matrix nearest to G. For [[1, 2], [3, 4]], whose determinant is
 * negative, it is [[1 - 4, 2 + 3], [2 + 3, 4 - 1]] divided by its columns' length. */
static void point_40_two_by_two_by_hand(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  o.beta1 = -1;
  o.graft = DC_GRAFT_NONE;
  o.eps_rel = -1;
  dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 2, 2);
  const float grad[4] = {1, 2, 3, 4};
  float weight[4] = {0};
  one_step(optimizer, weight, grad, 4);
  const double want[4] = {-3 / sqrt(34), 5 / sqrt(34), 5 / sqrt(34), 3 / sqrt(34)};
  for (int i = 0; i < 4; i++) {
    assert_true(fabs((double)weight[i] + want[i]) < 1e-5);
  }
  const float *left = state_of(optimizer, "factor.0.0"), *right = state_of(optimizer, "factor.0.1");
  assert_memory_equal(left, ((float[]){5, 11, 11, 25}), 4 * sizeof(float));
  assert_memory_equal(right, ((float[]){10, 14, 14, 20}), 4 * sizeof(float));
  one_step(optimizer, weight, grad, 4); /* beta2 = 1: the sum */
  assert_memory_equal(left, ((float[]){10, 22, 22, 50}), 4 * sizeof(float));
  dc_optimizer_destroy(optimizer);
}

/* Torchium's Shampoo steps along the raw gradient between refreshes. */
static void point_40_roots_persist_between_refreshes(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  o.beta1 = -1;
  o.graft = DC_GRAFT_NONE;
  o.precondition_frequency = 3;
  o.start_preconditioning_step = 1;
  dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 2, 2);
  const float grad[4] = {1, 2, 3, 4};
  float weight[4] = {0}, before[4], first[4];
  const float *root = NULL;
  for (int step = 1; step <= 5; step++) {
    memcpy(before, weight, sizeof before);
    one_step(optimizer, weight, grad, 4);
    root = state_of(optimizer, "root.0.0");
    if (step == 1 || step == 3) {
      assert_true(step == 1 || memcmp(first, root, sizeof first) != 0);
      memcpy(first, root, sizeof first);
    }
    assert_memory_equal(first, root, sizeof first);
    for (int i = 0; i < 4; i++) { /* never the gradient: always the first step's direction, of at most its length */
      float moved = before[i] - weight[i];
      assert_true(fabsf(moved) <= 0.86f && fabsf(moved - grad[i]) > 0.1f);
    }
  }
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  OK(dc_optimizer_get_stats(optimizer, &stats));
  assert_int_equal(stats.refreshes, 4);
  assert_int_equal(stats.failed_refreshes, 0);
  assert_int_equal(stats.blocks, 1);
  assert_int_equal(stats.owned_blocks, 1);
  dc_optimizer_destroy(optimizer);
}

/* A parameter in blocks of 3 behaves like as many parameters, bit for bit. */
static void point_41_blocks_are_independent(void **state) {
  (void)state;
  enum { ROWS = 5, COLS = 8, SIDE = 3 }; /* no rest of 1, which as a parameter would be a vector */
  dc_shampoo_options o = plain_options();
  o.max_block = SIDE;
  dc_optimizer *whole = one_param(shampoo(linalg, NULL, &o), ROWS, COLS);
  float weight[ROWS * COLS] = {0}, grad[ROWS * COLS];
  float want[ROWS * COLS] = {0};
  for (int64_t step = 1; step <= 3; step++) {
    gradient(step, 0, ROWS * COLS, grad);
    one_step(whole, weight, grad, ROWS * COLS);
  }
  for (int64_t r = 0; r < ROWS; r += SIDE) {
    for (int64_t c = 0; c < COLS; c += SIDE) {
      int64_t rows = ROWS - r < SIDE ? ROWS - r : SIDE, cols = COLS - c < SIDE ? COLS - c : SIDE;
      dc_optimizer *one = one_param(shampoo(linalg, NULL, &o), rows, cols);
      float part[SIDE * SIDE] = {0}, g[SIDE * SIDE];
      for (int64_t step = 1; step <= 3; step++) {
        gradient(step, 0, ROWS * COLS, grad);
        for (int64_t i = 0; i < rows * cols; i++) {
          g[i] = grad[(r + i / cols) * COLS + c + i % cols];
        }
        one_step(one, part, g, rows * cols);
      }
      for (int64_t i = 0; i < rows * cols; i++) {
        want[(r + i / cols) * COLS + c + i % cols] = part[i];
      }
      dc_optimizer_destroy(one);
    }
  }
  assert_memory_equal(weight, want, sizeof want);
  dc_optimizer_destroy(whole);
}

static double length(const float *x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    sum += (double)x[i] * (double)x[i];
  }
  return sqrt(sum);
}

static void point_42_the_grafts_length_is_kept(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  o.beta1 = -1;
  o.graft = DC_GRAFT_SGD;
  dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 6, 4);
  float grad[24];
  for (int64_t step = 1; step <= 4; step++) {
    float weight[24] = {0};
    gradient(step, 0, 24, grad);
    one_step(optimizer, weight, grad, 24);
    assert_true(fabs(length(weight, 24) / length(grad, 24) - 1) < 1e-6);
  }
  dc_optimizer_destroy(optimizer);
}

static void point_42_zero_gradients_move_nothing(void **state) {
  (void)state;
  for (int32_t graft = DC_GRAFT_ADAM; graft <= DC_GRAFT_RMSPROP; graft++) {
    dc_shampoo_options o = plain_options();
    o.graft = graft;
    dc_optimizer *optimizer = one_param(shampoo(linalg, NULL, &o), 3, 4);
    float weight[12] = {1, 2, 3}, before[12], grad[12] = {0};
    memcpy(before, weight, sizeof before);
    for (int step = 0; step < 3; step++) {
      one_step(optimizer, weight, grad, 12);
    }
    assert_memory_equal(weight, before, sizeof before);
    grad[5] = 1; /* later steps are finite */
    one_step(optimizer, weight, grad, 12);
    for (int i = 0; i < 12; i++) {
      assert_true(isfinite(weight[i]));
    }
    assert_true(weight[5] < before[5]);
    dc_optimizer_destroy(optimizer);
  }
}

static void point_43_a_rate_of_zero_moves_no_weight(void **state) {
  (void)state;
  dc_shampoo_options o = plain_options();
  o.weight_decay = 0.1;
  model m, before;
  open_model(&m, shampoo(linalg, NULL, &o), 0, 1, false);
  OK(dc_optimizer_set_lr(m.optimizer, 0, 0));
  before = m;
  steps(&m, 1, 3);
  assert_memory_equal(m.weights, before.weights, sizeof m.weights);
  assert_int_equal(steps_of(m.optimizer), 2);
  dc_optimizer_destroy(m.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_40_the_definition),
      cmocka_unit_test(point_40_refreshes),
      cmocka_unit_test(point_40_two_by_two_by_hand),
      cmocka_unit_test(point_40_roots_persist_between_refreshes),
      cmocka_unit_test(point_41_blocks_and_merging),
      cmocka_unit_test(point_41_blocks_are_independent),
      cmocka_unit_test(point_42_grafts_and_momentum),
      cmocka_unit_test(point_42_the_grafts_length_is_kept),
      cmocka_unit_test(point_42_zero_gradients_move_nothing),
      cmocka_unit_test(point_43_weight_decay),
      cmocka_unit_test(point_43_a_rate_of_zero_moves_no_weight),
      cmocka_unit_test(warm_refreshes_are_near),
  };
  return cmocka_run_group_tests(tests, open_handle, close_handle);
}
