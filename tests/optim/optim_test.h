/* What the tests of optimizers share: parameters with weights and gradients that a step of many reads. */
#ifndef OPTIM_TEST_H
#define OPTIM_TEST_H

#include "../linalg/linalg_test.h"

enum { PARAMS = 8, MOST = 40000 };

/* Parameters of an optimizer, in this rank's part. */
typedef struct bundle {
  dc_optimizer *optimizer;
  int64_t count;
  int64_t shapes[PARAMS];
  dc_tensor weights[PARAMS], grads[PARAMS];
  float weight[PARAMS][MOST], grad[PARAMS][MOST]; /* room for any type */
} bundle;

/* Adds a float32 parameter of n elements whose part begins at offset, with weights that are a function of the place. */
static inline void add(bundle *b, int32_t group, int64_t n, int64_t offset, int64_t count) {
  int64_t i = b->count++;
  int64_t index;
  double *w = doubles(n, (uint64_t)i + 1);
  OK(dc_optimizer_add_param(b->optimizer, group, &n, 1, offset, count, DC_FLOAT32, &index));
  assert_int_equal(index, i);
  for (int64_t k = 0; k < count; k++) {
    b->weight[i][k] = (float)w[offset + k];
  }
  free(w);
  b->shapes[i] = count;
  dc_tensor t = DC_TENSOR_INIT;
  t.shape = &b->shapes[i];
  t.ndim = 1;
  t.dtype = DC_FLOAT32;
  t.data = b->weight[i];
  b->weights[i] = t;
  t.data = b->grad[i];
  b->grads[i] = t;
}

/* Gradients of a step, a function of parameter, place and step. */
static inline void fill_grads(bundle *b, int64_t step, int64_t offset) {
  for (int64_t i = 0; i < b->count; i++) {
    double *g = doubles(offset + b->shapes[i], (uint64_t)(100 * step + i + 7));
    for (int64_t k = 0; k < b->shapes[i]; k++) {
      b->grad[i][k] = (float)g[offset + k];
    }
    free(g);
  }
}

static inline dc_status step(bundle *b) {
  return dc_optimizer_step(b->optimizer, b->weights, b->grads, sizeof(dc_tensor), b->count, 1);
}

/* A piece of float32 state. */
static inline float *piece(const bundle *b, int64_t index, const char *name) {
  dc_tensor view = DC_TENSOR_INIT;
  OK(dc_optimizer_state(b->optimizer, index, name, &view));
  assert_int_equal(view.dtype, DC_FLOAT32);
  return view.data;
}

#endif
