/* The transformer layer through the public header: memory, bits, streams and wrong arguments. */
#include <pthread.h>

#include "layer.h"

/* Every combination of placement and flags: guard bytes, the documented bytes, the same output, and gradients that a
 * second backward, a spoiled workspace and another number of threads do not change. */
static void test_flags(void **state) {
  (void)state;
  static float first_out[2 * 19 * 48];
  for (int32_t pre = -1; pre <= 1; pre += 2) {
    for (int32_t flags = 0; flags < 8; flags++) {
      dc_layer_config c = small_config();
      c.pre_layer_norm = pre;
      c.normalize_invertible = flags & 1;
      c.gelu_checkpoint = flags >> 1 & 1;
      c.attn_dropout_checkpoint = flags >> 2;
      c.threads = 1 + flags % 3;
      rig r = make_rig(c, 2, 19);
      settle_rig(&r);
      int64_t n = 2 * 19, h = 48, i = 80;
      int64_t rows = n * h * 4, wide = n * i * 4; /* multiples of 64 */
      int64_t stats = (n * 3 * 4 + 63) / 64 * 64 + 2 * ((2 * n * 4 + 63) / 64 * 64);
      assert_int_equal(r.cost.reserve_bytes,
                       rows * (7 - 2 * c.normalize_invertible) + wide * (2 - c.gelu_checkpoint) + stats);
      assert_int_equal(r.cost.kept_bytes, r.cost.reserve_bytes + rows);
      assert_int_equal(r.cost.forward_flops, 8 * n * h * h + 4 * n * h * i + 4 * h * 2 * 19 * 19);
      forward(&r);
      if (flags == 0) {
        memcpy(first_out, r.out.t.data, r.out.bytes);
      }
      assert_memory_equal(first_out, r.out.t.data, r.out.bytes);
      memset(r.workspace.t.data, 0xff, r.workspace.bytes);
      for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
        memset(r.g[k].t.data, 0xff, r.g[k].bytes); /* NaN */
      }
      backward(&r);
      static float dx[2 * 19 * 48], dw[144 * 48];
      memcpy(dx, r.dx.t.data, r.dx.bytes);
      memcpy(dw, r.g[0].t.data, r.g[0].bytes);
      for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
        for (size_t e = 0; e < r.g[k].bytes / sizeof(float); e++) {
          assert_true(isfinite(((float *)r.g[k].t.data)[e]));
        }
      }
      backward(&r);
      assert_memory_equal(dx, r.dx.t.data, r.dx.bytes);
      assert_memory_equal(dw, r.g[0].t.data, r.g[0].bytes);
      r.call.accumulate = 1;
      backward(&r);
      for (size_t e = 0; e < r.g[0].bytes / sizeof(float); e++) {
        assert_true(fabsf(((float *)r.g[0].t.data)[e] - 2 * dw[e]) <= 1e-6f * fabsf(dw[e]) + 1e-12f);
      }
      free_rig(&r);
    }
  }
}

/* Finite differences of a loss sum(out * dout) along a random direction of the input and of each weight. */
static double loss(rig *r) {
  forward(r);
  double sum = 0;
  for (size_t i = 0; i < r->out.bytes / sizeof(float); i++) {
    sum += (double)((float *)r->out.t.data)[i] * (double)((float *)r->dout.t.data)[i];
  }
  return sum;
}

static void check_direction(rig *r, owned *point, const owned *gradient) {
  size_t count = point->bytes / sizeof(float);
  owned way = make_owned(DC_FLOAT32, 1, (int64_t[]){(int64_t)count});
  randomize(&way, count);
  float *x = point->t.data, *d = way.t.data, *g = gradient->t.data;
  double slope = 0, norm = 0;
  for (size_t i = 0; i < count; i++) {
    slope += (double)g[i] * (double)d[i];
    norm += (double)d[i] * (double)d[i];
  }
  float step = (float)(0.02 / sqrt(norm));
  for (size_t i = 0; i < count; i++) {
    x[i] += step * d[i];
  }
  double above = loss(r);
  for (size_t i = 0; i < count; i++) {
    x[i] -= 2 * step * d[i];
  }
  double below = loss(r);
  for (size_t i = 0; i < count; i++) {
    x[i] += step * d[i];
  }
  double found = (above - below) / (2 * (double)step);
  assert_true(fabs(found - slope) <= 4e-3 * fabs(slope) + 2e-3 * sqrt(norm));
  drop(&way);
}

static void test_finite_differences(void **state) {
  (void)state;
  for (int32_t pre = -1; pre <= 1; pre += 2) {
    dc_layer_config c = small_config();
    c.pre_layer_norm = pre;
    c.gelu = pre > 0 ? DC_GELU_TANH : DC_GELU_ERF;
    c.initializer_range = 0.2;
    rig r = make_rig(c, 1, 5);
    settle_rig(&r);
    r.call.offset = 3;
    forward(&r);
    backward(&r);
    check_direction(&r, &r.x, &r.dx);
    for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
      check_direction(&r, &r.w[k], &r.g[k]);
    }
    free_rig(&r);
  }
}

static void test_inference(void **state) {
  (void)state;
  for (int32_t pre = -1; pre <= 1; pre += 2) {
    dc_layer_config c = small_config();
    c.pre_layer_norm = pre;
    c.attn_dropout_ratio = c.hidden_dropout_ratio = 0;
    rig r = make_rig(c, 2, 19);
    settle_rig(&r);
    forward(&r);
    static float trained[2 * 19 * 48];
    memcpy(trained, r.out.t.data, r.out.bytes);
    memset(r.out.t.data, 0xff, r.out.bytes);
    OK(dc_layer_inference(r.layer, &r.call, r.weights, &r.x.t, &r.out.t));
    assert_memory_equal(trained, r.out.t.data, r.out.bytes);
    /* With the workspace it asks for, and no more; as a layer that is not for training, too. */
    c.training = -1;
    dc_layer *other;
    OK(dc_layer_create(r.device, &c, &other));
    dc_layer_cost cost = DC_LAYER_COST_INIT;
    OK(dc_layer_get_cost(other, &r.call, &cost));
    assert_int_equal(cost.reserve_bytes, 0);
    r.call.workspace_bytes = (size_t)cost.inference_workspace_bytes;
    r.call.reserve = NULL;
    memset(r.out.t.data, 0xff, r.out.bytes);
    OK(dc_layer_forward(other, &r.call, r.weights, &r.x.t, &r.out.t));
    assert_memory_equal(trained, r.out.t.data, r.out.bytes);
    assert_int_equal(dc_layer_backward(other, &r.call, r.weights, &r.x.t, &r.out.t, &r.dout.t, &r.dx.t, r.gradients),
                     DC_E_STATE);
    dc_layer_destroy(other);
    free_rig(&r);
  }
}

/* Samples of 19, 0 and 7 tokens, packed, are the dense batch's first tokens, bit for bit; masks hide the rest. */
static void test_packed(void **state) {
  (void)state;
  dc_layer_config c = small_config();
  c.pre_layer_norm = -1;
  rig dense = make_rig(c, 3, 19), packed = make_rig(c, 3, 19);
  settle_rig(&dense);
  settle_rig(&packed);
  int32_t offsets[] = {0, 19, 19, 26};
  float mask[3][19] = {{0}};
  for (int32_t b = 0; b < 3; b++) {
    for (int32_t j = offsets[b + 1] - offsets[b]; j < 19; j++) {
      mask[b][j] = -INFINITY;
      memset((float *)dense.dout.t.data + (b * 19 + j) * 48, 0, 48 * sizeof(float));
    }
  }
  const int64_t mask_shape[] = {3, 1, 1, 19};
  dc_tensor m = {sizeof m, mask, mask_shape, NULL, 4, DC_FLOAT32, NULL};
  dense.call.mask = &m;
  const int64_t tokens[] = {26, 48};
  owned *all[] = {&packed.x, &packed.out, &packed.dout, &packed.dx};
  for (int32_t i = 0; i < 4; i++) {
    all[i]->t.shape = tokens;
    all[i]->t.ndim = 2;
  }
  packed.call.cu_seqlens = offsets;
  memcpy((float *)packed.x.t.data + 19 * 48, (float *)dense.x.t.data + 38 * 48, 7 * 48 * sizeof(float));
  memcpy((float *)packed.dout.t.data + 19 * 48, (float *)dense.dout.t.data + 38 * 48, 7 * 48 * sizeof(float));
  forward(&dense);
  forward(&packed);
  backward(&dense);
  backward(&packed);
  for (int32_t k = 0; k < 2; k++) {
    const float *a = k == 0 ? dense.out.t.data : dense.dx.t.data;
    const float *b = k == 0 ? packed.out.t.data : packed.dx.t.data;
    for (size_t i = 0; i < 26 * 48; i++) {
      float want = a[i < 19 * 48 ? i : i + 19 * 48];
      assert_true(fabsf(b[i] - want) <= 1e-5f);
    }
  }
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    for (size_t e = 0; e < dense.g[k].bytes / sizeof(float); e++) {
      assert_true(fabsf(((float *)dense.g[k].t.data)[e] - ((float *)packed.g[k].t.data)[e]) <= 1e-4f);
    }
  }
  free_rig(&dense);
  free_rig(&packed);
}

static void test_streams(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 2, 19);
  settle_rig(&r);
  forward(&r);
  backward(&r);
  static float out[2 * 19 * 48], dx[2 * 19 * 48];
  memcpy(out, r.out.t.data, r.out.bytes);
  memcpy(dx, r.dx.t.data, r.dx.bytes);
  memset(r.out.t.data, 0xff, r.out.bytes);
  memset(r.dx.t.data, 0xff, r.dx.bytes);
  OK(dc_stream_create(r.device, &r.call.stream));
  int32_t offsets[] = {0, 19, 38};
  r.call.cu_seqlens = offsets;
  forward(&r);
  backward(&r);
  offsets[1] = -1; /* has been read */
  dc_layer_destroy(r.layer);
  r.layer = NULL;
  OK(dc_stream_synchronize(r.call.stream, 0));
  assert_memory_equal(out, r.out.t.data, r.out.bytes);
  assert_memory_equal(dx, r.dx.t.data, r.dx.bytes);
  dc_stream_destroy(r.call.stream);
  free_rig(&r);
}

static void *train(void *arg) {
  for (int32_t i = 0; i < 5; i++) {
    forward(arg);
    backward(arg);
  }
  return NULL;
}

static void test_two_at_once(void **state) {
  (void)state;
  rig r[3];
  pthread_t threads[3];
  for (int32_t i = 0; i < 3; i++) {
    r[i] = make_rig(small_config(), 2, 19);
    settle_rig(&r[i]);
  }
  forward(&r[0]);
  backward(&r[0]);
  for (int32_t i = 1; i < 3; i++) {
    pthread_create(&threads[i], NULL, train, &r[i]);
  }
  for (int32_t i = 1; i < 3; i++) {
    pthread_join(threads[i], NULL);
    assert_memory_equal(r[0].dx.t.data, r[i].dx.t.data, r[0].dx.bytes);
  }
  for (int32_t i = 0; i < 3; i++) {
    free_rig(&r[i]);
  }
  dc_layer_config c = small_config();
  rig many = make_rig(c, 1, 1);
  settle_rig(&many);
  for (int32_t i = 0; i < 10000; i++) {
    dc_layer *layer;
    OK(dc_layer_create(many.device, &c, &layer));
    dc_layer_destroy(layer);
  }
  free_rig(&many);
  dc_layer_destroy(NULL);
}

/* ---- wrong arguments ---- */

#define REFUSED(status, text, call)                            \
  do {                                                         \
    assert_int_equal((call), (status));                        \
    if (strstr(dc_last_error(), (text)) == NULL) {             \
      fail_msg("\"%s\" has no \"%s\"", dc_last_error(), text); \
    }                                                          \
  } while (0)

#define BAD_CONFIG(field, value, status)                                     \
  do {                                                                       \
    dc_layer_config c = small_config();                                      \
    c.field = value;                                                         \
    dc_layer *layer = (dc_layer *)(void *)&c;                                \
    REFUSED(status, "config->" #field, dc_layer_create(device, &c, &layer)); \
    assert_null(layer);                                                      \
  } while (0)

static void test_bad_config(void **state) {
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
  BAD_CONFIG(layer_norm_eps, (double)INFINITY, DC_E_INVALID);
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

#define BAD_CALL(text, status, change)                                                      \
  do {                                                                                      \
    dc_layer_call good = r.call;                                                            \
    change;                                                                                 \
    REFUSED(status, text, dc_layer_forward(r.layer, &r.call, r.weights, &r.x.t, &r.out.t)); \
    r.call = good;                                                                          \
  } while (0)

static void test_bad_calls(void **state) {
  (void)state;
  dc_layer_config config = small_config();
  config.batch_size = 4;
  config.max_seq_length = 32;
  rig r = make_rig(config, 2, 19);
  settle_rig(&r);
  BAD_CALL("call->batch", DC_E_INVALID, r.call.batch = 0);
  BAD_CALL("call->batch", DC_E_INVALID, r.call.batch = 5);
  BAD_CALL("call->seq_length", DC_E_INVALID, r.call.seq_length = 0);
  BAD_CALL("call->seq_length", DC_E_INVALID, r.call.seq_length = 33);
  BAD_CALL("input", DC_E_SHAPE, r.call.seq_length = 20);
  BAD_CALL("accumulate", DC_E_INVALID, r.call.accumulate = 2);
  BAD_CALL("reserved0", DC_E_INVALID, r.call.reserved0 = 1);
  BAD_CALL("workspace", DC_E_INVALID, r.call.workspace = NULL);
  BAD_CALL("workspace_bytes", DC_E_BUFFER_TOO_SMALL,
           r.call.workspace_bytes = (size_t)r.cost.forward_workspace_bytes - 1);
  BAD_CALL("workspace", DC_E_INVALID, r.call.workspace = (char *)r.call.workspace + 4);
  BAD_CALL("reserve", DC_E_INVALID, r.call.reserve = NULL);
  BAD_CALL("reserve_bytes", DC_E_BUFFER_TOO_SMALL, r.call.reserve_bytes--);
  BAD_CALL("overlaps", DC_E_INVALID, r.call.workspace = r.call.reserve);
  BAD_CALL("struct_size", DC_E_INVALID, r.call.struct_size = 8);
  static const int32_t wrong[][3] = {{1, 19, 38}, {0, 20, 19}, {0, 33, 38}, {0, 0, 0}};
  for (int32_t i = 0; i < 4; i++) {
    BAD_CALL("cu_seqlens", DC_E_INVALID, r.call.cu_seqlens = wrong[i]);
  }
  float zeros[38] = {0};
  const int64_t shape[] = {19, 2};
  dc_tensor mask = {sizeof mask, zeros, shape, NULL, 2, DC_FLOAT32, NULL};
  BAD_CALL("mask", DC_E_SHAPE, r.call.mask = &mask);
  mask.dtype = DC_INT32;
  BAD_CALL("mask", DC_E_DTYPE, r.call.mask = &mask);
  REFUSED(DC_E_INVALID, "layer", dc_layer_forward(NULL, &r.call, r.weights, &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "call", dc_layer_forward(r.layer, NULL, r.weights, &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "weights", dc_layer_forward(r.layer, &r.call, NULL, &r.x.t, &r.out.t));
  REFUSED(DC_E_INVALID, "input", dc_layer_forward(r.layer, &r.call, r.weights, NULL, &r.out.t));
  REFUSED(DC_E_INVALID, "output", dc_layer_forward(r.layer, &r.call, r.weights, &r.x.t, NULL));
  REFUSED(DC_E_INVALID, "overlaps", dc_layer_forward(r.layer, &r.call, r.weights, &r.x.t, &r.x.t));
  r.weights[4] = NULL;
  REFUSED(DC_E_INVALID, "attn_nw", dc_layer_forward(r.layer, &r.call, r.weights, &r.x.t, &r.out.t));
  r.weights[4] = &r.x.t;
  REFUSED(DC_E_SHAPE, "attn_nw", dc_layer_forward(r.layer, &r.call, r.weights, &r.x.t, &r.out.t));
  r.weights[4] = &r.w[4].t;
  dc_tensor odd = r.x.t;
  odd.data = (char *)odd.data + 1;
  REFUSED(DC_E_INVALID, "aligned", dc_layer_forward(r.layer, &r.call, r.weights, &odd, &r.out.t));
  odd = r.x.t;
  odd.dtype = DC_BFLOAT16;
  REFUSED(DC_E_DTYPE, "input", dc_layer_forward(r.layer, &r.call, r.weights, &odd, &r.out.t));
  int64_t shape2[2];
  int32_t ndim;
  REFUSED(DC_E_INVALID, "index", dc_layer_weight_shape(r.layer, 12, shape2, &ndim));
  REFUSED(DC_E_INVALID, "shape", dc_layer_weight_shape(r.layer, 0, NULL, &ndim));
  uint8_t bits[8];
  const int64_t eight = 8;
  dc_tensor small = {sizeof small, bits, &eight, NULL, 1, DC_UINT8, NULL};
  REFUSED(DC_E_SHAPE, "mask", dc_layer_dropout_mask(r.layer, &r.call, DC_DROPOUT_OUTPUT, &small, NULL));
  REFUSED(DC_E_INVALID, "site", dc_layer_dropout_mask(r.layer, &r.call, 4, &small, NULL));
  for (size_t i = 0; i < r.out.bytes; i++) { /* nothing was written */
    assert_int_equal(((unsigned char *)r.out.t.data)[i], CANARY);
  }
  /* Frozen weights and an input without a gradient. */
  forward(&r);
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    r.gradients[k] = k % 2 == 0 ? NULL : &r.g[k].t;
  }
  OK(dc_layer_backward(r.layer, &r.call, r.weights, &r.x.t, NULL, &r.dout.t, NULL, r.gradients));
  REFUSED(DC_E_INVALID, "grad_output",
          dc_layer_backward(r.layer, &r.call, r.weights, &r.x.t, NULL, NULL, NULL, r.gradients));
  free_rig(&r);
}

/* A batch that no memory holds: costs are right or refused, and nothing overflows. */
static void test_large(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 1, 1);
  settle_rig(&r);
  dc_layer_call call = DC_LAYER_CALL_INIT;
  call.batch = 70000;
  call.seq_length = 70000;
  OK(dc_layer_get_cost(r.layer, &call, &r.cost));
  int64_t n = INT64_C(4900000000);
  assert_int_equal(r.cost.reserve_bytes, n * 48 * 4 * 7 + n * 80 * 4 * 2 + n * 12 + n * 16);
  call.batch = call.seq_length = INT32_MAX;
  REFUSED(DC_E_SHAPE, "too large", dc_layer_get_cost(r.layer, &call, &r.cost));
  free_rig(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_flags),      cmocka_unit_test(test_finite_differences),
      cmocka_unit_test(test_inference),  cmocka_unit_test(test_packed),
      cmocka_unit_test(test_streams),    cmocka_unit_test(test_two_at_once),
      cmocka_unit_test(test_bad_config), cmocka_unit_test(test_bad_calls),
      cmocka_unit_test(test_large),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
