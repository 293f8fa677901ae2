/* Chapter 14: K-FAC. */
#include <inttypes.h>
#include <math.h>

#include "api/optimizer/optimizer_api.h"

/* The struct's size in the version that introduced it; frozen from then on. */
enum { KFAC_OPTIONS_SIZE_0_1 = 80 };
_Static_assert(sizeof(void *) != 8 || sizeof(dc_kfac_options) >= KFAC_OPTIONS_SIZE_0_1, "0.1");

void dc_kfac_options_init(dc_kfac_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_kfac(const char *fn, const void *options, void *to, bool *finite) {
  static const dc__number_rule decay = {.fallback = 0.95, .high = 1, .none = true};
  static const dc__number_rule damping = {.fallback = 1e-3, .high = INFINITY};
  static const dc__number_rule kl_clip = {.fallback = 1e-3, .high = INFINITY, .none = true};
  static const dc__number_rule momentum = {.fallback = 0.9, .high = 1, .none = true};
  static const dc__number_rule weight_decay = {.fallback = 0, .high = INFINITY};
  dc_kfac_options *read = to;
  *read = (dc_kfac_options)DC_KFAC_OPTIONS_INIT;
  *finite = true;
  DC__TRY(dc__read_options(fn, "options", read, sizeof *read, options, KFAC_OPTIONS_SIZE_0_1));
  DC__TRY(dc__check_number(fn, "decay", &read->decay, &decay));
  DC__TRY(dc__check_number(fn, "damping", &read->damping, &damping));
  DC__TRY(dc__check_number(fn, "kl_clip", &read->kl_clip, &kl_clip));
  DC__TRY(dc__check_number(fn, "momentum", &read->momentum, &momentum));
  DC__TRY(dc__check_number(fn, "weight_decay", &read->weight_decay, &weight_decay));
  DC__TRY(dc__check_count(fn, "factor_frequency", &read->factor_frequency, 1, 1, INT64_MAX));
  DC__TRY(dc__check_count(fn, "refresh_frequency", &read->refresh_frequency, 10, 1, INT64_MAX));
  DC__TRY(dc__check_range(fn, "options.inverse", read->inverse, DC_KFAC_EIGEN, DC_KFAC_FACTORED));
  DC__TRY(dc__check_flag(fn, "options.nesterov", read->nesterov));
  DC__TRY(dc__check_failures(fn, &read->tolerated_failures));
  if (read->nesterov == 1 && read->momentum == 0) {
    return dc__fail(DC_E_INVALID, "%s: options.nesterov = 1 needs momentum > 0", fn);
  }
  return dc__check_range(fn, "options.reserved0", read->reserved0, 0, 0);
}

dc_status dc_kfac_create(dc_linalg *linalg, dc_comm *comm, const dc_kfac_options *options, dc_optimizer **optimizer) {
  DC__WITHOUT_TRAPS;
  return dc__make_optimizer(__func__, &dc__kfac_kind, read_kfac, linalg, comm, options, optimizer);
}

dc_status dc_kfac_set_group(dc_optimizer *optimizer, int32_t group, const dc_kfac_options *options) {
  DC__WITHOUT_TRAPS;
  return dc__set_optimizer_group(__func__, &dc__kfac_kind, read_kfac, optimizer, group, options);
}

static dc_status kfac_add_layer(const char *fn, dc_optimizer *o, const dc_sample_layer *layer, int32_t approximation,
                                int64_t weight, int64_t bias, int64_t *index) {
  DC__TRY(dc__optim_check_kind(o, fn, &dc__kfac_kind));
  DC__TRY(dc__check_range(fn, "approximation", approximation, DC_KFAC_EXPAND, DC_KFAC_REDUCE));
  return dc__kfac_add_layer(o, fn, layer, approximation, weight, bias, index);
}

dc_status dc_kfac_add_layer(dc_optimizer *optimizer, const dc_sample_layer *layer, int32_t approximation,
                            int64_t weight, int64_t bias, int64_t *index) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, kfac_add_layer(__func__, optimizer, layer, approximation, weight, bias, index));
}

static dc_status kfac_accumulate(const char *fn, dc_optimizer *o, int64_t index, const dc_tensor *x,
                                 const dc_tensor *delta, double loss_scale) {
  DC__TRY(dc__optim_check_kind(o, fn, &dc__kfac_kind));
  return dc__kfac_add_batch(o, fn, index, x, delta, loss_scale);
}

dc_status dc_kfac_accumulate(dc_optimizer *optimizer, int64_t index, const dc_tensor *x, const dc_tensor *delta,
                             double loss_scale) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__optimizer_enter(optimizer, __func__));
  return dc__optimizer_leave(optimizer, kfac_accumulate(__func__, optimizer, index, x, delta, loss_scale));
}
