/* All-to-all, gather and scatter over threads, processes and TCP: every type and kind of parts, streams, checksums, and
 * errors. */
#include "all_to_all_checks.h"

enum { MANY = 20 };

static void test_parts(void **state) {
  (void)state;
  on_all_groups(all_to_alls, NULL);
}

static void test_gather_and_scatter(void **state) {
  (void)state;
  on_all_groups(gathers_and_scatters, NULL);
}

static int with_checksums(dc_comm *comm, void *arg) {
  CHECK_OK(dc_comm_set_checksums(comm, 1));
  CHECK_OK(dc_comm_barrier(comm));
  return all_to_alls(comm, arg);
}

static void test_checksums(void **state) {
  (void)state;
  on_all_groups(with_checksums, NULL);
}

/* All-to-alls between other collectives, with which they share staging memory. */
static int among_others(dc_comm *comm, void *arg) {
  int64_t sum = 1, one = 1;
  dc_tensor data = flat(&sum, &one, DC_INT64);
  (void)arg;
  for (int i = 0; i < MANY; i++) {
    CHECK(exchange_parts(comm, DC_FLOAT32, i % EXCHANGES, 1 + i * i * 100, true) == 0);
    sum = 1;
    CHECK_OK(dc_comm_all_reduce(comm, &data, DC_SUM, NULL));
    CHECK(sum == dc_comm_size(comm));
  }
  return 0;
}

static void test_among_others(void **state) {
  (void)state;
  on_all_groups(among_others, NULL);
}

/* The call returns at once, and the caller may then overwrite its counts. */
static int on_stream(dc_comm *comm, void *arg) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  dc_device *device;
  dc_stream *stream;
  parts_side sent, expected;
  (void)arg;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &stream));
  make_side(&sent, DC_INT32, 1, 1000, rank, world, true);
  make_side(&expected, DC_INT32, 1, 1000, rank, world, false);
  int32_t *recv = calloc((size_t)expected.total + 1, sizeof *recv);
  const dc_tensor from = flat(sent.data, &sent.total, DC_INT32);
  dc_tensor to = flat(recv, &expected.total, DC_INT32);
  int64_t counts[DC__COMM_MAX_WORLD];
  memcpy(counts, expected.counts, sizeof counts);
  CHECK_OK(dc_comm_all_to_all(comm, &from, sent.counts, &to, counts, stream));
  memset(sent.counts, 0x7f, sizeof sent.counts);
  memset(counts, 0x7f, sizeof counts);
  CHECK_OK(dc_stream_synchronize(stream, 0));
  CHECK_OK(dc_comm_check(comm));
  CHECK(memcmp(recv, expected.data, (size_t)expected.total * sizeof *recv) == 0);
  free(recv);
  free(sent.data);
  free(expected.data);
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  return 0;
}

static void test_streams(void **state) {
  (void)state;
  on_all_groups(on_stream, NULL);
}

/* A rank's part for itself is checked too; in this case no rank waits for it. */
static int other_own_count(dc_comm *comm, void *arg) {
  const int64_t sends[2] = {4, 2}, expects[2] = {dc_comm_rank(comm) == 0 ? 1 : 2, 2}, six = 6, total = expects[0] + 2;
  float data[6] = {0}, recv[6];
  const dc_tensor from = flat(data, &six, DC_FLOAT32);
  dc_tensor to = flat(recv, &total, DC_FLOAT32);
  (void)arg;
  dc_status status =
      dc_comm_all_to_all(comm, &from, dc_comm_rank(comm) == 0 ? sends : (const int64_t[]){2, 4}, &to, expects, NULL);
  CHECK(status == DC_E_MISMATCH);
  CHECK_SAYS("all_to_all: rank ");
  return 0;
}

static void test_other_counts(void **state) {
  (void)state;
  assert_int_equal(on_threads(2, 0, other_own_count, NULL), 0);
  assert_int_equal(on_tcp(2, 0, other_own_count, NULL), 0);
  for (int32_t world = 2; world <= 4; world++) {
    assert_int_equal(on_threads(world, 0, other_counts, NULL), 0);
    assert_int_equal(on_processes(world, 0, other_counts, NULL), 0);
    assert_int_equal(on_tcp(world, 0, other_counts, NULL), 0);
  }
}

/* Rank 0 calls another collective, or has another type. */
static int other_call(dc_comm *comm, void *arg) {
  const bool types = arg != NULL;
  const int64_t world = dc_comm_size(comm), one = 1;
  int64_t data[DC__COMM_MAX_WORLD] = {0}, recv[DC__COMM_MAX_WORLD];
  const int32_t dtype = types && dc_comm_rank(comm) == 0 ? DC_INT32 : DC_FLOAT32;
  const dc_tensor from = flat(data, &world, dtype), mine = flat(data, &one, DC_FLOAT32);
  dc_tensor to = flat(recv, &world, dtype);
  CHECK((types || dc_comm_rank(comm) > 0 ? dc_comm_all_to_all(comm, &from, NULL, &to, NULL, NULL)
                                         : dc_comm_all_gather(comm, &mine, &to, NULL, NULL)) == DC_E_MISMATCH);
  CHECK_SAYS(types ? "called all_to_all (float32) where rank 0 called all_to_all (int32)"
                   : "called all_to_all (float32) where rank 0 called all_gather (");
  return 0;
}

static void test_other_call(void **state) {
  int types = 1;
  (void)state;
  for (int32_t world = 2; world <= 3; world++) {
    for (int i = 0; i < 2; i++) {
      assert_int_equal(on_threads(world, 0, other_call, i == 0 ? NULL : &types), 0);
      assert_int_equal(on_tcp(world, 0, other_call, i == 0 ? NULL : &types), 0);
    }
  }
}

/* Ranks gather to different roots, or one of them scatters instead. */
static int other_root(dc_comm *comm, void *arg) {
  const bool scatters = arg != NULL && dc_comm_rank(comm) == 1;
  const int64_t world = dc_comm_size(comm), one = 1;
  float data[DC__COMM_MAX_WORLD] = {0}, recv[DC__COMM_MAX_WORLD];
  const dc_tensor whole = flat(data, &world, DC_FLOAT32), mine = flat(data, &one, DC_FLOAT32);
  dc_tensor to = flat(recv, &world, DC_FLOAT32), own = flat(recv, &one, DC_FLOAT32);
  const int32_t root = dc_comm_rank(comm) == 1 && arg == NULL ? 1 : 0;
  CHECK((scatters ? dc_comm_scatter(comm, &whole, NULL, &own, 0, NULL)
                  : dc_comm_gather(comm, &mine, &to, NULL, root, NULL)) == DC_E_MISMATCH);
  CHECK_SAYS(arg == NULL ? "rank 1 called gather (float32, root 1) where rank 0 called gather (float32, root 0)"
                         : "rank 1 called scatter (float32, root 0) where rank 0 called gather (float32, root 0)");
  return 0;
}

static void test_other_root(void **state) {
  int scatters = 1;
  (void)state;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(on_threads(2, 0, other_root, i == 0 ? NULL : &scatters), 0);
    assert_int_equal(on_tcp(2, 0, other_root, i == 0 ? NULL : &scatters), 0);
  }
}

static int bad_roots(dc_comm *comm, void *arg) {
  float data[4] = {0}, recv[4];
  const int64_t four = 4, two = 2, counts[2] = {2, 1};
  const dc_tensor from = flat(data, &four, DC_FLOAT32), mine = flat(data, &two, DC_FLOAT32);
  dc_tensor to = flat(recv, &four, DC_FLOAT32), own = flat(recv, &two, DC_FLOAT32), ints = flat(recv, &four, DC_INT32);
  (void)arg;
  CHECK(dc_comm_gather(comm, &mine, &to, NULL, 2, NULL) == DC_E_INVALID);
  CHECK_SAYS("dc_comm_gather: root = 2, must be 0 to 1");
  CHECK(dc_comm_scatter(comm, &from, NULL, &own, -1, NULL) == DC_E_INVALID);
  if (dc_comm_rank(comm) == 0) {
    CHECK(dc_comm_gather(comm, &mine, NULL, NULL, 0, NULL) == DC_E_INVALID);
    CHECK(dc_comm_scatter(comm, NULL, NULL, &own, 0, NULL) == DC_E_INVALID);
    CHECK(dc_comm_gather(comm, &mine, &ints, NULL, 0, NULL) == DC_E_DTYPE);
    CHECK_SAYS("recv is int32, must be float32 as this rank's part");
    CHECK(dc_comm_scatter(comm, &from, counts, &own, 0, NULL) == DC_E_SHAPE);
    CHECK_SAYS("send has 4 elements, must have the sum of its counts = 3");
  }
  CHECK_OK(dc_comm_gather(comm, &mine, &to, NULL, 0, NULL)); /* the group is unharmed */
  return 0;
}

static void test_bad_roots(void **state) {
  (void)state;
  assert_int_equal(on_threads(2, 0, bad_roots, NULL), 0);
}

static int bad_arguments(dc_comm *comm, void *arg) {
  float data[12] = {0}, recv[12];
  const int64_t six = 6, four = 4, counts[2] = {4, 2}, negative[2] = {7, -1}, back[2] = {2, 4};
  const dc_tensor from = flat(data, &six, DC_FLOAT32), odd = flat(data, &(int64_t){5}, DC_FLOAT32);
  dc_tensor to = flat(recv, &six, DC_FLOAT32), short_to = flat(recv, &four, DC_FLOAT32);
  dc_tensor inside = flat(data + 3, &six, DC_FLOAT32), ints = flat(recv, &six, DC_INT32);
  (void)arg;
  CHECK(dc_comm_all_to_all(NULL, &from, NULL, &to, NULL, NULL) == DC_E_INVALID);
  CHECK(dc_comm_all_to_all(comm, NULL, NULL, &to, NULL, NULL) == DC_E_INVALID);
  CHECK(dc_comm_all_to_all(comm, &from, NULL, NULL, NULL, NULL) == DC_E_INVALID);
  CHECK(dc_comm_all_to_all(comm, &odd, NULL, &to, NULL, NULL) == DC_E_SHAPE);
  CHECK_SAYS("send has 5 elements, must be a multiple of the 2 ranks where send_counts is NULL");
  CHECK(dc_comm_all_to_all(comm, &from, NULL, &short_to, counts, NULL) == DC_E_SHAPE);
  CHECK_SAYS("recv has 4 elements, must have the sum of its counts = 6");
  CHECK(dc_comm_all_to_all(comm, &from, negative, &to, NULL, NULL) == DC_E_INVALID);
  CHECK_SAYS("send_counts[1] = -1, must be >= 0");
  CHECK(dc_comm_all_to_all(comm, &from, NULL, &ints, NULL, NULL) == DC_E_DTYPE);
  CHECK(dc_comm_all_to_all(comm, &from, NULL, &inside, NULL, NULL) == DC_E_INVALID);
  CHECK_SAYS("send and recv overlap");
  CHECK_OK(dc_comm_group_begin(comm));
  CHECK(dc_comm_all_to_all(comm, &from, NULL, &to, NULL, NULL) == DC_E_STATE);
  CHECK_OK(dc_comm_group_end(comm, NULL));
  CHECK_OK(dc_comm_all_to_all(comm, &from, dc_comm_rank(comm) == 0 ? counts : back, &to,
                              dc_comm_rank(comm) == 0 ? counts : back, NULL)); /* the group is unharmed */
  return 0;
}

static void test_bad_arguments(void **state) {
  (void)state;
  assert_int_equal(on_threads(2, 0, bad_arguments, NULL), 0);
}

static void test_alone(void **state) {
  dc_comm *comm = NULL;
  (void)state;
  assert_int_equal(dc__comm_create_self(&comm), DC_OK);
  assert_int_equal(all_to_alls(comm, NULL), 0);
  assert_int_equal(gathers_and_scatters(comm, NULL), 0);
  assert_int_equal(on_stream(comm, NULL), 0);
  float data[4] = {0}, recv[4];
  const int64_t four = 4, three = 3;
  const dc_tensor from = flat(data, &four, DC_FLOAT32);
  dc_tensor to = flat(recv, &three, DC_FLOAT32);
  assert_int_equal(dc_comm_all_to_all(comm, &from, NULL, &to, NULL, NULL), DC_E_MISMATCH);
  assert_int_equal(dc_comm_check(comm), DC_OK);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts),      cmocka_unit_test(test_gather_and_scatter),
      cmocka_unit_test(test_other_root), cmocka_unit_test(test_bad_roots),
      cmocka_unit_test(test_checksums),  cmocka_unit_test(test_among_others),
      cmocka_unit_test(test_streams),    cmocka_unit_test(test_other_counts),
      cmocka_unit_test(test_other_call), cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
