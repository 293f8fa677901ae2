/* The same call on the CPU and on the device: tensors in both memories, and what must agree. On the simulated driver,
 * or on a card (tests/card). */
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
static dc_linalg *there; /* on it */

static inline int open_both(void **state) {
#ifndef ON_CARD
  cudasim_reset();
#endif
  if (set_up(state) != 0 || dc_device_open("cuda", NULL, &card) != DC_OK ||
      dc_linalg_create(card, NULL, &there) != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  return 0;
}

static inline int close_both(void **state) {
  dc_linalg_destroy(there);
  dc_device_destroy(card);
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return tear_down(state);
}

#ifndef ON_CARD
/* How often `counted` is called while all that a test has is used, with the call of `failing` after `before` others
 * refused; NULL: none. */
typedef int (*use_fn)(void **state, const char *counted, const char *failing, int before);

/* Every `step`-th call of each function fails in turn. */
static inline void fail_in_turn(void **state, use_fn use, const char *const *functions, size_t count, int step) {
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

/* ---- tensors here and there ---- */

/* The same elements in both memories, and tensors of a shape over them. */
typedef struct twin {
  void *data[2];
  dc_tensor t[2];
  int64_t count;
  size_t bytes;
} twin;

static inline void copy(void *to, const void *from, size_t bytes) {
  dc__stream_copy(card->internal_stream, to, from, bytes);
  dc__device_sync_internal(card, NULL);
}

/* Of a shape that outlives it; data as the type has it. */
static inline twin twin_of(const void *data, int32_t dtype, const int64_t *shape, int32_t ndim) {
  twin w = {.count = 1};
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

/* The same of numbers; values NULL: all are -7. */
static inline twin numbers(const double *values, int32_t dtype, const int64_t *shape, int32_t ndim) {
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
  const twin w = twin_of(cast, dtype, shape, ndim);
  free(filled);
  free(cast);
  return w;
}

/* A batch of `b` matrices; b -1: one. */
static inline twin twins(const double *values, int32_t dtype, int64_t b, int64_t rows, int64_t cols) {
  const dc_tensor t = b < 0 ? matrix(NULL, dtype, rows, cols) : batch(NULL, dtype, b, rows, cols);
  return numbers(values, dtype, t.shape, t.ndim);
}

static inline void end(twin *w) {
  free(w->data[0]);
  card->ops->free(card, w->data[1], w->bytes + 1, DC_MEMORY_DEVICE);
}

/* The largest difference over the largest element. */
static inline double apart(const twin *w) {
  void *brought = calloc(1, w->bytes + 1);
  double *values[2] = {calloc((size_t)w->count + 1, sizeof(double)), calloc((size_t)w->count + 1, sizeof(double))};
  double most = 0, gap = 0;
  copy(brought, w->data[1], w->bytes);
  for (int k = 0; k < 2; k++) {
    const void *from = k == 0 ? w->data[0] : brought;
    if (w->t[0].dtype == DC_FLOAT64) {
      memcpy(values[k], from, w->bytes);
    } else {
      dc__cast(values[k], DC_FLOAT64, from, w->t[0].dtype, w->count);
    }
  }
  for (int64_t i = 0; i < w->count; i++) {
    most = fmax(most, fabs(values[0][i]));
  }
  gap = largest_gap(values[0], values[1], w->count);
  free(values[0]);
  free(values[1]);
  free(brought);
  return gap / (most > 0 ? most : 1);
}

/* The call on both sides, whose status and text must agree. */
static char text_here[512];
static inline dc_linalg *side(int k) {
  return k == 0 ? linalg : there;
}
static inline void agree(int k, dc_status status, dc_status *first) {
  if (k == 0) {
    *first = status;
    snprintf(text_here, sizeof text_here, "%s", status == DC_OK ? "" : dc_last_error());
  } else if (status != *first || (status != DC_OK && strcmp(text_here, dc_last_error()) != 0)) {
    fail_msg("there %d: %s; here %d: %s", (int)status, dc_last_error(), (int)*first, text_here);
  }
}
#define BOTH(call)                \
  do {                            \
    dc_status first_ = DC_OK;     \
    for (int k = 0; k < 2; k++) { \
      agree(k, (call), &first_);  \
    }                             \
  } while (0)

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_both, close_both)

#endif
