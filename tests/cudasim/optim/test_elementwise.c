/* AdamW and SGD on the device compared with the CPU, bit for bit: weights and state of every type, parts of parameters,
 * and odd lengths. Gradients may be missing, or not finite. Each side saves states and loads the other's. On the
 * simulated driver, or on a card (tests/card). */
#include "harness.h"

#ifndef ON_CARD
#include "cudasim.h"
#endif
#include "kernels/kernels.h"
#include "support/steps.h"

enum { PARAMS = 19, MOST = 3000, STEPS = 4 };

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};

/* One side: on the CPU or on the device. */
typedef struct device_optimizer {
  dc_device *device;
  dc_linalg *linalg;
  dc_optimizer *optimizer;
  void *weights[PARAMS], *grads[PARAMS];
} device_optimizer;

static device_optimizer pair[2];
static int64_t counts[PARAMS];

static int32_t weight_type(int i) {
  return dtypes[i % 3];
}
static int32_t grad_type(int i) {
  return dtypes[i / 3 % 3];
}
/* Every fifth array is misaligned for vectors. */
static size_t shift(int i, int32_t dtype) {
  return i % 5 == 4 ? dc_dtype_size(dtype) : 0;
}

static void put(const device_optimizer *s, void *to, const void *from, size_t bytes) {
  dc__stream_copy(s->device->internal_stream, to, from, bytes);
  dc__device_sync_internal(s->device, NULL);
}

static void *take(const device_optimizer *s) {
  void *ptr;
  assert_int_equal(s->device->ops->alloc(s->device, 4 * MOST + 4, DC_MEMORY_DEVICE, &ptr), DC_OK);
  return ptr;
}

static int set_up(void **state) {
  (void)state;
  static const int64_t some[] = {0, 1, 3, 4, 257, MOST, 1000};
  for (int k = 0; k < 2; k++) {
    device_optimizer *s = &pair[k];
    if (dc_device_open(k == 0 ? "cpu" : "cuda", NULL, &s->device) != DC_OK ||
        dc_linalg_create(s->device, NULL, &s->linalg) != DC_OK) {
      fail_msg("%s", dc_last_error());
    }
    for (int i = 0; i < PARAMS; i++) {
      counts[i] = some[i % (int)DC__COUNT(some)];
      s->weights[i] = take(s);
      s->grads[i] = take(s);
    }
  }
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++) {
    device_optimizer *s = &pair[k];
    for (int i = 0; i < PARAMS; i++) {
      s->device->ops->free(s->device, s->weights[i], 4 * MOST + 4, DC_MEMORY_DEVICE);
      s->device->ops->free(s->device, s->grads[i], 4 * MOST + 4, DC_MEMORY_DEVICE);
    }
    dc_linalg_destroy(s->linalg);
    dc_device_destroy(s->device);
  }
#ifndef ON_CARD
  assert_int_equal(cudasim_live(), 0);
#endif
  return 0;
}

/* Fills both sides with the same numbers. */
static void fill(int i, bool grad, uint64_t seed) {
  static float values[MOST];
  static _Alignas(64) char bytes[4 * MOST];
  const int32_t dtype = grad ? grad_type(i) : weight_type(i);
  for (int j = 0; j < MOST; j++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    values[j] = (float)(int32_t)(seed >> 32) / 4294967296.0f;
  }
  dc__cast(bytes, dtype, values, DC_FLOAT32, MOST);
  for (int k = 0; k < 2; k++) {
    char *to = grad ? pair[k].grads[i] : pair[k].weights[i];
    put(&pair[k], to + shift(i, dtype), bytes, (size_t)counts[i] * dc_dtype_size(dtype));
  }
}

static void add_params(device_optimizer *s) {
  for (int i = 0; i < PARAMS; i++) {
    const int64_t shape[] = {2, MOST};
    assert_int_equal(dc_optimizer_add_param(s->optimizer, 0, shape, 2, i, counts[i], weight_type(i), NULL), DC_OK);
  }
}

static dc_status step(device_optimizer *s, double scale) {
  dc_tensor weights[PARAMS], grads[PARAMS];
  for (int i = 0; i < PARAMS; i++) {
    weights[i] = flat((char *)s->weights[i] + shift(i, weight_type(i)), &counts[i], weight_type(i));
    grads[i] = flat((char *)s->grads[i] + shift(i, grad_type(i)), &counts[i], grad_type(i));
    if (i % 7 == 6) {
      grads[i].dtype = DC_DTYPE_NONE;
    }
  }
  return dc_optimizer_step(s->optimizer, weights, grads, sizeof *weights, PARAMS, scale);
}

static void compare(const char *what, int i, const void *a, const void *b, size_t bytes) {
  static char copy[4 * MOST];
  dc__stream_copy(pair[1].device->internal_stream, copy, b, bytes);
  dc__device_sync_internal(pair[1].device, NULL);
  if (memcmp(a, copy, bytes) != 0) {
    fail_msg("%s of parameter %d differs", what, i);
  }
}

static void compare_all(void) {
  for (int i = 0; i < PARAMS; i++) {
    const char *name;
    const size_t at = shift(i, weight_type(i));
    compare("the weight", i, (char *)pair[0].weights[i] + at, (char *)pair[1].weights[i] + at,
            (size_t)counts[i] * dc_dtype_size(weight_type(i)));
    for (int piece = 0; dc_optimizer_get_state_name(pair[0].optimizer, i, piece, &name) == DC_OK && name != NULL;
         piece++) {
      dc_tensor views[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
      assert_int_equal(dc_optimizer_get_state(pair[0].optimizer, i, name, &views[0]), DC_OK);
      assert_int_equal(dc_optimizer_get_state(pair[1].optimizer, i, name, &views[1]), DC_OK);
      const size_t bytes = views[0].dtype == DC_INT64 ? sizeof(int64_t) : (size_t)counts[i] * sizeof(float);
      compare(name, i, views[0].data, views[1].data, bytes);
    }
  }
}

static void saved_by_one_and_loaded_by_the_other(void) {
  int64_t bytes[2];
  for (int k = 0; k < 2; k++) {
    assert_int_equal(dc_optimizer_get_save_bytes(pair[k].optimizer, &bytes[k]), DC_OK);
  }
  assert_int_equal(bytes[0], bytes[1]);
  char *saved[2] = {test_malloc((size_t)bytes[0]), test_malloc((size_t)bytes[0])};
  for (int k = 0; k < 2; k++) {
    assert_int_equal(dc_optimizer_save(pair[k].optimizer, saved[k], bytes[0]), DC_OK);
  }
  assert_memory_equal(saved[0], saved[1], (size_t)bytes[0]);
  assert_int_equal(step(&pair[1], 1), DC_OK); /* and back to the first side */
  assert_int_equal(dc_optimizer_load(pair[1].optimizer, saved[0], bytes[0]), DC_OK);
  test_free(saved[0]);
  test_free(saved[1]);
}

/* Makes steps on both sides, from the same weights. */
static void run(void) {
  for (int i = 0; i < PARAMS; i++) {
    fill(i, false, (uint64_t)i);
  }
  add_params(&pair[0]);
  add_params(&pair[1]);
  for (int n = 0; n < STEPS; n++) {
    for (int i = 0; i < PARAMS; i++) {
      fill(i, true, (uint64_t)(n * PARAMS + i));
    }
    if (n == 2) { /* the caller changes weights */
      fill(1, false, 77);
      fill(5, false, 78);
    }
    for (int k = 0; k < 2; k++) {
      assert_int_equal(dc_optimizer_set_lr(pair[k].optimizer, 0, 0.1 / (n + 1)), DC_OK);
      if (step(&pair[k], n == 0 ? 1 : 0.37) != DC_OK) {
        fail_msg("%s", dc_last_error());
      }
    }
    compare_all();
  }
  saved_by_one_and_loaded_by_the_other();
  for (int k = 0; k < 2; k++) {
    dc_optimizer_destroy(pair[k].optimizer);
  }
}

static void test_adamw(void **state) {
  (void)state;
  dc_adamw_options options = DC_ADAMW_OPTIONS_INIT;
  for (int variant = 0; variant < 3; variant++) {
    options.weight_decay = variant == 1 ? 0.01 : 0;
    options.amsgrad = variant == 1;
    options.maximize = variant == 2;
    for (int k = 0; k < 2; k++) {
      assert_int_equal(dc_adamw_create(pair[k].linalg, &options, &pair[k].optimizer), DC_OK);
    }
    run();
  }
}

static void test_sgd(void **state) {
  (void)state;
  dc_sgd_options options = DC_SGD_OPTIONS_INIT;
  for (int variant = 0; variant < 4; variant++) {
    options.momentum = variant == 0 ? 0 : 0.9;
    options.weight_decay = variant < 2 ? 0.01 : 0;
    options.nesterov = variant == 2;
    options.dampening = variant == 3 ? 0.3 : 0;
    options.maximize = variant == 3;
    for (int k = 0; k < 2; k++) {
      assert_int_equal(dc_sgd_create(pair[k].linalg, &options, &pair[k].optimizer), DC_OK);
    }
    run();
  }
}

/* The text names the first parameter, nothing changes, and the device stays usable. */
static void test_gradients_that_are_not_finite(void **state) {
  (void)state;
  const float infinite = __builtin_inff();
  const uint16_t nan = 0x7fc0; /* bfloat16 */
  dc_adamw_options options = DC_ADAMW_OPTIONS_INIT;
  options.check_finite = 1;
  for (int k = 0; k < 2; k++) {
    assert_int_equal(dc_adamw_create(pair[k].linalg, &options, &pair[k].optimizer), DC_OK);
    add_params(&pair[k]);
  }
  for (int i = 0; i < PARAMS; i++) {
    fill(i, false, (uint64_t)i);
    fill(i, true, (uint64_t)i);
  }
  for (int k = 0; k < 2; k++) {
    put(&pair[k], (char *)pair[k].grads[18] + 4 * 255, &infinite, sizeof infinite);
    assert_int_equal(step(&pair[k], 1), DC_E_NOT_FINITE);
    assert_non_null(strstr(dc_last_error(), "grads[18]"));
    put(&pair[k], (char *)pair[k].grads[8] + 2, &nan, sizeof nan); /* behind its only element, so it must not count */
    put(&pair[k], (char *)pair[k].grads[16] + 2, &nan, sizeof nan);
    assert_int_equal(step(&pair[k], 1), DC_E_NOT_FINITE);
    assert_non_null(strstr(dc_last_error(), "grads[16]"));
    assert_int_equal(steps_of(pair[k].optimizer), 0);
  }
  compare_all();
  for (int i = 0; i < PARAMS; i++) {
    fill(i, true, (uint64_t)i);
  }
  assert_int_equal(step(&pair[0], 1), DC_OK);
  assert_int_equal(step(&pair[1], 1), DC_OK);
  compare_all();
  for (int k = 0; k < 2; k++) {
    dc_optimizer_destroy(pair[k].optimizer);
  }
}

static void test_elements_that_lie_askew(void **state) {
  (void)state;
  dc_adamw_options options = DC_ADAMW_OPTIONS_INIT;
  assert_int_equal(dc_adamw_create(pair[1].linalg, &options, &pair[1].optimizer), DC_OK);
  assert_int_equal(dc_optimizer_add_param(pair[1].optimizer, 0, counts + 1, 1, 0, 1, DC_FLOAT32, NULL), DC_OK);
  dc_tensor weight = flat((char *)pair[1].weights[0] + 2, &counts[1], DC_FLOAT32);
  dc_tensor grad = flat(pair[1].grads[0], &counts[1], DC_FLOAT32);
  assert_int_equal(dc_optimizer_step(pair[1].optimizer, &weight, &grad, sizeof grad, 1, 1), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "dc_optimizer_step: weights[0].data = 0x"));
  assert_non_null(strstr(dc_last_error(), ", must be a multiple of 4"));
  weight.data = pair[1].weights[0];
  grad.data = (char *)pair[1].grads[0] + 1;
  assert_int_equal(dc_optimizer_step(pair[1].optimizer, &weight, &grad, sizeof grad, 1, 1), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "dc_optimizer_step: grads[0].data = 0x"));
  dc_optimizer_destroy(pair[1].optimizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_adamw),
      cmocka_unit_test(test_sgd),
      cmocka_unit_test(test_gradients_that_are_not_finite),
      cmocka_unit_test(test_elements_that_lie_askew),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
