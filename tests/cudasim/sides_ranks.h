/* What the tests of Muon, Shampoo and SOAP on a device that ranks share have in common, and what fails there; on the
 * simulated driver alone. */
#ifndef TESTS_SIDES_RANKS_H
#define TESTS_SIDES_RANKS_H

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

static inline void *run_one(void *arg) {
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
static inline void agree(make_fn make, const void *options) {
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

/* Every call of the driver and of cuBLASLt in turn: the step fails or did not need it, and nothing stays behind. */
static inline int use(make_fn make, const void *options, const char *counted, const char *failing, int before) {
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
  for (int number = 0; number < 2 && status == DC_OK; number++) {
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

#endif
