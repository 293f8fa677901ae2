/* Steps of AdamW and SGD on a stream of the CPU are tasks of the stream, with the bits of steps without one. */
#include <pthread.h>

#include "optim_test.h"
#include "support/steps.h"

static bundle plain, queued;

/* A task that blocks the stream until let_go(). */
typedef struct gate {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool open;
} gate;

static void wait_for(void *user) {
  gate *g = user;
  pthread_mutex_lock(&g->mutex);
  while (!g->open) {
    pthread_cond_wait(&g->changed, &g->mutex);
  }
  pthread_mutex_unlock(&g->mutex);
}

static void let_go(gate *g) {
  pthread_mutex_lock(&g->mutex);
  g->open = true;
  pthread_cond_signal(&g->changed);
  pthread_mutex_unlock(&g->mutex);
}

static dc_status half_step(bundle *b) {
  return dc_optimizer_step(b->optimizer, b->weights, b->grads, sizeof *b->weights, b->count, 0.5);
}

static void same(void) {
  assert_int_equal(steps_of(plain.optimizer), steps_of(queued.optimizer)); /* waits for the queued steps */
  for (int64_t i = 0; i < plain.count; i++) {
    assert_memory_equal(plain.weight[i], queued.weight[i], (size_t)plain.parts[i] * sizeof(float));
  }
}

static void make_both(void) {
  dc_adamw_options options = DC_ADAMW_OPTIONS_INIT;
  options.check_finite = 1;
  for (int k = 0; k < 2; k++) {
    bundle *b = k == 0 ? &plain : &queued;
    make_adamw(b, &options);
    add(b, 0, 5000, 0, -1);
    add(b, 0, 3, 0, -1);
  }
}

/* Settings that change after a step was queued apply to the next one. */
static void test_a_step_is_a_task_of_the_stream(void **state) {
  (void)state;
  gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
  dc_stream *stream;
  make_both();
  const float before = queued.weight[0][0];
  OK(dc_stream_create(device, &stream));
  OK(dc_optimizer_set_stream(queued.optimizer, stream));
  OK(dc_stream_call(stream, wait_for, &g));
  OK(half_step(&queued));
  assert_true(queued.weight[0][0] == before);
  let_go(&g);
  OK(half_step(&plain));
  for (int k = 0; k < 4; k++) {
    bundle *b = k % 2 == 0 ? &plain : &queued;
    OK(dc_optimizer_set_lr(b->optimizer, 0, 0.1));
    OK(half_step(b));
  }
  same();
  OK(dc_optimizer_set_stream(queued.optimizer, NULL));
  OK(half_step(&queued));
  OK(half_step(&plain));
  same();
  dc_optimizer_destroy(plain.optimizer);
  dc_optimizer_destroy(queued.optimizer);
  dc_stream_destroy(stream);
}

/* Without a stream it is an error; on a stream it is counted. Either way nothing changes. */
static void test_a_gradient_that_is_not_finite(void **state) {
  (void)state;
  dc_stream *stream;
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  make_both();
  OK(dc_stream_create(device, &stream));
  OK(dc_optimizer_set_stream(queued.optimizer, stream));
  plain.grad[1][2] = queued.grad[1][2] = INFINITY;
  FAILS(half_step(&plain), DC_E_NOT_FINITE, "grads[1] times grad_scale is not finite");
  OK(half_step(&queued));
  same();
  for (int k = 0; k < 2; k++) {
    OK(dc_optimizer_get_stats(k == 0 ? plain.optimizer : queued.optimizer, &stats));
    assert_int_equal(stats.steps, 0);
    assert_int_equal(stats.skipped_steps, 1);
  }
  plain.grad[1][2] = queued.grad[1][2] = 1;
  OK(half_step(&plain));
  OK(half_step(&queued));
  dc_optimizer_destroy(queued.optimizer); /* waits for the step */
  assert_memory_equal(plain.weight[0], queued.weight[0], 5000 * sizeof(float));
  dc_optimizer_destroy(plain.optimizer);
  dc_stream_destroy(stream);
}

/* Steps of K-FAC, Shampoo and SOAP are complete when the call returns, and come after the stream's work. */
static void zero(void *user) {
  memset(user, 0, 3 * sizeof(float));
}

static void test_other_kinds_wait_for_the_stream(void **state) {
  (void)state;
  dc_stream *stream;
  memset(&queued, 0, sizeof queued);
  OK(dc_shampoo_create(linalg, NULL, NULL, &queued.optimizer));
  add(&queued, 0, 3, 0, -1);
  const float before = queued.weight[0][0];
  OK(dc_stream_create(device, &stream));
  OK(dc_optimizer_set_stream(queued.optimizer, stream));
  OK(dc_stream_call(stream, zero, queued.grad[0]));
  OK(half_step(&queued));
  assert_true(queued.weight[0][0] == before);
  assert_int_equal(steps_of(queued.optimizer), 1);
  dc_optimizer_destroy(queued.optimizer);
  dc_stream_destroy(stream);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_step_is_a_task_of_the_stream),
      cmocka_unit_test(test_a_gradient_that_is_not_finite),
      cmocka_unit_test(test_other_kinds_wait_for_the_stream),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
