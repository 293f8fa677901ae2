/* Stands for the caller's library in the tests of external communicators: ranks are threads that meet at barriers. */
#ifndef DC_TESTS_EXTERNAL_EXCHANGE_H
#define DC_TESTS_EXTERNAL_EXCHANGE_H

#include "comm_ranks.h"

#include "kernels/kernels.h"

enum { WORLD = 3, LARGEST = 4096 };

typedef struct exchange {
  pthread_barrier_t barrier;
  int32_t size; /* number of ranks; 0: WORLD */
  const void *sends[WORLD];
  const int64_t *counts[WORLD]; /* of all_to_all, by rank */
  atomic_int users;             /* user pointers not yet given back */
  atomic_int aborted;           /* number of calls of abort */
  atomic_int error;             /* the result of the next reduce_scatter */
} exchange;

typedef struct user {
  exchange *exchange;
  int32_t rank;
  struct user *copy_of;
  exchange *next; /* the exchange of the next copy, the same on all ranks */
} user;

static inline int32_t all_gather(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  const user *u = arg;
  size_t bytes = (size_t)count * dc_dtype_size(dtype);
  u->exchange->sends[u->rank] = send;
  pthread_barrier_wait(&u->exchange->barrier);
  for (int r = 0; r < u->exchange->size; r++) {
    memcpy((char *)recv + (size_t)r * bytes, u->exchange->sends[r], bytes);
  }
  pthread_barrier_wait(&u->exchange->barrier);
  return 0;
}

static inline int32_t reduce_scatter(const void *send, void *recv, int64_t count, int32_t dtype, void *arg) {
  const user *u = arg;
  if (dtype == DC_FLOAT16 || dtype == DC_BFLOAT16) {
    return 16; /* unsupported: libdc adds these in float32 */
  }
  u->exchange->sends[u->rank] = send;
  pthread_barrier_wait(&u->exchange->barrier);
  memset(recv, 0, (size_t)count * dc_dtype_size(dtype));
  for (int r = 0; r < u->exchange->size; r++) {
    const char *block = u->exchange->sends[r];
    dc__accumulate(recv, dtype, block + (size_t)(u->rank * count) * dc_dtype_size(dtype), dtype, count);
  }
  pthread_barrier_wait(&u->exchange->barrier);
  return atomic_load(&u->exchange->error);
}

static inline int32_t all_to_all(const void *send, const int64_t *send_counts, void *recv, const int64_t *recv_counts,
                                 int32_t dtype, void *arg) {
  const user *u = arg;
  size_t size = dc_dtype_size(dtype);
  char *to = recv;
  u->exchange->sends[u->rank] = send;
  u->exchange->counts[u->rank] = send_counts;
  pthread_barrier_wait(&u->exchange->barrier);
  for (int r = 0; r < u->exchange->size; r++) {
    const char *from = u->exchange->sends[r];
    for (int before = 0; before < u->rank; before++) {
      from += (size_t)u->exchange->counts[r][before] * size;
    }
    if (recv_counts[r] != u->exchange->counts[r][u->rank]) {
      return 5;
    }
    if (recv_counts[r] > 0) {
      memcpy(to, from, (size_t)recv_counts[r] * size);
      to += (size_t)recv_counts[r] * size;
    }
  }
  pthread_barrier_wait(&u->exchange->barrier);
  return 0;
}

static inline int32_t broadcast(void *data, int64_t bytes, int32_t root, void *arg) {
  const user *u = arg;
  u->exchange->sends[u->rank] = data;
  pthread_barrier_wait(&u->exchange->barrier);
  if (u->rank != root) {
    memcpy(data, u->exchange->sends[root], (size_t)bytes);
  }
  pthread_barrier_wait(&u->exchange->barrier);
  return 0;
}

static inline int32_t barrier(void *arg) {
  const user *u = arg;
  pthread_barrier_wait(&u->exchange->barrier);
  return 0;
}

static inline int32_t copy_user(void *arg, void **out) {
  user *u = arg;
  if (u->next == NULL) {
    return 7;
  }
  user *copy = calloc(1, sizeof *copy);
  *copy = (user){u->next, u->rank, u, NULL};
  atomic_fetch_add(&u->next->users, 1);
  *out = copy;
  return 0;
}

static inline int32_t split_user(const int32_t *ranks, int32_t count, void *arg, void **out) {
  const user *u = arg;
  for (int32_t r = 0; r < count; r++) {
    if (ranks[r] == u->rank) {
      user *part = calloc(1, sizeof *part);
      *part = (user){u->next, r, (user *)arg, NULL};
      atomic_fetch_add(&u->next->users, 1);
      *out = part;
    }
  }
  return 0;
}

static inline void count_abort(void *arg) {
  const user *u = arg;
  atomic_fetch_add(&u->exchange->aborted, 1);
}

static inline void free_user(void *arg) {
  user *u = arg;
  atomic_fetch_sub(&u->exchange->users, 1);
  if (u->copy_of != NULL) {
    free(u);
  }
}

static const dc_comm_callbacks table = {.struct_size = sizeof table,
                                        .all_gather = all_gather,
                                        .reduce_scatter = reduce_scatter,
                                        .broadcast = broadcast,
                                        .barrier = barrier,
                                        .dup = copy_user,
                                        .abort = count_abort,
                                        .destroy_user = free_user,
                                        .split = split_user};

static inline void on_table(const dc_comm_callbacks *functions, rank_fn fn, exchange *exchanges) {
  dc_comm *comms[WORLD];
  user users[WORLD];
  pthread_t threads[WORLD];
  rank_job jobs[WORLD];
  for (int i = 0; i < 2; i++) {
    exchanges[i].size = exchanges[i].size == 0 ? WORLD : exchanges[i].size;
    pthread_barrier_init(&exchanges[i].barrier, NULL, (unsigned)exchanges[i].size);
  }
  for (int32_t r = 0; r < WORLD; r++) {
    users[r] = (user){&exchanges[0], r, NULL, &exchanges[1]};
    atomic_fetch_add(&exchanges[0].users, 1);
    dc_comm_callbacks callbacks = *functions;
    callbacks.user = &users[r];
    assert_int_equal(dc_comm_create_external(&callbacks, r, WORLD, NULL, &comms[r]), DC_OK);
    jobs[r] = (rank_job){fn, comms[r], exchanges, 0};
    pthread_create(&threads[r], NULL, rank_thread, &jobs[r]);
  }
  for (int32_t r = 0; r < WORLD; r++) {
    pthread_join(threads[r], NULL);
    assert_int_equal(jobs[r].result, 0);
  }
  for (int i = 0; i < 2; i++) {
    assert_int_equal(atomic_load(&exchanges[i].users), 0); /* each user pointer was given back exactly once */
    pthread_barrier_destroy(&exchanges[i].barrier);
  }
}

static inline void on_external(rank_fn fn, exchange *exchanges) {
  on_table(&table, fn, exchanges);
}

static inline void on_all_to_all(rank_fn fn, exchange *exchanges) {
  dc_comm_callbacks functions = table;
  functions.all_to_all = all_to_all;
  functions.reduce_scatter = NULL;
  on_table(&functions, fn, exchanges);
}

#endif
