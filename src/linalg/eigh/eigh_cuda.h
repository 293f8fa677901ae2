/* Symmetric matrices on a device, inside the room: a flight that is decomposed, or made from an earlier basis. */
#ifndef DC_LINALG_EIGH_CUDA_H
#define DC_LINALG_EIGH_CUDA_H

#include "linalg/batch_slice_cuda.h"
#include "linalg/eigh/eigh.h"

enum { DC__WARM_POWER_STEPS = 4 }; /* the probes, and what three products make of them */

/* A flight under way. Neighbours that are computed in one type go together. */
typedef struct dc__eigh_cuda {
  dc__spectral_job job;
  dc__batch_slice slice;
  void *const *value_pointers; /* of the device: where each matrix' eigenvalues go, if that is not one place */
  dc__spectral_task tasks[DC__CUDA_BATCH_SLICE];
  dc__eigh eigen; /* with what the solver may use */
  /* Of the device, each [most, …]: */
  void *s, *result; /* [n, n], */
  void *values;     /* [n], */
  double *factors;  /* [n], */
  int32_t *found;
  /* of the device, with an earlier basis alone: */
  void *basis;   /* [n, n]: where it lies in many places, */
  void *rotated; /* [n, n], */
  char *probes;  /* DC__WARM_POWER_STEPS times [most, n, DC__PROBES], */
  double *norms; /* DC__WARM_POWER_STEPS times [most, DC__PROBES] */
  /* And here: */
  double *host_values; /* [most, n], or norms */
  double *eigenvalues; /* the tasks' */
  int32_t *host_info;  /* what was found */
  void *host_probes;   /* the probes of one matrix */
} dc__eigh_cuda;

/* root_warm_start_cuda.c: dc__root_warm_start() for neighbours: those that were near enough are solved, by
 * DC_PATH_WARM. */
dc_status dc__root_warm_start_cuda(dc__eigh_cuda *w, dc__batch_slice *f, dc__spectral_task *tasks);

#endif
