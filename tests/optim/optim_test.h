/* Shared by the tests of optimizers: parameters with weights and gradients for steps of many parameters. */
#ifndef OPTIM_TEST_H
#define OPTIM_TEST_H

#include "linalg_test.h"

enum { PARAMS = 8, MOST = 40000 };

/* An optimizer's parameters, as this rank's parts. */
typedef struct bundle {
  dc_optimizer *optimizer;
  int64_t count;
  int64_t parts[PARAMS]; /* in elements */
  dc_tensor weights[PARAMS], grads[PARAMS];
  float weight[PARAMS][MOST], grad[PARAMS][MOST]; /* large enough for any type */
} bundle;

static inline void make_adamw(bundle *to, const dc_adamw_options *options) {
  memset(to, 0, sizeof *to);
  OK(dc_adamw_create(linalg, options, &to->optimizer));
}

static inline void make_sgd(bundle *to, const dc_sgd_options *options) {
  memset(to, 0, sizeof *to);
  OK(dc_sgd_create(linalg, options, &to->optimizer));
}

/* Adds a float32 parameter of which this rank has [offset, offset + count); count -1: all. Weights and gradients depend
 * only on the position. */
static inline int64_t add_part(bundle *b, int32_t group, const int64_t *shape, int32_t ndim, int64_t offset,
                               int64_t count) {
  int64_t i = b->count++, n = 1, index;
  for (int32_t d = 0; d < ndim; d++) {
    n *= shape[d];
  }
  count = count < 0 ? n : count;
  assert_true(count <= MOST);
  b->parts[i] = count;
  OK(dc_optimizer_add_param(b->optimizer, group, shape, ndim, offset, count, DC_FLOAT32, &index));
  assert_int_equal(index, i);
  double *w = doubles(n, (uint64_t)i + 1), *g = doubles(n, (uint64_t)i + 1001);
  for (int64_t k = 0; k < count; k++) {
    b->weight[i][k] = (float)w[offset + k];
    b->grad[i][k] = (float)g[offset + k];
  }
  free(w);
  free(g);
  dc_tensor t = DC_TENSOR_INIT;
  t.shape = &b->parts[i];
  t.ndim = 1;
  t.dtype = DC_FLOAT32;
  t.data = b->weight[i];
  b->weights[i] = t;
  t.data = b->grad[i];
  b->grads[i] = t;
  return index;
}

/* A vector of n elements. */
static inline void add(bundle *b, int32_t group, int64_t n, int64_t offset, int64_t count) {
  add_part(b, group, &n, 1, offset, count);
}

/* Fills in a step's gradients, which depend only on parameter, position and step. */
static inline void fill_grads(bundle *b, int64_t step, int64_t offset) {
  for (int64_t i = 0; i < b->count; i++) {
    double *g = doubles(offset + b->parts[i], (uint64_t)(100 * step + i + 7));
    for (int64_t k = 0; k < b->parts[i]; k++) {
      b->grad[i][k] = (float)g[offset + k];
    }
    free(g);
  }
}

static inline dc_status step(bundle *b) {
  return dc_optimizer_step(b->optimizer, b->weights, b->grads, sizeof(dc_tensor), b->count, 1);
}

/* A tensor of float32 state. */
static inline float *piece(const bundle *b, int64_t index, const char *name) {
  dc_tensor view = DC_TENSOR_INIT;
  OK(dc_optimizer_get_state(b->optimizer, index, name, &view));
  assert_int_equal(view.dtype, DC_FLOAT32);
  return view.data;
}

#endif
