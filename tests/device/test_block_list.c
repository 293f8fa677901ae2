/* Lists of blocks: best fit, splitting and merging; retired blocks wait for their events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "device/block_list.h"

enum { UNIT = DC__BLOCK_ALIGNMENT };

static unsigned char chunk[16 * UNIT];

static dc__arena_block *fill(dc__block_list *list) {
  dc__block_list_init(list);
  dc__arena_block *whole = dc__record_pool_alloc(&list->records);
  dc__block_list_add(list, whole, chunk, sizeof chunk);
  return whole;
}

static dc__arena_block *block_alloc(dc__block_list *list, size_t bytes) {
  assert_true(dc__block_list_reserve(list));
  return dc__block_list_alloc(list, bytes);
}

static void test_cut_and_merge(void **state) {
  (void)state;
  dc__block_list list = {0};
  dc__arena_block *whole = fill(&list);
  dc__arena_block *blocks[4];
  for (int i = 0; i < 4; i++) {
    blocks[i] = block_alloc(&list, 4 * UNIT);
    assert_non_null(blocks[i]);
    for (int j = 0; j < i; j++) {
      assert_true(blocks[i]->ptr != blocks[j]->ptr);
    }
  }
  assert_int_equal(list.used_bytes, sizeof chunk);
  assert_null(block_alloc(&list, UNIT));
  const int order[] = {2, 0, 3, 1};
  for (int i = 0; i < 4; i++) {
    dc__block_list_free(&list, blocks[order[i]]->ptr, NULL, NULL);
  }
  assert_int_equal(list.used_bytes, 0);
  assert_true(whole->is_free && whole->bytes == sizeof chunk && whole->left == NULL && whole->right == NULL);
  dc__block_list_remove(&list, whole);
  dc__block_list_destroy(&list);
}

/* Takes the smaller one of two gaps that fit. */
static void test_best_fit(void **state) {
  (void)state;
  dc__block_list list = {0};
  fill(&list);
  unsigned char *large = block_alloc(&list, 6 * UNIT)->ptr;
  block_alloc(&list, 2 * UNIT);
  unsigned char *small = block_alloc(&list, 3 * UNIT)->ptr;
  block_alloc(&list, 5 * UNIT);
  dc__block_list_free(&list, large, NULL, NULL);
  dc__block_list_free(&list, small, NULL, NULL);
  assert_ptr_equal(block_alloc(&list, 3 * UNIT)->ptr, small);
  assert_ptr_equal(block_alloc(&list, 3 * UNIT)->ptr, large);
  dc__block_list_destroy(&list);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_cut_and_merge),
      cmocka_unit_test(test_best_fit),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
