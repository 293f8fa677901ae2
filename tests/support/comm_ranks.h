/* Runs one function on every rank of a group, as threads or as processes, for the tests of communicators.
 * Ranks must not use cmocka's assertions, which jump: they CHECK(), and the test fails if any rank returns nonzero. */
#ifndef DC_TESTS_COMM_RANKS_H
#define DC_TESTS_COMM_RANKS_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
/* cmocka wants some of the above first */
#include <cmocka.h>

#include "address.h"
#include "comm/comm.h"

#define CHECK(condition)                                                                                        \
  do {                                                                                                          \
    if (!(condition)) {                                                                                         \
      fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, dc_last_error()); \
      return 1;                                                                                                 \
    }                                                                                                           \
  } while (0)

#define CHECK_OK(call) CHECK((call) == DC_OK)

/* Checks the last error's text. */
#define CHECK_SAYS(fragment)                                                                             \
  do {                                                                                                   \
    if (strstr(dc_last_error(), (fragment)) == NULL) {                                                   \
      fprintf(stderr, "%s:%d: \"%s\" is not in: %s\n", __FILE__, __LINE__, (fragment), dc_last_error()); \
      return 1;                                                                                          \
    }                                                                                                    \
  } while (0)

#define MS INT64_C(1000000)

typedef int (*rank_fn)(dc_comm *comm, void *arg);

typedef struct rank_job {
  rank_fn fn;
  dc_comm *comm;
  void *arg;
  int result;
} rank_job;

static inline void *rank_thread(void *arg) {
  rank_job *job = arg;
  job->result = job->fn(job->comm, job->arg);
  dc_comm_destroy(job->comm);
  return NULL;
}

static inline int on_threads(int32_t world, int64_t timeout_ns, rank_fn fn, void *arg) {
  dc_comm *comms[DC__COMM_MAX_WORLD];
  pthread_t threads[DC__COMM_MAX_WORLD];
  rank_job jobs[DC__COMM_MAX_WORLD];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  CHECK_OK(dc_comm_create_threads(world, &options, comms));
  for (int32_t r = 0; r < world; r++) {
    jobs[r] = (rank_job){fn, comms[r], arg, 0};
    pthread_create(&threads[r], NULL, rank_thread, &jobs[r]);
  }
  int result = 0;
  for (int32_t r = 0; r < world; r++) {
    pthread_join(threads[r], NULL);
    result += jobs[r].result;
  }
  return result;
}

static inline const char *fresh_name(char name[64]) {
  static int groups;
  snprintf(name, 64, "test-%ld-%d", (long)getpid(), groups++);
  return name;
}

/* Starts one rank as a child process. */
static inline pid_t start_rank(const char *name, int32_t rank, int32_t world, const dc_comm_options *options,
                               rank_fn fn, void *arg) {
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    dc_comm *comm = NULL;
    int result = 1;
    if (dc_comm_create_processes(name, rank, world, options, &comm) == DC_OK) {
      result = fn(comm, arg);
      dc_comm_destroy(comm);
    } else {
      fprintf(stderr, "rank %d: %s\n", rank, dc_last_error());
    }
    fflush(NULL);
    _exit(result == 0 ? 0 : 1);
  }
  return child;
}

/* Returns 0 or the exit status; -signal if the child was killed. */
static inline int end_rank(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) {
    return 1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static inline int on_processes(int32_t world, int64_t timeout_ns, rank_fn fn, void *arg) {
  char name[64];
  pid_t children[DC__COMM_MAX_WORLD];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  fresh_name(name);
  for (int32_t r = 0; r < world; r++) {
    children[r] = start_rank(name, r, world, &options, fn, arg);
  }
  int result = 0;
  for (int32_t r = 0; r < world; r++) {
    result += end_rank(children[r]) != 0;
  }
  return result;
}

typedef struct tcp_job {
  const char *address, *name;
  int32_t rank, world;
  const dc_comm_options *options;
  rank_fn fn;
  void *arg;
  int result;
} tcp_job;

static inline void *tcp_rank(void *arg) {
  tcp_job *job = arg;
  dc_comm *comm = NULL;
  job->result = 1;
  if (dc_comm_create_tcp(job->address, job->name, job->rank, job->world, job->options, &comm) == DC_OK) {
    job->result = job->fn(comm, job->arg);
    dc_comm_destroy(comm);
  } else {
    fprintf(stderr, "rank %d: %s\n", job->rank, dc_last_error());
  }
  return NULL;
}

/* Runs ranks over TCP, as threads. */
static inline int on_tcp_with(int32_t world, const dc_comm_options *options, rank_fn fn, void *arg) {
  char name[64], address[64];
  pthread_t threads[DC__COMM_MAX_WORLD];
  tcp_job jobs[DC__COMM_MAX_WORLD];
  fresh_name(name);
  fresh_address(address);
  for (int32_t r = 0; r < world; r++) {
    jobs[r] = (tcp_job){address, name, r, world, options, fn, arg, 0};
    pthread_create(&threads[r], NULL, tcp_rank, &jobs[r]);
  }
  int result = 0;
  for (int32_t r = 0; r < world; r++) {
    pthread_join(threads[r], NULL);
    result += jobs[r].result;
  }
  return result;
}

static inline int on_tcp(int32_t world, int64_t timeout_ns, rank_fn fn, void *arg) {
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  return on_tcp_with(world, &options, fn, arg);
}

/* Runs fn on every kind of group. */
static inline void on_all_groups(rank_fn fn, void *arg) {
  const int64_t limit = INT64_C(60000000000);
  const int32_t threads[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < DC__COUNT(threads); i++) {
    assert_int_equal(on_threads(threads[i], limit, fn, arg), 0);
  }
  for (int32_t world = 2; world <= 3; world++) {
    assert_int_equal(on_processes(world, limit, fn, arg), 0);
  }
  for (int32_t world = 1; world <= 4; world++) {
    assert_int_equal(on_tcp(world, limit, fn, arg), 0);
  }
}

/* Returns whether the time was within the bounds, and reports it otherwise. */
static inline bool within(int64_t begin, int64_t min_ms, int64_t max_ms) {
  int64_t ms = (dc__now_ns() - begin) / MS;
  if (ms < min_ms || ms > max_ms) {
    fprintf(stderr, "took %lld ms, should take %lld to %lld\n", (long long)ms, (long long)min_ms, (long long)max_ms);
    return false;
  }
  return true;
}

static inline void sleep_ms(int64_t ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

/* A barrier outside the group, by a counter that starts at 0 and that processes share. From the group's own barrier a
 * rank may return after another has already aborted the group. */
static inline void meet_all_ranks(atomic_int *arrived, const dc_comm *comm) {
  int round = atomic_fetch_add(arrived, 1) / comm->world + 1;
  while (atomic_load(arrived) < round * comm->world) { /* the test's own limit is the deadline */
    sleep_ms(1);
  }
}

static inline dc_tensor flat(const void *data, const int64_t *count, int32_t dtype) {
  return (dc_tensor){
      .struct_size = sizeof(dc_tensor), .data = (void *)(uintptr_t)data, .shape = count, .ndim = 1, .dtype = dtype};
}

#endif
