/* Shared by the tests of Muon, Shampoo and SOAP with several ranks on a device, and of errors there; on the simulated
 * driver only. */
#ifndef TESTS_OPTIM_PAIR_RANKS_H
#define TESTS_OPTIM_PAIR_RANKS_H

#include "optim_pair.h"

#include "device_ranks.h"

#include "device/cuda/cublaslt.h"
#include "device/cuda/cusolver.h"
#include "device/cuda/driver.h"

/* The thread sanitizer makes kernels slow, so fewer of the calls fail in turn. */
#ifdef CUDASIM_TSAN
enum { FAILING = 41 };
#else
enum { FAILING = 7 };
#endif

typedef struct job {
  make_fn make;
  const void *options;
} job;

static inline dc_status train(rank_of *r) {
  const job *j = r->job;
  dc_status status = j->make(&r->s, r->comm, j->options);
  status = status == DC_OK ? add_params(&r->s, dc_comm_rank(r->comm), dc_comm_size(r->comm)) : status;
  for (int number = 1; number <= STEPS && status == DC_OK; number++) {
    status = step(&r->s, number);
  }
  return status;
}

/* Several ranks must have the bits of one rank. */
static inline void compare_ranks_with_one(make_fn make, const void *options) {
  ranks_agree(train, &(job){make, options});
}

/* Every call of the driver and of cuBLASLt fails in turn: the step fails, and nothing leaks. */
static inline int use(make_fn make, const void *options, const char *counted, const char *failing, int before) {
  device_optimizer s;
  dc_tensor weight, grad;
  dc_status status;
  cudasim_reset();
  open_optimizer(&s, "cuda");
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
  close_optimizer(&s);
  assert_int_equal(cudasim_live(), 0);
  return calls;
}

#endif
