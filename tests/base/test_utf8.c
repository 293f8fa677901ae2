/* Each character of UTF-8, and bytes that are none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static size_t encode(uint32_t code, char text[4]) {
  const size_t bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  for (size_t i = bytes - 1; i > 0; i--) {
    text[i] = (char)(0x80 | (code & 0x3f));
    code >>= 6;
  }
  text[0] = (char)(bytes == 1 ? code : (0xf00U >> bytes & 0xff) | code);
  return bytes;
}

static void test_all_characters(void **state) {
  (void)state;
  for (uint32_t code = 0; code <= 0x10ffff; code++) {
    char text[4] = "";
    uint32_t read = 0;
    const size_t bytes = encode(code, text);
    const bool surrogate = code >= 0xd800 && code <= 0xdfff;
    assert_int_equal(dc__utf8_decode(text, 4, &read), surrogate ? 0 : bytes);
    assert_true(surrogate || read == code);
    assert_int_equal(dc__utf8_decode(text, bytes, &read), surrogate ? 0 : bytes);
    assert_true(bytes == 1 || dc__utf8_decode(text, bytes - 1, &read) == 0);
  }
}

static void test_other_bytes(void **state) {
  static const char *const texts[] = {
      "\x80",
      "\xbf",
      "\xc0\x80",
      "\xc1\xbf",
      "\xe0\x80\x80",
      "\xe0\x9f\xbf",
      "\xf0\x80\x80\x80",
      "\xf0\x8f\xbf\xbf",
      "\xf4\x90\x80\x80",
      "\xf5\x80\x80\x80",
      "\xff",
      "\xc3",
      "\xe2\x82",
      "\xc3\x41",
  };
  uint32_t code;
  (void)state;
  for (size_t i = 0; i < DC__COUNT(texts); i++) {
    assert_int_equal(dc__utf8_decode(texts[i], strlen(texts[i]) + 1, &code), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_characters), cmocka_unit_test(test_other_bytes)};
  return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
