/* How often an operator calls the driver and NCCL, and sleeps: its cost on the host, apart from libdc's own work. The
 * numbers are bounds, so a higher cost is noticed. Polls of NCCL are not counted, as their number depends on the
 * machine. */
#include "comm/shm/shm.h"
#include "nccl_ranks.h"

#include <stdatomic.h>

#include "comm/nccl/nccl.h"
#include "runtime/runtime.h"

enum { COUNT = 300, GRAPH = 7, ID = 1, TIMES = 100, OPERATORS = 3 };

static const int64_t second = INT64_C(1000000000);
static const int64_t whole = COUNT;

/* Naps within a millisecond of a group's end, when NCCL's thread may still be at work. libdc calls this nanosleep(), as
 * it is linked into the test. Later naps may be right on a busy machine, so they are not counted. */
static atomic_int early_naps;

int nanosleep(const struct timespec *time, struct timespec *left) {
  const int64_t ended = ncclsim_group_ended_ns();
  atomic_fetch_add(&early_naps, ended != 0 && dc__now_ns() - ended < 1000000);
  return clock_nanosleep(CLOCK_MONOTONIC, 0, time, left);
}

static int host_calls(void) {
  return cudasim_thread_calls() - ncclsim_thread_polls();
}

/* Steps until the flight recorder's ring has wrapped around, and needs no new events. */
enum { WARM = 4096 / OPERATORS + 1 };

/* Upper bounds for the mean number of calls: of a gather, a wait, a release; and of the gather stream's worker for one
 * gather. To enter a device takes four calls, once; a wrapped stream is asked once whether it is captured. */
typedef struct bounds {
  bool nccl;
  double operators[OPERATORS], worker;
} bounds;
static bounds expected;

static dc_status run_operator(dc_context *ctx, int which) {
  dc_tensor out = DC_TENSOR_INIT;
  return which == 0   ? dc_allgather_param(ctx, NULL, GRAPH, ID, DC_DTYPE_NONE, &out)
         : which == 1 ? dc_wait_allgather(ctx, NULL, GRAPH, ID)
                      : dc_release_param(ctx, NULL, GRAPH, ID, 1);
}

static void get_calls(void *args) {
  **(int **)args = host_calls();
}

/* Returns the calls of the gather stream's worker, which exists if the ranks communicate. */
static int calls_of_worker(const dc_context *ctx) {
  int calls = 0;
  int *to = &calls;
  if (ctx->world > 1) {
    dc_stream *stream = ctx->lanes[DC__LANE_GATHER];
    (void)stream->device->ops->stream_call(stream, get_calls, &to, sizeof to);
    (void)dc__stream_sync(stream, 0);
  }
  return calls;
}

/* ---- the watchdog's wake-ups ---- */

enum { POLL_NS = 5000000 };

static int64_t count_wakeups(dc__nccl *nccl) {
  pthread_mutex_lock(&nccl->watch_mutex);
  const int64_t count = nccl->num_wakeups;
  pthread_mutex_unlock(&nccl->watch_mutex);
  return count;
}

/* At most two wake-ups in a poll's interval, however many collectives there are: one to begin polling, and one at the
 * end. Once nothing is in flight, the watchdog sleeps. */
static void check_wakeups(card_rank *c, dc__nccl *nccl, int64_t before, int64_t since) {
  const int64_t wakeups = count_wakeups(nccl) - before, intervals = (dc__now_ns() - since) / POLL_NS + 1;
  printf("%d of %d ranks: %d wake-ups in %d intervals\n", c->r.rank, c->r.world, (int)wakeups, (int)intervals);
  CHECK(&c->r, wakeups <= 2 * intervals + 2);
  while (atomic_load(&nccl->num_watched) > 0) {
    clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, POLL_NS}, NULL);
  }
  const int64_t at_rest = count_wakeups(nccl);
  clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){0, 4 * POLL_NS}, NULL);
  CHECK(&c->r, count_wakeups(nccl) == at_rest);
}

/* ---- one parameter ---- */

static void count(card_rank *c, dc_stream *stream, void *shard) {
  const int64_t id = ID, own = COUNT / c->r.world;
  dc_tensor weight = flat(shard, &own, DC_FLOAT32);
  double calls[OPERATORS] = {0};
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  OK(&c->r, dc_init(c->r.ctx, c->nccl, NULL, COUNT));
  OK(&c->r, dc_context_set_stream(c->r.ctx, stream));
  OK(&c->r, dc_register_z3_param(c->r.ctx, ID, &whole, 1, &weight, NULL, 0, DC_DTYPE_NONE));
  OK(&c->r, dc_register_graph_z3(c->r.ctx, GRAPH, &id, 1));
  dc__nccl *nccl = expected.nccl && c->r.world > 1 ? (dc__nccl *)c->r.ctx->gather_comm : NULL;
  const int64_t since = dc__now_ns(), wakeups = nccl != NULL ? count_wakeups(nccl) : 0;
  int worker = 0;
  for (int i = 0; i < WARM + TIMES; i++) {
    if (i == WARM) {
      memset(calls, 0, sizeof calls);
      worker = calls_of_worker(c->r.ctx);
    }
    for (int which = 0; which < OPERATORS; which++) {
      const int before = host_calls();
      OK(&c->r, run_operator(c->r.ctx, which));
      CHECK(&c->r, cudasim_depth() == 0 && cudasim_mode() == 0);
      calls[which] += host_calls() - before;
    }
    if (i % 8 == 0) { /* a long queue would be polled more than once */
      OK(&c->r, dc_stream_synchronize(stream, 0));
    }
  }
  worker = calls_of_worker(c->r.ctx) - worker;
  printf("%d of %d ranks%s: gather %.2f, wait %.2f, release %.2f, worker %.2f\n", c->r.rank, c->r.world,
         expected.nccl ? " on NCCL" : "", calls[0] / TIMES, calls[1] / TIMES, calls[2] / TIMES, (double)worker / TIMES);
  for (int which = 0; which < OPERATORS; which++) {
    CHECK(&c->r, calls[which] <= expected.operators[which] * TIMES);
  }
  CHECK(&c->r, worker <= expected.worker * TIMES);
  OK(&c->r, run_operator(c->r.ctx, 0));
  OK(&c->r, run_operator(c->r.ctx, 1));
  const int before = host_calls();
  OK(&c->r, run_operator(c->r.ctx, 1)); /* the stream has waited for it already */
  CHECK(&c->r, host_calls() - before < calls[1] / TIMES);
  OK(&c->r, run_operator(c->r.ctx, 2));
  if (nccl != NULL) {
    OK(&c->r, dc_stream_synchronize(stream, 0));
    check_wakeups(c, nccl, wakeups, since);
  }
}

/* On a wrapped stream, as PyTorch's are. */
static void rank_counts(card_rank *c) {
  void *native = cudasim_stream();
  dc_stream *stream = NULL;
  void *shard = on_card(c, COUNT * sizeof(float));
  if (expected.nccl) {
    OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  }
  OK(&c->r, dc_stream_wrap(c->r.device, native, &stream));
  count(c, stream, shard);
  (void)dc_stream_synchronize(stream, 0);
  dc_context_destroy(c->r.ctx);
  c->r.ctx = NULL;
  off_card(c, shard, COUNT * sizeof(float));
  dc_stream_destroy(stream);
  cudasim_stream_end(native);
}

/* ---- several parameters together ---- */

enum { TOGETHER = 12, STEPS = 20 };

/* One gather of all parameters is one group of NCCL. So NCCL starts one thread for it, and libdc waits once. */
static void rank_gathers_together(card_rank *c) {
  const int64_t own = COUNT / c->r.world;
  int64_t ids[TOGETHER];
  void *shards[TOGETHER];
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  OK(&c->r, dc_init(c->r.ctx, c->nccl, NULL, COUNT));
  for (int64_t i = 0; i < TOGETHER; i++) {
    ids[i] = i;
    shards[i] = on_card(c, COUNT * sizeof(float));
    dc_tensor weight = flat(shards[i], &own, DC_FLOAT32);
    OK(&c->r, dc_register_z3_param(c->r.ctx, i, &whole, 1, &weight, NULL, 0, DC_DTYPE_NONE));
  }
  OK(&c->r, dc_register_graph_z3(c->r.ctx, GRAPH, ids, TOGETHER));
  for (int step = 0; step < STEPS; step++) {
    OK(&c->r, dc_prefetch_params_fused(c->r.ctx, GRAPH, ids, NULL, TOGETHER));
    for (int64_t i = 0; i < TOGETHER; i++) {
      OK(&c->r, dc_wait_allgather(c->r.ctx, NULL, GRAPH, i));
      OK(&c->r, dc_release_param(c->r.ctx, NULL, GRAPH, i, 1));
    }
  }
  dc_context_destroy(c->r.ctx);
  c->r.ctx = NULL;
  for (int64_t i = 0; i < TOGETHER; i++) {
    off_card(c, shards[i], COUNT * sizeof(float));
  }
}

static void test_parameters_gathered_together(void **state) {
  (void)state;
  atomic_store(&early_naps, 0);
  on_cards(2, ON_THREADS, 100 * second, rank_gathers_together);
  printf("%d gathers of %d parameters: %d groups of NCCL's, %d all-gathers\n", 2 * STEPS, TOGETHER,
         cudasim_calls("ncclGroupEnd"), cudasim_calls("ncclAllGather"));
  assert_int_equal(cudasim_calls("ncclGroupEnd"), 2 * STEPS);
  assert_int_equal(cudasim_calls("ncclAllGather"), 2 * STEPS * TOGETHER);
  assert_int_equal(atomic_load(&early_naps), 0);
}

/* ---- handshakes ---- */

/* The start of a capture makes handshakes of its own. The search for deadlocks compares the number of handshakes with
 * that of requests (src/comm/shm/deadlock.c). */
static void rank_captures(card_rank *c) {
  void *native = cudasim_stream();
  dc_stream *stream = NULL;
  void *data = on_card(c, COUNT * sizeof(float));
  dc_tensor tensor = flat(data, &whole, DC_FLOAT32);
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_stream_wrap(c->r.device, native, &stream));
  cudasim_capture(native);
  OK(&c->r, dc_comm_broadcast(c->nccl, &tensor, 0, stream));
  CHECK(&c->r, cudasim_capture_end(native));
  OK(&c->r, dc_comm_barrier(c->nccl));
  const dc__nccl *nccl = (const dc__nccl *)c->nccl;
  CHECK(&c->r, ((const dc__shm *)nccl->bootstrap)->calls == atomic_load(&nccl->head.usage->requested));
  cudasim_graph_end();
  off_card(c, data, COUNT * sizeof(float));
  dc_stream_destroy(stream);
  cudasim_stream_end(native);
}

static void test_requests_have_the_numbers_of_handshakes(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, rank_captures);
}

/* ---- all ---- */

static void test_one_rank(void **state) {
  (void)state;
  expected = (bounds){false, {13, 8, 8}, 0};
  on_cards(1, ON_THREADS, 100 * second, rank_counts);
}

static void test_one_rank_on_nccl(void **state) {
  (void)state;
  expected = (bounds){true, {22, 8, 8}, 0};
  on_cards(1, ON_THREADS, 100 * second, rank_counts);
}

static void test_two_ranks_on_nccl(void **state) {
  (void)state;
  expected = (bounds){true, {13, 10, 10}, 40};
  atomic_store(&early_naps, 0);
  on_cards(2, ON_THREADS, 100 * second, rank_counts);
  assert_int_equal(atomic_load(&early_naps), 0);
}

#define TEST(name) cmocka_unit_test_setup(name, clean_state)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_one_rank),
      TEST(test_one_rank_on_nccl),
      TEST(test_two_ranks_on_nccl),
      TEST(test_parameters_gathered_together),
      TEST(test_requests_have_the_numbers_of_handshakes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
