/* Chapter 14: Shampoo and SOAP. */
#include <inttypes.h>
#include <math.h>

#include "api/optimizer/optimizer_api.h"

enum { SHAMPOO_OPTIONS_SIZE_0_1 = 136, SOAP_OPTIONS_SIZE_0_1 = 88 };
enum { MOST_BLOCK = 16384 }; /* the longest side with a factor */

_Static_assert(sizeof(void *) != 8 || sizeof(dc_shampoo_options) >= SHAMPOO_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_soap_options) >= SOAP_OPTIONS_SIZE_0_1, "0.1");

/* ---- Shampoo ---- */

void dc_shampoo_options_init(dc_shampoo_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status shampoo_read_numbers(const char *fn, dc_shampoo_options *o) {
  static const dc__number_rule beta1 = {.fallback = 0.9, .high = 1, .none = true};
  static const dc__number_rule beta2 = {.fallback = 1, .high = 1, .closed = true};
  static const dc__number_rule eps_abs = {.fallback = 1e-12, .high = INFINITY, .none = true};
  static const dc__number_rule eps_rel = {.fallback = 1e-6, .high = INFINITY, .none = true};
  static const dc__number_rule tolerance = {.fallback = 0, .high = INFINITY};
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

static dc_status read_counts(const char *fn, dc_shampoo_options *o) {
  int64_t root = o->root;
  DC__TRY(dc__check_count(fn, "max_block", &o->max_block, 1024, 1, MOST_BLOCK));
  DC__TRY(dc__check_count(fn, "merge_below", &o->merge_below, o->max_block, -1, INT64_MAX));
  DC__TRY(dc__check_count(fn, "precondition_frequency", &o->precondition_frequency, 1, 1, INT64_MAX));
  DC__TRY(dc__check_count(fn, "start_preconditioning_step", &o->start_preconditioning_step, o->precondition_frequency,
                          1, INT64_MAX));
  DC__TRY(dc__check_count(fn, "root", &root, 0, 0, 64));
  DC__TRY(dc__check_failures(fn, &o->tolerated_failures));
  o->merge_below = o->merge_below > 0 ? o->merge_below : 0;
  return DC_OK;
}

static dc_status read_shampoo(const char *fn, const void *options, void *to, bool *finite) {
  dc_shampoo_options *o = to;
  *o = (dc_shampoo_options)DC_SHAMPOO_OPTIONS_INIT;
  *finite = true;
  DC__TRY(dc__read_options(fn, "options", o, sizeof *o, options, SHAMPOO_OPTIONS_SIZE_0_1));
  DC__TRY(shampoo_read_numbers(fn, o));
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
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__shampoo_kind, read_shampoo, linalg, comm, options, optimizer);
}

dc_status dc_shampoo_set_group(dc_optimizer *optimizer, int32_t group, const dc_shampoo_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__shampoo_kind, read_shampoo, optimizer, group, options);
}

/* ---- SOAP ---- */

void dc_soap_options_init(dc_soap_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_soap(const char *fn, const void *options, void *to, bool *finite) {
  static const dc__number_rule beta = {.fallback = 0.95, .high = 1, .none = true};
  static const dc__number_rule eps = {.fallback = 1e-8, .high = INFINITY, .none = true};
  static const dc__number_rule decay = {.fallback = 0, .high = INFINITY};
  dc_soap_options *o = to;
  *o = (dc_soap_options)DC_SOAP_OPTIONS_INIT;
  *finite = true;
  DC__TRY(dc__read_options(fn, "options", o, sizeof *o, options, SOAP_OPTIONS_SIZE_0_1));
  DC__TRY(dc__check_number(fn, "beta1", &o->beta1, &beta));
  DC__TRY(dc__check_number(fn, "beta2", &o->beta2, &beta));
  const dc__number_rule factors = {.fallback = o->beta2, .high = 1, .none = true};
  DC__TRY(dc__check_number(fn, "shampoo_beta", &o->shampoo_beta, &factors));
  DC__TRY(dc__check_number(fn, "eps", &o->eps, &eps));
  DC__TRY(dc__check_number(fn, "weight_decay", &o->weight_decay, &decay));
  DC__TRY(dc__check_count(fn, "max_block", &o->max_block, INT64_MAX, 1, INT64_MAX));
  DC__TRY(dc__check_count(fn, "max_precond_dim", &o->max_precond_dim, 10000, -1, MOST_BLOCK));
  DC__TRY(dc__check_count(fn, "precondition_frequency", &o->precondition_frequency, 10, 1, INT64_MAX));
  DC__TRY(dc__check_range(fn, "options.merge_below", o->merge_below, 0, INT64_MAX));
  DC__TRY(dc__check_failures(fn, &o->tolerated_failures));
  return dc__check_range(fn, "options.reserved0", o->reserved0, 0, 0);
}

dc_status dc_soap_create(dc_linalg *linalg, dc_comm *comm, const dc_soap_options *options, dc_optimizer **optimizer) {
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__soap_kind, read_soap, linalg, comm, options, optimizer);
}

dc_status dc_soap_set_group(dc_optimizer *optimizer, int32_t group, const dc_soap_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__soap_kind, read_soap, optimizer, group, options);
}
