/* An optimizer's number of steps, for comparisons; -1 if it cannot be read. */
#ifndef TESTS_STEPS_H
#define TESTS_STEPS_H

#include <dc_api.h>

static inline int64_t steps_of(dc_optimizer *optimizer) {
  int64_t steps = -1;
  return dc_optimizer_get_steps(optimizer, &steps) == DC_OK ? steps : -1;
}

#endif
