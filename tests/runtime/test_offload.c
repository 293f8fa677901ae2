/* Offload and reload of tensors and shards; freeing activations; memory for the caller; dry runs; traces. */
#include "harness.h"

enum { GRAPH = 1 };

static dc_memory_stats stats_of(rank *r) {
  dc_memory_stats s = {.struct_size = sizeof s};
  dc_context_get_memory_stats(r->ctx, &s);
  return s;
}

static void tensors(rank *r) {
  const int64_t shape[2] = {3, 5};
  float data[15];
  dc_tensor a = DC_TENSOR_INIT, host = DC_TENSOR_INIT, out = DC_TENSOR_INIT;
  a.data = data;
  a.shape = shape;
  a.ndim = 2;
  a.dtype = DC_FLOAT32;
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  FAILS(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 5, &out), DC_E_STATE, "id = 5 was not offloaded");
  FAILS(r, dc_wait_offload(r->ctx, NULL, GRAPH, 5, &out), DC_E_NOT_FOUND, "id = 5 was never offloaded");
  FAILS(r, dc_wait_reload(r->ctx, NULL, GRAPH, 5, &out), DC_E_NOT_FOUND, "id = 5 was never offloaded");
  for (int step = 0; step < 5; step++) {
    for (int i = 0; i < 15; i++) {
      data[i] = value_of(step, i);
    }
    OK(r, dc_offload_tensor(r->ctx, &a, GRAPH, 5, &host));
    memset(data, 0, sizeof data); /* the caller may overwrite it on return */
    OK(r, dc_wait_offload(r->ctx, &host, GRAPH, 5, &host));
    CHECK(r, host.ndim == 2 && host.shape[1] == 5 && ((float *)host.data)[14] == value_of(step, 14));
    FAILS(r, dc_wait_reload(r->ctx, NULL, GRAPH, 5, &out), DC_E_STATE, "not being reloaded");
    OK(r, dc_reload_tensor(r->ctx, &host, GRAPH, 5, &out));
    OK(r, dc_wait_reload(r->ctx, &out, GRAPH, 5, &out));
    CHECK(r, out.data != host.data && ((float *)out.data)[7] == value_of(step, 7));
    dc_buffer *kept = dc_buffer_retain(out.buffer);
    CHECK(r, stats_of(r).reload_bytes == 60);
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, stats_of(r).reload_bytes == 0 && ((float *)dc_buffer_data(kept))[7] == value_of(step, 7));
    dc_buffer_release(kept);
    if (step == 0) {
      OK(r, dc_context_reset_stats(r->ctx));
    }
  }
  CHECK(r, stats_of(r).allocations == 0 && stats_of(r).copied_d2h_bytes == 240 && stats_of(r).offload_bytes == 60);
  a.ndim = 1;
  FAILS(r, dc_offload_tensor(r->ctx, &a, GRAPH, 5, &host), DC_E_SHAPE, "differs in shape or type");
  OK(r, dc_enable_profiling(r->ctx, 1));
  OK(r, dc_wait_reload(r->ctx, &a, GRAPH, 6, &out));
  CHECK(r, out.data == data); /* profiling without a reload: the argument itself */
}

static void test_tensors(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, tensors, NULL);
  run_ranks((setup){.world = 2}, tensors, NULL);
}

/* A reload brings the latest offloaded content, even if the copy of an earlier reload still exists. */
static void newer_content(rank *r) {
  enum { OTHER_GRAPH = 2, STEPS = 6 };
  const int64_t count = 15;
  float data[15];
  dc_tensor a = flat(data, &count, DC_FLOAT32), out = DC_TENSOR_INIT;
  dc_buffer *kept[STEPS];
  dc_op_info info = {.struct_size = sizeof info};
  dc_stream *stream = NULL;
  if (*(const bool *)r->user) {
    OK(r, dc_stream_create(r->device, &stream));
    OK(r, dc_context_set_stream(r->ctx, stream));
  }
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, NULL, 0));
  OK(r, dc_register_graph_z3(r->ctx, OTHER_GRAPH, NULL, 0));
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < 15; i++) {
      data[i] = value_of(step, i);
    }
    OK(r, dc_offload_tensor(r->ctx, &a, GRAPH, 5, &out));
    OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, 5, &out));
    OK(r, stream != NULL ? dc_stream_synchronize(stream, 0) : DC_OK);
    if (step == 2) {
      continue; /* offload twice, reload once */
    }
    OK(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_TENSOR, GRAPH, 5, 0, &info));
    CHECK(r, info.device_bytes == 60);
    OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 5, &out));
    kept[step] = dc_buffer_retain(out.buffer);
    CHECK(r, stats_of(r).reload_bytes == 60); /* only the caller holds the earlier copy */
    OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 5, &out));
    CHECK(r, out.buffer == kept[step]); /* there is no newer content */
    OK(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_TENSOR, GRAPH, 5, 0, &info));
    CHECK(r, info.device_bytes == 0);
    OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 5, &out));
    OK(r, stream != NULL ? dc_stream_synchronize(stream, 0) : DC_OK);
    CHECK(r, ((float *)out.data)[7] == value_of(step, 7));
    OK(r, step == 3 ? dc_end_backward(r->ctx, OTHER_GRAPH, 0) : DC_OK);
  }
  for (int step = 0; step < STEPS; step++) {
    if (step != 2) {
      CHECK(r, ((float *)dc_buffer_data(kept[step]))[7] == value_of(step, 7));
      dc_buffer_release(kept[step]);
    }
  }
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, stats_of(r).reload_bytes == 0);
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
}

static void test_newer_content(void **state) {
  (void)state;
  const bool with_a_stream[] = {false, true};
  run_ranks((setup){.world = 1}, newer_content, &with_a_stream[0]);
  run_ranks((setup){.world = 2}, newer_content, &with_a_stream[1]);
}

static void shards(rank *r) {
  sharded p;
  int64_t id = 2;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 21, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  for (int step = 1; step < 6; step++) {
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, id));
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, id)); /* no effect */
    CHECK(r, stats_of(r).copied_h2d_bytes ==
                 step * 4 * (r->rank * p.chunk + p.chunk > 21 ? 21 - r->rank * p.chunk : p.chunk));
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, id)); /* while the gather may still read it */
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, id)); /* no effect */
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
    CHECK(r, ((float *)full.data)[20] == value_of(id, 20) * (float)step);
    CHECK(r, stats_of(r).reload_bytes == 0 && stats_of(r).copied_d2h_bytes == 0);
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 1));
    for (int64_t i = 0; i < p.chunk; i++) {
      p.shard[i] = p.shard[i] / (float)step * (float)(step + 1); /* the optimizer updates the host's shard */
    }
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  }
  free_sharded(&p);
}

static void test_shards(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 3; world++) {
    run_ranks((setup){.world = world}, shards, NULL);
  }
}

/* A copy that is there already is handed out at once, and its holder may then change the shard. */
static void taken(rank *r) {
  enum { NUMEL = 1 << 24 };
  int64_t id = 2, count = 0;
  sharded p;
  dc_buffer *buffer;
  dc_trace_event event = {0};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, NUMEL, 1));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
  OK(r, dc_context_trace_start(r->ctx, 16));
  OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, id));
  OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, id)); /* the copy goes on */
  OK(r, dc_take_param(r->ctx, GRAPH, id, DC_DTYPE_NONE, &buffer));
  OK(r, dc_context_trace_read(r->ctx, &event, sizeof event, 1, &count));
  CHECK(r, count == 1 && event.op == DC_OP_RELOAD_PARAMETER);
  dc_buffer_release(buffer);
  free_sharded(&p);
}

static void test_taken(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, taken, NULL);
}

static void freeing(rank *r) {
  float data[8];
  int64_t four = 4, five = 5, zero = 0;
  dc_tensor t[3] = {flat(data, &four, DC_FLOAT32), flat(data, &five, DC_FLOAT32), flat(data, &zero, DC_FLOAT32)};
  int32_t freed[3] = {-1, -1, -1};
  OK(r, dc_free_tensors(r->ctx, t, sizeof t[0], 3, freed));
  CHECK(r, freed[0] == 0 && freed[1] == 1 && freed[2] == 0); /* only tensors above the threshold are freed */
  freed[1] = -1;
  t[2].dtype = 99;
  FAILS(r, dc_free_tensors(r->ctx, t, sizeof t[0], 3, freed), DC_E_DTYPE, "tensors.dtype = 99");
  CHECK(r, freed[1] == -1); /* if one is wrong, none is freed */
  t[2].dtype = DC_FLOAT32;
  OK(r, dc_enable_profiling(r->ctx, 1));
  OK(r, dc_free_tensors(r->ctx, t, sizeof t[0], 3, freed));
  CHECK(r, freed[1] == 0);
  OK(r, dc_free_tensors(r->ctx, NULL, 0, 0, NULL));
  FAILS(r, dc_free_tensors(r->ctx, t, 8, 3, freed), DC_E_INVALID, "tensor_size = 8");
}

/* Other calls free the context's memory; memory that it handed over is the caller's to free. */
static void freeing_the_contexts(rank *r) {
  sharded p;
  const int64_t id = 4, fifteen = 15;
  float data[15] = {0};
  dc_tensor full = DC_TENSOR_INIT, host = DC_TENSOR_INIT, back = DC_TENSOR_INIT, a = flat(data, &fifteen, DC_FLOAT32);
  dc_buffer *memory;
  int32_t freed[4] = {-1, -1, -1, -1};
  OK(r, register_sharded(r, &p, id, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
  OK(r, dc_offload_tensor(r->ctx, &a, GRAPH, 1, &host));
  OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, 1, &back));
  OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, 1, &back));
  OK(r, dc_context_alloc(r->ctx, 60, DC_MEMORY_DEVICE, &memory));
  dc_tensor own = flat(dc_buffer_data(memory), &fifteen, DC_FLOAT32);
  own.buffer = memory;
  const dc_tensor list[4] = {full, host, back, own};
  OK(r, dc_free_tensors(r->ctx, list, sizeof list[0], 4, freed));
  CHECK(r, freed[0] == 0 && freed[1] == 0 && freed[2] == 1 && freed[3] == 1);
  CHECK(r, stats_of(r).gathered_bytes > 0 && stats_of(r).reload_bytes == 0 && stats_of(r).offload_bytes == 60);
  CHECK(r, ((float *)full.data)[9] == value_of(id, 9));
  dc_buffer_release(memory);
  OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 1));
  free_sharded(&p);
}

static void test_freeing(void **state) {
  (void)state;
  run_ranks((setup){.world = 1, .config.free_activation_threshold = 4}, freeing, NULL);
  run_ranks((setup){.world = 2, .config.free_activation_threshold = -1}, freeing_the_contexts, NULL);
}

static void memory(rank *r) {
  for (int32_t kind = DC_MEMORY_DEVICE; kind <= DC_MEMORY_HOST; kind++) {
    dc_buffer *b;
    OK(r, dc_context_alloc(r->ctx, 1000, kind, &b));
    CHECK(r, dc_buffer_bytes(b) == 1000 && ((uintptr_t)dc_buffer_data(b) & 255) == 0);
    for (int i = 0; i < 1000; i++) {
      CHECK(r, ((char *)dc_buffer_data(b))[i] == 0);
    }
    memset(dc_buffer_data(b), 1, 1000);
    dc_buffer_release(b);
    OK(r, dc_context_alloc(r->ctx, 0, kind, &b));
    dc_buffer_release(b);
  }
  dc_buffer *none = (dc_buffer *)&none;
  FAILS(r, dc_context_alloc(r->ctx, 1, 9, &none), DC_E_INVALID, "kind = 9");
  CHECK(r, none == NULL); /* handles become NULL on failure */
}

static void test_memory(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, memory, NULL);
}

static void dry_runs(rank *r) {
  sharded p;
  int64_t id = 4;
  dc_op_info info = {.struct_size = sizeof info};
  OK(r, register_sharded(r, &p, id, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  dc_memory_stats before = stats_of(r);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.ndim == 1 && info.shape[0] == 10 && info.dtype == DC_FLOAT32 && info.device_bytes == 40);
  CHECK(r, info.wire_bytes == 20 && info.host == 0); /* two ranks: the other one sends half of it */
  OK(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, id, DC_BFLOAT16, &info));
  CHECK(r, info.dtype == DC_BFLOAT16 && info.wire_bytes == 10);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_PREFETCH_PARAMS_FUSED, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.ndim == -1 && info.shape == NULL && info.dtype == DC_DTYPE_NONE); /* the call returns no tensor */
  CHECK(r, info.device_bytes == 40 && info.wire_bytes == 20);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_REDUCE_GRAD, GRAPH, id, DC_FLOAT32, &info));
  CHECK(r, info.ndim == -1 && info.wire_bytes == 20);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_OFFLOAD_TENSOR, GRAPH, 9, DC_DTYPE_NONE, &info));
  CHECK(r, info.ndim == -1 && info.host == 1);
  FAILS(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, 11, 0, &info), DC_E_NOT_FOUND, "id = 11");
  FAILS(r, dc_context_dry_run(r->ctx, 99, GRAPH, id, 0, &info), DC_E_INVALID, "op = 99");
  OK(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_PARAMETER, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.device_bytes == 20);
  dc_memory_stats after = stats_of(r);
  CHECK(r, memcmp(&before, &after, sizeof before) == 0); /* the dry run changed nothing */
  /* The dry run of a gather depends on the copies that exist. */
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_BFLOAT16, &full));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, id, DC_FLOAT64, &info));
  CHECK(r, info.wire_bytes == 40 && info.device_bytes == 80); /* a bfloat16 copy does not hold float32's values */
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, id, DC_FLOAT64, &info));
  CHECK(r, info.wire_bytes == 0 && info.device_bytes == 80); /* a cast */
  OK(r, dc_context_dry_run(r->ctx, DC_OP_ALLGATHER_PARAM, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.wire_bytes == 0 && info.device_bytes == 0);
  OK(r, dc_context_dry_run(r->ctx, DC_OP_TAKE_PARAM, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.wire_bytes == 0 && info.device_bytes == 0);
  OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, id));
  OK(r, dc_context_dry_run(r->ctx, DC_OP_RELOAD_PARAMETER, GRAPH, id, DC_DTYPE_NONE, &info));
  CHECK(r, info.device_bytes == 0);
  OK(r, dc_unregister_graph(r->ctx, GRAPH));
  OK(r, dc_unregister_param(r->ctx, id)); /* waits for the work that reads the shard */
  free_sharded(&p);
}

static void test_dry_runs(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, dry_runs, NULL);
}

static void traces(rank *r) {
  sharded p;
  int64_t id = 4, count;
  dc_trace_event events[16];
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_sharded(r, &p, id, 1000, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_context_trace_start(r->ctx, 4));
  for (int i = 0; i < 5; i++) {
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
    OK(r, dc_wait_allgather(r->ctx, NULL, GRAPH, id));
    OK(r, dc_release_param(r->ctx, NULL, GRAPH, id, 1));
  }
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_context_trace_read(r->ctx, events, sizeof events[0], 16, &count));
  CHECK(r, count == 4); /* the latest ones */
  for (int64_t i = 0; i < count; i++) {
    CHECK(r, events[i].end_ns >= events[i].begin_ns && events[i].begin_ns > 0);
    CHECK(r,
          events[i].op == DC_OP_ALLGATHER_PARAM ? events[i].lane == 1 && events[i].bytes == 2000 : events[i].lane == 0);
  }
  OK(r, dc_context_trace_start(r->ctx, 0));
  OK(r, dc_context_trace_read(r->ctx, events, sizeof events[0], 16, &count));
  CHECK(r, count == 0);
  FAILS(r, dc_context_trace_start(r->ctx, -1), DC_E_INVALID, "capacity = -1");
  free_sharded(&p);
}

static void test_traces(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, traces, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tensors), cmocka_unit_test(test_newer_content), cmocka_unit_test(test_shards),
      cmocka_unit_test(test_freeing), cmocka_unit_test(test_memory),        cmocka_unit_test(test_dry_runs),
      cmocka_unit_test(test_traces),  cmocka_unit_test(test_taken),
  };
  return cmocka_run_group_tests_name("offload", tests, NULL, NULL);
}
