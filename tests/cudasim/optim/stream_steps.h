/* Shared by the tests of steps on a stream: AdamW, SGD or Muon in two groups, with tensors of all types on the device.
 */
#ifndef TESTS_STREAM_STEPS_H
#define TESTS_STREAM_STEPS_H

#include <math.h>

#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "kernels/kernels.h"
#include "support/steps.h"

enum { ADAMW, SGD, MUON, KINDS }; /* Muon does not split parameters */
enum { PARAMS = 6, COUNT = 300, STEPS = 7, BAD = 3, BYTES = PARAMS * COUNT * 4, ALLOC_BYTES = BYTES * (1 + STEPS) };

static const int32_t dtypes[PARAMS] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16, DC_FLOAT32, DC_FLOAT32, DC_BFLOAT16};
static const int32_t grad_dtypes[PARAMS] = {DC_FLOAT32, DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16, DC_FLOAT32, DC_BFLOAT16};
static dc_device *device;
static dc_linalg *linalg;

/* An optimizer with two groups and its tensors: the weights, and the gradients of each step. */
typedef struct model {
  dc_optimizer *optimizer;
  dc_stream *stream;
  char *memory;
  int64_t count; /* elements of each parameter's part */
} model;

#define DO(call)                                  \
  do {                                            \
    if ((call) != DC_OK) {                        \
      fail_msg("%s: %s", #call, dc_last_error()); \
    }                                             \
  } while (0)

static inline int open_all(void **state) {
  (void)state;
#ifndef ON_CARD
  cudasim_reset();
#endif
  DO(dc_device_open("cuda", NULL, &device));
  DO(dc_linalg_create(device, NULL, &linalg));
  return 0;
}

static inline int close_all(void **state) {
  (void)state;
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return 0;
}

static inline void move(void *to, const void *from, size_t bytes) {
  dc__stream_copy(device->internal_stream, to, from, bytes);
  dc__device_sync_internal(device, NULL);
}

static inline char *weight_of(const model *m, int p) {
  return m->memory + p * COUNT * 4;
}
static inline char *grad_of(const model *m, int step, int p) {
  return m->memory + (1 + step) * BYTES + p * COUNT * 4;
}

/* Fills the tensors with the elements from `offset` on of a fixed sequence. In step BAD one element is infinite. */
static inline void fill(const model *m, int64_t offset) {
  static float values[COUNT];
  static _Alignas(16) char bytes[4 * COUNT];
  for (int s = -1; s < STEPS; s++) {
    for (int p = 0; p < PARAMS; p++) {
      const int32_t dtype = s < 0 ? dtypes[p] : grad_dtypes[p];
      for (int i = 0; i < COUNT; i++) {
        values[i] = (float)((i + 17 * p + 101 * s + 500) * 7919 % 1013) / 512.0f - 1.0f;
      }
      values[COUNT - 1] = s == BAD && p == 4 ? INFINITY : values[COUNT - 1];
      dc__cast(bytes, dtype, values + offset, DC_FLOAT32, m->count);
      move(s < 0 ? weight_of(m, p) : grad_of(m, s, p), bytes, (size_t)m->count * dc_dtype_size(dtype));
    }
  }
}

static inline dc_status make(model *m, int kind, int64_t offset, int64_t count) {
  dc_adamw_options adamw = DC_ADAMW_OPTIONS_INIT;
  dc_sgd_options sgd = DC_SGD_OPTIONS_INIT;
  dc_muon_options muon = DC_MUON_OPTIONS_INIT;
  const int64_t long_one = COUNT, matrix[2] = {20, COUNT / 20};
  adamw.weight_decay = sgd.momentum = muon.weight_decay = 0.1;
  muon.precision = DC_FLOAT32;
  adamw.check_finite = sgd.check_finite = 1;
  dc_status status = kind == ADAMW ? dc_adamw_create(linalg, &adamw, &m->optimizer)
                     : kind == SGD ? dc_sgd_create(linalg, &sgd, &m->optimizer)
                                   : dc_muon_create(linalg, NULL, &muon, &m->optimizer);
  adamw.amsgrad = sgd.nesterov = 1;
  muon.num_splits = 2;
  muon.precision = DC_BFLOAT16;
  if (status == DC_OK) {
    status = kind == ADAMW ? dc_adamw_set_group(m->optimizer, 1, &adamw)
             : kind == SGD ? dc_sgd_set_group(m->optimizer, 1, &sgd)
                           : dc_muon_set_group(m->optimizer, 1, &muon);
  }
  for (int p = 0; p < PARAMS && status == DC_OK; p++) {
    status = dc_optimizer_add_param(m->optimizer, p % 3 == 2, kind == MUON ? matrix : &long_one, kind == MUON ? 2 : 1,
                                    offset, count, dtypes[p], NULL);
  }
  m->count = count;
  return status;
}

static inline model open_model(int kind, dc_stream *stream, int64_t offset, int64_t count) {
  model m = {.stream = stream};
  DO(device->ops->alloc(device, ALLOC_BYTES, DC_MEMORY_DEVICE, (void **)&m.memory));
  DO(make(&m, kind, offset, count));
  fill(&m, offset);
  DO(dc_optimizer_set_stream(m.optimizer, stream));
  return m;
}

static inline void close_model(model *m) {
  dc_optimizer_destroy(m->optimizer);
  device->ops->free(device, m->memory, ALLOC_BYTES, DC_MEMORY_DEVICE);
}

/* Makes a step with its gradients; the last parameter has one only in even steps. */
static inline dc_status step(const model *m, int number) {
  dc_tensor weights[PARAMS], grads[PARAMS];
  for (int p = 0; p < PARAMS; p++) {
    weights[p] = flat(weight_of(m, p), &m->count, dtypes[p]);
    grads[p] = flat(grad_of(m, number, p), &m->count, grad_dtypes[p]);
  }
  grads[PARAMS - 1].dtype = number % 2 == 0 ? grad_dtypes[PARAMS - 1] : DC_DTYPE_NONE;
  return dc_optimizer_step(m->optimizer, weights, grads, sizeof *weights, PARAMS, 0.5);
}

static inline double rate(int number) {
  return 0.1 / (1 + number);
}

static inline char *saved(const model *m, size_t *bytes) {
  int64_t size;
  DO(dc_optimizer_get_save_bytes(m->optimizer, &size));
  *bytes = (size_t)size;
  char *memory = test_malloc(*bytes);
  DO(dc_optimizer_save(m->optimizer, memory, size));
  return memory;
}

/* Compares weights, saved states, and statistics. */
static inline void same(const model *a, const model *b) {
  static char weights[2][BYTES];
  size_t bytes[2];
  dc_optimizer_stats stats[2] = {DC_OPTIMIZER_STATS_INIT, DC_OPTIMIZER_STATS_INIT};
  char *states[2] = {saved(a, &bytes[0]), saved(b, &bytes[1])};
  assert_int_equal(bytes[0], bytes[1]);
  assert_memory_equal(states[0], states[1], bytes[0]);
  assert_int_equal(steps_of(a->optimizer), steps_of(b->optimizer));
  for (int k = 0; k < 2; k++) {
    const model *m = k == 0 ? a : b;
    test_free(states[k]);
    DO(dc_optimizer_get_stats(m->optimizer, &stats[k]));
    move(weights[k], m->memory, BYTES);
    for (int p = 0; p < PARAMS; p++) { /* ignores the memory behind the elements */
      const size_t used = (size_t)m->count * dc_dtype_size(dtypes[p]);
      memset(weights[k] + p * COUNT * 4 + used, 0, COUNT * 4 - used);
    }
  }
  assert_memory_equal(weights[0], weights[1], BYTES);
  assert_int_equal(stats[0].steps, stats[1].steps);
  assert_int_equal(stats[0].skipped_steps, stats[1].skipped_steps);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_all, close_all)

#endif
