/* MPI must make progress while a rank waits for others elsewhere. This program is both the test and, started by mpirun
 * with the name of a role and a file, a rank. Rank 0 creates the file in a call that lets MPI make progress, and
 * another rank waits until the file exists. So all would wait for each other if rank 0 made no such call. */
#include "comm/levels/levels.h"
#include "comm_checks.h"
#include "mpi_calls.h"
#include "mpi_launchers.h"

#include <fcntl.h>

enum { RANKS = 6, BLOCK = 2, TRIES = 2000, TRY_MS = 10 };

static const char *path;
static atomic_int waits_elsewhere, saw_file;

/* ---- the ranks ---- */

static int reporting_iprobe(const dc__mpi_library *mpi, int rank, dc__mpi_handle comm) {
  if (atomic_load(&waits_elsewhere) != 0) {
    close(open(path, O_CREAT | O_WRONLY, 0600));
  }
  return real_calls->iprobe(mpi, rank, comm);
}

static void await_file(void) {
  for (int i = 0; i < TRIES && access(path, F_OK) != 0; i++) {
    sleep_ms(TRY_MS);
  }
  atomic_store(&saw_file, access(path, F_OK) == 0);
}

/* The handshake that transports built on MPI use. */
static int agree(dc_comm *comm) {
  const dc__coll coll = {.comm = comm, .tag = {.graph_id = -1, .id = -1}, .kind = DC__COLL_BARRIER};
  CHECK(strcmp(comm->ops->name, "mpi") == 0);
  if (dc_comm_rank(comm) == 0) {
    atomic_store(&waits_elsewhere, 1);
  } else {
    await_file();
  }
  CHECK(comm->ops->agree(comm, &coll, 0));
  CHECK(dc_comm_rank(comm) == 0 || atomic_load(&saw_file) != 0);
  return 0;
}

/* Rank 0 goes on to its block once its column is done, while rank 1 stays in its own column. */
static int gather_in_columns(const dc__mpi_library *mpi, void *recv, const int *counts, const int *at,
                             dc__mpi_handle comm, dc__mpi_handle *request) {
  if (dc__mpi_runtime_state.rank == 0) {
    atomic_store(&waits_elsewhere, 1);
  } else if (dc__mpi_runtime_state.rank == 1) {
    await_file();
  }
  return real_calls->iallgatherv(mpi, recv, counts, at, comm, request);
}

/* The end of the farthest byte range that MPI was given. */
static int64_t farthest;

static int reaching_gather(const dc__mpi_library *mpi, void *recv, const int *counts, const int *at,
                           dc__mpi_handle comm, dc__mpi_handle *request) {
  int size = 0;
  real_calls->comm_size(mpi, comm, &size);
  for (int r = 0; r < size; r++) {
    const int64_t end = (int64_t)at[r] + counts[r];
    farthest = end > farthest ? end : farthest;
  }
  return real_calls->iallgatherv(mpi, recv, counts, at, comm, request);
}

/* A column's parts are within MPI's limit together, but lie farther apart in the tensor. */
static int gather_beyond_what_mpi_reaches(dc_comm *comm) {
  enum { MOST = 300000 }; /* stands for INT_MAX */
  const int64_t per = 20000, total = per * RANKS;
  float *part = calloc((size_t)per, sizeof *part), *whole = calloc((size_t)total, sizeof *whole);
  const dc_tensor from = flat(part, &per, DC_FLOAT32);
  dc_tensor to = flat(whole, &total, DC_FLOAT32);
  for (int64_t i = 0; i < per; i++) {
    part[i] = (float)(dc_comm_rank(comm) + 1);
  }
  ((dc__mpi *)((dc__levels *)comm)->column)->max_bytes = MOST;
  calls.iallgatherv = reaching_gather;
  CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, NULL));
  for (int64_t i = 0; i < total; i++) {
    CHECK(whole[i] == (float)(i / per + 1));
  }
  CHECK(farthest > 0 && farthest <= MOST);
  free(part);
  free(whole);
  return 0;
}

static int gather_in_two_levels(dc_comm *comm) {
  const int64_t per = 20000, total = per * RANKS;
  float *part = calloc((size_t)per, sizeof *part), *whole = calloc((size_t)total, sizeof *whole);
  const dc_tensor from = flat(part, &per, DC_FLOAT32);
  dc_tensor to = flat(whole, &total, DC_FLOAT32);
  CHECK(strcmp(comm->ops->name, "two levels") == 0);
  calls.iallgatherv = gather_in_columns;
  CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, NULL));
  CHECK(dc_comm_rank(comm) != 1 || atomic_load(&saw_file) != 0);
  free(part);
  free(whole);
  return gather_beyond_what_mpi_reaches(comm);
}

static int run_rank(char **argv) {
  static const char *const nodes[RANKS / BLOCK] = {"a", "b", "c"};
  dc_comm *comm = NULL;
  const char *number = getenv("PMI_RANK") != NULL ? getenv("PMI_RANK") : getenv("OMPI_COMM_WORLD_RANK");
  const bool levels = strcmp(argv[1], "levels") == 0;
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = 60000 * MS, .node = levels ? nodes[atoi(number) / BLOCK] : NULL};
  path = argv[2];
  CHECK_OK(dc_comm_create_mpi(&options, &comm));
  replace_calls();
  calls.iprobe = reporting_iprobe;
  const int result = levels ? gather_in_two_levels(comm) : agree(comm);
  dc_comm_destroy(comm);
  return result;
}

/* ---- the launchers ---- */

static void assert_mpi_works_on(const char *role) {
  char output[OUTPUT], command[128], file[64];
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    char folder[] = "/tmp/libdc-mpi-XXXXXX";
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/called", folder);
    snprintf(command, sizeof command, "%s %s", role, file);
    const int status = is_there(&launchers[i]) ? launch_ranks(&launchers[i], RANKS, command, false, output) : 0;
    unlink(file);
    rmdir(folder);
    if (status != 0) {
      fail_msg("%s, %s: status %d, said: %s", launchers[i].program, role, status, output);
    }
  }
}

static void test_in_a_handshake(void **state) {
  (void)state;
  assert_mpi_works_on("agree");
}

static void test_in_a_block_of_two_levels(void **state) {
  (void)state;
  assert_mpi_works_on("levels");
}

int main(int argc, char **argv) {
  if (argc > 2) {
    return run_rank(argv);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_in_a_handshake),
                                     cmocka_unit_test(test_in_a_block_of_two_levels)};
  return cmocka_run_group_tests_name("mpi progress", tests, NULL, NULL);
}
