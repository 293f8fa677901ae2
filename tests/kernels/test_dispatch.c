/* Which kernels are in use: those that the processor supports, limited by the environment's LIBDC_CPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dc_api.h"
#include "kernels/kernels.h"

enum { HIGHEST = 4, REFUSED = 10, NOT_NAMED = 11 };

static const char *const names[] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};

/* The variable is read once in a process, so each value runs in its own process. Returns the level that the process
 * gets, REFUSED if the value keeps it from opening a CPU device, or NOT_NAMED if the error does not say why. */
static int level_with(const char *value) {
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    dc_device *device = NULL;
    setenv("LIBDC_CPU", value, 1);
    dc_status status = dc_device_open("cpu", NULL, &device);
    const char *text = dc_last_error();
    bool named = strstr(text, "LIBDC_CPU") != NULL && strstr(text, "avx512bf16") != NULL && strstr(text, value) != NULL;
    dc_device_destroy(device);
    _exit(status == DC_OK ? dc__kernels_level() : status == DC_E_INVALID && named ? REFUSED : NOT_NAMED);
  }
  int how;
  assert_int_equal(waitpid(child, &how, 0), child);
  assert_true(WIFEXITED(how));
  return WEXITSTATUS(how);
}

/* This test comes first, since no kernel may have been used before a child starts. */
static void test_environment(void **state) {
  (void)state;
  int highest = level_with("");
  assert_in_range(highest, 0, HIGHEST);
  for (int level = 0; level <= HIGHEST; level++) {
    assert_int_equal(level_with(names[level]), level < highest ? level : highest);
  }
  static const char *const none[] = {"AVX2", "avx", "avx2 ", "sse", "avx512bf16x", "amxx"};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    assert_int_equal(level_with(none[i]), REFUSED);
  }
}

static void test_levels(void **state) {
  (void)state;
  int32_t highest = dc__kernels_limit(HIGHEST);
  assert_in_range(highest, 0, HIGHEST);
  assert_int_equal(dc_has_feature("avx2"), highest >= 1);
  assert_int_equal(dc_has_feature("avx512"), highest >= 2);
  assert_int_equal(dc_has_feature("avx512bf16"), highest >= 3);
  assert_int_equal(dc_has_feature("amx"), highest >= 4);
  assert_int_equal(dc__kernels_limit(0), 0);
  assert_int_equal(dc__kernels_level(), 0);
  assert_int_equal(dc_has_feature("avx2"), 0);
  assert_int_equal(dc__kernels_limit(-1), 0);
  assert_int_equal(dc__kernels_limit(99), highest);
  print_message("highest level here: %d\n", (int)highest);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_environment), cmocka_unit_test(test_levels)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
