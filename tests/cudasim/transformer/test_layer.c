/* The transformer layer on the simulated device compared with the CPU's, through the public functions: placements of
 * LN, flags, types, masks, packed samples, dropout. Also workspace sizes, initial weights and refusals. In a steady
 * call, also within a graph, nothing is allocated, searched or waited for. */
#include "harness.h"

#include <math.h>

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "device_matrix.h"

/* The tensors of one side, and their device. */
typedef struct device_layer {
  dc_device *device;
  dc_stream *stream;
  dc_layer *layer;
  dc_layer_call call;
  dc_layer_cost cost;
  dc_tensor x, out, dout, dx, mask, w[DC_LAYER_WEIGHTS], g[DC_LAYER_WEIGHTS];
  void *workspace, *reserve;
} device_layer;

enum { BATCH = 3, LONGEST = 19 };

typedef struct choice {
  int64_t hidden, heads, inner;
  int32_t dtype, grad_dtype, pre, invertible, checkpoint, gelu;
  int32_t mask, packed; /* mask: 1: of the type, 2: float32 */
  double dropout;
} choice;

static const int32_t cu_seqlens[BATCH + 1] = {0, 19, 19, 30};

static dc_layer_config config_of(const choice *c) {
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  config.hidden_size = c->hidden;
  config.heads = c->heads;
  config.intermediate_size = c->inner;
  config.dtype = c->dtype;
  config.grad_dtype = c->grad_dtype;
  config.pre_layer_norm = c->pre;
  config.normalize_invertible = c->invertible > 0;
  config.gelu_checkpoint = c->checkpoint > 0;
  config.gelu = c->gelu;
  config.attn_dropout_ratio = config.hidden_dropout_ratio = c->dropout;
  config.initializer_range = 0.2;
  config.threads = 1;
  config.seed = 11;
  return config;
}

static void fill(device_layer *s, const choice *c) {
  assert_int_equal(dc_layer_init_weights(s->layer, s->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS), DC_OK);
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    bool scale = i == DC_LAYER_ATTN_NW || i == DC_LAYER_NORM_W;
    if (s->w[i].shape[1] == 1) {
      randomize(s->device, &s->w[i], (uint64_t)i, 0.5f, scale ? 1.0f : 0.0f);
    }
    randomize(s->device, &s->g[i], (uint64_t)i + 50, 1, 0); /* gradients are added to it, or replace it */
  }
  randomize(s->device, &s->x, 100, 1, 0);
  randomize(s->device, &s->dout, 101, 1, 0);
  if (c->mask != 0) {
    randomize(s->device, &s->mask, 102, 2, 0);
  }
}

static void open_layer(device_layer *s, const char *name, const choice *c) {
  memset(s, 0, sizeof *s);
  s->call = (dc_layer_call)DC_LAYER_CALL_INIT;
  s->cost = (dc_layer_cost)DC_LAYER_COST_INIT;
  if (dc_device_open(name, NULL, &s->device) != DC_OK || dc_stream_create(s->device, &s->stream) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  dc_layer_config config = config_of(c);
  if (dc_layer_create(s->device, &config, &s->layer) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  s->call.batch = BATCH;
  s->call.seq_length = LONGEST;
  s->call.cu_seqlens = c->packed ? cu_seqlens : NULL;
  s->call.offset = 5;
  s->call.accumulate = c->grad_dtype == DC_FLOAT32;
  const int64_t tokens = c->packed ? cu_seqlens[BATCH] : BATCH * LONGEST;
  const int32_t grad_dtype = c->grad_dtype != DC_DTYPE_NONE ? c->grad_dtype : c->dtype;
  dc_tensor *const activations[] = {&s->x, &s->out, &s->dout, &s->dx};
  for (size_t i = 0; i < DC__COUNT(activations); i++) {
    *activations[i] = tensor(s->device, c->dtype, tokens, c->hidden);
  }
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t shape[2];
    int32_t ndim;
    assert_int_equal(dc_layer_get_weight_shape(s->layer, i, shape, &ndim), DC_OK);
    s->w[i] = tensor(s->device, c->dtype, shape[0], shape[1]);
    s->g[i] = tensor(s->device, grad_dtype, shape[0], shape[1]);
  }
  if (c->mask != 0) {
    s->mask = tensor(s->device, c->mask == 1 ? c->dtype : DC_FLOAT32, BATCH, LONGEST);
    s->call.mask = &s->mask;
  }
  assert_int_equal(dc_layer_get_cost(s->layer, &s->call, &s->cost), DC_OK);
  int64_t most = s->cost.forward_workspace_bytes > s->cost.backward_workspace_bytes ? s->cost.forward_workspace_bytes
                                                                                    : s->cost.backward_workspace_bytes;
  most = s->cost.inference_workspace_bytes > most ? s->cost.inference_workspace_bytes : most;
  s->call.workspace = device_alloc(s->device, (size_t)most);
  s->call.workspace_bytes = most;
  s->call.reserve = device_alloc(s->device, (size_t)s->cost.reserve_bytes);
  s->call.reserve_bytes = s->cost.reserve_bytes;
  s->call.stream = s->stream;
  fill(s, c);
}

static void close_layer(device_layer *s) {
  dc_layer_destroy(s->layer);
  while (block_count > 0 && blocks[block_count - 1].device == s->device) {
    block_count--;
    s->device->ops->free(s->device, blocks[block_count].ptr, blocks[block_count].bytes, DC_MEMORY_DEVICE);
  }
  dc_stream_destroy(s->stream);
  dc_device_destroy(s->device);
}

static void forward(device_layer *s) {
  if (dc_layer_forward(s->layer, &s->call, s->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &s->x, &s->out) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
}

static void backward(device_layer *s) {
  if (dc_layer_backward(s->layer, &s->call, s->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &s->x, &s->out, &s->dout, &s->dx,
                        s->g) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
}

/* The norm of the difference, relative to the expected norm. */
static double difference(const void *found, const void *expected, int32_t dtype, int64_t count) {
  float *a = malloc((size_t)count * sizeof *a), *b = malloc((size_t)count * sizeof *b);
  dc__cast(a, DC_FLOAT32, found, dtype, count);
  dc__cast(b, DC_FLOAT32, expected, dtype, count);
  double square = 0, norm = 0;
  for (int64_t i = 0; i < count; i++) {
    square += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    norm += (double)b[i] * (double)b[i];
  }
  free(a);
  free(b);
  return sqrt(square / (norm > 0 ? norm : 1));
}

/* Compares a tensor on the device with the CPU's. */
static void same(const char *what, int32_t index, dc_device *device, const dc_tensor *cuda, const dc_tensor *cpu,
                 const choice *c) {
  const double gate = c->dtype == DC_FLOAT32 ? 1e-5 : c->dtype == DC_FLOAT16 ? 4e-3 : 3e-2;
  void *found = elements(device, cuda);
  const double e = difference(found, cpu->data, cpu->dtype, cpu->shape[0] * cpu->shape[1]);
  free(found);
  if (!(e < gate)) {
    fail_msg("%s %d differs by %g: hidden %d, %s, pre %d, invertible %d, checkpoint %d, mask %d, packed %d, dropout %g",
             what, (int)index, e, (int)c->hidden, dc_dtype_name(c->dtype), (int)c->pre, (int)c->invertible,
             (int)c->checkpoint, (int)c->mask, (int)c->packed, c->dropout);
  }
}

static void nothing_left(void) {
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
#endif
}

static void compare(const choice *c) {
  device_layer cpu, cuda;
  open_layer(&cpu, "cpu", c);
  open_layer(&cuda, "cuda", c);
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) { /* initial weights are the same on every device */
    void *found = elements(cuda.device, &cuda.w[i]);
    assert_memory_equal(found, cpu.w[i].data, bytes_of(&cpu.w[i]));
    free(found);
  }
  assert_true(cpu.cost.reserve_bytes == cuda.cost.reserve_bytes);
  device_layer *const pair[] = {&cpu, &cuda};
  for (int i = 0; i < 2; i++) {
    forward(pair[i]);
    backward(pair[i]);
    assert_int_equal(dc_stream_synchronize(pair[i]->stream, 0), DC_OK);
  }
  same("output", 0, cuda.device, &cuda.out, &cpu.out, c);
  same("grad_input", 0, cuda.device, &cuda.dx, &cpu.dx, c);
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    same("gradient", i, cuda.device, &cuda.g[i], &cpu.g[i], c);
  }
  close_layer(&cuda);
  close_layer(&cpu);
  nothing_left();
}

/* Without tokens nothing is computed, and the weights' gradients become zero, or keep their values when added to. */
static void test_without_tokens(void **state) {
  (void)state;
  const choice cases[] = {{32, 2, 64, DC_BFLOAT16, 0, 1, -1, -1, DC_GELU_TANH, 0, 0, 0.1},
                          {32, 2, 64, DC_BFLOAT16, DC_FLOAT32, -1, 1, 1, DC_GELU_TANH, 0, 0, 0}}; /* added to */
  for (size_t i = 0; i < 2 * DC__COUNT(cases); i++) {
    const choice *c = &cases[i % 2];
    device_layer s;
    open_layer(&s, "cuda", c);
    void *before = elements(s.device, &s.g[0]);
    const int64_t none[2] = {0, c->hidden};
    s.x.shape = s.out.shape = s.dout.shape = s.dx.shape = none;
    s.call.batch = 0;
    s.call.stream = i < 2 ? s.stream : NULL;
    forward(&s);
    backward(&s);
    assert_int_equal(dc_layer_inference(s.layer, &s.call, s.w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &s.x, &s.out),
                     DC_OK);
    assert_int_equal(dc_stream_synchronize(s.stream, 0), DC_OK);
    if (i % 2 == 0) {
      memset(before, 0, bytes_of(&s.g[0]));
    }
    void *after = elements(s.device, &s.g[0]);
    assert_memory_equal(after, before, bytes_of(&s.g[0]));
    free(before);
    free(after);
    close_layer(&s);
    nothing_left();
  }
}

/* The thread sanitizer makes kernels slow, so only some cases are run: the kernels and their barriers are the same. */
#ifdef CUDASIM_TSAN
enum { EVERY = 3 };
#else
enum { EVERY = 1 };
#endif

static const int32_t F32 = DC_FLOAT32, F16 = DC_FLOAT16, BF16 = DC_BFLOAT16;

static void test_against_the_cpu(void **state) {
  (void)state;
  const choice cases[] = {
      {32, 2, 64, F32, 0, 1, -1, -1, DC_GELU_TANH, 0, 0, 0},
      {24, 3, 40, F32, 0, -1, 1, 1, DC_GELU_ERF, 2, 0, 0.1},
      {32, 2, 64, BF16, F32, 1, 1, 1, DC_GELU_TANH, 1, 0, 0.1},
      {32, 4, 64, BF16, 0, -1, -1, -1, DC_GELU_TANH, 0, 1, 0.1},
      {40, 2, 72, F16, F32, -1, 1, -1, DC_GELU_ERF, 1, 0, 0.2},
      {15, 3, 21, F16, 0, 1, -1, 1, DC_GELU_TANH, 2, 0, 0},
      {15, 1, 17, F32, 0, -1, -1, 1, DC_GELU_TANH, 0, 1, 0.3},
  };
  for (size_t i = 0; i < DC__COUNT(cases); i += EVERY) {
    compare(&cases[i]);
  }
}

#ifndef ON_CARD

static int host_calls(void) {
  return cudasim_calls("cuMemAllocFromPoolAsync") + cudasim_calls("cuStreamSynchronize") +
         cudasim_calls("cuEventSynchronize") + cudasim_calls("cublasLtMatmulAlgoGetHeuristic") +
         cudasim_calls("cublasLtMatmulDescCreate") + cudasim_calls("cuMemcpyAsync");
}

/* The second step has the bits of the first, and only queues kernels; so does a graph of it. */
static void test_a_steady_step(void **state) {
  (void)state;
  const choice c = {32, 2, 64, BF16, 0, 1, 1, 1, DC_GELU_TANH, 0, 1, 0.1};
  device_layer s;
  open_layer(&s, "cuda", &c);
  void *native = cudasim_stream();
  dc_stream *wrapped;
  assert_int_equal(dc_stream_wrap(s.device, native, &wrapped), DC_OK);
  s.call.stream = wrapped;
  const size_t bytes = (size_t)(s.dx.shape[0] * s.dx.shape[1]) * 2;
  void *first = malloc(bytes);
  forward(&s);
  backward(&s);
  assert_int_equal(dc_stream_synchronize(wrapped, 0), DC_OK);
  memcpy(first, cudasim_host_ptr(s.dx.data), bytes);
  for (int graph = 0; graph < 2; graph++) {
    memset(cudasim_host_ptr(s.dx.data), 0, bytes);
    int before = host_calls();
    if (graph != 0) {
      cudasim_capture(native);
    }
    forward(&s);
    backward(&s);
    assert_int_equal(host_calls(), before);
    if (graph != 0) {
      assert_int_equal(cudasim_capture_end(native), 1);
      cudasim_launch(native);
    }
    assert_int_equal(dc_stream_synchronize(wrapped, 0), DC_OK);
    assert_memory_equal(cudasim_host_ptr(s.dx.data), first, bytes);
  }
  free(first);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
  s.call.stream = NULL; /* the device's own stream, on which calls wait */
  forward(&s);
  close_layer(&s);
  nothing_left();
}

/* Whichever call of the driver or of the library fails, the layer's call or the wait reports it. */
static void test_failures_are_reported(void **state) {
  (void)state;
  static const struct {
    const char *function;
    int before, error;
  } faults[] = {{"cuLaunchKernel", 0, 2}, {"cuLaunchKernel", 4, 1},           {"cublasLtMatmul", 0, 13},
                {"cublasLtMatmul", 3, 3}, {"cublasLtMatmulDescCreate", 1, 3}, {"cuCtxPushCurrent_v2", 0, 700}};
  const choice c = {16, 2, 16, F32, 0, 1, -1, -1, DC_GELU_TANH, 0, 0, 0.25};
  for (size_t i = 0; i < DC__COUNT(faults); i++) {
    device_layer s;
    cudasim_reset();
    open_layer(&s, "cuda", &c);
    cudasim_fail(faults[i].function, faults[i].before, faults[i].error);
    if (dc_layer_forward(s.layer, &s.call, s.w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &s.x, &s.out) == DC_OK) {
      fail_msg("%s, call %d: nobody was told", faults[i].function, faults[i].before);
    }
    assert_non_null(strstr(dc_last_error(), "device \"cuda\""));
    close_layer(&s);
    nothing_left();
  }
}

#endif

static void test_dropout_masks(void **state) {
  (void)state;
  const choice c = {16, 2, 16, F32, 0, 1, -1, -1, DC_GELU_TANH, 0, 0, 0.25};
  device_layer s[2];
  unsigned char found[2][BATCH * 2 * LONGEST * LONGEST];
  for (int i = 0; i < 2; i++) {
    open_layer(&s[i], i == 0 ? "cpu" : "cuda", &c);
    dc_tensor mask = tensor(s[i].device, DC_UINT8, BATCH * 2 * LONGEST, LONGEST);
    mask.shape = (const int64_t[]){BATCH, 2, LONGEST, LONGEST};
    mask.ndim = 4;
    assert_int_equal(dc_layer_get_dropout_mask(s[i].layer, &s[i].call, DC_DROPOUT_ATTENTION, &mask, NULL), DC_OK);
    copy(s[i].device, found[i], mask.data, sizeof found[i]);
  }
  assert_memory_equal(found[0], found[1], sizeof found[0]);
  close_layer(&s[1]);
  close_layer(&s[0]);
}

static void test_refusals(void **state) {
  (void)state;
  dc_device *device;
  dc_layer *layer;
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  config.hidden_size = 256;
  config.heads = 1;
  assert_int_equal(dc_device_open("cuda", NULL, &device), DC_OK);
  setenv("LIBDC_CUDA_LIB_DIR", "/nowhere", 1);
  assert_int_equal(dc_layer_create(device, &config, &layer), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "dc_layer_create: CUDA: matrix products need cuBLASLt"));
  unsetenv("LIBDC_CUDA_LIB_DIR");
  config.intermediate_size = 67107841;
  assert_int_equal(dc_layer_create(device, &config, &layer), DC_E_UNSUPPORTED);
  assert_non_null(strstr(dc_last_error(), "config.intermediate_size = 67107841, must be at most 67107840 on device"));
  config.intermediate_size = 67107840;
  assert_int_equal(dc_layer_create(device, &config, &layer), DC_OK);
  dc_layer_destroy(layer);
  dc_device_destroy(device);
  nothing_left();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_against_the_cpu), cmocka_unit_test(test_without_tokens),
      cmocka_unit_test(test_dropout_masks),   cmocka_unit_test(test_refusals),
#ifndef ON_CARD
      cmocka_unit_test(test_a_steady_step),   cmocka_unit_test(test_failures_are_reported),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
