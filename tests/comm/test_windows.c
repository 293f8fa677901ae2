/* Ranks' parts cut into windows: the slices together are the part, each element once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "comm/windows.h"

static const dc__range ranges[2][3] = {{{0, 100}, {100, 0}, {100, 7}}, {{0, 31}, {31, 33}, {64, 1}}};

static void test_parts(void **state) {
  (void)state;
  dc__coll coll = {.count = 2};
  coll.items[0] = (dc__coll_item){.ranges = ranges[0], .dtype = DC_FLOAT32};
  coll.items[1] = (dc__coll_item){.ranges = ranges[1], .dtype = DC_FLOAT64};
  assert_int_equal(dc__item_bytes(&coll.items[0], 0), 400);
  assert_int_equal(dc__item_stride(&coll.items[0], 0), 448); /* rounded up to a cache line */
  assert_int_equal(dc__item_stride(&coll.items[0], 1), 0);
  assert_int_equal(dc__max_part_bytes(&coll, 3), 448 + 256);
}

static void test_slices(void **state) {
  (void)state;
  enum { POS = 128 };
  const dc__coll_item item = {.ranges = ranges[0], .dtype = DC_FLOAT32};
  for (int32_t rank = 0; rank < 3; rank++) {
    for (int64_t size = 64; size <= 1024; size += 64) {
      int64_t next = 0;
      for (int64_t lo = 0; lo < 1024; lo += size) {
        const dc__window_slice slice = dc__window_intersect(&item, rank, POS, lo, size);
        assert_true(slice.count == 0 || (slice.begin == next && lo + slice.at == POS + 4 * slice.begin));
        assert_true(slice.at >= 0 && slice.at + 4 * slice.count <= size);
        next += slice.count;
      }
      assert_int_equal(next, item.ranges[rank].count);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_slices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
