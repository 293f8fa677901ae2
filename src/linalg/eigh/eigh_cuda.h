/* Symmetric matrices on a device, internal: a slice that is decomposed, or computed from an earlier basis. */
#ifndef DC_LINALG_EIGH_CUDA_H
#define DC_LINALG_EIGH_CUDA_H

#include "linalg/batch_slice_cuda.h"
#include "linalg/eigh/eigh.h"

enum { DC__WARM_POWER_STEPS = 4 }; /* the probes and their images after 1, 2 and 3 products */

/* A slice in progress. Neighbours with one compute type run together. */
typedef struct dc__eigh_cuda {
  dc__spectral_job job;
  dc__batch_slice slice;
  void *const *value_pointers; /* on the device: eigenvalue pointers, if not contiguous */
  dc__spectral_task tasks[DC__CUDA_BATCH_SLICE];
  dc__eigh eigen; /* with the solver's workspace */
  /* On the device, each [max_count, …]: */
  void *s, *result; /* [n, n] */
  void *values;     /* [n] */
  double *factors;  /* [n] */
  int32_t *found;   /* the solver's statuses */
  void *rotated;    /* [n, n], with a basis only: Q^T A Q, or a decomposition's eigenvectors */
  /* For a warm start only: */
  void *basis;   /* [n, n]: copy of a basis that is not contiguous */
  char *probes;  /* DC__WARM_POWER_STEPS times [max_count, n, DC__PROBES] */
  double *norms; /* DC__WARM_POWER_STEPS times [max_count, DC__PROBES] */
  /* On the host: */
  double *host_values; /* [max_count, n], or norms */
  double *eigenvalues; /* [max_count, n], of the tasks */
  int32_t *host_info;  /* the solver's statuses */
  void *host_probes;   /* the probes of one matrix */
} dc__eigh_cuda;

/* root_warm_start_cuda.c: dc__root_warm_start() for neighbours. Matrices whose basis is near enough become solved, with
 * path DC_PATH_WARM. */
dc_status dc__root_warm_start_cuda(dc__eigh_cuda *w, dc__batch_slice *f, dc__spectral_task *tasks);

#endif
