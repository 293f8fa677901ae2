/* Sized structs: the library reads those of older and newer callers, and writes no further than the caller's struct
 * reaches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

typedef struct options {
  size_t struct_size;
  int64_t first;
  int64_t second; /* a later version's field */
} options;

enum { FIRST_VERSION = 16 };

/* Memory that ends at an inaccessible page. */
static char *before_a_guard(size_t bytes, char **page) {
  size_t size = (size_t)sysconf(_SC_PAGESIZE);
  *page = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(*page != MAP_FAILED);
  assert_int_equal(mprotect(*page + size, size, PROT_NONE), 0);
  return *page + size - bytes;
}

static dc_status read_as(const void *src, options *dst) {
  *dst = (options){sizeof *dst, 5, 7};
  return dc__read_options("f", "options", dst, sizeof *dst, src, FIRST_VERSION);
}

static void test_reading_structs(void **state) {
  (void)state;
  options got;
  assert_int_equal(read_as(NULL, &got), DC_OK);
  assert_int_equal(got.second, 7); /* NULL: the defaults */
  char *page;
  options *old = (options *)(void *)before_a_guard(FIRST_VERSION, &page);
  old->struct_size = FIRST_VERSION;
  old->first = 42;
  assert_int_equal(read_as(old, &got), DC_OK); /* from an older caller: no byte past its end is read */
  assert_int_equal(got.first, 42);
  assert_int_equal(got.second, 0);
  assert_int_equal(got.struct_size, sizeof got);
  for (size_t size = 0; size < FIRST_VERSION; size++) {
    old->struct_size = size;
    assert_int_equal(read_as(old, &got), DC_E_INVALID);
  }
  const size_t wild[] = {SIZE_MAX, 65537, 0xAAAAAAAAAAAAAAAA};
  for (size_t i = 0; i < DC__COUNT(wild); i++) {
    old->struct_size = wild[i];
    assert_int_equal(read_as(old, &got), DC_E_INVALID);
  }
  munmap(page, 2 * (size_t)sysconf(_SC_PAGESIZE));
  unsigned char newer[sizeof(options) + 8] = {0};
  size_t size = sizeof newer;
  memcpy(newer, &size, sizeof size);
  assert_int_equal(read_as(newer, &got), DC_OK); /* from a newer caller that uses no new field */
  for (size_t i = sizeof(options); i < sizeof newer; i++) {
    newer[i] = 1;
    assert_int_equal(read_as(newer, &got), DC_E_UNSUPPORTED);
    assert_non_null(strstr(dc_last_error(), "this version does not know"));
    newer[i] = 0;
  }
}

static void test_writing_structs(void **state) {
  (void)state;
  const options src = {sizeof src, 1, 2};
  int64_t out[4] = {FIRST_VERSION, -1, -1, -1};
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_OK);
  assert_true(out[0] == FIRST_VERSION && out[1] == 1 && out[2] == -1); /* writes no further than the caller's struct */
  out[0] = 32;
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_OK);
  assert_true(out[0] == 32 && out[2] == 2 && out[3] == -1);
  assert_int_equal(dc__write_sized("f", "out", NULL, &src, sizeof src, FIRST_VERSION), DC_E_INVALID);
  out[0] = 8;
  assert_int_equal(dc__write_sized("f", "out", out, &src, sizeof src, FIRST_VERSION), DC_E_INVALID);
  dc_config config, by_macro = DC_CONFIG_INIT;
  dc_config_init(&config, sizeof config);
  assert_memory_equal(&config, &by_macro, sizeof config);
  dc_config_init(NULL, 8);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_reading_structs),
      cmocka_unit_test(test_writing_structs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
