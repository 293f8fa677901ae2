/* Records of a pool: zeroed, disjoint, reused, and freed with the pool. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "device/record_pool.h"

enum { RECORDS = 200 };

static void test_records(void **state) {
  (void)state;
  static const unsigned char zeros[DC__RECORD_BYTES];
  dc__record_pool pool = {0};
  unsigned char *taken[RECORDS];
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < RECORDS; i++) {
      taken[i] = dc__record_pool_alloc(&pool);
      assert_non_null(taken[i]);
      assert_int_equal((uintptr_t)taken[i] % _Alignof(max_align_t), 0);
      assert_memory_equal(taken[i], zeros, sizeof zeros);
      memset(taken[i], i + 1, sizeof zeros);
    }
    for (int i = 0; i < RECORDS; i++) {
      assert_true(taken[i][0] == (unsigned char)(i + 1) &&
                  taken[i][sizeof zeros - 1] == taken[i][0]); /* no other record was written over it */
    }
    for (int i = 0; i < RECORDS; i += round + 1) {
      dc__record_pool_free(&pool, taken[i]);
    }
  }
  dc__record_pool_destroy(&pool); /* frees also the records that were not given back */
}

static void test_the_last_one_is_next(void **state) {
  (void)state;
  dc__record_pool pool = {0};
  void *first = dc__record_pool_alloc(&pool);
  dc__record_pool_free(&pool, first);
  assert_ptr_equal(dc__record_pool_alloc(&pool), first);
  dc__record_pool_destroy(&pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_records),
      cmocka_unit_test(test_the_last_one_is_next),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
