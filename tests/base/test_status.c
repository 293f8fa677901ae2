/* Statuses and the last error of a thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static void test_statuses(void **state) {
  (void)state;
  assert_string_equal(dc_status_name(DC_OK), "DC_OK");
  assert_string_equal(dc_status_name(DC_E_PEER_DEAD), "DC_E_PEER_DEAD");
  assert_string_equal(dc_status_name(12345), "DC_E_UNKNOWN");
  assert_string_equal(dc_status_string(-7), "unknown status");
  assert_int_equal(dc__fail(DC_E_SHAPE, "x = %d", 3), DC_E_SHAPE);
  assert_string_equal(dc_last_error(), "x = 3");
  dc__fail(DC_E_SHAPE, "again: %s", dc_last_error()); /* its own text as an argument */
  assert_string_equal(dc_last_error(), "again: x = 3");
  char copy[13];
  int64_t needed = 0;
  assert_int_equal(dc_last_error_copy(copy, 12, &needed), DC_E_BUFFER_TOO_SMALL);
  assert_int_equal(needed, 13);
  assert_int_equal(dc_last_error_copy(copy, sizeof copy, NULL), DC_OK);
  assert_string_equal(copy, "again: x = 3");
  char longer[2000];
  memset(longer, 'a', sizeof longer - 1);
  longer[sizeof longer - 1] = '\0';
  dc__fail(DC_E_SHAPE, "%s", longer); /* cut, not overrun */
  assert_int_equal(strlen(dc_last_error()), 511);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_statuses),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
