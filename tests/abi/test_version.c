/* The first questions of a binding: is this the library that it was made for, and which features does it have? */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "dc_api.h"

static void test_versions_agree(void **state) {
  (void)state;
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", DC_VERSION_MAJOR, DC_VERSION_MINOR, DC_VERSION_PATCH);
  assert_string_equal(dc_version_string(), text);
  assert_int_equal(dc_api_version(), DC_API_VERSION);
  assert_int_equal(DC_API_VERSION, DC_VERSION_MAJOR * 1000000 + DC_VERSION_MINOR * 1000 + DC_VERSION_PATCH);
}

static void test_features(void **state) {
  (void)state;
  const char *present[] = {"cpu", "comm.threads", "comm.processes", "comm.tcp", "comm.external"};
  for (size_t i = 0; i < sizeof present / sizeof present[0]; i++) {
    assert_int_equal(dc_has_feature(present[i]), 1);
  }
  assert_int_equal(dc_has_feature("comm"), 0);
  assert_int_equal(dc_has_feature(""), 0);
  assert_int_equal(dc_has_feature(NULL), 0);
  assert_int_equal(dc_crc32c(0, "123456789", 9), 0xe3069283);
  assert_int_equal(dc_crc32c(7, NULL, 9), 7);
  assert_int_equal(dc_crc32c(7, "", -1), 7);
}

static void test_no_failure_yet(void **state) {
  (void)state;
  dc_device *device;
  dc_context *context;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &context), DC_OK);
  assert_int_equal(dc_init(context, NULL, NULL, 1), DC_OK);
  assert_int_equal(dc_context_check(context), DC_OK);
  assert_int_equal(dc_context_check(NULL), DC_E_INVALID);
  dc_context_destroy(context);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_versions_agree),
      cmocka_unit_test(test_features),
      cmocka_unit_test(test_no_failure_yet),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
