/* The K-FAC optimizer, internal. */
#ifndef DC_OPTIM_KFAC_INTERNAL_H
#define DC_OPTIM_KFAC_INTERNAL_H

#include "optim/kfac/kfac.h"
#include "optim/optim_internal.h"
#include "optim/redistribute.h"

/* A step's data of a parameter. */
typedef struct dc__kfac_param {
  int64_t entry;    /* index of its entry in the redistribution; -1 without a layer */
  float *momentum;  /* NULL: none */
  float *direction; /* this rank's part */
  float nu;
  dc__sgd_factors factors;
} dc__kfac_param;

typedef struct dc__kfac {
  dc_optimizer head;
  dc__kfac_layer *layers;
  int64_t layer_count, layer_capacity;
  dc__kfac_param *params;
  int64_t param_capacity;
  /* From the first step on: */
  dc__redistribute *redistribute;
  dc__redist_entry *entries; /* of the layers' parameters, weight before bias */
  dc__partition *partitions;
  int64_t entry_count;
  bool *skipped; /* entries without a gradient */
  dc__kfac_matrices matrices;
  int64_t *counts;                     /* of all ranks' batches, one per factor */
  dc__kfac_direction_info *host_found; /* host copy of `found` */
  int64_t *products;                   /* bits of doubles, each layer's */
  int64_t *table;                      /* all ranks' counts, or their products */
  int64_t host_bytes;
  /* In the device's memory space: */
  void *memory;
  size_t bytes;
  double *packed;
  dc__kfac_direction_info *found; /* one per layer */
  float *directions;
  void *work; /* of one direction */
} dc__kfac;

static inline dc__kfac *dc__kfac_of(const dc_optimizer *o) {
  return (dc__kfac *)(uintptr_t)o;
}

static inline const dc_kfac_options *dc__kfac_options(const dc_optimizer *o, const dc__kfac_layer *layer) {
  return dc__optim_options(o, &o->params[layer->weight]);
}

/* The completed steps of a layer. */
static inline int64_t dc__kfac_steps(const dc_optimizer *o, const dc__kfac_layer *layer) {
  const int64_t *weight = o->params[layer->weight].step;
  const int64_t *bias = layer->bias < 0 ? NULL : o->params[layer->bias].step;
  int64_t max_steps = weight == NULL ? 0 : *weight;
  return bias != NULL && *bias > max_steps ? *bias : max_steps;
}

/* Whether its next step updates its factors. */
static inline bool dc__kfac_updates(const dc_optimizer *o, const dc__kfac_layer *layer) {
  return dc__kfac_steps(o, layer) % dc__kfac_options(o, layer)->factor_frequency == 0;
}

static inline int32_t dc__kfac_world(const dc__kfac *k) {
  return k->head.comm == NULL ? 1 : k->head.comm->world;
}

/* kfac_setup.c: allocates what steps need, and frees it. Collective. */
dc_status dc__kfac_set_up_steps(dc__kfac *k, const char *fn);
void dc__kfac_release(dc__kfac *k);

/* kfac_update.c: a dc__fill_fn, and the weight update, which fails only if the device does. */
void dc__kfac_fill_gradient(void *user, int64_t entry, float *part);
dc_status dc__kfac_update_weights(dc__kfac *k);

/* kfac_step.c */
dc_status dc__kfac_step(dc_optimizer *o, const char *fn);

#endif
