/* More ranks than shared memory supports: threads over the caller's collectives, which need no connections. Data, sums,
 * parts and errors of 300 ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "comm_ranks.h"

enum { RANKS = 300, OTHER = 299, TURNS = 2 };

typedef struct hall {
  pthread_barrier_t barrier;
  const void *sends[RANKS];
} hall;

typedef struct guest {
  hall *hall;
  int32_t rank;
  int result;
} guest;

static int32_t hall_gather(const void *send, void *recv, int64_t count, int32_t dtype, void *user) {
  const guest *g = user;
  const size_t bytes = (size_t)count * dc_dtype_size(dtype);
  g->hall->sends[g->rank] = send;
  pthread_barrier_wait(&g->hall->barrier);
  for (int32_t r = 0; r < RANKS; r++) {
    memcpy((char *)recv + (size_t)r * bytes, g->hall->sends[r], bytes);
  }
  pthread_barrier_wait(&g->hall->barrier);
  return 0;
}

/* Assumes that all counts are equal. */
static int32_t hall_exchange(const void *send, const int64_t *send_counts, void *recv, const int64_t *recv_counts,
                             int32_t dtype, void *user) {
  const guest *g = user;
  const size_t bytes = (size_t)recv_counts[0] * dc_dtype_size(dtype);
  g->hall->sends[g->rank] = send;
  pthread_barrier_wait(&g->hall->barrier);
  for (int32_t r = 0; r < RANKS; r++) {
    memcpy((char *)recv + (size_t)r * bytes, (const char *)g->hall->sends[r] + (size_t)g->rank * bytes, bytes);
  }
  pthread_barrier_wait(&g->hall->barrier);
  return send_counts[g->rank] == recv_counts[g->rank] ? 0 : 5;
}

static int32_t hall_broadcast(void *data, int64_t bytes, int32_t root, void *user) {
  const guest *g = user;
  g->hall->sends[g->rank] = data;
  pthread_barrier_wait(&g->hall->barrier);
  if (g->rank != root) {
    memcpy(data, g->hall->sends[root], (size_t)bytes);
  }
  pthread_barrier_wait(&g->hall->barrier);
  return 0;
}

static int32_t hall_wait(void *user) {
  pthread_barrier_wait(&((const guest *)user)->hall->barrier);
  return 0;
}

/* Adds in the order of the runtime's tree over ranks: the left part has the largest power of two below the count. */
static float tree_sum(int32_t first, int32_t count) {
  int32_t left = 1;
  while (left * 2 < count) {
    left *= 2;
  }
  return count == 1 ? 1.0f / (float)(first + 1) : tree_sum(first, left) + tree_sum(first + left, count - left);
}

static int sum_has_its_order(dc_comm *comm, int32_t rank) {
  const int64_t one = 1;
  float part = -1, parts[RANKS], all[RANKS];
  for (int32_t i = 0; i < RANKS; i++) {
    parts[i] = 1.0f / (float)(rank + 1);
  }
  dc_tensor send = flat(parts, &(const int64_t){RANKS}, DC_FLOAT32), recv = flat(&part, &one, DC_FLOAT32);
  dc_tensor whole = flat(all, &(const int64_t){RANKS}, DC_FLOAT32);
  CHECK_OK(dc_comm_reduce_scatter(comm, &send, &recv, NULL, DC_SUM, NULL));
  CHECK(part == tree_sum(0, RANKS));
  part += (float)rank;
  CHECK_OK(dc_comm_all_gather(comm, &recv, &whole, NULL, NULL));
  for (int32_t r = 0; r < RANKS; r++) {
    CHECK(all[r] == tree_sum(0, RANKS) + (float)r);
  }
  return 0;
}

/* The last rank's configuration differs: its error names rank 0, and all others' errors name the last rank. */
static int difference_is_named(dc_comm *comm, int32_t rank) {
  char named[32];
  dc_device *device = NULL;
  dc_context *context = NULL;
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &context));
  CHECK(dc_init(context, comm, NULL, rank == OTHER ? 2048 : 1024) == DC_E_MISMATCH);
  snprintf(named, sizeof named, "on rank %d; it must", rank == OTHER ? 0 : OTHER);
  CHECK(strstr(dc_last_error(), named) != NULL);
  dc_context_destroy(context);
  dc_device_destroy(device);
  return 0;
}

static int run_rank(guest *g) {
  dc_comm *comm = NULL;
  const dc_comm_callbacks table = {.struct_size = sizeof table,
                                   .all_gather = hall_gather,
                                   .broadcast = hall_broadcast,
                                   .barrier = hall_wait,
                                   .all_to_all = hall_exchange,
                                   .user = g};
  CHECK_OK(dc_comm_create_external(&table, g->rank, RANKS, NULL, &comm));
  for (int32_t turn = 0; turn < TURNS; turn++) {
    CHECK(sum_has_its_order(comm, g->rank) == 0);
  }
  CHECK_OK(dc_comm_barrier(comm));
  CHECK(difference_is_named(comm, g->rank) == 0);
  dc_comm_destroy(comm);
  return 0;
}

static void *guest_main(void *arg) {
  guest *g = arg;
  g->result = run_rank(g);
  return NULL;
}

static void test_300_ranks(void **state) {
  (void)state;
  hall h;
  guest guests[RANKS];
  pthread_t threads[RANKS];
  assert_int_equal(pthread_barrier_init(&h.barrier, NULL, RANKS), 0);
  for (int32_t r = 0; r < RANKS; r++) {
    guests[r] = (guest){&h, r, 1};
    assert_int_equal(pthread_create(&threads[r], NULL, guest_main, &guests[r]), 0);
  }
  for (int32_t r = 0; r < RANKS; r++) {
    pthread_join(threads[r], NULL);
    assert_int_equal(guests[r].result, 0);
  }
  pthread_barrier_destroy(&h.barrier);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_300_ranks)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
