/* Shared by the C programs that measure: calls that must succeed, and clocks. */
#ifndef DC_BENCH_CHECKED_H
#define DC_BENCH_CHECKED_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "dc_api.h"

static inline void check(dc_status status, const char *what) {
  if (status != DC_OK) {
    fprintf(stderr, "%s: %s\n", what, dc_last_error());
    exit(1);
  }
}

static inline double now_us(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

#endif
