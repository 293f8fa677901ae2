/* Out of memory: each allocation of a training step, and of second-order operators, fails in turn. Each call reports
 * the failure or works, and at the end nothing leaks. The program's own malloc family replaces the C library's, for
 * libdc too. */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dc_api.h"

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *ptr, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *ptr);

static atomic_long countdown = -1; /* counts down to the allocation that fails; negative: none fails */
static atomic_long live;
static atomic_long asked;

static bool refuse(void) {
  atomic_fetch_add(&asked, 1);
  return atomic_load(&countdown) >= 0 && atomic_fetch_sub(&countdown, 1) == 0;
}

static void *counted(void *ptr) {
  atomic_fetch_add(&live, ptr != NULL);
  return ptr;
}

void *malloc(size_t bytes) {
  return refuse() ? NULL : counted(__libc_malloc(bytes));
}

void *calloc(size_t count, size_t bytes) {
  return refuse() ? NULL : counted(__libc_calloc(count, bytes));
}

void *realloc(void *ptr, size_t bytes) {
  if (refuse()) {
    return NULL;
  }
  return ptr == NULL ? counted(__libc_realloc(NULL, bytes)) : __libc_realloc(ptr, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
  return refuse() ? NULL : counted(__libc_memalign(alignment, bytes));
}

int posix_memalign(void **ptr, size_t alignment, size_t bytes) {
  *ptr = aligned_alloc(alignment, bytes);
  return *ptr == NULL ? ENOMEM : 0;
}

void free(void *ptr) {
  atomic_fetch_sub(&live, ptr != NULL);
  __libc_free(ptr);
}

enum { GRAPH = 1, ID = 2, COUNT = 6 };

static dc_status worst;

/* Records the first failure. Returns whether the call worked. */
static bool works(dc_status status) {
  if (status != DC_OK && worst == DC_OK) {
    worst = status;
  }
  return status == DC_OK;
}

static void step(dc_context *context, dc_stream *stream) {
  static float weights[COUNT], gradient[COUNT], own[COUNT];
  static const int64_t whole = COUNT, id = ID;
  dc_tensor full = DC_TENSOR_INIT, shard = DC_TENSOR_INIT, grad, given;
  shard.data = weights, shard.shape = &whole, shard.ndim = 1, shard.dtype = DC_FLOAT32;
  grad = given = shard;
  grad.data = gradient, given.data = own;
  dc_buffer *taken = NULL, *block = NULL;
  if (works(dc_register_z3_param(context, ID, &whole, 1, &shard, &grad, 0, DC_DTYPE_NONE)) &&
      works(dc_register_graph_z3(context, GRAPH, &id, 1)) && works(dc_context_trace_start(context, 64)) &&
      works(dc_context_set_stream(context, stream)) && works(dc_start_backward(context, 1)) &&
      works(dc_prefetch_params_fused(context, GRAPH, &id, NULL, 1)) &&
      works(dc_allgather_param(context, NULL, GRAPH, ID, DC_BFLOAT16, &full)) &&
      works(dc_take_param(context, GRAPH, ID, DC_BFLOAT16, &taken)) &&
      works(dc_reduce_grad(context, &given, GRAPH, ID)) &&
      works(dc_offload_tensor(context, &given, GRAPH, 50, &full)) &&
      works(dc_reload_tensor(context, NULL, GRAPH, 50, &full)) &&
      works(dc_context_alloc(context, 100, DC_MEMORY_SHARED, &block)) && works(dc_end_backward(context, GRAPH, 1))) {
    works(dc_context_params_updated(context, &id, 1));
  }
  dc_buffer_release(taken);
  dc_buffer_release(block);
}

/* Second-order operators with libdc's own solver, since a LAPACK's allocations are not libdc's. */
static void matrices(dc_device *device) {
  static float a[9] = {4, 1, 0, 1, 3, 1, 0, 1, 2}, out[9], grads[27], squares[3];
  static const int64_t square[2] = {3, 3}, cube[3] = {3, 3, 3};
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_iteration_options newton = DC_ITERATION_OPTIONS_INIT;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  dc_tensor ta = DC_TENSOR_INIT, to, tg, ts, made = DC_TENSOR_INIT;
  options.plain = 1, options.threads = 2, newton.eps_rel = 1e-3, layer.kind = DC_SAMPLE_LINEAR;
  ta.data = a, ta.shape = square, ta.ndim = 2, ta.dtype = DC_FLOAT32;
  to = tg = ts = ta;
  to.data = out, tg.data = grads, tg.shape = cube, tg.ndim = 3, ts.data = squares, ts.ndim = 1;
  dc_linalg *l = NULL;
  if (works(dc_linalg_create(device, &options, &l)) && works(dc_matrix_power(l, &ta, -0.25, NULL, &to, NULL, 0)) &&
      works(dc_matrix_inverse_root_newton(l, &ta, 4, &newton, &to, NULL, 0)) &&
      works(dc_orthogonalize(l, &ta, DC_ORTHOGONAL_EXPRESS, 0, &to)) && works(dc_kron_apply(l, &ta, &ta, &ta, &to)) &&
      works(dc_batch_matmul(l, &ta, &ta, 1, 0, &to)) && works(dc_per_sample_grads(l, &layer, &ta, &ta, &tg, NULL)) &&
      works(dc_per_sample_norms(l, &layer, &ta, &ta, 1, 0, &ts)) &&
      works(dc_clipped_grad_sum(l, &layer, &ta, &ta, NULL, 0, &to, NULL)) &&
      works(dc_tensor_create(device, square, 2, DC_FLOAT32, &made))) {
    dc_buffer_release(made.buffer);
  }
  dc_linalg_destroy(l);
}

/* A step of an optimizer with float32 and bfloat16 weights. A step that failed is repeated. */
static void optimize(dc_device *device) {
  static float weights[2][COUNT], grads[2][COUNT];
  static const int64_t count = COUNT;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_linalg *linalg = NULL;
  dc_optimizer *optimizer = NULL;
  dc_tensor w[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT}, g[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
  for (int32_t i = 0; i < 2; i++) {
    w[i].data = weights[i], w[i].shape = &count, w[i].ndim = 1, w[i].dtype = i == 0 ? DC_FLOAT32 : DC_BFLOAT16;
    g[i] = w[i], g[i].data = grads[i];
  }
  options.threads = options.plain = 1;
  if (works(dc_linalg_create(device, &options, &linalg)) && works(dc_adamw_create(linalg, NULL, &optimizer)) &&
      works(dc_adamw_set_group(optimizer, 1, NULL)) &&
      works(dc_optimizer_add_param(optimizer, 0, &count, 1, 0, count, DC_FLOAT32, NULL)) &&
      works(dc_optimizer_add_param(optimizer, 1, &count, 1, 0, count, DC_BFLOAT16, NULL)) &&
      !works(dc_optimizer_step(optimizer, w, g, sizeof *w, 2, 1))) {
    dc_status first = worst;
    worst = DC_OK;
    if (works(dc_optimizer_step(optimizer, w, g, sizeof *w, 2, 1))) {
      worst = first;
    }
  }
  dc_optimizer_destroy(optimizer);
  dc_linalg_destroy(linalg);
}

/* Two steps of K-FAC; a third step must allocate nothing. */
static void curvature(dc_device *device) {
  static float x[12], weight[9], bias[3], grads[12];
  static const int64_t shape[2] = {3, 3}, batch[2] = {4, 3};
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  dc_tensor tx = DC_TENSOR_INIT, tensors[2][2];
  options.plain = 1, options.threads = 2, layer.kind = DC_SAMPLE_LINEAR;
  tx.data = x, tx.shape = batch, tx.ndim = 2, tx.dtype = DC_FLOAT32;
  for (int i = 0; i < 2; i++) {
    tensors[i][0] = tensors[i][1] = tx;
    tensors[i][0].shape = tensors[i][1].shape = shape, tensors[i][1].ndim = 1;
  }
  tensors[0][0].data = weight, tensors[0][1].data = bias, tensors[1][0].data = grads, tensors[1][1].data = grads + 9;
  for (int i = 0; i < 12; i++) {
    x[i] = (float)(i * i % 7), grads[i] = 1;
  }
  dc_linalg *l = NULL;
  dc_optimizer *o = NULL;
  bool fine = works(dc_linalg_create(device, &options, &l)) && works(dc_kfac_create(l, NULL, NULL, &o)) &&
              works(dc_optimizer_add_param(o, 0, shape, 2, 0, 9, DC_FLOAT32, NULL)) &&
              works(dc_optimizer_add_param(o, 0, shape, 1, 0, 3, DC_FLOAT32, NULL)) &&
              works(dc_kfac_add_layer(o, &layer, DC_KFAC_EXPAND, 0, 1, NULL));
  for (int i = 0; i < 3 && fine; i++) {
    long before = atomic_load(&asked);
    fine = works(dc_kfac_accumulate(o, 0, &tx, &tx, 4)) &&
           works(dc_optimizer_step(o, tensors[0], tensors[1], sizeof(dc_tensor), 2, 1)) &&
           works(i == 2 && atomic_load(&asked) != before ? DC_E_INTERNAL : DC_OK);
  }
  dc_optimizer_destroy(o);
  dc_linalg_destroy(l);
}

static void run(void) {
  dc_comm *comm = NULL;
  dc_device *device = NULL;
  dc_context *context = NULL;
  dc_stream *stream = NULL;
  worst = DC_OK;
  if (works(dc_comm_create_threads(1, NULL, &comm)) && works(dc_device_open("cpu", NULL, &device)) &&
      works(dc_stream_create(device, &stream)) && works(dc_context_create(device, NULL, &context)) &&
      works(dc_init(context, comm, NULL, 4))) {
    step(context, stream);
    matrices(device);
    optimize(device);
    curvature(device);
  }
  dc_context_destroy(context);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  dc_comm_destroy(comm);
}

int main(void) {
  run();
  run(); /* threads and libraries now hold all that they cache */
  long before = atomic_load(&live), begin = atomic_load(&asked);
  run();
  long needed = atomic_load(&asked) - begin, failed = 0, leaks = 0;
  if (worst != DC_OK || atomic_load(&live) != before) {
    printf("without a failure: %s, %ld blocks left\n", dc_status_name(worst), atomic_load(&live) - before);
    return 1;
  }
  for (long n = 0; n < needed; n++) {
    atomic_store(&countdown, n);
    run();
    atomic_store(&countdown, -1);
    failed += worst != DC_OK;
    if (worst != DC_OK && worst != DC_E_NO_MEMORY && worst != DC_E_SYSTEM) {
      printf("allocation %ld: %s: %s\n", n, dc_status_name(worst), dc_last_error());
      return 1;
    }
    if (atomic_load(&live) != before) {
      printf("allocation %ld: %s, %ld blocks left\n", n, dc_status_name(worst), atomic_load(&live) - before);
      leaks++;
      before = atomic_load(&live);
    }
  }
  printf("%ld allocations, each failed once: %ld steps ended with an error, %ld left memory behind\n", needed, failed,
         leaks);
  return leaks != 0;
}
