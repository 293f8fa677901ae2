/* Graphs bound to contexts, compared with a table: any order, and numbers that differ only in high bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "adapter.h"
#include "contexts.h"

enum { GRAPHS = 500, STEPS = 20000 };

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return *seed >> 33;
}

static void test_bindings(void **state) {
  (void)state;
  static char contexts[STEPS]; /* nothing reads a bound context */
  uint64_t seed = 3;
  for (int shift = 0; shift <= 54; shift += 9) {
    dc_context *bound[GRAPHS] = {NULL};
    for (int step = 0; step < STEPS; step++) {
      uint64_t graph = next_random(&seed) % GRAPHS, asked = next_random(&seed) % GRAPHS;
      bound[graph] = next_random(&seed) % 2 == 0 ? (dc_context *)(void *)&contexts[step] : NULL;
      assert_int_equal(dct_bind((int64_t)(graph << shift), bound[graph]), 0);
      assert_ptr_equal(dct_context_of((int64_t)(asked << shift)), bound[asked]);
    }
    for (uint64_t graph = 0; graph < GRAPHS; graph++) {
      assert_int_equal(dct_bind((int64_t)(graph << shift), NULL), 0);
      assert_null(dct_context_of((int64_t)(graph << shift)));
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_bindings)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
