/* Calls that must be refused. Each rank draws its own, between the legal calls that all make. A refused call does not
 * communicate, so other ranks must not notice. It changes nothing, so later values are the same. */
#include "program.h"

enum { UNKNOWN_ID = 999 }; /* the id of no graph and no parameter */

static uint64_t own_pick(program *p, uint64_t below) {
  uint64_t *shared = p->state;
  p->state = &p->private_state;
  uint64_t drawn = pick(p, below);
  p->state = shared;
  return drawn;
}

#define REFUSED(p, call, status) CHECK(p, (call) == (status) && dc_last_error()[0] != '\0')

static void unknown_ids(program *p, param *a) {
  dc_tensor out = DC_TENSOR_INIT;
  dc_buffer *buffer = NULL;
  const int64_t ids[2] = {a->id, UNKNOWN_ID};
  REFUSED(p, dc_allgather_param(p->ctx, NULL, UNKNOWN_ID, a->id, DC_DTYPE_NONE, &out), DC_E_NOT_FOUND);
  REFUSED(p, dc_reduce_grad(p->ctx, NULL, GRAPH, UNKNOWN_ID), DC_E_NOT_FOUND);
  REFUSED(p, dc_end_backward(p->ctx, UNKNOWN_ID, 0), DC_E_NOT_FOUND);
  REFUSED(p, dc_unregister_graph(p->ctx, UNKNOWN_ID), DC_E_NOT_FOUND);
  REFUSED(p, dc_unregister_param(p->ctx, UNKNOWN_ID), DC_E_NOT_FOUND);
  REFUSED(p, dc_set_persistent(p->ctx, UNKNOWN_ID), DC_E_NOT_FOUND);
  REFUSED(p, dc_context_params_updated(p->ctx, ids, 2), DC_E_NOT_FOUND);
  REFUSED(p, dc_context_accumulate_grads(p->ctx, ids, 2), DC_E_NOT_FOUND);
  REFUSED(p, dc_take_param(p->ctx, UNKNOWN_ID, a->id, DC_DTYPE_NONE, &buffer), DC_E_NOT_FOUND);
  if (p->stage == 3) {
    REFUSED(p, dc_prefetch_params_fused(p->ctx, GRAPH, ids, NULL, 2), DC_E_NOT_FOUND); /* none of them starts */
    REFUSED(p, dc_wait_offload(p->ctx, NULL, GRAPH, UNKNOWN_ID, &out), DC_E_NOT_FOUND);
    REFUSED(p, dc_reload_tensor(p->ctx, NULL, GRAPH, UNKNOWN_ID, &out), DC_E_STATE);
  }
}

static void wrong_stage(program *p, param *a) {
  const int64_t one = 1;
  float x = 0;
  dc_tensor out = DC_TENSOR_INIT, t = flat(&x, &one, DC_FLOAT32);
  if (p->stage == 3) {
    REFUSED(p, dc_register_graph_z2(p->ctx, 50, &a->id, 1), DC_E_STAGE);
    return;
  }
  REFUSED(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, DC_DTYPE_NONE, &out), DC_E_STAGE);
  REFUSED(p, dc_prefetch_params_fused(p->ctx, GRAPH, &a->id, NULL, 1), DC_E_STAGE);
  REFUSED(p, dc_wait_allgather(p->ctx, NULL, GRAPH, a->id), DC_E_STAGE);
  REFUSED(p, dc_release_param(p->ctx, NULL, GRAPH, a->id, 1), DC_E_STAGE);
  REFUSED(p, dc_offload_tensor(p->ctx, &t, GRAPH, 0, &out), DC_E_STAGE);
  REFUSED(p, dc_reload_parameter(p->ctx, NULL, GRAPH, a->id), DC_E_STAGE);
  REFUSED(p, dc_set_persistent(p->ctx, a->id), DC_E_STAGE);
  REFUSED(p, dc_register_graph_z3(p->ctx, 50, &a->id, 1), DC_E_STAGE);
}

static void wrong_order(program *p, param *a) {
  dc_tensor out = DC_TENSOR_INIT;
  dc_buffer *buffer = NULL;
  REFUSED(p, dc_init(p->ctx, NULL, NULL, 10), DC_E_STATE);
  REFUSED(p, dc_end_forward(p->ctx), DC_E_STATE);
  REFUSED(p, dc_unregister_param(p->ctx, a->id), DC_E_BUSY);
  REFUSED(p, dc_comm_group_end(p->r->comm, NULL), DC_E_STATE);
  if (a->pending && a->numel > 0) {
    REFUSED(p, dc_context_update_param_grad_buffer(p->ctx, a->id, NULL, 0), DC_E_BUSY);
  }
  if ((a->pending || a->has_local) && a->numel > 0) { /* an empty one never has pending work */
    REFUSED(p, dc_reset(p->ctx), DC_E_BUSY);
    REFUSED(p, register_graphs(p, true, false), DC_E_BUSY);
    REFUSED(p, dc_unregister_graph(p->ctx, GRAPH), DC_E_BUSY);
  }
  if (p->stage == 3 && !has_copy(a)) {
    if (!p->profiling) {
      REFUSED(p, dc_wait_allgather(p->ctx, NULL, GRAPH, a->id), DC_E_STATE);
      REFUSED(p, dc_release_param(p->ctx, NULL, GRAPH, a->id, 1), DC_E_STATE);
    }
    REFUSED(p, dc_take_param(p->ctx, GRAPH, a->id, DC_DTYPE_NONE, &buffer), DC_E_STATE);
  }
  if (p->stage == 3 && a->users != 0) {
    REFUSED(p, dc_release_param(p->ctx, NULL, GRAPH, a->id, a->users + 1), DC_E_INVALID);
    if (a->copies[0].state != NONE) {
      REFUSED(p, dc_take_param(p->ctx, GRAPH, a->id, DC_DTYPE_NONE, &buffer), DC_E_STATE);
    }
  }
  if (p->stage == 3 && p->values[0].device < 0 && p->values[0].host >= 0 && !p->profiling) {
    REFUSED(p, dc_wait_reload(p->ctx, NULL, GRAPH, 0, &out), DC_E_STATE);
  }
}

static void wrong_numbers(program *p, param *a) {
  dc_buffer *buffer = NULL;
  dc_trace_event event;
  int64_t count;
  int32_t freed;
  const int64_t twice[2] = {a->id, a->id}, unknown[2] = {a->id, UNKNOWN_ID};
  REFUSED(p, dc_end_backward(p->ctx, GRAPH, 2), DC_E_INVALID);
  REFUSED(p, dc_start_backward(p->ctx, -1), DC_E_INVALID);
  REFUSED(p, dc_enable_profiling(p->ctx, 7), DC_E_INVALID);
  REFUSED(p, dc_context_alloc(p->ctx, 8, 9, &buffer), DC_E_INVALID);
  REFUSED(p, dc_context_alloc(p->ctx, -1, DC_MEMORY_DEVICE, &buffer), DC_E_INVALID);
  REFUSED(p, dc_context_trace_start(p->ctx, -1), DC_E_INVALID);
  REFUSED(p, dc_context_trace_read(p->ctx, &event, 1, 1, &count), DC_E_INVALID);
  REFUSED(p, dc_free_tensors(p->ctx, NULL, sizeof(dc_tensor), 1, &freed), DC_E_INVALID);
  REFUSED(p, dc_prefetch_params_fused(p->ctx, GRAPH, NULL, NULL, 1), DC_E_INVALID);
  REFUSED(p, dc_prefetch_params_fused(p->ctx, GRAPH, &a->id, NULL, -1), DC_E_INVALID);
  REFUSED(p, dc_context_params_updated(p->ctx, NULL, 1), DC_E_INVALID);
  dc_status (*const graph)(dc_context *, int64_t, const int64_t *, int64_t) = p->stage == 3   ? dc_register_graph_z3
                                                                              : p->stage == 2 ? dc_register_graph_z2
                                                                              : p->stage == 1 ? dc_register_graph_z1
                                                                                              : dc_register_graph_z0;
  REFUSED(p, graph(p->ctx, 50, NULL, 1), DC_E_INVALID);
  REFUSED(p, graph(p->ctx, 50, twice, 2), DC_E_INVALID);
  REFUSED(p, graph(p->ctx, 50, unknown, 2), DC_E_NOT_FOUND);
  if (p->stage == 3) {
    dc_tensor out = DC_TENSOR_INIT;
    REFUSED(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, DC_UINT8, &out), DC_E_DTYPE);
    REFUSED(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, -3, &out), DC_E_DTYPE);
    if (has_copy(a)) {
      REFUSED(p, dc_release_param(p->ctx, NULL, GRAPH, a->id, 0), DC_E_INVALID);
    }
  }
}

/* A gradient that is wrong in one property. */
static void wrong_gradients(program *p, param *a) {
  static const int64_t negative[1] = {-1}, strides[2] = {1, 7};
  static const dc_status expected[] = {DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE, DC_E_SHAPE, DC_E_DTYPE};
  int64_t longer = a->numel + 1;
  const int64_t square[2] = {2, 2};
  double memory[4] = {0};
  dc_tensor t = flat(memory, &a->numel, DC_FLOAT32);
  REFUSED(p, dc_reduce_grad(p->ctx, NULL, GRAPH, a->id), DC_E_INVALID);
  switch (own_pick(p, 5)) {
    case 0:
      t.struct_size = own_pick(p, 2) == 0 ? 3 : (size_t)1 << 40;
      REFUSED(p, dc_reduce_grad(p->ctx, &t, GRAPH, a->id), expected[0]);
      break;
    case 1:
      t.shape = own_pick(p, 2) == 0 ? negative : &longer;
      REFUSED(p, dc_reduce_grad(p->ctx, &t, GRAPH, a->id), expected[1]);
      break;
    case 2:
      t.dtype = own_pick(p, 2) == 0 ? DC_INT32 : 77;
      REFUSED(p, dc_reduce_grad(p->ctx, &t, GRAPH, a->id), expected[2]);
      break;
    case 3:
      t = flat(memory, square, DC_FLOAT32);
      t.ndim = 2;
      t.strides = strides;
      REFUSED(p, dc_reduce_grad(p->ctx, &t, GRAPH, a->id), expected[3]);
      break;
    default:
      t.dtype = DC_DTYPE_NONE;
      REFUSED(p, dc_reduce_grad(p->ctx, &t, GRAPH, a->id), expected[4]);
  }
}

static void wrong_registrations(program *p, param *a) {
  const int64_t negative[1] = {-5}, three = 3;
  float memory[4] = {0};
  dc_tensor t = flat(memory, &three, DC_FLOAT32), ints = flat(memory, &three, DC_INT32);
  REFUSED(p, dc_register_param(p->ctx, a->id, &three, 1, NULL, &t, 0), DC_E_EXISTS);
  REFUSED(p, dc_register_param(p->ctx, UNKNOWN_ID, negative, 1, NULL, &t, 0), DC_E_SHAPE);
  REFUSED(p, dc_register_param(p->ctx, UNKNOWN_ID, &three, 1, NULL, &t, 1), DC_E_SHAPE);
  REFUSED(p, dc_register_param(p->ctx, UNKNOWN_ID, &three, 1, NULL, &ints, 0), DC_E_DTYPE);
  REFUSED(p, dc_register_z3_param(p->ctx, UNKNOWN_ID, &three, 1, &t, NULL, 2, DC_DTYPE_NONE), DC_E_INVALID);
  REFUSED(p, dc_register_z3_param(p->ctx, UNKNOWN_ID, &three, 1, NULL, NULL, 0, DC_DTYPE_NONE), DC_E_INVALID);
  REFUSED(p, dc_register_z3_param(p->ctx, UNKNOWN_ID, &three, 1, &t, NULL, 0, DC_INT8), DC_E_DTYPE);
  if (p->stage == 3 && !a->pending) {
    int64_t longer = a->chunk + 1;
    void *ptr = ground_new((size_t)longer * sizeof(float));
    dc_tensor grad = flat(ptr, &longer, DC_FLOAT32);
    REFUSED(p, dc_context_update_param_grad_buffer(p->ctx, a->id, &grad, 0), DC_E_SHAPE);
  }
}

static void wrong_outputs(program *p, param *a) {
  dc_tensor small = DC_TENSOR_INIT;
  dc_memory_stats stats = {.struct_size = 4};
  small.struct_size = 8;
  REFUSED(p, dc_context_get_memory_stats(p->ctx, NULL), DC_E_INVALID);
  REFUSED(p, dc_context_get_memory_stats(p->ctx, &stats), DC_E_INVALID);
  REFUSED(p, dc_context_dry_run(p->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, a->id, 0, NULL), DC_E_INVALID);
  REFUSED(p, dc_context_alloc(p->ctx, 8, DC_MEMORY_DEVICE, NULL), DC_E_INVALID);
  REFUSED(p, dc_take_param(p->ctx, GRAPH, a->id, 0, NULL), DC_E_INVALID);
  if (p->stage == 3) {
    REFUSED(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, 0, NULL), DC_E_INVALID);
    REFUSED(p, dc_allgather_param(p->ctx, NULL, GRAPH, a->id, 0, &small), DC_E_INVALID);
  }
  if (p->stage == 3 && p->values[0].host >= 0) {
    const int64_t other = TENSOR - 1;
    dc_tensor t = flat(p->values[0].source, &other, p->values[0].dtype), out = DC_TENSOR_INIT;
    REFUSED(p, dc_offload_tensor(p->ctx, &t, GRAPH, 0, &out), DC_E_SHAPE);
    REFUSED(p, dc_wait_offload(p->ctx, NULL, GRAPH, 0, &small), DC_E_INVALID);
  }
}

static void no_handles(program *p, param *a) {
  dc_context *ctx = NULL;
  dc_device *device = NULL;
  dc_stream *stream = NULL;
  dc_comm *comm = NULL;
  REFUSED(p, dc_end_backward(NULL, GRAPH, 0), DC_E_INVALID);
  REFUSED(p, dc_set_persistent(NULL, a->id), DC_E_INVALID);
  REFUSED(p, dc_context_check(NULL), DC_E_INVALID);
  REFUSED(p, dc_cleanup(NULL), DC_E_INVALID);
  REFUSED(p, dc_context_create(NULL, NULL, &ctx), DC_E_INVALID);
  REFUSED(p, dc_device_open("gpu of my dreams", NULL, &device), DC_E_NO_DEVICE);
  REFUSED(p, dc_stream_create(NULL, &stream), DC_E_INVALID);
  REFUSED(p, dc_stream_synchronize(NULL, 0), DC_E_INVALID);
  REFUSED(p, dc_comm_dup(NULL, &comm), DC_E_INVALID);
  REFUSED(p, dc_comm_barrier(NULL), DC_E_INVALID);
  CHECK(p, ctx == NULL && device == NULL && stream == NULL && comm == NULL);
  /* Before dc_init, a context refuses every call; it may be destroyed at once. */
  OK(p, dc_context_create(p->r->device, NULL, &ctx));
  dc_status status = dc_set_persistent(ctx, a->id), end = dc_cleanup(ctx);
  dc_context_destroy(ctx);
  CHECK(p, status == DC_E_STATE && end == DC_E_STATE);
}

static void wrong_collectives(program *p, param *a) {
  dc_comm *comm = p->r->comm;
  const int64_t three = 3, four = 4;
  float memory[8] = {0};
  dc_tensor t = flat(memory, &three, DC_FLOAT32), u = flat(memory, &four, DC_FLOAT32),
            bytes = flat(memory, &three, DC_UINT8), ints = flat(memory, &three, DC_INT32);
  const int64_t counts[RANKS] = {-1};
  (void)a;
  REFUSED(p, dc_comm_all_reduce(comm, &t, 9, NULL), DC_E_INVALID);
  REFUSED(p, dc_comm_all_reduce(comm, &ints, DC_MEAN, NULL), DC_E_DTYPE);
  REFUSED(p, dc_comm_all_reduce(comm, &bytes, DC_SUM, NULL), DC_E_DTYPE);
  REFUSED(p, dc_comm_broadcast(comm, &t, p->r->world, NULL), DC_E_INVALID);
  REFUSED(p, dc_comm_all_gather(comm, &t, &u, counts, NULL), DC_E_INVALID);
  REFUSED(p, dc_comm_all_gather(comm, &t, &ints, NULL, NULL), DC_E_DTYPE);
  if (p->r->world > 1) {
    REFUSED(p, dc_comm_all_gather(comm, &t, &u, NULL, NULL), DC_E_SHAPE);
  }
}

void illegal_call(program *p) {
  static void (*const calls[])(program *, param *) = {unknown_ids,         wrong_stage,   wrong_order,
                                                      wrong_numbers,       wrong_outputs, wrong_gradients,
                                                      wrong_registrations, no_handles,    wrong_collectives};
  param *a = &p->params[own_pick(p, (uint64_t)p->count)];
  calls[own_pick(p, sizeof calls / sizeof calls[0])](p, a);
  if (!broken(p)) {
    OK(p, dc_context_check(p->ctx)); /* no rank is affected */
  }
}

/* ---- ranks that differ ---- */

/* A context whose configuration differs is refused on every rank, and nothing else is affected. */
static void other_config(program *p, bool culprit) {
  dc_context *ctx = NULL;
  OK(p, dc_context_create(p->r->device, NULL, &ctx));
  dc_status status = dc_init(ctx, p->r->comm, NULL, culprit ? 11 : 10);
  dc_context_destroy(ctx);
  bool alone = status == DC_E_BUSY && strstr(dc_last_error(), "cannot be copied, and another context uses it") != NULL;
  CHECK(p, alone || (status == DC_E_MISMATCH && strstr(dc_last_error(), "initial_reduce_bucket_size") != NULL));
  OK(p, dc_context_check(p->ctx));
}

static dc_status gather_other(program *p, bool culprit) {
  const param *a = &p->params[0];
  dc_tensor out = DC_TENSOR_INIT;
  dc_status status = dc_context_params_updated(p->ctx, NULL, 0);
  if (status == DC_OK) {
    status = dc_allgather_param(p->ctx, NULL, GRAPH, a->id, a->types[culprit ? 1 : 0], &out);
  }
  return status == DC_OK ? dc_wait_allgather(p->ctx, NULL, GRAPH, a->id) : status;
}

static dc_status register_other(program *p, bool culprit) {
  dc_status (*const by_stage[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  int64_t ids[PARAMS];
  for (int64_t i = 0; i < p->count; i++) {
    ids[i] = i;
  }
  return by_stage[p->stage](p->ctx, 77, ids, culprit ? p->count - 1 : p->count);
}

void mismatch(program *p) {
  if (p->r->world == 1 || p->group_size < p->r->world) {
    return; /* a group of one context's ranks does not see another group's calls, and only gets an abort */
  }
  bool culprit = p->r->rank == (int32_t)pick(p, (uint64_t)p->r->world);
  uint64_t kind = pick(p, 3);
  if (kind == 0) {
    other_config(p, culprit);
    return;
  }
  bool gathers = kind == 1 && p->stage == 3 && p->params[0].numel > 0;
  dc_status status = gathers ? gather_other(p, culprit) : register_other(p, culprit);
  CHECK(p, status == DC_E_MISMATCH && dc_last_error()[0] != '\0');
  /* The group has failed permanently, for every call. */
  REFUSED(p, dc_context_check(p->ctx), DC_E_MISMATCH);
  REFUSED(p, dc_end_backward(p->ctx, GRAPH, 0), DC_E_MISMATCH);
  REFUSED(p, dc_comm_barrier(p->r->comm), DC_E_MISMATCH);
}
