/* Chapter 14: Muon. */
#include <math.h>

#include "api/optimizer/optimizer_api.h"

enum { MUON_OPTIONS_SIZE_0_1 = 64 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_muon_options) >= MUON_OPTIONS_SIZE_0_1, "0.1");

void dc_muon_options_init(dc_muon_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_polynomial(const char *fn, dc_muon_options *o) {
  int64_t steps = o->steps;
  DC__TRY(dc__check_range(fn, "options.polynomial", o->polynomial, DC_ORTHOGONAL_EXPRESS, DC_ORTHOGONAL_MUON));
  DC__TRY(dc__check_count(fn, "steps", &steps, 5, 1, 64));
  o->steps = (int32_t)steps;
  if (o->precision != DC_DTYPE_NONE && o->precision != DC_FLOAT32 && o->precision != DC_BFLOAT16) {
    return dc__fail(DC_E_INVALID, "%s: options.precision is %s, must be float32 or bfloat16", fn,
                    dc_dtype_name(o->precision));
  }
  o->precision = o->precision == DC_DTYPE_NONE ? DC_BFLOAT16 : o->precision;
  return DC_OK;
}

static dc_status read_muon(const char *fn, const void *options, void *to, bool *finite) {
  static const dc__number_rule momentum = {.fallback = 0.95, .high = 1, .none = true};
  static const dc__number_rule eps = {.fallback = 1e-7, .high = INFINITY};
  static const dc__number_rule decay = {.fallback = 0, .high = INFINITY};
  dc_muon_options *o = to;
  *o = (dc_muon_options)DC_MUON_OPTIONS_INIT;
  *finite = true;
  DC__TRY(dc__read_options(fn, "options", o, sizeof *o, options, MUON_OPTIONS_SIZE_0_1));
  DC__TRY(dc__check_number(fn, "momentum", &o->momentum, &momentum));
  DC__TRY(dc__check_number(fn, "eps", &o->eps, &eps));
  DC__TRY(dc__check_number(fn, "weight_decay", &o->weight_decay, &decay));
  DC__TRY(dc__check_count(fn, "num_splits", &o->num_splits, 1, 1, INT64_MAX));
  DC__TRY(read_polynomial(fn, o));
  DC__TRY(dc__check_range(fn, "options.adjust", o->adjust, DC_MUON_ORIGINAL, DC_MUON_PLAIN));
  DC__TRY(dc__check_range(fn, "options.nesterov", o->nesterov, -1, 1));
  o->nesterov = o->nesterov >= 0;
  return dc__check_range(fn, "options.reserved0", o->reserved0, 0, 0);
}

dc_status dc_muon_create(dc_linalg *linalg, dc_comm *comm, const dc_muon_options *options, dc_optimizer **optimizer) {
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__muon_kind, read_muon, linalg, comm, options, optimizer);
}

dc_status dc_muon_set_group(dc_optimizer *optimizer, int32_t group, const dc_muon_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__muon_kind, read_muon, optimizer, group, options);
}
