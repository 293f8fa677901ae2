/* Makes the same call on the CPU and on the device: tensors in both memories, and the comparison of results. The device
 * is the simulated driver's, or a card (tests/card). */
#ifndef TESTS_DEVICE_PAIR_H
#define TESTS_DEVICE_PAIR_H

#include "linalg/linalg_test.h"

#ifndef ON_CARD
#include "cudasim.h"
#include "device/cuda/cublaslt.h"
#include "device/cuda/driver.h"
#endif
#include "device/device.h"
#include "kernels/kernels.h"

static dc_device *card;
static dc_linalg *cuda_linalg; /* on the card */

static inline int open_both(void **state) {
#ifndef ON_CARD
  cudasim_reset();
#endif
  if (set_up(state) != 0 || dc_device_open("cuda", NULL, &card) != DC_OK ||
      dc_linalg_create(card, NULL, &cuda_linalg) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  return 0;
}

static inline int close_both(void **state) {
  dc_linalg_destroy(cuda_linalg);
  dc_device_destroy(card);
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return tear_down(state);
}

#ifndef ON_CARD
/* Runs all that a test covers, and returns how often `counted` is called. After `before` calls of `failing`, one is
 * refused; NULL: none is. */
typedef int (*use_fn)(void **state, const char *counted, const char *failing, int before);

/* Every `step`-th call of each function fails in turn. */
static inline void fail_each_call(void **state, use_fn use, const char *const *functions, size_t count, int step) {
  (void)close_both(state);
  for (size_t f = 0; f < count; f++) {
    const int calls = use(state, functions[f], NULL, 0);
    assert_true(calls > 0);
    for (int before = 0; before < calls; before += step) {
      (void)use(state, functions[f], functions[f], before);
    }
  }
  (void)open_both(state);
}
#endif

/* ---- tensors in both memories ---- */

/* The same elements in both memories, and tensors of a shape over them. */
typedef struct tensor_pair {
  void *data[2];
  dc_tensor t[2];
  int64_t count;
  size_t bytes;
} tensor_pair;

static inline void copy(void *to, const void *from, size_t bytes) {
  dc__stream_copy(card->internal_stream, to, from, bytes);
  dc__device_sync_internal(card, NULL);
}

/* A pair with a shape that must outlive it, and data in the tensors' type. */
static inline tensor_pair pair_of(const void *data, int32_t dtype, const int64_t *shape, int32_t ndim) {
  tensor_pair w = {.count = 1};
  for (int32_t i = 0; i < ndim; i++) {
    w.count *= shape[i];
  }
  w.bytes = (size_t)w.count * dc_dtype_size(dtype);
  w.data[0] = calloc(1, w.bytes + 1);
  memcpy(w.data[0], data, w.bytes);
  assert_int_equal(card->ops->alloc(card, w.bytes + 1, DC_MEMORY_DEVICE, &w.data[1]), DC_OK);
  copy(w.data[1], w.data[0], w.bytes);
  for (int k = 0; k < 2; k++) {
    dc_tensor t = DC_TENSOR_INIT;
    t.data = w.data[k];
    t.dtype = dtype;
    t.shape = shape;
    t.ndim = ndim;
    w.t[k] = t;
  }
  return w;
}

/* The same with float64 values; NULL: all are -7. */
static inline tensor_pair number_pair(const double *values, int32_t dtype, const int64_t *shape, int32_t ndim) {
  int64_t count = 1;
  for (int32_t i = 0; i < ndim; i++) {
    count *= shape[i];
  }
  double *filled = calloc((size_t)count + 1, sizeof *filled);
  void *cast = calloc((size_t)count + 1, sizeof *filled);
  for (int64_t i = 0; i < count; i++) {
    filled[i] = values != NULL ? values[i] : -7;
  }
  if (dtype == DC_FLOAT64) {
    memcpy(cast, filled, (size_t)count * sizeof *filled);
  } else {
    dc__cast(cast, dtype, filled, DC_FLOAT64, count);
  }
  const tensor_pair w = pair_of(cast, dtype, shape, ndim);
  free(filled);
  free(cast);
  return w;
}

/* A batch of `b` matrices, or a single one if b is -1. */
static inline tensor_pair matrix_pair(const double *values, int32_t dtype, int64_t b, int64_t rows, int64_t cols) {
  const dc_tensor t = b < 0 ? matrix(NULL, dtype, rows, cols) : batch(NULL, dtype, b, rows, cols);
  return number_pair(values, dtype, t.shape, t.ndim);
}

static inline void free_pair(tensor_pair *w) {
  free(w->data[0]);
  card->ops->free(card, w->data[1], w->bytes + 1, DC_MEMORY_DEVICE);
}

/* The largest difference, relative to the largest element. */
static inline double relative_gap(const tensor_pair *w) {
  void *host_copy = calloc(1, w->bytes + 1);
  double *values[2] = {calloc((size_t)w->count + 1, sizeof(double)), calloc((size_t)w->count + 1, sizeof(double))};
  double largest = 0, gap = 0;
  copy(host_copy, w->data[1], w->bytes);
  for (int k = 0; k < 2; k++) {
    const void *from = k == 0 ? w->data[0] : host_copy;
    if (w->t[0].dtype == DC_FLOAT64) {
      memcpy(values[k], from, w->bytes);
    } else {
      dc__cast(values[k], DC_FLOAT64, from, w->t[0].dtype, w->count);
    }
  }
  for (int64_t i = 0; i < w->count; i++) {
    largest = fmax(largest, fabs(values[0][i]));
  }
  gap = largest_gap(values[0], values[1], w->count);
  free(values[0]);
  free(values[1]);
  free(host_copy);
  return gap / (largest > 0 ? largest : 1);
}

/* BOTH() makes the call on both devices, whose status and text must agree. */
static char cpu_text[512];
static inline dc_linalg *linalg_of(int k) {
  return k == 0 ? linalg : cuda_linalg;
}
static inline void expect_same_status(int k, dc_status status, dc_status *first) {
  if (k == 0) {
    *first = status;
    snprintf(cpu_text, sizeof cpu_text, "%s", status == DC_OK ? "" : dc_last_error());
  } else if (status != *first || (status != DC_OK && strcmp(cpu_text, dc_last_error()) != 0)) {
    fail_msg("CUDA %d: %s; CPU %d: %s", (int)status, dc_last_error(), (int)*first, cpu_text);
  }
}
#define BOTH(call)                            \
  do {                                        \
    dc_status first_ = DC_OK;                 \
    for (int k = 0; k < 2; k++) {             \
      expect_same_status(k, (call), &first_); \
    }                                         \
  } while (0)

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_both, close_both)

#endif
