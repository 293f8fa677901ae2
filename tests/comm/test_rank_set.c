/* Sets of ranks, their texts, and the search for ranks that delay others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "comm/rank_set.h"

static dc__rank_set set_of(int count, const int32_t *ranks) {
  dc__rank_set set = {{0}};
  for (int i = 0; i < count; i++) {
    dc__rank_set_add(&set, ranks[i]);
  }
  return set;
}

static void test_texts(void **state) {
  (void)state;
  dc__rank_set set = {{0}};
  assert_true(dc__rank_set_is_empty(&set));
  set = set_of(4, (const int32_t[]){3, 1, 63, 64});
  assert_true(dc__rank_set_has(&set, 64) && !dc__rank_set_has(&set, 65) && !dc__rank_set_is_empty(&set));
  assert_string_equal(dc__rank_list_of(&set, 128).text, "1, 3, 63, 64");
  assert_string_equal(dc__rank_list_of(&set, 64).text, "1, 3, 63"); /* only ranks of the world */
  for (int32_t rank = 0; rank < DC__COMM_MAX_WORLD; rank++) {
    dc__rank_set_add(&set, rank);
  }
  const dc__rank_list all = dc__rank_list_of(&set, DC__COMM_MAX_WORLD);
  assert_int_equal(all.count, DC__COMM_MAX_WORLD);
  assert_true(strlen(all.text) < sizeof all.text);
  assert_string_equal(all.text + strlen(all.text) - 5, ", ...");
}

/* Row r has the ranks that rank r waits for. */
static dc__rank_set row(const void *context, int32_t rank) {
  return ((const dc__rank_set *)context)[rank];
}

static void test_stragglers(void **state) {
  (void)state;
  dc__rank_set waits[4] = {{{0}}};
  const dc__rank_set missing = set_of(2, (const int32_t[]){1, 2});
  dc__rank_set found = dc__rank_set_stragglers(0, 4, &missing, row, waits);
  assert_string_equal(dc__rank_list_of(&found, 4).text, "1, 2"); /* they wait for no other rank */
  waits[1] = set_of(1, (const int32_t[]){3});
  waits[2] = set_of(2, (const int32_t[]){0, 1});
  found = dc__rank_set_stragglers(0, 4, &missing, row, waits);
  assert_string_equal(dc__rank_list_of(&found, 4).text, "3"); /* both wait for rank 3 in the end */
  waits[3] = set_of(1, (const int32_t[]){1});
  found = dc__rank_set_stragglers(0, 4, &missing, row, waits);
  assert_string_equal(dc__rank_list_of(&found, 4).text, "1, 2"); /* a cycle: the missing ranks themselves */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_texts),
      cmocka_unit_test(test_stragglers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
