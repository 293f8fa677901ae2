/* Clocks: they do not go back, and the timeout of poll() is rounded up and bounded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/base.h"

static void test_clocks_do_not_go_back(void **state) {
  (void)state;
  int64_t now = dc__now_ns(), ticks = dc__ticks();
  for (int i = 0; i < 1000; i++) {
    const int64_t next = dc__now_ns(), next_ticks = dc__ticks();
    assert_true(next >= now && next_ticks >= ticks);
    now = next;
    ticks = next_ticks;
  }
}

static void test_poll_timeout(void **state) {
  (void)state;
  enum { HOUR_MS = 3600000 };
  assert_int_equal(dc__poll_timeout_ms(dc__now_ns() - 1), 0);
  assert_int_equal(dc__poll_timeout_ms(INT64_MIN / 2), 0);
  assert_int_equal(dc__poll_timeout_ms(INT64_MAX / 2), 1 << 30);
  const int64_t begin = dc__now_ns();
  const int timeout = dc__poll_timeout_ms(begin + HOUR_MS * INT64_C(1000000));
  const int64_t passed_ms = (dc__now_ns() - begin) / 1000000;
  assert_true(timeout <= HOUR_MS && timeout >= HOUR_MS - passed_ms - 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_clocks_do_not_go_back),
      cmocka_unit_test(test_poll_timeout),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
