/* CRC-32C: every implementation gives the table's value, for every length and in pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/base.h"

enum { WAYS = 4, SHORT = 1600, LONGEST = 80000 };

typedef uint32_t (*way)(uint32_t, const void *, size_t);

static void find_ways(way ways[WAYS]) {
  ways[0] = dc__crc32c_table;
  ways[1] = ways[2] = ways[3] = dc__crc32c;
#ifdef __x86_64__
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    ways[2] = dc__crc32c_sse42;
  }
  if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512vl")) {
    ways[3] = dc__crc32c_avx512;
  }
#endif
}

static void compare(const unsigned char *bytes, size_t length) {
  way ways[WAYS];
  const unsigned char *at = bytes + length % 8;
  const uint32_t expected = dc__crc32c_table(0, at, length);
  const size_t cut = length * 5 / 7;
  find_ways(ways);
  for (size_t w = 0; w < WAYS; w++) {
    assert_int_equal(ways[w](0, "123456789", 9), 0xe3069283); /* RFC 3720's catalogue value */
    assert_int_equal(ways[w](0, at, length), expected);
    assert_int_equal(ways[w](ways[w](0, at, cut), at + cut, length - cut), expected);
  }
}

/* Long ones go in blocks of 8 and of 24 KiB. */
static void test_crc32c(void **state) {
  (void)state;
  static unsigned char bytes[LONGEST + 8];
  for (uint32_t i = 0, x = 1; i < sizeof bytes; i++) {
    x = x * 1664525 + 1013904223;
    bytes[i] = (unsigned char)(x >> 24);
  }
  for (size_t length = 0; length <= SHORT; length++) {
    compare(bytes, length);
  }
  for (size_t block = 8192; block + 700 <= LONGEST; block += 8192) {
    for (size_t more = 0; more <= 700; more += 37) {
      compare(bytes, block - 1 + more);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_crc32c),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
