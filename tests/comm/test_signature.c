/* Ranks that make different calls, or come late: every rank gets an error that names the calls. */
#include "comm_failing.h"
#include "crossed_streams.h"
#include "shm_calls.h"

/* ---- different calls ---- */

static int other_operator(dc_comm *comm, void *arg) {
  (void)arg;
  dc_status status = comm->rank == 1 ? reduce(comm, 3, BIG) : gather(comm, 5, N, DC_FLOAT32);
  CHECK(status == DC_E_MISMATCH);
  CHECK_SAYS("reduce_grad of parameter 3 (300000 elements, float32, mean)");
  CHECK_SAYS("allgather_param of parameter 5 (12 elements, float32)");
  CHECK_SAYS("rank 1 called");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_operator(void **state) {
  (void)state;
  on_threads_and_processes(2, other_operator, NULL);
  on_threads_and_processes(3, other_operator, NULL);
}

static int other_size(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK_OK(gather(comm, 5, N, DC_FLOAT32));
  CHECK(gather(comm, 6, N + (comm->rank == 1), DC_FLOAT32) == DC_E_MISMATCH);
  CHECK_SAYS(
      "rank 1 called allgather_param of parameter 6 (13 elements, float32) where rank 0 called "
      "allgather_param of parameter 6 (12 elements, float32)");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_size(void **state) {
  (void)state;
  on_threads_and_processes(2, other_size, NULL);
}

static int other_dtype(dc_comm *comm, void *arg) {
  (void)arg;
  CHECK(gather(comm, 6, N, comm->rank == 1 ? DC_BFLOAT16 : DC_FLOAT32) == DC_E_MISMATCH);
  CHECK_SAYS("bfloat16");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_dtype(void **state) {
  (void)state;
  on_threads_and_processes(2, other_dtype, NULL);
}

static int other_split(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t counts[2] = {3, 5};
  int64_t own = comm->rank == 0 ? 3 : 4;
  int64_t total = 8;
  if (comm->rank == 1) {
    counts[0] = counts[1] = 4;
  }
  float send[8] = {0};
  float recv[8];
  const dc_tensor from = flat(send, &own, DC_FLOAT32);
  dc_tensor to = flat(recv, &total, DC_FLOAT32);
  CHECK(dc_comm_all_gather(comm, &from, &to, counts, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("all_gather (8 elements, float32), split differently");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_split(void **state) {
  (void)state;
  on_threads_and_processes(2, other_split, NULL);
}

static int other_root(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t count = 3;
  float data[3] = {0};
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  CHECK(dc_comm_broadcast(comm, &tensor, comm->rank, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("12 bytes from rank 1");
  return check_dead(comm, DC_E_MISMATCH);
}

static void test_other_root(void **state) {
  (void)state;
  on_threads_and_processes(2, other_root, NULL);
}

/* ---- calls that are the same ---- */

/* The ranks copy the two communicators in different orders. */
static int crossed_copies(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *first[2], *second[2];
  for (int i = 0; i < 2; i++) {
    CHECK_OK(dc_comm_dup(comm, &first[i]));
  }
  for (int i = 0; i < 2; i++) {
    const int which = comm->rank == 1 ? 1 - i : i;
    CHECK_OK(dc_comm_dup(first[which], &second[which]));
  }
  CHECK(gather(second[comm->rank == 1], 5, N, DC_FLOAT32) == DC_E_MISMATCH);
  CHECK_SAYS("has another copy of a communicator than rank ");
  for (int i = 0; i < 2; i++) {
    dc_comm_destroy(second[i]);
    dc_comm_destroy(first[i]);
  }
  return 0;
}

static void test_crossed_copies(void **state) {
  (void)state;
  on_threads_and_processes(2, crossed_copies, NULL);
  assert_int_equal(on_tcp(2, 0, crossed_copies, NULL), 0);
  assert_int_equal(on_tcp(5, 0, crossed_copies, NULL), 0);
}

static int crossed_streams(dc_comm *comm, void *arg) {
  return cross_streams(comm, arg) != 0 || check_dead(comm, DC_E_MISMATCH) != 0;
}

static void test_crossed_streams(void **state) {
  (void)state;
  on_threads_and_processes(2, crossed_streams, NULL);
  assert_int_equal(on_tcp(2, 0, crossed_streams, NULL), 0);
  assert_int_equal(on_tcp(4, 0, crossed_streams, NULL), 0);
}

/* ---- too late ---- */

static int late(dc_comm *comm, void *arg) {
  (void)arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK_OK(reduce(comm, 2, N));
  int64_t begin = dc__now_ns(); /* taken before the first waiting rank begins, whose deadline ends the wait of all */
  CHECK_OK(gather(copy, 9, N, DC_FLOAT32));
  if (comm->rank == 1) {
    await_failure(comm);
  } else if (comm->rank == 2) { /* rank 2's deadline expires first, and by then only rank 1 is late */
    await_call(comm, 0, calls_of(comm, 2));
    comm->timeout_ns = 500 * MS;
  }
  CHECK(gather(comm, 5, BIG, DC_FLOAT32) == DC_E_TIMEOUT);
  CHECK(within(begin, 500, SOON));
  CHECK_SAYS("waited 0.5 s at allgather_param of parameter 5");
  CHECK_SAYS("for rank 1 of 3 to come");
  CHECK_SAYS(
      "rank 1 last started reduce_grad of parameter 2 on channel 0, allgather_param of parameter 9 on channel 1");
  CHECK(dc_comm_check(copy) == DC_E_TIMEOUT); /* the failure belongs to the group */
  dc_comm_destroy(copy);
  return check_dead(comm, DC_E_TIMEOUT);
}

static void test_late(void **state) {
  (void)state;
  on_threads_and_processes(3, late, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_other_operator),  cmocka_unit_test(test_other_size), cmocka_unit_test(test_other_dtype),
      cmocka_unit_test(test_other_split),     cmocka_unit_test(test_other_root), cmocka_unit_test(test_crossed_copies),
      cmocka_unit_test(test_crossed_streams), cmocka_unit_test(test_late),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
