/* Shared by the tests of Muon, Shampoo and SOAP on the device: an optimizer with parameters of all types and orders. It
 * is on the CPU or on the device, for one rank or for a rank's parts. With MATRICES, no parameter is a vector. */
#ifndef TESTS_OPTIM_PAIR_H
#define TESTS_OPTIM_PAIR_H

#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "kernels/kernels.h"

enum { PARAMS = 6, MOST = 256, STEPS = 4 };

static const struct shape {
  int32_t ndim, dtype, grad_dtype;
  int64_t sizes[4];
}
#ifdef MATRICES
shapes[PARAMS] = {{2, DC_FLOAT32, DC_FLOAT32, {9, 6}},       {2, DC_FLOAT32, DC_BFLOAT16, {12, 1}},
                  {2, DC_FLOAT32, DC_FLOAT32, {9, 6}},       {3, DC_BFLOAT16, DC_BFLOAT16, {3, 4, 5}},
                  {4, DC_FLOAT32, DC_FLOAT16, {6, 3, 2, 4}}, {2, DC_FLOAT32, DC_FLOAT32, {0, 4}}};
#else
shapes[PARAMS] = {{2, DC_FLOAT32, DC_FLOAT32, {8, 8}},       {1, DC_FLOAT32, DC_BFLOAT16, {11}},
                  {0, DC_FLOAT32, DC_FLOAT32, {0}},          {3, DC_BFLOAT16, DC_BFLOAT16, {4, 3, 5}},
                  {4, DC_FLOAT32, DC_FLOAT16, {2, 3, 2, 4}}, {2, DC_FLOAT32, DC_FLOAT32, {0, 4}}};

#endif

/* An optimizer with its parameters, of which this rank has a part. */
typedef struct device_optimizer {
  dc_device *device;
  dc_linalg *linalg;
  dc_optimizer *optimizer;
  char *weights[PARAMS], *grads[PARAMS];
  int64_t offset[PARAMS], count[PARAMS];
} device_optimizer;

#include "pair_steps.h"

static inline int64_t numel_of(int p) {
  int64_t numel = 1;
  for (int32_t d = 0; d < shapes[p].ndim; d++) {
    numel *= shapes[p].sizes[d];
  }
  return numel;
}

/* Fills a parameter or its gradient with numbers of a step, the same on every rank. */
static inline void fill(const device_optimizer *s, int p, bool grad, int step) {
  float values[MOST] = {0};
  _Alignas(8) char bytes[4 * MOST];
  uint64_t seed = (uint64_t)(step * 977 + p * 31 + 2 * grad + 1);
  for (int i = 0; i < MOST; i++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    values[i] = (float)(int32_t)(seed >> 32) / 2147483648.0f * (i % 3 == 0 ? 2.0f : 0.1f);
  }
  const int32_t dtype = grad ? shapes[p].grad_dtype : shapes[p].dtype;
  dc__cast(bytes, dtype, values + s->offset[p], DC_FLOAT32, s->count[p]);
  move(s, grad ? s->grads[p] : s->weights[p], bytes, (size_t)s->count[p] * dc_dtype_size(dtype));
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
}

static inline void close_optimizer(device_optimizer *s) {
  for (int p = 0; p < PARAMS; p++) {
    s->device->ops->free(s->device, s->weights[p], 4 * MOST, DC_MEMORY_DEVICE);
    s->device->ops->free(s->device, s->grads[p], 4 * MOST, DC_MEMORY_DEVICE);
  }
  dc_linalg_destroy(s->linalg);
  dc_device_destroy(s->device);
}

/* Adds the parameters of a rank of `world`, cut unevenly. */
static inline dc_status add_params(device_optimizer *s, int32_t at, int32_t world) {
  dc_status status = dc_optimizer_set_lr(s->optimizer, 0, 0.1);
  for (int p = 0; p < PARAMS; p++) {
    const int64_t numel = numel_of(p);
    s->offset[p] = numel * at * at / (world * world);
    s->count[p] = numel * (at + 1) * (at + 1) / (world * world) - s->offset[p];
    if (status == DC_OK) {
      status = dc_optimizer_add_param(s->optimizer, 0, shapes[p].sizes, shapes[p].ndim, s->offset[p], s->count[p],
                                      shapes[p].dtype, NULL);
    }
    fill(s, p, false, 0);
  }
  return status;
}

static inline dc_status step_as_is(device_optimizer *s, int skipped) {
  dc_tensor weights[PARAMS], grads[PARAMS];
  for (int p = 0; p < PARAMS; p++) {
    weights[p] = flat(s->weights[p], &s->count[p], shapes[p].dtype);
    grads[p] = flat(s->grads[p], &s->count[p], p == skipped ? DC_DTYPE_NONE : shapes[p].grad_dtype);
  }
  return dc_optimizer_step(s->optimizer, weights, grads, sizeof *weights, PARAMS, 0.5);
}

static inline dc_status step(device_optimizer *s, int number) {
  for (int p = 0; p < PARAMS; p++) {
    fill(s, p, true, number);
  }
  return step_as_is(s, number == 2 ? 3 : -1);
}

typedef dc_status (*make_fn)(device_optimizer *s, dc_comm *comm, const void *options);

static inline dc_status make_muon(device_optimizer *s, dc_comm *comm, const void *options) {
  return dc_muon_create(s->linalg, comm, options, &s->optimizer);
}

static inline dc_status make_shampoo(device_optimizer *s, dc_comm *comm, const void *options) {
  return dc_shampoo_create(s->linalg, comm, options, &s->optimizer);
}

static inline dc_status make_soap(device_optimizer *s, dc_comm *comm, const void *options) {
  return dc_soap_create(s->linalg, comm, options, &s->optimizer);
}

/* A gradient that is not finite is refused: the text names its parameter, and nothing changes. */
static inline void refuses_gradient(make_fn make, const void *options, int p, float value) {
  char name[16];
  device_optimizer s;
  size_t bytes;
  open_optimizer(&s, "cuda");
  assert_int_equal(make(&s, NULL, options), DC_OK);
  assert_int_equal(add_params(&s, 0, 1), DC_OK);
  assert_int_equal(step(&s, 1), DC_OK);
  char *before = saved(&s, &bytes);
  move(&s, s.grads[p] + 40, &value, sizeof value);
  assert_int_equal(step_as_is(&s, -1), DC_E_NOT_FINITE);
  (void)snprintf(name, sizeof name, "grads[%d]", p);
  assert_non_null(strstr(dc_last_error(), name));
  unchanged(&s, before, bytes);
  dc_optimizer_destroy(s.optimizer);
  close_optimizer(&s);
}

static inline dc_shampoo_options options_of(void) {
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.eps_rel = 1e-3; /* after a few steps factors do not have full rank; hides rounding */
  o.max_block = 6;
  o.merge_below = 15;
  return o;
}

#endif
