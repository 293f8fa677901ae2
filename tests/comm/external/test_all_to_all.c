/* All-to-alls, gathers and scatters over the caller's own collectives, with and without an all_to_all among them. */
#include "all_to_all_checks.h"
#include "exchange.h"

static int moves_parts(dc_comm *comm, void *arg) {
  const bool exact = arg != NULL; /* the caller's functions include an all_to_all */
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (int kind = 0; kind < EXCHANGES; kind++) {
      CHECK(exchange_parts(comm, dtypes[d], kind, 101, exact) == 0);
    }
  }
  return gathers_and_scatters(comm, NULL);
}

static int moves_parts_without(dc_comm *comm, void *arg) {
  (void)arg;
  return moves_parts(comm, NULL);
}

static void test_parts(void **state) {
  exchange exchanges[2] = {0}, others[2] = {0};
  (void)state;
  on_external(moves_parts_without, exchanges);
  on_all_to_all(moves_parts, others);
}

static int differs(dc_comm *comm, void *arg) {
  (void)arg;
  return other_counts(comm, NULL);
}

/* All ranks know all counts before any data moves, so a mismatch never reaches the caller's functions. */
static void test_other_counts(void **state) {
  exchange exchanges[2] = {0}, others[2] = {0};
  (void)state;
  on_external(differs, exchanges);
  on_all_to_all(differs, others);
  assert_int_equal(exchanges[0].aborted + others[0].aborted, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_parts), cmocka_unit_test(test_other_counts)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
