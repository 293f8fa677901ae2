/* AdamW: one pass over weights, gradients and both moments. */
#include "optim/inside.h"

#include <math.h>

/* A parameter's state and its constants of the step under way. */
typedef struct adamw_param {
  float *m, *v, *most; /* most NULL: no amsgrad */
  dc__adamw_factors factors;
} adamw_param;

typedef struct adamw {
  dc_optimizer head;
  adamw_param *params;
  int64_t capacity;
} adamw;

static const char *refuse(const void *options, const void *old) {
  const dc_adamw_options *a = options;
  const dc_adamw_options *b = old;
  return a->amsgrad != b->amsgrad ? "amsgrad" : NULL;
}

static dc_status prepare(dc_optimizer *o, const char *fn, int64_t first) {
  (void)fn;
  adamw *self = (adamw *)(void *)o;
  if (!dc__grow((void **)&self->params, &self->capacity, o->count, sizeof *self->params)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    dc__optim_param *p = &o->params[i];
    const dc_adamw_options *options = dc__optim_options(o, p);
    adamw_param *a = &self->params[i];
    a->m = dc__optim_add_piece(o, p, "exp_avg", DC_FLOAT32, &p->count, 1);
    a->v = dc__optim_add_piece(o, p, "exp_avg_sq", DC_FLOAT32, &p->count, 1);
    a->most = options->amsgrad == 1 ? dc__optim_add_piece(o, p, "max_exp_avg_sq", DC_FLOAT32, &p->count, 1) : NULL;
    if (a->m == NULL || a->v == NULL || (options->amsgrad == 1 && a->most == NULL)) {
      return DC_E_NO_MEMORY;
    }
  }
  return DC_OK;
}

static dc__adamw_factors factors_of(const dc_adamw_options *options, double lr, int64_t t) {
  dc__adamw_factors f = {.keep_m = (float)options->beta1, .add_m = (float)(1 - options->beta1)};
  f.keep_v = (float)options->beta2;
  f.add_v = (float)(1 - options->beta2);
  f.decay = (float)(1 - lr * options->weight_decay);
  f.step = (float)(lr / (1 - pow(options->beta1, (double)t)));
  f.root = (float)(1 / sqrt(1 - pow(options->beta2, (double)t)));
  f.eps = (float)options->eps;
  if (options->maximize == 1) { /* m is that of the gradient turned round */
    f.add_m = -f.add_m;
  }
  return f;
}

static void update(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)arg;
  const adamw_param *a = &((adamw *)(void *)o)->params[tile->param - o->params];
  dc__update_adamw(tile->weight, a->m + tile->from, a->v + tile->from, a->most == NULL ? NULL : a->most + tile->from,
                   tile->grad, tile->count, &a->factors);
}

static dc_status step(dc_optimizer *o, const char *fn) {
  (void)fn;
  adamw *self = (adamw *)(void *)o;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    self->params[i].factors = factors_of(dc__optim_options(o, p), o->groups[p->group].lr, *p->step + 1);
  }
  dc__optim_each_tile(o, update, NULL);
  return DC_OK;
}

static void destroy(dc_optimizer *o) {
  dc__free(((adamw *)(void *)o)->params);
}

const dc__optim_kind dc__adamw_kind = {.name = "adamw",
                                       .size = sizeof(adamw),
                                       .options_size = sizeof(dc_adamw_options),
                                       .exponent = 128,
                                       .refuse = refuse,
                                       .prepare = prepare,
                                       .step = step,
                                       .destroy = destroy};
