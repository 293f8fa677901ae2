/* The runtime's use of a communicator beyond the public collectives: other types, memory that peers read, groups.
 */
#include "comm_data.h"

/* The result has another type, and is added to what is there. */
static int accumulate(dc_comm *comm, void *arg) {
  (void)arg;
  enum { N = 300 };
  int32_t world = dc_comm_size(comm);
  void *send = make(DC_BFLOAT16, dc_comm_rank(comm), N);
  void *ranks[DC__COMM_MAX_WORLD];
  const void *sources[DC__COMM_MAX_WORLD];
  dc__range ranges[DC__COMM_MAX_WORLD];
  float recv[N];
  float expected[N];
  for (int32_t r = 0; r < world; r++) {
    sources[r] = ranks[r] = make(DC_BFLOAT16, r, N);
    ranges[r] = (dc__range){0, N}; /* every rank receives all of it */
  }
  for (int i = 0; i < N; i++) {
    recv[i] = expected[i] = (float)i / 3;
  }
  const dc__tag tag = {.graph_id = 1, .id = 2, .op = DC_OP_REDUCE_GRAD};
  const dc__coll_item item = {.send = send,
                              .recv = recv,
                              .ranges = ranges,
                              .total = N,
                              .id = 2,
                              .dtype = DC_BFLOAT16,
                              .recv_dtype = DC_FLOAT32,
                              .accumulate = 1,
                              .reduce_op = DC_MEAN};
  for (int round = 0; round < 3; round++) {
    dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
    dc__reduce(&(dc__reduction){.dst = expected,
                                .src = sources,
                                .count = N,
                                .dst_dtype = DC_FLOAT32,
                                .src_dtype = DC_BFLOAT16,
                                .n = world,
                                .mean = true,
                                .accumulate = true});
  }
  CHECK_OK(dc__comm_check(comm));
  CHECK(memcmp(recv, expected, sizeof recv) == 0);
  for (int32_t r = 0; r < world; r++) {
    free(ranks[r]);
  }
  free(send);
  return 0;
}

static void test_accumulate(void **state) {
  (void)state;
  on_all_groups(accumulate, NULL);
}

/* Memory that peers read in place gives the same result as any other, and may be allocated and freed. */
static int heap(dc_comm *comm, void *arg) {
  (void)arg;
  if (comm->ops->heap_alloc == NULL) {
    return 0; /* no rank reads a peer's memory here */
  }
  int64_t world = dc_comm_size(comm);
  int64_t shard = 100000;
  int64_t total = shard * world;
  void *blocks[3];
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 3; i++) {
      CHECK_OK(comm->ops->heap_alloc(comm, (size_t)shard * 4, &blocks[i]));
      CHECK(*(char *)blocks[i] == 0 && ((uintptr_t)blocks[i] & 4095) == 0);
      CHECK(comm->ops->peer_accessible(comm, blocks[i], (size_t)shard * 4));
    }
    int64_t *recv = calloc((size_t)total, 4);
    for (int64_t i = 0; i < shard; i++) {
      ((int32_t *)blocks[1])[i] = (int32_t)(dc_comm_rank(comm) * shard + i + round);
    }
    const dc_tensor from = flat(blocks[1], &shard, DC_INT32);
    dc_tensor to = flat(recv, &total, DC_INT32);
    CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, NULL));
    for (int64_t i = 0; i < total; i++) {
      CHECK(((int32_t *)(void *)recv)[i] == (int32_t)(i + round));
    }
    free(recv);
    for (int i = 2; i >= 0; i--) {
      comm->ops->heap_free(comm, blocks[(i + round) % 3], (size_t)shard * 4);
    }
  }
  return 0;
}

static void test_heap(void **state) {
  (void)state;
  on_all_groups(heap, NULL);
}

static int heap_limit(dc_comm *comm, void *arg) {
  (void)arg;
  void *a = NULL;
  void *b = NULL;
  int64_t one = 1;
  CHECK(!comm->ops->peer_accessible(comm, &one, 8));
  CHECK_OK(comm->ops->heap_alloc(comm, 3 << 20, &a));
  CHECK(comm->ops->heap_alloc(comm, 2 << 20, &b) == DC_E_NO_MEMORY);
  CHECK_SAYS("heap_bytes");
  comm->ops->heap_free(comm, a, 3 << 20);
  CHECK_OK(comm->ops->heap_alloc(comm, 4 << 20, &b));
  CHECK(comm->ops->heap_alloc(comm, 1, &a) == DC_E_NO_MEMORY);
  comm->ops->heap_free(comm, b, 4 << 20);
  return 0;
}

static void test_heap_limit(void **state) {
  (void)state;
  char name[64];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = 0, .heap_bytes = 4 << 20};
  assert_int_equal(end_rank(start_rank(fresh_name(name), 0, 1, &options, heap_limit, NULL)), 0);
}

/* ---- groups ---- */

enum { MEMBERS = 30 };

static int group_on(dc_comm *comm, dc_stream *stream) {
  int32_t rank = dc_comm_rank(comm);
  int64_t counts[MEMBERS][DC__COMM_MAX_WORLD];
  int64_t totals[MEMBERS];
  char *sends[MEMBERS];
  char *recvs[MEMBERS];
  CHECK_OK(dc_comm_group_begin(comm));
  for (int i = 0; i < MEMBERS; i++) {
    int32_t dtype = dtypes[(size_t)i % DC__COUNT(dtypes)];
    totals[i] = split(i % SPLITS, i == 5 ? 50000 : 40 + i, dc_comm_size(comm), counts[i]);
    sends[i] = make(dtype, rank, totals[i]);
    recvs[i] = malloc((size_t)counts[i][rank] * 8 + 1);
    const dc_tensor from = flat(sends[i], &totals[i], dtype);
    dc_tensor to = flat(recvs[i], &counts[i][rank], dtype);
    CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, counts[i], DC_SUM, stream));
  }
  CHECK_OK(dc_comm_group_end(comm, stream));
  CHECK_OK(stream == NULL ? DC_OK : dc_stream_synchronize(stream, 0));
  for (int i = 0; i < MEMBERS; i++) {
    int32_t dtype = dtypes[(size_t)i % DC__COUNT(dtypes)];
    size_t size = dc_dtype_size(dtype);
    char *expected = make_reduced(dtype, dc_comm_size(comm), totals[i], false);
    CHECK(memcmp(recvs[i], expected + (size_t)begin_of(counts[i], rank) * size, (size_t)counts[i][rank] * size) == 0);
    free(expected);
    free(sends[i]);
    free(recvs[i]);
  }
  return 0;
}

static int group(dc_comm *comm, void *arg) {
  (void)arg;
  dc_device *device = NULL;
  dc_stream *stream = NULL;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_stream_create(device, &stream));
  CHECK(group_on(comm, NULL) == 0);
  CHECK(group_on(comm, stream) == 0);
  int64_t none = 0;
  dc_tensor empty = flat(NULL, &none, DC_FLOAT32);
  CHECK_OK(dc_comm_group_begin(comm));
  CHECK_OK(dc_comm_all_gather(comm, &empty, &empty, NULL, stream));
  CHECK(dc_comm_group_end(comm, NULL) == DC_E_INVALID); /* not the stream of the group's member */
  dc_stream_destroy(stream);
  dc_device_destroy(device);
  return 0;
}

static void test_group(void **state) {
  (void)state;
  on_all_groups(group, NULL);
}

static void test_group_errors(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  int64_t one = 1;
  float a = 1;
  float b = 0;
  const dc_tensor from = flat(&a, &one, DC_FLOAT32);
  dc_tensor to = flat(&b, &one, DC_FLOAT32);
  assert_int_equal(dc_comm_create_threads(1, NULL, &comm), DC_OK);
  assert_int_equal(dc_comm_group_end(comm, NULL), DC_E_STATE);
  assert_int_equal(dc_comm_group_begin(comm), DC_OK);
  assert_int_equal(dc_comm_group_begin(comm), DC_E_STATE);
  assert_int_equal(dc_comm_barrier(comm), DC_E_STATE);
  assert_int_equal(dc_comm_broadcast(comm, &to, 0, NULL), DC_E_STATE);
  assert_int_equal(dc_comm_all_reduce(comm, &to, DC_SUM, NULL), DC_E_STATE);
  assert_int_equal(dc_comm_all_gather(comm, &from, &to, NULL, NULL), DC_OK);
  assert_int_equal(dc_comm_reduce_scatter(comm, &from, &to, NULL, DC_SUM, NULL), DC_OK);
  assert_int_equal(dc_comm_group_end(comm, NULL), DC_E_INVALID); /* two kinds of collectives */
  assert_true(b == 0);                                           /* neither was executed */
  assert_int_equal(dc_comm_group_begin(comm), DC_OK);
  assert_int_equal(dc_comm_group_end(comm, NULL), DC_OK); /* an empty group */
  assert_int_equal(dc_comm_group_begin(comm), DC_OK);
  assert_int_equal(dc_comm_all_gather(comm, &from, &to, NULL, NULL), DC_OK);
  dc_comm_destroy(comm); /* with a group still open */
  assert_true(b == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_accumulate), cmocka_unit_test(test_heap),         cmocka_unit_test(test_heap_limit),
      cmocka_unit_test(test_group),      cmocka_unit_test(test_group_errors),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
