/* CRC-32C: every implementation gives the table's value, for every length and in pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/base.h"

static void test_crc32c(void **state) {
  (void)state;
  uint32_t (*ways[])(uint32_t, const void *, size_t) = {
      dc__crc32c_table,
      dc__crc32c,
#ifdef __x86_64__
      __builtin_cpu_supports("sse4.2") ? dc__crc32c_sse42 : dc__crc32c,
      __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512vl") ? dc__crc32c_avx512 : dc__crc32c,
#endif
  };
  enum { LONGEST = 1600, WAYS = sizeof ways / sizeof *ways };
  unsigned char bytes[LONGEST + 8];
  for (uint32_t i = 0, x = 1; i < sizeof bytes; i++) {
    x = x * 1664525 + 1013904223;
    bytes[i] = (unsigned char)(x >> 24);
  }
  for (size_t w = 0; w < WAYS; w++) {
    assert_int_equal(ways[w](0, "123456789", 9), 0xe3069283); /* RFC 3720's catalogue value */
    for (size_t length = 0; length <= LONGEST; length++) {
      const unsigned char *at = bytes + length % 8;
      uint32_t expected = dc__crc32c_table(0, at, length);
      assert_int_equal(ways[w](0, at, length), expected);
      size_t cut = length * 5 / 7;
      assert_int_equal(ways[w](ways[w](0, at, cut), at + cut, length - cut), expected);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_crc32c),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
