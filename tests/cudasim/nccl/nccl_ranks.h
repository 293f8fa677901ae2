/* Ranks on simulated cards for the tests of NCCL: threads that rendezvous as processes do, each with its own device. */
#ifndef TESTS_NCCL_RANKS_H
#define TESTS_NCCL_RANKS_H

#include "address.h"
#include "harness.h"

#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "comm/nccl/library.h"
#include "cudasim.h"
#include "kernels/kernels.h"
#include "ncclsim.h"

typedef struct card_rank {
  rank r; /* r.comm is the bootstrap communicator of nccl */
  dc_comm *nccl;
  dc_stream *stream;
  void (*body)(struct card_rank *c);
  const char *name;    /* of the group of processes; NULL: threads */
  const char *address; /* of rank 0; NULL: not over TCP */
  int64_t timeout_ns;
} card_rank;

typedef enum meeting { ON_THREADS, ON_PROCESSES, ON_TCP } meeting;

static bool one_card; /* all ranks use one card */

static inline int clean_state(void **state) {
  (void)state;
  cudasim_reset();
  ncclsim_reset();
  cudasim_set_devices(8, 9, 1);
  return 0;
}

static inline void *run_card_rank(void *arg) {
  card_rank *c = arg;
  rank *r = &c->r;
  char device[16];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = c->timeout_ns, .heap_bytes = 64 << 20};
  snprintf(device, sizeof device, "cuda:%d", one_card ? 0 : r->rank);
  dc_status status = dc_device_open(device, NULL, &r->device);
  if (status == DC_OK && c->address != NULL) {
    status = dc_comm_create_tcp(c->address, c->name, r->rank, r->world, &options, &r->comm);
  } else if (status == DC_OK && c->name != NULL) {
    status = dc_comm_create_processes(c->name, r->rank, r->world, &options, &r->comm);
  }
  if (status == DC_OK) {
    status = dc_stream_create(r->device, &c->stream);
  }
  if (status == DC_OK) {
    c->body(c);
  } else {
    snprintf(r->failure, sizeof r->failure, "set-up of rank %d: %s", r->rank, dc_last_error());
  }
  if (r->failure[0] != '\0') {
    dc_comm_abort(r->comm, r->failure);
  }
  dc_stream_destroy(c->stream);
  dc_comm_destroy(c->nccl);
  dc_context_destroy(r->ctx);
  dc_comm_destroy(r->comm);
  dc_device_destroy(r->device);
  return NULL;
}

/* Runs body on every rank. Fails with the first failure that a rank did not get from another one. */
static inline void on_cards(int32_t world, meeting meet, int64_t timeout_ns, void (*body)(card_rank *c)) {
  static int groups;
  static card_rank ranks[8];
  dc_comm *comms[8] = {NULL};
  pthread_t threads[8];
  char name[64], address[64];
  const dc_comm_options options = {.struct_size = sizeof options, .timeout_ns = timeout_ns};
  fresh_address(address);
  snprintf(name, sizeof name, "test-nccl-%ld-%d", (long)getpid(), groups++);
  if (meet == ON_THREADS) {
    assert_int_equal(dc_comm_create_threads(world, &options, comms), DC_OK);
  }
  memset(ranks, 0, sizeof ranks);
  for (int32_t i = 0; i < world; i++) {
    ranks[i] = (card_rank){.r = {.rank = i, .world = world, .comm = comms[i]},
                           .body = body,
                           .name = meet == ON_THREADS ? NULL : name,
                           .address = meet == ON_TCP ? address : NULL,
                           .timeout_ns = timeout_ns};
    assert_int_equal(pthread_create(&threads[i], NULL, run_card_rank, &ranks[i]), 0);
  }
  for (int32_t i = 0; i < world; i++) {
    pthread_join(threads[i], NULL);
  }
  for (int32_t pass = 0; pass < 2; pass++) {
    for (int32_t i = 0; i < world; i++) {
      if (ranks[i].r.failure[0] != '\0' && (pass == 1 || strstr(ranks[i].r.failure, "abort") == NULL)) {
        fail_msg("%s", ranks[i].r.failure);
      }
    }
  }
}

/* ---- memory of the rank's card ---- */

/* Values that are exact in every type, and differ for every seed. */
static inline void fill(void *data, int32_t dtype, int64_t seed, int64_t count) {
  double values[4096];
  for (int64_t i = 0; i < count; i++) {
    values[i] = (double)((seed * 31 + i * 7) % 61 - 30);
  }
  if (dtype == DC_FLOAT64) {
    memcpy(data, values, (size_t)count * 8);
  } else {
    dc__cast(data, dtype, values, DC_FLOAT64, count);
  }
}

static inline void *on_card(card_rank *c, size_t bytes) {
  void *ptr = NULL;
  return c->r.device->ops->alloc(c->r.device, bytes, DC_MEMORY_DEVICE, &ptr) == DC_OK ? ptr : NULL;
}

static inline void off_card(card_rank *c, void *ptr, size_t bytes) {
  c->r.device->ops->free(c->r.device, ptr, bytes, DC_MEMORY_DEVICE);
}

static inline dc_status put(card_rank *c, void *to, const void *from, size_t bytes) {
  dc__stream_copy(c->stream, to, from, bytes);
  return dc_stream_synchronize(c->stream, 0);
}

#endif
