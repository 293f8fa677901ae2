/* All-gather, wait, release, take, persistence, prefetch. */
#include "harness.h"

enum { GRAPH = 7 };

static const int64_t sizes[] = {1, 2, 3, 5, 8, 17, 64, 1000, 4097};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static bool holds_weights(const dc_tensor *full, const sharded *p, float scale) {
  for (int64_t i = 0; i < p->numel; i++) {
    if (((const float *)full->data)[i] != value_of(p->id, i) * scale) {
      return false;
    }
  }
  return full->shape[0] == p->numel && full->ndim == 1 && full->dtype == DC_FLOAT32;
}

static dc_memory_stats stats_of(rank *r) {
  dc_memory_stats s = {.struct_size = sizeof s};
  dc_context_get_memory_stats(r->ctx, &s);
  return s;
}

static void every_shape(rank *r) {
  sharded p[SIZES];
  int64_t ids[SIZES];
  for (int64_t i = 0; i < SIZES; i++) {
    ids[i] = 100 + i;
    OK(r, register_sharded(r, &p[i], ids[i], sizes[i], 0));
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, SIZES));
  for (int step = 0; step < 3; step++) {
    for (int64_t i = 0; i < SIZES; i++) {
      dc_tensor full = DC_TENSOR_INIT;
      OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, ids[i], DC_DTYPE_NONE, &full));
      OK(r, dc_wait_allgather(r->ctx, &full, GRAPH, ids[i]));
      CHECK(r, holds_weights(&full, &p[i], 1.0f));
      OK(r, dc_release_param(r->ctx, &full, GRAPH, ids[i], 1));
    }
    if (step == 0) {
      OK(r, dc_context_reset_stats(r->ctx));
    }
  }
  dc_memory_stats s = stats_of(r);
  int64_t total = 0;
  for (int64_t i = 0; i < SIZES; i++) {
    int64_t begin = r->rank * p[i].chunk < sizes[i] ? r->rank * p[i].chunk : sizes[i];
    int64_t own = sizes[i] - begin < p[i].chunk ? sizes[i] - begin : p[i].chunk;
    total += sizes[i] - own;
  }
  CHECK(r, s.gather_wire_bytes == 2 * 4 * total); /* without padding */
  CHECK(r, s.gathers == 2 * SIZES && s.gathered_bytes == 0);
  CHECK(r, s.allocations == 0);                      /* a steady step allocates nothing */
  CHECK(r, s.gathered_peak_bytes <= 4097 * 4 + 256); /* one parameter at a time */
  for (int64_t i = 0; i < SIZES; i++) {
    free_sharded(&p[i]);
  }
}

/* A profiler gathers, drops the copy, and still makes the wait and the release. */
static void profiler_forgets(rank *r) {
  sharded p;
  int64_t id = 5;
  OK(r, register_sharded(r, &p, id, 17, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, dc_enable_profiling(r->ctx, 1));
  for (int run = 0; run < 3; run++) {
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
    OK(r, dc_invalidate_gathered_param(r->ctx, id));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 2));
    FAILS(r, dc_release_param(r->ctx, NULL, GRAPH, id, 0), DC_E_INVALID, "n_users = 0");
  }
  OK(r, dc_enable_profiling(r->ctx, 0));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id), DC_E_STATE, "parameter 5 is not gathered");
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
  CHECK(r, holds_weights(&full, &p, 1.0f));
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 1)); /* the profiler left no use counts */
  free_sharded(&p);
}

static void test_profiler_forgets(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, profiler_forgets, NULL);
}

static void test_every_shape(void **state) {
  (void)state;
  const int32_t worlds[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < 5; i++) {
    run_ranks((setup){.world = worlds[i]}, every_shape, NULL);
    run_ranks((setup){.world = worlds[i], .config.symmetric_memory = 1}, every_shape, NULL);
  }
}

static void hits_and_updates(rank *r) {
  sharded p;
  int64_t id = 3;
  dc_tensor a = DC_TENSOR_INIT, b = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 11, 1));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &b));
  CHECK(r, a.data == b.data); /* it was registered persistent, so both are the same copy */
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  CHECK(r, holds_weights(&a, &p, 1.0f));
  for (int i = 0; i < 4; i++) {
    OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 1)); /* a persistent parameter stays, however often it is released */
  }
  for (int64_t i = 0; i < p.chunk; i++) {
    p.shard[i] *= 2;
  }
  OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &b));
  OK(r, dc_wait_allgather(r->ctx, &b, GRAPH, id));
  CHECK(r, a.data == b.data && holds_weights(&b, &p, 2.0f));
  dc_memory_stats s = stats_of(r);
  CHECK(r, s.gathers == 2 && s.gather_hits == 1);
  OK(r, dc_invalidate_gathered_param(r->ctx, id)); /* no effect on a persistent one */
  OK(r, dc_clear_all_gathered_params(r->ctx));
  CHECK(r, stats_of(r).gathered_bytes > 0);
  OK(r, dc_release_param(r->ctx, &b, GRAPH, id, 1));
  OK(r, dc_clear_persistent(r->ctx, id));
  CHECK(r, stats_of(r).gathered_bytes == 0);
  OK(r, dc_set_persistent(r->ctx, id));
  CHECK(r, stats_of(r).gathers == 3);
  OK(r, dc_reset(r->ctx));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1)); /* a reset keeps parameters and gathered copies */
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &b));
  OK(r, dc_wait_allgather(r->ctx, &b, GRAPH, id));
  CHECK(r, stats_of(r).gathers == 3 && holds_weights(&b, &p, 2.0f));
  free_sharded(&p);
}

static void test_hits_and_updates(void **state) {
  (void)state;
  run_ranks((setup){.world = 3}, hits_and_updates, NULL);
}

/* From the wait to the last release, only dc_context_step_abort and an invalidation free the memory. */
static void in_use(rank *r) {
  sharded p;
  int64_t id = 3;
  dc_tensor a = DC_TENSOR_INIT;
  dc_buffer *taken;
  OK(r, register_sharded(r, &p, id, 11, 1));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  OK(r, dc_clear_persistent(r->ctx, id));
  CHECK(r, stats_of(r).gathered_bytes > 0 && dc_buffer_data(a.buffer) == a.data && holds_weights(&a, &p, 1.0f));
  OK(r, dc_reset(r->ctx));
  FAILS(r, dc_unregister_param(r->ctx, id), DC_E_BUSY, "parameter 3 is in use: it is gathered, and not released");
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 1));
  CHECK(r, stats_of(r).gathered_bytes == 0); /* no longer persistent */
  OK(r, dc_set_persistent(r->ctx, id));      /* gathered, but not waited for */
  OK(r, dc_clear_persistent(r->ctx, id));
  FAILS(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id), DC_E_STATE, "parameter 3 is not gathered");
  /* A caller that took a reference to a persistent copy keeps its memory. */
  OK(r, dc_set_persistent(r->ctx, id));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_take_param(r->ctx, GRAPH, id, DC_DTYPE_NONE, &taken));
  OK(r, dc_clear_persistent(r->ctx, id));
  CHECK(r, dc_buffer_data(taken) == a.data && holds_weights(&a, &p, 1.0f) && stats_of(r).gathered_bytes > 0);
  dc_buffer_release(taken);
  CHECK(r, stats_of(r).gathered_bytes == 0);
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  OK(r, dc_reset(r->ctx));
  OK(r, dc_context_step_abort(r->ctx));
  OK(r, dc_unregister_param(r->ctx, id));
  free_sharded(&p);
}

static void test_in_use(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, in_use, NULL);
}

static bool is_bf16_of_weights(const dc_tensor *full, const sharded *p) {
  for (int64_t i = 0; i < p->numel; i++) {
    float v = value_of(p->id, i);
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    if (((const uint16_t *)full->data)[i] != bits >> 16) { /* the values are exact in bfloat16 */
      return false;
    }
  }
  return full->dtype == DC_BFLOAT16;
}

static void other_types(rank *r) {
  sharded p;
  int64_t id = 4;
  dc_tensor a = DC_TENSOR_INIT, b = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 1001, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_BFLOAT16, &a));
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  CHECK(r, is_bf16_of_weights(&a, &p));
  int64_t begin = r->rank * p.chunk;
  int64_t own = 1001 - begin < p.chunk ? 1001 - begin : p.chunk;
  CHECK(r, stats_of(r).gather_wire_bytes == 2 * (1001 - own)); /* cast first, then half the bytes */
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 1));
  /* A complete current copy in one type serves another type without communication. */
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_BFLOAT16, &b));
  OK(r, dc_wait_allgather(r->ctx, &b, GRAPH, id));
  CHECK(r, holds_weights(&a, &p, 1.0f) && is_bf16_of_weights(&b, &p));
  CHECK(r, stats_of(r).gathers == 2);
  OK(r, dc_release_param(r->ctx, &b, GRAPH, id, 1));
  CHECK(r, stats_of(r).gathered_bytes == 0); /* all copies are dropped */
  const int32_t types[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16};
  for (int i = 0; i < 4; i++) {
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, types[i], &a));
  }
  CHECK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_INT32, &b) == DC_E_STATE);
  CHECK(r, strstr(dc_last_error(), "parameter 4 is gathered in 4 types already; release one") != NULL);
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  CHECK(r, is_bf16_of_weights(&a, &p));
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 1));
  /* Persistent in float32, then gathered in bfloat16 after an update: the result is bfloat16. */
  OK(r, dc_set_persistent(r->ctx, id));
  OK(r, dc_context_params_updated(r->ctx, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_BFLOAT16, &b));
  OK(r, dc_wait_allgather(r->ctx, &b, GRAPH, id));
  CHECK(r, is_bf16_of_weights(&b, &p));
  free_sharded(&p);
}

static void test_other_types(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, other_types, NULL);
  run_ranks((setup){.world = 3, .config.symmetric_memory = 1}, other_types, NULL);
}

static void users(rank *r) {
  sharded p;
  int64_t id = 5;
  dc_tensor a = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 6, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &a));
  OK(r, dc_wait_allgather(r->ctx, &a, GRAPH, id));
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 3));
  FAILS(r, dc_release_param(r->ctx, &a, GRAPH, id, 2), DC_E_INVALID, "n_users = 2 for parameter 5");
  FAILS(r, dc_unregister_param(r->ctx, id), DC_E_BUSY, "in 1 graph");
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 3));
  CHECK(r, holds_weights(&a, &p, 1.0f) && dc_buffer_data(a.buffer) == a.data);
  dc_buffer *kept = dc_buffer_retain(a.buffer);
  OK(r, dc_release_param(r->ctx, &a, GRAPH, id, 3));
  CHECK(r, dc_buffer_data(kept) == NULL && stats_of(r).gathered_bytes == 0); /* the memory is freed despite views */
  dc_buffer_release(kept);
  FAILS(r, dc_release_param(r->ctx, &a, GRAPH, id, 3), DC_E_STATE, "parameter 5 is not gathered");
  FAILS(r, dc_wait_allgather(r->ctx, &a, GRAPH, id), DC_E_STATE, "parameter 5 is not gathered");
  free_sharded(&p);
}

static void test_users(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, users, NULL);
}

static void prefetch(rank *r) {
  enum { COUNT = 20 };
  sharded p[COUNT];
  int64_t ids[COUNT];
  int32_t dtypes[COUNT];
  for (int64_t i = 0; i < COUNT; i++) {
    ids[i] = i;
    dtypes[i] = i % 3 == 1 ? DC_BFLOAT16 : DC_DTYPE_NONE;
    OK(r, register_sharded(r, &p[i], i, 40, 0)); /* of equal sizes, so a cast could take another's memory */
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, COUNT));
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, NULL, NULL, 0));
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, dtypes, COUNT));
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, dtypes, COUNT)); /* all exist already */
  CHECK(r, stats_of(r).gathers == COUNT && stats_of(r).gather_hits == COUNT);
  for (int64_t i = 0; i < COUNT; i++) {
    dc_tensor full = DC_TENSOR_INIT;
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, i, dtypes[i], &full));
    OK(r, dc_wait_allgather(r->ctx, &full, GRAPH, i));
    CHECK(r, dtypes[i] == DC_BFLOAT16 ? is_bf16_of_weights(&full, &p[i]) : holds_weights(&full, &p[i], 1.0f));
    OK(r, dc_release_param(r->ctx, &full, GRAPH, i, 1));
  }
  CHECK(r, stats_of(r).gathers == COUNT && stats_of(r).gathered_bytes == 0);
  /* Parameters are released before any wait: their memory is freed, and nothing breaks. */
  for (int round = 0; round < 20; round++) {
    OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, NULL, COUNT));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, i, 1));
    }
  }
  const int64_t again[4] = {3, 3, 4, 3}; /* one in two types; a repeated type is one gather */
  const int32_t types[4] = {DC_DTYPE_NONE, DC_FLOAT32, DC_DTYPE_NONE, DC_BFLOAT16};
  int64_t before = stats_of(r).gathers;
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, again, types, 4));
  CHECK(r, stats_of(r).gathers == before + 3);
  OK(r, dc_context_step_abort(r->ctx));
  int64_t unknown[2] = {0, 99};
  FAILS(r, dc_prefetch_params_fused(r->ctx, GRAPH, unknown, NULL, 2), DC_E_NOT_FOUND, "id = 99");
  OK(r, dc_context_step_abort(r->ctx));
  CHECK(r, stats_of(r).gathered_bytes == 0); /* the failed call started nothing */
  for (int64_t i = 0; i < COUNT; i++) {
    free_sharded(&p[i]);
  }
}

static void test_prefetch(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    run_ranks((setup){.world = world}, prefetch, NULL);
  }
}

static void take(rank *r) {
  sharded p;
  int64_t id = 6;
  dc_tensor full = DC_TENSOR_INIT;
  dc_buffer *owned;
  OK(r, register_sharded(r, &p, id, 33, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  FAILS(r, dc_take_param(r->ctx, GRAPH, id, DC_DTYPE_NONE, &owned), DC_E_STATE, "not gathered as float32");
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_take_param(r->ctx, GRAPH, id, DC_DTYPE_NONE, &owned));
  CHECK(r, dc_buffer_data(owned) == full.data && holds_weights(&full, &p, 1.0f));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full)); /* it was dropped, so this gathers again */
  CHECK(r, stats_of(r).gathers == 2 && full.data != dc_buffer_data(owned));
  OK(r, dc_release_param(r->ctx, &full, GRAPH, id, 1));
  CHECK(r, stats_of(r).gathered_bytes > 0);
  dc_context_destroy(r->ctx); /* owned buffers outlive the context */
  r->ctx = NULL;
  CHECK(r, ((float *)dc_buffer_data(owned))[32] == value_of(id, 32));
  dc_buffer_release(owned);
  free_sharded(&p);
}

static void test_take(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, take, NULL);
}

/* Two graphs share a parameter: one gathers it, the other waits for it and uses it. */
static void shared_param(rank *r) {
  sharded p;
  int64_t id = 8;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 5000, 0));
  OK(r, dc_register_graph_z3(r->ctx, 1, &id, 1));
  OK(r, dc_register_graph_z3(r->ctx, 2, &id, 1));
  for (int i = 0; i < 50; i++) {
    OK(r, dc_allgather_param(r->ctx, NULL, 1, id, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, NULL, 2, id));
    CHECK(r, holds_weights(&full, &p, 1.0f));
    OK(r, dc_release_param(r->ctx, NULL, 2, id, 1));
  }
  free_sharded(&p);
}

static void test_shared_param(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, shared_param, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_shape),      cmocka_unit_test(test_profiler_forgets),
      cmocka_unit_test(test_hits_and_updates), cmocka_unit_test(test_in_use),
      cmocka_unit_test(test_other_types),      cmocka_unit_test(test_users),
      cmocka_unit_test(test_prefetch),         cmocka_unit_test(test_take),
      cmocka_unit_test(test_shared_param),
  };
  return cmocka_run_group_tests_name("gather", tests, NULL, NULL);
}
