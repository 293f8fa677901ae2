/* Optimizers: the header of the module. The public functions in src/api check the caller's options and tensors, lock
 * the handle, and call these. */
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
  int64_t *step;           /* piece "step": steps completed; counted by the host, or by kernels (stream_step.c) */
  float *master;           /* piece "master"; NULL for float32 weights */
  dc__optim_piece *pieces; /* a linked list, so views stay valid */
} dc__optim_param;

/* A step's tensors of one parameter. */
typedef struct dc__optim_io {
  void *weight;
  const void *grad;
  int32_t grad_dtype; /* DC_DTYPE_NONE without a gradient: the parameter stays unchanged */
  int64_t first;      /* its first chunk in the step (param_update_cpu.c) */
} dc__optim_io;

/* Where the weights of one parameter are. */
typedef struct dc__optim_place {
  uintptr_t begin, end;
  int64_t index;
} dc__optim_place;

typedef struct dc__optim_group {
  double lr;
  double *device_lr; /* the learning rate in device memory, if kernels count the steps */
  bool check_finite;
  int64_t params;
  void *options; /* the kind's, with defaults filled in */
} dc__optim_group;

struct dc_optimizer {
  int32_t handle; /* DC__HANDLE_OPTIMIZER */
  const dc__optim_kind *kind;
  dc_linalg *linalg; /* private; the pool is shared. The optimizer locks its mutex, kinds use its scratch */
  dc_comm *comm;     /* private; NULL for one rank */
  dc__arena *arena;  /* of the state */
  dc__optim_param *params;
  dc__optim_io *io; /* [params], of the step in progress */
  int64_t count, capacity, io_capacity;
  dc__optim_place *places; /* [params], to compare them */
  int64_t place_capacity;
  bool weights_apart; /* whether the weights in io were compared, and no two overlap */
  int64_t prepared;   /* parameters with state */
  dc__optim_group *groups;
  int64_t group_count, group_capacity;
  dc__update_status *device_state; /* in device memory; NULL on the CPU */
  double grad_scale;               /* of the step in progress */
  bool found_nonfinite;            /* the caller, or another rank, found a nonfinite gradient */
  const float *loss_scale;         /* the caller's, read in each step; NULL for 1 */
  const float *found_inf;          /* likewise; NULL for 0 */
  dc_stream *stream;               /* the caller's, for queued steps; NULL if steps are synchronous */
  dc_event *done;                  /* passes after the last step queued on a stream; NULL: none was set */
  dc_optimizer_stats stats;        /* counters; memory and bytes are filled in by queries */
};

/* ---- handles, groups, parameters, steps (optimizer.c) ----
 *
 * All but dc__optim_create() and dc__optim_destroy() need the handle locked. fn is the public function's name. */

/* options: those of group 0, checked, with defaults, of the kind's options_size. comm is copied; NULL for one rank. */
dc_status dc__optim_create(const dc__optim_kind *kind, const char *fn, const dc_linalg *linalg, dc_comm *comm,
                           const void *options, bool check_finite, dc_optimizer **optimizer);
void dc__optim_destroy(dc_optimizer *o);
/* DC_E_STATE unless the optimizer is of this kind. */
dc_status dc__optim_check_kind(const dc_optimizer *o, const char *fn, const dc__optim_kind *kind);
/* group: a group's index, or the number of groups to add one. options as in dc__optim_create(). */
dc_status dc__optim_set_group(dc_optimizer *o, const char *fn, int32_t group, const void *options, bool check_finite);
dc_status dc__optim_set_lr(dc_optimizer *o, const char *fn, int32_t group, double lr);
dc_status dc__optim_add_param(dc_optimizer *o, const char *fn, int32_t group, const int64_t *shape, int32_t ndim,
                              int64_t offset, int64_t count, int32_t dtype, int64_t *index);
/* Makes a step with the tensors in o->io. `status`: of the arguments' check; a failure fails the step on all ranks. */
dc_status dc__optim_step(dc_optimizer *o, const char *fn, dc_status status, double grad_scale);
/* Sets pointers to the caller's values, in the memory space of the weights, which each step reads; NULL: none. */
void dc__optim_set_loss_scale(dc_optimizer *o, const float *loss_scale, const float *found_inf);
dc_status dc__optim_get_steps(dc_optimizer *o, const char *fn, int64_t *steps);
dc_status dc__optim_stats(dc_optimizer *o, const char *fn, dc_optimizer_stats *stats);

/* ---- steps on a stream (stream_step.c) ---- */

dc_status dc__optim_set_stream(dc_optimizer *o, const char *fn, dc_stream *stream);
/* Waits for a step queued on a CPU stream, which uses the handle itself. Every call on the handle does so first. */
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
