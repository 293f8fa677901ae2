/* Gathers, uses and releases weights, and makes calls that change them. */
#include "program.h"

void gather(program *p, param *a, int64_t graph) {
  int t = (int)pick(p, TYPES);
  dc_tensor full = DC_TENSOR_INIT;
  int32_t asked = t == 0 && pick(p, 2) == 0 ? DC_DTYPE_NONE : a->types[t];
  int64_t expected = wire_bytes(p, true) + dry_bytes(p, DC_OP_ALLGATHER_PARAM, graph, a->id, asked);
  OK(p, dc_allgather_param(p->ctx, NULL, graph, a->id, asked, &full));
  CHECK(p, wire_bytes(p, true) == expected);
  CHECK(p, full.dtype == a->types[t] && full.ndim == a->ndim);
  CHECK(p, a->ndim == 0 || memcmp(full.shape, a->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0);
  model_gather(p, a, t);
  a->copies[t].data = full.data;
}

void prefetch(program *p) {
  int64_t ids[PARAMS] = {0}, n = 0;
  int32_t dtypes[PARAMS] = {0};
  int which[PARAMS];
  for (int64_t i = 0; i < p->count; i++) {
    if (pick(p, 2) == 0) {
      which[n] = (int)pick(p, TYPES);
      ids[n] = p->params[i].id;
      dtypes[n] = p->params[i].types[which[n]];
      n++;
    }
  }
  OK(p, dc_prefetch_params_fused(p->ctx, GRAPH, ids, dtypes, n));
  for (int64_t i = 0; i < n; i++) {
    param *a = &p->params[ids[i]];
    dc_tensor full = DC_TENSOR_INIT;
    model_gather(p, a, which[i]);
    OK(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, dtypes[i], &full)); /* a hit, which returns the address */
    a->copies[which[i]].data = full.data;
  }
}

static void use(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    const copy *c = &a->copies[t];
    if (c->state == READY) {
      touch *look = new_touch(p, c->data, a->numel, a->types[t], false, "a gathered weight");
      for (int64_t i = 0; i < a->numel; i++) {
        touch_values(look)[i] = rounded(rounded(weight(a->id, c->version, i), a->types[0]), a->types[t]);
      }
      on_caller(p, look);
    }
  }
}

void wait_and_use(program *p, param *a, int64_t graph) {
  OK(p, dc_wait_allgather(p->ctx, NULL, graph, a->id));
  model_wait(p, a);
  use(p, a);
}

void release(program *p, param *a, int64_t graph) {
  int64_t users = a->users != 0 ? a->users : 1 + (int64_t)pick(p, 2);
  OK(p, dc_release_param(p->ctx, NULL, graph, a->id, users));
  a->users = users;
  if (++a->released == users) {
    a->users = a->released = 0;
    a->in_use = false;
    if (!a->persistent) {
      model_drop(p, a);
    }
  }
}

void take(program *p, param *a) {
  int t = (int)pick(p, TYPES);
  copy *c = &a->copies[t];
  if (c->state == NONE || a->users != 0) {
    return;
  }
  dc_buffer *buffer;
  OK(p, dc_take_param(p->ctx, GRAPH, a->id, a->types[t], &buffer));
  CHECK(p, dc_buffer_data(buffer) == c->data);
  model_wait(p, a);
  a->in_use = false;
  use(p, a);
  sync_caller(p); /* waits until the caller has read it */
  dc_buffer_release(buffer);
  c->state = a->persistent ? c->state : NONE;
}

void persistence(program *p, param *a) {
  if (a->persistent) {
    OK(p, dc_clear_persistent(p->ctx, a->id));
    a->persistent = false;
    if (a->users == 0 && !a->in_use) {
      model_drop(p, a);
    }
    return;
  }
  OK(p, dc_set_persistent(p->ctx, a->id));
  model_gather(p, a, 0);
  a->persistent = true;
  dc_tensor full = DC_TENSOR_INIT;
  OK(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, DC_DTYPE_NONE, &full));
  a->copies[0].data = full.data;
}

void forget(program *p, param *a) {
  bool all = pick(p, 2) == 0;
  OK(p, all ? dc_clear_all_gathered_params(p->ctx) : dc_invalidate_gathered_param(p->ctx, a->id));
  for (int64_t i = 0; i < p->count; i++) {
    param *b = &p->params[i];
    if ((all || b == a) && !b->persistent) {
      model_drop(p, b);
    }
  }
}

/* The optimizer writes the shards once, as far as the caller can know, no reader is left. */
void update_weights(program *p) {
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    if (has_copy(a)) {
      int64_t graph = a->shared && pick(p, 2) == 0 ? OTHER_GRAPH : GRAPH;
      OK(p, dc_wait_allgather(p->ctx, NULL, graph, a->id));
      model_wait(p, a);
    }
  }
  bool unknown = p->lost > p->waited;
  for (int64_t i = 0; i < p->count; i++) {
    unknown = unknown || p->params[i].reloading >= 0;
  }
  if (unknown) {
    return;
  }
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->version++;
    a->reloaded = false;
    touch *t = new_touch(p, a->shard, a->count, a->types[0], true, "the optimizer");
    for (int64_t k = 0; k < a->count; k++) {
      touch_values(t)[k] = weight(a->id, a->version, a->begin + k);
    }
    on_caller(p, t);
  }
  OK(p, dc_context_params_updated(p->ctx, NULL, 0));
}

void shard_to_device(program *p, param *a) {
  if (pick(p, 2) == 0) {
    OK(p, dc_offload_parameter(p->ctx, NULL, GRAPH, a->id));
    a->reloaded = false;
  } else {
    OK(p, dc_reload_parameter(p->ctx, NULL, GRAPH, a->id));
    a->reloading = a->reloaded ? a->reloading : p->gathers;
    a->reloaded = true;
  }
}
