/* Newton's iteration, inside the room: its order is written once, in inverse_root_newton.c, over a table of what a step
 * is: inverse_root_newton.c's own, which computes one matrix on the calling thread and the pool, or that of
 * inverse_root_newton_cuda.c, which queues kernels and products of a device for a few matrices together. */
#ifndef DC_LINALG_INVERSE_ROOT_NEWTON_H
#define DC_LINALG_INVERSE_ROOT_NEWTON_H

#include "linalg/eigh/eigh.h"

enum { DC__NEWTON_SQUARES = 6 }; /* matrices under way beside s */

struct dc__newton_work;

/* Matrices under way, each array [count, n, n] in the computing type, dense. */
typedef struct dc__newton_iteration {
  const dc__spectral_job *job;
  const struct dc__newton_work *work;
  void *context; /* the table's own */
  dc__spectral_task *tasks;
  int64_t first; /* matrix of the batch */
  int32_t count, dtype;
  void *s;
  void *x, *next; /* X now, and before or after the step */
  void *m, *h;
  void *spare, *other;
  double scale[DC__CUDA_BATCH_SLICE], shift[DC__CUDA_BATCH_SLICE]; /* M begins as scale s + shift I */
  double min_eig[DC__CUDA_BATCH_SLICE], top[DC__CUDA_BATCH_SLICE];
  int32_t unit[DC__CUDA_BATCH_SLICE];
  dc__newton_state state[DC__CUDA_BATCH_SLICE]; /* as far as it is known here */
} dc__newton_iteration;

typedef struct dc__newton_work {
  /* c = a b for polynomials of one symmetric matrix. */
  void (*multiply)(const dc__newton_iteration *w, const void *a, const void *b, void *c);
  /* to = factor from + shift I, by matrix; with `steps` to = I for those that have ended, so that they stay. */
  void (*affine)(const dc__newton_iteration *w, const double *factor, const void *from, const double *shift, void *to,
                 bool steps);
  /* dc__newton_check_convergence() of M, which becomes exactly symmetric; a step that is refused leaves `next` as x.
   * rough: a bit a matrix. */
  void (*check_convergence)(dc__newton_iteration *w, uint32_t rough);
  /* Brings `state` up to date. */
  void (*sync_state)(dc__newton_iteration *w);
  /* The largest entry of |m - I| of each matrix, NaN if there is one; brings `state` up to date. */
  void (*distance)(dc__newton_iteration *w, double *distances);
  /* `next` to the caller's memory, exactly symmetric, where the matrix' status is DC_OK; DC_E_NOT_FINITE where a value
   * does not fit. */
  void (*store)(dc__newton_iteration *w);
} dc__newton_work;

/* From s and a bound of its eigenvalues a matrix to `out`, with all that is reported. Where the status is not DC_OK,
 * nothing is done. */
void dc__newton_run(dc__newton_iteration *w, const double *bounds);

#endif
