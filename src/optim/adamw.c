/* AdamW: both moments, and with amsgrad the largest second one so far. */
#include "optim/inside.h"

#include <math.h>

static const char *refuse(const void *options, const void *old) {
  const dc_adamw_options *a = options;
  const dc_adamw_options *b = old;
  return a->amsgrad != b->amsgrad ? "amsgrad" : NULL;
}

static bool add(dc_optimizer *o, dc__optim_param *p, float *state[3]) {
  const dc_adamw_options *options = dc__optim_options(o, p);
  const bool most = options->amsgrad == 1;
  state[0] = dc__optim_add_piece(o, p, "exp_avg", DC_FLOAT32, &p->count, 1);
  state[1] = dc__optim_add_piece(o, p, "exp_avg_sq", DC_FLOAT32, &p->count, 1);
  state[2] = most ? dc__optim_add_piece(o, p, "max_exp_avg_sq", DC_FLOAT32, &p->count, 1) : NULL;
  return state[0] != NULL && state[1] != NULL && (!most || state[2] != NULL);
}

dc__adamw_factors dc__optim_adamw_factors(double beta1, double beta2, double eps, double weight_decay, double lr,
                                          int64_t t) {
  return (dc__adamw_factors){.keep_m = (float)beta1,
                             .add_m = (float)(1 - beta1),
                             .keep_v = (float)beta2,
                             .add_v = (float)(1 - beta2),
                             .decay = (float)(1 - lr * weight_decay),
                             .step = (float)(lr / (1 - pow(beta1, (double)t))),
                             .root = (float)(1 / sqrt(1 - pow(beta2, (double)t))),
                             .eps = (float)eps};
}

static void begin(const void *of, double lr, int64_t t, dc__update_span *to) {
  const dc_adamw_options *options = of;
  dc__adamw_factors *f = &to->factors.adamw;
  *f = dc__optim_adamw_factors(options->beta1, options->beta2, options->eps, options->weight_decay, lr, t);
  if (options->maximize == 1) { /* m is that of the gradient turned round */
    f->add_m = -f->add_m;
  }
}

static void update(const dc__optim_tile *tile, float *const state[3], const dc__update_span *param) {
  dc__update_adamw(tile->weight, state[0], state[1], state[2], tile->grad, tile->count, &param->factors.adamw);
}

static const dc__elementwise_rules rules = {.kernel = DC__UPDATE_ADAMW, .add = add, .begin = begin, .update = update};

const dc__optim_kind dc__adamw_kind = {DC__ELEMENTWISE_KIND, .name = "adamw", .options_size = sizeof(dc_adamw_options),
                                       .rules = &rules, .refuse = refuse};
