/* Results that the manual gives as constants, and results for NULL. Bindings rely on both, and the check of the
 * prototypes does not cover them. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dc_api.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void test_dtypes(void **state) {
  (void)state;
  static const struct {
    int32_t dtype;
    size_t size;
    const char *name;
  } all[] = {
      {DC_DTYPE_NONE, 0, "none"},   {DC_FLOAT32, 4, "float32"}, {DC_FLOAT64, 8, "float64"}, {DC_FLOAT16, 2, "float16"},
      {DC_BFLOAT16, 2, "bfloat16"}, {DC_INT8, 1, "int8"},       {DC_INT32, 4, "int32"},     {DC_INT64, 8, "int64"},
      {DC_UINT8, 1, "uint8"},       {DC_INT16, 2, "int16"},     {DC_BOOL, 1, "bool"},       {-1, 0, "unknown"},
      {999, 0, "unknown"},          {INT32_MAX, 0, "unknown"},  {INT32_MIN, 0, "unknown"},
  };
  for (size_t i = 0; i < COUNT(all); i++) {
    assert_int_equal(dc_dtype_size(all[i].dtype), all[i].size);
    assert_string_equal(dc_dtype_name(all[i].dtype), all[i].name);
  }
}

static void test_status_names(void **state) {
  (void)state;
#define ROW(name, value) \
  { name, value, #name }
  static const struct {
    dc_status status, value;
    const char *name;
  } all[] = {
      ROW(DC_OK, 0),
      ROW(DC_E_INVALID, -100),
      ROW(DC_E_NOT_FOUND, -101),
      ROW(DC_E_EXISTS, -102),
      ROW(DC_E_STATE, -103),
      ROW(DC_E_STAGE, -104),
      ROW(DC_E_DTYPE, -105),
      ROW(DC_E_SHAPE, -106),
      ROW(DC_E_BUSY, -107),
      ROW(DC_E_NO_MEMORY, -108),
      ROW(DC_E_NO_DEVICE, -109),
      ROW(DC_E_UNSUPPORTED, -110),
      ROW(DC_E_BUFFER_TOO_SMALL, -111),
      ROW(DC_E_NOT_FINITE, -112),
      ROW(DC_E_NOT_SYMMETRIC, -113),
      ROW(DC_E_NOT_POSITIVE, -114),
      ROW(DC_E_NOT_CONVERGED, -115),
      ROW(DC_E_MISMATCH, -200),
      ROW(DC_E_TIMEOUT, -201),
      ROW(DC_E_PEER_DEAD, -202),
      ROW(DC_E_ABORTED, -203),
      ROW(DC_E_CALLBACK, -204),
      ROW(DC_E_SYSTEM, -205),
      ROW(DC_E_CORRUPT, -206),
      ROW(DC_E_DEVICE, -207),
      ROW(DC_E_INTERNAL, -900),
      {1, 1, "DC_E_UNKNOWN"},
      {-1, -1, "DC_E_UNKNOWN"},
      {INT32_MIN, INT32_MIN, "DC_E_UNKNOWN"},
  };
#undef ROW
  for (size_t i = 0; i < COUNT(all); i++) {
    assert_int_equal(all[i].status, all[i].value);
    assert_string_equal(dc_status_name(all[i].status), all[i].name);
    assert_non_null(dc_status_string(all[i].status));
    assert_true(dc_status_string(all[i].status)[0] != 0);
  }
}

static void test_results_for_null(void **state) {
  (void)state;
  assert_int_equal(dc_has_feature(NULL), 0);
  assert_string_equal(dc_device_name(NULL), "");
  assert_null(dc_buffer_retain(NULL));
  assert_null(dc_buffer_data(NULL));
  assert_int_equal(dc_buffer_bytes(NULL), 0);
  assert_int_equal(dc_comm_rank(NULL), -1);
  assert_int_equal(dc_comm_size(NULL), -1);
  assert_int_equal(dc_is_profiling(NULL), 0);
  assert_string_equal(dc_linalg_solver(NULL), "");
  assert_int_equal(dc_device_count(NULL), 0);
  assert_non_null(dc_get_optimal_device(NULL));
  assert_int_equal(dc_device_count("cpu"), 1);
  assert_int_equal(dc_device_count("tpu"), 0);
  assert_string_equal(dc_op_name(-1), "unknown");
  assert_string_equal(dc_op_name(INT32_MAX), "unknown");
}

/* None of these calls does anything. */
static void test_null_does_nothing(void **state) {
  (void)state;
  dc_tensor_init(NULL, sizeof(dc_tensor));
  dc_config_init(NULL, sizeof(dc_config));
  dc_device_destroy(NULL);
  dc_stream_destroy(NULL);
  dc_event_destroy(NULL);
  dc_buffer_release(NULL);
  dc_comm_destroy(NULL);
  dc_comm_abort(NULL, "no reason");
  dc_context_destroy(NULL);
  dc_layer_destroy(NULL);
  dc_linalg_destroy(NULL);
  dc_optimizer_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_dtypes),
      cmocka_unit_test(test_status_names),
      cmocka_unit_test(test_results_for_null),
      cmocka_unit_test(test_null_does_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
