/* Collectives in two levels: blocks of ranks on several machines, which options.node tells apart here. Every type,
 * split and layout gives the bits of the direct exchange, and fewer bytes go between machines. */
#include "all_to_all_checks.h"
#include "comm_checks.h"
#include "comm_trainer.h"
#include "nodes.h"

enum { MOVES = 6 };

/* ---- blocks ---- */

static int has_length(dc_comm *comm, void *arg) {
  CHECK(length_of(comm) == *(const int32_t *)arg);
  return without_counts(comm, NULL);
}

static void test_blocks(void **state) {
  static const layout layouts[] = {{4, 2, 2}, {8, 4, 4}, {6, 3, 1},  {6, 2, 2}, {12, 6, 2}, {4, 1, 1},
                                   {4, 4, 1}, {4, 0, 1}, {4, -2, 1}, {7, 4, 1}, {1, 1, 1},  {10, 8, 2}};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(layouts); i++) {
    int32_t length = layouts[i].length;
    assert_int_equal(on_nodes(&layouts[i], has_length, &length), 0);
  }
}

/* ---- bits and bytes ---- */

/* The network carries 1/length of the direct exchange's bytes, for a float32 reduction. */
static int count_bytes(dc_comm *comm, void *arg) {
  const int64_t per = 20000, total = per * dc_comm_size(comm);
  const int32_t length = length_of(comm), blocks = dc_comm_size(comm) / length;
  float *whole = make(DC_FLOAT32, dc_comm_rank(comm), total), *part = calloc((size_t)per, sizeof *part);
  const dc_tensor from = flat(whole, &total, DC_FLOAT32);
  dc_tensor to = flat(part, &per, DC_FLOAT32), all = flat(whole, &total, DC_FLOAT32);
  (void)arg;
  CHECK(length > 1);
  long long before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, NULL, DC_SUM, NULL));
  CHECK(atomic_load(&comm->wire_bytes) - before == per * 4 * (blocks - 1)); /* a partial sum from each other block */
  before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_all_gather(comm, &to, &all, NULL, NULL));
  CHECK(atomic_load(&comm->wire_bytes) - before == per * 4 * (blocks - 1)); /* each part reaches each machine once */
  before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_broadcast(comm, &all, 1, NULL));
  const bool receives = dc_comm_rank(comm) % length == 1 && dc_comm_rank(comm) != 1;
  CHECK(atomic_load(&comm->wire_bytes) - before == (receives ? total * 4 : 0));
  free(whole);
  free(part);
  return 0;
}

static void test_bytes(void **state) {
  static const layout two_by_two = {4, 2, 2}, two_by_four = {8, 4, 4};
  (void)state;
  assert_int_equal(on_nodes(&two_by_two, count_bytes, NULL), 0);
  assert_int_equal(on_nodes(&two_by_four, count_bytes, NULL), 0);
}

static long long received_since(dc_comm *comm, long long *before) {
  const long long now = atomic_load(&comm->wire_bytes), bytes = now - *before;
  *before = now;
  return bytes;
}

/* The wire bytes of a large gather, of reductions in float32 and bfloat16, of a broadcast, of a small gather and of an
 * all-to-all. */
static int move_all(dc_comm *comm, long long wire_bytes[MOVES]) {
  const int64_t per = 20000, total = per * dc_comm_size(comm), few = 10, all = few * dc_comm_size(comm);
  float *whole = calloc((size_t)total, sizeof *whole), *part = calloc((size_t)per, sizeof *part);
  const dc_tensor small = flat(part, &few, DC_FLOAT32);
  dc_tensor to = flat(whole, &total, DC_FLOAT32), small_to = flat(whole, &all, DC_FLOAT32);
  dc_tensor own = flat(part, &per, DC_FLOAT32), narrow = flat(whole, &total, DC_BFLOAT16);
  dc_tensor narrow_own = flat(part, &per, DC_BFLOAT16);
  long long before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_all_gather(comm, &own, &to, NULL, NULL));
  wire_bytes[0] = received_since(comm, &before);
  CHECK_OK(dc_comm_reduce_scatter(comm, &to, &own, NULL, DC_SUM, NULL));
  wire_bytes[1] = received_since(comm, &before);
  CHECK_OK(dc_comm_reduce_scatter(comm, &narrow, &narrow_own, NULL, DC_MEAN, NULL));
  wire_bytes[2] = received_since(comm, &before);
  CHECK_OK(dc_comm_broadcast(comm, &to, 1, NULL));
  wire_bytes[3] = received_since(comm, &before);
  CHECK_OK(dc_comm_all_gather(comm, &small, &small_to, NULL, NULL));
  wire_bytes[4] = received_since(comm, &before);
  float *others = calloc((size_t)total, sizeof *others);
  dc_tensor from_all = flat(others, &total, DC_FLOAT32);
  CHECK_OK(dc_comm_all_to_all(comm, &to, NULL, &from_all, NULL, NULL));
  wire_bytes[5] = received_since(comm, &before);
  free(others);
  free(whole);
  free(part);
  return 0;
}

static int counts_alike(dc_comm *comm, void *arg) {
  const layout *l = arg;
  long long moved[MOVES], counted[MOVES];
  dc_device *device;
  dc_comm *count;
  CHECK(length_of(comm) == l->length && move_all(comm, moved) == 0);
  CHECK_OK(dc_device_open("count", NULL, &device));
  CHECK_OK(dc_count_set(device, "ranks_per_node", l->per_node));
  CHECK_OK(dc_comm_create_count(device, dc_comm_rank(comm), l->world, 0, &count));
  CHECK(move_all(count, counted) == 0);
  dc_comm_destroy(count);
  dc_device_destroy(device);
  for (int i = 0; i < MOVES; i++) {
    CHECK(moved[i] == counted[i]);
  }
  return 0;
}

/* A counting communicator reports the bytes of two levels, also for ranks that cannot form blocks. */
static void test_counted_bytes(void **state) {
  static const layout layouts[] = {{4, 2, 2}, {8, 4, 4}, {6, 3, 1}, {12, 6, 2}, {10, 8, 2}, {4, 0, 1}};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(layouts); i++) {
    layout l = layouts[i];
    assert_int_equal(on_nodes(&l, counts_alike, &l), 0);
  }
}

/* Uses so many elements of one type that they take several rounds. */
static int reduces_alike(dc_comm *comm, int32_t dtype, int kind, int32_t op) {
  int64_t counts[DC__COMM_MAX_WORLD];
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  const int64_t total = split(kind, dtype == DC_FLOAT32 ? 60007 : 2003, world, counts), begin = begin_of(counts, rank);
  const size_t size = dc_dtype_size(dtype);
  char *expected = make_reduced(dtype, world, total, op == DC_MEAN), *send = make(dtype, rank, total);
  char *recv = malloc((size_t)counts[rank] * size + 1), *place = send + (size_t)begin * size;
  const dc_tensor from = flat(send, &total, dtype);
  dc_tensor to = flat(recv, &counts[rank], dtype), whole = flat(send, &total, dtype);
  CHECK_OK(dc_comm_reduce_scatter(comm, &from, &to, counts, op, NULL));
  CHECK(memcmp(recv, expected + (size_t)begin * size, (size_t)counts[rank] * size) == 0);
  memset(send, 0, (size_t)total * size);
  memcpy(place, recv, (size_t)counts[rank] * size);
  CHECK_OK(dc_comm_all_gather(comm, &to, &whole, counts, NULL));
  CHECK(memcmp(send, expected, (size_t)total * size) == 0);
  free(expected);
  free(send);
  free(recv);
  return 0;
}

static int has_the_bits(dc_comm *comm, void *arg) {
  CHECK(length_of(comm) > 1);
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (int kind = 0; kind < SPLITS; kind++) {
      CHECK(reduces_alike(comm, dtypes[d], kind, DC_SUM) == 0);
      CHECK(!dc__dtype_is_float(dtypes[d]) || reduces_alike(comm, dtypes[d], kind, DC_MEAN) == 0);
    }
  }
  return broadcast_all_roots(comm, arg);
}

static void test_bits(void **state) {
  static const layout layouts[] = {{4, 2, 2}, {8, 4, 4}, {6, 2, 2}, {12, 4, 4}};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(layouts); i++) {
    assert_int_equal(on_nodes(&layouts[i], has_the_bits, NULL), 0);
  }
}

/* Computes here the reduction of one item over all ranks' tensors. */
static void reduce_alone(const dc__coll_item *item, int32_t world, int64_t count, void *result) {
  void *sources[16];
  for (int32_t r = 0; r < world; r++) {
    sources[r] = make(item->dtype, r, count);
  }
  dc__reduce(&(dc__reduction){.dst = result,
                              .src = (const void *const *)sources,
                              .count = count,
                              .dst_dtype = item->recv_dtype,
                              .src_dtype = item->dtype,
                              .n = world,
                              .mean = true,
                              .accumulate = item->accumulate != 0});
  for (int32_t r = 0; r < world; r++) {
    free(sources[r]);
  }
}

/* Several results at once, in another type, added to the output's contents: as contexts reduce. */
static int accumulates(dc_comm *comm, void *arg) {
  enum { ITEMS = 14, ELEMENTS = 6001 };
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  const dc__tag tag = {.graph_id = 1, .op = DC_OP_REDUCE_GRAD};
  dc__range ranges[16];
  dc__coll_item items[ITEMS];
  (void)arg;
  for (int32_t r = 0; r < world; r++) {
    const int64_t begin = r * (ELEMENTS / world);
    ranges[r] = (dc__range){begin, r == world - 1 ? ELEMENTS - begin : ELEMENTS / world};
  }
  for (int i = 0; i < ITEMS; i++) {
    const int32_t dtype = dtypes[i % 4];
    items[i] = (dc__coll_item){.send = make(dtype, rank, ELEMENTS),
                               .recv = calloc(ELEMENTS, sizeof(double)),
                               .ranges = ranges,
                               .total = ELEMENTS,
                               .id = i,
                               .dtype = dtype,
                               .recv_dtype = dtype == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32,
                               .accumulate = i % 2,
                               .reduce_op = DC_MEAN};
  }
  for (int step = 0; step < 2; step++) {
    dc__comm_reduce_scatter(comm, NULL, &tag, items, ITEMS);
    CHECK_OK(dc__comm_check(comm));
  }
  for (int i = 0; i < ITEMS; i++) {
    char *expected = calloc(ELEMENTS, sizeof(double));
    const size_t size = dc_dtype_size(items[i].recv_dtype);
    reduce_alone(&items[i], world, ELEMENTS, expected);
    reduce_alone(&items[i], world, ELEMENTS, expected);
    CHECK(memcmp(items[i].recv, expected + (size_t)ranges[rank].begin * size, (size_t)ranges[rank].count * size) == 0);
    free(expected);
    free(items[i].recv);
    free((void *)(uintptr_t)items[i].send);
  }
  return 0;
}

static void test_accumulation(void **state) {
  static const layout layouts[] = {{4, 2, 2}, {12, 4, 4}};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(layouts); i++) {
    assert_int_equal(on_nodes(&layouts[i], accumulates, NULL), 0);
  }
}

/* Parts for the rank's own block move over shared memory, so they are no wire bytes. */
static int exchanges(dc_comm *comm, void *arg) {
  const int64_t per = 100, total = per * dc_comm_size(comm);
  float *send = calloc((size_t)total, sizeof *send), *recv = calloc((size_t)total, sizeof *recv);
  const dc_tensor from = flat(send, &total, DC_FLOAT32);
  dc_tensor to = flat(recv, &total, DC_FLOAT32);
  const long long before = atomic_load(&comm->wire_bytes);
  CHECK(length_of(comm) > 1);
  CHECK_OK(dc_comm_all_to_all(comm, &from, NULL, &to, NULL, NULL));
  CHECK(atomic_load(&comm->wire_bytes) - before == per * 4 * (dc_comm_size(comm) - length_of(comm)));
  free(send);
  free(recv);
  return all_to_alls_with(comm, false) != 0 || gathers_and_scatters(comm, arg) != 0;
}

/* The differing ranks are in the first block, in the last one, or in two blocks. The text has their ranks in the whole
 * group. */
static int exchanges_other_counts(dc_comm *comm, void *arg) {
  return other_counts_of(comm, *(const int32_t *)arg);
}

static void test_exchanges(void **state) {
  static const layout layouts[] = {{4, 2, 2}, {8, 4, 4}, {12, 6, 2}};
  (void)state;
  for (size_t i = 0; i < DC__COUNT(layouts); i++) {
    assert_int_equal(on_nodes(&layouts[i], exchanges, NULL), 0);
    for (int32_t sender = 1; sender < layouts[i].world; sender += layouts[i].world - 2) {
      assert_int_equal(on_nodes(&layouts[i], exchanges_other_counts, &sender), 0);
    }
    int32_t first_of_second = layouts[i].length;
    assert_int_equal(on_nodes(&layouts[i], exchanges_other_counts, &first_of_second), 0);
  }
}

/* ---- contexts, copies, parts ---- */

static int trains(dc_comm *comm, void *arg) {
  CHECK(length_of(comm) > 1);
  return train_and_hash(comm, arg);
}

static void test_losses(void **state) {
  static const layout two_by_two = {4, 2, 2};
  uint64_t direct[4], levels[4];
  (void)state;
  assert_int_equal(on_threads(4, 0, train_and_hash, direct), 0);
  assert_int_equal(on_nodes(&two_by_two, trains, levels), 0);
  assert_true(direct[0] == levels[0] && direct[3] == levels[3]);
}

static int copies_and_parts(dc_comm *comm, void *arg) {
  dc_comm *copy = NULL, *half = NULL, *pair = NULL;
  CHECK_OK(dc_comm_dup(comm, &copy));
  CHECK(length_of(copy) == 4 && accumulates(copy, arg) == 0);
  CHECK_OK(dc_comm_split(comm, dc_comm_rank(comm) / 2 % 2, 0, &half)); /* each has two ranks of each machine */
  CHECK(length_of(half) == 2 && has_the_bits(half, NULL) == 0);
  CHECK_OK(dc_comm_split(comm, dc_comm_rank(comm) % 4, 0, &pair)); /* each has one rank of each machine */
  CHECK(length_of(pair) == 1 && without_counts(pair, NULL) == 0);
  CHECK_OK(dc_comm_set_checksums(comm, 1));
  CHECK(has_the_bits(comm, NULL) == 0);
  dc_comm_destroy(pair);
  dc_comm_destroy(half);
  dc_comm_destroy(copy);
  return 0;
}

static void test_copies_and_parts(void **state) {
  static const layout two_by_four = {8, 4, 4};
  (void)state;
  assert_int_equal(on_nodes(&two_by_four, copies_and_parts, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_blocks),        cmocka_unit_test(test_bits),      cmocka_unit_test(test_bytes),
      cmocka_unit_test(test_counted_bytes), cmocka_unit_test(test_losses),    cmocka_unit_test(test_copies_and_parts),
      cmocka_unit_test(test_accumulation),  cmocka_unit_test(test_exchanges),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
