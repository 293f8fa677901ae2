/* Invariants of Muon, Shampoo and SOAP: for any number of ranks and threads, and any partition of parameters, the bits
 * are the same; and a matrix that cannot be refreshed keeps its last value. */
#ifndef TESTS_RANK_INVARIANCE_TEST_H
#define TESTS_RANK_INVARIANCE_TEST_H

#include "shampoo_test.h"

typedef dc_optimizer *(*make_fn)(dc_linalg *l, dc_comm *comm);

typedef struct rank {
  pthread_t thread;
  dc_comm *comm;
  int32_t rank, world;
  bool split;
  make_fn make;
  model m;
} rank;

/* Makes half of the steps, and the other half on another handle that continues from the saved state. */
static inline void *run_rank(void *arg) {
  rank *r = arg;
  open_model(&r->m, r->make(linalg, r->comm), r->rank, r->world, r->split);
  steps(&r->m, 1, 4);
  size_t bytes;
  void *memory = saved(r->m.optimizer, &bytes);
  dc_optimizer_destroy(r->m.optimizer);
  float weights[PARAMS][MOST];
  memcpy(weights, r->m.weights, sizeof weights);
  open_model(&r->m, r->make(linalg, r->comm), r->rank, r->world, r->split);
  memcpy(r->m.weights, weights, sizeof weights);
  OK(dc_optimizer_load(r->m.optimizer, memory, (int64_t)bytes));
  free(memory);
  steps(&r->m, 4, STEPS + 1);
  dc_optimizer_destroy(r->m.optimizer);
  dc_comm_destroy(r->comm);
  return NULL;
}

static inline void ranks_agree_with_one(make_fn make) {
  static model one;
  static rank ranks[4];
  open_model(&one, make(linalg, NULL), 0, 1, false);
  steps(&one, 1, STEPS + 1);
  for (int32_t world = 1; world <= 4; world++) {
    for (int split = 0; split <= 1; split++) {
      dc_comm *comms[4];
      OK(dc_comm_create_threads(world, NULL, comms));
      for (int32_t r = 0; r < world; r++) {
        ranks[r] = (rank){.comm = comms[r], .rank = r, .world = world, .split = split == 1, .make = make};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
      }
      for (int32_t r = 0; r < world; r++) {
        pthread_join(ranks[r].thread, NULL);
        for (int64_t p = 0; p < PARAMS; p++) {
          assert_memory_equal(ranks[r].m.weights[p], one.weights[p] + ranks[r].m.offset[p],
                              (size_t)ranks[r].m.count[p] * sizeof(float));
        }
      }
    }
  }
  dc_optimizer_destroy(one.optimizer);
}

static inline void threads_do_not_change_bits(make_fn make) {
  static model runs[3];
  for (int32_t threads = 1; threads <= 3; threads++) {
    dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
    dc_linalg *l;
    options.threads = threads;
    OK(dc_linalg_create(device, &options, &l));
    open_model(&runs[threads - 1], make(l, NULL), 0, 1, false);
    dc_linalg_destroy(l); /* the optimizer keeps what it needs */
    steps(&runs[threads - 1], 1, STEPS);
    dc_optimizer_destroy(runs[threads - 1].optimizer);
    assert_memory_equal(runs[0].weights, runs[threads - 1].weights, sizeof runs[0].weights);
  }
}

/* The optimizer has one parameter of [3, 2], tolerated_failures = 2, and a refresh at every step. It is destroyed. */
static inline void the_last_good_one_stays(dc_optimizer *optimizer, const char *matrix, const char *text) {
  float weight[6] = {0}, grad[6], good[9], before[6];
  gradient(1, 0, 6, grad);
  one_step(optimizer, weight, grad, 6);
  float *factor = state_of(optimizer, "factor.0.0");
  float *stays = state_of(optimizer, matrix);
  size_t bytes;
  void *healthy = saved(optimizer, &bytes);
  memcpy(good, stays, sizeof good);
  factor[4] = NAN;
  for (int step = 0; step < 3; step++) {
    one_step(optimizer, weight, grad, 6);
    assert_memory_equal(stays, good, sizeof good);
    assert_true(isfinite(weight[0]));
  }
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  OK(dc_optimizer_get_stats(optimizer, &stats));
  assert_int_equal(stats.failed_refreshes, 3);
  assert_int_equal(*(int64_t *)(void *)state_of(optimizer, "failures.0.0"), 3);
  int64_t count = 6;
  memcpy(before, weight, sizeof before);
  dc_tensor w = {.struct_size = sizeof w, .data = weight, .shape = &count, .ndim = 1, .dtype = DC_FLOAT32};
  const dc_tensor g = {.struct_size = sizeof g, .data = grad, .shape = &count, .ndim = 1, .dtype = DC_FLOAT32};
  assert_int_equal(dc_optimizer_step(optimizer, &w, &g, sizeof w, 1, 1), DC_E_NOT_CONVERGED);
  SAYS(text);
  assert_memory_equal(weight, before, sizeof before);
  OK(dc_optimizer_load(optimizer, healthy, (int64_t)bytes));
  one_step(optimizer, weight, grad, 6);
  assert_true(memcmp(stays, good, sizeof good) != 0);
  free(healthy);
  dc_optimizer_destroy(optimizer);
}

#endif
