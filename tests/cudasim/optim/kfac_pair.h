/* Shared by the tests of K-FAC on the device: an optimizer with layers of all kinds, and its batches. It is on the CPU
 * or on the device, for one rank or for a rank's parts. */
#ifndef TESTS_KFAC_PAIR_H
#define TESTS_KFAC_PAIR_H

#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "kernels/kernels.h"

enum { PARAMS = 6, LAYERS = 3, MOST = 2048, STEPS = 4, SAMPLES = 4 };

/* A linear layer with a bias at many positions, one without a bias, a grouped convolution with a bias, and a vector
 * without a layer. */
static const struct shape {
  int32_t ndim, dtype, grad_dtype;
  int64_t sizes[4];
} shapes[PARAMS] = {{2, DC_FLOAT32, DC_FLOAT32, {5, 6}},    {1, DC_FLOAT32, DC_BFLOAT16, {5}},
                    {2, DC_BFLOAT16, DC_BFLOAT16, {4, 37}}, {4, DC_FLOAT32, DC_FLOAT16, {4, 2, 3, 2}},
                    {1, DC_FLOAT32, DC_FLOAT32, {4}},       {1, DC_FLOAT16, DC_FLOAT16, {11}}};
static const struct batch_shape {
  int32_t ndim;
  int64_t x[4], delta[4];
} batches[LAYERS] = {{3, {SAMPLES, 3, 6}, {SAMPLES, 3, 5}},
                     {2, {SAMPLES, 37}, {SAMPLES, 4}},
                     {4, {SAMPLES, 4, 5, 4}, {SAMPLES, 4, 3, 5}}};

/* An optimizer with its parameters, of which this rank has a part. */
typedef struct device_optimizer {
  dc_device *device;
  dc_linalg *linalg;
  dc_optimizer *optimizer;
  char *weights[PARAMS], *grads[PARAMS], *x, *delta;
  int64_t offset[PARAMS], count[PARAMS];
} device_optimizer;

#include "pair_steps.h"

static inline int64_t product_of(const int64_t *sizes, int32_t ndim) {
  int64_t numel = 1;
  for (int32_t d = 0; d < ndim; d++) {
    numel *= sizes[d];
  }
  return numel;
}

/* Numbers [from, from + count) of a seed's sequence, the same on every side and rank. */
static inline void numbers(const device_optimizer *s, char *to, int32_t dtype, uint64_t seed, int64_t from,
                           int64_t count) {
  float values[MOST];
  _Alignas(8) char bytes[4 * MOST];
  assert_true(from + count <= MOST);
  for (int i = 0; i < MOST; i++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    values[i] = (float)(int32_t)(seed >> 32) / 2147483648.0f;
  }
  dc__cast(bytes, dtype, values + from, DC_FLOAT32, count);
  move(s, to, bytes, (size_t)count * dc_dtype_size(dtype));
}

static inline void fill(const device_optimizer *s, int p, bool grad, int step) {
  numbers(s, grad ? s->grads[p] : s->weights[p], grad ? shapes[p].grad_dtype : shapes[p].dtype,
          (uint64_t)(step * 977 + p * 31 + 2 * grad + 1), s->offset[p], s->count[p]);
}

static inline void open_optimizer(device_optimizer *s, const char *name) {
  memset(s, 0, sizeof *s);
  if (dc_device_open(name, NULL, &s->device) != DC_OK || dc_linalg_create(s->device, NULL, &s->linalg) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  for (int p = 0; p < PARAMS; p++) {
    assert_int_equal(s->device->ops->alloc(s->device, 4 * MOST, DC_MEMORY_DEVICE, (void **)&s->weights[p]), DC_OK);
    assert_int_equal(s->device->ops->alloc(s->device, 4 * MOST, DC_MEMORY_DEVICE, (void **)&s->grads[p]), DC_OK);
  }
  assert_int_equal(s->device->ops->alloc(s->device, 4 * MOST, DC_MEMORY_DEVICE, (void **)&s->x), DC_OK);
  assert_int_equal(s->device->ops->alloc(s->device, 4 * MOST, DC_MEMORY_DEVICE, (void **)&s->delta), DC_OK);
}

static inline void close_optimizer(device_optimizer *s) {
  dc_optimizer_destroy(s->optimizer);
  for (int p = 0; p < PARAMS; p++) {
    s->device->ops->free(s->device, s->weights[p], 4 * MOST, DC_MEMORY_DEVICE);
    s->device->ops->free(s->device, s->grads[p], 4 * MOST, DC_MEMORY_DEVICE);
  }
  s->device->ops->free(s->device, s->x, 4 * MOST, DC_MEMORY_DEVICE);
  s->device->ops->free(s->device, s->delta, 4 * MOST, DC_MEMORY_DEVICE);
  dc_linalg_destroy(s->linalg);
  dc_device_destroy(s->device);
}

/* Makes an optimizer with the layers, and with the parameters of a rank of `world`, cut unevenly. */
static inline dc_status make(device_optimizer *s, dc_comm *comm, const dc_kfac_options *options,
                             int32_t approximation) {
  const int32_t at = comm == NULL ? 0 : dc_comm_rank(comm), world = comm == NULL ? 1 : dc_comm_size(comm);
  dc_sample_layer linear = DC_SAMPLE_LAYER_INIT, conv = DC_SAMPLE_LAYER_INIT;
  linear.kind = DC_SAMPLE_LINEAR;
  conv.kind = DC_SAMPLE_CONV;
  conv.groups = 2;
  conv.kernel[0] = 3;
  conv.kernel[1] = 2;
  conv.stride[0] = 2;
  conv.padding[0] = conv.padding[1] = 1;
  dc_status status = dc_kfac_create(s->linalg, comm, options, &s->optimizer);
  status = status == DC_OK ? dc_optimizer_set_lr(s->optimizer, 0, 0.1) : status;
  for (int p = 0; p < PARAMS; p++) {
    const int64_t numel = product_of(shapes[p].sizes, shapes[p].ndim);
    s->offset[p] = numel * at * at / (world * world);
    s->count[p] = numel * (at + 1) * (at + 1) / (world * world) - s->offset[p];
    if (status == DC_OK) {
      status = dc_optimizer_add_param(s->optimizer, 0, shapes[p].sizes, shapes[p].ndim, s->offset[p], s->count[p],
                                      shapes[p].dtype, NULL);
    }
    fill(s, p, false, 0);
  }
  status = status == DC_OK ? dc_kfac_add_layer(s->optimizer, &linear, approximation, 0, 1, NULL) : status;
  status = status == DC_OK ? dc_kfac_add_layer(s->optimizer, &linear, approximation, 2, -1, NULL) : status;
  return status == DC_OK ? dc_kfac_add_layer(s->optimizer, &conv, approximation, 3, 4, NULL) : status;
}

/* Accumulates samples [begin, begin + n) of a layer's batch. The tensors stay valid until the next call. */
static inline dc_status accumulate_part(device_optimizer *s, int layer, int64_t begin, int64_t n,
                                        const int32_t dtypes[2]) {
  const struct batch_shape *b = &batches[layer];
  int64_t shapes_of[2][4];
  dc_tensor t[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
  for (int k = 0; k < 2; k++) {
    memcpy(shapes_of[k], k == 0 ? b->x : b->delta, sizeof shapes_of[k]);
    const int64_t each = product_of(shapes_of[k], b->ndim) / SAMPLES;
    shapes_of[k][0] = n;
    t[k].data = (k == 0 ? s->x : s->delta) + (size_t)(begin * each) * dc_dtype_size(dtypes[k]);
    t[k].dtype = dtypes[k];
    t[k].ndim = b->ndim;
    t[k].shape = shapes_of[k];
  }
  return dc_kfac_accumulate(s->optimizer, layer, &t[0], &t[1], 2);
}

static inline void write_batch(const device_optimizer *s, int layer, int number, const int32_t dtypes[2]) {
  const struct batch_shape *b = &batches[layer];
  numbers(s, s->x, dtypes[0], (uint64_t)(number * 131 + layer * 7 + 3), 0, product_of(b->x, b->ndim));
  numbers(s, s->delta, dtypes[1], (uint64_t)(number * 137 + layer * 7 + 4), 0, product_of(b->delta, b->ndim));
}

/* Accumulates all layers' batches, the first one's in two pieces. */
static inline dc_status accumulate(device_optimizer *s, int number, const int32_t dtypes[2]) {
  dc_status status = DC_OK;
  for (int layer = 0; layer < LAYERS && status == DC_OK; layer++) {
    write_batch(s, layer, number, dtypes);
    status = accumulate_part(s, layer, 0, layer == 0 ? 1 : SAMPLES, dtypes);
    if (layer == 0 && status == DC_OK) {
      status = accumulate_part(s, layer, 1, SAMPLES - 1, dtypes);
    }
  }
  return status;
}

static inline dc_status step_as_is(device_optimizer *s, const bool *frozen) {
  dc_tensor weights[PARAMS], grads[PARAMS];
  for (int p = 0; p < PARAMS; p++) {
    weights[p] = flat(s->weights[p], &s->count[p], shapes[p].dtype);
    grads[p] = flat(s->grads[p], &s->count[p], frozen != NULL && frozen[p] ? DC_DTYPE_NONE : shapes[p].grad_dtype);
  }
  return dc_optimizer_step(s->optimizer, weights, grads, sizeof *weights, PARAMS, 0.5);
}

static const int32_t floats[2] = {DC_FLOAT32, DC_FLOAT32};

/* A step; in step 2 a bias has no gradient, and in step 3 a weight. */
static inline dc_status step(device_optimizer *s, int number, const int32_t dtypes[2]) {
  bool frozen[PARAMS] = {false};
  frozen[1] = number == 2;
  frozen[3] = number == 3;
  for (int p = 0; p < PARAMS; p++) {
    fill(s, p, true, number);
  }
  const dc_status status = accumulate(s, number, dtypes);
  return status == DC_OK ? step_as_is(s, frozen) : status;
}

/* The damping is large enough to hide rounding. */
static inline dc_kfac_options options_of(void) {
  dc_kfac_options o = DC_KFAC_OPTIONS_INIT;
  o.damping = 0.1;
  o.refresh_frequency = 1;
  o.weight_decay = 0.05;
  return o;
}

#endif
