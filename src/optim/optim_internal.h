/* Shared by the module's files. A kind of optimizer is a table of functions and a struct that begins with
 * dc_optimizer. optimizer.c does the common work before it calls a kind. */
#ifndef DC_OPTIM_INTERNAL_H
#define DC_OPTIM_INTERNAL_H

#include <inttypes.h>
#include <string.h>

#include "optim/optim.h"

/* A piece of a parameter's state. All that a kind keeps from step to step is in pieces, and nothing derived from them
 * is kept. So pieces can be saved, loaded, and written by the caller between steps, without the kind's help. */
struct dc__optim_piece {
  dc__optim_piece *next;
  char name[24];
  int32_t dtype;
  int32_t ndim; /* 0 to 2 */
  int64_t shape[2];
  int64_t numel;
  bool on_host;  /* in host memory wherever the weights are, for the host's counters */
  bool borrowed; /* memory that the kind releases */
  void *data;
};

/* A kind's name, sizes and functions. */
struct dc__optim_kind {
  const char *name;    /* in error texts and saved states, at most 15 characters */
  size_t size;         /* of its struct */
  size_t options_size; /* of its options */
  bool matrices;       /* uses linear algebra, on a device too */
  int32_t exponent;    /* checked gradients must be below 2^exponent, 50 or 128: finite */
  const void *rules;   /* parameters of kinds that share functions */
  /* Returns an option that changed but must not in a group with state, or NULL. A NULL function: there is none. */
  const char *(*fixed_option_changed)(const void *options, const void *old);
  bool fixed_by_params; /* options are fixed from a group's first parameter on: its shape was checked against them */
  /* Whether it supports parameters of this shape and options, or DC_E_SHAPE. NULL for any. */
  dc_status (*accept)(const char *fn, const void *options, const int64_t *shape, int32_t ndim);
  /* Adds the pieces of the parameters from `first` on, and what else they need. Called when the state is first needed
   * after parameters were added; communicates nothing. After a failure it is called again, and finds the pieces that
   * exist. */
  dc_status (*prepare)(dc_optimizer *o, const char *fn, int64_t first);
  /* Whether the state allows a step; o->io has the tensors. The other ranks learn of a failure here before anything
   * changes. NULL: always. */
  dc_status (*ready)(dc_optimizer *o, const char *fn);
  /* o->io has the tensors, checked and, where the group wants it, finite; the ranks agree that the step takes place and
   * which parameters have gradients. On failure weights and state are as before. */
  dc_status (*step)(dc_optimizer *o, const char *fn);
  /* Queues a whole step of one rank on o->linalg->stream, of a device with memory of its own. The step is the scan of
   * the gradients, the counts, and the work of step(). Fails before anything is queued. NULL: steps take
   * place within calls. */
  dc_status (*enqueue)(dc_optimizer *o, const char *fn);
  /* Drops what was collected for the next step: a state was loaded. NULL for none. */
  void (*drop_collected)(dc_optimizer *o);
  /* Adds the kind's statistics. NULL for none. */
  void (*stats)(const dc_optimizer *o, dc_optimizer_stats *stats);
  /* Frees the struct's own members. NULL for none. */
  void (*destroy)(dc_optimizer *o);
};

static inline const void *dc__optim_options(const dc_optimizer *o, const dc__optim_param *p) {
  return o->groups[p->group].options;
}
static inline bool dc__optim_has_grad(const dc_optimizer *o, const dc__optim_param *p) {
  return o->io[p - o->params].grad_dtype != DC_DTYPE_NONE;
}

/* Creates the pieces of all added parameters. (optimizer.c) */
dc_status dc__optim_prepare(dc_optimizer *o, const char *fn);
/* Whether a group's gradients are checked first. */
bool dc__optim_checks_finite(const dc_optimizer *o);

/* ---- before a step (step_consensus.c) ---- */

/* Reads the caller's loss scale into o->grad_scale, and whether the caller found a nonfinite gradient into
 * o->found_nonfinite. */
dc_status dc__optim_read_grad_scaler(dc_optimizer *o);
/* The same by a kernel, into o->device_state. Returns the factor of gradients, or NULL if the caller sets neither. */
const float *dc__optim_read_grad_scaler_cuda(const dc_optimizer *o, dc_stream *on);
/* Exchanges step status with the other ranks. o->found_nonfinite: set if it is on any rank. */
dc_status dc__optim_step_consensus(dc_optimizer *o, const char *fn, dc_status status, int64_t bad);

/* ---- steps on a stream (stream_step.c) ---- */

/* Whether kernels count the steps; a parameter's step is then the first number of a dc__update_step_state. */
bool dc__optim_counts_on_device(const dc_optimizer *o);
/* Whether steps are queued: on a device, or as a task of the caller's stream. */
bool dc__optim_is_async(const dc_optimizer *o);
/* The beginning of enqueue(): checks gradients, counts steps and computes factors, for `kernel`, of all parameters
 * with gradients. Sets the batch's found and scale. */
typedef void (*dc__optim_rule_fn)(const void *options, dc__update_rule *to);
void dc__optim_begin_step_cuda(dc_optimizer *o, int32_t kernel, dc__optim_rule_fn rule, dc__update_batch *batch);
dc__update_step_state *dc__optim_step_record(const dc__optim_param *p);
/* Queues such a step on o->stream; without one, waits until it is done. */
dc_status dc__optim_enqueue(dc_optimizer *o, const char *fn, dc__task_fn task);
/* Waits for o->stream. DC_E_STATE while it is captured. */
dc_status dc__optim_synchronize(const dc_optimizer *o, const char *fn);
/* Learning rates in device memory: allocates missing ones; sets one, in stream order. */
dc_status dc__optim_alloc_device_lr(dc_optimizer *o, const char *fn);
dc_status dc__optim_set_device_lr(const dc_optimizer *o, const char *fn, double *device_lr, double lr);
/* Reads the device's counters of steps, made and skipped, into stats. */
dc_status dc__optim_read_device_state(const dc_optimizer *o, dc_optimizer_stats *stats);

/* ---- pieces (state.c) ---- */

/* Returns zeroed memory of a new piece, from the optimizer's arena, or that of the existing piece of this name. NULL if
 * out of memory, with the last error set. */
void *dc__optim_add_piece(dc_optimizer *o, dc__optim_param *p, const char *name, int32_t dtype, const int64_t *shape,
                          int32_t ndim);
/* The same with zeroed memory that the kind owns, which outlives the piece. */
void *dc__optim_add_borrowed_piece(dc__optim_param *p, const char *name, int32_t dtype, const int64_t *shape,
                                   int32_t ndim, void *memory);
/* NULL if there is none of this name. */
dc__optim_piece *dc__optim_find_piece(const dc__optim_param *p, const char *name);
void dc__optim_free_pieces(dc_optimizer *o, dc__optim_param *p);

/* ---- on a device (param_update_cuda.c) ---- */

bool dc__optim_is_cuda(const dc_optimizer *o);
/* Kernels need elements aligned to their size. */
dc_status dc__optim_check_alignment(const dc_optimizer *o, const char *fn);
/* Fills in a span with a parameter's tensors in this step. */
void dc__optim_fill_span(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *span);
/* Fills in state and factors of a parameter's span. Returns false to skip it. */
typedef bool (*dc__optim_span_fn)(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *span);
/* Queues launches for all parameters with gradients; the batch has the other arguments. kind: enum dc__update_kind. */
void dc__optim_launch_spans(const dc_optimizer *o, dc_stream *on, int32_t kind, dc__update_batch *batch,
                            dc__optim_span_fn fn);
/* The same for one parameter with a gradient: the batch's one span, with the caller's state and factors. */
void dc__optim_launch_param(const dc_optimizer *o, int32_t kind, const dc__optim_param *p, dc__update_batch *batch);
/* Writes the first parameter with a too large gradient, among groups with checks, to o->device_state. scale: from
 * dc__optim_read_grad_scaler_cuda(), or NULL. */
void dc__optim_scan_nonfinite_cuda(const dc_optimizer *o, dc_stream *on, const float *scale);
/* Gets that parameter: o->count if there is none, INT64_MAX if the caller found one. Waits for the internal stream,
 * which did the scan. */
dc_status dc__optim_first_nonfinite_cuda(const dc_optimizer *o, int64_t *index);

/* ---- work on single elements (param_update_cpu.c) ---- */

enum { DC__OPTIM_TILE = 1024 }; /* elements of an intermediate on the stack */

/* Runs fn on all elements of the parameters with gradients, in parts, on the threads. */
typedef void (*dc__optim_part_fn)(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, void *arg);
void dc__optim_each_part(dc_optimizer *o, dc__optim_part_fn fn, void *arg);

/* `count` elements of a parameter's gradient, from element `from` of the part on, as float32 times grad_scale: in
 * `tile`, or in place if that is already so. */
const float *dc__optim_grad(const dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count,
                            float tile[DC__OPTIM_TILE]);

/* A tile with its weights as float32, which fn changes. For 16-bit weights it is a part of the master, synchronised
 * before and rounded into the weight after. */
typedef struct dc__optim_tile {
  const dc__optim_param *param;
  int64_t from, count; /* elements of the part */
  float *weight;
  const float *grad; /* times grad_scale */
} dc__optim_tile;
typedef void (*dc__optim_tile_fn)(dc_optimizer *o, const dc__optim_tile *tile, void *arg);
/* Runs fn on all elements of one parameter with a gradient, in tiles, on the threads. */
void dc__optim_param_tiles(dc_optimizer *o, const dc__optim_param *p, dc__optim_tile_fn fn, void *arg);

/* ---- AdamW and SGD (elementwise.c) ---- */

typedef struct dc__elementwise {
  dc_optimizer head;
  dc__update_span *params; /* state of each; on the CPU also a step's tensors and factors */
  int64_t capacity;
} dc__elementwise;

/* Added to "finite" in error texts about allowed gradients. */
static inline const char *dc__optim_limit(const dc_optimizer *o) {
  return o->kind->exponent < 128 ? ", or not below 2^50" : "";
}

/* `rules` of their dc__optim_kind. */
typedef struct dc__elementwise_rules {
  int32_t kernel; /* DC__UPDATE_ADAMW or _SGD */
  /* Adds the pieces; false: no memory. */
  bool (*add_state)(dc_optimizer *o, dc__optim_param *p, float *state[3]);
  dc__optim_rule_fn rule; /* fills in what a step's factors are computed from */
} dc__elementwise_rules;

dc_status dc__elementwise_prepare(dc_optimizer *o, const char *fn, int64_t first);
dc_status dc__elementwise_step(dc_optimizer *o, const char *fn);
dc_status dc__elementwise_enqueue(dc_optimizer *o, const char *fn);
void dc__elementwise_destroy(dc_optimizer *o);

#define DC__ELEMENTWISE_KIND                                                                                          \
  .size = sizeof(dc__elementwise), .exponent = 128, .prepare = dc__elementwise_prepare, .step = dc__elementwise_step, \
  .enqueue = dc__elementwise_enqueue, .destroy = dc__elementwise_destroy

#endif
