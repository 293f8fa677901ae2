/* Calls over MPI that go wrong, but no rank with them: all ranks have the error, and go on. This program is both the
 * test and, started by mpirun with the name of a role, a rank. */
#include "comm_ranks.h"
#include "mpi_launchers.h"

#include "comm/mpi/mpi.h"

enum { RANKS = 3 };
static const int64_t timeout_ns = 60000 * MS;

/* ---- the ranks ---- */

/* In a child of fork(). Its end runs no exit handlers, as those of MPI would speak to the parent's peers. */
static int make_communicators(void) {
  dc_comm *comm = NULL, *threads[1] = {NULL};
  CHECK(dc_comm_create_mpi(NULL, &comm) == DC_E_STATE && comm == NULL);
  CHECK_SAYS("dc_comm_create_mpi: MPI belongs to process ");
  CHECK_SAYS(", which forked this one");
  CHECK_OK(dc_comm_create_threads(1, NULL, threads));
  dc_comm_destroy(threads[0]);
  return 0;
}

static int fork_a_child(dc_comm *comm) {
  int status = 0;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(30); /* where MPI hangs in it */
    _exit(make_communicators());
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

typedef struct rank_role {
  const char *name;
  int (*run)(dc_comm *comm);
} rank_role;

static const rank_role roles[] = {{"fork", fork_a_child}};

static int run_rank(const char *name) {
  int result = 1;
  dc_comm *comm = open_comm(timeout_ns);
  for (size_t i = 0; comm != NULL && i < DC__COUNT(roles); i++) {
    if (strcmp(name, roles[i].name) == 0) {
      result = roles[i].run(comm);
    }
  }
  dc_comm_destroy(comm);
  return result;
}

/* ---- the launchers ---- */

static void assert_ranks_succeed(const char *name) {
  char output[OUTPUT];
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    const int status = is_there(&launchers[i]) ? launch_ranks(&launchers[i], RANKS, name, false, output) : 0;
    if (status != 0) {
      fail_msg("%s, %s: status %d, said: %s", launchers[i].program, name, status, output);
    }
  }
}

static void test_a_forked_child_has_no_mpi(void **state) {
  (void)state;
  assert_ranks_succeed("fork");
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return run_rank(argv[1]);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_forked_child_has_no_mpi)};
  return cmocka_run_group_tests_name("mpi errors", tests, NULL, NULL);
}
