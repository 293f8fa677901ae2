/* Functions of the caller that do not return: how the wait ends, and which errors the other ranks get. */
#include "comm/split.h"
#include "comm_ranks.h"
#include "refused_allocations.h"

enum { RETURNS_ON_ABORT, RETURNS_LATE, CALLS_LIBDC, DUP_CALLS_LIBDC, ABORTED_BEFORE, DIFFERS_LATER };

/* A world of two whose other rank mirrors this one; its barrier waits for `leave`. */
typedef struct stuck {
  dc_comm *comm;
  int how;
  dc_status inner; /* status of a barrier that a callback calls */
  atomic_int leave, inside, aborted;
} stuck;

static int32_t gather_twice(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  (void)arg;
  size_t bytes = (size_t)count * dc_dtype_size(dtype);
  memcpy(recv, send, bytes);
  memcpy((char *)recv + bytes, send, bytes);
  return 0;
}

static void *abort_stuck(void *arg) {
  const stuck *s = arg;
  dc_comm_abort(s->comm, "enough");
  return NULL;
}

/* Another thread aborts while the signatures are exchanged. */
static int32_t gather_and_abort(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  pthread_t thread;
  pthread_create(&thread, NULL, abort_stuck, arg);
  pthread_join(thread, NULL);
  return gather_twice(send, recv, count, dtype, arg);
}

/* The other rank's signature changes as soon as the barrier has been called. */
static int32_t gather_differs(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  const stuck *s = arg;
  (void)gather_twice(send, recv, count, dtype, arg);
  ((char *)recv)[(size_t)count * dc_dtype_size(dtype)] ^= (char)atomic_load(&s->inside);
  return 0;
}

static int32_t no_reduce_scatter(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  (void)send, (void)recv, (void)count, (void)dtype, (void)arg;
  return 0;
}

static int32_t no_broadcast(void *data, int64_t bytes, int32_t root, void *arg) {
  (void)data, (void)bytes, (void)root, (void)arg;
  return 0;
}

static int32_t stay(void *arg) {
  stuck *s = arg;
  atomic_store(&s->inside, 1);
  if (s->how == CALLS_LIBDC) {
    return dc_comm_barrier(s->comm);
  }
  while (atomic_load(&s->leave) == 0) {
    sleep_ms(1);
  }
  return s->how == RETURNS_ON_ABORT ? 7 : 0;
}

static void make_leave(void *arg) {
  stuck *s = arg;
  atomic_fetch_add(&s->aborted, 1);
  atomic_store(&s->leave, 1);
}

static int32_t same_user(void *arg, void **out) {
  *out = arg;
  return 0;
}

static int32_t dup_calls_barrier(void *arg, void **out) {
  stuck *s = arg;
  s->inner = dc_comm_barrier(s->comm);
  return same_user(arg, out);
}

static int32_t split_calls_barrier(const int32_t *ranks, int32_t count, void *arg, void **out) {
  (void)ranks, (void)count;
  return dup_calls_barrier(arg, out);
}

static void open_stuck(stuck *s, int how, int64_t timeout_ns) {
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  const dc_comm_callbacks callbacks = {.struct_size = sizeof callbacks,
                                       .all_gather = how == ABORTED_BEFORE  ? gather_and_abort
                                                     : how == DIFFERS_LATER ? gather_differs
                                                                            : gather_twice,
                                       .reduce_scatter = no_reduce_scatter,
                                       .broadcast = no_broadcast,
                                       .barrier = stay,
                                       .dup = how == DUP_CALLS_LIBDC ? dup_calls_barrier : same_user,
                                       .split = split_calls_barrier,
                                       .abort = how == RETURNS_LATE ? NULL : make_leave,
                                       .user = s};
  s->how = how;
  assert_int_equal(dc_comm_create_external(&callbacks, 0, 2, &options, &s->comm), DC_OK);
}

static void test_abort_ends_a_function(void **state) {
  (void)state;
  stuck s = {0};
  dc_comm *copy = NULL;
  open_stuck(&s, RETURNS_ON_ABORT, 100 * MS);
  assert_int_equal(dc_comm_dup(s.comm, &copy), DC_OK);
  assert_int_equal(dc_comm_barrier(s.comm), DC_E_TIMEOUT);
  assert_string_equal(dc_last_error(), "rank 0 waited 0.1 s at barrier for the caller's barrier to return");
  assert_int_equal(atomic_load(&s.aborted), 2); /* once for each copy */
  assert_int_equal(dc_comm_check(copy), DC_E_TIMEOUT);
  dc_comm_destroy(copy);
  dc_comm_destroy(s.comm);
}

static void *wait_for_stuck(void *arg) {
  stuck *s = arg;
  return dc_comm_barrier(s->comm) == DC_E_TIMEOUT ? s : NULL;
}

/* Without an abort function, the thread in the callback waits on, but all other ranks learn of the failure. */
static void test_a_function_returns_late(void **state) {
  (void)state;
  stuck s = {0};
  pthread_t thread;
  void *right;
  open_stuck(&s, RETURNS_LATE, 100 * MS);
  pthread_create(&thread, NULL, wait_for_stuck, &s);
  while (dc_comm_check(s.comm) == DC_OK) {
    sleep_ms(1);
  }
  assert_int_equal(atomic_load(&s.inside), 1);
  assert_int_equal(dc_comm_check(s.comm), DC_E_TIMEOUT);
  atomic_store(&s.leave, 1);
  pthread_join(thread, &right);
  assert_non_null(right);
  dc_comm_destroy(s.comm);
}

static int32_t split_fails(const int32_t *ranks, int32_t count, void *user, void **out) {
  (void)ranks;
  (void)count;
  (void)user;
  (void)out;
  return 5;
}

static int32_t dup_fails(void *user, void **out) {
  (void)user;
  (void)out;
  return 6;
}

/* The error names the public function that was called. */
static void test_a_copy_or_split_fails(void **state) {
  (void)state;
  const dc_comm_callbacks callbacks = {.struct_size = sizeof callbacks,
                                       .all_gather = gather_twice,
                                       .reduce_scatter = no_reduce_scatter,
                                       .broadcast = no_broadcast,
                                       .barrier = stay,
                                       .dup = dup_fails,
                                       .split = split_fails};
  const dc__split split = {.rank = 0, .world = 2};
  dc_comm *comm = NULL, *other = NULL;
  assert_int_equal(dc_comm_create_external(&callbacks, 0, 2, NULL, &comm), DC_OK);
  assert_int_equal(comm->ops->split(comm, &split, &other), DC_E_CALLBACK);
  assert_string_equal(dc_last_error(), "dc_comm_split: the caller's split returned 5 on rank 0");
  assert_int_equal(dc_comm_dup(comm, &other), DC_E_CALLBACK);
  assert_string_equal(dc_last_error(), "dc_comm_dup: the caller's dup returned 6 on rank 0");
  dc_comm_destroy(comm);
}

static void *mismatch_in_barrier(void *arg) {
  return dc_comm_barrier(arg) == DC_E_MISMATCH ? arg : NULL;
}

/* Ranks that differ in one copy fail in all copies, since they might never reach the call that another copy waits
 * for. */
static void test_a_mismatch_ends_the_copies(void **state) {
  (void)state;
  stuck s = {0};
  dc_comm *copy = NULL;
  pthread_t thread;
  void *right;
  open_stuck(&s, DIFFERS_LATER, 60000 * MS);
  assert_int_equal(dc_comm_dup(s.comm, &copy), DC_OK);
  pthread_create(&thread, NULL, mismatch_in_barrier, copy);
  while (atomic_load(&s.inside) == 0) {
    sleep_ms(1);
  }
  assert_int_equal(dc_comm_barrier(s.comm), DC_E_MISMATCH);
  int aborted = atomic_load(&s.aborted);
  atomic_store(&s.leave, 1);
  pthread_join(thread, &right);
  assert_non_null(right);
  assert_int_equal(aborted, 2); /* once for each copy */
  dc_comm_destroy(copy);
  dc_comm_destroy(s.comm);
}

/* No callback begins after the abort, as nothing would end it. */
static void test_no_function_begins_after_an_abort(void **state) {
  (void)state;
  stuck s = {0};
  open_stuck(&s, ABORTED_BEFORE, 60000 * MS);
  assert_int_equal(dc_comm_barrier(s.comm), DC_E_ABORTED);
  assert_string_equal(dc_last_error(), "rank 0 aborted the group: enough");
  assert_int_equal(atomic_load(&s.aborted), 1);
  assert_int_equal(atomic_load(&s.inside), 0);
  dc_comm_destroy(s.comm);
}

static void test_a_function_calls_libdc(void **state) {
  (void)state;
  stuck s = {0};
  open_stuck(&s, CALLS_LIBDC, 60000 * MS);
  assert_int_equal(dc_comm_barrier(s.comm), DC_E_STATE);
  assert_non_null(strstr(dc_last_error(), "barrier: called by the caller's barrier on rank 0, which may call nothing"));
  assert_int_equal(atomic_load(&s.aborted), 1); /* the other rank may be waiting for this one */
  dc_comm_destroy(s.comm);
}

/* A failed barrier fails the communicator, which then gives no copy and no part. */
static void test_a_copy_or_split_calls_libdc(void **state) {
  (void)state;
  const dc__split split = {.rank = 0, .world = 2};
  for (int i = 0; i < 2; i++) {
    stuck s = {0};
    dc_comm *other = NULL;
    open_stuck(&s, DUP_CALLS_LIBDC, 60000 * MS);
    atomic_store(&s.leave, 1);
    assert_int_equal(i == 0 ? dc_comm_dup(s.comm, &other) : s.comm->ops->split(s.comm, &split, &other), DC_E_STATE);
    assert_non_null(strstr(dc_last_error(), i == 0 ? "barrier: called by the caller's dup on rank 0"
                                                   : "barrier: called by the caller's split on rank 0"));
    assert_null(other);
    assert_int_equal(s.inner, DC_E_STATE);
    assert_int_equal(dc_comm_check(s.comm), DC_E_STATE);
    assert_int_equal(atomic_load(&s.inside), 0);
    dc_comm_destroy(s.comm);
  }
}

/* The other rank is already in the all_gather for which this one has no memory. */
static void test_a_rank_without_memory(void **state) {
  (void)state;
  enum { EXABYTE_SHIFT = 60 };
  const dc__range ranges[2] = {{0, INT64_C(1) << EXABYTE_SHIFT}, {INT64_C(1) << EXABYTE_SHIFT, 1}};
  const dc__coll_item item = {.ranges = ranges, .total = ranges[0].count + 1, .id = -1, .dtype = DC_INT8};
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};
  stuck s = {0};
  open_stuck(&s, RETURNS_ON_ABORT, 60000 * MS);
  dc__comm_all_gather(s.comm, NULL, &tag, &item, 1);
  assert_int_equal(dc_comm_check(s.comm), DC_E_NO_MEMORY);
  assert_int_equal(atomic_load(&s.aborted), 1);
  dc_comm_destroy(s.comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_abort_ends_a_function),      cmocka_unit_test(test_a_function_returns_late),
      cmocka_unit_test(test_a_copy_or_split_fails),      cmocka_unit_test(test_no_function_begins_after_an_abort),
      cmocka_unit_test(test_a_function_calls_libdc),     cmocka_unit_test(test_a_copy_or_split_calls_libdc),
      cmocka_unit_test(test_a_mismatch_ends_the_copies), cmocka_unit_test(test_a_rank_without_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
