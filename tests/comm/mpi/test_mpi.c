/* Communicators over MPI. This program is both the test and, started by mpirun with the name of a role, a rank. It runs
 * with MPICH and with Open MPI, if their launchers are installed. Tested are the communicator's checks, the bits of a
 * training's losses, and wrong launchers. */
#include "all_to_all_checks.h"
#include "comm_checks.h"
#include "comm_trainer.h"
#include "mpi_calls.h"
#include "mpi_launchers.h"

enum { MOST_RANKS = 4 };

/* ---- the ranks ---- */

/* Several tensors in one group: a small group is packed, a large one moves tensor by tensor. */
static int grouped(dc_comm *comm, void *arg) {
  int64_t counts[2][DC__COMM_MAX_WORLD], totals[2];
  char *send[2], *recv[2], *expected[2];
  dc_tensor from[2], to[2];
  int32_t rank = dc_comm_rank(comm);
  for (int i = 0; i < 2; i++) {
    totals[i] = split(1 + i, *(int64_t *)arg + i * 77, dc_comm_size(comm), counts[i]);
    expected[i] = make(DC_FLOAT32, 50 + i, totals[i]);
    send[i] = expected[i] + begin_of(counts[i], rank) * 4;
    recv[i] = calloc((size_t)totals[i] + 1, 4);
    from[i] = flat(send[i], &counts[i][rank], DC_FLOAT32);
    to[i] = flat(recv[i], &totals[i], DC_FLOAT32);
  }
  CHECK_OK(dc_comm_group_begin(comm));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(dc_comm_all_gather(comm, &from[i], &to[i], counts[i], NULL));
  }
  CHECK_OK(dc_comm_group_end(comm, NULL));
  for (int i = 0; i < 2; i++) {
    CHECK(memcmp(recv[i], expected[i], (size_t)totals[i] * 4) == 0);
  }
  CHECK_OK(dc_comm_group_begin(comm));
  for (int i = 0; i < 2; i++) {
    send[i] = make(DC_FLOAT32, rank, totals[i]);
    from[i] = flat(send[i], &totals[i], DC_FLOAT32);
    to[i] = flat(recv[i], &counts[i][rank], DC_FLOAT32);
    CHECK_OK(dc_comm_reduce_scatter(comm, &from[i], &to[i], counts[i], DC_SUM, NULL));
  }
  CHECK_OK(dc_comm_group_end(comm, NULL));
  for (int i = 0; i < 2; i++) {
    char *sums = make_reduced(DC_FLOAT32, dc_comm_size(comm), totals[i], false);
    CHECK(memcmp(recv[i], sums + begin_of(counts[i], rank) * 4, (size_t)counts[i][rank] * 4) == 0);
    free(sums);
    free(send[i]);
    free(recv[i]);
    free(expected[i]);
  }
  return 0;
}

/* Ranks that make different calls all get an error that names both. */
static int mismatched(dc_comm *comm) {
  int64_t one = 1 + (dc_comm_rank(comm) > 0);
  float value[2] = {0, 0};
  dc_tensor tensor = flat(value, &one, DC_FLOAT32);
  CHECK(dc_comm_size(comm) == 1 || dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == DC_E_MISMATCH);
  CHECK(dc_comm_size(comm) == 1 || dc_comm_check(comm) == DC_E_MISMATCH);
  if (dc_comm_size(comm) > 1) {
    CHECK_SAYS("where rank 0 called all_reduce (1 element, float32, sum)");
  }
  return 0;
}

/* The last rank is in no part; the others have the reverse order. */
static int split_off_the_last(dc_comm *comm) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  const bool left_out = world > 2 && rank == world - 1;
  dc_comm *part = NULL;
  CHECK_OK(dc_comm_split(comm, left_out ? -1 : 0, -rank, &part));
  CHECK((part == NULL) == left_out);
  if (part != NULL) {
    CHECK(dc_comm_rank(part) == dc_comm_size(part) - 1 - rank && gather_and_reduce(part, NULL) == 0);
    dc_comm_destroy(part);
  }
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static int check_everything(dc_comm *comm) {
  const int64_t packed_group = 500, large_group = 100000;
  dc_comm *copy = NULL, *second = NULL;
  uint64_t hashes[DC__COMM_MAX_WORLD];
  CHECK(gather_and_reduce(comm, NULL) == 0 && many_rounds(comm, NULL) == 0);
  CHECK(all_to_alls(comm, NULL) == 0 && gathers_and_scatters(comm, NULL) == 0);
  CHECK(without_counts(comm, NULL) == 0 && broadcast_all_roots(comm, NULL) == 0 && exchange(comm, NULL) == 0);
  CHECK(grouped(comm, (void *)(uintptr_t)&packed_group) == 0 && grouped(comm, (void *)(uintptr_t)&large_group) == 0);
  ((dc__mpi *)comm)->max_bytes = 100000; /* stands for INT_MAX, beyond which tensors are packed */
  CHECK(many_rounds(comm, NULL) == 0 && all_to_alls(comm, NULL) == 0);
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(gather_and_reduce(copy, NULL) == 0);
  CHECK(train_and_hash(copy, hashes) == 0);
  dc_comm_destroy(copy);
  CHECK(split_off_the_last(comm) == 0);
  CHECK((second = open_comm(60000 * MS)) != NULL && mismatched(second) == 0);
  dc_comm_destroy(second);
  CHECK((second = open_comm(60000 * MS)) != NULL && (dc_comm_size(comm) == 1 || other_counts(second, NULL) == 0));
  dc_comm_destroy(second);
  CHECK(all_to_alls(comm, NULL) == 0); /* the mismatches never reached MPI */
  if (dc_comm_rank(comm) == 0) {
    const char *version;
    CHECK_OK(dc_mpi_get_version(&version));
    printf("losses %016llx of %d ranks, %s\n", (unsigned long long)hashes[0], dc_comm_size(comm), version);
  }
  return 0;
}

static int rank_checks(void) {
  dc_comm *comm = open_comm(60000 * MS);
  int result = comm == NULL ? 1 : check_everything(comm);
  dc_comm_destroy(comm);
  return result;
}

static dc_comm *slow_comm; /* whose all-to-alls are not done before a while after the group's failure */
static bool exchanges_sizes;

static int noted_all_to_all(const dc__mpi_library *mpi, const void *send, const int *send_counts, const int *send_at,
                            void *recv, const int *recv_counts, const int *recv_at, dc__mpi_handle comm,
                            dc__mpi_handle *request) {
  exchanges_sizes = true;
  return real_calls->ialltoallv(mpi, send, send_counts, send_at, recv, recv_counts, recv_at, comm, request);
}

static int slow_test(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done) {
  static int tests_after_failure;
  *done = 0;
  if (!exchanges_sizes) {
    return real_calls->test(mpi, request, done);
  }
  if (dc__comm_check(((dc__mpi *)slow_comm)->control) == DC_OK) {
    return 0;
  }
  sleep_ms(10); /* longer than between two looks at the group */
  return tests_after_failure++ < 3 ? 0 : real_calls->test(mpi, request, done);
}

/* Rank 2 still exchanges sizes when rank 0 finds that rank 1 has others. MPI stays usable. */
static int rank_is_slow(void) {
  dc_comm *comm = open_comm(60000 * MS);
  CHECK(comm != NULL);
  replace_calls();
  if (dc_comm_rank(comm) == 2) {
    slow_comm = comm;
    calls.test = slow_test;
    calls.ialltoallv = noted_all_to_all;
  }
  CHECK(other_counts(comm, NULL) == 0);
  calls.test = real_calls->test;
  dc_comm_destroy(comm);
  CHECK((comm = open_comm(60000 * MS)) != NULL && all_to_alls(comm, NULL) == 0);
  dc_comm_destroy(comm);
  return 0;
}

static int run_rank(const char *role) {
  if (strcmp(role, "checks") == 0) {
    return rank_checks();
  }
  if (strcmp(role, "slow") == 0) {
    return rank_is_slow();
  }
  dc_comm *comm = open_comm(0);
  dc_comm_destroy(comm);
  return comm == NULL ? 0 : 1;
}

/* ---- the launchers ---- */

/* The losses are the same over threads, processes, TCP and every MPI. */
static void test_checks(void **state) {
  char output[OUTPUT], expected[64];
  uint64_t threads[MOST_RANKS], tcp[MOST_RANKS];
  (void)state;
  skip_without_launchers();
  for (int32_t ranks = 1; ranks <= MOST_RANKS; ranks++) {
    assert_int_equal(on_threads(ranks, 0, train_and_hash, threads), 0);
    assert_int_equal(on_tcp(ranks, 0, train_and_hash, tcp), 0);
    assert_true(threads[0] == tcp[0]);
    snprintf(expected, sizeof expected, "losses %016llx of %d ranks", (unsigned long long)threads[0], ranks);
    for (size_t i = 0; i < DC__COUNT(launchers); i++) {
      if (is_there(&launchers[i])) {
        int status = launch_ranks(&launchers[i], ranks, "checks", false, output);
        if (status != 0 || strstr(output, expected) == NULL) {
          fail_msg("%s with %d ranks: status %d, expected \"%s\", said: %s", launchers[i].program, ranks, status,
                   expected, output);
        }
        printf("%s", strstr(output, "losses"));
      }
    }
  }
}

static void test_sizes_that_differ_give_up_no_request(void **state) {
  char output[OUTPUT];
  (void)state;
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    const int status = is_there(&launchers[i]) ? launch_ranks(&launchers[i], 3, "slow", false, output) : 0;
    if (status != 0) {
      fail_msg("%s: status %d, said: %s", launchers[i].program, status, output);
    }
  }
}

/* ---- wrong pairings, which would end the process inside MPI_Init ---- */

static void assert_create_says(const char *environment, const char *fragment) {
  char output[OUTPUT], command[512];
  snprintf(command, sizeof command, "env %s %s create 2>&1", environment, own_path);
  assert_int_equal(launch(command, output), 0);
  if (strstr(output, fragment) == NULL) {
    fail_msg("with %s: expected \"%s\", said: %s", environment, fragment, output);
  }
}

static void test_wrong_pairs(void **state) {
  (void)state;
  assert_create_says("LIBDC_MPI_LIB=/nowhere/libmpi.so", "MPI: there is none: LIBDC_MPI_LIB: /nowhere/libmpi.so");
  assert_create_says("LIBDC_MPI_LIB=libc.so.6", "has no MPI_");
  skip_without_launchers();
  assert_create_says("A=1", "no launcher of MPI started this process");
  if (is_there(&launchers[0])) {
    assert_create_says("OMPI_COMM_WORLD_SIZE=2 LIBDC_MPI_LIB=libmpich.so.12", "Open MPI's mpirun started this process");
    assert_create_says("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 LIBDC_MPI_LIB=libmpich.so.12", "srun --mpi=pmi2");
  }
  if (is_there(&launchers[1])) {
    assert_create_says("PMI_RANK=0 PMI_SIZE=2 LIBDC_MPI_LIB=libmpi.so.40", "a launcher of MPICH or Intel MPI");
    assert_create_says("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 LIBDC_MPI_LIB=libmpi.so.40", "srun --mpi=pmix");
  }
}

static void test_bad_arguments(void **state) {
  dc_comm *comm = NULL;
  const dc_comm_options negative = {.struct_size = sizeof negative, .timeout_ns = -1};
  (void)state;
  assert_int_equal(dc_comm_create_mpi(NULL, NULL), DC_E_INVALID);
  assert_int_equal(dc_comm_create_mpi(&negative, &comm), DC_E_INVALID);
  assert_int_equal(dc_mpi_get_version(NULL), DC_E_INVALID);
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return run_rank(argv[1]);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_bad_arguments), cmocka_unit_test(test_wrong_pairs),
                                     cmocka_unit_test(test_checks),
                                     cmocka_unit_test(test_sizes_that_differ_give_up_no_request)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
