/* Ranks over TCP that fail, end or are copied: the other ranks' errors, and which resources remain. */
#include "comm/tcp/collective.h"
#include "comm_failing.h"

#include <signal.h>
#include <sys/mman.h>

#include "leftovers.h"

static const int64_t limit = INT64_C(60000000000);

/* ---- ranks as processes ---- */

static atomic_int *arrived; /* how many ranks, over all processes, have passed the last collective that must succeed */

static int set_up(void **state) {
  (void)state;
  arrived = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return arrived == MAP_FAILED;
}

static int tear_down(void **state) {
  (void)state;
  return munmap(arrived, 4096);
}

static pid_t start(const char *address, int32_t rank, int32_t world, rank_fn fn) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    dc_comm *comm = NULL;
    const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = limit};
    dc_status status = dc_comm_create_tcp(address, "g", rank, world, &options, &comm);
    int result = status == DC_OK ? fn(comm, NULL) : 1;
    if (result != 0) {
      fprintf(stderr, "rank %d: %s\n", rank, dc_last_error());
    }
    dc_comm_destroy(comm);
    fflush(NULL);
    _exit(result);
  }
  return child;
}

static int on_three(rank_fn fn, int *results) {
  char address[64];
  pid_t children[3];
  fresh_address(address);
  atomic_store(arrived, 0);
  for (int32_t r = 0; r < 3; r++) {
    children[r] = start(address, r, 3, fn);
  }
  int failed = 0;
  for (int32_t r = 0; r < 3; r++) {
    results[r] = end_rank(children[r]);
    failed += results[r] != 0;
  }
  return failed;
}

/* ---- failures ---- */

static int kills_itself(dc_comm *comm, void *arg) {
  (void)arg;
  float big[100000] = {0};
  int64_t count = 100000;
  dc_tensor tensor = flat(big, &count, DC_FLOAT32);
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 1) {
    raise(SIGKILL);
  }
  CHECK(dc_comm_all_reduce(comm, &tensor, DC_SUM, NULL) == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 1 died");                      /* not the deadline's error */
  CHECK(dc_comm_barrier(comm) == DC_E_PEER_DEAD); /* the failure is permanent */
  return 0;
}

static void test_a_rank_dies(void **state) {
  (void)state;
  int results[3];
  assert_int_equal(on_three(kills_itself, results), 1);
  assert_int_equal(results[1], -SIGKILL);
}

/* A rank that makes a copy waits for all others, but not for one that died. */
static int dies_uncopied(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 2) {
    raise(SIGKILL);
  }
  CHECK(dc_comm_dup(comm, &copy) == DC_E_PEER_DEAD && copy == NULL);
  CHECK_SAYS("rank 2 died");
  CHECK_SAYS("waited for it at a new communicator");
  return 0;
}

static void test_a_rank_dies_before_a_copy(void **state) {
  (void)state;
  int results[3];
  assert_int_equal(on_three(dies_uncopied, results), 1);
  assert_int_equal(results[2], -SIGKILL);
}

static void await_call(const dc_comm *comm, int32_t rank) {
  struct pollfd called = {.fd = ((const dc__tcp *)comm)->transfers[rank].fd, .events = POLLIN};
  while (poll(&called, 1, -1) < 1) {
  }
}

static int stands_still(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 2) {
    await_failure(comm);
    return 0;
  }
  if (dc_comm_rank(comm) == 0) { /* rank 0's deadline expires first, and by then only rank 2 is late */
    await_call(comm, 1);
    comm->timeout_ns = 400 * MS;
  }
  int64_t begin = dc__now_ns();
  CHECK(dc_comm_barrier(comm) == DC_E_TIMEOUT);
  CHECK(dc_comm_rank(comm) == 1 || within(begin, 400, SOON));
  CHECK_SAYS("waited 0.4 s at barrier for rank 2 of 3 to come");
  return 0;
}

static void test_a_rank_is_late(void **state) {
  (void)state;
  int results[3];
  assert_int_equal(on_three(stands_still, results), 0);
}

static int leaves(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(dc_comm_barrier(comm));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 0) {
    return 0;
  }
  CHECK(dc_comm_barrier(comm) == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 0 destroyed its communicator while rank");
  return 0;
}

/* Rank 0 destroys only a copy; the rank itself lives. */
static int destroys_a_copy(dc_comm *comm, void *arg) {
  (void)arg;
  float big[100000] = {0};
  int64_t count = 100000;
  dc_tensor tensor = flat(big, &count, DC_FLOAT32);
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 0) {
    dc_comm_destroy(copy);
    await_failure(comm);
    CHECK(dc_comm_check(comm) == DC_E_PEER_DEAD);
    CHECK_SAYS("rank 0 destroyed its communicator while rank");
    return 0;
  }
  CHECK(dc_comm_all_reduce(copy, &tensor, DC_SUM, NULL) == DC_E_PEER_DEAD);
  CHECK_SAYS("rank 0 destroyed its communicator while rank");
  dc_comm_destroy(copy);
  return 0;
}

static int aborts(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(dc_comm_barrier(copy));
  meet_all_ranks(arrived, comm);
  if (dc_comm_rank(comm) == 2) {
    dc_comm_abort(comm, "enough");
  }
  CHECK(dc_comm_barrier(copy) == DC_E_ABORTED);
  CHECK_SAYS("rank 2 aborted the group: enough");
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  dc_comm_destroy(copy);
  return 0;
}

static int differs(dc_comm *comm, void *arg) {
  (void)arg;
  float data[8] = {0};
  int64_t count = dc_comm_rank(comm) == 1 ? 7 : 8;
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  CHECK(dc_comm_broadcast(comm, &tensor, 0, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("(28 bytes from rank 0)");
  CHECK_SAYS("(32 bytes from rank 0)");
  return 0;
}

static void test_other_ends(void **state) {
  (void)state;
  int results[3];
  assert_int_equal(on_three(leaves, results), 0);
  assert_int_equal(on_three(destroys_a_copy, results), 0);
  assert_int_equal(on_three(aborts, results), 0);
  assert_int_equal(on_three(differs, results), 0);
}

/* ---- copies, and what is left ---- */

static int copies(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *all[10];
  int64_t value, count = 1;
  for (int i = 0; i < 10; i++) {
    sleep_ms((dc_comm_rank(comm) * 7 + i * 3) % 5);
    CHECK_OK(dc_comm_dup(comm, &all[i]));
  }
  for (int i = 9; i >= 0; i--) {
    value = i + dc_comm_rank(comm);
    dc_tensor tensor = flat(&value, &count, DC_INT64);
    CHECK_OK(dc_comm_all_reduce(all[i], &tensor, DC_SUM, NULL));
    CHECK(value == 3 * i + 3);
    dc_comm_destroy(all[i]);
  }
  return 0;
}

static void test_copies_and_nothing_left(void **state) {
  (void)state;
  char address[64];
  for (int i = 0; i < HELD_ADDRESSES; i++) {
    fresh_address(address); /* so that later iterations hold no more descriptors */
  }
  int before = count_entries("/proc/self/fd", "");
  for (int i = 0; i < 5; i++) {
    assert_int_equal(on_tcp(3, limit, copies, NULL), 0);
  }
  assert_int_equal(count_entries("/proc/self/fd", ""), before);
}

/* The last data arrive even if their sender has ended. */
static int last_data_of_a_gone_rank(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t count = 3000000;
  float *data = calloc((size_t)count, sizeof *data);
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  if (dc_comm_rank(comm) == 0) {
    data[count - 1] = 5;
  }
  CHECK_OK(dc_comm_broadcast(comm, &tensor, 0, NULL));
  CHECK(data[count - 1] == 5);
  free(data);
  return 0;
}

static void test_last_word(void **state) {
  (void)state;
  int results[3];
  assert_int_equal(on_three(last_data_of_a_gone_rank, results), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_rank_dies),
      cmocka_unit_test(test_a_rank_dies_before_a_copy),
      cmocka_unit_test(test_a_rank_is_late),
      cmocka_unit_test(test_other_ends),
      cmocka_unit_test(test_copies_and_nothing_left),
      cmocka_unit_test(test_last_word),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
