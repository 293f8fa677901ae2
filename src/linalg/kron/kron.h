/* Kronecker products, internal: the work that differs by memory space. */
#ifndef DC_LINALG_KRON_H
#define DC_LINALG_KRON_H

#include "linalg/linalg.h"

/* Eigenvalues of the factors, and the damping of their products, of each matrix of a batch. */
typedef struct dc__kron_damped {
  const char *fn;
  const void *a, *b;
  int64_t rows, cols;
  double damping;
  bool wide;
  int64_t count;
  uint64_t *not_positive; /* device flag for a nonpositive eigenvalue; NULL if checked already */
} dc__kron_damped;

/* On the host (kron.c), synchronous; on a device (kron_cuda.c), queued. */
typedef struct dc__kron_work {
  void (*form)(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out);
  /* dc__kron_check_values() of values in the handle's memory space. */
  dc_status (*check_values)(dc_linalg *l, const dc__kron_damped *d);
  /* Divides each element of x by its damped eigenvalue. */
  void (*divide_damped)(dc_linalg *l, const dc__kron_damped *d, void *x);
} dc__kron_work;
extern const dc__kron_work dc__kron_work_cpu, dc__kron_work_cuda;

/* DC_E_NOT_POSITIVE for the first damped eigenvalue that is not positive; values in host memory. */
dc_status dc__kron_check_values(const dc__kron_damped *d);

#endif
