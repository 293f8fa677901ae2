/* The transformer layer through the public header: memory, bits, streams and wrong arguments. */
#include <pthread.h>

#include "layer.h"

/* For every combination of type, placement and flags, guard bytes stay intact (free_rig), the bytes are as documented,
 * and the output is the same. A second backward, a spoiled workspace and another number of threads do not change the
 * gradients. */
enum { TOKENS = 2 * 19 };

static void assert_finite(const owned *o) {
  for (size_t i = 0; i < o->bytes / dc_dtype_size(o->t.dtype); i++) {
    if (o->t.dtype == DC_FLOAT32) {
      assert_true(isfinite(((float *)o->t.data)[i]));
    } else {
      uint32_t exponent = o->t.dtype == DC_FLOAT16 ? 0x7c00 : 0x7f80;
      assert_true((((uint16_t *)o->t.data)[i] & exponent) != exponent);
    }
  }
}

static void check_bytes(const rig *r) {
  const dc_layer_config *c = &r->config;
  int64_t e = (int64_t)dc_dtype_size(c->dtype), n = TOKENS, h = 48, i = 80;
  int64_t rows = n * h * e, wide = n * i * e; /* multiples of 64 */
  int64_t stats = (2 * n * 3 * 4 + 63) / 64 * 64 + 2 * ((2 * n * 4 + 63) / 64 * 64);
  assert_int_equal(r->cost.reserve_bytes,
                   rows * (7 - 2 * c->normalize_invertible) + wide * (2 - c->gelu_checkpoint) + stats);
  assert_int_equal(r->cost.kept_bytes, r->cost.reserve_bytes + rows);
  assert_int_equal(r->cost.forward_flops, 8 * n * h * h + 4 * n * h * i + 4 * h * 2 * 19 * 19);
}

/* Runs a backward with a spoiled workspace into gradients full of NaN, twice, and once added to gradients. */
static void check_backward(rig *r) {
  static unsigned char dx[TOKENS * 48 * 4], dw[144 * 48 * 4];
  memset(r->workspace.t.data, 0xff, r->workspace.bytes);
  memset(r->dx.t.data, 0xff, r->dx.bytes);
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    memset(r->g[k].t.data, 0xff, r->g[k].bytes);
  }
  backward(r);
  memcpy(dx, r->dx.t.data, r->dx.bytes);
  memcpy(dw, r->g[0].t.data, r->g[0].bytes);
  assert_finite(&r->dx);
  for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
    assert_finite(&r->g[k]);
  }
  backward(r);
  assert_memory_equal(dx, r->dx.t.data, r->dx.bytes);
  assert_memory_equal(dw, r->g[0].t.data, r->g[0].bytes);
  r->call.accumulate = 1;
  backward(r);
  for (size_t e = 0; r->config.dtype == DC_FLOAT32 && e < r->g[0].bytes / sizeof(float); e++) {
    float one = ((float *)(void *)dw)[e];
    assert_true(fabsf(((float *)r->g[0].t.data)[e] - 2 * one) <= 1e-6f * fabsf(one) + 1e-12f);
  }
}

static void test_17_18_20_21_31_flags(void **state) {
  (void)state;
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};
  static unsigned char first_out[TOKENS * 48 * 4];
  for (int32_t i = 0; i < 3 * 2 * 8; i++) {
    int32_t flags = i % 8;
    dc_layer_config c = small_config();
    c.dtype = dtypes[i / 16];
    c.pre_layer_norm = i / 8 % 2 == 0 ? -1 : 1;
    c.normalize_invertible = flags & 1;
    c.gelu_checkpoint = flags >> 1 & 1;
    c.attn_dropout_checkpoint = flags >> 2;
    c.threads = 1 + flags % 3;
    rig r = make_rig(c, 2, 19);
    bind_rig(&r);
    check_bytes(&r);
    forward(&r);
    if (flags == 0) {
      memcpy(first_out, r.out.t.data, r.out.bytes);
    }
    assert_memory_equal(first_out, r.out.t.data, r.out.bytes);
    check_backward(&r);
    free_rig(&r);
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

static void test_04_finite_differences(void **state) {
  (void)state;
  for (int32_t pre = -1; pre <= 1; pre += 2) {
    dc_layer_config c = small_config();
    c.pre_layer_norm = pre;
    c.gelu = pre > 0 ? DC_GELU_TANH : DC_GELU_ERF;
    c.initializer_range = 0.2;
    rig r = make_rig(c, 1, 5);
    bind_rig(&r);
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

static void test_11_inference(void **state) {
  (void)state;
  for (int32_t pre = -1; pre <= 1; pre += 2) {
    dc_layer_config c = small_config();
    c.pre_layer_norm = pre;
    c.attn_dropout_ratio = c.hidden_dropout_ratio = 0;
    rig r = make_rig(c, 2, 19);
    bind_rig(&r);
    forward(&r);
    static float trained[2 * 19 * 48];
    memcpy(trained, r.out.t.data, r.out.bytes);
    memset(r.out.t.data, 0xff, r.out.bytes);
    OK(dc_layer_inference(r.layer, &r.call, TWELVE(r.weights), &r.x.t, &r.out.t));
    assert_memory_equal(trained, r.out.t.data, r.out.bytes);
    /* The workspace has exactly the requested size, also for a layer that is not for training. */
    c.training = -1;
    dc_layer *other;
    OK(dc_layer_create(r.device, &c, &other));
    dc_layer_cost cost = DC_LAYER_COST_INIT;
    OK(dc_layer_get_cost(other, &r.call, &cost));
    assert_int_equal(cost.reserve_bytes, 0);
    r.call.workspace_bytes = cost.inference_workspace_bytes;
    r.call.reserve = NULL;
    memset(r.out.t.data, 0xff, r.out.bytes);
    OK(dc_layer_forward(other, &r.call, TWELVE(r.weights), &r.x.t, &r.out.t));
    assert_memory_equal(trained, r.out.t.data, r.out.bytes);
    assert_int_equal(
        dc_layer_backward(other, &r.call, TWELVE(r.weights), &r.x.t, &r.out.t, &r.dout.t, &r.dx.t, r.gradients),
        DC_E_STATE);
    dc_layer_destroy(other);
    free_rig(&r);
  }
}

/* Batches without tokens, as PyTorch's layer accepts them: nothing is computed, and the weights' gradients are
 * zeros. */
static void test_02_without_tokens(void **state) {
  (void)state;
  static const int64_t sizes[][2] = {{0, 5}, {2, 0}, {0, 0}};
  static const int32_t none[3] = {0, 0, 0};
  for (size_t i = 0; i < 3 * 4; i++) {
    dc_layer_config c = small_config();
    c.pre_layer_norm = i % 2 == 0 ? 1 : -1;
    c.normalize_invertible = (int32_t)(i / 6);
    rig r = make_rig(c, sizes[i % 3][0], sizes[i % 3][1]);
    dc_stream *stream = NULL;
    bind_rig(&r);
    r.call.cu_seqlens = i >= 9 ? none : NULL;
    if (i >= 6) {
      OK(dc_stream_create(r.device, &stream));
      r.call.stream = stream;
    }
    OK(dc_layer_inference(r.layer, &r.call, TWELVE(r.weights), &r.x.t, &r.out.t));
    for (int32_t accumulate = 1; accumulate >= 0; accumulate--) {
      for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
        memset(r.g[k].t.data, 0x3c, r.g[k].bytes);
      }
      r.call.accumulate = accumulate;
      forward(&r);
      backward(&r);
      if (stream != NULL) {
        OK(dc_stream_synchronize(stream, 0));
      }
      for (int32_t k = 0; k < DC_LAYER_WEIGHTS; k++) {
        const unsigned char *g = r.g[k].t.data;
        assert_int_equal(g[0], accumulate ? 0x3c : 0);
        assert_memory_equal(g, g + 1, r.g[k].bytes - 1);
      }
    }
    dc_stream_destroy(stream);
    free_rig(&r);
  }
}

/* Samples of 19, 0 and 7 tokens, packed, are the dense batch's first tokens, bit for bit; masks hide the rest. */
static void test_10_packed(void **state) {
  (void)state;
  dc_layer_config c = small_config();
  c.pre_layer_norm = -1;
  rig dense = make_rig(c, 3, 19), packed = make_rig(c, 3, 19);
  bind_rig(&dense);
  bind_rig(&packed);
  int32_t offsets[] = {0, 19, 19, 26};
  float mask[3][19] = {{0}};
  for (int32_t b = 0; b < 3; b++) {
    for (int32_t j = offsets[b + 1] - offsets[b]; j < 19; j++) {
      mask[b][j] = -INFINITY;
      memset((float *)dense.dout.t.data + (b * 19 + j) * 48, 0, 48 * sizeof(float));
    }
  }
  const int64_t mask_shape[] = {3, 1, 1, 19};
  dc_tensor m = {.struct_size = sizeof m, .data = mask, .shape = mask_shape, .ndim = 4, .dtype = DC_FLOAT32};
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

static void test_29_streams(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 2, 19);
  bind_rig(&r);
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
  offsets[1] = -1; /* the call has read it already */
  dc_layer_destroy(r.layer);
  r.layer = NULL;
  OK(dc_stream_synchronize(r.call.stream, 0));
  assert_memory_equal(out, r.out.t.data, r.out.bytes);
  assert_memory_equal(dx, r.dx.t.data, r.dx.bytes);
  dc_stream_destroy(r.call.stream);
  free_rig(&r);
}

/* ---- a blocked stream: calls return, on two layers and two streams ---- */

static void await_gate(void *user) {
  pthread_mutex_lock(user);
  pthread_mutex_unlock(user);
}

static void test_29_no_wait(void **state) {
  (void)state;
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  rig r[2];
  static unsigned char wanted[TOKENS * 48 * 4];
  for (int32_t i = 0; i < 2; i++) {
    r[i] = make_rig(small_config(), 2, 19);
    bind_rig(&r[i]);
    forward(&r[i]);
    backward(&r[i]);
    memcpy(wanted, r[i].dx.t.data, r[i].dx.bytes);
    memset(r[i].dx.t.data, CANARY, r[i].dx.bytes);
    OK(dc_stream_create(r[i].device, &r[i].call.stream));
  }
  pthread_mutex_lock(&gate);
  for (int32_t i = 0; i < 2; i++) {
    OK(dc_stream_call(r[i].call.stream, await_gate, &gate));
    forward(&r[i]);
    backward(&r[i]); /* returns before its work has begun */
    for (size_t b = 0; b < r[i].dx.bytes; b++) {
      assert_int_equal(((unsigned char *)r[i].dx.t.data)[b], CANARY);
    }
  }
  pthread_mutex_unlock(&gate);
  for (int32_t i = 0; i < 2; i++) {
    OK(dc_stream_synchronize(r[i].call.stream, 0));
    assert_memory_equal(wanted, r[i].dx.t.data, r[i].dx.bytes);
    dc_stream_destroy(r[i].call.stream);
    free_rig(&r[i]);
  }
}

static void *train(void *arg) {
  for (int32_t i = 0; i < 5; i++) {
    forward(arg);
    backward(arg);
  }
  return NULL;
}

static void test_29_two_at_once(void **state) {
  (void)state;
  rig r[3];
  pthread_t threads[3];
  for (int32_t i = 0; i < 3; i++) {
    r[i] = make_rig(small_config(), 2, 19);
    bind_rig(&r[i]);
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
  bind_rig(&many);
  for (int32_t i = 0; i < 10000; i++) {
    dc_layer *layer;
    OK(dc_layer_create(many.device, &c, &layer));
    dc_layer_destroy(layer);
  }
  free_rig(&many);
  dc_layer_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_04_finite_differences),
      cmocka_unit_test(test_02_without_tokens),
      cmocka_unit_test(test_10_packed),
      cmocka_unit_test(test_11_inference),
      cmocka_unit_test(test_17_18_20_21_31_flags),
      cmocka_unit_test(test_29_streams),
      cmocka_unit_test(test_29_two_at_once),
      cmocka_unit_test(test_29_no_wait),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
