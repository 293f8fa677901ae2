/* C: init, cleanup, reset. */
#include "conformance.h"

/* ---- init ---- */

static void starts(rank *r) {
  CHECK(r, strncmp(dc_device_name(r->device), device_name(), strlen(device_name())) == 0);
  OK(r, dc_start_forward(r->ctx)); /* the context is ready */
}

static void check_16_init_names_its_device(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, starts, NULL);
  on_ranks((setup){.world = 3}, starts, NULL);
}

/* A failed init leaves nothing behind: after many of them the group still has communicators for a good one. */
static void failing_inits(rank *r) {
  static const struct {
    dc_config config;
    const char *text;
  } wrong[] = {{{.symmetric_memory = 3}, "config.symmetric_memory = 3"},
               {{.double_buffer = 2}, "config.double_buffer = 2"},
               {{.free_activation_threshold = -2}, "config.free_activation_threshold = -2"},
               {{.sync_before_reduce = -1}, "config.sync_before_reduce = -1"},
               {{.sync_after_reduce = 2}, "config.sync_after_reduce = 2"},
               {{.sync_before_allgather = 2}, "config.sync_before_allgather = 2"},
               {{.sync_after_allgather = 2}, "config.sync_after_allgather = 2"},
               {{.check_finite = -1}, "config.check_finite = -1, must be 0 or 1"},
               {{.replicas = -1}, "config.replicas = -1"}};
  dc_context *ctx;
  OK(r, dc_context_create(r->device, NULL, &ctx));
  for (size_t i = 0; i < 5 * sizeof wrong / sizeof wrong[0]; i++) {
    dc_config config = wrong[i % (sizeof wrong / sizeof wrong[0])].config;
    config.struct_size = sizeof config;
    FAILS(r, dc_init(ctx, r->comm, &config, 10), DC_E_INVALID, wrong[i % (sizeof wrong / sizeof wrong[0])].text);
  }
  dc_config half = {.struct_size = sizeof half.struct_size + 2};
  FAILS(r, dc_init(ctx, r->comm, &half, 10), DC_E_INVALID, "config.struct_size");
  FAILS(r, dc_init(ctx, r->comm, NULL, 0), DC_E_INVALID, "initial_reduce_bucket_size = 0");
  FAILS(r, dc_start_forward(ctx), DC_E_STATE, "not initialised");
  OK(r, dc_init(ctx, r->comm, NULL, 10));
  dc_context_destroy(ctx);
}

static void check_17_a_wrong_config_is_named_and_leaves_no_communicator(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, failing_inits, NULL);
}

/* ---- two contexts ---- */

static void two_contexts(rank *r) {
  dc_context *first = r->ctx, *second;
  param a = {.id = 1, .shape = {11}, .stage = 3}, b = {.id = 1, .shape = {5}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  FAILS(r, dc_init(first, r->comm, NULL, 10), DC_E_STATE, "is initialised already");
  OK(r, dc_context_create(r->device, NULL, &second));
  OK(r, dc_init(second, r->comm, NULL, 10));
  OK(r, register_one(r, &a)); /* the first context is unaffected */
  r->ctx = second;
  OK(r, register_one(r, &b)); /* the same ids, but another parameter */
  OK(r, gather(r, GRAPH, &b, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &b, DC_DTYPE_NONE, 0));
  r->ctx = first;
  CHECK(r, stats_of(r).gathered_bytes == 0 && stats_of(r).gathers == 0);
  OK(r, gather(r, GRAPH, &a, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &a, DC_DTYPE_NONE, 0));
  OK(r, dc_release_param(second, NULL, GRAPH, 1, 1));
  CHECK(r, stats_of(r).gathered_bytes > 0);
  OK(r, dc_cleanup(second));
  CHECK(r, is_whole(r, &full, &a, DC_DTYPE_NONE, 0)); /* the end of one context does not affect the other */
  dc_context_destroy(second);
}

static void check_18_two_contexts_are_apart(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, two_contexts, NULL);
  on_ranks((setup){.world = 3}, two_contexts, NULL);
}

/* Calls every function that takes a context, except those that end it. */
static void everything_fails(rank *r, const param *p, const char *text) {
  dc_context *c = r->ctx;
  dc_tensor out = DC_TENSOR_INIT, a = tensor_of(&p->source);
  dc_buffer *buffer;
  dc_memory_stats stats = {.struct_size = sizeof stats};
  dc_op_info info = {.struct_size = sizeof info};
  dc_trace_event event;
  int64_t count, id = p->id;
  int32_t freed;
  struct {
    const char *name;
    dc_status status;
  } calls[] = {{"dc_allgather_param", dc_allgather_param(c, NULL, GRAPH, id, 0, &out)},
               {"dc_prefetch_params_fused", dc_prefetch_params_fused(c, GRAPH, &id, NULL, 1)},
               {"dc_wait_allgather", dc_wait_allgather(c, NULL, GRAPH, id)},
               {"dc_release_param", dc_release_param(c, NULL, GRAPH, id, 1)},
               {"dc_take_param", dc_take_param(c, GRAPH, id, 0, &buffer)},
               {"dc_reduce_grad", dc_reduce_grad(c, &a, GRAPH, id)},
               {"dc_free_tensors", dc_free_tensors(c, &a, sizeof a, 1, &freed)},
               {"dc_offload_tensor", dc_offload_tensor(c, &a, GRAPH, 1, &out)},
               {"dc_wait_offload", dc_wait_offload(c, NULL, GRAPH, 1, &out)},
               {"dc_reload_tensor", dc_reload_tensor(c, NULL, GRAPH, 1, &out)},
               {"dc_wait_reload", dc_wait_reload(c, NULL, GRAPH, 1, &out)},
               {"dc_offload_parameter", dc_offload_parameter(c, NULL, GRAPH, id)},
               {"dc_reload_parameter", dc_reload_parameter(c, NULL, GRAPH, id)},
               {"dc_end_backward", dc_end_backward(c, GRAPH, 0)},
               {"dc_start_forward", dc_start_forward(c)},
               {"dc_end_forward", dc_end_forward(c)},
               {"dc_start_backward", dc_start_backward(c, 1)},
               {"dc_enable_profiling", dc_enable_profiling(c, 1)},
               {"dc_init", dc_init(c, r->comm, NULL, 10)},
               {"dc_reset", dc_reset(c)},
               {"dc_context_step_abort", dc_context_step_abort(c)},
               {"dc_context_set_stream", dc_context_set_stream(c, NULL)},
               {"dc_context_check", dc_context_check(c)},
               {"dc_context_alloc", dc_context_alloc(c, 8, DC_MEMORY_DEVICE, &buffer)},
               {"dc_register_param", dc_register_param(c, 9, p->shape, 1, NULL, NULL, 0)},
               {"dc_register_z3_param", dc_register_z3_param(c, 9, p->shape, 1, &a, NULL, 0, 0)},
               {"dc_context_update_param_grad_buffer", dc_context_update_param_grad_buffer(c, id, NULL, 0)},
               {"dc_unregister_param", dc_unregister_param(c, id)},
               {"dc_set_persistent", dc_set_persistent(c, id)},
               {"dc_clear_persistent", dc_clear_persistent(c, id)},
               {"dc_invalidate_gathered_param", dc_invalidate_gathered_param(c, id)},
               {"dc_clear_all_gathered_params", dc_clear_all_gathered_params(c)},
               {"dc_context_params_updated", dc_context_params_updated(c, NULL, 0)},
               {"dc_context_accumulate_grads", dc_context_accumulate_grads(c, &id, 1)},
               {"dc_register_graph_z0", dc_register_graph_z0(c, 9, NULL, 0)},
               {"dc_register_graph_z1", dc_register_graph_z1(c, 9, NULL, 0)},
               {"dc_register_graph_z2", dc_register_graph_z2(c, 9, NULL, 0)},
               {"dc_register_graph_z3", dc_register_graph_z3(c, 9, NULL, 0)},
               {"dc_unregister_graph", dc_unregister_graph(c, GRAPH)},
               {"dc_context_get_memory_stats", dc_context_get_memory_stats(c, &stats)},
               {"dc_context_reset_stats", dc_context_reset_stats(c)},
               {"dc_context_dry_run", dc_context_dry_run(c, DC_OP_ALLGATHER_PARAM, GRAPH, id, 0, &info)},
               {"dc_context_trace_start", dc_context_trace_start(c, 10)},
               {"dc_context_trace_read", dc_context_trace_read(c, &event, sizeof event, 1, &count)}};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    if (calls[i].status != DC_E_STATE) {
      snprintf(r->failure, sizeof r->failure, "rank %d: %s gives %s", r->rank, calls[i].name,
               dc_status_name(calls[i].status));
      return;
    }
  }
  CHECK(r, strstr(dc_last_error(), text) != NULL);
}

static void cleaned_up(rank *r) {
  param p = {.id = 1, .shape = {11}, .stage = 3};
  OK(r, register_one(r, &p));
  OK(r, dc_cleanup(r->ctx));
  OK(r, dc_cleanup(r->ctx));
  everything_fails(r, &p, "was cleaned up");
  CHECK(r, r->failure[0] == '\0');
  OK(r, dc_cleanup(r->ctx));
}

static void check_19_after_cleanup_only_destroy_is_left(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, cleaned_up, NULL);
}

/* Uses all that takes memory, then ends the context with pending reductions and gathered weights. */
static void all_memory_returned(rank *r) {
  watch *w = watch_device(r);
  dc_context *own, *usual = r->ctx;
  param p = {.id = 1, .shape = {500}, .stage = 3}, kept = {.id = 2, .shape = {70}, .stage = 3, .persistent = 1};
  int64_t ids[2] = {1, 2};
  dc_tensor full = DC_TENSOR_INIT, host = DC_TENSOR_INIT;
  OK(r, register_param(r, &p)); /* memory of the test itself, from r->ctx */
  OK(r, register_param(r, &kept));
  int device = atomic_load(&w->live[DC_MEMORY_DEVICE]), on_host = atomic_load(&w->live[DC_MEMORY_HOST]);
  OK(r, dc_context_create(r->device, NULL, &own));
  OK(r, dc_init(own, r->comm, NULL, 100));
  dc_tensor shard = tensor_of(&p.weights), grad = tensor_of(&p.buffer), source = tensor_of(&p.source);
  OK(r, dc_register_z3_param(own, 1, p.shape, 1, &shard, &grad, 0, 0));
  shard = tensor_of(&kept.weights);
  OK(r, dc_register_z3_param(own, 2, kept.shape, 1, &shard, NULL, 1, 0));
  OK(r, dc_register_graph_z3(own, GRAPH, ids, 2));
  OK(r, dc_reload_parameter(own, NULL, GRAPH, 1));
  OK(r, dc_prefetch_params_fused(own, GRAPH, ids, NULL, 2));
  OK(r, dc_allgather_param(own, NULL, GRAPH, 1, DC_BFLOAT16, &full));
  OK(r, dc_offload_tensor(own, &source, GRAPH, 1, &host));
  OK(r, dc_reload_tensor(own, &source, GRAPH, 1, &host));
  OK(r, dc_reduce_grad(own, &source, GRAPH, 1));
  CHECK(r, atomic_load(&w->live[DC_MEMORY_DEVICE]) > device && atomic_load(&w->live[DC_MEMORY_HOST]) > on_host);
  r->ctx = own;
  OK(r, dc_cleanup(own));
  r->ctx = usual;
  CHECK(r, atomic_load(&w->live[DC_MEMORY_DEVICE]) == device);
  CHECK(r, atomic_load(&w->live[DC_MEMORY_HOST]) == on_host);
  dc_context_destroy(own);
}

static void check_20_cleanup_gives_all_memory_back(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, all_memory_returned, NULL);
  on_ranks((setup){.world = 3}, all_memory_returned, NULL);
}

/* ---- reset ---- */

static void reset_keeps(rank *r) {
  param p = {.id = 1, .shape = {23}, .stage = 3, .persistent = 1};
  dc_tensor before = DC_TENSOR_INIT, after = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &before));
  OK(r, dc_reset(r->ctx));
  CHECK(r, stats_of(r).registered_graphs == 0 && stats_of(r).registered_params == 1);
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, 1), DC_E_NOT_FOUND, "is not a registered graph");
  OK(r, register_graph(r, GRAPH, 3, &p.id, 1));
  OK(r, dc_context_reset_stats(r->ctx));
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &after));
  CHECK(r, stats_of(r).gathers == 0 && stats_of(r).gather_hits == 1 && before.data == after.data);
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1)); /* it stays gathered, since it is persistent */
  CHECK(r, is_whole(r, &after, &p, DC_DTYPE_NONE, 0));
}

static void check_21_reset_keeps_parameters_and_what_is_gathered(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, reset_keeps, NULL);
}

static void reset_while_pending(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {23}, .stage = stage};
  OK(r, register_one(r, &p));
  OK(r, dc_start_backward(r->ctx, 0)); /* a local sum of stage 1 is pending */
  OK(r, reduce(r, GRAPH, &p, 0));
  FAILS(r, dc_reset(r->ctx), DC_E_BUSY, "pending");
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 1));
  FAILS(r, dc_reset(r->ctx), DC_E_BUSY, "reductions are pending");
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_grad(r, &p, 0, 1)); /* nothing was lost */
  OK(r, dc_reset(r->ctx));
}

static void check_22_reset_loses_no_gradient(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, reset_while_pending, &stage);
  }
}

static void reset_of_another(rank *r) {
  param p = {.id = 1, .shape = {23}, .stage = 3};
  dc_tensor full = DC_TENSOR_INIT;
  dc_context *other;
  OK(r, dc_context_create(r->device, NULL, &other));
  OK(r, dc_init(other, r->comm, NULL, 10));
  OK(r, dc_register_graph_z3(other, GRAPH, NULL, 0));
  OK(r, register_one(r, &p));
  OK(r, dc_reset(other));
  CHECK(r, dc_end_backward(other, GRAPH, 0) == DC_E_NOT_FOUND);
  OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
  CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, 0));
  OK(r, backward(r, &p, 1, 0));
  CHECK(r, has_grad(r, &p, 0, 0));
  dc_context_destroy(other);
}

static void check_23_reset_is_the_contexts_own(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, reset_of_another, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_16_init_names_its_device),
      cmocka_unit_test(check_17_a_wrong_config_is_named_and_leaves_no_communicator),
      cmocka_unit_test(check_18_two_contexts_are_apart),
      cmocka_unit_test(check_19_after_cleanup_only_destroy_is_left),
      cmocka_unit_test(check_20_cleanup_gives_all_memory_back),
      cmocka_unit_test(check_21_reset_keeps_parameters_and_what_is_gathered),
      cmocka_unit_test(check_22_reset_loses_no_gradient),
      cmocka_unit_test(check_23_reset_is_the_contexts_own),
  };
  return cmocka_run_group_tests_name("conformance: contexts", tests, NULL, NULL);
}
