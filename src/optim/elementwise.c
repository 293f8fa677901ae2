/* What AdamW and SGD have in common: state that is as long as the part, constants of a step, and one pass over all
 * elements, on the threads here or by the kernels of a device with memory of its own. There the steps are counted in
 * the device's memory, and what a step multiplies with is computed from the counts by the same text as here: so a step
 * that the device itself decides about needs nothing of the host. */
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

static void update(dc_optimizer *o, const dc__optim_param *p, int64_t from, int64_t count, void *arg) {
  (void)arg;
  const dc__update_span *own = &((dc__elementwise *)(void *)o)->params[p - o->params];
  dc__update_here(rules_of(o)->kernel, own, from, count, (float)o->grad_scale);
}

static dc__update_record *record_of(const dc__optim_param *p) {
  return (dc__update_record *)(void *)p->step;
}

static bool span(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *to) {
  const dc__update_span *own = &((const dc__elementwise *)(const void *)o)->params[p - o->params];
  memcpy(to->state, own->state, sizeof to->state);
  to->factors.record = record_of(p);
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
  dc__optim_each_part(o, update, NULL);
  return DC_OK;
}

static void launch(dc_stream *on, dc__update_begin *begin) {
  dc__update_begin_there(on, begin);
  begin->records_used = 0;
  begin->tally = NULL; /* a step counts once */
}

/* The steps and factors of all parameters with gradients, those of a group together. */
static void begin_there(const dc_optimizer *o, dc_stream *on, const uint64_t *found) {
  dc__update_begin begin = {.kind = rules_of(o)->kernel, .found = found, .tally = o->look};
  int32_t group = -1;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    if (!dc__optim_has_grad(o, p)) {
      continue;
    }
    if (begin.records_used == DC__UPDATE_RECORDS || (begin.records_used > 0 && p->group != group)) {
      launch(on, &begin);
    }
    if (p->group != group) {
      group = p->group;
      rules_of(o)->rule(dc__optim_options(o, p), &begin.rule);
      begin.lr = o->groups[group].rate;
    }
    begin.records[begin.records_used++] = record_of(p);
  }
  if (begin.records_used > 0 || begin.tally != NULL) {
    launch(on, &begin);
  }
}

void dc__elementwise_queue(dc_optimizer *o, dc_stream *on) {
  const bool looks = dc__optim_wants_look(o);
  uint64_t *found = looks || o->found_inf != NULL ? &o->look->found : NULL;
  dc__update_batch batch = {.recorded = 1, .found = found, .scale = dc__optim_heed_there(o, on)};
  if (looks) {
    dc__optim_look_there(o, on, batch.scale);
  }
  begin_there(o, on, found);
  dc__optim_each_span(o, on, rules_of(o)->kernel, &batch, span);
}

void dc__elementwise_destroy(dc_optimizer *o) {
  dc__free(((dc__elementwise *)(void *)o)->params);
}
