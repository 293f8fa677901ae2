/* The system's memory, as the CPU device reports it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/device.h"

static void test_total_and_free(void **state) {
  (void)state;
  dc_device *device;
  int64_t total = 0, free_bytes = -1;
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(device->ops->memory_info(device, &total, &free_bytes), DC_OK);
  assert_true(total > 0 && free_bytes >= 0 && free_bytes <= total);
  assert_true(total <= (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE)); /* a control group may lower it */
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_total_and_free),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
