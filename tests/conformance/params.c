/* Parameters of every stage; their weights and gradients as a model of a few lines computes them; statistics. */
#include "conformance.h"

#include <math.h>

/* Stages 1 and 2 split as a flat partition does: unevenly, so that some ranks own nothing of a parameter. */
static void own(const rank *r, param *p) {
  int64_t cut = p->numel / 3, chunk = ceil_div(p->numel, r->world);
  p->begin = 0;
  p->count = p->numel;
  if (p->stage == 3) {
    p->begin = r->rank * chunk < p->numel ? r->rank * chunk : p->numel;
    p->count = p->numel - p->begin < chunk ? p->numel - p->begin : chunk;
  } else if (p->stage > 0 && r->world > 1) {
    p->begin = r->rank == 0 ? 0 : cut;
    p->count = r->rank == 0 ? cut : r->rank == 1 ? p->numel - cut : 0;
  }
  p->padded = p->stage == 3 ? chunk : p->count;
}

double weight(int64_t id, int64_t version, int64_t i) {
  return (double)((id * 31 + version * 13 + i * 7) % 61 - 30) / 4;
}

dc_status set_weights(rank *r, const param *p, int64_t version) {
  double values[MOST];
  int64_t begin = p->stage == 3 ? p->begin : 0;
  for (int64_t i = 0; i < p->weights.count; i++) {
    values[i] = begin + i < p->numel ? weight(p->id, version, begin + i) : -60000; /* padding must never be seen */
  }
  return write_to(r, p->weights.data, p->weights.dtype, values, p->weights.count);
}

dc_status register_param(rank *r, param *p) {
  p->ndim = p->ndim == 0 && p->shape[0] != 0 ? 1 : p->ndim;
  p->dtype = p->dtype == DC_DTYPE_NONE ? DC_FLOAT32 : p->dtype;
  p->grad = p->grad == DC_DTYPE_NONE ? DC_FLOAT32 : p->grad;
  p->numel = 1;
  for (int32_t i = 0; i < p->ndim; i++) {
    p->numel *= p->shape[i];
  }
  own(r, p);
  dc_status status =
      (p->on_host ? new_host_array : new_array)(r, &p->weights, p->stage == 3 ? p->padded : p->numel, p->dtype);
  status = status == DC_OK ? set_weights(r, p, 0) : status;
  status = status == DC_OK ? new_array(r, &p->buffer, p->frozen ? 0 : p->padded, p->grad) : status;
  status = status == DC_OK ? new_array(r, &p->source, p->numel, DC_FLOAT32) : status;
  status = status == DC_OK ? set_all(r, &p->buffer, NAN) : status; /* registration must zero it */
  if (status != DC_OK) {
    return status;
  }
  dc_tensor weights = tensor_of(&p->weights), grad = tensor_of(&p->buffer);
  return p->stage == 3 ? dc_register_z3_param(r->ctx, p->id, p->shape, p->ndim, &weights, p->frozen ? NULL : &grad,
                                              p->persistent, p->expected)
                       : dc_register_param(r->ctx, p->id, p->shape, p->ndim, &weights, p->frozen ? NULL : &grad,
                                           p->frozen ? 0 : p->begin);
}

dc_status register_graph(rank *r, int64_t graph, int32_t stage, const int64_t *ids, int64_t count) {
  dc_status (*const by_stage[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  return by_stage[stage](r->ctx, graph, ids, count);
}

dc_status register_one(rank *r, param *p) {
  dc_status status = register_param(r, p);
  return status == DC_OK ? register_graph(r, GRAPH, p->stage, &p->id, 1) : status;
}

dc_status gather(rank *r, int64_t graph, const param *p, int32_t dtype, dc_tensor *full) {
  dc_status status = dc_allgather_param(r->ctx, NULL, graph, p->id, dtype, full);
  return status == DC_OK ? dc_wait_allgather(r->ctx, full, graph, p->id) : status;
}

bool is_whole(rank *r, const dc_tensor *full, const param *p, int32_t dtype, int64_t version) {
  double expected[MOST];
  dtype = dtype == DC_DTYPE_NONE ? p->dtype : dtype;
  bool same = full->dtype == dtype && full->ndim == p->ndim && full->strides == NULL;
  for (int32_t i = 0; i < p->ndim && same; i++) {
    same = full->shape[i] == p->shape[i];
  }
  for (int64_t i = 0; i < p->numel; i++) {
    expected[i] = weight(p->id, version, i);
  }
  return same && holds(r, full->data, dtype, expected, p->numel);
}

double gradient(int32_t by, int64_t id, int64_t step, int64_t i) {
  return (double)((by * 5 + id * 3 + step * 11 + i * 2) % 9 - 4);
}

dc_status reduce_as(rank *r, int64_t graph, param *p, int64_t step, int32_t dtype) {
  double values[MOST];
  for (int64_t i = 0; i < p->numel; i++) {
    values[i] = gradient(r->rank, p->id, step, i);
  }
  if (p->source.dtype != dtype) {
    dc_status status = new_array(r, &p->source, p->numel, dtype);
    if (status != DC_OK) {
      return status;
    }
  }
  dc_status status = write_to(r, p->source.data, dtype, values, p->numel);
  dc_tensor source = tensor_of(&p->source);
  status = status == DC_OK ? dc_reduce_grad(r->ctx, &source, graph, p->id) : status;
  return status == DC_OK ? set_all(r, &p->source, 77) : status;
}

dc_status reduce(rank *r, int64_t graph, param *p, int64_t step) {
  return reduce_as(r, graph, p, step, DC_FLOAT32);
}

/* The sum of a step's gradients over all ranks: exact, since they are integers. */
static double over_ranks(int32_t world, const param *p, int64_t step, int64_t i) {
  double sum = 0;
  for (int32_t by = 0; by < world; by++) {
    sum += gradient(by, p->id, step, i);
  }
  return sum;
}

static double quotient(double sum, int32_t world, int32_t dtype) {
  return dtype == DC_FLOAT64 ? sum / world : (double)((float)sum / (float)world);
}

bool has_grad(rank *r, const param *p, int64_t first, int64_t last) {
  double expected[MOST];
  for (int64_t i = 0; i < p->padded; i++) {
    double sum = 0, means = 0;
    for (int64_t step = first; step <= last; step++) {
      double whole = over_ranks(r->world, p, step, p->begin + i);
      sum += whole;
      means = rounded(means + quotient(whole, r->world, p->grad), p->grad);
    }
    expected[i] = i >= p->count ? 0 : p->stage == 1 ? quotient(sum, r->world, p->grad) : means;
  }
  return holds(r, p->buffer.data, p->grad, expected, p->padded);
}

dc_status backward(rank *r, param *p, int32_t update, int64_t step) {
  dc_status status = dc_start_backward(r->ctx, update);
  status = status == DC_OK ? reduce(r, GRAPH, p, step) : status;
  return status == DC_OK ? dc_end_backward(r->ctx, GRAPH, 0) : status;
}

/* ---- observing the library ---- */

dc_memory_stats stats_of(rank *r) {
  dc_memory_stats s = {.struct_size = sizeof s};
  (void)dc_context_get_memory_stats(r->ctx, &s);
  return s;
}

int64_t traced(rank *r, int32_t op, int32_t lane) {
  dc_trace_event events[64];
  int64_t count = 0, found = 0;
  (void)dc_context_trace_read(r->ctx, events, sizeof events[0], 64, &count);
  for (int64_t i = 0; i < count; i++) {
    found += events[i].op == op && events[i].lane == lane;
  }
  return found;
}
