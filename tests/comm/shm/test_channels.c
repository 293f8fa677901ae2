/* A rank that joins or leaves a communicator holds the group's lock. Other ranks wait for a slow holder. They get an
 * error that names the holder if it died, or at the deadline. */
#include "comm/shm/shm.h"
#include "comm_ranks.h"

enum { SLOW_MS = 1300 };

static dc__shm_group *group_of(const dc_comm *comm) {
  return ((const dc__shm *)comm)->group;
}

/* Afterwards rank 1 holds the lock, and all ranks know that it does. */
static int take_lock(dc_comm *comm) {
  CHECK_OK(dc_comm_barrier(comm)); /* all have joined */
  if (comm->rank == 1) {
    atomic_store(&group_of(comm)->control->lock, 2);
  }
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static int fails(dc_comm *comm, dc_status expected, const char *says) {
  dc_comm *copy = NULL;
  const dc_status status = dc_comm_dup(comm, &copy);
  if (status != expected || strcmp(dc_last_error(), says) != 0) {
    fprintf(stderr, "%s: %s; expected %s: %s\n", dc_status_name(status), dc_last_error(), dc_status_name(expected),
            says);
    return 1;
  }
  return 0;
}

static int holder_is_slow(dc_comm *comm, void *arg) {
  dc_comm *copy = NULL;
  (void)arg;
  CHECK(take_lock(comm) == 0);
  if (comm->rank == 1) {
    sleep_ms(SLOW_MS);
    atomic_store(&group_of(comm)->control->lock, 0);
  }
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  dc_comm_destroy(copy);
  return 0;
}

static void test_a_slow_holder(void **state) {
  (void)state;
  assert_int_equal(on_processes(2, 60000 * MS, holder_is_slow, NULL), 0);
  assert_int_equal(on_threads(2, 60000 * MS, holder_is_slow, NULL), 0);
}

static int holder_dies(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK(take_lock(comm) == 0);
  if (comm->rank == 1) {
    _exit(0);
  }
  return fails(comm, DC_E_PEER_DEAD, "rank 1 died while it held the group's lock");
}

static void test_a_dead_holder(void **state) {
  (void)state;
  assert_int_equal(on_processes(2, 60000 * MS, holder_dies, NULL), 0);
}

static int deadline_passes(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK(take_lock(comm) == 0);
  if (comm->rank == 0) {
    group_of(comm)->timeout_ns = 100 * MS;
    CHECK(fails(comm, DC_E_TIMEOUT, "rank 1 has held the group's lock for 0.1 s") == 0);
    atomic_store(&group_of(comm)->control->lock, 0);
  }
  return 0;
}

static void test_a_deadline(void **state) {
  (void)state;
  assert_int_equal(on_threads(2, 60000 * MS, deadline_passes, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_slow_holder), cmocka_unit_test(test_a_dead_holder),
                                     cmocka_unit_test(test_a_deadline)};
  return cmocka_run_group_tests_name("shm channels", tests, NULL, NULL);
}
