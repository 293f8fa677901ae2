/* Handles, groups and parameters, and the common part of a step. */
#include "optim/optim_internal.h"

#include <math.h>
#include <stdatomic.h>

/* ---- handles ---- */

void dc__optim_destroy(dc_optimizer *o) {
  dc__handle_clear(&o->handle);
  if (o->done != NULL) { /* queued work uses all of it */
    dc__event_wait(o->done, NULL);
    o->done->device->ops->event_destroy(o->done);
  }
  if (o->kind->destroy != NULL) {
    o->kind->destroy(o);
  }
  for (int64_t i = 0; i < o->count; i++) {
    dc__optim_free_pieces(o, &o->params[i]);
    dc__free(o->params[i].shape);
  }
  for (int64_t i = 0; i < o->group_count; i++) {
    dc__free(o->groups[i].options);
  }
  dc__free(o->params);
  dc__free(o->io);
  dc__free(o->places);
  dc__free(o->groups);
  if (o->arena != NULL) {
    dc__arena_release(o->arena);
  }
  if (o->device_state != NULL) {
    o->linalg->device->ops->free(o->linalg->device, o->device_state, sizeof *o->device_state, DC_MEMORY_DEVICE);
  }
  dc_comm_destroy(o->comm);
  if (o->linalg != NULL) {
    dc__linalg_destroy(o->linalg);
  }
  dc__free(o);
}

/* A private handle. If ranks on threads shared one, its lock during a step would block ranks that are waited for. */
static dc_status copy_linalg(const dc_linalg *linalg, dc_linalg **copy) {
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  options.threads = dc__threadpool_threads(linalg->pool);
  options.plain = linalg->blas == NULL ? 1 : 0;
  return dc__linalg_create(linalg->device, &options, copy);
}

static dc_status alloc_device_state(dc_optimizer *o) {
  dc_device *device = o->linalg->device;
  void *device_state;
  DC__TRY(device->ops->alloc(device, sizeof *o->device_state, DC_MEMORY_DEVICE, &device_state));
  o->device_state = device_state;
  dc__stream_zero(device->internal_stream, device_state, sizeof *o->device_state);
  dc__device_sync_internal(device, NULL);
  return DC_OK;
}

dc_status dc__optim_create(const dc__optim_kind *kind, const char *fn, const dc_linalg *linalg, dc_comm *comm,
                           const void *options, bool check_finite, dc_optimizer **optimizer) {
  if (comm != NULL) {
    DC__TRY(dc__comm_check_device(fn, comm, linalg->device));
  }
  dc_optimizer *o = dc__calloc(1, kind->size);
  if (o == NULL) {
    return DC_E_NO_MEMORY;
  }
  o->handle = DC__HANDLE_OPTIMIZER;
  o->kind = kind;
  dc_status status = copy_linalg(linalg, &o->linalg);
  if (status == DC_OK && kind->matrices) {
    status = dc__linalg_check_gemm(o->linalg, fn);
  }
  if (status == DC_OK) {
    status = dc__arena_create(o->linalg->device, NULL, &o->arena);
  }
  if (status == DC_OK && dc__optim_is_cuda(o)) {
    status = alloc_device_state(o);
  }
  if (status == DC_OK) {
    status = dc__optim_set_group(o, fn, 0, options, check_finite);
  }
  if (status == DC_OK && comm != NULL) {
    status = dc_comm_dup(comm, &o->comm);
  }
  if (status != DC_OK) {
    dc__optim_destroy(o);
    return status;
  }
  *optimizer = o;
  return DC_OK;
}

dc_status dc__optim_check_kind(const dc_optimizer *o, const char *fn, const dc__optim_kind *kind) {
  return o->kind == kind
             ? DC_OK
             : dc__fail(DC_E_STATE, "%s: optimizer is of kind %s, must be %s", fn, o->kind->name, kind->name);
}

/* ---- groups ---- */

static dc_status check_group(const dc_optimizer *o, const char *fn, int32_t group, int64_t max) {
  return group >= 0 && group <= max
             ? DC_OK
             : dc__fail(DC_E_INVALID,
                        "%s: group = %" PRId32 ", must be 0 to %" PRId64 " (there %s %" PRId64 " group%s)", fn, group,
                        max, o->group_count == 1 ? "is" : "are", o->group_count, DC__PLURAL_S(o->group_count));
}

/* Whether the options that determine the shape of a group's state must stay. */
static bool options_are_fixed(const dc_optimizer *o, int32_t group) {
  if (o->kind->fixed_by_params) {
    return o->groups[group].params > 0;
  }
  for (int64_t i = 0; i < o->prepared; i++) {
    if (o->params[i].group == group) {
      return true;
    }
  }
  return false;
}

dc_status dc__optim_set_group(dc_optimizer *o, const char *fn, int32_t group, const void *options, bool check_finite) {
  DC__TRY(check_group(o, fn, group, o->group_count));
  if (group == o->group_count) {
    if (!dc__array_reserve((void **)&o->groups, &o->group_capacity, o->group_count + 1, sizeof *o->groups)) {
      return DC_E_NO_MEMORY;
    }
    void *copy = dc__calloc(1, o->kind->options_size);
    if (copy == NULL) {
      return DC_E_NO_MEMORY;
    }
    o->groups[o->group_count++] = (dc__optim_group){.lr = 1e-3, .options = copy};
  }
  dc__optim_group *g = &o->groups[group];
  const char *fixed_option =
      o->kind->fixed_option_changed == NULL ? NULL : o->kind->fixed_option_changed(options, g->options);
  if (fixed_option != NULL && options_are_fixed(o, group)) {
    return dc__fail(DC_E_INVALID, "%s: group %" PRId32 " has %s: %s must stay as it is", fn, group,
                    o->kind->fixed_by_params ? "parameters" : "a state", fixed_option);
  }
  memcpy(g->options, options, o->kind->options_size);
  g->check_finite = check_finite;
  return DC_OK;
}

dc_status dc__optim_set_lr(dc_optimizer *o, const char *fn, int32_t group, double lr) {
  DC__TRY(check_group(o, fn, group, o->group_count - 1));
  if (!(lr >= 0) || isinf(lr)) {
    return dc__fail(DC_E_INVALID, "%s: lr = %g, must be finite and >= 0", fn, lr);
  }
  dc__optim_group *g = &o->groups[group];
  if (g->device_lr != NULL && lr != g->lr) {
    DC__TRY(dc__optim_set_device_lr(o, fn, g->device_lr, lr));
  }
  g->lr = lr;
  return DC_OK;
}

/* ---- parameters ---- */

static bool grow_params(dc_optimizer *o) {
  return dc__array_reserve((void **)&o->params, &o->capacity, o->count + 1, sizeof *o->params) &&
         dc__array_reserve((void **)&o->io, &o->io_capacity, o->count + 1, sizeof *o->io) &&
         dc__array_reserve((void **)&o->places, &o->place_capacity, o->count + 1, sizeof *o->places);
}

dc_status dc__optim_add_param(dc_optimizer *o, const char *fn, int32_t group, const int64_t *shape, int32_t ndim,
                              int64_t offset, int64_t count, int32_t dtype, int64_t *index) {
  dc__optim_param p = {.group = group, .ndim = ndim, .offset = offset, .count = count};
  DC__TRY(check_group(o, fn, group, o->group_count - 1));
  DC__TRY(dc__numel(fn, "shape", shape, ndim, &p.numel));
  if (offset < 0 || count < 0 || offset > p.numel || count > p.numel - offset) {
    return dc__fail(DC_E_INVALID,
                    "%s: offset = %" PRId64 " and count = %" PRId64 ", must be a part of the %" PRId64 " element%s", fn,
                    offset, count, p.numel, DC__PLURAL_S(p.numel));
  }
  if (o->kind->accept != NULL) {
    DC__TRY(o->kind->accept(fn, o->groups[group].options, shape, ndim));
  }
  p.dtype = dtype == DC_DTYPE_NONE ? DC_FLOAT32 : dtype;
  if (p.dtype != DC_FLOAT32 && p.dtype != DC_FLOAT16 && p.dtype != DC_BFLOAT16) {
    return dc__fail(DC_E_DTYPE, "%s: dtype is %s, must be float32, float16 or bfloat16", fn, dc_dtype_name(dtype));
  }
  p.shape = grow_params(o) ? dc__calloc((size_t)ndim + 1, sizeof *p.shape) : NULL;
  if (p.shape == NULL) {
    return DC_E_NO_MEMORY;
  }
  if (ndim > 0) {
    memcpy(p.shape, shape, (size_t)ndim * sizeof *p.shape);
  }
  o->params[o->count] = p;
  o->groups[group].params++;
  if (index != NULL) {
    *index = o->count;
  }
  o->count++;
  return DC_OK;
}

dc_status dc__optim_prepare(dc_optimizer *o, const char *fn) {
  if (o->prepared == o->count) {
    return DC_OK;
  }
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE,
                    "%s: the stream is captured into a CUDA graph, where no state can be made: make a step before the "
                    "capture",
                    fn);
  }
  for (int64_t i = o->prepared; i < o->count; i++) {
    dc__optim_param *p = &o->params[i];
    p->step = dc__optim_add_piece(o, p, "step", DC_INT64, NULL, 0);
    if (p->dtype != DC_FLOAT32) {
      p->master = dc__optim_add_piece(o, p, "master", DC_FLOAT32, &p->count, 1);
    }
    if (p->step == NULL || (p->dtype != DC_FLOAT32 && p->master == NULL)) {
      return DC_E_NO_MEMORY;
    }
  }
  DC__TRY(o->kind->prepare(o, fn, o->prepared));
  DC__TRY(dc__optim_alloc_device_lr(o, fn));
  o->prepared = o->count;
  return DC_OK;
}

/* ---- a step ---- */

static void optimizer_check_part(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, void *arg) {
  float tile[DC__OPTIM_TILE];
  atomic_llong *first = arg;
  long long index = p - o->params;
  bool below = true;
  for (int64_t done = 0; done < count && o->groups[p->group].check_finite && below; done += DC__OPTIM_TILE) {
    const int64_t part = count - done < DC__OPTIM_TILE ? count - done : DC__OPTIM_TILE;
    below = dc__update_is_below(dc__optim_grad(o, p, from + done, part, tile), part, o->kind->exponent);
  }
  if (!below) {
    long long lowest = atomic_load(first);
    while (index < lowest && !atomic_compare_exchange_weak(first, &lowest, index)) {
    }
  }
}

bool dc__optim_checks_finite(const dc_optimizer *o) {
  bool wanted = false;
  for (int64_t i = 0; i < o->group_count; i++) {
    wanted = wanted || o->groups[i].check_finite;
  }
  return wanted;
}

/* The first parameter with a nonfinite gradient; o->count if there is none, or checks are off. */
static dc_status first_nonfinite(dc_optimizer *o, int64_t *index) {
  atomic_llong first = o->count;
  const bool wanted = dc__optim_checks_finite(o);
  if (wanted && dc__optim_is_cuda(o)) {
    dc__optim_scan_nonfinite_cuda(o, o->linalg->device->internal_stream, NULL);
    return dc__optim_first_nonfinite_cuda(o, index);
  }
  if (wanted) {
    dc__optim_each_part(o, optimizer_check_part, &first);
  }
  *index = atomic_load(&first);
  return DC_OK;
}

/* Makes the step to which all ranks agreed. */
static dc_status run_step(dc_optimizer *o, const char *fn) {
  DC__TRY(o->kind->step(o, fn));
  for (int64_t i = 0; i < o->count; i++) {
    if (o->io[i].grad_dtype != DC_DTYPE_NONE) {
      ++*o->params[i].step;
    }
  }
  o->stats.steps++;
  return DC_OK;
}

/* A step on a CPU stream, of a kind that does not communicate and cannot fail. */
static void run_step_task(void *args) {
  dc_optimizer *o = *(dc_optimizer **)args;
  int64_t bad = o->count;
  (void)dc__optim_read_grad_scaler(o);
  if (!o->found_nonfinite) {
    (void)first_nonfinite(o, &bad);
  }
  if (o->found_nonfinite || bad < o->count) {
    o->stats.skipped_steps++;
  } else {
    (void)run_step(o, "dc_optimizer_step");
  }
}

dc_status dc__optim_step(dc_optimizer *o, const char *fn, dc_status status, double grad_scale) {
  int64_t bad = o->count;
  o->found_nonfinite = false;
  if (status == DC_OK) {
    status = dc__optim_prepare(o, fn);
  }
  if (status == DC_OK && dc__optim_is_cuda(o)) {
    status = dc__optim_check_alignment(o, fn);
  }
  if (status == DC_OK) {
    o->grad_scale = grad_scale;
    if (dc__optim_is_async(o)) {
      return dc__optim_enqueue(o, fn, run_step_task);
    }
    status = dc__optim_synchronize(o, fn);
  }
  if (status == DC_OK) {
    status = dc__optim_read_grad_scaler(o);
  }
  if (status == DC_OK && o->kind->ready != NULL) {
    status = o->kind->ready(o, fn);
  }
  if (status == DC_OK && !o->found_nonfinite) {
    status = first_nonfinite(o, &bad);
    if (status == DC_OK && bad < o->count) {
      status = dc__fail(DC_E_NOT_FINITE, "%s: grads[%" PRId64 "] times grad_scale is not finite%s", fn, bad,
                        dc__optim_limit(o));
    }
  }
  status = dc__optim_step_consensus(o, fn, status, bad);
  const bool skipped = status == DC_E_NOT_FINITE || (status == DC_OK && o->found_nonfinite);
  o->stats.skipped_steps += skipped;
  return status == DC_OK && !skipped ? run_step(o, fn) : status;
}

/* ---- queries ---- */

dc_status dc__optim_get_steps(dc_optimizer *o, const char *fn, int64_t *steps) {
  enum { CHUNK = 64 };
  int64_t chunk[CHUNK];
  int64_t max = 0;
  dc_device *device = o->linalg->device;
  dc_stream *on = dc__optim_counts_on_device(o) ? device->internal_stream : NULL;
  DC__TRY(dc__optim_synchronize(o, fn));
  for (int64_t i = 0; i < o->prepared; i++) {
    dc__stream_copy(on, &chunk[i % CHUNK], o->params[i].step, sizeof *chunk);
    if (i % CHUNK == CHUNK - 1 || i == o->prepared - 1) {
      dc__device_sync_internal(device, NULL);
      for (int64_t k = 0; k <= i % CHUNK; k++) {
        max = chunk[k] > max ? chunk[k] : max;
      }
    }
  }
  DC__TRY(dc__device_check(device));
  *steps = max;
  return DC_OK;
}

dc_status dc__optim_stats(dc_optimizer *o, const char *fn, dc_optimizer_stats *stats) {
  dc__arena_stats arena;
  DC__TRY(dc__optim_synchronize(o, fn));
  DC__TRY(dc__optim_prepare(o, fn));
  dc__arena_get_stats(o->arena, &arena);
  *stats = o->stats;
  if (dc__optim_counts_on_device(o)) {
    DC__TRY(dc__optim_read_device_state(o, stats));
  }
  stats->struct_size = sizeof *stats;
  stats->params = o->count;
  stats->state_bytes = arena.used_bytes;
  stats->scratch_bytes += (int64_t)o->linalg->scratch_bytes;
  stats->wire_bytes = o->comm == NULL ? 0 : atomic_load(&o->comm->wire_bytes);
  if (o->kind->stats != NULL) {
    o->kind->stats(o, stats);
  }
  return DC_OK;
}
