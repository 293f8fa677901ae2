/* Wrong arguments of the transformer layer, point 27 of its conformance list: each error names the argument, and
 * nothing is written. */
#include "layer.h"

#define BAD_CONFIG(field, value, status)                                    \
  do {                                                                      \
    dc_layer_config c = small_config();                                     \
    c.field = value;                                                        \
    dc_layer *layer = (dc_layer *)(void *)&c;                               \
    REFUSED(status, "config." #field, dc_layer_create(device, &c, &layer)); \
    assert_null(layer);                                                     \
  } while (0)

static void test_27_configurations(void **state) {
  (void)state;
  dc_device *device;
  OK(dc_device_open("cpu", NULL, &device));
  BAD_CONFIG(hidden_size, 0, DC_E_INVALID);
  BAD_CONFIG(hidden_size, -48, DC_E_INVALID);
  BAD_CONFIG(hidden_size, INT64_MAX, DC_E_INVALID);
  BAD_CONFIG(heads, 0, DC_E_INVALID);
  BAD_CONFIG(heads, 5, DC_E_INVALID);
  BAD_CONFIG(heads, 96, DC_E_INVALID);
  BAD_CONFIG(intermediate_size, -1, DC_E_INVALID);
  BAD_CONFIG(batch_size, -1, DC_E_INVALID);
  BAD_CONFIG(max_seq_length, -1, DC_E_INVALID);
  BAD_CONFIG(attn_dropout_ratio, -1, DC_E_INVALID);
  BAD_CONFIG(attn_dropout_ratio, 1, DC_E_INVALID);
  BAD_CONFIG(hidden_dropout_ratio, (double)NAN, DC_E_INVALID);
  BAD_CONFIG(hidden_dropout_ratio, 1.5, DC_E_INVALID);
  BAD_CONFIG(num_hidden_layers, -1, DC_E_INVALID);
  BAD_CONFIG(initializer_range, -0.02, DC_E_INVALID);
  BAD_CONFIG(layer_norm_eps, -1e-12, DC_E_INVALID);
  BAD_CONFIG(layer_norm_eps, 1e-50, DC_E_INVALID);
  BAD_CONFIG(layer_norm_eps, (double)INFINITY, DC_E_INVALID);
  BAD_CONFIG(layer_norm_eps, (double)NAN, DC_E_INVALID);
  BAD_CONFIG(initializer_range, (double)NAN, DC_E_INVALID);
  BAD_CONFIG(attn_dropout_ratio, (double)NAN, DC_E_INVALID);
  BAD_CONFIG(hidden_dropout_ratio, -1, DC_E_INVALID);
  BAD_CONFIG(layer_id, INT64_C(1) << 32, DC_E_INVALID);
  BAD_CONFIG(intermediate_size, INT64_C(1) << 31, DC_E_INVALID);
  BAD_CONFIG(layer_id, -1, DC_E_INVALID);
  BAD_CONFIG(local_rank, -2, DC_E_INVALID);
  BAD_CONFIG(fp16, 2, DC_E_INVALID);
  BAD_CONFIG(dtype, DC_FLOAT64, DC_E_DTYPE);
  BAD_CONFIG(dtype, 99, DC_E_DTYPE);
  BAD_CONFIG(grad_dtype, DC_BFLOAT16, DC_E_DTYPE);
  BAD_CONFIG(gelu, 3, DC_E_INVALID);
  BAD_CONFIG(pre_layer_norm, 2, DC_E_INVALID);
  BAD_CONFIG(normalize_invertible, -1, DC_E_INVALID);
  BAD_CONFIG(gelu_checkpoint, 7, DC_E_INVALID);
  BAD_CONFIG(attn_dropout_checkpoint, 2, DC_E_INVALID);
  BAD_CONFIG(adjust_init_range, -2, DC_E_INVALID);
  BAD_CONFIG(stochastic_mode, 3, DC_E_INVALID);
  BAD_CONFIG(training, 5, DC_E_INVALID);
  BAD_CONFIG(threads, -1, DC_E_INVALID);
  BAD_CONFIG(reserved0, 1, DC_E_INVALID);
  dc_layer_config c = small_config();
  dc_layer *layer;
  REFUSED(DC_E_INVALID, "layer", dc_layer_create(device, &c, NULL));
  REFUSED(DC_E_INVALID, "config", dc_layer_create(device, NULL, &layer));
  REFUSED(DC_E_INVALID, "device", dc_layer_create(NULL, &c, &layer));
  c.struct_size = 8;
  REFUSED(DC_E_INVALID, "struct_size", dc_layer_create(device, &c, &layer));
  c = small_config();
  c.hidden_size = 3 * 8193;
  REFUSED(DC_E_UNSUPPORTED, "heads", dc_layer_create(device, &c, &layer));
  dc_device_destroy(device);
}

/* ---- calls ---- */

enum { FORWARD = 1, INFERENCE = 2, BACKWARD = 4, TRAINING = FORWARD | BACKWARD, ALL = 7 };

static dc_status run(rig *r, int32_t which) {
  if (which == FORWARD) {
    return dc_layer_forward(r->layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t);
  }
  if (which == INFERENCE) {
    return dc_layer_inference(r->layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t);
  }
  return dc_layer_backward(r->layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t, &r->dout.t, &r->dx.t,
                           r->gradients);
}

/* After a change of the rig these calls must fail, and after undoing it they must succeed. */
#define BAD(calls, text, status, change)                     \
  do {                                                       \
    for (int32_t which = 1; which <= BACKWARD; which *= 2) { \
      if (((calls)&which) != 0) {                            \
        rig good = r;                                        \
        change;                                              \
        REFUSED(status, text, run(&r, which));               \
        r = good;                                            \
      }                                                      \
    }                                                        \
  } while (0)

static rig bounded_rig(void) {
  dc_layer_config config = small_config();
  config.batch_size = 4;
  config.max_seq_length = 32;
  return make_rig(config, 2, 19);
}

/* Checks that no call has written anything: every byte is as make_owned() left it. */
static void assert_untouched(const rig *r) {
  const owned *written[5 + DC_LAYER_WEIGHTS] = {&r->out, &r->dx, &r->workspace, &r->reserve};
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    written[4 + k] = &r->g[k];
  }
  for (int32_t i = 0; i < 4 + DC_LAYER_WEIGHTS; i++) {
    for (size_t b = 0; b < written[i]->bytes; b++) {
      assert_int_equal(((unsigned char *)written[i]->t.data)[b], CANARY);
    }
  }
}

static void test_27_sizes_and_memory(void **state) {
  (void)state;
  rig r = bounded_rig();
  bind_rig(&r);
  BAD(ALL, "call.batch", DC_E_INVALID, r.call.batch = -1);
  BAD(ALL, "input", DC_E_SHAPE, r.call.batch = 0);
  BAD(ALL, "call.batch", DC_E_INVALID, r.call.batch = 5);
  BAD(ALL, "call.batch", DC_E_INVALID, r.call.batch = INT64_MIN);
  BAD(ALL, "call.seq_length", DC_E_INVALID, r.call.seq_length = -1);
  BAD(ALL, "input", DC_E_SHAPE, r.call.seq_length = 0);
  BAD(ALL, "call.seq_length", DC_E_INVALID, r.call.seq_length = 33);
  BAD(ALL, "input", DC_E_SHAPE, r.call.seq_length = 20);
  BAD(ALL, "accumulate", DC_E_INVALID, r.call.accumulate = 2);
  BAD(ALL, "reserved0", DC_E_INVALID, r.call.reserved0 = 1);
  BAD(ALL, "struct_size", DC_E_INVALID, r.call.struct_size = 8);
  BAD(ALL, "workspace is NULL", DC_E_INVALID, r.call.workspace = NULL);
  BAD(ALL, "workspace is not aligned", DC_E_INVALID, r.call.workspace = (char *)r.call.workspace + 4);
  BAD(FORWARD, "workspace_bytes", DC_E_BUFFER_TOO_SMALL, r.call.workspace_bytes = r.cost.forward_workspace_bytes - 1);
  BAD(INFERENCE, "workspace_bytes", DC_E_BUFFER_TOO_SMALL,
      r.call.workspace_bytes = r.cost.inference_workspace_bytes - 1);
  BAD(BACKWARD, "workspace_bytes", DC_E_BUFFER_TOO_SMALL, r.call.workspace_bytes = r.cost.backward_workspace_bytes - 1);
  BAD(TRAINING, "reserve is NULL", DC_E_INVALID, r.call.reserve = NULL);
  BAD(TRAINING, "reserve is not aligned", DC_E_INVALID, r.call.reserve = (char *)r.call.reserve + 32);
  BAD(TRAINING, "reserve_bytes", DC_E_BUFFER_TOO_SMALL, r.call.reserve_bytes--);
  BAD(BACKWARD, "reserve_bytes", DC_E_BUFFER_TOO_SMALL, r.call.reserve_bytes = 0); /* sufficient only for inference */
  static const int32_t wrong[][3] = {{1, 19, 38}, {0, 20, 19}, {0, 33, 38}, {0, -1, 38}};
  for (int32_t i = 0; i < 4; i++) {
    BAD(ALL, "cu_seqlens", DC_E_INVALID, r.call.cu_seqlens = wrong[i]);
  }
  dc_device *other;
  dc_stream *stream;
  OK(dc_device_open("cpu", NULL, &other));
  OK(dc_stream_create(other, &stream));
  BAD(ALL, "another device", DC_E_INVALID, r.call.stream = stream);
  dc_stream_destroy(stream);
  dc_device_destroy(other);
  assert_untouched(&r);
  free_rig(&r);
}

static void test_27_masks(void **state) {
  (void)state;
  rig r = bounded_rig();
  bind_rig(&r);
  float zeros[2 * 19 + 1] = {0};
  const int64_t turned[] = {19, 2}, right[] = {2, 19}, flat[] = {38}, square[] = {2, 1, 19, 19};
  const int32_t offsets[] = {0, 19, 38};
  dc_tensor mask = {.struct_size = sizeof mask, .data = zeros, .shape = turned, .ndim = 2, .dtype = DC_FLOAT32};
  BAD(ALL, "mask", DC_E_SHAPE, r.call.mask = &mask);
  mask.shape = flat;
  mask.ndim = 1;
  BAD(ALL, "mask", DC_E_SHAPE, r.call.mask = &mask);
  mask.shape = square;
  mask.ndim = 4;
  BAD(ALL, "mask", DC_E_SHAPE, r.call.mask = &mask);
  mask.shape = right;
  mask.ndim = 2;
  BAD(ALL, "must be NULL", DC_E_INVALID, r.call.mask = &mask; r.call.cu_seqlens = offsets);
  mask.dtype = DC_INT32;
  BAD(ALL, "mask", DC_E_DTYPE, r.call.mask = &mask);
  mask.dtype = DC_BOOL;
  BAD(ALL, "mask", DC_E_DTYPE, r.call.mask = &mask);
  mask.dtype = DC_FLOAT32;
  mask.data = (char *)zeros + 1;
  BAD(ALL, "aligned", DC_E_INVALID, r.call.mask = &mask);
  mask.data = NULL;
  BAD(ALL, "mask", DC_E_INVALID, r.call.mask = &mask);
  assert_untouched(&r);
  free_rig(&r);
}

/* Every way in which one tensor can be wrong. */
#define BAD_TENSOR(calls, name, tensor)                                          \
  do {                                                                           \
    static const int64_t longer[] = {2, 19, 49}, apart[] = {2 * 19 * 48, 96, 2}; \
    static const int64_t turned[] = {19, 2, 48};                                 \
    BAD(calls, name, DC_E_DTYPE, (tensor)->dtype = DC_FLOAT64);                  \
    BAD(calls, name, DC_E_DTYPE, (tensor)->dtype = 77);                          \
    BAD(calls, name, DC_E_SHAPE, (tensor)->shape = longer; (tensor)->ndim = 3);  \
    BAD(calls, name, DC_E_INVALID, (tensor)->data = NULL);                       \
    BAD(calls, name, DC_E_INVALID, (tensor)->data = (char *)(tensor)->data + 1); \
    BAD(calls, name, DC_E_INVALID, (tensor)->struct_size = 8);                   \
    BAD(calls, name, DC_E_INVALID, (tensor)->ndim = -1);                         \
    BAD(calls, name, DC_E_INVALID, (tensor)->shape = NULL);                      \
    if ((tensor)->ndim == 3) {                                                   \
      BAD(calls, name, DC_E_SHAPE, (tensor)->strides = apart);                   \
      BAD(calls, name " is [19, 2, 48]", DC_E_SHAPE, (tensor)->shape = turned);  \
    }                                                                            \
  } while (0)

static void test_27_tensors(void **state) {
  (void)state;
  rig r = bounded_rig();
  bind_rig(&r);
  BAD_TENSOR(ALL, "input", &r.x.t);
  BAD_TENSOR(FORWARD | INFERENCE, "output", &r.out.t);
  BAD_TENSOR(BACKWARD, "output", &r.out.t);
  BAD_TENSOR(BACKWARD, "grad_output", &r.dout.t);
  BAD_TENSOR(BACKWARD, "grad_input", &r.dx.t);
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    BAD_TENSOR(ALL, "weights[", &r.weights[k]);
    BAD_TENSOR(BACKWARD, "grad_weights[", &r.gradients[k]);
    BAD(ALL, "weights[", DC_E_INVALID, r.weights[k].struct_size = 0);
    const int64_t *shape = r.weights[k].shape, across[] = {shape[1], shape[0]};
    if (r.weights[k].ndim == 2 && shape[0] != shape[1]) { /* a transposed matrix */
      BAD(ALL, "weights[", DC_E_SHAPE, r.weights[k].shape = across; r.weights[k].ndim = 2);
      BAD(BACKWARD, "grad_weights[", DC_E_SHAPE, r.gradients[k].shape = across; r.gradients[k].ndim = 2);
    }
  }
  assert_untouched(&r);
  free_rig(&r);
}

static void test_27_overlaps(void **state) {
  (void)state;
  rig r = bounded_rig();
  bind_rig(&r);
  BAD(FORWARD | INFERENCE, "overlaps", DC_E_INVALID, r.out.t.data = r.x.t.data);
  BAD(FORWARD | INFERENCE, "overlaps", DC_E_INVALID, r.out.t.data = (char *)r.x.t.data + r.x.bytes - 4);
  BAD(FORWARD | INFERENCE, "overlaps", DC_E_INVALID, r.out.t.data = r.w[6].t.data);
  BAD(FORWARD | INFERENCE, "overlaps", DC_E_INVALID, r.out.t.data = r.call.workspace);
  BAD(FORWARD, "overlaps", DC_E_INVALID, r.out.t.data = r.call.reserve);
  BAD(TRAINING, "overlaps", DC_E_INVALID, r.call.workspace = r.call.reserve);
  BAD(BACKWARD, "overlaps", DC_E_INVALID, r.dx.t.data = r.dout.t.data);
  BAD(BACKWARD, "overlaps", DC_E_INVALID, r.dx.t.data = r.x.t.data);
  BAD(BACKWARD, "overlaps", DC_E_INVALID, r.gradients[0].data = r.w[0].t.data);
  BAD(BACKWARD, "overlaps", DC_E_INVALID, r.gradients[4].data = r.gradients[5].data);
  BAD(BACKWARD, "overlaps", DC_E_INVALID, r.gradients[0].data = r.call.reserve);
  assert_untouched(&r);
  free_rig(&r);
}

static void test_27_nothing_given(void **state) {
  (void)state;
  dc_layer_config config = small_config();
  config.pre_layer_norm = -1;
  config.normalize_invertible = 1; /* its backward reads the output */
  rig r = make_rig(config, 2, 19);
  bind_rig(&r);
  for (int32_t which = 1; which <= BACKWARD; which *= 2) {
    rig none = r;
    none.layer = NULL;
    REFUSED(DC_E_INVALID, "layer", run(&none, which));
  }
  REFUSED(DC_E_INVALID, "call", dc_layer_forward(r.layer, NULL, TWELVE(r.weights), &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "weights", dc_layer_forward(r.layer, &r.call, TWELVE(NULL), &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "input", dc_layer_forward(r.layer, &r.call, TWELVE(r.weights), NULL, &r.out.t));
  REFUSED(DC_E_INVALID, "output", dc_layer_forward(r.layer, &r.call, TWELVE(r.weights), &r.x.t, NULL));
  REFUSED(DC_E_INVALID, "call", dc_layer_inference(r.layer, NULL, TWELVE(r.weights), &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "input", dc_layer_inference(r.layer, &r.call, TWELVE(r.weights), NULL, &r.out.t));
  REFUSED(DC_E_INVALID, "output", dc_layer_inference(r.layer, &r.call, TWELVE(r.weights), &r.x.t, NULL));
  dc_tensor *x = &r.x.t, *out = &r.out.t, *dout = &r.dout.t, *dx = &r.dx.t;
  REFUSED(DC_E_INVALID, "call", dc_layer_backward(r.layer, NULL, TWELVE(r.weights), x, out, dout, dx, r.gradients));
  REFUSED(DC_E_INVALID, "weights", dc_layer_backward(r.layer, &r.call, TWELVE(NULL), x, out, dout, dx, r.gradients));
  REFUSED(DC_E_INVALID, "input",
          dc_layer_backward(r.layer, &r.call, TWELVE(r.weights), NULL, out, dout, dx, r.gradients));
  REFUSED(DC_E_INVALID, "output",
          dc_layer_backward(r.layer, &r.call, TWELVE(r.weights), x, NULL, dout, dx, r.gradients));
  REFUSED(DC_E_INVALID, "grad_output",
          dc_layer_backward(r.layer, &r.call, TWELVE(r.weights), x, out, NULL, dx, r.gradients));
  REFUSED(DC_E_INVALID, "grad_weights", dc_layer_backward(r.layer, &r.call, TWELVE(r.weights), x, out, dout, dx, NULL));
  int64_t shape[2];
  int32_t ndim;
  REFUSED(DC_E_INVALID, "index", dc_layer_get_weight_shape(r.layer, 12, shape, &ndim));
  REFUSED(DC_E_INVALID, "index", dc_layer_get_weight_shape(r.layer, -1, shape, &ndim));
  REFUSED(DC_E_INVALID, "shape", dc_layer_get_weight_shape(r.layer, 0, NULL, &ndim));
  REFUSED(DC_E_INVALID, "ndim", dc_layer_get_weight_shape(r.layer, 0, shape, NULL));
  REFUSED(DC_E_INVALID, "weights", dc_layer_init_weights(r.layer, TWELVE(NULL)));
  REFUSED(DC_E_INVALID, "count = 11", dc_layer_init_weights(r.layer, r.weights, sizeof(dc_tensor), 11));
  REFUSED(DC_E_INVALID, "tensor_size = 40", dc_layer_init_weights(r.layer, r.weights, 40, DC_LAYER_WEIGHTS));
  REFUSED(DC_E_INVALID, "layer", dc_layer_init_weights(NULL, TWELVE(r.weights)));
  uint8_t bits[8];
  const int64_t eight = 8;
  dc_tensor small = {.struct_size = sizeof small, .data = bits, .shape = &eight, .ndim = 1, .dtype = DC_UINT8};
  REFUSED(DC_E_SHAPE, "mask", dc_layer_get_dropout_mask(r.layer, &r.call, DC_DROPOUT_OUTPUT, &small, NULL));
  const int64_t others[2][4] = {{19, 2, 48}, {2, 19, 3, 19}}; /* as many elements in another order */
  small.shape = others[0], small.ndim = 3;
  REFUSED(DC_E_SHAPE, "mask is [19, 2, 48], must be [2, 19, 48]",
          dc_layer_get_dropout_mask(r.layer, &r.call, DC_DROPOUT_OUTPUT, &small, NULL));
  small.shape = others[1], small.ndim = 4;
  REFUSED(DC_E_SHAPE, "mask is [2, 19, 3, 19], must be [2, 3, 19, 19]",
          dc_layer_get_dropout_mask(r.layer, &r.call, DC_DROPOUT_ATTENTION, &small, NULL));
  REFUSED(DC_E_INVALID, "site", dc_layer_get_dropout_mask(r.layer, &r.call, 4, &small, NULL));
  REFUSED(DC_E_INVALID, "mask", dc_layer_get_dropout_mask(r.layer, &r.call, 1, NULL, NULL));
  assert_untouched(&r);
  free_rig(&r);
}

static void test_27_training_and_inference(void **state) {
  (void)state;
  dc_layer_config config = small_config();
  config.training = -1;
  rig r = make_rig(config, 2, 19);
  bind_rig(&r);
  r.call.reserve = NULL;
  r.call.reserve_bytes = 0;
  REFUSED(DC_E_STATE, "inference", run(&r, BACKWARD));
  assert_untouched(&r);
  free_rig(&r);
  /* Frozen weights, and an input without a gradient, are allowed. */
  r = make_rig(small_config(), 2, 19);
  bind_rig(&r);
  forward(&r);
  backward(&r);
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    r.gradients[k] = k % 2 == 0 ? (dc_tensor)DC_TENSOR_INIT : r.g[k].t;
  }
  OK(dc_layer_backward(r.layer, &r.call, TWELVE(r.weights), &r.x.t, NULL, &r.dout.t, NULL, r.gradients));
  free_rig(&r);
}

/* A struct of a newer library: its tail may be zero, but must not request features that are missing here. */
static void test_30_newer_structs(void **state) {
  (void)state;
  rig r = bounded_rig();
  bind_rig(&r);
  struct {
    dc_layer_config config;
    int64_t tail;
  } config = {r.config, 0};
  dc_layer *layer;
  config.config.struct_size = sizeof config;
  OK(dc_layer_create(r.device, &config.config, &layer));
  dc_layer_destroy(layer);
  config.tail = 1;
  REFUSED(DC_E_UNSUPPORTED, "config", dc_layer_create(r.device, &config.config, &layer));
  assert_null(layer);
  struct {
    dc_layer_call call;
    int64_t tail;
  } call = {r.call, 0};
  call.call.struct_size = sizeof call;
  OK(dc_layer_inference(r.layer, &call.call, TWELVE(r.weights), &r.x.t, &r.out.t));
  call.tail = 1;
  REFUSED(DC_E_UNSUPPORTED, "call", dc_layer_inference(r.layer, &call.call, TWELVE(r.weights), &r.x.t, &r.out.t));
  free_rig(&r);
}

static void test_30_without_a_card(void **state) {
  (void)state;
  dc_device *device = NULL;
  if (dc_has_feature("cuda") != 1) {
    REFUSED(DC_E_NO_DEVICE, "cuda", dc_device_open("cuda", NULL, &device));
    assert_null(device);
  }
}

/* A batch larger than any memory: costs are right or refused, and nothing overflows. */
static void test_27_a_batch_that_no_memory_holds(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 1, 1);
  bind_rig(&r);
  dc_layer_call call = DC_LAYER_CALL_INIT;
  call.batch = 70000;
  call.seq_length = 70000;
  OK(dc_layer_get_cost(r.layer, &call, &r.cost));
  int64_t n = INT64_C(4900000000);
  assert_int_equal(r.cost.reserve_bytes, n * 48 * 4 * 7 + n * 80 * 4 * 2 + n * 24 + n * 16);
  call.batch = call.seq_length = INT32_MAX;
  REFUSED(DC_E_SHAPE, "too large", dc_layer_get_cost(r.layer, &call, &r.cost));
  free_rig(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_27_configurations),
      cmocka_unit_test(test_27_sizes_and_memory),
      cmocka_unit_test(test_27_masks),
      cmocka_unit_test(test_27_tensors),
      cmocka_unit_test(test_27_overlaps),
      cmocka_unit_test(test_27_nothing_given),
      cmocka_unit_test(test_27_training_and_inference),
      cmocka_unit_test(test_27_a_batch_that_no_memory_holds),
      cmocka_unit_test(test_30_newer_structs),
      cmocka_unit_test(test_30_without_a_card),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
