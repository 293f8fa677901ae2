/* Symmetric matrices on a device, inside the room: a flight that is decomposed, or made from an earlier basis. */
#ifndef DC_LINALG_SPECTRAL_THERE_H
#define DC_LINALG_SPECTRAL_THERE_H

#include "linalg/spectral.h"
#include "linalg/there.h"

enum { DC__WARM_STEPS = 4 }; /* the probes, and what three products make of them */

/* A flight under way. Neighbours that are computed in one type go together. */
typedef struct dc__decomposing {
  dc__job job;
  dc__flight flight;
  void *const *values_at; /* of the device: where each matrix' eigenvalues go, if that is not one place */
  dc__task tasks[DC__CUDA_FLIGHT];
  dc__eigen eigen; /* with what the solver may use */
  /* Of the device, each [most, …]: */
  void *s, *result; /* [n, n], */
  void *values;     /* [n], */
  double *factors;  /* [n], */
  int32_t *found;
  /* of the device, with an earlier basis alone: */
  void *basis;   /* [n, n]: where it lies in many places, */
  void *turned;  /* [n, n], */
  char *probes;  /* DC__WARM_STEPS times [most, n, DC__PROBES], */
  double *norms; /* DC__WARM_STEPS times [most, DC__PROBES] */
  /* And here: */
  double *numbers;     /* [most, n], or norms */
  double *eigenvalues; /* the tasks' */
  int32_t *said;       /* what was found */
  void *noise;         /* the probes of one matrix */
} dc__decomposing;

/* warm_there.c: dc__warm() for neighbours: those that were near enough are solved, by DC_PATH_WARM. */
dc_status dc__warm_there(dc__decomposing *w, dc__flight *f, dc__task *tasks);

#endif
