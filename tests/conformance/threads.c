/* P: any order of calls, several threads, ranks that disagree. */
#include "conformance.h"

/* ---- calls in any order ---- */

enum { PARAMS = 4, GRAPHS = 3, CALLS = 400 };

typedef struct chaos {
  rank *r;
  uint64_t state;
  param p[PARAMS];
  array tensors[2];
  dc_stream *stream;
  int64_t passed, failed;
} chaos;

static int64_t pick(chaos *c, int64_t below) {
  uint64_t z = (c->state += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (int64_t)((z ^ (z >> 31)) % (uint64_t)below);
}

/* Returns a registered id, one that is sometimes registered, or one that never is. */
static int64_t pick_param(chaos *c) {
  int64_t id = pick(c, PARAMS + 2);
  return id <= PARAMS ? id : INT64_MIN;
}

static dc_status any_gather(chaos *c, int64_t graph, int64_t id) {
  static const int32_t types[] = {DC_DTYPE_NONE, DC_FLOAT32, DC_BFLOAT16, DC_FLOAT64, DC_BOOL, 99, -3};
  dc_context *ctx = c->r->ctx;
  dc_tensor full = DC_TENSOR_INIT;
  dc_buffer *buffer;
  int32_t dtype = types[pick(c, 7)];
  int64_t ids[3] = {id, pick_param(c), pick_param(c)};
  switch (pick(c, 8)) {
    case 0:
      return dc_allgather_param(ctx, NULL, graph, id, dtype, pick(c, 9) == 0 ? NULL : &full);
    case 1:
      return dc_wait_allgather(ctx, NULL, graph, id);
    case 2:
      return dc_release_param(ctx, NULL, graph, id, pick(c, 5) - 1);
    case 3:
      return dc_prefetch_params_fused(ctx, graph, ids, NULL, pick(c, 4));
    case 4: {
      dc_status status = dc_take_param(ctx, graph, id, dtype, &buffer);
      dc_buffer_release(buffer);
      return status;
    }
    case 5:
      return pick(c, 2) == 0 ? dc_set_persistent(ctx, id) : dc_clear_persistent(ctx, id);
    case 6:
      return pick(c, 2) == 0 ? dc_invalidate_gathered_param(ctx, id) : dc_clear_all_gathered_params(ctx);
    default:
      return pick(c, 2) == 0 ? dc_context_params_updated(ctx, &id, 1) : dc_context_params_updated(ctx, NULL, 0);
  }
}

static dc_status any_reduction(chaos *c, int64_t graph, int64_t id) {
  dc_context *ctx = c->r->ctx;
  param *p = &c->p[pick(c, PARAMS)];
  dc_tensor grad = tensor_of(&p->source);
  switch (pick(c, 8)) {
    case 0:
    case 1:
      return dc_reduce_grad(ctx, &grad, graph, id); /* the parameter often has another length */
    case 2:
      grad.dtype = pick(c, 2) == 0 ? DC_INT8 : 55;
      return dc_reduce_grad(ctx, &grad, graph, id);
    case 3:
      grad.struct_size = (size_t)pick(c, sizeof grad);
      return dc_reduce_grad(ctx, &grad, graph, p->id);
    case 4:
      return dc_start_backward(ctx, (int32_t)pick(c, 3));
    case 5:
      return dc_end_backward(ctx, graph, (int32_t)pick(c, 3));
    case 6:
      return pick(c, 2) == 0 ? dc_context_accumulate_grads(ctx, &id, 1) : dc_enable_profiling(ctx, (int32_t)pick(c, 3));
    default:
      /* Only for stage 3: at other stages a rank that owns nothing cannot know that the others' buffers are gone. */
      return pick(c, 3) == 0 ? dc_context_step_abort(ctx)
                             : dc_context_update_param_grad_buffer(ctx, id < 2 ? id : PARAMS, NULL, pick(c, 3) - 1);
  }
}

static dc_status any_registration(chaos *c, int64_t graph, int64_t id) {
  dc_context *ctx = c->r->ctx;
  param *p = &c->p[pick(c, PARAMS)];
  dc_tensor weights = tensor_of(&p->weights), grad = tensor_of(&p->buffer);
  int64_t ids[3] = {id, pick(c, PARAMS), pick_param(c)};
  switch (pick(c, 7)) {
    case 0:
      return dc_register_z3_param(ctx, p->id, p->shape, (int32_t)pick(c, 3), &weights, &grad, (int32_t)pick(c, 3),
                                  (int32_t)pick(c, 6));
    case 1:
      return dc_register_param(ctx, p->id, p->shape, p->ndim, &weights, &grad, pick(c, 2) == 0 ? p->begin : 1000);
    case 2:
      return dc_unregister_param(ctx, id);
    case 3:
    case 4:
      return register_graph(c->r, graph, 1 + (int32_t)pick(c, 3), ids, pick(c, 4));
    case 5:
      return dc_unregister_graph(ctx, graph);
    default:
      return pick(c, 3) == 0 ? dc_reset(ctx) : dc_register_graph_z3(ctx, graph, NULL, pick(c, 3) - 1);
  }
}

static dc_status any_other(chaos *c, int64_t graph, int64_t id) {
  dc_context *ctx = c->r->ctx;
  const array *a = &c->tensors[pick(c, 2)];
  dc_tensor t = tensor_of(a), out = DC_TENSOR_INIT;
  int32_t freed;
  dc_op_info info = {.struct_size = sizeof info};
  switch (pick(c, 10)) {
    case 9: /* the caller uses the host or a stream */
      return dc_context_set_stream(ctx, pick(c, 2) == 0 ? c->stream : NULL);
    case 0:
      return dc_offload_tensor(ctx, &t, graph, id, &out);
    case 1:
      return dc_wait_offload(ctx, NULL, graph, id, &out);
    case 2:
      return dc_reload_tensor(ctx, NULL, graph, id, &out);
    case 3:
      return dc_wait_reload(ctx, &t, graph, id, &out);
    case 4:
      return dc_free_tensors(ctx, &t, sizeof t, pick(c, 3) - 1, &freed);
    case 5:
      return pick(c, 2) == 0 ? dc_reload_parameter(ctx, NULL, graph, id) : dc_offload_parameter(ctx, NULL, graph, id);
    case 6:
      return pick(c, 2) == 0 ? dc_start_forward(ctx) : dc_end_forward(ctx);
    case 7:
      return dc_context_dry_run(ctx, (int32_t)pick(c, 30), graph, id, (int32_t)pick(c, 12), &info);
    default:
      return dc_init(ctx, c->r->comm, NULL, pick(c, 20));
  }
}

/* All ranks draw the same calls, so they never disagree. Each call must return, and give a text if it fails. */
static void any_calls(rank *r) {
  dc_status (*const kinds[])(chaos *, int64_t, int64_t) = {any_gather, any_reduction, any_registration, any_other};
  chaos c = {.r = r, .state = *(const uint64_t *)r->user};
  for (int64_t i = 0; i < PARAMS; i++) {
    c.p[i] = (param){.id = i, .shape = {3 + 4 * i}, .stage = i < 2 ? 3 : 2};
    OK(r, register_param(r, &c.p[i]));
  }
  OK(r, new_array(r, &c.tensors[0], 5, DC_FLOAT32));
  OK(r, new_array(r, &c.tensors[1], 9, DC_BFLOAT16));
  OK(r, new_stream(r, &c.stream));
  for (int i = 0; i < CALLS; i++) {
    int64_t graph = pick(&c, GRAPHS + 1), id = pick_param(&c);
    dc_status status = kinds[pick(&c, 4)](&c, graph, id);
    CHECK(r, status <= DC_OK && strcmp(dc_status_name(status), "DC_E_UNKNOWN") != 0 && status != DC_E_INTERNAL);
    CHECK(r, status == DC_OK || dc_last_error()[0] != '\0');
    c.passed += status == DC_OK;
    c.failed += status != DC_OK;
  }
  CHECK(r, c.passed > CALLS / 20 && c.failed > CALLS / 20); /* both outcomes occurred */
  OK(r, dc_context_check(r->ctx));                          /* and none of the calls has broken the context */
  OK(r, dc_context_set_stream(r->ctx, NULL));
  OK(r, dc_context_step_abort(r->ctx));
  OK(r, dc_enable_profiling(r->ctx, 0));
  OK(r, dc_reset(r->ctx));
  param p = {.id = 1000, .shape = {40}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
  OK(r, backward(r, &p, 1, 0));
  CHECK(r, has_grad(r, &p, 0, 0));
}

static void check_123_calls_in_any_order_give_errors_and_nothing_else(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 12; seed++) {
    on_ranks((setup){.world = 1 + (int32_t)(seed % 3), .bucket = 10}, any_calls, &seed);
  }
}

/* ---- threads ---- */

/* A simulated rank has only one thread, and the ranks of its world take turns. */
#ifndef ON_SIM

static void step_alone(rank *r) {
  param p = {.id = 1, .shape = {40}, .stage = 3};
  rank solo = *r;
  dc_tensor full = DC_TENSOR_INIT;
  solo.world = 1;
  OK(r, dc_context_create(r->device, NULL, &solo.ctx));
  OK(r, dc_init(solo.ctx, NULL, NULL, 100));
  array weights, grads, source;
  OK(r, new_array(&solo, &weights, 40, DC_FLOAT32));
  OK(r, new_array(&solo, &grads, 40, DC_FLOAT32));
  OK(r, new_array(&solo, &source, 40, DC_FLOAT32));
  dc_tensor shard = tensor_of(&weights), grad = tensor_of(&grads), t = tensor_of(&source);
  OK(r, dc_register_z3_param(solo.ctx, 1, p.shape, 1, &shard, &grad, 0, 0));
  OK(r, dc_register_graph_z3(solo.ctx, GRAPH, &p.id, 1));
  for (int step = 0; step < 20; step++) {
    OK(r, set_all(&solo, &weights, step + r->rank));
    OK(r, dc_context_params_updated(solo.ctx, NULL, 0));
    OK(r, dc_allgather_param(solo.ctx, NULL, GRAPH, 1, DC_BFLOAT16, &full));
    OK(r, dc_wait_allgather(solo.ctx, NULL, GRAPH, 1));
    array found = {full.data, 40, DC_BFLOAT16};
    CHECK(r, is_all(&solo, &found, step + r->rank));
    OK(r, dc_release_param(solo.ctx, NULL, GRAPH, 1, 1));
    OK(r, set_all(&solo, &source, 3 * step));
    OK(r, dc_start_backward(solo.ctx, 1));
    OK(r, dc_reduce_grad(solo.ctx, &t, GRAPH, 1));
    OK(r, dc_end_backward(solo.ctx, GRAPH, 0));
    CHECK(r, is_all(&solo, &grads, 3 * step));
  }
  dc_context_destroy(solo.ctx);
}

static void check_124_contexts_of_two_threads(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, step_alone, NULL);
}

/* As PyTorch does it: the main thread runs forwards while autograd's thread reduces. */
typedef struct autograd {
  rank *r;
  param *p;
  dc_status status;
  char text[256];
} autograd;

enum { TURNS = 200 };

static void *reduce_on_a_thread(void *arg) {
  autograd *a = arg;
  dc_tensor source = tensor_of(&a->p->source);
  for (int i = 0; i < TURNS && a->status == DC_OK; i++) {
    a->status = dc_reduce_grad(a->r->ctx, &source, GRAPH, a->p->id);
  }
  snprintf(a->text, sizeof a->text, "%s", dc_last_error());
  return NULL;
}

static void two_threads_one_context(rank *r) {
  param p = {.id = 1, .shape = {40}, .stage = 3}, q = {.id = 2, .shape = {40}, .stage = 3};
  int64_t ids[2] = {1, 2};
  autograd a = {.r = r, .p = &q};
  pthread_t thread;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, set_all(r, &q.source, 2));
  OK(r, dc_start_backward(r->ctx, 1));
  CHECK(r, pthread_create(&thread, NULL, reduce_on_a_thread, &a) == 0);
  bool right = true;
  for (int i = 0; i < TURNS && right; i++) {
    right = gather(r, GRAPH, &p, DC_DTYPE_NONE, &full) == DC_OK && is_whole(r, &full, &p, DC_DTYPE_NONE, 0) &&
            dc_release_param(r->ctx, NULL, GRAPH, 1, 1) == DC_OK &&
            dc_release_param(r->ctx, NULL, GRAPH, 1, 1) == DC_E_STATE &&
            strstr(dc_last_error(), "parameter 1 is not gathered") != NULL; /* errors belong to the thread */
  }
  pthread_join(thread, NULL);
  CHECK(r, right && a.status == DC_OK);
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  array part = {q.buffer.data, q.count, DC_FLOAT32};
  CHECK(r, is_all(r, &part, 2 * TURNS));
}

static void check_125_threads_of_one_context_are_serialised(void **state) {
  (void)state;
  on_ranks((setup){.world = 1, .bucket = 100}, two_threads_one_context, NULL);
  /* The bucket holds all gradients: a reduction that blocks keeps the context locked, and the other rank may be waiting
   * for this one's gather. */
  on_ranks((setup){.world = 2, .bucket = TURNS * 40}, two_threads_one_context, NULL);
}
#endif

/* ---- ranks that disagree ---- */

static void other_operators(rank *r) {
  param p = {.id = 1, .shape = {40}, .stage = 3}, q = {.id = 2, .shape = {40}, .stage = 3};
  int64_t ids[2] = {1, 2};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, r->rank == 1 ? dc_prefetch_params_fused(r->ctx, GRAPH, ids + 1, NULL, 1)
                     : dc_allgather_param(r->ctx, NULL, GRAPH, 1, DC_DTYPE_NONE, &full));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, r->rank == 1 ? 2 : 1), DC_E_MISMATCH, "rank 1");
  CHECK(r, strstr(dc_last_error(), "allgather_param") != NULL);
  CHECK(r, strstr(dc_last_error(), "prefetch_params_fused") != NULL);
}

static void check_126_ranks_that_disagree_are_told_both_operators(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, other_operators, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_123_calls_in_any_order_give_errors_and_nothing_else),
#ifndef ON_SIM
      cmocka_unit_test(check_124_contexts_of_two_threads),
      cmocka_unit_test(check_125_threads_of_one_context_are_serialised),
#endif
      cmocka_unit_test(check_126_ranks_that_disagree_are_told_both_operators),
  };
  return cmocka_run_group_tests_name("conformance: threads", tests, NULL, NULL);
}
