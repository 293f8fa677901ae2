/* Gathers and reductions for a caller that works on its own stream. */
#include "harness.h"

#include <sched.h>
#include <stdatomic.h>

enum { GRAPH = 7 };

static bool holds_weights(const dc_tensor *full, const sharded *p, float scale) {
  for (int64_t i = 0; i < p->numel; i++) {
    if (((const float *)full->data)[i] != value_of(p->id, i) * scale) {
      return false;
    }
  }
  return full->shape[0] == p->numel && full->ndim == 1 && full->dtype == DC_FLOAT32;
}

/* Gathers start after the stream's earlier work, and memory is freed after its last read there. */
static void on_a_stream(rank *r) {
  sharded p;
  int64_t id = 9;
  dc_stream *stream;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 3000, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_stream_create(r->device, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  for (int i = 0; i < 20; i++) {
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, &full, GRAPH, id));
    OK(r, dc_stream_synchronize(stream, 0));
    CHECK(r, holds_weights(&full, &p, 1.0f));
    OK(r, dc_release_param(r->ctx, &full, GRAPH, id, 1));
  }
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
  free_sharded(&p);
}

static void test_on_a_stream(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, on_a_stream, NULL);
}

/* A caller that is many parameters ahead of its stream only needs the memory of those in use at once. */
enum { AHEAD = 40, LARGE = 2 << 20 };

static void wait_until(void *user) {
  while (atomic_load((atomic_int *)user) == 0) {
    sched_yield();
  }
}

static void runs_ahead(rank *r) {
  sharded p[AHEAD];
  int64_t ids[AHEAD];
  atomic_int open = 0;
  dc_stream *stream;
  dc_tensor full = DC_TENSOR_INIT;
  for (int64_t i = 0; i < AHEAD; i++) {
    ids[i] = i;
    OK(r, register_sharded(r, &p[i], i, LARGE / 4, 0));
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, AHEAD));
  OK(r, dc_stream_create(r->device, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  OK(r, dc_stream_call(stream, wait_until, &open));
  for (int64_t i = 0; i < AHEAD; i++) {
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, i, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, &full, GRAPH, i));
    OK(r, dc_release_param(r->ctx, &full, GRAPH, i, 1));
  }
  dc_memory_stats stats = DC_MEMORY_STATS_INIT;
  OK(r, dc_context_get_memory_stats(r->ctx, &stats));
  CHECK(r, stats.gathered_peak_bytes <= 2 * LARGE); /* two of them, as many as a chunk holds */
  atomic_store(&open, 1);
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, 7, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, &full, GRAPH, 7));
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, holds_weights(&full, &p[7], 1.0f));
  OK(r, dc_release_param(r->ctx, &full, GRAPH, 7, 1));
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
  for (int64_t i = 0; i < AHEAD; i++) {
    free_sharded(&p[i]);
  }
}

static void test_a_caller_runs_ahead(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, runs_ahead, NULL);
}

/* ---- operators that a function on the caller's stream calls ---- */

enum { PARAMS = 300 }; /* more than a stream's queue holds */

typedef struct own_work {
  rank *r;
  float grads[PARAMS];
  int refused;
} own_work;

static void reduce_all(void *user) {
  own_work *w = user;
  const int64_t one = 1;
  for (int64_t i = 0; i < PARAMS; i++) {
    const dc_tensor grad = flat(&w->grads[i], &one, DC_FLOAT32);
    w->refused += dc_reduce_grad(w->r->ctx, &grad, GRAPH, i) != DC_OK;
  }
}

static void from_own_work(rank *r) {
  const int64_t one = 1;
  int64_t ids[PARAMS];
  float *buffers = calloc(PARAMS, sizeof *buffers), weight = 0;
  own_work *w = calloc(1, sizeof *w);
  dc_stream *stream;
  w->r = r;
  for (int64_t i = 0; i < PARAMS; i++) {
    dc_tensor weights = flat(&weight, &one, DC_FLOAT32), buffer = flat(&buffers[i], &one, DC_FLOAT32);
    ids[i] = i;
    w->grads[i] = (float)(i + 1);
    OK(r, dc_register_param(r->ctx, i, &one, 1, &weights, &buffer, 0));
  }
  OK(r, dc_register_graph_z0(r->ctx, GRAPH, ids, PARAMS));
  OK(r, dc_stream_create(r->device, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_stream_call(stream, reduce_all, w));
  OK(r, dc_stream_synchronize(stream, 0)); /* waits for the function */
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, w->refused == 0);
  for (int64_t i = 0; i < PARAMS; i++) {
    CHECK(r, buffers[i] == (float)(i + 1));
  }
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
  free(buffers);
  free(w);
}

static void test_from_own_work(void **state) {
  (void)state;
  run_ranks((setup){.world = 2, .bucket = 100000}, from_own_work, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_on_a_stream),
      cmocka_unit_test(test_a_caller_runs_ahead),
      cmocka_unit_test(test_from_own_work),
  };
  return cmocka_run_group_tests_name("gather_streams", tests, NULL, NULL);
}
