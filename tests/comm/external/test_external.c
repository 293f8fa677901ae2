/* Communicators over the caller's own collectives: ragged, grouped and 16-bit data arrive correctly, both through an
 * all_to_all and through functions that know only equal counts and plain sums. The caller's errors become libdc's. */
#include "exchange.h"

#include "crossed_streams.h"

/* ---- data ---- */

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};

/* Small whole numbers: exact sums in every type and order. */
static void fill(void *data, int32_t dtype, int32_t rank, int64_t count) {
  float values[LARGEST];
  for (int64_t i = 0; i < count; i++) {
    values[i] = (float)((i * 7 + rank) % 13);
  }
  dc__cast(data, dtype, values, DC_FLOAT32, count);
}

static void fill_sum(void *data, int32_t dtype, int64_t count, int32_t divisor) {
  double values[LARGEST];
  for (int64_t i = 0; i < count; i++) {
    values[i] = 0;
    for (int32_t r = 0; r < WORLD; r++) {
      values[i] += (double)((i * 7 + r) % 13);
    }
    values[i] = dtype == DC_FLOAT64 ? values[i] / divisor : (double)((float)values[i] / (float)divisor);
  }
  dc__cast(data, dtype, values, DC_FLOAT64, count);
}

static const int64_t splits[][WORLD] = {{5, 5, 5}, {7, 0, 3}, {0, 0, 11}, {1000, 1001, 13}};

/* Bytes that a rank receives. Without an all_to_all, every block is as long as the longest one. */
static int64_t gathered_bytes(const int64_t *counts, int32_t rank, bool exact, size_t size) {
  int64_t longest = 0, others = 0;
  for (int32_t r = 0; r < WORLD; r++) {
    longest = counts[r] > longest ? counts[r] : longest;
    others += r == rank ? 0 : counts[r];
  }
  return (exact ? others : longest * (WORLD - 1)) * (int64_t)size;
}

/* The same for a reduction. Without an all_to_all, 16-bit types are widened. */
static int64_t reduced_bytes(const int64_t *counts, int32_t rank, bool exact, size_t size) {
  const int64_t own[WORLD] = {counts[rank], counts[rank], counts[rank]};
  return exact ? gathered_bytes(own, rank, true, size) : gathered_bytes(counts, rank, false, size == 2 ? 4 : size);
}

static int collectives(dc_comm *comm, void *arg) {
  const bool exact = arg != NULL; /* the caller's functions include an all_to_all */
  int32_t rank = dc_comm_rank(comm);
  char whole[LARGEST * 8];
  char expected[LARGEST * 8];
  char part[LARGEST * 8];
  for (size_t s = 0; s < DC__COUNT(splits); s++) {
    const int64_t *counts = splits[s];
    int64_t total = counts[0] + counts[1] + counts[2];
    int64_t begin = rank == 0 ? 0 : rank == 1 ? counts[0] : counts[0] + counts[1];
    for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
      size_t size = dc_dtype_size(dtypes[d]);
      dc_tensor own = flat(part, &counts[rank], dtypes[d]);
      dc_tensor all = flat(whole, &total, dtypes[d]);
      fill(expected, dtypes[d], 5, total);
      memcpy(part, expected + (size_t)begin * size, (size_t)counts[rank] * size);
      long long before = atomic_load(&comm->wire_bytes);
      CHECK_OK(dc_comm_all_gather(comm, &own, &all, counts, NULL));
      CHECK(memcmp(whole, expected, (size_t)total * size) == 0);
      CHECK(atomic_load(&comm->wire_bytes) - before == gathered_bytes(counts, rank, exact, size));
      int32_t op = dc__dtype_is_float(dtypes[d]) ? DC_MEAN : DC_SUM;
      fill(whole, dtypes[d], rank, total);
      fill_sum(expected, dtypes[d], total, op == DC_MEAN ? WORLD : 1);
      before = atomic_load(&comm->wire_bytes);
      CHECK_OK(dc_comm_reduce_scatter(comm, &all, &own, counts, op, NULL));
      CHECK(atomic_load(&comm->wire_bytes) - before == reduced_bytes(counts, rank, exact, size));
      CHECK(memcmp(part, expected + (size_t)begin * size, (size_t)counts[rank] * size) == 0);
      CHECK_OK(dc_comm_all_reduce(comm, &all, op, NULL));
      CHECK(memcmp(whole, expected, (size_t)total * size) == 0);
      fill(whole, dtypes[d], rank, total);
      fill(expected, dtypes[d], 1, total);
      CHECK_OK(dc_comm_broadcast(comm, &all, 1, NULL));
      CHECK(memcmp(whole, expected, (size_t)total * size) == 0);
    }
    CHECK_OK(dc_comm_barrier(comm));
  }
  return 0;
}

static int collectives_without(dc_comm *comm, void *arg) {
  (void)arg;
  return collectives(comm, NULL);
}

static void test_collectives(void **state) {
  (void)state;
  exchange exchanges[2] = {0}, others[2] = {0};
  on_external(collectives_without, exchanges);
  on_all_to_all(collectives, others);
}

/* Types of all kinds in one group, results in other types, and results added to the output's contents. */
static int group(dc_comm *comm, void *arg) {
  (void)arg;
  enum { ITEMS = 14, N = 40 };
  dc__range ranges[WORLD] = {{0, 10}, {10, 0}, {10, 30}};
  char sends[ITEMS][N * 8];
  float recvs[ITEMS][N];
  float expected[N];
  dc__coll_item items[ITEMS];
  for (int i = 0; i < ITEMS; i++) {
    int32_t dtype = dtypes[(size_t)i % DC__COUNT(dtypes)];
    fill(sends[i], dtype, comm->rank, N);
    for (int k = 0; k < N; k++) {
      recvs[i][k] = 1;
    }
    items[i] = (dc__coll_item){.send = sends[i],
                               .recv = recvs[i],
                               .ranges = ranges,
                               .total = N,
                               .id = i,
                               .dtype = dtype,
                               .recv_dtype = DC_FLOAT32,
                               .accumulate = 1,
                               .reduce_op = DC_SUM};
  }
  const dc__tag tag = {.graph_id = 1, .op = DC_OP_REDUCE_GRAD};
  dc__comm_reduce_scatter(comm, NULL, &tag, items, ITEMS);
  CHECK_OK(dc__comm_check(comm));
  fill_sum(expected, DC_FLOAT32, N, 1);
  for (int i = 0; i < ITEMS; i++) {
    for (int64_t k = 0; k < ranges[comm->rank].count; k++) {
      CHECK(recvs[i][k] == 1 + expected[ranges[comm->rank].begin + k]);
    }
  }
  return 0;
}

static void test_group(void **state) {
  (void)state;
  exchange exchanges[2] = {0}, others[2] = {0};
  on_external(group, exchanges);
  on_all_to_all(group, others);
}

/* The part has ranks 2 and 0, in this order; rank 1 is in no part. */
static int parts(dc_comm *comm, void *arg) {
  const int32_t rank = dc_comm_rank(comm);
  dc_comm *part = NULL;
  float sum = (float)rank;
  int64_t one = 1;
  dc_tensor tensor = flat(&sum, &one, DC_FLOAT32);
  (void)arg;
  CHECK_OK(dc_comm_split(comm, rank == 1 ? -1 : 4, -rank, &part));
  CHECK((part == NULL) == (rank == 1));
  if (part != NULL) {
    CHECK(dc_comm_size(part) == 2 && dc_comm_rank(part) == (rank == 0 ? 1 : 0));
    CHECK_OK(dc_comm_all_reduce(part, &tensor, DC_SUM, NULL));
    CHECK(sum == 2);
    dc_comm_abort(part, "a group of its own");
  }
  CHECK_OK(dc_comm_barrier(comm));
  dc_comm_destroy(part);
  return 0;
}

static void test_parts(void **state) {
  (void)state;
  exchange exchanges[2] = {{.size = 0}, {.size = 2}};
  on_external(parts, exchanges);
}

static int copies(dc_comm *comm, void *arg) {
  exchange *exchanges = arg;
  dc_comm *copy = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(collectives_without(copy, NULL) == 0);
  dc_comm *more = NULL;
  CHECK(dc_comm_dup(copy, &more) == DC_E_CALLBACK && more == NULL);
  CHECK_SAYS("the caller's dup returned 7");
  CHECK_OK(dc_comm_barrier(comm));
  dc_comm_abort(copy, "enough");
  CHECK(dc_comm_check(comm) == DC_E_ABORTED);
  CHECK_SAYS("enough");
  CHECK(dc_comm_barrier(comm) == DC_E_ABORTED);
  CHECK(atomic_load(&exchanges[0].aborted) > 0 && atomic_load(&exchanges[1].aborted) > 0);
  dc_comm_destroy(copy);
  return 0;
}

static void test_copies(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(copies, exchanges);
}

static int callback_error(dc_comm *comm, void *arg) {
  exchange *exchanges = arg;
  atomic_store(&exchanges[0].error, 42);
  int64_t one = 1;
  int64_t world = WORLD;
  float send[WORLD] = {0};
  float recv = 0;
  const dc_tensor from = flat(send, &world, DC_FLOAT32);
  dc_tensor to = flat(&recv, &one, DC_FLOAT32);
  CHECK(dc_comm_reduce_scatter(comm, &from, &to, NULL, DC_SUM, NULL) == DC_E_CALLBACK);
  CHECK_SAYS("the caller's reduce_scatter returned 42");
  CHECK(atomic_load(&exchanges[0].aborted) > 0);
  CHECK(dc_comm_barrier(comm) == DC_E_CALLBACK);
  return 0;
}

static void test_callback_error(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(callback_error, exchanges);
}

static int mismatch(dc_comm *comm, void *arg) {
  exchange *exchanges = arg;
  int64_t count = comm->rank == 2 ? 4 : 3;
  float data[4] = {0};
  dc_tensor tensor = flat(data, &count, DC_FLOAT32);
  CHECK(dc_comm_broadcast(comm, &tensor, 0, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("rank 2 called broadcast (16 bytes from rank 0) where rank 0 called broadcast (12 bytes from rank 0)");
  CHECK(atomic_load(&exchanges[0].aborted) == 0); /* all ranks see the mismatch, so no abort is needed */
  return 0;
}

static void test_mismatch(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(mismatch, exchanges);
}

/* Each rank passes itself as the root. */
static int other_roots(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t one = 1;
  float data = 0;
  dc_tensor tensor = flat(&data, &one, DC_FLOAT32);
  CHECK(dc_comm_broadcast(comm, &tensor, dc_comm_rank(comm), NULL) == DC_E_MISMATCH);
  CHECK_SAYS("rank 1 called broadcast (4 bytes from rank 1) where rank 0 called broadcast (4 bytes from rank 0)");
  return 0;
}

static void test_other_roots(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(other_roots, exchanges);
}

static void test_crossed_streams(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(cross_streams, exchanges);
}

/* Only rank 1 has an all_to_all, so it would never join the others' reduce_scatter. */
static int other_functions(dc_comm *comm, void *arg) {
  exchange *exchanges = arg;
  const int64_t one = 1, world = WORLD;
  float send[WORLD] = {0}, recv = 0;
  const dc_tensor from = flat(send, &world, DC_FLOAT32);
  dc_tensor to = flat(&recv, &one, DC_FLOAT32);
  dc_comm_callbacks callbacks = table;
  user own = {&exchanges[0], dc_comm_rank(comm), NULL, NULL};
  dc_comm *other = NULL;
  callbacks.user = &own;
  callbacks.all_to_all = own.rank == 1 ? all_to_all : NULL;
  atomic_fetch_add(&exchanges[0].users, 1);
  CHECK_OK(dc_comm_create_external(&callbacks, own.rank, WORLD, NULL, &other));
  CHECK(dc_comm_reduce_scatter(other, &from, &to, NULL, DC_SUM, NULL) == DC_E_MISMATCH);
  CHECK_SAYS("rank 0's callbacks have no all_to_all where those of rank 1 have one");
  dc_comm_destroy(other);
  return 0;
}

static void test_other_functions(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(other_functions, exchanges);
}

/* A rank owns a part of the result and has no memory for it: the error on all ranks names it. */
static int without_a_place(dc_comm *comm, void *arg) {
  (void)arg;
  float whole[6] = {0}, part[2] = {0};
  const dc__range ranges[WORLD] = {{0, 2}, {2, 2}, {4, 2}};
  const dc__coll_item item = {.send = whole,
                              .recv = dc_comm_rank(comm) == 1 ? NULL : part,
                              .ranges = ranges,
                              .total = 6,
                              .id = 5,
                              .dtype = DC_FLOAT32,
                              .recv_dtype = DC_FLOAT32,
                              .reduce_op = DC_MEAN};
  const dc__tag tag = {.id = 5, .op = DC_OP_REDUCE_GRAD};
  dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
  CHECK(dc_comm_check(comm) == DC_E_STATE);
  CHECK(strstr(dc_last_error(), "the gradient buffer of parameter 5 was taken away") != NULL);
  CHECK(strstr(dc_last_error(), "on rank 1") != NULL);
  return 0;
}

static void test_without_a_place(void **state) {
  (void)state;
  exchange exchanges[2] = {0};
  on_external(without_a_place, exchanges);
}

static int32_t gather_alone(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  (void)arg;
  memcpy(recv, send, (size_t)count * dc_dtype_size(dtype));
  return 0;
}

/* Two contexts could order their collectives differently on each rank, so a second context is refused. */
static void one_context_at_a_time(dc_comm *comm) {
  dc_device *device;
  dc_context *contexts[2];
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(dc_context_create(device, NULL, &contexts[i]), DC_OK);
  }
  assert_int_equal(dc_init(contexts[0], comm, NULL, 100), DC_OK);
  assert_int_equal(dc_init(contexts[1], comm, NULL, 100), DC_E_BUSY);
  assert_non_null(strstr(dc_last_error(), "(external) cannot be copied, and another context uses it"));
  assert_int_equal(dc_cleanup(contexts[0]), DC_OK);
  assert_int_equal(dc_init(contexts[1], comm, NULL, 100), DC_OK);
  for (int i = 0; i < 2; i++) {
    dc_context_destroy(contexts[i]);
  }
  dc_device_destroy(device);
}

static void test_without_dup(void **state) {
  (void)state;
  dc_comm_callbacks callbacks = table;
  dc_comm *comm = NULL;
  dc_comm *copy = NULL;
  callbacks.all_gather = gather_alone;
  callbacks.dup = NULL;
  callbacks.split = NULL;
  callbacks.abort = NULL;
  callbacks.destroy_user = NULL;
  assert_int_equal(dc_comm_create_external(&callbacks, 0, 1, NULL, &comm), DC_OK);
  assert_int_equal(dc_comm_dup(comm, &copy), DC_E_UNSUPPORTED);
  assert_int_equal(dc_comm_split(comm, 0, 0, &copy), DC_E_UNSUPPORTED);
  one_context_at_a_time(comm);
  dc_comm_abort(comm, NULL);
  assert_int_equal(dc_comm_check(comm), DC_E_ABORTED);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_collectives),     cmocka_unit_test(test_group),
      cmocka_unit_test(test_copies),          cmocka_unit_test(test_callback_error),
      cmocka_unit_test(test_mismatch),        cmocka_unit_test(test_without_dup),
      cmocka_unit_test(test_without_a_place), cmocka_unit_test(test_parts),
      cmocka_unit_test(test_other_roots),     cmocka_unit_test(test_other_functions),
      cmocka_unit_test(test_crossed_streams),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
