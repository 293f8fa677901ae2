/* How often a call of the layer, of an optimizer and of a matrix operator calls the driver. Together with the time in
 * the library of matrix products and in libdc itself, that is its cost on the host. The numbers are bounds, so that a
 * higher cost is noticed. All run on a wrapped stream, as PyTorch's are, except the matrix operator, which has no
 * stream. */
#include "harness.h"

#include "cudasim.h"
#include "device_matrix.h"

#define DO(call)                                  \
  do {                                            \
    if ((call) != DC_OK) {                        \
      fail_msg("%s: %s", #call, dc_last_error()); \
    }                                             \
  } while (0)

static dc_device *device;
static dc_stream *stream;
static void *native;

static int set_up(void **state) {
  (void)state;
  cudasim_reset();
  DO(dc_device_open("cuda", NULL, &device));
  native = cudasim_stream();
  DO(dc_stream_wrap(device, native, &stream));
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  while (block_count > 0) {
    block_count--;
    device->ops->free(device, blocks[block_count].ptr, blocks[block_count].bytes, DC_MEMORY_DEVICE);
  }
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  cudasim_stream_end(native);
  assert_int_equal(cudasim_live(), 0);
  return 0;
}

/* Counts the third call, since earlier ones may look up or allocate things once. It may make at most `most` calls of
 * the driver and its libraries, and must push the context once. */
static void count(const char *what, void (*call)(void *), void *arg, int most) {
  for (int i = 0; i < 3; i++) {
    const int launches = cudasim_calls("cuLaunchKernel"), all = cudasim_thread_calls();
    const int entered = cudasim_calls("cuCtxPushCurrent_v2");
    call(arg);
    const int calls = cudasim_thread_calls() - all;
    assert_int_equal(cudasim_depth(), 0);
    assert_int_equal(cudasim_mode(), 0);
    if (i == 2) {
      printf("%s: %d calls, %d of them launches\n", what, calls, cudasim_calls("cuLaunchKernel") - launches);
      assert_int_equal(cudasim_calls("cuCtxPushCurrent_v2") - entered, 1);
      assert_true(calls <= most);
    }
    DO(dc_stream_synchronize(stream, 0));
  }
}

/* ---- the layer: BERT's, without dropout ---- */

enum { BATCH = 2, LENGTH = 16, TOKENS = BATCH * LENGTH, HIDDEN = 32 };

typedef struct bert {
  dc_layer *layer;
  dc_layer_call call;
  dc_tensor x, out, dout, dx, w[DC_LAYER_WEIGHTS], g[DC_LAYER_WEIGHTS];
} bert;

static void make_bert(bert *b) {
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  dc_layer_cost cost = DC_LAYER_COST_INIT;
  config.hidden_size = HIDDEN;
  config.heads = 2;
  config.intermediate_size = 2 * HIDDEN;
  config.dtype = DC_BFLOAT16;
  config.pre_layer_norm = -1;
  config.normalize_invertible = config.gelu_checkpoint = 0;
  config.attn_dropout_ratio = config.hidden_dropout_ratio = 0;
  DO(dc_layer_create(device, &config, &b->layer));
  dc_tensor *const activations[] = {&b->x, &b->out, &b->dout, &b->dx};
  for (size_t i = 0; i < DC__COUNT(activations); i++) {
    *activations[i] = tensor(device, DC_BFLOAT16, TOKENS, HIDDEN);
    randomize(device, activations[i], i, 1, 0);
  }
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t shape[2];
    int32_t ndim;
    DO(dc_layer_get_weight_shape(b->layer, i, shape, &ndim));
    b->w[i] = tensor(device, DC_BFLOAT16, shape[0], ndim == 2 ? shape[1] : 1);
    b->g[i] = tensor(device, DC_BFLOAT16, shape[0], ndim == 2 ? shape[1] : 1);
  }
  DO(dc_layer_init_weights(b->layer, b->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS));
  b->call = (dc_layer_call)DC_LAYER_CALL_INIT;
  b->call.batch = BATCH;
  b->call.seq_length = LENGTH;
  b->call.stream = stream;
  DO(dc_layer_get_cost(b->layer, &b->call, &cost));
  b->call.workspace_bytes = cost.backward_workspace_bytes + cost.forward_workspace_bytes;
  b->call.workspace = device_alloc(device, (size_t)b->call.workspace_bytes);
  b->call.reserve_bytes = cost.reserve_bytes;
  b->call.reserve = device_alloc(device, (size_t)b->call.reserve_bytes);
}

static void forward(void *arg) {
  bert *b = arg;
  DO(dc_layer_forward(b->layer, &b->call, b->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &b->x, &b->out));
}

static void backward(void *arg) {
  bert *b = arg;
  DO(dc_layer_backward(b->layer, &b->call, b->w, sizeof(dc_tensor), DC_LAYER_WEIGHTS, &b->x, &b->out, &b->dout, &b->dx,
                       b->g));
}

static void test_a_layer(void **state) {
  (void)state;
  bert b;
  make_bert(&b);
  count("the layer's forward", forward, &b, 14);
  count("the layer's backward", backward, &b, 22);
  dc_layer_destroy(b.layer);
}

/* ---- an optimizer ---- */

enum { PARAMS = 40, NUMEL = 1000 }; /* more parameters than one launch takes */

typedef struct model {
  dc_linalg *linalg;
  dc_optimizer *adamw;
  dc_tensor weights[PARAMS], grads[PARAMS];
} model;

static void step(void *arg) {
  model *m = arg;
  DO(dc_optimizer_step(m->adamw, m->weights, m->grads, sizeof *m->grads, PARAMS, 1));
}

static void test_a_step(void **state) {
  (void)state;
  static const int64_t numel = NUMEL;
  dc_adamw_options options = DC_ADAMW_OPTIONS_INIT;
  options.check_finite = 1;
  model m;
  DO(dc_linalg_create(device, NULL, &m.linalg));
  DO(dc_adamw_create(m.linalg, &options, &m.adamw));
  char *memory = device_alloc(device, 2 * PARAMS * NUMEL * sizeof(float));
  for (int i = 0; i < PARAMS; i++) {
    m.weights[i] = flat(memory + (size_t)(2 * i) * NUMEL * sizeof(float), &numel, DC_FLOAT32);
    m.grads[i] = flat(memory + (size_t)(2 * i + 1) * NUMEL * sizeof(float), &numel, DC_FLOAT32);
    DO(dc_optimizer_add_param(m.adamw, 0, &numel, 1, 0, NUMEL, DC_FLOAT32, NULL));
  }
  dc__stream_zero(device->internal_stream, memory, 2 * PARAMS * NUMEL * sizeof(float));
  dc__device_sync_internal(device, NULL);
  DO(dc_optimizer_set_stream(m.adamw, stream));
  count("AdamW's step", step, &m, 18);
  dc_optimizer_destroy(m.adamw);
  dc_linalg_destroy(m.linalg);
}

/* ---- a matrix operator ---- */

typedef struct matrix {
  dc_linalg *linalg;
  dc_tensor a, out;
} matrix;

static void root(void *arg) {
  matrix *m = arg;
  dc_iteration_options options = DC_ITERATION_OPTIONS_INIT;
  options.eps_rel = 1e-4;
  DO(dc_matrix_inverse_root_newton(m->linalg, &m->a, 4, &options, &m->out, NULL, 0));
}

static void test_a_matrix_root(void **state) {
  (void)state;
  enum { ROWS = 8 };
  float values[ROWS * ROWS] = {0};
  matrix m = {.a = tensor(device, DC_FLOAT32, ROWS, ROWS), .out = tensor(device, DC_FLOAT32, ROWS, ROWS)};
  for (int i = 0; i < ROWS; i++) {
    values[i * ROWS + i] = (float)(1 + i);
  }
  copy(device, m.a.data, values, sizeof values);
  DO(dc_linalg_create(device, NULL, &m.linalg));
  count("a matrix' inverse root", root, &m, 118);
  dc_linalg_destroy(m.linalg);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
  const struct CMUnitTest tests[] = {TEST(test_a_layer), TEST(test_a_step), TEST(test_a_matrix_root)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
