/* Attention's kernels compared with the transformer's plain C ones: types, head sizes, lengths around a tile, masks,
 * packed samples, dropout, rows without a key. On the simulated driver, or on a card (tests/card). */
#include "harness.h"

#include <float.h>
#include <math.h>

#include "cuda_fixture.h"
#include "kernels/cuda/kernels_cuda.h"
#include "transformer/transformer_internal.h"

typedef struct sizes {
  int64_t batch, longest, heads, d;
  int32_t dtype;
  int32_t mask;   /* 0: none, 1: of the same type, 2: float32, 3: some samples have no key */
  int32_t packed; /* 1: samples have lengths from 0 to longest */
  double dropout;
  float least; /* mask value of all keys of the first sample; 0: as `mask` says */
} sizes;

/* The tensors of one case, on the host and on the device. */
enum { QKV, C, DC, DQKV, MASK, SOFTMAX, DELTA, DQ, OFFSETS, TENSORS };
typedef struct tensor {
  size_t bytes;
  void *host, *on_device;
} tensor;

static dc_device *cpu;
static tensor tensors[TENSORS];

static int set_up(void **state) {
  assert_int_equal(dc_device_open("cpu", NULL, &cpu), DC_OK);
  return open_stream(state);
}

static int tear_down(void **state) {
  dc_device_destroy(cpu);
  return close_stream(state);
}

static void make(int which, size_t bytes) {
  tensor *t = &tensors[which];
  t->bytes = bytes;
  t->host = aligned_alloc(64, (bytes + 63) / 64 * 64);
  memset(t->host, 0, bytes);
  assert_int_equal(device->ops->alloc(device, bytes, DC_MEMORY_DEVICE, &t->on_device), DC_OK);
}

static float *random_floats(int64_t count, uint64_t seed, float scale) {
  float *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    values[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f * scale;
  }
  return values;
}

static void fill(int which, int32_t dtype, int64_t count, uint64_t seed, float scale) {
  float *values = random_floats(count, seed, scale);
  dc__cast(tensors[which].host, dtype, values, DC_FLOAT32, count);
  free(values);
}

static void fill_mask(const sizes *s) {
  const int64_t count = s->batch * s->longest;
  float *values = random_floats(count, 5, 2);
  for (int64_t i = 0; i < count; i++) {
    if (values[i] > 1) {
      values[i] = i % 2 == 0 ? -10000.0f : -INFINITY;
    }
    if (s->mask == 3 && i / s->longest == 0) {
      values[i] = -INFINITY;
    }
    if (s->least != 0 && i / s->longest == 0) {
      values[i] = s->least;
    }
  }
  dc__cast(tensors[MASK].host, s->mask == 1 ? s->dtype : DC_FLOAT32, values, DC_FLOAT32, count);
  free(values);
}

static void make_all(const sizes *s, int64_t tokens) {
  const int64_t hidden = s->heads * s->d;
  const size_t size = dc_dtype_size(s->dtype);
  make(QKV, (size_t)(3 * tokens * hidden) * size);
  make(C, (size_t)(tokens * hidden) * size);
  make(DC, (size_t)(tokens * hidden) * size);
  make(DQKV, (size_t)(3 * tokens * hidden) * size);
  make(MASK, (size_t)(s->batch * s->longest) * (s->mask == 1 ? size : sizeof(float)));
  make(SOFTMAX, (size_t)(2 * s->heads * tokens) * sizeof(float));
  make(DELTA, (size_t)(s->heads * tokens) * sizeof(float));
  make(DQ, (size_t)(tokens * hidden) * sizeof(float));
  fill(QKV, s->dtype, 3 * tokens * hidden, 1, 2);
  fill(DC, s->dtype, tokens * hidden, 2, 1);
  fill_mask(s);
}

static void move(void *to, const void *from, size_t bytes) {
  dc__stream_copy(device->internal_stream, to, from, bytes);
  dc__device_sync_internal(device, NULL);
  assert_int_equal(dc__device_check(device), DC_OK);
}

static void free_all(void) {
  for (int i = 0; i < TENSORS; i++) {
    device->ops->free(device, tensors[i].on_device, tensors[i].bytes, DC_MEMORY_DEVICE);
    free(tensors[i].host);
  }
}

static void run_cpu(const sizes *s, const dc__layer_size *size, const dc__dropout *dropout) {
  dc_layer_config config = DC_LAYER_CONFIG_INIT;
  config.hidden_size = s->heads * s->d;
  config.heads = s->heads;
  config.dtype = s->dtype;
  config.threads = 1;
  dc_layer *layer;
  assert_int_equal(dc_layer_create(cpu, &config, &layer), DC_OK);
  dc__layer_job job = {.layer = layer, .size = *size, .mask_dtype = s->mask == 1 ? s->dtype : DC_FLOAT32};
  job.mask = s->mask != 0 ? tensors[MASK].host : NULL;
  dc__attention_args a = {
      .qkv = tensors[QKV].host, .c = tensors[C].host, .softmax = tensors[SOFTMAX].host, .dropout = *dropout};
  dc__attention_forward(&job, &a);
  a.dc = tensors[DC].host;
  a.dqkv = tensors[DQKV].host;
  a.delta = tensors[DELTA].host;
  a.dq = s->dtype != DC_FLOAT32 ? tensors[DQ].host : NULL;
  dc__attention_backward(&job, &a);
  dc_layer_destroy(layer);
}

static void run_cuda(const sizes *s, const dc__layer_size *size, const dc__dropout *dropout) {
  dc__cuda_attention_args a = {
      .qkv = tensors[QKV].on_device, .c = tensors[C].on_device, .softmax = tensors[SOFTMAX].on_device};
  a.dc = tensors[DC].on_device;
  a.dqkv = tensors[DQKV].on_device;
  a.delta = tensors[DELTA].on_device;
  a.mask = s->mask != 0 ? tensors[MASK].on_device : NULL;
  a.offsets = size->cu_seqlens != NULL ? tensors[OFFSETS].on_device : NULL;
  a.tokens = size->tokens;
  a.longest = size->max_seqlen;
  a.batch = size->batch;
  a.heads = (int32_t)s->heads;
  a.d = (int32_t)s->d;
  a.wide_mask = s->mask != 1;
  a.factor = (float)(1 / sqrt((double)s->d));
  memcpy(a.key, dropout->key, sizeof a.key);
  a.threshold = dropout->threshold;
  a.scale = dropout->scale;
  dc__cuda_attention_forward(stream, &a, s->dtype);
  dc__cuda_attention_backward(stream, &a, s->dtype);
  if (dc_stream_synchronize(stream, 0) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
}

/* The norm of the arrays' difference, relative to the expected norm. Infinities must be the same. */
static double difference(const void *found, const void *expected, int32_t dtype, size_t bytes) {
  const int64_t count = (int64_t)(bytes / dc_dtype_size(dtype));
  float *a = malloc((size_t)count * sizeof *a), *b = malloc((size_t)count * sizeof *b);
  double square = 0, norm = 0;
  dc__cast(a, DC_FLOAT32, found, dtype, count);
  dc__cast(b, DC_FLOAT32, expected, dtype, count);
  for (int64_t i = 0; i < count; i++) {
    if (isinf(b[i])) {
      assert_true(a[i] == b[i]);
      continue;
    }
    square += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    norm += (double)b[i] * (double)b[i];
  }
  free(a);
  free(b);
  return sqrt(square / (norm > 0 ? norm : 1));
}

static void compare(const sizes *s) {
  int32_t offsets[9] = {0};
  dc__layer_size size = {s->batch, s->longest, s->batch * s->longest, NULL};
  if (s->packed) {
    for (int64_t b = 0; b < s->batch; b++) {
      offsets[b + 1] = offsets[b] + (int32_t)(b == 0 ? s->longest : s->longest * (b % 3) / 2 * (b % 2));
    }
    size.cu_seqlens = offsets;
    size.tokens = offsets[s->batch];
  }
  make_all(s, size.tokens);
  make(OFFSETS, sizeof offsets);
  memcpy(tensors[OFFSETS].host, offsets, sizeof offsets);
  for (int i = 0; i < TENSORS; i++) {
    move(tensors[i].on_device, tensors[i].host, tensors[i].bytes);
  }
  dc__dropout dropout = {{7, 9}, (uint32_t)(s->dropout * 65536), 1};
  dropout.scale = 65536.0f / (float)(65536 - dropout.threshold);
  run_cpu(s, &size, &dropout);
  run_cuda(s, &size, &dropout);
  const double gate = s->dtype == DC_FLOAT32 ? 2e-6 : s->dtype == DC_FLOAT16 ? 2e-3 : 1.2e-2;
  static const int outputs[] = {C, SOFTMAX, DQKV, DELTA};
  for (size_t i = 0; i < DC__COUNT(outputs); i++) {
    const tensor *t = &tensors[outputs[i]];
    const bool wide = outputs[i] == SOFTMAX || outputs[i] == DELTA;
    void *found = malloc(t->bytes);
    move(found, t->on_device, t->bytes);
    if (outputs[i] == SOFTMAX) { /* the device's maxima are in base 2, and bounded by the greatest float */
      float *most = found;
      for (size_t j = 0; j < t->bytes / sizeof *most / 2; j++) {
        most[j] = s->least == 0 ? most[j] * 0.693147181f : ((const float *)t->host)[j];
      }
    }
    const double e = difference(found, t->host, wide ? DC_FLOAT32 : s->dtype, t->bytes);
    free(found);
    if (!(e < gate)) {
      fail_msg("output %d differs by %g: %s, B %d, S %d, A %d, d %d, mask %d, packed %d, dropout %g, least %g",
               outputs[i], e, dc_dtype_name(s->dtype), (int)s->batch, (int)s->longest, (int)s->heads, (int)s->d,
               (int)s->mask, (int)s->packed, s->dropout, (double)s->least);
    }
  }
  free_all();
}

/* The thread sanitizer makes kernels slow, so only some cases are run. */
#ifdef CUDASIM_TSAN
enum { EVERY = 3 };
#else
enum { EVERY = 1 };
#endif

static void test_shapes(void **state) {
  (void)state;
  static const sizes cases[] = {
      {1, 1, 1, 8, DC_FLOAT32, 0, 0, 0, 0},      {2, 37, 2, 64, DC_BFLOAT16, 1, 0, 0.1, 0},
      {2, 70, 1, 40, DC_FLOAT16, 3, 0, 0, 0},    {1, 129, 1, 128, DC_BFLOAT16, 2, 0, 0, 0},
      {3, 33, 1, 7, DC_BFLOAT16, 2, 0, 0.5, 0},  {1, 65, 1, 96, DC_FLOAT16, 1, 0, 0.2, 0},
      {2, 33, 1, 16, DC_FLOAT32, 3, 0, 0.3, 0},  {1, 20, 1, 128, DC_FLOAT32, 2, 0, 0, 0},
      {4, 40, 2, 32, DC_BFLOAT16, 0, 1, 0.1, 0}, {5, 18, 1, 9, DC_FLOAT32, 0, 1, 0, 0},
      {1, 70, 1, 256, DC_BFLOAT16, 1, 0, 0, 0},  {2, 18, 2, 129, DC_FLOAT16, 2, 0, 0.2, 0},
      {1, 35, 1, 200, DC_FLOAT32, 3, 0, 0.1, 0}, {4, 17, 1, 264, DC_FLOAT16, 0, 1, 0, 0},
      {1, 9, 1, 131, DC_FLOAT32, 0, 0, 0, 0},    {1, 150, 1, 64, DC_FLOAT16, 2, 0, 0.1, 0},
      {4, 130, 1, 56, DC_BFLOAT16, 3, 1, 0, 0},  {2, 128, 1, 64, DC_BFLOAT16, 1, 0, 0.1, 0},
  };
  for (size_t i = 0; i < DC__COUNT(cases); i += EVERY) {
    compare(&cases[i]);
  }
}

/* If a finite mask is so large that all scores of a sample round to it, its keys have equal weights. */
static void test_large_finite_masks(void **state) {
  (void)state;
  static const sizes cases[] = {
      {2, 70, 1, 64, DC_FLOAT32, 2, 0, 0, -1e9f},       {2, 33, 1, 16, DC_FLOAT32, 1, 0, 0.3, -FLT_MAX},
      {2, 130, 1, 64, DC_BFLOAT16, 1, 0, 0, -3.38e38f}, {2, 150, 1, 64, DC_FLOAT16, 2, 0, 0.1, -FLT_MAX},
      {2, 40, 1, 128, DC_BFLOAT16, 2, 0, 0, -1e9f},     {2, 40, 1, 200, DC_FLOAT16, 2, 0, 0, -1e9f},
  };
  for (size_t i = 0; i < DC__COUNT(cases); i += EVERY) {
    compare(&cases[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes), cmocka_unit_test(test_large_finite_masks)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
