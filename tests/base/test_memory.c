/* Host memory for bookkeeping: zeroed, grown without loss, and refused with an error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "refused_allocations.h"

static void test_zeroed(void **state) {
  (void)state;
  unsigned char *bytes = dc__calloc(3, 5);
  for (int i = 0; i < 15; i++) {
    assert_int_equal(bytes[i], 0);
  }
  dc__free(bytes);
  void *empty = dc__calloc(0, 8); /* not NULL, which would mean an error */
  assert_non_null(empty);
  dc__free(empty);
  char *text = dc__strdup("a name");
  assert_string_equal(text, "a name");
  dc__free(text);
}

static void test_arrays_grow(void **state) {
  (void)state;
  int64_t *values = NULL;
  int64_t capacity = 0;
  for (int64_t i = 0; i < 100; i++) {
    assert_true(dc__array_reserve((void **)&values, &capacity, i + 1, sizeof *values));
    assert_true(capacity > i && values[i] == 0);
    values[i] = i + 1;
  }
  assert_true(dc__array_reserve((void **)&values, &capacity, 1000, sizeof *values));
  for (int64_t i = 0; i < capacity; i++) {
    assert_int_equal(values[i], i < 100 ? i + 1 : 0);
  }
  dc__free(values);
}

static void test_too_much_is_refused(void **state) {
  (void)state;
  void *array = dc__calloc(8, 1), *before = array;
  int64_t capacity = 8;
  assert_false(dc__array_reserve(&array, &capacity, INT64_MAX / 4, 2));
  assert_non_null(strstr(dc_last_error(), "out of host memory"));
  assert_true(array == before && capacity == 8);
  dc__free(array);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_zeroed),
      cmocka_unit_test(test_arrays_grow),
      cmocka_unit_test(test_too_much_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
