/* Element types, and tensor views of the caller. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static dc_status read_tensor(const dc_tensor *t, int64_t *numel) {
  dc_tensor copy;
  return dc__tensor_read("f", "t", t, false, &copy, numel);
}

static void test_tensors(void **state) {
  (void)state;
  float data[24];
  const int64_t shape[3] = {2, 3, 4}, rows[3] = {12, 4, 1}, columns[3] = {1, 2, 6}, ones[3] = {1, 3, 1},
                odd[3] = {99, 1, 77};
  int64_t numel;
  dc_tensor t = {.struct_size = sizeof t, .data = data, .shape = shape, .ndim = 3, .dtype = DC_FLOAT32};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 24);
  t.strides = rows;
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  t.strides = columns;
  assert_int_equal(read_tensor(&t, &numel), DC_E_SHAPE);
  t.shape = ones;
  t.strides = odd; /* strides of dimensions of length 1 are ignored */
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  t = (dc_tensor){.struct_size = sizeof t, .data = data, .dtype = DC_FLOAT32};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 1); /* a scalar */
  const int64_t empty[2] = {0, 5}, huge[3] = {1 << 30, 1 << 30, 1 << 30}, empty_huge[3] = {0, 1 << 30, 1 << 30};
  t = (dc_tensor){.struct_size = sizeof t, .shape = empty, .ndim = 2, .dtype = DC_FLOAT32};
  assert_int_equal(read_tensor(&t, &numel), DC_OK);
  assert_int_equal(numel, 0);
  t.shape = huge;
  t.ndim = 3;
  assert_int_equal(read_tensor(&t, &numel), DC_E_SHAPE);
  t.shape = empty_huge;
  assert_int_equal(read_tensor(&t, &numel), DC_E_SHAPE);
  for (int32_t dtype = -1; dtype <= 11; dtype++) {
    bool known = dtype >= DC_FLOAT32 && dtype <= DC_BOOL;
    assert_int_equal(dc_dtype_size(dtype) > 0, known);
    assert_int_equal(strcmp(dc_dtype_name(dtype), "unknown") == 0, !known && dtype != 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tensors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
