/* Communicators: every collective gives the right bits, for every element type, split and kind of group. */
#include "comm_checks.h"

/* ---- gather, reduce ---- */

static void test_gather_and_reduce(void **state) {
  (void)state;
  on_all_groups(gather_and_reduce, NULL);
}

static void test_many_rounds(void **state) {
  (void)state;
  for (int32_t world = 2; world <= 3; world++) {
    assert_int_equal(on_processes(world, 0, many_rounds, NULL), 0);
  }
}

static void test_without_counts(void **state) {
  (void)state;
  on_all_groups(without_counts, NULL);
}

/* ---- broadcast, barrier, exchange ---- */

static void test_broadcast(void **state) {
  (void)state;
  on_all_groups(broadcast_all_roots, NULL);
}

static int barrier_holds(dc_comm *comm, void *arg) {
  atomic_int *arrived = arg;
  for (int round = 1; round <= 20; round++) {
    atomic_fetch_add(arrived, 1);
    CHECK_OK(dc_comm_barrier(comm));
    CHECK(atomic_load(arrived) >= round * dc_comm_size(comm));
  }
  return 0;
}

static void test_barrier(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    atomic_int arrived = 0;
    assert_int_equal(on_threads(world, 0, barrier_holds, &arrived), 0);
  }
}

static void test_exchange(void **state) {
  (void)state;
  on_all_groups(exchange, NULL);
}

/* ---- alone ---- */

static void test_self(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc__comm_create_self(&comm), DC_OK);
  assert_int_equal(gather_and_reduce(comm, NULL), 0);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_gather_and_reduce),
      cmocka_unit_test(test_many_rounds),
      cmocka_unit_test(test_without_counts),
      cmocka_unit_test(test_broadcast),
      cmocka_unit_test(test_barrier),
      cmocka_unit_test(test_exchange),
      cmocka_unit_test(test_self),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
