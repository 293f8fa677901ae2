/* Small collectives over TCP, which go in rounds. Data and bits are those of direct messages between all ranks. If a
 * call differs on one rank, all ranks get the same error, and nothing is written. */
#include "comm/tcp/tcp.h"
#include "comm_data.h"

enum { MOST = 16, FEW = 60, MANY = 400000 };

static const int32_t worlds[] = {4, 5, 6, 7, 8, 13, MOST};
static const int64_t limit = INT64_C(60000000000);

static void on_worlds(rank_fn fn, void *arg) {
  for (size_t i = 0; i < DC__COUNT(worlds); i++) {
    assert_int_equal(on_tcp(worlds[i], limit, fn, arg), 0);
  }
}

/* ---- data ---- */

static int move_data(dc_comm *comm, int32_t dtype, const int64_t *counts, int64_t total, int32_t root) {
  const size_t size = dc_dtype_size(dtype), bytes = (size_t)total * size;
  const int64_t mine = counts[comm->rank], begin = begin_of(counts, comm->rank);
  char *whole = make(dtype, 99, total), *own = make(dtype, comm->rank, total), *got = calloc(bytes + 1, 1);
  const int32_t op = dc__dtype_is_float(dtype) ? DC_MEAN : DC_SUM;
  char *sums = make_reduced(dtype, comm->world, total, op == DC_MEAN);
  const dc_tensor part = flat(whole + (size_t)begin * size, &mine, dtype), send = flat(own, &total, dtype);
  dc_tensor recv = flat(got, &total, dtype), chunk = flat(got, &mine, dtype);
  CHECK_OK(dc_comm_all_gather(comm, &part, &recv, counts, NULL));
  CHECK(memcmp(got, whole, bytes) == 0);
  CHECK_OK(dc_comm_reduce_scatter(comm, &send, &chunk, counts, op, NULL));
  CHECK(memcmp(got, sums + (size_t)begin * size, (size_t)mine * size) == 0);
  memcpy(got, comm->rank == root ? whole : own, bytes);
  CHECK_OK(dc_comm_broadcast(comm, &recv, root, NULL));
  CHECK(memcmp(got, whole, bytes) == 0);
  free(whole);
  free(own);
  free(got);
  free(sums);
  return 0;
}

static int all_data(dc_comm *comm, void *arg) {
  if (arg != NULL) {
    CHECK_OK(dc_comm_set_checksums(comm, 1));
  }
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (int kind = 0; kind < SPLITS; kind++) {
      int64_t counts[DC__COMM_MAX_WORLD];
      int64_t total = split(kind, FEW + kind, comm->world, counts);
      CHECK(move_data(comm, dtypes[d], counts, total, (int32_t)d % comm->world) == 0);
      CHECK_OK(dc_comm_barrier(comm));
    }
  }
  return 0;
}

static void test_data(void **state) {
  (void)state;
  int checksums = 1;
  on_worlds(all_data, NULL);
  on_worlds(all_data, &checksums);
}

/* ---- words ---- */

static int exchange_words(dc_comm *comm, void *arg) {
  (void)arg;
  const dc__coll coll = {
      .comm = comm, .kind = DC__COLL_BARRIER, .tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_BARRIER}};
  for (int32_t odd = -1; odd < comm->world; odd++) {
    CHECK(comm->ops->agree(comm, &coll, comm->rank == odd ? 6 : 5) == (odd < 0));
    CHECK_OK(dc_comm_check(comm));
  }
  return 0;
}

static void test_words(void **state) {
  (void)state;
  on_worlds(exchange_words, NULL);
}

/* ---- calls that differ ---- */

typedef enum difference { OTHER_SIZE, OTHER_CALL, NOT_SMALL, ALL_BUT_ONE_NOT_SMALL, DIFFERENCES } difference;

typedef struct reports {
  difference difference;
  char text[MOST][512];
} reports;

static dc_status call_gather(dc_comm *comm, int64_t each, bool *written) {
  const int64_t total = each * comm->world;
  char *send = malloc((size_t)each), *recv = calloc((size_t)total, 1);
  memset(send, 1, (size_t)each);
  const dc_tensor from = flat(send, &each, DC_INT8);
  dc_tensor to = flat(recv, &total, DC_INT8);
  dc_status status = dc_comm_all_gather(comm, &from, &to, NULL, NULL);
  *written = memchr(recv, 1, (size_t)total) != NULL;
  free(send);
  free(recv);
  return status;
}

static int differ(dc_comm *comm, void *arg) {
  reports *t = arg;
  bool odd = comm->rank == comm->world - 2, written = false;
  CHECK_OK(call_gather(comm, FEW, &written));
  dc_status status = t->difference == OTHER_CALL && odd               ? dc_comm_barrier(comm)
                     : t->difference == OTHER_SIZE && odd             ? call_gather(comm, FEW + 1, &written)
                     : t->difference == NOT_SMALL && odd              ? call_gather(comm, MANY, &written)
                     : t->difference == ALL_BUT_ONE_NOT_SMALL && !odd ? call_gather(comm, MANY, &written)
                                                                      : call_gather(comm, FEW, &written);
  CHECK(status == DC_E_MISMATCH && (!written || (t->difference == OTHER_CALL && odd)));
  snprintf(t->text[comm->rank], sizeof t->text[0], "%s", dc_last_error());
  return 0;
}

static void test_differences(void **state) {
  (void)state;
  for (int d = 0; d < DIFFERENCES; d++) {
    for (size_t i = 0; i < DC__COUNT(worlds); i++) {
      reports t = {.difference = (difference)d};
      assert_int_equal(on_tcp(worlds[i], limit, differ, &t), 0);
      for (int32_t r = 0; r < worlds[i]; r++) {
        assert_string_equal(t.text[r], t.text[0]);
        assert_non_null(strstr(t.text[r], "where rank"));
      }
    }
  }
}

/* If a rank has no buffer for its part, all ranks get an error. */
static int take_no_part(dc_comm *comm, void *arg) {
  (void)arg;
  float send[MOST] = {0}, recv = 0;
  dc__range ranges[MOST];
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = (dc__range){r, 1};
  }
  const dc__tag tag = {.graph_id = 4, .id = 7, .op = DC_OP_REDUCE_GRAD};
  const dc__coll_item item = {.send = send,
                              .recv = comm->rank == 2 ? NULL : &recv,
                              .ranges = ranges,
                              .total = comm->world,
                              .id = 7,
                              .dtype = DC_FLOAT32,
                              .recv_dtype = DC_FLOAT32,
                              .reduce_op = DC_SUM};
  dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
  CHECK(dc_comm_check(comm) == DC_E_STATE);
  CHECK_SAYS("on rank 2");
  return 0;
}

static void test_missing_part(void **state) {
  (void)state;
  on_worlds(take_no_part, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_data), cmocka_unit_test(test_words),
                                     cmocka_unit_test(test_differences), cmocka_unit_test(test_missing_part)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
