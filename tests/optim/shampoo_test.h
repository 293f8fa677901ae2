/* A small model for the tests of Muon, Shampoo and SOAP: parameters of all orders, and gradients that are the same on
 * every rank. With OWN_SHAPES, the test defines the parameters. */
#ifndef DC_TESTS_SHAMPOO_H
#define DC_TESTS_SHAMPOO_H

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka wants some of the above first */
#include <cmocka.h>

#include "dc_api.h"

#define OK(call)                                                           \
  do {                                                                     \
    if ((call) != DC_OK) {                                                 \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, dc_last_error()); \
      abort();                                                             \
    }                                                                      \
  } while (0)
#define SAYS(text) assert_non_null(strstr(dc_last_error(), (text)))

enum { PARAMS = 7, MOST = 512, STEPS = 7 };

static dc_device *device;
static dc_linalg *linalg;

/* ---- a model of small parameters ---- */

typedef struct sizes {
  int32_t ndim;
  int64_t sizes[4];
} sizes;

#ifdef OWN_SHAPES
static const sizes shapes[PARAMS];
#else
static const sizes shapes[PARAMS] = {{2, {5, 7}},       {1, {9}},          {0, {0}},   {3, {4, 3, 5}},
                                     {4, {2, 3, 2, 4}}, {4, {1, 6, 1, 3}}, {2, {0, 4}}};
#endif

static inline int64_t numel_of(const sizes *s) {
  int64_t numel = 1;
  for (int32_t d = 0; d < s->ndim; d++) {
    numel *= s->sizes[d];
  }
  return numel;
}

static inline float noise(uint32_t *x) {
  *x = *x * 1664525u + 1013904223u;
  return (float)(int32_t)(*x ^ (*x >> 15)) / 2147483648.0f;
}

/* Depends only on step, parameter and element, so it is the same on every rank. */
static inline void gradient(int64_t step, int64_t param, int64_t count, float *out) {
  uint32_t x = (uint32_t)(step * 7919 + param * 104729 + 1);
  for (int64_t i = 0; i < count; i++) {
    out[i] = noise(&x) * (i % 3 == 0 ? 2.0f : 0.1f);
  }
}

typedef struct model {
  dc_optimizer *optimizer;
  float weights[PARAMS][MOST];
  int64_t offset[PARAMS], count[PARAMS], numel[PARAMS];
} model;

static inline dc_optimizer *muon(dc_linalg *l, dc_comm *comm, const dc_muon_options *options) {
  dc_optimizer *optimizer;
  OK(dc_muon_create(l, comm, options, &optimizer));
  return optimizer;
}

static inline dc_optimizer *shampoo(dc_linalg *l, dc_comm *comm, const dc_shampoo_options *options) {
  dc_optimizer *optimizer;
  OK(dc_shampoo_create(l, comm, options, &optimizer));
  return optimizer;
}

static inline dc_optimizer *soap(dc_linalg *l, dc_comm *comm, const dc_soap_options *options) {
  dc_optimizer *optimizer;
  OK(dc_soap_create(l, comm, options, &optimizer));
  return optimizer;
}

/* Opens the model on a rank. With `split`, each rank has a part of each parameter, cut unevenly. */
static inline void open_model(model *m, dc_optimizer *optimizer, int32_t rank, int32_t world, bool split) {
  memset(m, 0, sizeof *m);
  m->optimizer = optimizer;
  OK(dc_optimizer_set_lr(m->optimizer, 0, 0.1));
  for (int64_t p = 0; p < PARAMS; p++) {
    int64_t numel = m->numel[p] = numel_of(&shapes[p]);
    m->offset[p] = split ? numel * rank * rank / (world * world) : 0;
    m->count[p] = split ? numel * (rank + 1) * (rank + 1) / (world * world) - m->offset[p] : numel;
    gradient(1000, p, numel, m->weights[p]);
    memmove(m->weights[p], m->weights[p] + m->offset[p], (size_t)m->count[p] * sizeof(float));
    OK(dc_optimizer_add_param(m->optimizer, 0, shapes[p].sizes, shapes[p].ndim, m->offset[p], m->count[p], DC_FLOAT32,
                              NULL));
  }
}

static inline dc_status step_with(model *m, float grads[PARAMS][MOST], const bool *skip) {
  dc_tensor weights[PARAMS], gradients[PARAMS];
  for (int64_t p = 0; p < PARAMS; p++) {
    dc_tensor t = {
        .struct_size = sizeof t, .data = m->weights[p], .shape = &m->count[p], .ndim = 1, .dtype = DC_FLOAT32};
    weights[p] = t;
    t.data = grads[p] + m->offset[p];
    gradients[p] = t;
    if (skip != NULL && skip[p]) {
      gradients[p] = (dc_tensor)DC_TENSOR_INIT;
    }
  }
  return dc_optimizer_step(m->optimizer, weights, gradients, sizeof(dc_tensor), PARAMS, 0.5);
}

static inline void gradients_of(int64_t step, float grads[PARAMS][MOST]) {
  for (int64_t p = 0; p < PARAMS; p++) {
    gradient(step, p, numel_of(&shapes[p]), grads[p]);
  }
}

static inline void steps(model *m, int64_t from, int64_t to) {
  float grads[PARAMS][MOST];
  for (int64_t step = from; step < to; step++) {
    gradients_of(step, grads);
    OK(step_with(m, grads, NULL));
  }
}

static inline dc_shampoo_options plain_options(void) {
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.eps_rel = 1e-3; /* after a few steps factors do not have full rank; hides float32's rounding */
  return o;
}

static inline void *saved(dc_optimizer *optimizer, size_t *bytes) {
  int64_t size;
  OK(dc_optimizer_get_save_bytes(optimizer, &size));
  *bytes = (size_t)size;
  void *memory = calloc(1, *bytes);
  OK(dc_optimizer_save(optimizer, memory, size));
  return memory;
}

/* ---- one parameter ---- */

static inline void one_step(dc_optimizer *optimizer, float *weight, const float *grad, int64_t count) {
  dc_tensor w = {.struct_size = sizeof w, .data = weight, .shape = &count, .ndim = 1, .dtype = DC_FLOAT32};
  const dc_tensor g = {
      .struct_size = sizeof g, .data = (void *)(uintptr_t)grad, .shape = &count, .ndim = 1, .dtype = DC_FLOAT32};
  OK(dc_optimizer_step(optimizer, &w, &g, sizeof w, 1, 1));
}

static inline dc_optimizer *one_param(dc_optimizer *optimizer, int64_t rows, int64_t cols) {
  OK(dc_optimizer_set_lr(optimizer, 0, 1));
  OK(dc_optimizer_add_param(optimizer, 0, (int64_t[]){rows, cols}, 2, 0, rows * cols, DC_DTYPE_NONE, NULL));
  return optimizer;
}

static inline float *state_of(dc_optimizer *optimizer, const char *name) {
  dc_tensor view = DC_TENSOR_INIT;
  OK(dc_optimizer_get_state(optimizer, 0, name, &view));
  return view.data;
}

/* ---- the handle ---- */

static inline int open_handle(void **state) {
  (void)state;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  options.threads = 2;
  return dc_device_open("cpu", NULL, &device) == DC_OK && dc_linalg_create(device, &options, &linalg) == DC_OK ? 0 : 1;
}

static inline int close_handle(void **state) {
  (void)state;
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  return 0;
}

#endif
