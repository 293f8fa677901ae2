/* Checks of all-to-alls on every transport. Each rank of a communicator runs them, by on_threads() and its like. */
#ifndef DC_TESTS_ALL_TO_ALL_CHECKS_H
#define DC_TESTS_ALL_TO_ALL_CHECKS_H

#include "comm_data.h"

enum { EXCHANGES = 5 };

/* Elements from one rank to another. The kinds are: all the same, ragged with empty parts, from one rank only, to one
 * rank only, none. */
static inline int64_t exchanged(int kind, int64_t size, int32_t from, int32_t to) {
  return kind == 0   ? size
         : kind == 1 ? (from * 7 + to * 3) % 5 * size / 4
         : kind == 2 ? (from == 0 ? size + to : 0)
         : kind == 3 ? (to == 0 ? size + from : 0)
                     : 0;
}

/* One side of a rank's exchange, with the parts for or from all ranks. */
typedef struct parts_side {
  int64_t counts[DC__COMM_MAX_WORLD];
  int64_t total;
  char *data;
} parts_side;

static inline void make_side(parts_side *side, int32_t dtype, int kind, int64_t size, int32_t rank, int32_t world,
                             bool sends) {
  side->total = 0;
  for (int32_t r = 0; r < world; r++) {
    side->counts[r] = sends ? exchanged(kind, size, rank, r) : exchanged(kind, size, r, rank);
    side->total += side->counts[r];
  }
  const size_t bytes = dc_dtype_size(dtype);
  side->data = malloc((size_t)side->total * bytes + 1);
  for (int32_t r = 0; r < world; r++) {
    char *part = make(dtype, sends ? rank * 61 + r : r * 61 + rank, side->counts[r]);
    memcpy(side->data + (size_t)begin_of(side->counts, r) * bytes, part, (size_t)side->counts[r] * bytes);
    free(part);
  }
}

static inline int64_t received_by(const parts_side *side, int32_t rank) {
  return side->total - side->counts[rank];
}

/* exact: the transport moves only the parts, without padding. */
static inline int exchange_parts(dc_comm *comm, int32_t dtype, int kind, int64_t size, bool exact) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  const size_t bytes = dc_dtype_size(dtype);
  parts_side sent, expected;
  make_side(&sent, dtype, kind, size, rank, world, true);
  make_side(&expected, dtype, kind, size, rank, world, false);
  char *recv = calloc((size_t)expected.total + 1, bytes);
  void *nowhere = (void *)(uintptr_t)1; /* an empty tensor may have any address */
  const dc_tensor from = flat(sent.total > 0 ? sent.data : nowhere, &sent.total, dtype);
  dc_tensor to = flat(expected.total > 0 ? recv : nowhere, &expected.total, dtype);
  const bool alike = kind == 0 && dtype != DC_INT8; /* all counts are equal, so none are passed */
  const long long before = atomic_load(&comm->wire_bytes);
  CHECK_OK(dc_comm_all_to_all(comm, &from, alike ? NULL : sent.counts, &to, alike ? NULL : expected.counts, NULL));
  CHECK(memcmp(recv, expected.data, (size_t)expected.total * bytes) == 0);
  CHECK(!exact || atomic_load(&comm->wire_bytes) - before == received_by(&expected, rank) * (int64_t)bytes);
  free(sent.data);
  free(expected.data);
  free(recv);
  return 0;
}

/* Gathers each rank's elements to a root, which scatters them back. Without counts all ranks have the same number. */
static inline int gather_and_scatter(dc_comm *comm, int32_t dtype, int32_t root, int64_t size, bool alike) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  int64_t counts[DC__COMM_MAX_WORLD], total = 0;
  for (int32_t r = 0; r < world; r++) {
    counts[r] = alike ? size : r == 1 ? 0 : size + r;
    total += counts[r];
  }
  const size_t bytes = dc_dtype_size(dtype);
  char *own = make(dtype, rank + root, counts[rank]), *back = calloc((size_t)counts[rank] + 1, bytes);
  char *all = calloc((size_t)total + 1, bytes);
  const dc_tensor part = flat(own, &counts[rank], dtype);
  dc_tensor whole = flat(all, &total, dtype), returned = flat(back, &counts[rank], dtype);
  dc_tensor *at_root = rank == root ? &whole : NULL;
  CHECK_OK(dc_comm_gather(comm, &part, at_root, alike ? NULL : counts, root, NULL));
  for (int32_t r = 0; r < world && rank == root; r++) {
    char *expected = make(dtype, r + root, counts[r]);
    CHECK(memcmp(all + (size_t)begin_of(counts, r) * bytes, expected, (size_t)counts[r] * bytes) == 0);
    free(expected);
  }
  CHECK_OK(dc_comm_scatter(comm, at_root, alike ? NULL : counts, &returned, root, NULL));
  CHECK(memcmp(own, back, (size_t)counts[rank] * bytes) == 0);
  free(own);
  free(back);
  free(all);
  return 0;
}

static inline int gathers_and_scatters(dc_comm *comm, void *arg) {
  (void)arg;
  for (int32_t root = 0; root < dc_comm_size(comm); root++) {
    CHECK(gather_and_scatter(comm, DC_BFLOAT16, root, 77, true) == 0);
    CHECK(gather_and_scatter(comm, DC_INT8, root, 5, false) == 0);
    CHECK(gather_and_scatter(comm, DC_FLOAT32, root, 200003, false) == 0);
  }
  return 0;
}

/* Parts that are staged whole, staged in rounds, and read in place. */
static inline int all_to_alls_with(dc_comm *comm, bool exact) {
  for (size_t d = 0; d < DC__COUNT(dtypes); d++) {
    for (int kind = 0; kind < EXCHANGES; kind++) {
      CHECK(exchange_parts(comm, dtypes[d], kind, 101, exact) == 0);
    }
  }
  for (int kind = 0; kind < EXCHANGES; kind++) {
    CHECK(exchange_parts(comm, DC_FLOAT32, kind, 300007, exact) == 0);
  }
  return exchange_parts(comm, DC_INT8, 1, 3, exact);
}

static inline int all_to_alls(dc_comm *comm, void *arg) {
  (void)arg;
  return all_to_alls_with(comm, true);
}

/* A rank sends the rank before it one element more than that expects. Every rank gets the same error. */
static inline int other_counts_of(dc_comm *comm, int32_t sender) {
  const int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  int64_t counts[DC__COMM_MAX_WORLD], sends[DC__COMM_MAX_WORLD];
  char text[100];
  for (int32_t r = 0; r < world; r++) {
    counts[r] = sends[r] = 5;
  }
  sends[sender - 1] += rank == sender ? 1 : 0;
  const int64_t total = 5 * (int64_t)world, sent = total + (rank == sender ? 1 : 0);
  float *data = calloc((size_t)total + 1, sizeof *data), *recv = calloc((size_t)total, sizeof *recv);
  const dc_tensor from = flat(data, &sent, DC_FLOAT32);
  dc_tensor to = flat(recv, &total, DC_FLOAT32);
  dc_status status = dc_comm_all_to_all(comm, &from, sends, &to, counts, NULL);
  status = status == DC_OK ? dc_comm_barrier(comm) : status; /* a rank that already has its own parts learns it here */
  CHECK(status == DC_E_MISMATCH);
  snprintf(text, sizeof text, "all_to_all: rank %d sends 6 elements to rank %d, which expects 5", sender, sender - 1);
  CHECK_SAYS(text);
  free(data);
  free(recv);
  return 0;
}

static inline int other_counts(dc_comm *comm, void *arg) {
  (void)arg;
  return other_counts_of(comm, 1);
}

#endif
