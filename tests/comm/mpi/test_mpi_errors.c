/* Calls over MPI that fail while all ranks live: all ranks get the error, and go on. This program is both the test and,
 * started by mpirun with the name of a role, a rank. */
#include "comm_ranks.h"
#include "mpi_calls.h"
#include "mpi_launchers.h"

#include "comm/split.h"
#include "comm/tcp/tcp.h"

enum { RANKS = 3, ROUNDS = 5 };
static const int64_t timeout_ns = 60000 * MS;

/* ---- the ranks ---- */

/* Runs in a child of fork(). The child ends without exit handlers, since those of MPI would talk to the parent's
 * peers. */
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
    alarm(30); /* in case MPI hangs in the child */
    _exit(make_communicators());
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

/* Two threads each split a copy of their own. On rank 1 the second thread comes first, and the first one waits for
 * it. */
typedef struct splitter {
  dc_comm *comm;
  bool is_late;
  int result;
} splitter;

static _Thread_local bool is_late;
static atomic_int splits;
static dc_comm *hurried; /* gets a short deadline once ranks have exchanged the colors of a split; NULL: none does */

dc_status __real_dc__mpi_check_usable(const dc__mpi_library *mpi, const char *fn);
dc_status __wrap_dc__mpi_check_usable(const dc__mpi_library *mpi, const char *fn);
dc_status __wrap_dc__mpi_check_usable(const dc__mpi_library *mpi, const char *fn) {
  while (is_late && strcmp(fn, "dc_comm_split") == 0 && atomic_load(&splits) == 0) {
    sleep_ms(1);
  }
  return __real_dc__mpi_check_usable(mpi, fn);
}

dc_status __real_dc__tcp_split(dc_comm *comm, const dc__split *split, dc_comm **part);
dc_status __wrap_dc__tcp_split(dc_comm *comm, const dc__split *split, dc_comm **part);
dc_status __wrap_dc__tcp_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  atomic_fetch_add(&splits, 1);
  if (hurried != NULL) {
    hurried->timeout_ns = 1000 * MS;
  }
  return __real_dc__tcp_split(comm, split, part);
}

static int split_often(dc_comm *comm) {
  for (int i = 0; i < ROUNDS; i++) {
    dc_comm *part = NULL;
    CHECK_OK(dc_comm_split(comm, 0, 0, &part));
    CHECK_OK(dc_comm_barrier(part));
    dc_comm_destroy(part);
  }
  return 0;
}

static void *splitter_main(void *arg) {
  splitter *self = arg;
  is_late = self->is_late;
  self->result = split_often(self->comm);
  return NULL;
}

static int split_in_two_threads(dc_comm *comm) {
  splitter splitters[2] = {{.is_late = dc_comm_rank(comm) == 1}, {.is_late = dc_comm_rank(comm) != 1}};
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    CHECK_OK(dc_comm_dup(comm, &splitters[i].comm));
  }
  for (int i = 0; i < 2; i++) {
    CHECK(pthread_create(&threads[i], NULL, splitter_main, &splitters[i]) == 0);
  }
  for (int i = 0; i < 2; i++) {
    pthread_join(threads[i], NULL);
    dc_comm_destroy(splitters[i].comm);
  }
  return splitters[0].result + splitters[1].result;
}

static int comms_of_mpi;

static int counted_idup(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *copy,
                        dc__mpi_handle *request) {
  comms_of_mpi++;
  return real_calls->comm_idup(mpi, comm, copy, request);
}

static int counted_free(const dc__mpi_library *mpi, dc__mpi_handle *comm) {
  comms_of_mpi--;
  return real_calls->comm_free(mpi, comm);
}

/* MPI has only some thousand communicators, so a caller that retries after each failure would run out of them. */
static int fail_before_mpi(dc_comm *comm) {
  const int64_t count = 1 + dc_comm_rank(comm);
  float values[RANKS] = {0};
  dc_tensor tensor = flat(values, &count, DC_FLOAT32);
  replace_calls();
  calls.comm_idup = counted_idup;
  calls.comm_free = counted_free;
  for (int i = 0; i < 2; i++) {
    dc_comm *second = open_comm(timeout_ns), *copy = NULL;
    CHECK(second != NULL);
    CHECK_OK(dc_comm_dup(second, &copy));
    CHECK(comms_of_mpi == 3); /* the third is the one from which copies are made */
    CHECK(dc_comm_all_reduce(copy, &tensor, DC_SUM, NULL) == DC_E_MISMATCH);
    dc_comm_destroy(second);
    dc_comm_destroy(copy);
    CHECK(comms_of_mpi == 0);
  }
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static size_t refused_bytes; /* allocations of at least this many bytes fail; 0: none does */

void *__real_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes);
void *__wrap_dc__calloc(size_t count, size_t bytes) {
  if (refused_bytes > 0 && count * bytes >= refused_bytes) {
    (void)dc__fail(DC_E_NO_MEMORY, "out of host memory: the test allows no more");
    return NULL;
  }
  return __real_dc__calloc(count, bytes);
}

/* Rank 1 has no memory for its result. No rank has called MPI for this reduction by then, so all can go on using
 * MPI. */
static int lack_memory(dc_comm *comm) {
  enum { PART = 200000 };
  static float values[PART * RANKS], sums[PART];
  const int64_t part = PART, whole = part * RANKS;
  const dc_tensor send = flat(values, &whole, DC_FLOAT32);
  dc_tensor recv = flat(sums, &part, DC_FLOAT32);
  dc_comm *second = open_comm(timeout_ns);
  CHECK(second != NULL);
  CHECK_OK(dc_comm_barrier(comm)); /* otherwise a rank still in the call before would return its error there */
  refused_bytes = dc_comm_rank(comm) == 1 ? sizeof values : 0;
  CHECK(dc_comm_reduce_scatter(second, &send, &recv, NULL, DC_SUM, NULL) == DC_E_NO_MEMORY);
  CHECK_SAYS("the test allows no more");
  refused_bytes = 0;
  dc_comm_destroy(second);
  second = open_comm(timeout_ns);
  CHECK(second != NULL);
  CHECK_OK(dc_comm_reduce_scatter(second, &send, &recv, NULL, DC_SUM, NULL));
  dc_comm_destroy(second);
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

/* Fails with an error code of MPICH. */
static int failing_idup(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *copy,
                        dc__mpi_handle *request) {
  (void)mpi, (void)comm, (void)copy, (void)request;
  return 15;
}

static int stack_of_lines(int error, char *text, int *length) {
  (void)error;
  *length = sprintf(text, "Other MPI error, error stack:\nMPI_Comm_idup(45): it failed\nget_id(7): none is left\n");
  return 0;
}

#define CHECK_FAILS_IN(call, fn)                                                                       \
  do {                                                                                                 \
    calls.comm_idup = failing_idup;                                                                    \
    CHECK((call) == DC_E_SYSTEM);                                                                      \
    CHECK_SAYS(": " fn ": MPI_Comm_idup: Other MPI error, error stack: get_id(7): none is left (15)"); \
    calls.comm_idup = real_calls->comm_idup;                                                           \
  } while (0)

static int fail_in_mpi(dc_comm *comm) {
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  dc_comm *second = NULL, *third = NULL;
  replace_calls();
  dc__mpi_runtime_state.library->MPI_Error_string = stack_of_lines;
  CHECK_FAILS_IN(dc_comm_create_mpi(&options, &second), "dc_comm_create_mpi");
  CHECK_OK(dc_comm_create_mpi(&options, &second));
  CHECK_FAILS_IN(dc_comm_split(second, 0, 0, &third), "dc_comm_split");
  CHECK_FAILS_IN(dc_comm_dup(second, &third), "dc_comm_dup");
  dc_comm_destroy(second);
  CHECK_OK(dc_comm_barrier(comm));
  return 0;
}

static int failing_return_errors(const dc__mpi_library *mpi, dc__mpi_handle comm) {
  (void)mpi, (void)comm;
  calls.comm_return_errors = real_calls->comm_return_errors;
  return 15;
}

/* Fails on rank 1 only, after MPI_Comm_split. */
static int fail_on_one_rank(dc_comm *comm) {
  dc_comm *part = NULL;
  replace_calls();
  if (dc_comm_rank(comm) == 1) {
    calls.comm_return_errors = failing_return_errors;
  }
  CHECK(dc_comm_split(comm, 0, 0, &part) == DC_E_SYSTEM && part == NULL);
  CHECK_SAYS(dc_comm_rank(comm) == 1 ? "MPI on rank 1: dc_comm_split: MPI_Comm_set_errhandler: "
                                     : "dc_comm_split: rank 1 could not make its communicator");
  return split_often(comm);
}

/* The memory that MPI was last told to write to. */
static void *_Atomic written;
static atomic_int freed;

void __real_dc__free(void *ptr);
void __wrap_dc__free(void *ptr);
void __wrap_dc__free(void *ptr) {
  if (ptr != NULL && ptr == atomic_load(&written)) {
    atomic_fetch_add(&freed, 1);
  }
  __real_dc__free(ptr);
}

static int late_gather(const dc__mpi_library *mpi, void *recv, const int *counts, const int *at, dc__mpi_handle comm,
                       dc__mpi_handle *request) {
  atomic_store(&written, recv);
  if (dc__mpi_runtime_state.rank == 1) {
    sleep_ms(3000); /* longer than the deadline; rank 1 has already passed the handshake */
  }
  return real_calls->iallgatherv(mpi, recv, counts, at, comm, request);
}

/* An abandoned request proceeds once the late rank calls MPI, so its memory must not be reused before. */
static int come_late(dc_comm *comm) {
  dc_comm *part = NULL;
  replace_calls();
  calls.iallgatherv = late_gather;
  comm->timeout_ns = 500 * MS;
  CHECK(dc_comm_split(comm, 0, 0, &part) != DC_OK && part == NULL);
  CHECK(dc_comm_rank(comm) == 1 || dc_comm_check(comm) == DC_E_TIMEOUT);
  CHECK(atomic_load(&written) != NULL && atomic_load(&freed) == 0);
  printf("rank %d kept it\n", (int)dc_comm_rank(comm));
  fflush(stdout);
  sleep_ms(4000); /* the others report before a launcher ends them */
  _exit(0);
}

static int late_split(const dc__mpi_library *mpi, dc__mpi_handle comm, int color, int key, dc__mpi_handle *part) {
  if (dc__mpi_runtime_state.rank == 1) {
    sleep_ms(4000); /* longer than the deadline; rank 1 has already passed the handshake */
  }
  return real_calls->comm_split(mpi, comm, color, key, part);
}

/* The call in MPI goes on until the late rank comes, long after its caller has returned. */
static int split_late(dc_comm *comm) {
  dc_comm *part = NULL;
  replace_calls();
  calls.comm_split = late_split;
  hurried = comm; /* not before the exchange, which goes over MPI too and may take longer on a busy machine */
  CHECK(dc_comm_split(comm, 0, 0, &part) == DC_E_TIMEOUT && part == NULL);
  CHECK_SAYS("at dc_comm_split for MPI");
  CHECK(dc_comm_create_mpi(NULL, &part) == DC_E_STATE && part == NULL);
  CHECK_SAYS("was given up after an error");
  printf("rank %d left it\n", (int)dc_comm_rank(comm));
  fflush(stdout);
  sleep_ms(4000); /* the others report before a launcher ends them */
  _exit(0);
}

typedef struct rank_role {
  const char *name;
  int (*run)(dc_comm *comm);
} rank_role;

static const rank_role roles[] = {
    {"fork", fork_a_child}, {"threads", split_in_two_threads}, {"mismatch", fail_before_mpi}, {"memory", lack_memory},
    {"texts", fail_in_mpi}, {"one", fail_on_one_rank},         {"late", come_late},           {"left", split_late}};

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

static void test_threads_split_in_any_order(void **state) {
  (void)state;
  assert_ranks_succeed("threads");
}

static void test_a_mismatch_keeps_no_communicator_of_mpi(void **state) {
  (void)state;
  assert_ranks_succeed("mismatch");
}

static void test_a_rank_without_memory_comes_before_mpi(void **state) {
  (void)state;
  assert_ranks_succeed("memory");
}

static void test_errors_name_the_call_and_the_reason(void **state) {
  (void)state;
  assert_ranks_succeed("texts");
}

static void test_a_split_that_fails_on_one_rank_ends_on_all(void **state) {
  (void)state;
  assert_ranks_succeed("one");
}

/* The launcher may add messages about ranks that ended without MPI_Finalize. */
static void assert_ranks_say(const char *name, const char *what) {
  char output[OUTPUT];
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    if (is_there(&launchers[i])) {
      (void)launch_ranks(&launchers[i], RANKS, name, false, output);
      for (int r = 0; r < RANKS; r++) {
        char expected[32];
        snprintf(expected, sizeof expected, "rank %d %s", r, what);
        if (strstr(output, expected) == NULL) {
          fail_msg("%s: said: %s", launchers[i].program, output);
        }
      }
    }
  }
}

static void test_memory_of_a_request_that_goes_on_is_kept(void **state) {
  (void)state;
  assert_ranks_say("late", "kept it");
}

static void test_a_split_ends_at_the_deadline(void **state) {
  (void)state;
  assert_ranks_say("left", "left it");
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return run_rank(argv[1]);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_forked_child_has_no_mpi),
                                     cmocka_unit_test(test_threads_split_in_any_order),
                                     cmocka_unit_test(test_a_mismatch_keeps_no_communicator_of_mpi),
                                     cmocka_unit_test(test_a_rank_without_memory_comes_before_mpi),
                                     cmocka_unit_test(test_errors_name_the_call_and_the_reason),
                                     cmocka_unit_test(test_a_split_that_fails_on_one_rank_ends_on_all),
                                     cmocka_unit_test(test_memory_of_a_request_that_goes_on_is_kept),
                                     cmocka_unit_test(test_a_split_ends_at_the_deadline)};
  return cmocka_run_group_tests_name("mpi errors", tests, NULL, NULL);
}
