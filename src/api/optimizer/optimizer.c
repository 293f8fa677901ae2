/* Chapter 14: functions common to all optimizers. */
#include "api/optimizer/optimizer_api.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* The size of the struct in the version that introduced it; frozen from then on. */
enum { OPTIMIZER_STATS_SIZE_0_1 = 104 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_optimizer_stats) >= OPTIMIZER_STATS_SIZE_0_1, "0.1");

void dc_optimizer_stats_init(dc_optimizer_stats *stats, size_t struct_size) {
  dc__init_sized(stats, struct_size, sizeof *stats);
}

/* ---- entering ---- */

dc_status dc__optimizer_enter(dc_optimizer *optimizer, const char *fn) {
  DC__TRY(dc__handle_check(fn, "optimizer", optimizer, DC__HANDLE_OPTIMIZER));
  DC__TRY(dc__owner_check(fn, "handle", &optimizer->linalg->device->owner));
  pthread_mutex_lock(&optimizer->linalg->mutex);
  dc__device_begin(optimizer->linalg->device);
  dc_status status = dc__optim_wait_task(optimizer);
  return status == DC_OK ? DC_OK : dc__optimizer_leave(optimizer, status);
}

dc_status dc__optimizer_leave(dc_optimizer *optimizer, dc_status status) {
  dc__device_end(optimizer->linalg->device);
  pthread_mutex_unlock(&optimizer->linalg->mutex);
  return status;
}

/* ---- options ---- */

dc_status dc__check_number(const char *fn, const char *field, double *value, const dc__number_rule *rule) {
  double x = *value;
  if (x == 0 || (rule->none && x == -1)) {
    *value = x == 0 ? rule->fallback : 0;
    return DC_OK;
  }
  if (x > 0 && (x < rule->high || (rule->closed && x == rule->high))) {
    return DC_OK;
  }
  char most[32] = "finite";
  if (!isinf(rule->high)) {
    dc__print(most, sizeof most, "%s %g", rule->closed ? "<=" : "<", rule->high);
  }
  if (rule->fallback == 0) {
    return dc__fail(DC_E_INVALID, "%s: options.%s = %g, must be >= 0 and %s", fn, field, x, most);
  }
  return dc__fail(DC_E_INVALID, "%s: options.%s = %g, must be > 0 and %s; 0 stands for %g%s", fn, field, x, most,
                  rule->fallback, rule->none ? ", -1 for none" : "");
}

dc_status dc__check_count(const char *fn, const char *field, int64_t *value, int64_t fallback, int64_t low,
                          int64_t high) {
  if (*value == 0) {
    *value = fallback;
  }
  return *value >= low && *value <= high
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: options.%s = %" PRId64 ", must be %" PRId64 " to %" PRId64 ", or 0", fn,
                        field, *value, low, high);
}

dc_status dc__check_failures(const char *fn, int32_t *value) {
  int64_t failures = *value;
  DC__TRY(dc__check_count(fn, "tolerated_failures", &failures, 3, -1, INT32_MAX));
  *value = failures > 0 ? (int32_t)failures : 0;
  return DC_OK;
}

/* ---- handles and groups ---- */

/* Memory for the options of any kind. */
typedef union any_options {
  dc_adamw_options adamw;
  dc_kfac_options kfac;
  dc_muon_options muon;
  dc_sgd_options sgd;
  dc_shampoo_options shampoo;
  dc_soap_options soap;
} any_options;

dc_status dc__make_optimizer(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read, dc_linalg *linalg,
                             dc_comm *comm, const void *options, dc_optimizer **optimizer) {
  any_options own;
  bool finite = false;
  if (optimizer == NULL) {
    return dc__fail(DC_E_INVALID, "%s: optimizer is NULL", fn);
  }
  *optimizer = NULL;
  DC__TRY(read(fn, options, &own, &finite));
  DC__TRY(dc__handle_check(fn, "linalg", linalg, DC__HANDLE_LINALG));
  DC__TRY(dc__owner_check(fn, "handle", &linalg->device->owner));
  DC__TRY(dc__handle_check_optional(fn, "comm", comm, DC__HANDLE_COMM));
  if (comm != NULL) {
    DC__TRY(dc__owner_check(fn, "communicator", &comm->owner));
  }
  return dc__optim_create(kind, fn, linalg, comm, &own, finite, optimizer);
}

static dc_status optimizer_set_group(const char *fn, const dc__optim_kind *kind, dc_optimizer *o, int32_t group,
                                     const any_options *options, bool finite) {
  DC__TRY(dc__optim_check_kind(o, fn, kind));
  return dc__optim_set_group(o, fn, group, options, finite);
}

dc_status dc__set_optimizer_group(const char *fn, const dc__optim_kind *kind, dc__read_kind_fn read,
                                  dc_optimizer *optimizer, int32_t group, const void *options) {
  any_options own;
  bool finite = false;
  DC__TRY(read(fn, options, &own, &finite));
  DC__TRY(dc__optimizer_enter(optimizer, fn));
  return dc__optimizer_leave(optimizer, optimizer_set_group(fn, kind, optimizer, group, &own, finite));
}

void dc_optimizer_destroy(dc_optimizer *optimizer) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(optimizer, DC__HANDLE_OPTIMIZER) && !dc__owner_is_forked(&optimizer->linalg->device->owner)) {
    dc__optim_destroy(optimizer);
  }
}

dc_status dc_optimizer_set_lr(dc_optimizer *optimizer, int32_t group, double lr) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_set_lr(optimizer, __func__, group, lr));
}

dc_status dc_optimizer_add_param(dc_optimizer *optimizer, int32_t group, const int64_t *shape, int32_t ndim,
                                 int64_t offset, int64_t count, int32_t dtype, int64_t *index) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer,
                             dc__optim_add_param(optimizer, __func__, group, shape, ndim, offset, count, dtype, index));
}

/* ---- a step ---- */

/* Reads one tensor of a step. Its name with the index is formatted only on an error, as that takes time. */
static dc_status optimizer_read_part(const char *fn, const char *arg, const dc_tensor *tensor, int64_t index,
                                     const dc__optim_param *p, dc_tensor *read) {
  char name[32];
  int64_t numel;
  if (dc__tensor_read(fn, arg, tensor, false, read, &numel) != DC_OK) {
    (void)snprintf(name, sizeof name, "%s[%" PRId64 "]", arg, index);
    return dc__tensor_read(fn, name, tensor, false, read, &numel);
  }
  return numel == p->count
             ? DC_OK
             : dc__fail(DC_E_SHAPE,
                        "%s: %s[%" PRId64 "] has %" PRId64 " element%s, must have %" PRId64 " as the parameter's part",
                        fn, arg, index, numel, DC__PLURAL_S(numel), p->count);
}

static dc_status read_pair(const char *fn, const dc_tensor *weight, const dc_tensor *grad, int64_t i,
                           const dc__optim_param *p, bool counting, dc__optim_io *io) {
  dc_tensor w;
  dc_tensor g = DC_TENSOR_INIT;
  DC__TRY(optimizer_read_part(fn, "weights", weight, i, p, &w));
  DC__TRY(dc__read_options(fn, "grads", &g, sizeof g, grad, DC__TENSOR_SIZE_0_1));
  if (g.dtype != DC_DTYPE_NONE) {
    DC__TRY(optimizer_read_part(fn, "grads", grad, i, p, &g));
  }
  if (w.dtype != p->dtype) {
    return dc__fail(DC_E_DTYPE, "%s: weights[%" PRId64 "] is %s, the parameter was added as %s", fn, i,
                    dc_dtype_name(w.dtype), dc_dtype_name(p->dtype));
  }
  if (g.dtype != DC_DTYPE_NONE && g.dtype != DC_FLOAT32 && g.dtype != DC_FLOAT16 && g.dtype != DC_BFLOAT16) {
    return dc__fail(DC_E_DTYPE, "%s: grads[%" PRId64 "] is %s, must be float32, float16 or bfloat16", fn, i,
                    dc_dtype_name(g.dtype));
  }
  const size_t count = (size_t)p->count;
  if (g.dtype != DC_DTYPE_NONE && !counting &&
      dc__ranges_overlap(w.data, count * dc_dtype_size(w.dtype), g.data, count * dc_dtype_size(g.dtype))) {
    return dc__fail(DC_E_INVALID, "%s: grads[%" PRId64 "] overlaps weights[%" PRId64 "], which are written", fn, i, i);
  }
  io->weight = w.data;
  io->grad = g.data;
  io->grad_dtype = g.dtype;
  return DC_OK;
}

static int by_begin(const void *a, const void *b) {
  const uintptr_t of_a = ((const dc__optim_place *)a)->begin, of_b = ((const dc__optim_place *)b)->begin;
  return (of_a > of_b) - (of_a < of_b);
}

/* Refuses weights in the same memory: threads would write them at once. Sorted by address, those that overlap any
 * overlap a neighbour. */
static dc_status check_weights_apart(dc_optimizer *o, const char *fn) {
  dc__optim_place *places = o->places;
  int64_t used = 0;
  for (int64_t i = 0; i < o->count; i++) {
    const uintptr_t begin = (uintptr_t)o->io[i].weight;
    if (o->params[i].count > 0) {
      const uintptr_t end = begin + (uintptr_t)o->params[i].count * dc_dtype_size(o->params[i].dtype);
      places[used++] = (dc__optim_place){.begin = begin, .end = end, .index = i};
    }
  }
  qsort(places, (size_t)used, sizeof *places, by_begin);
  for (int64_t k = 1; k < used; k++) {
    if (places[k].begin < places[k - 1].end) {
      const int64_t one = places[k - 1].index, other = places[k].index;
      return dc__fail(DC_E_INVALID,
                      "%s: weights[%" PRId64 "] overlaps weights[%" PRId64 "]: each must have its own memory", fn,
                      one < other ? one : other, one < other ? other : one);
    }
  }
  o->weights_apart = true;
  return DC_OK;
}

static dc_status read_step(dc_optimizer *o, const char *fn, const dc_tensor *weights, const dc_tensor *grads,
                           size_t tensor_size, int64_t count, double grad_scale) {
  if (count != o->count) {
    return dc__fail(DC_E_INVALID, "%s: count = %" PRId64 ", must be %" PRId64 ", the number of parameters", fn, count,
                    o->count);
  }
  DC__TRY(dc__tensors_check(fn, "weights", weights, tensor_size, count));
  DC__TRY(dc__tensors_check(fn, "grads", grads, tensor_size, count));
  if (!isfinite(grad_scale)) {
    return dc__fail(DC_E_INVALID, "%s: grad_scale = %g, must be finite", fn, grad_scale);
  }
  const bool counting = dc__device_is_counting(o->linalg->device);
  for (int64_t i = 0; i < count; i++) {
    const void *before = o->io[i].weight;
    DC__TRY(read_pair(fn, dc__tensors_at(weights, tensor_size, i), dc__tensors_at(grads, tensor_size, i), i,
                      &o->params[i], counting, &o->io[i]));
    o->weights_apart = o->weights_apart && o->io[i].weight == before; /* else compared once more */
  }
  return o->weights_apart || counting ? DC_OK : check_weights_apart(o, fn);
}

dc_status dc_optimizer_step(dc_optimizer *optimizer, dc_tensor *weights, const dc_tensor *grads, size_t tensor_size,
                            int64_t count, double grad_scale) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(
      optimizer,
      dc__optim_step(optimizer, __func__,
                     read_step(optimizer, __func__, weights, grads, tensor_size, count, grad_scale), grad_scale));
}

/* Reads a float32 number in the caller's memory; NULL: none. */
static dc_status optimizer_read_number(const char *fn, const char *arg, const dc_tensor *tensor, const float **number) {
  dc_tensor read;
  int64_t numel;
  *number = NULL;
  if (tensor == NULL) {
    return DC_OK;
  }
  DC__TRY(dc__tensor_read(fn, arg, tensor, false, &read, &numel));
  if (read.dtype != DC_FLOAT32) {
    return dc__fail(DC_E_DTYPE, "%s: %s is %s, must be float32", fn, arg, dc_dtype_name(read.dtype));
  }
  if (numel != 1) {
    return dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " elements, must have 1", fn, arg, numel);
  }
  if ((uintptr_t)read.data % sizeof **number != 0) {
    return dc__fail(DC_E_INVALID, "%s: %s.data = %p, must be a multiple of %zu", fn, arg, read.data, sizeof **number);
  }
  *number = read.data;
  return DC_OK;
}

static dc_status optimizer_set_loss_scale(dc_optimizer *o, const float *loss_scale, const float *found_inf) {
  dc__optim_set_loss_scale(o, loss_scale, found_inf);
  return DC_OK;
}

dc_status dc_optimizer_set_loss_scale(dc_optimizer *optimizer, const dc_tensor *loss_scale,
                                      const dc_tensor *found_inf) {
  DC__WITHOUT_TRAPS;
  const float *scale;
  const float *found;
  DC__TRY(optimizer_read_number(__func__, "loss_scale", loss_scale, &scale));
  DC__TRY(optimizer_read_number(__func__, "found_inf", found_inf, &found));
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, optimizer_set_loss_scale(optimizer, scale, found));
}

static dc_status optimizer_set_stream(dc_optimizer *o, const char *fn, dc_stream *stream) {
  DC__TRY(dc__handle_check_optional(fn, "stream", stream, DC__HANDLE_STREAM));
  return dc__optim_set_stream(o, fn, stream);
}

dc_status dc_optimizer_set_stream(dc_optimizer *optimizer, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, optimizer_set_stream(optimizer, __func__, stream));
}

dc_status dc_optimizer_get_steps(dc_optimizer *optimizer, int64_t *steps) {
  DC__WITHOUT_TRAPS;
  if (steps == NULL) {
    return dc__fail(DC_E_INVALID, "%s: steps is NULL", __func__);
  }
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_get_steps(optimizer, __func__, steps));
}

/* ---- state ---- */

dc_status dc_optimizer_get_state_name(dc_optimizer *optimizer, int64_t index, int64_t piece, const char **name) {
  DC__WITHOUT_TRAPS;
  if (name == NULL) {
    return dc__fail(DC_E_INVALID, "%s: name is NULL", __func__);
  }
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_state_name(optimizer, __func__, index, piece, name));
}

dc_status dc_optimizer_get_state(dc_optimizer *optimizer, int64_t index, const char *name, dc_tensor *view) {
  DC__WITHOUT_TRAPS;
  if (name == NULL) {
    return dc__fail(DC_E_INVALID, "%s: name is NULL", __func__);
  }
  DC__TRY(dc__tensor_check_output(__func__, "view", view));
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_state(optimizer, __func__, index, name, view));
}

static dc_status optimizer_get_save_bytes(dc_optimizer *o, const char *fn, int64_t *bytes) {
  size_t size;
  DC__TRY(dc__optim_save_size(o, fn, &size));
  *bytes = (int64_t)size;
  return DC_OK;
}

dc_status dc_optimizer_get_save_bytes(dc_optimizer *optimizer, int64_t *bytes) {
  DC__WITHOUT_TRAPS;
  if (bytes == NULL) {
    return dc__fail(DC_E_INVALID, "%s: bytes is NULL", __func__);
  }
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, optimizer_get_save_bytes(optimizer, __func__, bytes));
}

dc_status dc_optimizer_save(dc_optimizer *optimizer, void *memory, int64_t bytes) {
  DC__WITHOUT_TRAPS;
  if (memory == NULL) {
    return dc__fail(DC_E_INVALID, "%s: memory is NULL", __func__);
  }
  DC__TRY(dc__check_range(__func__, "bytes", bytes, 0, INT64_MAX));
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_save(optimizer, __func__, memory, (size_t)bytes));
}

dc_status dc_optimizer_load(dc_optimizer *optimizer, const void *memory, int64_t bytes) {
  DC__WITHOUT_TRAPS;
  if (memory == NULL) {
    return dc__fail(DC_E_INVALID, "%s: memory is NULL", __func__);
  }
  DC__TRY(dc__check_range(__func__, "bytes", bytes, 0, INT64_MAX));
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, dc__optim_load(optimizer, __func__, memory, (size_t)bytes));
}

static dc_status optimizer_get_stats(dc_optimizer *o, const char *fn, dc_optimizer_stats *stats) {
  dc_optimizer_stats read;
  DC__TRY(dc__optim_stats(o, fn, &read));
  return dc__write_sized(fn, "stats", stats, &read, sizeof read, OPTIMIZER_STATS_SIZE_0_1);
}

dc_status dc_optimizer_get_stats(dc_optimizer *optimizer, dc_optimizer_stats *stats) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, optimizer_get_stats(optimizer, __func__, stats));
}
