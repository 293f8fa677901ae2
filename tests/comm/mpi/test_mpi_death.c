/* Ranks over MPI that are late, stopped or killed: while the ranks meet, before a collective and in it, while all
 * compute, and on the way to the exit. This program is both the test and, started by mpirun with the name of a role, a
 * rank. All survivors name rank 1, in one text, and end though it does not. */
#include "comm_ranks.h"
#include "mpi_calls.h"
#include "mpi_launchers.h"

#include <signal.h>

#include "comm/mpi/mpi.h"
#include "comm/tcp/tcp.h"

enum { RANKS = 3, VICTIM = 1 };

/* The phase in which rank 1 sends itself a signal; 0 if it is only late. All ranks report to a file, since a launcher
 * may lose the output of other ranks once a rank has left it. */
static struct {
  const char *phase, *file;
  int signal;
  int64_t begun;
} role;

static int32_t own_rank;

/* ---- the ranks ---- */

static bool is_phase(const char *phase) {
  return strcmp(role.phase, phase) == 0;
}

static void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void report(const char *format, ...) {
  FILE *file = fopen(role.file, "a");
  va_list arguments;
  va_start(arguments, format);
  if (file != NULL) {
    vfprintf(file, format, arguments);
    fclose(file);
  }
  va_end(arguments);
}

static void end_here(void) {
  report("victim %d\n", (int)getpid());
  raise(role.signal);
}

/* The launcher would wait for a stopped rank for ever. */
static void kill_the_stopped(void) {
  char line[1024];
  int pid = 0;
  FILE *file = fopen(role.file, "r");
  sleep_ms(1000); /* the others report first */
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (sscanf(line, "victim %d", &pid) == 1 && pid > 0) {
      kill(pid, SIGKILL);
    }
  }
  if (file != NULL) {
    fclose(file);
  }
}

/* All survivors must report the same about rank 1. */
static void report_end(dc_status status, const char *text) {
  report("rank %d: %d after %lld ms: %s\n", own_rank, status, (long long)((dc__now_ns() - role.begun) / MS), text);
  if (role.signal == SIGSTOP && own_rank == 0) {
    kill_the_stopped();
  }
}

/* By now MPI has told the ranks where to meet. */
dc_status __real_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm);
dc_status __wrap_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm);
dc_status __wrap_dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank,
                                        int32_t world, const dc_comm_options *options, dc_comm **comm) {
  own_rank = rank;
  role.begun = dc__now_ns();
  if (is_phase("meeting") && rank == VICTIM) {
    end_here();
  }
  return __real_dc__comm_create_tcp_at(listener, address, name, rank, world, options, comm);
}

static dc_status reduce_all(dc_comm *comm, int64_t count) {
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  dc_status status = DC_OK;
  do {
    role.begun = dc__now_ns();
    status = dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL);
  } while (status == DC_OK && is_phase("moving"));
  free(data);
  return status;
}

static void *end_soon(void *arg) {
  (void)arg;
  sleep_ms(300);
  end_here();
  return NULL;
}

/* Ranks reduce in a loop, and rank 1 ends at some point, mostly while MPI moves data. */
static dc_status lose_while_moving(dc_comm *comm) {
  pthread_t thread;
  if (own_rank == VICTIM) {
    (void)pthread_create(&thread, NULL, end_soon, NULL);
  }
  return reduce_all(comm, 2000000);
}

/* Rank 1 mostly ends while no collective is under way. The next one notices. */
static dc_status lose_while_idle(dc_comm *comm) {
  if (own_rank == VICTIM) {
    end_here();
  }
  sleep_ms(300);
  return reduce_all(comm, 5000);
}

/* Rank 1 mostly ends when the others are in the collective already. */
static dc_status lose_before(dc_comm *comm) {
  role.begun = dc__now_ns();
  if (own_rank == VICTIM) {
    sleep_ms(role.signal == 0 ? 4000 : 200);
  }
  if (own_rank == VICTIM && role.signal != 0) {
    end_here();
  }
  return reduce_all(comm, 5000);
}

/* Open MPI may call a barrier complete although a rank of it has died, and return an error. */
static int test_with_error(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done) {
  const int error = real_calls->test(mpi, request, done);
  return error == 0 && *done != 0 ? 15 : error;
}

static int (*real_finalize)(void);
static bool finalized;

static int note_finalize(void) {
  finalized = true;
  return 0;
}

static int fail_at_exit(dc_comm *comm) {
  dc__mpi_library *library = dc__mpi_runtime_state.library;
  dc_comm_destroy(comm);
  replace_calls();
  calls.test = test_with_error;
  real_finalize = library->MPI_Finalize;
  library->MPI_Finalize = note_finalize;
  return 0;
}

static int lose_rank(dc_comm *comm) {
  if (is_phase("barrier")) {
    return fail_at_exit(comm);
  }
  dc_status status = dc_comm_barrier(comm); /* rank 1 may be gone before another rank has left the barrier */
  if (is_phase("exit")) {
    dc_comm_destroy(comm);
    if (own_rank == VICTIM) {
      end_here();
    }
    role.begun = dc__now_ns();
    return 0;
  }
  status = status != DC_OK      ? status
           : is_phase("moving") ? lose_while_moving(comm)
           : is_phase("idle")   ? lose_while_idle(comm)
                                : lose_before(comm);
  report_end(status, dc_last_error());
  dc_comm_destroy(comm);
  return 0;
}

/* Registered before libdc's handler, so it runs after that one: libdc has let the process end. */
static void report_exit(void) {
  if (is_phase("exit")) {
    report_end(DC_OK, "rank 1 did not come to the exit");
  }
  if (real_finalize != NULL) {
    report_end(DC_OK, finalized ? "MPI_Finalize was called" : "MPI was left");
    (void)real_finalize();
  }
}

static int run_rank(int argc, char **argv) {
  role.phase = argv[1];
  role.signal = argc < 4 ? 0 : atoi(argv[2]);
  role.file = argv[argc - 1];
  (void)atexit(report_exit);
  dc_comm *comm = NULL;
  const bool waits_long = role.signal == SIGKILL && !is_phase("meeting");
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = (waits_long ? 60000 : 1500) * MS};
  dc_status status = dc_comm_create_mpi(&options, &comm);
  if (status != DC_OK) {
    report_end(status, dc_last_error());
    return 0;
  }
  return lose_rank(comm);
}

/* ---- the launchers ---- */

static void read_reports(const char *path, char output[OUTPUT]) {
  FILE *file = fopen(path, "r");
  const size_t used = file == NULL ? 0 : fread(output, 1, OUTPUT - 1, file);
  output[used] = '\0';
  if (file != NULL) {
    fclose(file);
  }
}

/* Starts three ranks. All but rank 1 must report the same text in time. */
static void assert_survivors_say(const launcher *l, const char *phase, int signal, const char *text) {
  char output[OUTPUT], reports[OUTPUT], begin[32], first[512] = "", said[512], command[128];
  char path[] = "/tmp/libdc-mpi-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  snprintf(command, sizeof command, "%s %d %s", phase, signal, path);
  int ended = launch_ranks(l, RANKS, command, true, output);
  read_reports(path, reports);
  unlink(path);
  for (int32_t r = 0; r < RANKS; r += 2) {
    long long ms = 0;
    int status = 0;
    snprintf(begin, sizeof begin, "rank %d: ", r);
    const char *line = strstr(reports, begin);
    if (WEXITSTATUS(ended) == 124 || line == NULL ||
        sscanf(line + strlen(begin), "%d after %lld ms: %511[^\n]", &status, &ms, said) != 3 || ms > 20000 ||
        strstr(said, text) == NULL || (first[0] != '\0' && strcmp(said, first) != 0)) {
      fail_msg("%s, %s: status %d; rank %d does not say \"%s\", as others, in time: %s\n%s", l->program, command,
               WEXITSTATUS(ended), r, text, reports, output);
    }
    memcpy(first, said, sizeof first);
    printf("%s, %s %d: %d after %lld ms: %s\n", l->program, phase, signal, status, ms, said);
  }
}

static void assert_all_survivors_say(const char *phase, int signal, const char *text) {
  skip_without_launchers();
  for (size_t i = 0; i < DC__COUNT(launchers); i++) {
    if (is_there(&launchers[i])) {
      assert_survivors_say(&launchers[i], phase, signal, text);
    }
  }
}

static void test_late(void **state) {
  (void)state;
  assert_all_survivors_say("before", 0, "for rank 1");
}

static void test_in_the_meeting(void **state) {
  (void)state;
  assert_all_survivors_say("meeting", SIGKILL, "rank 1");
  assert_all_survivors_say("meeting", SIGSTOP, "rank 1");
}

static void test_before_a_collective(void **state) {
  (void)state;
  assert_all_survivors_say("before", SIGKILL, "rank 1 died");
  assert_all_survivors_say("before", SIGSTOP, "rank 1 ");
}

static void test_while_data_move(void **state) {
  (void)state;
  assert_all_survivors_say("moving", SIGKILL, "rank 1 died");
  assert_all_survivors_say("moving", SIGSTOP, "rank 1 ");
}

static void test_while_all_compute(void **state) {
  (void)state;
  assert_all_survivors_say("idle", SIGKILL, "rank 1 died");
  assert_all_survivors_say("idle", SIGSTOP, "rank 1 ");
}

static void test_before_the_exit(void **state) {
  (void)state;
  assert_all_survivors_say("exit", SIGKILL, "rank 1");
  assert_all_survivors_say("exit", SIGSTOP, "rank 1");
}

/* MPI_Finalize would wait for the dead rank, so libdc leaves MPI without it. */
static void test_a_barrier_that_fails_at_the_exit(void **state) {
  (void)state;
  assert_all_survivors_say("barrier", 0, "MPI was left");
}

/* UCX leaves some threads and connections open until the exit. By itself Open MPI uses it only on InfiniBand. */
static void test_open_mpi_over_ucx(void **state) {
  static const launcher over_ucx = {"mpirun.openmpi",
                                    "--oversubscribe --mca pml ucx --mca osc ucx --mca pml_ucx_tls any --mca "
                                    "pml_ucx_devices any --mca btl_base_warn_component_unused 0 -x UCX_TLS='^cma'",
                                    "--enable-recovery", ""};
  (void)state;
  if (!is_there(&over_ucx) || !succeeds("ompi_info --param pml ucx | grep -q 'MCA pml: ucx'")) {
    printf("SKIP: no Open MPI that has UCX is here\n");
    skip();
  }
  assert_survivors_say(&over_ucx, "moving", SIGKILL, "rank 1 died");
  assert_survivors_say(&over_ucx, "moving", SIGSTOP, "rank 1 ");
  assert_survivors_say(&over_ucx, "exit", SIGKILL, "rank 1");
}

int main(int argc, char **argv) {
  if (argc > 1) {
    return run_rank(argc, argv);
  }
  set_own_path(argv[0]);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_late),
                                     cmocka_unit_test(test_in_the_meeting),
                                     cmocka_unit_test(test_before_a_collective),
                                     cmocka_unit_test(test_while_data_move),
                                     cmocka_unit_test(test_while_all_compute),
                                     cmocka_unit_test(test_before_the_exit),
                                     cmocka_unit_test(test_a_barrier_that_fails_at_the_exit),
                                     cmocka_unit_test(test_open_mpi_over_ucx)};
  return cmocka_run_group_tests_name("mpi death", tests, NULL, NULL);
}
