/* What AdamW and SGD have in common: state that is as long as the part, constants of a step, and one pass over all
 * elements, in tiles here or by the kernels of a device with memory of its own. */
#include "optim/inside.h"

static const dc__elementwise_rules *rules_of(const dc_optimizer *o) {
  return o->kind->rules;
}

dc_status dc__elementwise_prepare(dc_optimizer *o, const char *fn, int64_t first) {
  (void)fn;
  dc__elementwise *self = (dc__elementwise *)(void *)o;
  if (!dc__grow((void **)&self->params, &self->capacity, o->count, sizeof *self->params)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    self->params[i] = (dc__update_span){.index = i};
    if (!rules_of(o)->add(o, &o->params[i], self->params[i].state)) {
      return DC_E_NO_MEMORY;
    }
  }
  return DC_OK;
}

static void update(dc_optimizer *o, const dc__optim_tile *tile, void *arg) {
  (void)arg;
  const dc__update_span *p = &((dc__elementwise *)(void *)o)->params[tile->param - o->params];
  float *state[3];
  for (int32_t k = 0; k < 3; k++) {
    state[k] = p->state[k] == NULL ? NULL : p->state[k] + tile->from;
  }
  rules_of(o)->update(tile, state, p);
}

static bool span(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *to) {
  const dc__update_span *own = &((const dc__elementwise *)(const void *)o)->params[p - o->params];
  memcpy(to->state, own->state, sizeof to->state);
  to->factors = own->factors;
  return true;
}

dc_status dc__elementwise_step(dc_optimizer *o, const char *fn) {
  (void)fn;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    rules_of(o)->begin(dc__optim_options(o, p), o->groups[p->group].lr, *p->step + 1,
                       &((dc__elementwise *)(void *)o)->params[i]);
  }
  if (dc__optim_is_there(o)) {
    return dc__optim_update_there(o, rules_of(o)->kernel, span);
  }
  dc__optim_each_tile(o, update, NULL);
  return DC_OK;
}

void dc__elementwise_destroy(dc_optimizer *o) {
  dc__free(((dc__elementwise *)(void *)o)->params);
}
