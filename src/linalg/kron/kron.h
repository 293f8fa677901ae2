/* Kronecker products, internal: the work that differs between host and device. */
#ifndef DC_LINALG_KRON_H
#define DC_LINALG_KRON_H

#include "linalg/linalg.h"

/* The factors' eigenvalues for each matrix of a batch, a [count, rows] and b [count, cols], and the damping that is
 * added to their products. */
typedef struct dc__kron_damped {
  const char *fn;
  const void *a, *b;
  int64_t rows, cols;
  double damping;
  bool wide;
  int64_t count;
  uint64_t *not_positive; /* device flag for a nonpositive eigenvalue; NULL if checked already */
} dc__kron_damped;

/* Work on the host (kron.c), or on a device (kron_cuda.c), where form and divide_damped are queued. */
typedef struct dc__kron_work {
  void (*form)(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out);
  /* dc__kron_check_values() of values in the handle's memory space. */
  dc_status (*check_values)(dc_linalg *l, const dc__kron_damped *d);
  /* Divides each element of x by its damped eigenvalue. */
  void (*divide_damped)(dc_linalg *l, const dc__kron_damped *d, void *x);
} dc__kron_work;
extern const dc__kron_work dc__kron_work_cpu, dc__kron_work_cuda;

/* Returns DC_E_NOT_POSITIVE for the first damped eigenvalue that is not positive. Values are in host memory. */
dc_status dc__kron_check_values(const dc__kron_damped *d);

#endif
