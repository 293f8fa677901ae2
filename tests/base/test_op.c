/* Names of operators: each operator has a name of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static void test_names(void **state) {
  (void)state;
  int known = 0;
  for (int32_t op = -1; op < 256; op++) {
    const char *name = dc_op_name(op);
    if (strcmp(name, "unknown") == 0) {
      continue;
    }
    known++;
    for (int32_t other = 0; other < op; other++) {
      assert_string_not_equal(name, dc_op_name(other));
    }
  }
  assert_true(known > DC_OP_COMM_BARRIER / 2);
  assert_string_equal(dc_op_name(DC_OP_NONE), "none");
  assert_string_equal(dc_op_name(DC_OP_REDUCE_GRAD), "reduce_grad");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
