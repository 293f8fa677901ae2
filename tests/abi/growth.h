/* How each sized struct of the header is used: fill_x() makes it a good one, call_x() hands it to the library. */
#ifndef TESTS_ABI_GROWTH_H
#define TESTS_ABI_GROWTH_H

#include <stddef.h>
#include <stdint.h>

#include "dc_api.h"

enum { GRAPH = 1, ID = 2 };

static dc_device *device;
static dc_context *context;
static dc_layer *layer;
static dc_linalg *linalg;
static float weights[4], gradient[4];
static const int64_t four = 4;

static void *allocate(int64_t bytes, int64_t align, void *user) {
  (void)bytes, (void)align, (void)user;
  return NULL;
}

static void release(void *ptr, int64_t bytes, int64_t align, void *user) {
  (void)ptr, (void)bytes, (void)align, (void)user;
}

static int32_t gather(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  (void)send, (void)recv, (void)count, (void)dtype, (void)user;
  return 0;
}

static int32_t broadcast(void *data, int64_t bytes, int32_t root, void *user) {
  (void)data, (void)bytes, (void)root, (void)user;
  return 0;
}

static int32_t barrier(void *user) {
  (void)user;
  return 0;
}

static void fill_tensor(void *at) {
  dc_tensor *t = at;
  t->data = weights, t->shape = &four, t->ndim = 1, t->dtype = DC_FLOAT32;
}

static dc_status call_tensor(void *at) {
  return dc_reduce_grad(context, at, GRAPH, ID);
}

static dc_status call_tensor_out(void *at) {
  dc_status status = dc_allgather_param(context, NULL, GRAPH, ID, DC_DTYPE_NONE, at);
  return status != DC_OK ? status : dc_release_param(context, NULL, GRAPH, ID, 1);
}

static dc_status call_tensor_strided(void *at, size_t size) {
  int32_t freed;
  return dc_free_tensors(context, at, size, 1, &freed);
}

static void fill_allocator(void *at) {
  dc_allocator *a = at;
  a->alloc = allocate, a->free = release;
}

static dc_status call_allocator(void *at) {
  dc_device_options options = DC_DEVICE_OPTIONS_INIT;
  dc_device *opened;
  options.allocator = at;
  dc_status status = dc_device_open("cpu", &options, &opened);
  dc_device_destroy(opened);
  return status;
}

static dc_status call_device_options(void *at) {
  dc_device *opened;
  dc_status status = dc_device_open("cpu", at, &opened);
  dc_device_destroy(opened);
  return status;
}

static dc_status call_comm_options(void *at) {
  dc_comm *comm;
  dc_status status = dc_comm_create_threads(1, at, &comm);
  dc_comm_destroy(comm);
  return status;
}

static void fill_callbacks(void *at) {
  dc_comm_callbacks *c = at;
  c->all_gather = gather, c->reduce_scatter = gather, c->broadcast = broadcast, c->barrier = barrier;
}

static dc_status call_callbacks(void *at) {
  dc_comm *comm;
  dc_status status = dc_comm_create_external(at, 0, 1, NULL, &comm);
  dc_comm_destroy(comm);
  return status;
}

static dc_status call_context_options(void *at) {
  dc_context *made;
  dc_status status = dc_context_create(device, at, &made);
  dc_context_destroy(made);
  return status;
}

static dc_status call_config(void *at) {
  dc_context *made;
  dc_status status = dc_context_create(device, NULL, &made);
  if (status == DC_OK) {
    status = dc_init(made, NULL, at, 1);
  }
  dc_context_destroy(made);
  return status;
}

static dc_status call_stats(void *at) {
  return dc_context_get_memory_stats(context, at);
}

static dc_status call_op_info(void *at) {
  return dc_context_dry_run(context, DC_OP_ALLGATHER_PARAM, GRAPH, ID, DC_DTYPE_NONE, at);
}

static dc_status call_trace(void *at, size_t size) {
  int64_t count;
  dc_tensor out = DC_TENSOR_INIT;
  if (dc_invalidate_gathered_param(context, ID) != DC_OK || call_tensor_out(&out) != DC_OK) {
    return DC_E_INTERNAL; /* the calls leave an event to read */
  }
  return dc_context_trace_read(context, at, size, 1, &count);
}

static void fill_layer_config(void *at) {
  dc_layer_config *c = at;
  c->hidden_size = 8, c->heads = 2, c->threads = 1;
}

static dc_status call_layer_config(void *at) {
  dc_layer *made;
  dc_status status = dc_layer_create(device, at, &made);
  dc_layer_destroy(made);
  return status;
}

static void fill_layer_call(void *at) {
  dc_layer_call *c = at;
  c->batch = 1, c->seq_length = 1;
}

static dc_status call_layer_call(void *at) {
  dc_layer_cost cost = DC_LAYER_COST_INIT;
  return dc_layer_get_cost(layer, at, &cost);
}

static void fill_plan_options(void *at) {
  dc_layer_plan_options *o = at;
  o->seq_length = o->memory_bytes = 1;
}

static dc_status call_plan_options(void *at) {
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  dc_layer_plan plan = DC_LAYER_PLAN_INIT;
  fill_layer_config(&c);
  return dc_layer_get_plan(&c, at, &plan);
}

static dc_status call_plan(void *at) {
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  dc_layer_plan_options o = DC_LAYER_PLAN_OPTIONS_INIT;
  fill_layer_config(&c);
  fill_plan_options(&o);
  return dc_layer_get_plan(&c, &o, at);
}

static dc_status call_layer_cost(void *at) {
  dc_layer_call c = DC_LAYER_CALL_INIT;
  fill_layer_call(&c);
  return dc_layer_get_cost(layer, &c, at);
}

static dc_status call_linalg_options(void *at) {
  dc_linalg *made;
  dc_status status = dc_linalg_create(device, at, &made);
  dc_linalg_destroy(made);
  return status;
}

static dc_tensor small_matrix(float *data) {
  static const int64_t shape[2] = {2, 2};
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data, t.shape = shape, t.ndim = 2, t.dtype = DC_FLOAT32;
  return t;
}

/* An identity matrix, and a tensor for the result. */
typedef struct pair {
  dc_tensor a, to;
} pair;

static pair *eye_pair(void) {
  static float eye[4] = {1, 0, 0, 1}, out[4];
  static pair p;
  p = (pair){small_matrix(eye), small_matrix(out)};
  return &p;
}

static dc_status call_power(const void *options, void *info, size_t size) {
  pair *p = eye_pair();
  return dc_matrix_power(linalg, &p->a, 1, options, &p->to, info, size);
}

static dc_status call_spectral_options(void *at) {
  return call_power(at, NULL, 0);
}

static dc_status call_spectral_info(void *at, size_t size) {
  return call_power(NULL, at, size);
}

static void fill_iteration(void *at) {
  ((dc_iteration_options *)at)->eps_abs = 1;
}

static dc_status call_newton(const void *options, void *info, size_t size) {
  pair *p = eye_pair();
  return dc_matrix_inverse_root_newton(linalg, &p->a, 1, options, &p->to, info, size);
}

static dc_status call_iteration_options(void *at) {
  return call_newton(at, NULL, 0);
}

static dc_status call_iteration_info(void *at, size_t size) {
  dc_iteration_options options = DC_ITERATION_OPTIONS_INIT;
  fill_iteration(&options);
  return call_newton(&options, at, size);
}

static float factor[4] = {1, 2, 3, 4};
static dc_tensor factor_tensor;

static void fill_source(void *at) {
  factor_tensor = small_matrix(factor);
  ((dc_matrix_source *)at)->tensor = &factor_tensor;
}

static dc_status call_source(void *at) {
  float out[4];
  dc_tensor to = small_matrix(out);
  dc_matrix_source right = DC_MATRIX_SOURCE_INIT, target = DC_MATRIX_SOURCE_INIT;
  fill_source(&right);
  target.tensor = &to;
  return dc_matmul_bounded(linalg, at, &right, &target, 1, NULL);
}

static void fill_layer(void *at) {
  ((dc_sample_layer *)at)->kind = DC_SAMPLE_LINEAR;
}

static dc_status call_layer(void *at) {
  static const int64_t two = 2;
  float squares[2];
  dc_tensor x = small_matrix(factor), to = small_matrix(squares);
  to.shape = &two, to.ndim = 1;
  return dc_per_sample_norms(linalg, at, &x, &x, DC_PART_WEIGHT, 0, &to);
}

static dc_status call_device_memory(void *at) {
  return dc_device_get_memory(device, at);
}

static dc_status call_launch(void *at) {
  return dc_launch_get(at);
}

static dc_status made(dc_status status, dc_optimizer *optimizer) {
  dc_optimizer_destroy(optimizer);
  return status;
}

#define CALL_OPTIMIZER(kind, ...)                       \
  static dc_status call_##kind##_options(void *at) {    \
    dc_optimizer *optimizer;                            \
    dc_status status = dc_##kind##_create(__VA_ARGS__); \
    return made(status, optimizer);                     \
  }
CALL_OPTIMIZER(adamw, linalg, at, &optimizer)
CALL_OPTIMIZER(sgd, linalg, at, &optimizer)
CALL_OPTIMIZER(shampoo, linalg, NULL, at, &optimizer)
CALL_OPTIMIZER(soap, linalg, NULL, at, &optimizer)
CALL_OPTIMIZER(muon, linalg, NULL, at, &optimizer)
CALL_OPTIMIZER(kfac, linalg, NULL, at, &optimizer)

static dc_status call_optimizer_stats(void *at) {
  dc_optimizer *optimizer = NULL;
  dc_status status = dc_sgd_create(linalg, NULL, &optimizer);
  return made(status == DC_OK ? dc_optimizer_get_stats(optimizer, at) : status, optimizer);
}

#endif
