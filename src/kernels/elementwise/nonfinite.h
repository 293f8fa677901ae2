/* A record of numbers that are not finite, which work on a stream writes. */
#ifndef DC_KERNELS_NONFINITE_H
#define DC_KERNELS_NONFINITE_H

#include <stdint.h>

/* Zeros: all were finite. */
typedef struct dc__nonfinite {
  uint64_t found; /* 1: some were not */
  uint64_t key;   /* the largest key of the work that had some */
} dc__nonfinite;

#endif
