/* Gradients, and changes of graphs and buffers between them. */
#include "program.h"

static const int32_t float_types[] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16, DC_FLOAT64};

void start_backward(program *p) {
  bool with_update = pick(p, 2) == 0;
  OK(p, dc_start_backward(p->ctx, with_update));
  for (int64_t i = 0; i < p->count && p->boundary; i++) {
    p->params[i].has_grad = p->params[i].keeps_grad;
    p->params[i].keeps_grad = false;
  }
  p->boundary = false;
  p->update = with_update;
  for (int64_t i = 0; i < p->count && with_update && !broken(p); i++) {
    if (p->params[i].unbound) {
      new_grad_buffer(p, &p->params[i]);
    }
  }
}

void reduce(program *p, param *a, int64_t graph) {
  int32_t dtype = pick(p, 3) == 0 ? float_types[pick(p, 4)] : a->grad_type;
  void *memory = ground_new((size_t)a->numel * dc_dtype_size(dtype));
  touch *t = new_touch(p, memory, a->numel, dtype, true, "the backward");
  for (int64_t i = 0; i < a->numel; i++) {
    touch_values(t)[i] = gradient(p, p->r->rank, a->id, i);
  }
  on_caller(p, t);
  dc_tensor g = flat(memory, &a->numel, dtype);
  p->wire += dry_bytes(p, DC_OP_REDUCE_GRAD, graph, a->id, dtype);
  OK(p, dc_reduce_grad(p->ctx, &g, graph, a->id));
  on_caller(p, new_touch(p, memory, a->numel, dtype, true, "what takes the gradient's memory next"));
  if (!p->profiling) {
    model_reduce(p, a, dtype);
  }
  p->reductions++;
}

static void check_gradient_buffers(program *p) {
  for (int64_t i = 0; i < p->count && !broken(p); i++) {
    param *a = &p->params[i];
    a->pending = false;
    if (a->unbound) {
      continue;
    }
    dc_stream *caller = p->caller;
    p->caller = NULL; /* complete on the host after dc_end_backward */
    touch *look = new_touch(p, a->grad, a->unknown ? 0 : a->count, a->buffer_type, false, "a gradient");
    for (int64_t k = 0; k < a->count && !a->unknown; k++) {
      touch_values(look)[k] = a->expected[a->begin + k];
    }
    ground_reads(a->grad, (size_t)a->count * dc_dtype_size(a->buffer_type), "a gradient, by the optimizer");
    on_caller(p, look);
    p->caller = caller;
  }
}

void end_backward(program *p) {
  int64_t graph = pick(p, 3) == 0 ? OTHER_GRAPH : GRAPH;
  p->wire += dry_bytes(p, DC_OP_END_BACKWARD, graph, 0, DC_DTYPE_NONE);
  OK(p, dc_end_backward(p->ctx, graph, (int32_t)pick(p, 2)));
  CHECK(p, wire_bytes(p, false) == p->wire);
  model_end(p);
  p->boundary = p->boundary || p->update;
  for (int i = 0; i < VALUES; i++) {
    value *v = &p->values[i];
    v->device = v->graph == graph ? -1 : v->device;
  }
  check_gradient_buffers(p);
}

void abort_step(program *p) {
  OK(p, dc_context_step_abort(p->ctx));
  model_abort(p);
  p->wire = wire_bytes(p, false); /* only the library knows which buckets were flushed */
}

/* ---- graphs and buffers that change in the middle ---- */

dc_status register_graphs(program *p, bool first, bool second) {
  dc_status (*const by_stage[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  int64_t ids[PARAMS], shared[PARAMS], n = 0;
  for (int64_t i = 0; i < p->count; i++) {
    ids[i] = shared[n] = i;
    n += p->params[i].shared;
  }
  dc_status status = first ? by_stage[p->stage](p->ctx, GRAPH, ids, p->count) : DC_OK;
  return status == DC_OK && second ? by_stage[p->stage](p->ctx, OTHER_GRAPH, shared, n) : status;
}

void register_again(program *p) {
  bool pending = false, reset = pick(p, 2) == 0, other = pick(p, 2) == 0;
  for (int64_t i = 0; i < p->count; i++) {
    pending = pending || p->params[i].pending || p->params[i].has_local || p->params[i].unbound;
  }
  if (pending) {
    return;
  }
  if (reset) {
    OK(p, dc_reset(p->ctx));
  } else if (pick(p, 2) == 0) {
    OK(p, dc_unregister_graph(p->ctx, other ? OTHER_GRAPH : GRAPH));
  }
  OK(p, register_graphs(p, reset || !other, reset || other));
  for (int i = 0; i < VALUES; i++) {
    value *v = &p->values[i];
    if (reset || v->graph == (other ? OTHER_GRAPH : GRAPH)) { /* it belonged to the old graph */
      v->host = v->device = -1;
    }
    v->offload_waited = true; /* registering drains the streams */
  }
}

void new_grad_buffer(program *p, param *a) {
  if (a->pending) {
    return;
  }
  a->unbound = p->stage == 1 && !p->update && !a->unbound;
  a->has_grad = a->keeps_grad = a->unknown = false;
  memset(a->expected, 0, (size_t)a->numel * sizeof *a->expected);
  if (a->unbound) {
    OK(p, dc_context_update_param_grad_buffer(p->ctx, a->id, NULL, 0));
    return;
  }
  int64_t length = p->stage == 3 ? a->chunk : a->count;
  a->grad = ground_new((size_t)length * dc_dtype_size(a->buffer_type));
  dc_tensor grad = flat(a->grad, &length, a->buffer_type);
  OK(p, dc_context_update_param_grad_buffer(p->ctx, a->id, &grad, p->stage == 3 ? 0 : a->begin));
  sync_caller(p);
}
