/* Text of foreign origin in error messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "comm/escape.h"

static void test_escape(void **state) {
  (void)state;
  static const char *const cases[][2] = {
      {"plain, \"quoted\" and \\", "plain, \"quoted\" and \\"},
      {"a\nb\rc\td\x1b[0m\x7f", "a\\nb\\rc\\td\\x1b[0m\\x7f"},
      {"\xc3\xa9 \xe6\xa8\xa1 \xf0\x9f\x98\x80", "\xc3\xa9 \xe6\xa8\xa1 \xf0\x9f\x98\x80"},
      {"\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xc3", "\\xc0\\xaf \\xed\\xa0\\x80 \\xf4\\x90\\x80\\x80 \\xc3"},
      {"\xc2\x9b \xe2\x80\xae \xe2\x80\xa8", "\\xc2\\x9b \\xe2\\x80\\xae \\xe2\\x80\\xa8"},
  };
  for (size_t i = 0; i < DC__COUNT(cases); i++) {
    char text[200], again[200];
    dc__escape(text, sizeof text, cases[i][0], strlen(cases[i][0]));
    assert_string_equal(text, cases[i][1]);
    dc__escape(again, sizeof again, text, strlen(text));
    assert_string_equal(again, text);
  }
  char small[7] = "", own[8] = "\x01\x02\x03";
  dc__escape(small, sizeof small, "abc\x01z", 5);
  assert_string_equal(small, "abc"); /* half a unit is none */
  dc__escape(own, sizeof own, own, 3);
  assert_string_equal(own, "\\x01");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_escape),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
