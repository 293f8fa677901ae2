/* Collectives through NCCL are ordered by the caller's stream, while hosts run ahead of cards that are held back. No
 * call waits for a wrapped stream, and one communicator's collectives on several streams run one after another. */
#include "nccl_ranks.h"

static const int64_t second = INT64_C(1000000000);

enum { COUNT = 96, ROUNDS = 6, MOST = 4, BAD_VALUE = 1 };

static int held_state(void **state) {
  (void)clean_state(state);
  cudasim_hold();
  return 0;
}

static int nothing_left(void **state) {
  (void)state;
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
  return 0;
}

/* ---- gathers and reductions of the tests ---- */

typedef struct data {
  float *send, *whole, *part; /* COUNT elements for each rank; all ranks' elements; a rank's part */
} data;

static size_t bytes_of(const card_rank *c, int64_t ranks) {
  return sizeof(float) * COUNT * (size_t)(ranks == 0 ? c->r.world : ranks);
}

/* The rank sends rank + seed, and its outputs begin as zeros. */
static dc_status open_data(card_rank *c, data *d, int seed) {
  float host[8 * COUNT];
  for (int i = 0; i < COUNT * c->r.world; i++) {
    host[i] = (float)(c->r.rank + seed);
  }
  d->send = on_card(c, bytes_of(c, 0));
  d->whole = on_card(c, bytes_of(c, 0));
  d->part = on_card(c, bytes_of(c, 1));
  DC__TRY(put(c, d->send, host, bytes_of(c, 0)));
  memset(host, 0, sizeof host);
  DC__TRY(put(c, d->part, host, bytes_of(c, 1)));
  return put(c, d->whole, host, bytes_of(c, 0));
}

static void close_data(card_rank *c, data *d) {
  off_card(c, d->send, bytes_of(c, 0));
  off_card(c, d->whole, bytes_of(c, 0));
  off_card(c, d->part, bytes_of(c, 1));
}

static dc_status gather(card_rank *c, const data *d, int64_t count, dc_stream *stream) {
  int64_t all = count * c->r.world;
  dc_tensor from = flat(d->send, &count, DC_FLOAT32), to = flat(d->whole, &all, DC_FLOAT32);
  return dc_comm_all_gather(c->nccl, &from, &to, NULL, stream);
}

static dc_status reduce(card_rank *c, const data *d, int64_t count, dc_stream *stream) {
  int64_t all = count * c->r.world;
  dc_tensor from = flat(d->send, &all, DC_FLOAT32), to = flat(d->part, &count, DC_FLOAT32);
  return dc_comm_reduce_scatter(c->nccl, &from, &to, NULL, DC_SUM, stream);
}

static bool is_gathered(const card_rank *c, const data *d, int seed) {
  const float *found = cudasim_host_ptr(d->whole);
  return found[0] == (float)seed && found[COUNT * c->r.world - 1] == (float)(c->r.world - 1 + seed);
}

static bool is_reduced(const card_rank *c, const data *d, int seed) {
  const float *found = cudasim_host_ptr(d->part);
  int world = c->r.world;
  return found[0] == (float)(world * seed + world * (world - 1) / 2) && found[COUNT - 1] == found[0];
}

static bool is_untouched(const data *d) {
  return *(const float *)cudasim_host_ptr(d->whole) == 0.0f && *(const float *)cudasim_host_ptr(d->part) == 0.0f;
}

static bool await_calls(const char *function, int count) {
  for (int i = 0; i < 200000 && cudasim_calls(function) < count; i++) {
    (void)usleep(1000);
  }
  return cudasim_calls(function) >= count;
}

/* ---- hosts and cards ---- */

static void runs_ahead(card_rank *c) {
  data d;
  dc_event *event;
  int32_t passed = 1;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_event_create(c->r.device, &event));
  OK(&c->r, open_data(c, &d, 3));
  for (int i = 0; i < ROUNDS; i++) {
    OK(&c->r, gather(c, &d, COUNT, c->stream));
    OK(&c->r, reduce(c, &d, COUNT, c->stream));
  }
  OK(&c->r, dc_event_record(event, c->stream));
  CHECK(&c->r, await_calls("ncclGroupEnd", 2 * ROUNDS * c->r.world)); /* all of it is queued on the cards */
  OK(&c->r, dc_event_query(event, &passed));
  CHECK(&c->r, passed == 0 && is_untouched(&d));
  OK(&c->r, dc_comm_barrier(c->nccl)); /* hosts communicate meanwhile */
  OK(&c->r, dc_event_wait(event, NULL, 0));
  OK(&c->r, dc_comm_check(c->nccl));
  CHECK(&c->r, is_gathered(c, &d, 3) && is_reduced(c, &d, 3));
  dc_event_destroy(event);
  close_data(c, &d);
}

static void test_hosts_run_ahead(void **state) {
  (void)state;
  on_cards(3, ON_PROCESSES, 100 * second, runs_ahead);
}

static void on_theirs(card_rank *c) {
  data d;
  dc_stream *wrapped;
  void *native = cudasim_stream();
  OK(&c->r, dc_stream_wrap(c->r.device, native, &wrapped));
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_data(c, &d, 5));
  for (int i = 0; i < ROUNDS; i++) {
    dc_tensor whole = flat(d.whole, &(int64_t){COUNT}, DC_FLOAT32);
    OK(&c->r, dc_comm_broadcast(c->nccl, &whole, 0, wrapped)); /* broadcasts zeros */
    OK(&c->r, gather(c, &d, COUNT, wrapped));
    OK(&c->r, reduce(c, &d, COUNT, wrapped));
    CHECK(&c->r, is_untouched(&d));
  }
  OK(&c->r, dc_stream_synchronize(wrapped, 0));
  CHECK(&c->r, is_gathered(c, &d, 5) && is_reduced(c, &d, 5));
  OK(&c->r, dc_comm_check(c->nccl));
  close_data(c, &d);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
}

static void test_a_stream_of_others_is_not_waited_for(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, on_theirs);
}

/* The caller's stream, for instance PyTorch's, waits for a gathered parameter on the card, not on the host. */
static void waits_for_a_parameter(card_rank *c) {
  const int64_t count = COUNT, all = 2 * COUNT, ids[] = {1};
  data d;
  dc_stream *wrapped;
  dc_tensor out = DC_TENSOR_INIT;
  void *native = cudasim_stream();
  OK(&c->r, dc_stream_wrap(c->r.device, native, &wrapped));
  OK(&c->r, dc_context_create(c->r.device, NULL, &c->r.ctx));
  OK(&c->r, dc_init(c->r.ctx, c->r.comm, NULL, 1000));
  OK(&c->r, dc_context_set_stream(c->r.ctx, wrapped));
  OK(&c->r, open_data(c, &d, 7));
  dc_tensor shard = flat(d.send, &count, DC_FLOAT32);
  OK(&c->r, dc_register_z3_param(c->r.ctx, 1, &all, 1, &shard, NULL, 0, DC_DTYPE_NONE));
  OK(&c->r, dc_register_graph_z3(c->r.ctx, 1, ids, 1));
  int groups = cudasim_calls("ncclGroupEnd");
  OK(&c->r, dc_allgather_param(c->r.ctx, NULL, 1, 1, DC_DTYPE_NONE, &out));
  OK(&c->r, dc_wait_allgather(c->r.ctx, NULL, 1, 1));
  dc__stream_copy(wrapped, d.whole, out.data, bytes_of(c, 2));
  OK(&c->r, dc_release_param(c->r.ctx, NULL, 1, 1, 1));
  CHECK(&c->r, is_untouched(&d) && cudasim_calls("ncclGroupEnd") > groups);
  OK(&c->r, dc_stream_synchronize(wrapped, 0));
  CHECK(&c->r, is_gathered(c, &d, 7));
  dc_context_destroy(c->r.ctx);
  c->r.ctx = NULL;
  close_data(c, &d);
  dc_stream_destroy(wrapped);
  cudasim_stream_end(native);
}

static void test_a_wait_for_a_parameter_is_the_cards(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, waits_for_a_parameter);
}

/* The deadline does not include earlier work of the stream. */
static void comes_late(card_rank *c) {
  data d;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_data(c, &d, 1));
  c->nccl->timeout_ns = 2 * second;
  OK(&c->r, gather(c, &d, COUNT, c->stream));
  (void)usleep(2500000);
  OK(&c->r, dc_comm_barrier(c->r.comm)); /* all streams reach the gather together */
  OK(&c->r, dc_stream_synchronize(c->stream, 0));
  OK(&c->r, dc_comm_check(c->nccl));
  CHECK(&c->r, is_gathered(c, &d, 1));
  close_data(c, &d);
}

static void test_the_deadline_is_that_of_the_collective(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, comes_late);
}

/* ---- several streams ---- */

static void on_two_streams(card_rank *c) {
  data d[ROUNDS];
  dc_stream *other;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, dc_stream_create(c->r.device, &other));
  for (int i = 0; i < ROUNDS; i++) {
    OK(&c->r, open_data(c, &d[i], i));
  }
  for (int i = 0; i < ROUNDS; i++) { /* the staging memory grows while earlier work is held back */
    dc_stream *stream = i % 2 == 0 ? c->stream : other;
    OK(&c->r, reduce(c, &d[i], (i + 1) * COUNT / ROUNDS, stream));
    OK(&c->r, gather(c, &d[i], COUNT, stream));
    OK(&c->r, dc_comm_barrier(c->r.comm)); /* same order on every rank: two streams' workers run independently */
    CHECK(&c->r, await_calls("ncclGroupEnd", 2 * (i + 1) * c->r.world));
    OK(&c->r, dc_comm_barrier(c->r.comm));
  }
  OK(&c->r, dc_stream_synchronize(other, 0)); /* the last collective, and so all before it */
  for (int i = 0; i < ROUNDS; i++) {
    const float *part = cudasim_host_ptr(d[i].part);
    CHECK(&c->r, is_gathered(c, &d[i], i));
    CHECK(&c->r, part[(i + 1) * COUNT / ROUNDS - 1] == (float)(2 * i + 1));
    close_data(c, &d[i]);
  }
  OK(&c->r, dc_comm_check(c->nccl));
  dc_stream_destroy(other);
}

static void test_streams_of_one_communicator(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, on_two_streams);
}

/* The communicator's end waits for its work on streams. */
static void leaves_at_once(card_rank *c) {
  data d;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_data(c, &d, 9));
  OK(&c->r, gather(c, &d, COUNT, c->stream));
  OK(&c->r, reduce(c, &d, COUNT, c->stream));
  CHECK(&c->r, await_calls("ncclGroupEnd", 2 * c->r.world));
  OK(&c->r, dc_comm_barrier(c->nccl));
  dc_comm_destroy(c->nccl);
  c->nccl = NULL;
  OK(&c->r, dc_stream_synchronize(c->stream, 0)); /* waits for the bookkeeping behind it */
  CHECK(&c->r, is_gathered(c, &d, 9) && is_reduced(c, &d, 9));
  close_data(c, &d);
}

static void test_an_end_waits(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, leaves_at_once);
}

/* ---- every call of the driver failing in turn, on one of the ranks ---- */

static const char *failing;
static int failing_before;
static int calls_seen;

static void use_all(card_rank *c) {
  data d;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_data(c, &d, 2));
  OK(&c->r, dc_comm_barrier(c->nccl));
  if (c->r.rank == 0) {
    calls_seen = cudasim_calls(failing);
    cudasim_fail(failing, failing_before, BAD_VALUE);
  }
  (void)dc_comm_barrier(c->nccl); /* the other rank may have failed already */
  dc_tensor whole = flat(d.whole, &(int64_t){COUNT}, DC_FLOAT32);
  (void)gather(c, &d, COUNT, c->stream);
  (void)reduce(c, &d, COUNT, c->stream);
  (void)dc_comm_all_reduce(c->nccl, &whole, DC_SUM, c->stream);
  dc_status status = dc_stream_synchronize(c->stream, 0);
  if (status == DC_OK && dc_comm_check(c->nccl) == DC_OK) {
    CHECK(&c->r, is_reduced(c, &d, 2)); /* without an error the result must be complete */
  }
  if (c->r.rank == 0) {
    calls_seen = cudasim_calls(failing) - calls_seen;
  }
  close_data(c, &d);
}

static int run_once(const char *function, int before) {
  clean_state(NULL);
  failing = function;
  failing_before = before;
  on_cards(2, ON_PROCESSES, 100 * second, use_all);
  if (cudasim_live() != 0 || cudasim_depth() != 0 || cudasim_lost() != 0) {
    fail_msg("%s, call %d: %d things stay behind, lost by %d", function, before, cudasim_live(), cudasim_lost());
  }
  return calls_seen;
}

static void test_every_call_of_the_driver_fails(void **state) {
  static const char *const functions[] = {"cuEventCreate",     "cuEventRecord",          "cuEventQuery",
                                          "cuStreamWaitEvent", "cuEventSynchronize",     "cuLaunchKernel",
                                          "cuLaunchHostFunc",  "cuMemAllocFromPoolAsync"};
  (void)state;
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    int calls = run_once(functions[f], INT32_MAX);
    for (int i = 0; i < calls && i < MOST; i++) {
      (void)run_once(functions[f], calls <= MOST ? i : i * calls / MOST);
    }
  }
}

#define HELD(name) cmocka_unit_test_setup_teardown(name, held_state, nothing_left)

int main(void) {
  const struct CMUnitTest tests[] = {
      HELD(test_hosts_run_ahead),
      HELD(test_a_stream_of_others_is_not_waited_for),
      HELD(test_a_wait_for_a_parameter_is_the_cards),
      HELD(test_the_deadline_is_that_of_the_collective),
      HELD(test_streams_of_one_communicator),
      HELD(test_an_end_waits),
      cmocka_unit_test_setup_teardown(test_every_call_of_the_driver_fails, clean_state, nothing_left),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
