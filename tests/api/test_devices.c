/* The list of devices, their memory, and tensors in it: point 50 of the second-order conformance list. */
#include "linalg_test.h"

static void test_50_devices(void **state) {
  (void)state;
  const char *reason = NULL;
  assert_int_equal(dc_is_cuda_available(), 0);
  assert_int_equal(dc_device_count("cuda"), 0);
  assert_int_equal(dc_device_count("cpu"), 1);
  assert_int_equal(dc_device_count(NULL), 0);
  assert_string_equal(dc_get_optimal_device(&reason), "cpu");
  assert_non_null(reason);
  dc_device_memory memory = DC_DEVICE_MEMORY_INIT;
  OK(dc_device_get_memory(device, &memory));
  assert_true(memory.total_bytes > 0 && memory.free_bytes > 0 && memory.free_bytes <= memory.total_bytes);
  int64_t shape[] = {3, 70};
  dc_tensor t = DC_TENSOR_INIT;
  OK(dc_tensor_create(device, shape, 2, DC_FLOAT64, &t));
  assert_true((uintptr_t)t.data % 256 == 0 && t.ndim == 2 && t.dtype == DC_FLOAT64);
  shape[0] = 5; /* the tensor keeps its own copy */
  assert_true(t.shape[0] == 3 && t.shape[1] == 70);
  for (int64_t i = 0; i < 210; i++) {
    assert_true(((double *)t.data)[i] == 0);
  }
  dc_device_memory after = DC_DEVICE_MEMORY_INIT;
  OK(dc_device_get_memory(device, &after));
  assert_true(after.reserved_bytes > memory.reserved_bytes);
  dc_buffer_release(t.buffer);
  OK(dc_device_get_memory(device, &after));
  assert_int_equal(after.reserved_bytes, memory.reserved_bytes);
  FAILS(dc_tensor_create(device, shape, 2, DC_DTYPE_NONE, &t), DC_E_DTYPE, "no element type");
  const int64_t huge[] = {INT64_C(1) << 50}, negative[] = {-1};
  FAILS(dc_tensor_create(device, huge, 1, DC_FLOAT64, &t), DC_E_NO_MEMORY, "dc_tensor_create");
  FAILS(dc_tensor_create(device, negative, 1, DC_FLOAT64, &t), DC_E_SHAPE, "-1");
  assert_true(strlen(dc_linalg_solver(linalg)) > 0);
  dc_linalg *plain = open_linalg(1, 1);
  assert_string_equal(dc_linalg_solver(plain), "libdc");
  dc_linalg_destroy(plain);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_50_devices),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
