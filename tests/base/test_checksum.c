/* Checksums: any single changed bit shows, and data in pieces of whole words give the same checksum as in one piece. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static void test_single_changes(void **state) {
  (void)state;
  unsigned char data[37];
  for (size_t i = 0; i < sizeof data; i++) {
    data[i] = (unsigned char)(i * 7);
  }
  for (size_t bytes = 1; bytes <= sizeof data; bytes++) {
    const uint64_t whole = dc__checksum(DC__CHECKSUM, data, bytes);
    for (size_t bit = 0; bit < 8 * bytes; bit++) {
      data[bit / 8] ^= (unsigned char)(1U << bit % 8);
      assert_true(dc__checksum(DC__CHECKSUM, data, bytes) != whole);
      data[bit / 8] ^= (unsigned char)(1U << bit % 8);
    }
  }
}

static void test_pieces(void **state) {
  (void)state;
  const char text[] = "a text of more than two words";
  const uint64_t first = dc__checksum(DC__CHECKSUM, text, 16);
  assert_true(dc__checksum(first, text + 16, sizeof text - 16) == dc__checksum(DC__CHECKSUM, text, sizeof text));
  assert_true(dc__checksum(DC__CHECKSUM, NULL, 0) == DC__CHECKSUM);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_single_changes),
      cmocka_unit_test(test_pieces),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
