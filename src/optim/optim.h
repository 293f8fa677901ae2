/* Optimizers: the one header of the room. The public functions of src/api read and check the caller's options and
 * tensors, lock the handle, and call inward. */
#ifndef DC_OPTIM_H
#define DC_OPTIM_H

#include "comm/comm.h"
#include "linalg/linalg.h"

typedef struct dc__optim_kind dc__optim_kind;
typedef struct dc__optim_piece dc__optim_piece;
extern const dc__optim_kind dc__adamw_kind, dc__kfac_kind, dc__muon_kind, dc__sgd_kind, dc__shampoo_kind, dc__soap_kind;

typedef struct dc__optim_param {
  int32_t group;
  int32_t dtype; /* of the weights */
  int32_t ndim;
  int64_t *shape; /* of the whole parameter */
  int64_t numel;  /* of the whole parameter */
  int64_t offset, count;
  int64_t *step;           /* piece "step": steps made before this one; the frame counts, or kernels (queue.c) */
  float *master;           /* piece "master"; NULL: float32 weights */
  dc__optim_piece *pieces; /* a list, so that views of them stay where they are */
} dc__optim_param;

/* A step's tensors of one parameter. */
typedef struct dc__optim_io {
  void *weight;
  const void *grad;
  int32_t grad_dtype; /* DC_DTYPE_NONE: no gradient, nothing happens to the parameter */
  int64_t first;      /* for param_update_cpu.c */
} dc__optim_io;

typedef struct dc__optim_group {
  double lr;
  double *device_lr; /* the same in the device's memory, where kernels count the steps */
  bool check_finite;
  int64_t params;
  void *options; /* the kind's, with defaults filled in */
} dc__optim_group;

struct dc_optimizer {
  const dc__optim_kind *kind;
  dc_linalg *linalg; /* private: its mutex is the optimizer's, its scratch the kinds'; the pool is shared */
  dc_comm *comm;     /* private; NULL: one rank */
  dc__arena *arena;  /* of the state */
  dc__optim_param *params;
  dc__optim_io *io; /* as many as params; of the step under way */
  int64_t count, capacity, io_capacity;
  int64_t prepared; /* parameters whose state exists */
  dc__optim_group *groups;
  int64_t group_count, group_capacity;
  dc__update_status *device_state; /* on a device with memory of its own, in that */
  double grad_scale;               /* of the step under way */
  bool found_nonfinite;     /* the caller has found a gradient of it that is not finite, here or on another rank */
  const float *loss_scale;  /* the caller's, read in each step; NULL: 1 */
  const float *found_inf;   /* likewise; NULL: 0 */
  dc_stream *stream;        /* the caller's, on which steps are queued; NULL: they are done when the call returns */
  dc_event *done;           /* what was queued on it; NULL: there was none yet */
  dc_optimizer_stats stats; /* counters; what is memory and bytes is filled in when asked for */
};

/* ---- handles, groups, parameters, steps (optimizer.c) ----
 *
 * All but dc__optim_create() and dc__optim_destroy() want the handle locked. fn is the public function's name. */

/* options: of group 0, checked, defaults filled in; as large as the kind says. comm NULL: one rank; else copied. */
dc_status dc__optim_create(const dc__optim_kind *kind, const char *fn, const dc_linalg *linalg, dc_comm *comm,
                           const void *options, bool check_finite, dc_optimizer **optimizer);
void dc__optim_destroy(dc_optimizer *o);
/* DC_E_STATE unless the optimizer is of this kind. */
dc_status dc__optim_check_kind(const dc_optimizer *o, const char *fn, const dc__optim_kind *kind);
/* group: up to the number of groups, which adds one. options as in dc__optim_create(). */
dc_status dc__optim_set_group(dc_optimizer *o, const char *fn, int32_t group, const void *options, bool check_finite);
dc_status dc__optim_set_lr(dc_optimizer *o, const char *fn, int32_t group, double lr);
dc_status dc__optim_add_param(dc_optimizer *o, const char *fn, int32_t group, const int64_t *shape, int32_t ndim,
                              int64_t offset, int64_t count, int32_t dtype, int64_t *index);
/* o->io is filled in. `status`: whether the arguments were in order; the other ranks hear of it, and the call fails. */
dc_status dc__optim_step(dc_optimizer *o, const char *fn, dc_status status, double grad_scale);
/* The caller's memory, where weights are. */
void dc__optim_set_loss_scale(dc_optimizer *o, const float *loss_scale, const float *found_inf);
int64_t dc__optim_steps(dc_optimizer *o, const char *fn); /* -1: they cannot be read, last error set */
dc_status dc__optim_stats(dc_optimizer *o, const char *fn, dc_optimizer_stats *stats);

/* ---- steps on a stream (queue.c) ---- */

dc_status dc__optim_set_stream(dc_optimizer *o, const char *fn, dc_stream *stream);
/* Until a step that is queued on a stream of the CPU is done, which uses the handle itself. Before all else. */
dc_status dc__optim_wait_task(const dc_optimizer *o);

/* ---- K-FAC's layers (kfac.c) ---- */

/* approximation: enum dc_kfac_approximation. */
dc_status dc__kfac_add_layer(dc_optimizer *o, const char *fn, const dc_sample_layer *constants, int32_t approximation,
                             int64_t weight, int64_t bias, int64_t *index);
dc_status dc__kfac_add_batch(dc_optimizer *o, const char *fn, int64_t index, const dc_tensor *x, const dc_tensor *delta,
                             double loss_scale);

/* ---- state (state.c, checkpoint.c) ---- */

dc_status dc__optim_state_name(dc_optimizer *o, const char *fn, int64_t index, int64_t piece, const char **name);
dc_status dc__optim_state(dc_optimizer *o, const char *fn, int64_t index, const char *name, dc_tensor *view);
dc_status dc__optim_save_size(dc_optimizer *o, const char *fn, size_t *bytes);
dc_status dc__optim_save(dc_optimizer *o, const char *fn, void *memory, size_t bytes);
dc_status dc__optim_load(dc_optimizer *o, const char *fn, const void *memory, size_t bytes);

#endif
