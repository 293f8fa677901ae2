/* Common parts of AdamW and SGD: state as long as the part, constants of a step, and one pass over all elements, on the
 * threads or by kernels. On a device the steps are counted in device memory, and a step's factors are computed there by
 * the same code. So the host need not know whether the device skips a step. */
#include "optim/optim_internal.h"

static const dc__elementwise_rules *rules_of(const dc_optimizer *o) {
  return o->kind->rules;
}

dc_status dc__elementwise_prepare(dc_optimizer *o, const char *fn, int64_t first) {
  (void)fn;
  dc__elementwise *self = (dc__elementwise *)(void *)o;
  if (!dc__array_reserve((void **)&self->params, &self->capacity, o->count, sizeof *self->params)) {
    return DC_E_NO_MEMORY;
  }
  for (int64_t i = first; i < o->count; i++) {
    self->params[i] = (dc__update_span){.index = i};
    if (!rules_of(o)->add_state(o, &o->params[i], self->params[i].state)) {
      return DC_E_NO_MEMORY;
    }
  }
  return DC_OK;
}

static void elementwise_update_chunk(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count,
                                     void *arg) {
  (void)arg;
  const dc__update_span *own = &((dc__elementwise *)(void *)o)->params[p - o->params];
  dc__update_cpu(rules_of(o)->kernel, own, from, count, (float)o->grad_scale);
}

static bool elementwise_fill_span(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *to) {
  const dc__update_span *own = &((const dc__elementwise *)(const void *)o)->params[p - o->params];
  memcpy(to->state, own->state, sizeof to->state);
  to->factors.record = dc__optim_step_record(p);
  return true;
}

dc_status dc__elementwise_step(dc_optimizer *o, const char *fn) {
  (void)fn;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    dc__update_span *own = &((dc__elementwise *)(void *)o)->params[i];
    dc__update_rule rule;
    rules_of(o)->rule(dc__optim_options(o, p), &rule);
    dc__optim_fill_span(o, p, own);
    own->factors = dc__update_factors_of(rules_of(o)->kernel, &rule, o->groups[p->group].lr, *p->step + 1);
  }
  dc__optim_each_part(o, elementwise_update_chunk, NULL);
  return DC_OK;
}

dc_status dc__elementwise_enqueue(dc_optimizer *o, const char *fn) {
  (void)fn;
  dc__update_batch batch = {.recorded = 1};
  dc__optim_begin_step_cuda(o, rules_of(o)->kernel, rules_of(o)->rule, &batch);
  dc__optim_launch_spans(o, o->linalg->stream, rules_of(o)->kernel, &batch, elementwise_fill_span);
  return DC_OK;
}

void dc__elementwise_destroy(dc_optimizer *o) {
  dc__free(((dc__elementwise *)(void *)o)->params);
}
