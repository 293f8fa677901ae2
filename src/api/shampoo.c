/* Chapter 14: Shampoo. */
#include <inttypes.h>
#include <math.h>

#include "api/optim.h"

enum { SHAMPOO_OPTIONS_SIZE_0_1 = 136, MOST_BLOCK = 16384 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_shampoo_options) >= SHAMPOO_OPTIONS_SIZE_0_1, "0.1");

void dc_shampoo_options_init(dc_shampoo_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_numbers(const char *fn, dc_shampoo_options *o) {
  static const dc__number_rule beta1 = {.fallback = 0.9, .high = 1, .none = true};
  static const dc__number_rule beta2 = {.fallback = 1, .high = 1, .closed = true};
  static const dc__number_rule eps_abs = {.fallback = 1e-12, .high = INFINITY, .none = true};
  static const dc__number_rule eps_rel = {.fallback = 1e-6, .high = INFINITY, .none = true};
  static const dc__number_rule tolerance = {.fallback = 1e-2, .high = INFINITY, .none = true};
  static const dc__number_rule graft_beta2 = {.fallback = 0.999, .high = 1};
  static const dc__number_rule graft_eps = {.fallback = 1e-8, .high = INFINITY};
  static const dc__number_rule decay = {.fallback = 0, .high = INFINITY};
  static const dc__number_rule momentum = {.fallback = 0, .high = 1};
  DC__TRY(dc__check_number(fn, "beta1", &o->beta1, &beta1));
  DC__TRY(dc__check_number(fn, "beta2", &o->beta2, &beta2));
  DC__TRY(dc__check_number(fn, "eps_abs", &o->eps_abs, &eps_abs));
  DC__TRY(dc__check_number(fn, "eps_rel", &o->eps_rel, &eps_rel));
  DC__TRY(dc__check_number(fn, "tolerance", &o->tolerance, &tolerance));
  DC__TRY(dc__check_number(fn, "graft_beta2", &o->graft_beta2, &graft_beta2));
  DC__TRY(dc__check_number(fn, "graft_eps", &o->graft_eps, &graft_eps));
  DC__TRY(dc__check_number(fn, "weight_decay", &o->weight_decay, &decay));
  return dc__check_number(fn, "momentum", &o->momentum, &momentum);
}

/* A whole number; 0 stands for `fallback`. */
static dc_status read_count(const char *fn, const char *field, int64_t *value, int64_t fallback, int64_t low,
                            int64_t high) {
  if (*value == 0) {
    *value = fallback;
  }
  return *value >= low && *value <= high
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: options.%s = %" PRId64 ", must be %" PRId64 " to %" PRId64 ", or 0", fn,
                        field, *value, low, high);
}

static dc_status read_counts(const char *fn, dc_shampoo_options *o) {
  int64_t failures = o->tolerated_failures;
  int64_t root = o->root;
  DC__TRY(read_count(fn, "max_block", &o->max_block, 1024, 1, MOST_BLOCK));
  DC__TRY(read_count(fn, "merge_below", &o->merge_below, o->max_block, -1, INT64_MAX));
  DC__TRY(read_count(fn, "precondition_frequency", &o->precondition_frequency, 1, 1, INT64_MAX));
  DC__TRY(read_count(fn, "start_preconditioning_step", &o->start_preconditioning_step, o->precondition_frequency, 1,
                     INT64_MAX));
  DC__TRY(read_count(fn, "root", &root, 0, 0, 64));
  DC__TRY(read_count(fn, "tolerated_failures", &failures, 3, -1, INT32_MAX));
  o->merge_below = o->merge_below > 0 ? o->merge_below : 0;
  o->tolerated_failures = failures > 0 ? (int32_t)failures : 0;
  return DC_OK;
}

static dc_status read_options(const char *fn, const dc_shampoo_options *options, dc_shampoo_options *o) {
  *o = (dc_shampoo_options)DC_SHAMPOO_OPTIONS_INIT;
  DC__TRY(dc__read_options(fn, "options", o, sizeof *o, options, SHAMPOO_OPTIONS_SIZE_0_1));
  DC__TRY(read_numbers(fn, o));
  DC__TRY(read_counts(fn, o));
  DC__TRY(dc__check_range(fn, "options.graft", o->graft, DC_GRAFT_ADAM, DC_GRAFT_RMSPROP));
  DC__TRY(dc__check_range(fn, "options.decay", o->decay, DC_DECAY_DECOUPLED, DC_DECAY_L2));
  DC__TRY(dc__check_flag(fn, "options.nesterov", o->nesterov));
  if (o->nesterov == 1 && o->momentum == 0) {
    return dc__fail(DC_E_INVALID, "%s: options.nesterov = 1 needs momentum > 0", fn);
  }
  return dc__check_range(fn, "options.reserved0", o->reserved0, 0, 0);
}

dc_status dc_shampoo_create(dc_linalg *linalg, dc_comm *comm, const dc_shampoo_options *options,
                            dc_optimizer **optimizer) {
  dc_shampoo_options read;
  DC__NEW_OPTIMIZER(optimizer);
  DC__TRY(read_options(__func__, options, &read));
  return dc__make_optimizer(__func__, &dc__shampoo_kind, linalg, comm, &read, true, optimizer);
}

dc_status dc_shampoo_set_group(dc_optimizer *optimizer, int32_t group, const dc_shampoo_options *options) {
  dc_shampoo_options read;
  DC__TRY(read_options(__func__, options, &read));
  DC__WITH_OPTIMIZER(optimizer, dc__set_optimizer_group(optimizer, __func__, &dc__shampoo_kind, group, &read, true));
}
