/* Shared by test_fibers.c and its kernels. */
#ifndef TESTS_CUDASIM_PROBES_H
#define TESTS_CUDASIM_PROBES_H

#include <stdint.h>

enum { PROBE_THREADS = 64 };

typedef struct probe_args {
  float *out;
  float *in;
  int64_t count;
} probe_args;

#endif
