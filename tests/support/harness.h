/* Ranks as threads for the runtime's tests. cmocka's assertions jump, which only the main thread may do. So on a rank,
 * CHECK records the failure and returns from the rank's function, and run_ranks() asserts for all at the end. */
#ifndef TEST_HARNESS_H
#define TEST_HARNESS_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dc_api.h"

typedef struct rank {
  int32_t rank, world;
  dc_comm *comm;
  dc_device *device;
  dc_context *ctx;
  const void *user;
  char failure[640];
} rank;

typedef struct setup {
  int32_t world;
  dc_config config;
  int64_t bucket; /* in elements; 0 means 1024 */
} setup;

#define CHECK(r, condition)                                                                                       \
  do {                                                                                                            \
    if (!(condition)) {                                                                                           \
      snprintf((r)->failure, sizeof(r)->failure, "%s:%d: rank %d of %d: %s (last error: %s)", __FILE__, __LINE__, \
               (r)->rank, (r)->world, #condition, dc_last_error());                                               \
      return;                                                                                                     \
    }                                                                                                             \
  } while (0)

#define OK(r, call) CHECK(r, (call) == DC_OK)

/* The call must fail with this status and a text that has this fragment. */
#define FAILS(r, call, status, text) CHECK(r, (call) == (status) && strstr(dc_last_error(), (text)) != NULL)

typedef struct rank_job {
  rank *r;
  const setup *s;
  void (*body)(rank *r);
} rank_job;

/* The device under test. Only tests that access memory by the device's copies (tests/conformance) run on any device. */
static inline const char *test_device(void) {
  const char *name = getenv("LIBDC_TEST_DEVICE");
  return name == NULL || name[0] == '\0' ? "cpu" : name;
}

/* With LIBDC_TEST_CARDS each rank has its own card, as far as there are enough. */
static inline dc_status open_test_device(const rank *r, dc_device **device) {
  const char *cards = getenv("LIBDC_TEST_CARDS");
  char name[32];
  if (cards == NULL) {
    return dc_device_open(test_device(), NULL, device);
  }
  snprintf(name, sizeof name, "%s:%d", test_device(), r->rank % atoi(cards));
  return dc_device_open(name, NULL, device);
}

/* Over TCP, the number of ranks that share a simulated machine; 0: all share this one. */
static inline int32_t test_node_ranks(void) {
  const char *ranks = getenv("LIBDC_TEST_NODE_RANKS");
  return ranks == NULL ? 0 : atoi(ranks);
}

#ifdef DC_TESTS_ADDRESS_H
/* Makes a communicator over TCP; `base` tells all ranks where to meet. */
static inline dc_status meet_over_tcp(const rank *r, dc_comm *base, dc_comm **comm) {
  char address[64];
  const int64_t bytes = sizeof address;
  if (r->rank == 0) {
    fresh_address(address);
  }
  dc_tensor text = {.struct_size = sizeof text, .data = address, .shape = &bytes, .ndim = 1, .dtype = DC_INT8};
  dc_status status = dc_comm_broadcast(base, &text, 0, NULL);
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  char node[32];
  if (test_node_ranks() > 0) {
    snprintf(node, sizeof node, "node %d", r->rank / test_node_ranks());
    options.node = node;
  }
  return status != DC_OK ? status : dc_comm_create_tcp(address, "test", r->rank, r->world, &options, comm);
}
#endif

/* The communicator under test. With LIBDC_TEST_COMM=nccl it is one through NCCL on top of the given one; with tcp it is
 * one over TCP instead. */
static inline dc_status test_comm(rank *r) {
  const char *name = getenv("LIBDC_TEST_COMM");
  dc_comm *base = r->comm;
  dc_status status = DC_OK;
  if (name == NULL || base == NULL) {
    return DC_OK;
  } else if (strcmp(name, "nccl") == 0) {
    status = dc_comm_create_nccl(base, r->device, &r->comm);
#ifdef DC_TESTS_ADDRESS_H
  } else if (strcmp(name, "tcp") == 0) {
    status = meet_over_tcp(r, base, &r->comm);
#endif
  } else {
    return DC_OK;
  }
  if (status == DC_OK) {
    dc_comm_destroy(base);
  } else {
    r->comm = base;
  }
  return status;
}

/* Limits a test's ranks to LIBDC_TEST_RANKS, since NCCL needs a card for each. */
static inline int32_t test_world(int32_t world) {
  const char *most = getenv("LIBDC_TEST_RANKS");
  return most != NULL && atoi(most) > 0 && atoi(most) < world ? atoi(most) : world;
}

/* Runs one rank with its device and communicator, and closes them; status is the result of opening them. */
static inline void live(rank *r, const setup *s, void (*body)(rank *r), dc_status status) {
  if (status == DC_OK) {
    status = test_comm(r);
  }
  if (status == DC_OK) {
    status = dc_context_create(r->device, NULL, &r->ctx);
  }
  if (status == DC_OK) {
    dc_config config = s->config;
    config.symmetric_memory = getenv("LIBDC_TEST_SYMMETRIC") != NULL ? 1 : config.symmetric_memory;
    if (getenv("LIBDC_TEST_COMM") != NULL && strcmp(getenv("LIBDC_TEST_COMM"), "tcp") == 0) {
      config.symmetric_memory = 0; /* no rank can read another's memory */
    }
    status = dc_init(r->ctx, r->comm, &config, s->bucket == 0 ? 1024 : s->bucket);
  }
  if (status == DC_OK) {
    body(r);
  } else {
    snprintf(r->failure, sizeof r->failure, "set-up of rank %d: %s", r->rank, dc_last_error());
  }
  if (r->failure[0] != '\0') {
    dc_comm_abort(r->comm, r->failure); /* so that the others need not wait for the deadline */
  }
  dc_context_destroy(r->ctx);
  dc_device_destroy(r->device);
  dc_comm_destroy(r->comm);
}

static inline void *run_rank(void *arg) {
  rank_job *job = arg;
  live(job->r, job->s, job->body, open_test_device(job->r, &job->r->device));
  return NULL;
}

/* Runs body on every rank; fails with the first rank's failure. */
static inline void run_ranks(setup s, void (*body)(rank *r), const void *user) {
  enum { MOST = 64 };
  dc_comm *comms[MOST];
  rank ranks[MOST];
  rank_job jobs[MOST];
  pthread_t threads[MOST];
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  options.timeout_ns = INT64_C(60000000000); /* a test that hangs fails instead of waiting */
  s.config.struct_size = sizeof s.config;
  s.world = test_world(s.world);
  assert_int_equal(dc_comm_create_threads(s.world, &options, comms), DC_OK);
  memset(ranks, 0, sizeof ranks);
  for (int32_t i = 0; i < s.world; i++) {
    ranks[i].rank = i;
    ranks[i].world = s.world;
    ranks[i].comm = comms[i];
    ranks[i].user = user;
    jobs[i] = (rank_job){&ranks[i], &s, body};
    assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &jobs[i]), 0);
  }
  for (int32_t i = 0; i < s.world; i++) {
    pthread_join(threads[i], NULL);
  }
  for (int32_t i = 0; i < s.world; i++) {
    /* Prefers a rank that failed by itself to those that failed because of it. */
    if (ranks[i].failure[0] != '\0' && strstr(ranks[i].failure, "abort") == NULL) {
      fail_msg("%s", ranks[i].failure);
    }
  }
  for (int32_t i = 0; i < s.world; i++) {
    if (ranks[i].failure[0] != '\0') {
      fail_msg("%s", ranks[i].failure);
    }
  }
}

/* A flat tensor over the caller's memory. */
static inline dc_tensor flat(void *data, const int64_t *count, int32_t dtype) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = count;
  t.ndim = 1;
  t.dtype = dtype;
  return t;
}

static inline int64_t ceil_div(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

/* Values that are exact in every type that tests use, and differ for every seed and position. */
static inline float value_of(int64_t seed, int64_t i) {
  return (float)(((seed * 31 + i * 7) % 61) - 30) / 4.0f;
}

/* A parameter as one rank holds it. */
typedef struct sharded {
  int64_t id, numel, chunk;
  int64_t shape[2];
  float *shard, *grad;
} sharded;

/* Registers parameter id of shape [numel] with weights value_of(id, i) and a float32 gradient buffer. */
static inline dc_status register_sharded(rank *r, sharded *p, int64_t id, int64_t numel, int32_t persistent) {
  p->id = id;
  p->numel = numel;
  p->shape[0] = numel;
  p->chunk = ceil_div(numel, r->world);
  p->shard = calloc((size_t)p->chunk + 1, sizeof(float));
  p->grad = calloc((size_t)p->chunk + 1, sizeof(float));
  for (int64_t i = 0; i < p->chunk; i++) {
    int64_t at = r->rank * p->chunk + i;
    p->shard[i] = at < numel ? value_of(id, at) : -1e30f; /* padding must never be seen */
    p->grad[i] = 1e30f;
  }
  dc_tensor shard = flat(p->shard, &p->chunk, DC_FLOAT32);
  dc_tensor grad = flat(p->grad, &p->chunk, DC_FLOAT32);
  return dc_register_z3_param(r->ctx, id, p->shape, 1, &shard, &grad, persistent, DC_DTYPE_NONE);
}

static inline void free_sharded(sharded *p) {
  free(p->shard);
  free(p->grad);
}

#endif
