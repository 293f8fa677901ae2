/* Ranks compare their calls over MPI, and one does not come. The others' errors are those over TCP, and MPI can still
 * be used. This program is both the test and, started by mpirun with the name of a role, a rank. */
#include "comm/mpi/mpi.h"
#include "comm_failing.h"
#include "mpi_calls.h"
#include "mpi_launchers.h"

enum { RANKS = 2, OVERLAY_RANKS = DC__TCP_MAX_MESH + 2 };

/* ---- the ranks ---- */

static const int64_t limit = INT64_C(60000000000);

static int all_reduce_works(dc_comm *comm) {
  const int64_t count = 1;
  float value = 1 + (float)dc_comm_rank(comm);
  dc_tensor tensor = flat(&value, &count, DC_FLOAT32);
  CHECK_OK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL));
  CHECK(value == (float)(dc_comm_size(comm) * (dc_comm_size(comm) + 1) / 2));
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

static int64_t arrival_ns;

static int late_test(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done) {
  *done = 0;
  return dc__now_ns() < arrival_ns ? 0 : real_calls->test(mpi, request, done);
}

/* Rank 1 sends its message and leaves, and the message comes last. */
static int leaves_before_its_message_arrives(dc_comm *comm) {
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(all_reduce_works(copy) == 0);
  replace_calls();
  if (dc_comm_rank(comm) == 0) {
    arrival_ns = dc__now_ns() + 500 * MS;
    calls.test = late_test;
  }
  CHECK_OK(dc_comm_barrier(copy));
  calls.test = real_calls->test;
  dc_comm_destroy(copy);
  return all_reduce_works(comm);
}

/* As two levels do before a collective of theirs. */
static int agrees_after_the_end(dc_comm *comm) {
  const dc__coll barrier = {.kind = DC__COLL_BARRIER};
  dc_comm *other = open_comm(limit);
  CHECK(other != NULL && other->ops->agree(other, &barrier, 0));
  CHECK_OK(dc_comm_barrier(comm)); /* the failure below must not reach a rank that still compares */
  atomic_fetch_add(&dc__mpi_runtime_state.abandoned, 1);
  CHECK(!other->ops->agree(other, &barrier, 0) && dc_comm_check(other) == DC_E_STATE);
  CHECK_SAYS("an earlier collective over MPI was given up");
  atomic_fetch_sub(&dc__mpi_runtime_state.abandoned, 1);
  dc_comm_destroy(other);
  return all_reduce_works(comm);
}

static int64_t tested;

static int counted_test(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done) {
  tested++;
  return real_calls->test(mpi, request, done);
}

/* In each group a message is left behind, which must not come to the next one. */
static int leaves_messages(dc_comm *comm) {
  for (int i = 0; i < 50; i++) {
    dc_comm *other = open_comm(limit);
    CHECK(other != NULL);
    CHECK_OK(dc_comm_barrier(comm)); /* the abort below must not reach a rank that still creates its communicator */
    if (dc_comm_rank(comm) == 1) {
      sleep_ms(2);
      dc_comm_abort(other, "for a test");
    }
    CHECK(dc_comm_barrier(other) == DC_E_ABORTED);
    dc_comm_destroy(other);
  }
  return all_reduce_works(comm);
}

/* A rank that waits long seldom looks. With pauses of 0.2 ms it would look about 12000 times. */
static int waits_long(dc_comm *comm) {
  replace_calls();
  calls.test = counted_test;
  sleep_ms(dc_comm_rank(comm) == 1 ? 3000 : 0);
  CHECK_OK(dc_comm_barrier(comm));
  calls.test = real_calls->test;
  CHECK(tested < 8000);
  return 0;
}

/* In an overlay there are no connections between most ranks. One rank is late, and then leaves as in leaves(), after
 * the others have asked once. */
static int leaves_many(dc_comm *comm) {
  dc_comm *copy = NULL;
  sleep_ms(dc_comm_rank(comm) == OVERLAY_RANKS / 2 ? 1500 : 0);
  CHECK(all_reduce_works(comm) == 0);
  CHECK_OK(dc_comm_dup(comm, &copy));
  if (dc_comm_rank(comm) == OVERLAY_RANKS / 2) {
    sleep_ms(1500);
  } else {
    CHECK(dc_comm_barrier(copy) == DC_E_PEER_DEAD);
    CHECK_SAYS("rank 33 destroyed its communicator while rank ");
  }
  dc_comm_destroy(copy);
  await_failure(comm);
  return 0;
}

static const struct {
  const char *name;
  int (*run)(dc_comm *comm);
  int32_t ranks;
} roles[] = {{"late", does_not_come, RANKS},       {"left", leaves, RANKS},
             {"deadlock", waits_elsewhere, RANKS}, {"overtaken", leaves_before_its_message_arrives, RANKS},
             {"stale", leaves_messages, RANKS},    {"end", agrees_after_the_end, RANKS},
             {"long", waits_long, RANKS},          {"many", leaves_many, OVERLAY_RANKS}};

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

/* Many ranks take long to start, so one MPI is enough for them. */
static void run_roles(const launcher *l, bool is_first) {
  char output[OUTPUT];
  for (size_t i = 0; i < DC__COUNT(roles); i++) {
    const bool runs = is_there(l) && (is_first || roles[i].ranks == RANKS);
    const int status = runs ? launch_ranks(l, roles[i].ranks, roles[i].name, false, output) : 0;
    if (status != 0) {
      fail_msg("%s, %s: status %d, said: %s", l->program, roles[i].name, status, output);
    }
  }
}

static void test_a_rank_that_does_not_come(void **state) {
  (void)state;
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    run_roles(&launchers[i], i == 0 || !is_there(&launchers[0]));
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
