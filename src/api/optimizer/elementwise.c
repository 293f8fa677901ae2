/* Chapter 14: AdamW and SGD. */
#include <math.h>

#include "api/optimizer/optimizer_api.h"

/* Sizes of the structs in the version that introduced them; frozen from then on. */
enum { ADAMW_OPTIONS_SIZE_0_1 = 56, SGD_OPTIONS_SIZE_0_1 = 48 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_adamw_options) >= ADAMW_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_sgd_options) >= SGD_OPTIONS_SIZE_0_1, "0.1");

void dc_adamw_options_init(dc_adamw_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

void dc_sgd_options_init(dc_sgd_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_adamw(const char *fn, const void *options, void *to, bool *finite) {
  static const dc__number_rule beta1 = {.fallback = 0.9, .high = 1, .none = true};
  static const dc__number_rule beta2 = {.fallback = 0.999, .high = 1, .none = true};
  static const dc__number_rule eps = {.fallback = 1e-8, .high = INFINITY, .none = true};
  static const dc__number_rule decay = {.fallback = 0, .high = INFINITY};
  dc_adamw_options *read = to;
  *read = (dc_adamw_options)DC_ADAMW_OPTIONS_INIT;
  DC__TRY(dc__read_options(fn, "options", read, sizeof *read, options, ADAMW_OPTIONS_SIZE_0_1));
  DC__TRY(dc__check_number(fn, "beta1", &read->beta1, &beta1));
  DC__TRY(dc__check_number(fn, "beta2", &read->beta2, &beta2));
  DC__TRY(dc__check_number(fn, "eps", &read->eps, &eps));
  DC__TRY(dc__check_number(fn, "weight_decay", &read->weight_decay, &decay));
  DC__TRY(dc__check_flag(fn, "options.amsgrad", read->amsgrad));
  DC__TRY(dc__check_flag(fn, "options.maximize", read->maximize));
  DC__TRY(dc__check_flag(fn, "options.check_finite", read->check_finite));
  *finite = read->check_finite == 1;
  return dc__check_range(fn, "options.reserved0", read->reserved0, 0, 0);
}

static dc_status read_sgd(const char *fn, const void *options, void *to, bool *finite) {
  static const dc__number_rule below_one = {.fallback = 0, .high = 1};
  static const dc__number_rule dampening = {.fallback = 0, .high = 1, .closed = true};
  static const dc__number_rule decay = {.fallback = 0, .high = INFINITY};
  dc_sgd_options *read = to;
  *read = (dc_sgd_options)DC_SGD_OPTIONS_INIT;
  DC__TRY(dc__read_options(fn, "options", read, sizeof *read, options, SGD_OPTIONS_SIZE_0_1));
  DC__TRY(dc__check_number(fn, "momentum", &read->momentum, &below_one));
  DC__TRY(dc__check_number(fn, "dampening", &read->dampening, &dampening));
  DC__TRY(dc__check_number(fn, "weight_decay", &read->weight_decay, &decay));
  DC__TRY(dc__check_flag(fn, "options.nesterov", read->nesterov));
  DC__TRY(dc__check_flag(fn, "options.maximize", read->maximize));
  DC__TRY(dc__check_flag(fn, "options.check_finite", read->check_finite));
  *finite = read->check_finite == 1;
  if (read->nesterov == 1 && (read->momentum == 0 || read->dampening != 0)) {
    return dc__fail(DC_E_INVALID, "%s: options.nesterov = 1 needs momentum > 0 and dampening = 0", fn);
  }
  return dc__check_range(fn, "options.reserved0", read->reserved0, 0, 0);
}

dc_status dc_adamw_create(dc_linalg *linalg, const dc_adamw_options *options, dc_optimizer **optimizer) {
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__adamw_kind, read_adamw, linalg, NULL, options, optimizer);
}

dc_status dc_adamw_set_group(dc_optimizer *optimizer, int32_t group, const dc_adamw_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__adamw_kind, read_adamw, optimizer, group, options);
}

dc_status dc_sgd_create(dc_linalg *linalg, const dc_sgd_options *options, dc_optimizer **optimizer) {
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__sgd_kind, read_sgd, linalg, NULL, options, optimizer);
}

dc_status dc_sgd_set_group(dc_optimizer *optimizer, int32_t group, const dc_sgd_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__sgd_kind, read_sgd, optimizer, group, options);
}
