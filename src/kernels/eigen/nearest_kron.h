/* The power iteration for the nearest Kronecker product (linalg/kron/kron_nearest.c): where it begins and when it has
 * ended. One text for the CPU and for the kernels of devices, which decide without asking the host. */
#ifndef DC_KERNELS_NEAREST_KRON_H
#define DC_KERNELS_NEAREST_KRON_H

#include "kernels/elementwise/convert.h"

enum { DC__NEAREST_MAX_STEPS = 2000, DC__NEAREST_STALLED_STEPS = 30 };

typedef struct dc__nearest_state {
  double sigma; /* the largest singular value */
  int32_t steps;
  int32_t stalled_steps; /* steps in a row that did not change it; converged at DC__NEAREST_STALLED_STEPS */
} dc__nearest_state;

DC__CONVERT int32_t dc__nearest_continues(const dc__nearest_state *s) {
  return s->steps < DC__NEAREST_MAX_STEPS && s->stalled_steps < DC__NEAREST_STALLED_STEPS;
}

/* Element (i, j) of the first u [m, n], which is orthogonal to no leading vector but by chance. For a symmetric
 * positive semidefinite x every u and v must be so too. Hence the identity plus a little noise that is symmetric and
 * diagonally dominated. */
DC__CONVERT double dc__nearest_guess(int64_t i, int64_t j, int64_t m, int64_t n) {
  const uint64_t low = (uint64_t)(i < j ? i : j), high = (uint64_t)(i < j ? j : i);
  const uint64_t hash = (low * UINT64_C(0x9E3779B97F4A7C15) ^ (high + 1) * UINT64_C(0xD6E8FEB86659FD93)) >> 40;
  return (i == j ? 1 : 0) + ((double)hash / (double)(1 << 24) - 0.5) / (double)(m + n);
}

/* After a step: the norm of u is `now`, and no element of v moved by more than `moved`. */
DC__CONVERT void dc__nearest_check_convergence(dc__nearest_state *s, double now, double moved, double tolerance) {
  /* With two equal singular values v may wander, but the distance stays the same. */
  const double change = now > s->sigma ? now - s->sigma : s->sigma - now;
  s->stalled_steps = change <= 0x1p-50 * now ? s->stalled_steps + 1 : 0; /* a few last digits */
  s->sigma = now;
  if (s->steps++ > 0 && moved <= tolerance) {
    s->stalled_steps = DC__NEAREST_STALLED_STEPS;
  }
}

#endif
