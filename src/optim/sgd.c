/* SGD with momentum, Nesterov's form, dampening and weight decay. */
#include "optim/optim_internal.h"

static const char *sgd_fixed_option_changed(const void *options, const void *old) {
  const dc_sgd_options *a = options;
  const dc_sgd_options *b = old;
  return (a->momentum == 0) != (b->momentum == 0) ? "whether there is momentum" : NULL;
}

static bool sgd_add_state(dc_optimizer *o, dc__optim_param *p, float *state[3]) {
  const dc_sgd_options *options = dc__optim_options(o, p);
  if (options->momentum > 0) {
    state[0] = dc__optim_add_piece(o, p, "momentum_buffer", DC_FLOAT32, &p->count, 1);
  }
  return options->momentum == 0 || state[0] != NULL;
}

static void sgd_rule(const void *group_options, dc__update_rule *to) {
  const dc_sgd_options *options = group_options;
  to->sgd = (dc__sgd_rule){.momentum = options->momentum,
                           .dampening = options->dampening,
                           .weight_decay = options->weight_decay,
                           .nesterov = options->nesterov,
                           .maximize = options->maximize};
}

static const dc__elementwise_rules rules = {.kernel = DC__UPDATE_SGD, .add_state = sgd_add_state, .rule = sgd_rule};

const dc__optim_kind dc__sgd_kind = {DC__ELEMENTWISE_KIND, .name = "sgd", .options_size = sizeof(dc_sgd_options),
                                     .rules = &rules, .fixed_option_changed = sgd_fixed_option_changed};
