/* Checks that each rank of a communicator runs, on every transport: each collective gives the right bits, for every
 * element type and split. Functions for on_threads() and its like. */
#ifndef DC_TESTS_COMM_CHECKS_H
#define DC_TESTS_COMM_CHECKS_H

#include "comm_data.h"

static inline int gather_one(dc_comm *comm, int32_t dtype, const int64_t *counts, int64_t total, bool in_place) {
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

static inline int reduce_one(dc_comm *comm, int32_t dtype, const int64_t *counts, int64_t total, int32_t op) {
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

/* 1001 elements take one handshake; 200003 elements are read in place, or staged in one or more rounds. */
static inline int gather_and_reduce(dc_comm *comm, void *arg) {
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

/* More than fits into a staging buffer: several rounds, ragged so that some ranks run out of data early. */
static inline int many_rounds(dc_comm *comm, void *arg) {
  (void)arg;
  int64_t counts[DC__COMM_MAX_WORLD];
  for (int kind = 0; kind < 4; kind++) {
    int64_t total = split(kind, 1500007, dc_comm_size(comm), counts);
    CHECK(gather_one(comm, DC_FLOAT32, counts, total, kind == 0) == 0);
    CHECK(reduce_one(comm, DC_BFLOAT16, counts, total, DC_MEAN) == 0);
  }
  return 0;
}

/* Without counts, all ranks have the same number of elements. */
static inline int without_counts(dc_comm *comm, void *arg) {
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

static inline int broadcast_all_roots(dc_comm *comm, void *arg) {
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

static inline int exchange(dc_comm *comm, void *arg) {
  (void)arg;
  const dc__tag tag = {.graph_id = 1, .id = -1, .op = DC_OP_REGISTER_GRAPH};
  int64_t own[3] = {dc_comm_rank(comm), 7, -dc_comm_rank(comm)};
  int64_t table[3 * DC__COMM_MAX_WORLD];
  CHECK_OK(dc__comm_all_gather_int64(comm, &tag, own, 3, table));
  for (int32_t r = 0; r < dc_comm_size(comm); r++) {
    CHECK(table[3 * r] == r && table[3 * r + 1] == 7 && table[3 * r + 2] == -r);
  }
  return 0;
}

#endif
