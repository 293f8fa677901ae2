/* Shared by the tests of failing communicators: two collectives, and the state of a group that failed. */
#ifndef DC_TESTS_COMM_FAILING_H
#define DC_TESTS_COMM_FAILING_H

#include "comm_ranks.h"

enum { N = 12, BIG = 300000, SOON = 30000 /* in ms; even the busiest machine comes before the deadline of 300 s */ };

/* The two collectives of a training step, with memory of their own. */
static inline dc_status gather(dc_comm *comm, int64_t id, int64_t total, int32_t dtype) {
  int32_t world = comm->world;
  dc__range ranges[DC__COMM_MAX_WORLD];
  int64_t each = (total + world - 1) / world;
  for (int32_t r = 0; r < world; r++) {
    int64_t begin = r * each < total ? r * each : total;
    ranges[r] = (dc__range){begin, total - begin < each ? total - begin : each};
  }
  char *send = calloc((size_t)each, 8);
  char *recv = calloc((size_t)total, 8);
  const dc__tag tag = {.graph_id = 4, .id = id, .op = DC_OP_ALLGATHER_PARAM};
  const dc__coll_item item = {.send = send, .recv = recv, .ranges = ranges, .total = total, .id = id, .dtype = dtype};
  dc__comm_all_gather(comm, NULL, &tag, &item, 1);
  free(send);
  free(recv);
  return dc__comm_check(comm);
}

static inline dc_status reduce(dc_comm *comm, int64_t id, int64_t total) {
  dc__range ranges[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = r == 0 ? (dc__range){0, total} : (dc__range){total, 0};
  }
  float *send = calloc((size_t)total, sizeof *send);
  float *recv = calloc((size_t)total, sizeof *recv);
  const dc__tag tag = {.graph_id = 4, .id = id, .op = DC_OP_REDUCE_GRAD};
  const dc__coll_item item = {.send = send,
                              .recv = recv,
                              .ranges = ranges,
                              .total = total,
                              .id = id,
                              .dtype = DC_FLOAT32,
                              .recv_dtype = DC_FLOAT32,
                              .reduce_op = DC_MEAN};
  dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
  free(send);
  free(recv);
  return dc__comm_check(comm);
}

/* A failed group refuses all calls at once, with the same text. */
static inline int check_dead(dc_comm *comm, dc_status status) {
  char text[512];
  snprintf(text, sizeof text, "%s", dc_last_error());
  int64_t begin = dc__now_ns();
  CHECK(dc_comm_barrier(comm) == status);
  CHECK_SAYS(text);
  CHECK(gather(comm, 1, N, DC_FLOAT32) == status);
  CHECK(dc_comm_check(comm) == status);
  dc_comm *copy = NULL;
  CHECK(dc_comm_dup(comm, &copy) == status && copy == NULL);
  CHECK(within(begin, 0, SOON));
  return 0;
}

static inline void on_threads_and_processes(int32_t world, rank_fn fn, void *arg) {
  assert_int_equal(on_threads(world, 0, fn, arg), 0);
  assert_int_equal(on_processes(world, 0, fn, arg), 0);
}

/* Waits for the group's failure, for a rank that must come too late. */
static inline void await_failure(dc_comm *comm) {
  while (dc_comm_check(comm) == DC_OK) { /* the test's own limit is the deadline */
    sleep_ms(1);
  }
}

#endif
