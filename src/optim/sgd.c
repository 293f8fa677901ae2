/* SGD with momentum, Nesterov's form, dampening and weight decay. */
#include "optim/inside.h"

static const char *refuse(const void *options, const void *old) {
  const dc_sgd_options *a = options;
  const dc_sgd_options *b = old;
  return (a->momentum == 0) != (b->momentum == 0) ? "whether there is momentum" : NULL;
}

static bool add(dc_optimizer *o, dc__optim_param *p, float *state[3]) {
  const dc_sgd_options *options = dc__optim_options(o, p);
  if (options->momentum > 0) {
    state[0] = dc__optim_add_piece(o, p, "momentum_buffer", DC_FLOAT32, &p->count, 1);
  }
  return options->momentum == 0 || state[0] != NULL;
}

static void begin(const void *of, double lr, int64_t t, dc__update_span *to) {
  const dc_sgd_options *options = of;
  dc__sgd_factors *f = &to->factors.sgd;
  *f = (dc__sgd_factors){.lr = (float)lr, .weight_decay = (float)options->weight_decay, .sign = 1, .add = 1};
  if (options->maximize == 1) {
    f->sign = -1;
  }
  if (t > 1) {
    f->keep = (float)options->momentum;
    f->add = (float)(1 - options->dampening);
  }
  f->look = options->nesterov == 1 ? (float)options->momentum : 0;
}

static void update(const dc__optim_tile *tile, float *const state[3], const dc__update_span *param) {
  dc__update_sgd(tile->weight, state[0], tile->grad, tile->count, &param->factors.sgd);
}

static const dc__elementwise_rules rules = {.kernel = DC__UPDATE_SGD, .add = add, .begin = begin, .update = update};

const dc__optim_kind dc__sgd_kind = {DC__ELEMENTWISE_KIND, .name = "sgd", .options_size = sizeof(dc_sgd_options),
                                     .rules = &rules, .refuse = refuse};
