/* Shared by the tests of K-FAC: an optimizer with its parameters' tensors, and its layers' factors. */
#ifndef KFAC_TEST_H
#define KFAC_TEST_H

#include "optim_test.h"

typedef bundle model;

static inline void open_model(model *m, dc_comm *comm, const dc_kfac_options *options) {
  memset(m, 0, sizeof *m);
  OK(dc_kfac_create(linalg, comm, options, &m->optimizer));
}

static inline void close_model(model *m) {
  dc_optimizer_destroy(m->optimizer);
  m->optimizer = NULL;
}

static inline int64_t add_matrix(model *m, int64_t rows, int64_t cols) {
  const int64_t shape[2] = {rows, cols};
  return add_part(m, 0, shape, 2, 0, -1);
}

static inline int64_t add_vector(model *m, int64_t n) {
  return add_part(m, 0, &n, 1, 0, -1);
}

static inline int64_t add_linear(model *m, int32_t approximation, int64_t weight, int64_t bias) {
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  int64_t index;
  layer.kind = DC_SAMPLE_LINEAR;
  OK(dc_kfac_add_layer(m->optimizer, &layer, approximation, weight, bias, &index));
  return index;
}

static inline float *floats(int64_t count, uint64_t seed) {
  float *x = calloc((size_t)count + 1, sizeof *x);
  for (int64_t i = 0; i < count; i++) {
    x[i] = (float)number(&seed);
  }
  return x;
}

/* Accumulates a batch of n samples for a linear layer. */
static inline dc_status batch_of(const model *m, int64_t layer, float *x, float *delta, int64_t n, int64_t in,
                                 int64_t out, double scale) {
  dc_tensor tx = matrix(x, DC_FLOAT32, n, in), td = matrix(delta, DC_FLOAT32, n, out);
  return dc_kfac_accumulate(m->optimizer, layer, &tx, &td, scale);
}

/* out = mean of v v^T over n vectors of `in` elements; with `bias`, each vector is followed by a 1. */
static inline void mean_products(const float *v, int64_t n, int64_t in, bool bias, double scale, double *out) {
  int64_t all = in + (bias ? 1 : 0);
  memset(out, 0, (size_t)(all * all) * sizeof *out);
  for (int64_t s = 0; s < n; s++) {
    for (int64_t i = 0; i < all; i++) {
      for (int64_t j = 0; j < all; j++) {
        double a = i < in ? (double)v[s * in + i] : 1, b = j < in ? (double)v[s * in + j] : 1;
        out[i * all + j] += scale * a * b / (double)n;
      }
    }
  }
}

static inline void near(const float *got, const double *want, int64_t count, double tolerance) {
  for (int64_t i = 0; i < count; i++) {
    if (!(fabs((double)got[i] - want[i]) <= tolerance * (1 + fabs(want[i])))) {
      fail_msg("element %d is %.9g, must be %.9g", (int)i, (double)got[i], want[i]);
    }
  }
}

static inline void *saved(const model *m, size_t *bytes) {
  int64_t size;
  OK(dc_optimizer_get_save_bytes(m->optimizer, &size));
  *bytes = (size_t)size;
  void *memory = malloc(*bytes);
  OK(dc_optimizer_save(m->optimizer, memory, size));
  return memory;
}

#endif
