/* A loss scale and found_inf, which steps read from memory in stream order. Tested are all kinds of optimizers, a
 * stream of the CPU, and ranks of which one has found an infinity. */
#include "rank_invariance_test.h"
#include "support/steps.h"

enum { KINDS = 5 };

static dc_optimizer *make(int kind, dc_linalg *l, dc_comm *comm) {
  const dc_shampoo_options options = plain_options();
  dc_adamw_options adamw = DC_ADAMW_OPTIONS_INIT;
  dc_optimizer *optimizer;
  adamw.check_finite = 1;
  switch (kind) {
    case 0:
      OK(dc_adamw_create(l, &adamw, &optimizer));
      return optimizer;
    case 1:
      OK(dc_sgd_create(l, NULL, &optimizer));
      return optimizer;
    case 2:
      return shampoo(l, comm, &options);
    case 3:
      return soap(l, comm, NULL);
    default:
      OK(dc_kfac_create(l, comm, NULL, &optimizer));
      return optimizer;
  }
}

static dc_status name(model *m, float *loss_scale, float *found_inf) {
  static const int64_t one = 1;
  const dc_tensor scale = {.struct_size = sizeof scale, .data = loss_scale, .shape = &one, .dtype = DC_FLOAT32};
  const dc_tensor found = {
      .struct_size = sizeof found, .data = found_inf, .shape = &one, .ndim = 1, .dtype = DC_FLOAT32};
  return dc_optimizer_set_loss_scale(m->optimizer, loss_scale == NULL ? NULL : &scale,
                                     found_inf == NULL ? NULL : &found);
}

static void multiply(float grads[PARAMS][MOST], float by) {
  for (int64_t p = 0; p < PARAMS; p++) {
    for (int i = 0; i < MOST; i++) {
      grads[p][i] *= by;
    }
  }
}

static int64_t skipped(const model *m) {
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  OK(dc_optimizer_get_stats(m->optimizer, &stats));
  return stats.skipped_steps;
}

/* Gradients of a scaled loss give the same step as those of the loss. A step with found_inf set is skipped, and a new
 * scale applies from the next step on. */
static void test_the_bits_of_gradients_that_were_not_scaled(void **state) {
  (void)state;
  static model plain, scaled;
  static float grads[PARAMS][MOST], before[PARAMS][MOST];
  for (int kind = 0; kind < KINDS; kind++) {
    float scale = 65536, found = 0;
    open_model(&plain, make(kind, linalg, NULL), 0, 1, false);
    open_model(&scaled, make(kind, linalg, NULL), 0, 1, false);
    OK(name(&scaled, &scale, &found));
    for (int64_t s = 1; s <= STEPS; s++) {
      memset(grads, 0, sizeof grads);
      gradients_of(s, grads);
      OK(step_with(&plain, grads, NULL));
      multiply(grads, scale);
      found = 2;
      grads[0][3] = INFINITY;
      memcpy(before, scaled.weights, sizeof before);
      OK(step_with(&scaled, grads, NULL));
      assert_memory_equal(before, scaled.weights, sizeof before);
      assert_int_equal(steps_of(scaled.optimizer), s - 1);
      found = 0;
      gradients_of(s, grads);
      multiply(grads, scale /= 2);
      OK(step_with(&scaled, grads, NULL));
      assert_memory_equal(plain.weights, scaled.weights, sizeof plain.weights);
    }
    assert_int_equal(skipped(&scaled), STEPS);
    assert_int_equal(steps_of(scaled.optimizer), STEPS);
    OK(name(&scaled, NULL, NULL));
    scale = found = NAN; /* no longer read */
    gradients_of(9, grads);
    OK(step_with(&scaled, grads, NULL));
    OK(step_with(&plain, grads, NULL));
    assert_memory_equal(plain.weights, scaled.weights, sizeof plain.weights);
    dc_optimizer_destroy(plain.optimizer);
    dc_optimizer_destroy(scaled.optimizer);
  }
}

/* The quotient is rounded once. */
static void test_a_scale_that_is_no_power_of_two(void **state) {
  (void)state;
  float weights[2] = {1, 1}, scale = 3;
  const float grad = 0.7f;
  const int64_t one = 1;
  for (int k = 0; k < 2; k++) {
    dc_optimizer *optimizer;
    OK(dc_sgd_create(linalg, NULL, &optimizer));
    OK(dc_optimizer_add_param(optimizer, 0, &one, 1, 0, 1, DC_FLOAT32, NULL));
    dc_tensor w = {.struct_size = sizeof w, .data = &weights[k], .shape = &one, .ndim = 1, .dtype = DC_FLOAT32};
    const dc_tensor g = {
        .struct_size = sizeof g, .data = (void *)(uintptr_t)&grad, .shape = &one, .ndim = 1, .dtype = DC_FLOAT32};
    const dc_tensor s = {.struct_size = sizeof s, .data = &scale, .shape = &one, .ndim = 1, .dtype = DC_FLOAT32};
    OK(dc_optimizer_set_lr(optimizer, 0, 1));
    OK(dc_optimizer_set_loss_scale(optimizer, k == 0 ? NULL : &s, NULL));
    OK(dc_optimizer_step(optimizer, &w, &g, sizeof w, 1, k == 0 ? 0.1 / 3.0 : 0.1));
    dc_optimizer_destroy(optimizer);
  }
  assert_true(weights[0] == weights[1] && weights[0] < 1);
}

/* ---- on a stream ---- */

static void find(void *user) {
  *(float *)user = 1;
}
static void lose(void *user) {
  *(float *)user = 0;
}

static void test_numbers_are_read_in_the_steps_turn(void **state) {
  (void)state;
  static model plain, queued;
  static float grads[PARAMS][MOST];
  float scale = 1, found = 0;
  dc_stream *stream;
  open_model(&plain, make(0, linalg, NULL), 0, 1, false);
  open_model(&queued, make(0, linalg, NULL), 0, 1, false);
  OK(dc_stream_create(device, &stream));
  OK(dc_optimizer_set_stream(queued.optimizer, stream));
  OK(name(&queued, &scale, &found));
  gradients_of(1, grads);
  OK(dc_stream_call(stream, find, &found));
  OK(step_with(&queued, grads, NULL));
  OK(dc_stream_call(stream, lose, &found));
  OK(step_with(&queued, grads, NULL));
  OK(step_with(&plain, grads, NULL));
  assert_int_equal(skipped(&queued), 1);
  assert_int_equal(steps_of(queued.optimizer), 1);
  assert_memory_equal(plain.weights, queued.weights, sizeof plain.weights);
  dc_optimizer_destroy(plain.optimizer);
  dc_optimizer_destroy(queued.optimizer);
  dc_stream_destroy(stream);
}

/* ---- ranks ---- */

typedef struct one_of_two {
  pthread_t thread;
  dc_comm *comm;
  int32_t rank;
} one_of_two;

static void *find_on_one(void *arg) {
  one_of_two *r = arg;
  model *m = calloc(1, sizeof *m);
  float(*weights)[MOST] = calloc(1, sizeof m->weights);
  for (int kind = 2; kind < KINDS; kind++) {
    float found = r->rank == 1;
    open_model(m, make(kind, linalg, r->comm), r->rank, 2, true);
    memcpy(weights, m->weights, sizeof m->weights);
    OK(name(m, NULL, &found));
    steps(m, 1, 3);
    assert_memory_equal(weights, m->weights, sizeof m->weights);
    assert_int_equal(skipped(m), 2);
    OK(name(m, NULL, NULL));
    steps(m, 1, 3);
    assert_int_equal(steps_of(m->optimizer), 2);
    dc_optimizer_destroy(m->optimizer);
  }
  free(weights);
  free(m);
  dc_comm_destroy(r->comm);
  return NULL;
}

static void test_found_inf_of_one_rank(void **state) {
  (void)state;
  dc_comm *comms[2];
  one_of_two ranks[2];
  OK(dc_comm_create_threads(2, NULL, comms));
  for (int32_t r = 0; r < 2; r++) {
    ranks[r] = (one_of_two){.comm = comms[r], .rank = r};
    assert_int_equal(pthread_create(&ranks[r].thread, NULL, find_on_one, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < 2; r++) {
    pthread_join(ranks[r].thread, NULL);
  }
}

/* ---- what is refused ---- */

static void test_refused_arguments(void **state) {
  (void)state;
  const int64_t two = 2, one = 1;
  float numbers[2] = {1, 1};
  static model m;
  open_model(&m, make(0, linalg, NULL), 0, 1, false);
  dc_tensor t = {.struct_size = sizeof t, .data = numbers, .shape = &two, .ndim = 1, .dtype = DC_FLOAT32};
  assert_int_equal(dc_optimizer_set_loss_scale(m.optimizer, &t, NULL), DC_E_SHAPE);
  SAYS("dc_optimizer_set_loss_scale: loss_scale has 2 elements, must have 1");
  t.shape = &one;
  t.dtype = DC_FLOAT64;
  assert_int_equal(dc_optimizer_set_loss_scale(m.optimizer, NULL, &t), DC_E_DTYPE);
  SAYS("found_inf is float64, must be float32");
  t.dtype = DC_FLOAT32;
  t.data = (char *)numbers + 1;
  assert_int_equal(dc_optimizer_set_loss_scale(m.optimizer, &t, NULL), DC_E_INVALID);
  SAYS("loss_scale.data = 0x");
  SAYS("must be a multiple of 4");
  t.data = NULL;
  assert_int_equal(dc_optimizer_set_loss_scale(m.optimizer, &t, NULL), DC_E_INVALID);
  assert_int_equal(dc_optimizer_set_loss_scale(NULL, NULL, NULL), DC_E_INVALID);
  dc_optimizer_destroy(m.optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_bits_of_gradients_that_were_not_scaled),
      cmocka_unit_test(test_a_scale_that_is_no_power_of_two),
      cmocka_unit_test(test_numbers_are_read_in_the_steps_turn),
      cmocka_unit_test(test_found_inf_of_one_rank),
      cmocka_unit_test(test_refused_arguments),
  };
  return cmocka_run_group_tests(tests, open_handle, close_handle);
}
