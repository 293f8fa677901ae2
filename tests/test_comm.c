/* Communicators: every collective, on every element type, split and kind of group, gives the bits it should. */
#include "comm_ranks.h"

#include "kernels/kernels.h"

static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};

/* ---- data that every rank can compute for every other ---- */

/* Fractions whose sums are inexact, so that the order of additions shows. */
static float sample(int32_t rank, int64_t i) {
  uint32_t x = (uint32_t)((uint64_t)i * 2654435761u) ^ ((uint32_t)rank * 40503u + 77u);
  x = (x ^ (x >> 15)) * 2246822519u;
  x ^= x >> 13;
  return (float)(int32_t)(x & 0xffff) / 997.0f - 30.0f;
}

static void *make(int32_t dtype, int32_t rank, int64_t count) {
  float *values = malloc((size_t)count * sizeof *values + 1);
  void *data = malloc((size_t)count * dc_dtype_size(dtype) + 1);
  for (int64_t i = 0; i < count; i++) {
    values[i] = dtype == DC_INT8 ? (float)((i + rank) % 15) : sample(rank, i);
  }
  dc__cast(data, dtype, values, DC_FLOAT32, count);
  free(values);
  return data;
}

static void *make_reduced(int32_t dtype, int32_t world, int64_t count, bool mean) {
  void *ranks[DC__COMM_MAX_WORLD];
  const void *sources[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < world; r++) {
    sources[r] = ranks[r] = make(dtype, r, count);
  }
  void *result = malloc((size_t)count * dc_dtype_size(dtype) + 1);
  dc__reduce(result, dtype, sources, world, dtype, count, mean, false);
  for (int32_t r = 0; r < world; r++) {
    free(ranks[r]);
  }
  return result;
}

enum { SPLITS = 5 };

/* Ways to split about `size` elements over ranks: even, with a rest, ragged with empty ranks, all on one, prime. */
static int64_t split(int kind, int64_t size, int32_t world, int64_t *counts) {
  int64_t total = 0;
  for (int32_t r = 0; r < world; r++) {
    counts[r] = kind == 0   ? size / world
                : kind == 1 ? (r == world - 1 ? size % (size / world + 1) : size / world + 1)
                : kind == 2 ? (r % 2 == 0 ? size / (r + 2) : 0)
                : kind == 3 ? (r == world / 2 ? size : 0)
                            : 7 + r * 13 % 101;
    total += counts[r];
  }
  return total;
}

static int64_t begin_of(const int64_t *counts, int32_t rank) {
  int64_t begin = 0;
  for (int32_t r = 0; r < rank; r++) {
    begin += counts[r];
  }
  return begin;
}

/* ---- gather, reduce ---- */

static int gather_one(dc_comm *comm, int32_t dtype, const int64_t *counts, int64_t total, bool in_place) {
  int32_t rank = dc_comm_rank(comm);
  size_t size = dc_dtype_size(dtype);
  int64_t begin = begin_of(counts, rank);
  char *expected = make(dtype, 99, total);
  char *recv = calloc((size_t)total + 1, size);
  char *place = recv + (size_t)begin * size;
  char *send = in_place ? place : malloc((size_t)counts[rank] * size + 1);
  memcpy(send, expected + (size_t)begin * size, (size_t)counts[rank] * size);
  const dc_tensor from = flat(send, &counts[rank], dtype);
  dc_tensor to = flat(recv, &total, dtype);
  long long before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_all_gather(comm, &from, &to, counts, NULL));
  CHECK(memcmp(recv, expected, (size_t)total * size) == 0);
  CHECK(atomic_load(&comm->wire_bytes) - before == (total - counts[rank]) * (int64_t)size);
  if (!in_place) {
    free(send);
  }
  free(expected);
  free(recv);
  return 0;
}

static int reduce_one(dc_comm *comm, int32_t dtype, const int64_t *counts, int64_t total, int32_t op) {
  int32_t rank = dc_comm_rank(comm);
  int32_t world = dc_comm_size(comm);
  size_t size = dc_dtype_size(dtype);
  char *expected = make_reduced(dtype, world, total, op == DC_MEAN);
  char *send = make(dtype, rank, total);
  char *recv = malloc((size_t)counts[rank] * size + 1);
  const dc_tensor from = flat(send, &total, dtype);
  dc_tensor to = flat(recv, &counts[rank], dtype);
  long long before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, counts, op, NULL));
  CHECK(memcmp(recv, expected + (size_t)begin_of(counts, rank) * size, (size_t)counts[rank] * size) == 0);
  CHECK(atomic_load(&comm->wire_bytes) - before == counts[rank] * (int64_t)size * (world - 1));
  dc_tensor whole = flat(send, &total, dtype);
  CHECK_OK(dc_comm_all_reduce(comm, &whole, op, NULL));
  CHECK(memcmp(send, expected, (size_t)total * size) == 0); /* the same bits, whatever the split */
  free(expected);
  free(send);
  free(recv);
  return 0;
}

/* 1001 elements take one handshake; 200003 elements are read in place, or staged in one round or more. */
static int gather_and_reduce(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t counts[DC__COMM_MAX_WORLD];
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (int kind = 0; kind < SPLITS; kind++) {
      int64_t size = d == 0 && kind < 3 ? 200003 : 1001;
      int64_t total = split(kind, size, dc_comm_size(comm), counts);
      CHECK(gather_one(comm, dtypes[d], counts, total, false) == 0);
      CHECK(gather_one(comm, dtypes[d], counts, total, true) == 0);
      CHECK(reduce_one(comm, dtypes[d], counts, total, DC_SUM) == 0);
      if (dc__dtype_is_float(dtypes[d])) {
        CHECK(reduce_one(comm, dtypes[d], counts, total, DC_MEAN) == 0);
      }
    }
  }
  return 0;
}

static void test_gather_and_reduce(void **state) {
  (void)state;
  on_all_groups(gather_and_reduce, NULL);
}

/* More than fits into a staging buffer: several rounds, ragged so that some ranks run out of data early. */
static int many_rounds(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t counts[DC__COMM_MAX_WORLD];
  for (int kind = 0; kind < 4; kind++) {
    int64_t total = split(kind, 1500007, dc_comm_size(comm), counts);
    CHECK(gather_one(comm, DC_FLOAT32, counts, total, kind == 0) == 0);
    CHECK(reduce_one(comm, DC_BFLOAT16, counts, total, DC_MEAN) == 0);
  }
  return 0;
}

static void test_many_rounds(void **state) {
  (void)state;
  for (int32_t world = 2; world <= 3; world++) {
    assert_int_equal(on_processes(world, 0, many_rounds, NULL), 0);
  }
}

/* Without counts, all are alike. */
static int without_counts(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t one = 1;
  int64_t world = dc_comm_size(comm);
  int64_t rank = dc_comm_rank(comm);
  int64_t all[DC__COMM_MAX_WORLD];
  const dc_tensor from = flat(&rank, &one, DC_INT64);
  dc_tensor to = flat(all, &world, DC_INT64);
  CHECK_OK(dc_comm_all_gather(comm, &from, &to, NULL, NULL));
  for (int64_t r = 0; r < world; r++) {
    CHECK(all[r] == r);
  }
  int64_t sum = -1;
  dc_tensor out = flat(&sum, &one, DC_INT64);
  CHECK_OK(dc_comm_reduce_scatter(comm, &to, &out, NULL, DC_SUM, NULL));
  CHECK(sum == world * rank);
  int64_t none = 0;
  const dc_tensor empty = flat(NULL, &none, DC_FLOAT32);
  dc_tensor empty_out = empty;
  CHECK_OK(dc_comm_all_gather(comm, &empty, &empty_out, NULL, NULL));
  CHECK_OK(dc_comm_reduce_scatter(comm, &empty, &empty_out, NULL, DC_SUM, NULL));
  CHECK_OK(dc_comm_all_reduce(comm, &empty_out, DC_MEAN, NULL));
  CHECK_OK(dc_comm_broadcast(comm, &empty_out, 0, NULL));
  return 0;
}

static void test_without_counts(void **state) {
  (void)state;
  on_all_groups(without_counts, NULL);
}

/* ---- broadcast, barrier, exchange ---- */

static int broadcast_all_roots(dc_comm *comm, void *arg) {
  (void)arg;
  for (int32_t root = 0; root < dc_comm_size(comm); root++) {
    for (int64_t count = 3; count < 2000000; count = count * 97 + 1) {
      char *expected = make(DC_FLOAT32, root, count);
      char *data = dc_comm_rank(comm) == root ? make(DC_FLOAT32, root, count) : calloc((size_t)count, 4);
      dc_tensor tensor = flat(data, &count, DC_FLOAT32);
      CHECK_OK(dc_comm_broadcast(comm, &tensor, root, NULL));
      CHECK(memcmp(data, expected, (size_t)count * 4) == 0);
      free(expected);
      free(data);
    }
    CHECK_OK(dc_comm_barrier(comm));
  }
  return 0;
}

static void test_broadcast(void **state) {
  (void)state;
  on_all_groups(broadcast_all_roots, NULL);
}

static int barrier_holds(dc_comm *comm, void *arg) {
  atomic_int *arrived = arg;
  for (int round = 1; round <= 20; round++) {
    atomic_fetch_add(arrived, 1);
    CHECK_OK(dc_comm_barrier(comm));
    CHECK(atomic_load(arrived) >= round * dc_comm_size(comm));
  }
  return 0;
}

static void test_barrier(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    atomic_int arrived = 0;
    assert_int_equal(on_threads(world, 0, barrier_holds, &arrived), 0);
  }
}

static int exchange(dc_comm *comm, void *arg) {
  (void)arg;
  const dc__tag tag = {1, -1, DC_OP_REGISTER_GRAPH, NULL};
  int64_t mine[3] = {dc_comm_rank(comm), 7, -dc_comm_rank(comm)};
  int64_t table[3 * DC__COMM_MAX_WORLD];
  CHECK_OK(dc__comm_exchange(comm, &tag, mine, 3, table));
  for (int32_t r = 0; r < dc_comm_size(comm); r++) {
    CHECK(table[3 * r] == r && table[3 * r + 1] == 7 && table[3 * r + 2] == -r);
  }
  return 0;
}

static void test_exchange(void **state) {
  (void)state;
  on_all_groups(exchange, NULL);
}

/* ---- what the runtime asks for beyond the public collectives ---- */

/* Another type for the result, and adding to what is there. */
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
    ranges[r] = (dc__range){0, N}; /* all of it on every rank */
  }
  for (int i = 0; i < N; i++) {
    recv[i] = expected[i] = (float)i / 3;
  }
  const dc__tag tag = {1, 2, DC_OP_REDUCE_GRAD, NULL};
  const dc__coll_item item = {send, recv, ranges, N, 2, DC_BFLOAT16, DC_FLOAT32, 1, DC_MEAN};
  for (int round = 0; round < 3; round++) {
    dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
    dc__reduce(expected, DC_FLOAT32, sources, world, DC_BFLOAT16, N, true, true);
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

/* Memory that peers read in place gives the same result as any other, and comes and goes. */
static int heap(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t world = dc_comm_size(comm);
  int64_t shard = 100000;
  int64_t total = shard * world;
  void *blocks[3];
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 3; i++) {
      CHECK_OK(comm->ops->heap_alloc(comm, (size_t)shard * 4, &blocks[i]));
      CHECK(*(char *)blocks[i] == 0 && ((uintptr_t)blocks[i] & 4095) == 0);
      CHECK(comm->ops->shares(comm, blocks[i], (size_t)shard * 4));
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
  CHECK(!comm->ops->shares(comm, &one, 8));
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
  const dc_comm_options options = {sizeof options, 0, 4 << 20};
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
  CHECK(dc_comm_group_end(comm, NULL) == DC_E_INVALID); /* another stream than its member's */
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
  assert_int_equal(dc_comm_group_end(comm, NULL), DC_E_INVALID); /* two kinds */
  assert_true(b == 0);                                           /* none of it happened */
  assert_int_equal(dc_comm_group_begin(comm), DC_OK);
  assert_int_equal(dc_comm_group_end(comm, NULL), DC_OK); /* empty */
  assert_int_equal(dc_comm_group_begin(comm), DC_OK);
  assert_int_equal(dc_comm_all_gather(comm, &from, &to, NULL, NULL), DC_OK);
  dc_comm_destroy(comm); /* left open */
  assert_true(b == 0);
}

/* ---- alone ---- */

static void test_self(void **state) {
  (void)state;
  dc_comm *comm = NULL;
  assert_int_equal(dc__comm_create_self(&comm), DC_OK);
  assert_int_equal(gather_and_reduce(comm, NULL), 0);
  dc_comm_destroy(comm);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_gather_and_reduce), cmocka_unit_test(test_many_rounds),
      cmocka_unit_test(test_without_counts),    cmocka_unit_test(test_broadcast),
      cmocka_unit_test(test_barrier),           cmocka_unit_test(test_exchange),
      cmocka_unit_test(test_accumulate),        cmocka_unit_test(test_heap),
      cmocka_unit_test(test_heap_limit),        cmocka_unit_test(test_group),
      cmocka_unit_test(test_group_errors),      cmocka_unit_test(test_self),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
