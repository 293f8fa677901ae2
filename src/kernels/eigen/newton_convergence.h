/* Whether a coupled Newton iteration (linalg/roots/inverse_root_newton.c) continues: one text for the CPU and for the
 * kernels of devices, which decide without asking the host. */
#ifndef DC_KERNELS_NEWTON_CONVERGENCE_H
#define DC_KERNELS_NEWTON_CONVERGENCE_H

#include "kernels/elementwise/convert.h"

enum { DC__NEWTON_CONTINUES = 0, DC__NEWTON_CONVERGED, DC__NEWTON_DIVERGED };

/* NEAR: when the eigenvalues are this near to 1, plain Newton steps double the digits. GROWTH is the limit for the
 * distance from I: beyond it the iteration diverges. */
#define DC__NEWTON_NEAR (1 - 1e-4)
#define DC__NEWTON_GROWTH 1.2

typedef struct dc__newton_state {
  double error; /* the distance of M from I after the last step that was taken; 1 while steps are rough */
  int32_t iterations;
  int32_t end; /* DONE: X has the accuracy of its type */
} dc__newton_state;

/* Whether to take a step after which M is `now` from I; otherwise X stays unchanged. */
DC__CONVERT int32_t dc__newton_check_convergence(dc__newton_state *s, double now, int32_t rough) {
  if (!(now <= DC__NEWTON_GROWTH * (rough ? 1 : s->error))) {
    const int32_t last_digits = !rough && s->error <= 1 - DC__NEWTON_NEAR; /* were reached before */
    s->end = last_digits ? DC__NEWTON_CONVERGED : DC__NEWTON_DIVERGED;
    return 0;
  }
  s->iterations++;
  s->end = !rough && now >= s->error / 2 ? DC__NEWTON_CONVERGED : DC__NEWTON_CONTINUES;
  s->error = rough ? 1 : now;
  return 1;
}

#endif
