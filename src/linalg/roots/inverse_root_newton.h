/* Newton's iteration, internal. inverse_root_newton.c has its steps, once for every device, and runs them through a
 * table of operations. The CPU's table computes one matrix on the calling thread and the pool. The table in
 * inverse_root_newton_cuda.c queues kernels and products for a slice of the batch. */
#ifndef DC_LINALG_INVERSE_ROOT_NEWTON_H
#define DC_LINALG_INVERSE_ROOT_NEWTON_H

#include "linalg/eigh/eigh.h"

enum { DC__NEWTON_SQUARES = 6 }; /* temporary matrices beside s */

struct dc__newton_work;

/* Matrices in progress; each array is [count, n, n] in the compute type, dense. */
typedef struct dc__newton_iteration {
  const dc__spectral_job *job;
  const struct dc__newton_work *work;
  void *context; /* of the table's operations */
  dc__spectral_task *tasks;
  int64_t first; /* the first matrix's index in the batch */
  int32_t count, dtype;
  void *s;
  void *x, *next; /* X, and X after or before the current step */
  void *m, *h;
  void *spare, *other;
  double scale[DC__CUDA_BATCH_SLICE], shift[DC__CUDA_BATCH_SLICE]; /* M begins as scale s + shift I */
  double min_eig[DC__CUDA_BATCH_SLICE], top[DC__CUDA_BATCH_SLICE]; /* lower bound of M's eigenvalues; see unit */
  int32_t unit[DC__CUDA_BATCH_SLICE];                              /* A + epsilon I = top 2^unit M at first */
  dc__newton_state state[DC__CUDA_BATCH_SLICE];                    /* as of the latest read */
} dc__newton_iteration;

typedef struct dc__newton_work {
  /* c = a b for commuting symmetric matrices. */
  void (*multiply)(const dc__newton_iteration *w, const void *a, const void *b, void *c);
  /* to = factor from + shift I for each matrix; with `steps`, to = I where the iteration has ended, so that M and X
   * stay. */
  void (*affine)(const dc__newton_iteration *w, const double *factor, const void *from, const double *shift, void *to,
                 bool steps);
  /* dc__newton_check_convergence() of M, which becomes exactly symmetric. A refused step sets `next` to x. `rough` has
   * a bit per matrix. */
  void (*check_convergence)(dc__newton_iteration *w, uint32_t rough);
  /* Reads `state` from the device. */
  void (*sync_state)(dc__newton_iteration *w);
  /* Sets distances to the largest entry of |m - I| of each matrix, NaN if any is NaN. Also reads `state`. */
  void (*distance)(dc__newton_iteration *w, double *distances);
  /* Stores `next`, exactly symmetric, of the matrices with status DC_OK. Sets DC_E_NOT_FINITE where a value does not
   * fit. */
  void (*store)(dc__newton_iteration *w);
} dc__newton_work;

/* Computes and stores the roots and their reports from s and bounds of its eigenvalues. Skips matrices whose status is
 * not DC_OK. */
void dc__newton_run(dc__newton_iteration *w, const double *bounds);

#endif
