/* Maps of int64 keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/base.h"

static void test_maps(void **state) {
  (void)state;
  enum { KEYS = 500 };
  static int values[KEYS];
  dc__map map = {0};
  for (int64_t i = 0; i < KEYS; i++) {
    assert_true(dc__map_put(&map, i * 4096 - 1000, &values[i])); /* addresses, say */
  }
  for (int64_t i = 0; i < KEYS; i += 2) {
    dc__map_remove(&map, i * 4096 - 1000);
  }
  dc__map_remove(&map, 12345); /* absent */
  assert_int_equal(map.count, KEYS / 2);
  for (int64_t i = 0; i < KEYS; i++) {
    assert_ptr_equal(dc__map_get(&map, i * 4096 - 1000), i % 2 == 0 ? NULL : &values[i]);
  }
  for (int64_t i = 0; i < map.count; i++) {
    assert_int_equal(map.keys[i], (2 * i + 1) * 4096 - 1000); /* in the order of insertion */
  }
  assert_true(dc__map_put(&map, INT64_MIN, &values[0]));
  assert_true(dc__map_put(&map, INT64_MIN, &values[1])); /* replaces */
  assert_ptr_equal(dc__map_get(&map, INT64_MIN), &values[1]);
  dc__map_clear(&map);
  assert_null(dc__map_get(&map, 4096));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_maps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
