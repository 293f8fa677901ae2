/* Training steps of ranks on NCCL, captured into CUDA graphs. Launched, they have the bits of steps that are not
 * captured, at every stage. A failure of NCCL or of a rank ends a graph that waits in NCCL. */
#include "nccl_ranks.h"

static const int64_t second = INT64_C(1000000000);

enum { PARAMS = 3, COUNT = 301, GRAPH = 7, LAUNCHES = 3 };

/* One rank's training run, on a wrapped stream. */
typedef struct run {
  card_rank *c;
  int32_t stage;
  void *native;
  dc_stream *stream;
  dc_context *ctx;
  float *weights, *grads, *bias, *activation; /* the first two have PARAMS * COUNT elements */
  int64_t begin, count;                       /* the part of a parameter's gradient that this rank owns */
} run;

static const int64_t whole = COUNT;

/* Objects that a failed device leaves, since its card cannot be waited for during a capture. */
static int stays;

static bool graphs_stay; /* otherwise graphs are destroyed before NCCL's communicators */

static int nothing_left(void **state) {
  (void)state;
  assert_int_equal(cudasim_live(), stays);
  assert_int_equal(cudasim_depth(), 0);
  return 0;
}

static dc_status begin_with(run *r, float *ptr, int64_t elements, int seed) {
  float host[PARAMS * COUNT];
  for (int64_t i = 0; i < elements; i++) {
    host[i] = (float)((i + seed) * 7919 % 1013) / 512.0f - 1.0f;
  }
  return put(r->c, ptr, host, (size_t)elements * sizeof(float));
}

static dc_status run_alloc(run *r, int64_t elements, int seed, float **ptr) {
  *ptr = on_card(r->c, (size_t)elements * sizeof(float));
  return begin_with(r, *ptr, elements, seed);
}

/* Below stage 3 all ranks have the same weights; each rank has its own activations. */
static dc_status open_run(card_rank *c, int32_t stage, run *r) {
  static dc_status (*const graphs[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  const int64_t chunk = ceil_div(COUNT, c->r.world), shard = chunk;
  int64_t ids[PARAMS];
  *r = (run){.c = c, .stage = stage, .native = cudasim_stream()};
  r->begin = stage == 0 ? 0 : c->r.rank * chunk;
  r->count = stage == 0 ? COUNT : COUNT - r->begin < chunk ? COUNT - r->begin : chunk;
  DC__TRY(dc_stream_wrap(c->r.device, r->native, &r->stream));
  DC__TRY(run_alloc(r, PARAMS * COUNT, stage == 3 ? c->r.rank : 0, &r->weights));
  DC__TRY(run_alloc(r, PARAMS * COUNT, 0, &r->grads));
  DC__TRY(run_alloc(r, COUNT, 17 + 5 * c->r.rank, &r->bias));
  DC__TRY(run_alloc(r, COUNT, 0, &r->activation));
  DC__TRY(dc_context_create(c->r.device, NULL, &r->ctx));
  DC__TRY(dc_init(r->ctx, c->r.comm, &(dc_config){.struct_size = sizeof(dc_config), .check_finite = 1}, 2 * COUNT));
  DC__TRY(dc_context_set_stream(r->ctx, r->stream));
  for (int64_t i = 0; i < PARAMS; i++) {
    dc_tensor weight = flat(r->weights + i * COUNT, stage == 3 ? &shard : &whole, DC_FLOAT32);
    dc_tensor grad = flat(r->grads + i * COUNT, stage == 3 ? &shard : &r->count, DC_FLOAT32);
    ids[i] = i;
    DC__TRY(stage == 3 ? dc_register_z3_param(r->ctx, i, &whole, 1, &weight, &grad, i == 1, DC_DTYPE_NONE)
                       : dc_register_param(r->ctx, i, &whole, 1, &weight, &grad, r->begin));
  }
  return graphs[stage](r->ctx, GRAPH, ids, PARAMS);
}

static void close_run(run *r) {
  (void)dc_stream_synchronize(r->stream, 0);
  if (!graphs_stay) {
    cudasim_graph_end();
  }
  dc_context_destroy(r->ctx);
  off_card(r->c, r->weights, PARAMS * COUNT * sizeof(float));
  off_card(r->c, r->grads, PARAMS * COUNT * sizeof(float));
  off_card(r->c, r->bias, COUNT * sizeof(float));
  off_card(r->c, r->activation, COUNT * sizeof(float));
  dc_stream_destroy(r->stream);
  cudasim_stream_end(r->native);
}

/* Uses a parameter's weights; the last parameter's are gathered as float16. */
static dc_status use(run *r, int64_t id) {
  const void *full = r->weights + id * COUNT;
  int32_t dtype = DC_FLOAT32;
  dc_tensor out = DC_TENSOR_INIT;
  if (r->stage == 3) {
    dtype = id == PARAMS - 1 ? DC_FLOAT16 : DC_FLOAT32;
    DC__TRY(dc_allgather_param(r->ctx, NULL, GRAPH, id, dtype, &out));
    DC__TRY(dc_wait_allgather(r->ctx, NULL, GRAPH, id));
    full = out.data;
  }
  dc__stream_accumulate(r->stream, r->activation, DC_FLOAT32, full, dtype, COUNT);
  return r->stage == 3 ? dc_release_param(r->ctx, NULL, GRAPH, id, 1) : DC_OK;
}

/* The owner updates its part, and below stage 3 every rank gets all parts. */
static dc_status update(run *r) {
  int64_t counts[8];
  for (int32_t k = 0; k < r->c->r.world; k++) {
    const int64_t chunk = ceil_div(COUNT, r->c->r.world);
    counts[k] = COUNT - k * chunk < chunk ? COUNT - k * chunk : chunk;
  }
  for (int64_t i = 0; i < PARAMS; i++) {
    float *weight = r->weights + i * COUNT + (r->stage == 3 ? 0 : r->begin);
    dc__stream_accumulate(r->stream, weight, DC_FLOAT32, r->grads + i * COUNT, DC_FLOAT32, r->count);
    if (r->stage == 1 || r->stage == 2) {
      dc_tensor own = flat(weight, &r->count, DC_FLOAT32), all = flat(r->weights + i * COUNT, &whole, DC_FLOAT32);
      DC__TRY(dc_comm_all_gather(r->c->nccl, &own, &all, counts, r->stream));
    }
  }
  dc_tensor bias = flat(r->bias, &whole, DC_FLOAT32);
  DC__TRY(dc_comm_broadcast(r->c->nccl, &bias, 0, r->stream)); /* makes later activations the same on all ranks */
  DC__TRY(dc_comm_all_reduce(r->c->nccl, &bias, DC_MEAN, r->stream));
  return dc_context_params_updated(r->ctx, NULL, 0);
}

/* Two micro-batches and an optimizer's step, all on the stream. */
static dc_status step(run *r) {
  dc_tensor a = flat(r->activation, &whole, DC_FLOAT32);
  for (int32_t half = 0; half < 2; half++) {
    dc__stream_copy(r->stream, r->activation, r->bias, COUNT * sizeof(float));
    for (int64_t i = 0; i < PARAMS; i++) {
      DC__TRY(use(r, i));
    }
    DC__TRY(dc_start_backward(r->ctx, half));
    for (int64_t i = PARAMS - 1; i >= 0; i--) {
      DC__TRY(use(r, i));
      DC__TRY(dc_reduce_grad(r->ctx, &a, GRAPH, i));
    }
    DC__TRY(dc_end_backward(r->ctx, GRAPH, 0));
  }
  return update(r);
}

static dc_status capture(run *r) {
  cudasim_capture(r->native);
  dc_status status = step(r);
  if (!cudasim_capture_end(r->native) && status == DC_OK) {
    return DC_E_INTERNAL; /* a call broke the rules of a capture */
  }
  return status;
}

static bool same(run *a, run *b) {
  const size_t bytes = PARAMS * COUNT * sizeof(float);
  return dc_stream_synchronize(a->stream, 0) == DC_OK && dc_stream_synchronize(b->stream, 0) == DC_OK &&
         dc_context_check(a->ctx) == DC_OK && dc_context_check(b->ctx) == DC_OK &&
         memcmp(cudasim_host_ptr(a->weights), cudasim_host_ptr(b->weights), bytes) == 0 &&
         memcmp(cudasim_host_ptr(a->grads), cudasim_host_ptr(b->grads), bytes) == 0 &&
         memcmp(cudasim_host_ptr(a->activation), cudasim_host_ptr(b->activation), COUNT * sizeof(float)) == 0;
}

/* ---- the bits ---- */

static int32_t stage_of_all;
static bool is_first; /* nothing is gathered before the first capture, so NCCL has no connections yet */

static void steps_and_launches(card_rank *c) {
  run plain, captured;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, stage_of_all, &plain));
  OK(&c->r, open_run(c, stage_of_all, &captured));
  for (int i = 0; i < 2 * (LAUNCHES + 1); i++) {
    OK(&c->r, step(&plain));
  }
  OK(&c->r, dc_stream_synchronize(plain.stream, 0)); /* the launches come after all earlier work of c->nccl */
  if (!is_first) {
    OK(&c->r, step(&captured));
  }
  for (int k = 0; k < 2; k++) { /* a second graph replaces the first one, with a step between them */
    OK(&c->r, capture(&captured));
    for (int i = 0; i < LAUNCHES + (is_first && k == 0); i++) {
      cudasim_launch(captured.native);
    }
    if (k == 0) {
      OK(&c->r, step(&captured));
    }
  }
  CHECK(&c->r, same(&plain, &captured));
  OK(&c->r, step(&plain));
  OK(&c->r, dc_stream_synchronize(plain.stream, 0));
  OK(&c->r, step(&captured));
  CHECK(&c->r, same(&plain, &captured));
  close_run(&captured);
  close_run(&plain);
}

static void test_a_launch_is_a_step(void **state) {
  for (stage_of_all = 0; stage_of_all <= 3; stage_of_all++) {
    for (int32_t world = 2; world <= 3; world++) {
      clean_state(state);
      is_first = world == 3;
      on_cards(world, ON_PROCESSES, 100 * second, steps_and_launches);
    }
  }
}

/* ---- gradients that are not finite ---- */

/* In one launch one rank's gradient is not finite: all ranks learn of it, in that launch only. */
static void launches_are_looked_at(card_rank *c) {
  const float infinite = __builtin_inff();
  run r;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, stage_of_all, &r));
  OK(&c->r, capture(&r));
  for (int i = 0; i < 4; i++) {
    int32_t finite = -1;
    int64_t id = -1;
    OK(&c->r, begin_with(&r, r.weights, PARAMS * COUNT, 0));
    OK(&c->r, begin_with(&r, r.bias, COUNT, c->r.rank));
    if (i == 1 && c->r.rank == 1) {
      OK(&c->r, put(c, r.bias + 5, &infinite, sizeof infinite));
    }
    cudasim_launch(r.native);
    OK(&c->r, dc_context_grads_finite(r.ctx, &finite, &id));
    CHECK(&c->r, finite == (i != 1) && id == (i == 1 ? 0 : -1));
  }
  close_run(&r);
}

static void test_each_launch_looks_for_itself(void **state) {
  for (stage_of_all = 0; stage_of_all <= 3; stage_of_all++) {
    clean_state(state);
    on_cards(2, ON_PROCESSES, 100 * second, launches_are_looked_at);
  }
}

/* ---- only one of the ranks captures ---- */

static int captures_before;

static void half_captures(card_rank *c) {
  run r;
  dc_status status = DC_OK;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, 3, &r));
  for (int i = 0; i < captures_before; i++) {
    OK(&c->r, capture(&r));
    cudasim_launch(r.native);
    OK(&c->r, dc_stream_synchronize(r.stream, 0));
  }
  (void)(c->r.rank == 1 ? capture(&r) : step(&r));
  (void)dc_stream_synchronize(r.stream, 0);
  status = dc_context_check(r.ctx);
  CHECK(&c->r, status == DC_E_MISMATCH);
  CHECK(&c->r, strstr(dc_last_error(),
                      "rank 1 captured allgather_param of parameter 0 into a CUDA graph where rank 0 "
                      "called allgather_param of parameter 0 and captured nothing; all ranks must "
                      "capture a step, or none") != NULL);
  close_run(&r);
}

static void test_all_ranks_capture_or_none(void **state) {
  for (captures_before = 0; captures_before < 3; captures_before++) {
    clean_state(state);
    on_cards(2, ON_PROCESSES, 100 * second, half_captures);
  }
}

/* ---- what goes wrong in a launch ---- */

static void launch_and(card_rank *c, void (*go_wrong)(card_rank *c, run *r), dc_status expected, const char *text) {
  run r;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, 3, &r));
  OK(&c->r, capture(&r));
  cudasim_launch(r.native);
  OK(&c->r, dc_stream_synchronize(r.stream, 0));
  OK(&c->r, dc_context_check(r.ctx));
  if (c->r.rank != 1) {
    cudasim_launch(r.native);
  }
  (void)dc_comm_barrier(c->nccl); /* may end only when the group fails */
  if (c->r.rank == 1) {
    go_wrong(c, &r);
  }
  OK(&c->r, dc_stream_synchronize(r.stream, 0)); /* must not wait for ever */
  dc_status status = dc_context_check(r.ctx);
  CHECK(&c->r, (status == expected || status == DC_E_ABORTED) && strstr(dc_last_error(), text) != NULL);
  close_run(&r);
  cudasim_graph_end();
}

static void leave(card_rank *c, run *r) {
  (void)r;
  dc_comm_abort(c->r.comm, "no more launches");
}

static void is_left(card_rank *c) {
  launch_and(c, leave, DC_E_ABORTED, "no more launches");
}

static void break_next(card_rank *c, run *r) {
  ncclsim_break(c->r.rank, DC__NCCL_REMOTE_ERROR);
  cudasim_launch(r->native);
}

static void is_broken(card_rank *c) {
  launch_and(c, break_next, DC_E_PEER_DEAD, "remote process exited");
}

static void test_a_launch_that_waits_ends(void **state) {
  (void)state;
  on_cards(2, ON_PROCESSES, 100 * second, is_left);
}

static void test_a_launch_that_breaks_ends(void **state) {
  (void)state;
  on_cards(3, ON_PROCESSES, 100 * second, is_broken);
}

/* A context ends although graphs hold its communicators. Another one ends although a launch of its graph is waiting. */
static void ends_before_its_graph(card_rank *c) {
  run r;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, 3, &r));
  OK(&c->r, capture(&r));
  close_run(&r);
  cudasim_graph_end();
}

static void test_graphs_that_stay(void **state) {
  (void)state;
  graphs_stay = true;
  on_cards(2, ON_PROCESSES, second, ends_before_its_graph);
  on_cards(2, ON_PROCESSES, 100 * second, is_left);
  graphs_stay = false;
  for (int i = 0; i < 10000 && cudasim_live() > 0; i++) {
    usleep(1000); /* a thread of libdc ends the communicators */
  }
}

/* ---- every call failing in turn, while a step is captured ---- */

static const char *failing;
static int failing_before, calls_seen;

static void captures_with_a_failure(card_rank *c) {
  run r;
  OK(&c->r, dc_comm_create_nccl(c->r.comm, c->r.device, &c->nccl));
  OK(&c->r, open_run(c, 3, &r));
  OK(&c->r, dc_comm_barrier(c->nccl));
  if (c->r.rank == 0) {
    calls_seen = cudasim_calls(failing);
    cudasim_fail(failing, failing_before, 1);
  }
  (void)dc_comm_barrier(c->nccl); /* the other rank may have failed already */
  (void)capture(&r);
  (void)dc_context_check(r.ctx);
  if (c->r.rank == 0) {
    calls_seen = cudasim_calls(failing) - calls_seen;
  }
  close_run(&r);
}

static int run_once(const char *function, int before) {
  clean_state(NULL);
  failing = function;
  failing_before = before;
  on_cards(2, ON_PROCESSES, 100 * second, captures_with_a_failure);
  const int left = cudasim_live() - stays;
  stays += cudasim_calls("cuCtxSynchronize") > 0 ? left : 0;
  if (cudasim_live() != stays || cudasim_depth() != 0) {
    fail_msg("%s, call %d: %d things stay behind", function, before, left);
  }
  return calls_seen;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"ncclGroupStart",        "ncclGroupEnd",        "ncclAllGather", "ncclSend",
                                          "ncclCommGetAsyncError", "cuStreamIsCapturing", "cuLaunchKernel"};
  enum { MOST = 4 };
  (void)state;
  for (size_t f = 0; f < DC__COUNT(functions); f++) {
    int calls = run_once(functions[f], INT32_MAX);
    for (int i = 0; i < calls && i < MOST; i++) {
      (void)run_once(functions[f], calls <= MOST ? i : i * calls / MOST);
    }
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, clean_state, nothing_left)

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_launch_is_a_step),        TEST(test_each_launch_looks_for_itself),
      TEST(test_all_ranks_capture_or_none), TEST(test_a_launch_that_waits_ends),
      TEST(test_a_launch_that_breaks_ends), TEST(test_graphs_that_stay),
      TEST(test_every_call_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
