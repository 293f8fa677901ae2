/* AdamW: both moments, and with amsgrad the largest second moment so far. */
#include "optim/optim_internal.h"

static const char *adamw_fixed_option_changed(const void *options, const void *old) {
  const dc_adamw_options *a = options;
  const dc_adamw_options *b = old;
  return a->amsgrad != b->amsgrad ? "amsgrad" : NULL;
}

static bool adamw_add_state(dc_optimizer *o, dc__optim_param *p, float *state[3]) {
  const dc_adamw_options *options = dc__optim_options(o, p);
  const bool amsgrad = options->amsgrad == 1;
  state[0] = dc__optim_add_piece(o, p, "exp_avg", DC_FLOAT32, &p->count, 1);
  state[1] = dc__optim_add_piece(o, p, "exp_avg_sq", DC_FLOAT32, &p->count, 1);
  state[2] = amsgrad ? dc__optim_add_piece(o, p, "max_exp_avg_sq", DC_FLOAT32, &p->count, 1) : NULL;
  return state[0] != NULL && state[1] != NULL && (!amsgrad || state[2] != NULL);
}

static void adamw_rule(const void *group_options, dc__update_rule *to) {
  const dc_adamw_options *options = group_options;
  to->adamw = (dc__adamw_rule){.beta1 = options->beta1,
                               .beta2 = options->beta2,
                               .eps = options->eps,
                               .weight_decay = options->weight_decay,
                               .maximize = options->maximize};
}

static const dc__elementwise_rules rules = {
    .kernel = DC__UPDATE_ADAMW, .add_state = adamw_add_state, .rule = adamw_rule};

const dc__optim_kind dc__adamw_kind = {DC__ELEMENTWISE_KIND, .name = "adamw", .options_size = sizeof(dc_adamw_options),
                                       .rules = &rules, .fixed_option_changed = adamw_fixed_option_changed};
