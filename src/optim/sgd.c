/* SGD with momentum, Nesterov's form, dampening and weight decay. */
#include "optim/inside.h"

typedef struct sgd_param {
  float *buffer; /* NULL: no momentum */
  dc__sgd_factors factors;
} sgd_param;

typedef struct sgd {
  dc_optimizer head;
  sgd_param *params;
  int64_t capacity;
} sgd;

static const char *refuse(const void *options, const void *old) {
  const dc_sgd_options *a = options;
  const dc_sgd_options *b = old;
  return (a->momentum == 0) != (b->momentum == 0) ? "whether there is momentum" : NULL;
}

static dc_status prepare(dc_optimizer *o, const char *fn, int64_t first) {
  (void)fn;
  sgd *self = (sgd *)(void *)o;
  if (!dc__grow((void **)&self->params, &self->capacity, o->count, sizeof *self->params)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    dc__optim_param *p = &o->params[i];
    const dc_sgd_options *options = dc__optim_options(o, p);
    sgd_param *s = &self->params[i];
    s->buffer = NULL;
    if (options->momentum > 0) {
      s->buffer = dc__optim_add_piece(o, p, "momentum_buffer", DC_FLOAT32, &p->count, 1);
      if (s->buffer == NULL) {
        return DC_E_NO_MEMORY;
      }
    }
  }
  return DC_OK;
}

static dc__sgd_factors factors_of(const dc_sgd_options *options, double lr, bool first) {
  dc__sgd_factors f = {.lr = (float)lr, .weight_decay = (float)options->weight_decay, .sign = 1, .add = 1};
  if (options->maximize == 1) {
    f.sign = -1;
  }
  if (!first) {
    f.keep = (float)options->momentum;
    f.add = (float)(1 - options->dampening);
  }
  f.look = options->nesterov == 1 ? (float)options->momentum : 0;
  return f;
}

static void update(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)arg;
  const sgd_param *s = &((sgd *)(void *)o)->params[tile->param - o->params];
  dc__update_sgd(tile->weight, s->buffer == NULL ? NULL : s->buffer + tile->from, tile->grad, tile->count, &s->factors);
}

static dc_status step(dc_optimizer *o, const char *fn) {
  (void)fn;
  sgd *self = (sgd *)(void *)o;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    self->params[i].factors = factors_of(dc__optim_options(o, p), o->groups[p->group].lr, *p->step == 0);
  }
  dc__optim_each_tile(o, update, NULL);
  return DC_OK;
}

static void destroy(dc_optimizer *o) {
  dc__free(((sgd *)(void *)o)->params);
}

const dc__optim_kind dc__sgd_kind = {.name = "sgd",
                                     .size = sizeof(sgd),
                                     .options_size = sizeof(dc_sgd_options),
                                     .exponent = 128,
                                     .refuse = refuse,
                                     .prepare = prepare,
                                     .step = step,
                                     .destroy = destroy};
