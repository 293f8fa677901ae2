/* Ranks compare their calls over MPI, and one does not come. The others' errors are those over TCP, and MPI can still
 * be used. This program is both the test and, started by mpirun with the name of a role, a rank. */
#include "comm/mpi/mpi.h"
#include "comm_failing.h"
#include "mpi_launchers.h"

enum { RANKS = 2 };

/* ---- the ranks ---- */

static const int64_t limit = INT64_C(60000000000);

static int all_reduce_works(dc_comm *comm) {
  const int64_t count = 1;
  float value = 1 + (float)dc_comm_rank(comm);
  dc_tensor tensor = flat(&value, &count, DC_FLOAT32);
  CHECK_OK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL));
  CHECK(value == RANKS * (RANKS + 1) / 2);
  return 0;
}

static int does_not_come(dc_comm *comm) {
  CHECK(all_reduce_works(comm) == 0);
  if (dc_comm_rank(comm) == 1) {
    await_failure(comm);
  } else {
    ((dc__mpi *)comm)->control->timeout_ns = 500 * MS;
    CHECK(dc_comm_barrier(comm) == DC_E_TIMEOUT);
  }
  CHECK(dc_comm_check(comm) == DC_E_TIMEOUT);
  CHECK_SAYS("rank 0 waited 0.5 s at barrier for rank 1 of 2 to come; rank 1 last started all_reduce");
  return 0;
}

static int leaves(dc_comm *comm) {
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(all_reduce_works(copy) == 0);
  if (dc_comm_rank(comm) == 0) {
    CHECK(dc_comm_barrier(copy) == DC_E_PEER_DEAD);
    CHECK_SAYS("rank 1 destroyed its communicator while rank 0 waited for it at barrier");
  }
  dc_comm_destroy(copy);
  await_failure(comm);
  return 0;
}

static int waits_elsewhere(dc_comm *comm) {
  const int64_t count = 1;
  float value = 0;
  dc_tensor tensor = flat(&value, &count, DC_FLOAT32);
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK((dc_comm_rank(comm) == 0 ? dc_comm_barrier(comm) : dc_comm_all_reduce(copy, &tensor, DC_SUM, NULL)) ==
        DC_E_MISMATCH);
  CHECK_SAYS("rank 0 is in barrier where rank 1 is in all_reduce, and they wait for each other");
  dc_comm_destroy(copy);
  return 0;
}

static const struct {
  const char *name;
  int (*run)(dc_comm *comm);
} roles[] = {{"late", does_not_come}, {"left", leaves}, {"deadlock", waits_elsewhere}};

/* Fails in a communicator of its own. A message that nothing received there must not come to the next one. */
static int run_rank(const char *name) {
  int result = 1;
  dc_comm *comm = open_comm(limit);
  for (size_t i = 0; comm != NULL && i < DC__COUNT(roles); i++) {
    if (strcmp(name, roles[i].name) == 0) {
      result = roles[i].run(comm);
    }
  }
  dc_comm_destroy(comm);
  comm = result == 0 ? open_comm(limit) : NULL;
  result = comm == NULL ? 1 : all_reduce_works(comm);
  dc_comm_destroy(comm);
  return result;
}

/* ---- the launchers ---- */

static void test_a_rank_that_does_not_come(void **state) {
  char output[OUTPUT];
  (void)state;
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers) * DC__COUNT(roles); i++) {
    const launcher *l = &launchers[i / DC__COUNT(roles)];
    const char *role = roles[i % DC__COUNT(roles)].name;
    const int status = is_there(l) ? launch_ranks(l, RANKS, role, false, output) : 0;
    if (status != 0) {
      fail_msg("%s, %s: status %d, said: %s", l->program, role, status, output);
    }
  }
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return run_rank(argv[1]);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_rank_that_does_not_come)};
  return cmocka_run_group_tests_name("mpi carrier", tests, NULL, NULL);
}
