/* Statuses and the last error of a thread. */
#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Sets a locale with a decimal comma. It is made here, since a machine need not have one: the file is that of
 * `localedef -i de_DE -f UTF-8` of glibc. Other C libraries have a point in every locale. */
static void set_comma_locale(void) {
#ifdef __GLIBC__
  static const uint32_t words[] = {0x20031115 ^ LC_NUMERIC, 6,   32,  34,           36, 40, 44, 48,
                                   ',' | '.' << 16,         771, ',', (uint32_t)'.'};
  static char folder[] = "/tmp/dc-locale-XXXXXX";
  char path[64];
  assert_non_null(mkdtemp(folder));
  assert_int_equal(setenv("LOCPATH", folder, 1), 0);
  (void)snprintf(path, sizeof path, "%s/comma", folder);
  assert_int_equal(mkdir(path, 0700), 0);
  (void)snprintf(path, sizeof path, "%s/comma/LC_NUMERIC", folder);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(words, 1, sizeof words, file), sizeof words);
  assert_int_equal(fwrite("UTF-8", 1, 6, file), 6);
  assert_int_equal(fclose(file), 0);
  assert_non_null(setlocale(LC_NUMERIC, "comma"));
  assert_int_equal(remove(path), 0);
  (void)snprintf(path, sizeof path, "%s/comma", folder);
  assert_int_equal(rmdir(path), 0);
  assert_int_equal(rmdir(folder), 0);
#endif
}

static void test_numbers_have_a_point_in_every_locale(void **state) {
  (void)state;
  char text[16], part[16], before[16];
  set_comma_locale();
  (void)snprintf(before, sizeof before, "%.1f", 1.5);
#ifdef __GLIBC__
  assert_string_equal(before, "1,5");
#endif
  dc__fail(DC_E_INVALID, "lr = %g, must be >= 0", -1.5);
  assert_string_equal(dc_last_error(), "lr = -1.5, must be >= 0");
  dc__print(part, sizeof part, "%.1f s", 2.5);
  assert_string_equal(part, "2.5 s");
  (void)snprintf(text, sizeof text, "%.1f", 1.5); /* the program's locale is as before */
  assert_string_equal(text, before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_statuses),
      cmocka_unit_test(test_numbers_have_a_point_in_every_locale),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
