/* Any sequence of public calls on one rank, legal or not. Each call returns a status that has a name, and a text if it
 * is an error. Nothing crashes, hangs or leaks, and at the end the context can be cleaned up. Memory that the caller
 * must provide (a shard, a gradient, an output) is real: rules of the header that are not checked are obeyed. */
#include "dc_api.h"
#include "fuzz.h"

enum { PARAMS = 4, MOST = 64, CALLS = 48 };

typedef struct world {
  dc_device *device;
  dc_stream *stream;
  dc_context *ctx;
  dc_buffer *buffer;
  float shard[PARAMS][MOST], grad[PARAMS][MOST], given[PARAMS][MOST];
  int64_t length[PARAMS], numel[PARAMS];
} world;

static dc_status check(dc_status status) {
  PROMISE(strcmp(dc_status_name(status), "DC_E_UNKNOWN") != 0 && status != DC_E_INTERNAL);
  PROMISE(status == DC_OK || dc_last_error()[0] != '\0');
  return status;
}

/* A tensor of the caller, correct or slightly wrong, but never larger than its memory. */
static dc_tensor tensor(bytes *b, float *memory, int64_t *length) {
  uint8_t how = read_u8(b);
  *length = how & 1 ? read_u8(b) % (MOST + 1) : *length;
  dc_tensor t = DC_TENSOR_INIT;
  t.data = (how & 0xf0) == 0xf0 ? NULL : memory;
  t.shape = length;
  t.ndim = (how & 0x70) == 0x70 ? (int32_t)(int8_t)read_u8(b) % 2 : 1;
  t.dtype = how & 2 ? (int32_t)(read_u8(b) % 12) : DC_FLOAT32;
  if (dc_dtype_size(t.dtype) > sizeof(float)) {
    *length = *length / 2; /* as many bytes as there are */
  }
  return t;
}

static int64_t id_of(bytes *b) {
  return read_u8(b) % (PARAMS + 1);
}

static void register_one(world *w, bytes *b) {
  int64_t id = id_of(b), at = id % PARAMS, shape = read_u8(b) % (MOST / 2 + 1);
  w->length[at] = w->numel[at] = shape;
  static int64_t lengths[2]; /* only read during the call */
  lengths[0] = lengths[1] = shape;
  dc_tensor shard = tensor(b, w->shard[at], &lengths[0]), grad = tensor(b, w->grad[at], &lengths[1]);
  uint8_t how = read_u8(b);
  if (how & 1) {
    check(dc_register_param(w->ctx, id, &shape, 1, how & 2 ? NULL : &shard, how & 4 ? NULL : &grad, how >> 5));
  } else {
    check(dc_register_z3_param(w->ctx, id, &shape, 1, how & 2 ? NULL : &shard, how & 4 ? NULL : &grad, (how >> 3) & 3,
                               how & 32 ? (int32_t)(read_u8(b) % 12) : DC_DTYPE_NONE));
  }
}

static void register_graph(world *w, bytes *b) {
  static dc_status (*const stages[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  int64_t ids[4], count = (int64_t)(read_u8(b) % 6) - 1;
  uint8_t how = read_u8(b);
  for (int i = 0; i < 4; i++) {
    ids[i] = id_of(b);
  }
  check(stages[how % 4](w->ctx, how / 4 % 3, how & 128 ? NULL : ids, count));
}

static void reduce(world *w, bytes *b) {
  int64_t id = id_of(b), length = w->numel[id % PARAMS];
  dc_tensor a = tensor(b, w->given[id % PARAMS], &length);
  check(dc_reduce_grad(w->ctx, &a, read_u8(b) % 3, id));
  check(dc_stream_synchronize(w->stream, 0)); /* queued work may still read the tensor */
}

static void prefetch(world *w, bytes *b) {
  int64_t ids[3];
  int32_t dtypes[3];
  for (int i = 0; i < 3; i++) {
    ids[i] = id_of(b);
    dtypes[i] = read_u8(b) % 12;
  }
  uint8_t how = read_u8(b);
  check(dc_prefetch_params_fused(w->ctx, how % 3, how & 32 ? NULL : ids, how & 64 ? NULL : dtypes, how / 4 % 5 - 1));
}

static void read_param(world *w, bytes *b) {
  dc_buffer *buffer = NULL;
  int64_t graph = read_u8(b) % 3, id = id_of(b);
  if (check(dc_take_param(w->ctx, graph, id, read_u8(b) % 12, &buffer)) == DC_OK) {
    check(dc_stream_synchronize(w->stream, 0));
  }
  dc_buffer_release(w->buffer);
  w->buffer = buffer;
}

static void offload(world *w, bytes *b, uint8_t what) {
  dc_tensor out = DC_TENSOR_INIT;
  int64_t graph = read_u8(b) % 3, id = read_u8(b) % 3, length = read_u8(b) % MOST;
  dc_tensor a = tensor(b, w->given[0], &length);
  switch (what % 4) {
    case 0:
      check(dc_offload_tensor(w->ctx, &a, graph, id, &out));
      break;
    case 1:
      check(dc_wait_offload(w->ctx, &a, graph, id, &out));
      break;
    case 2:
      check(dc_reload_tensor(w->ctx, &a, graph, id, &out));
      break;
    default:
      check(dc_wait_reload(w->ctx, &a, graph, id, &out));
  }
  check(dc_stream_synchronize(w->stream, 0));
}

static void report(world *w, bytes *b) {
  dc_memory_stats stats = {.struct_size = read_u8(b)};
  dc_op_info info = {.struct_size = sizeof info};
  dc_trace_event events[4];
  int64_t count = 0;
  if (stats.struct_size <= sizeof stats) {
    check(dc_context_get_memory_stats(w->ctx, &stats));
  }
  check(dc_context_dry_run(w->ctx, read_u8(b) % 20, read_u8(b) % 3, id_of(b), read_u8(b) % 12, &info));
  check(dc_context_trace_start(w->ctx, read_count(b) % 64));
  check(dc_context_trace_read(w->ctx, events, read_u8(b) % 2 ? sizeof events[0] : 1, read_count(b) % 5, &count));
  check(dc_context_reset_stats(w->ctx));
}

/* Calls that take a graph and a parameter. */
static void of_graph(world *w, bytes *b, uint8_t what) {
  dc_tensor out = DC_TENSOR_INIT;
  int64_t graph = read_u8(b) % 3, id = id_of(b);
  switch (what % 6) {
    case 0:
      check(dc_allgather_param(w->ctx, NULL, graph, id, read_u8(b) % 12, read_u8(b) % 16 ? &out : NULL));
      break;
    case 1:
      check(dc_wait_allgather(w->ctx, NULL, graph, id));
      break;
    case 2:
      check(dc_release_param(w->ctx, NULL, graph, id, read_u8(b) % 4 - 1));
      break;
    case 3:
      check(dc_offload_parameter(w->ctx, NULL, graph, id));
      break;
    case 4:
      check(dc_reload_parameter(w->ctx, NULL, graph, id));
      break;
    default:
      check(dc_end_backward(w->ctx, graph, read_u8(b) % 3));
  }
}

static void of_param(world *w, bytes *b, uint8_t what) {
  int64_t id = id_of(b), length = w->numel[id % PARAMS];
  dc_tensor grad;
  switch (what % 7) {
    case 0:
      check(dc_set_persistent(w->ctx, id));
      break;
    case 1:
      check(dc_clear_persistent(w->ctx, id));
      break;
    case 2:
      check(dc_invalidate_gathered_param(w->ctx, id));
      break;
    case 3:
      check(dc_context_params_updated(w->ctx, &id, read_u8(b) % 3 - 1));
      break;
    case 4:
      check(dc_context_accumulate_grads(w->ctx, &id, read_u8(b) % 3 - 1));
      break;
    case 5:
      check(dc_unregister_param(w->ctx, id));
      break;
    default:
      grad = tensor(b, w->grad[id % PARAMS], &length);
      check(dc_context_update_param_grad_buffer(w->ctx, id, &grad, read_u8(b) % 4));
  }
}

static void of_context(world *w, bytes *b, uint8_t what) {
  switch (what % 10) {
    case 0:
      check(dc_start_forward(w->ctx));
      break;
    case 1:
      check(dc_end_forward(w->ctx));
      break;
    case 2:
      check(dc_start_backward(w->ctx, read_u8(b) % 3));
      break;
    case 3:
      check(dc_reset(w->ctx));
      break;
    case 4:
      check(dc_context_step_abort(w->ctx));
      break;
    case 5:
      check(dc_clear_all_gathered_params(w->ctx));
      break;
    case 6:
      check(dc_enable_profiling(w->ctx, read_u8(b) % 3));
      break;
    case 7:
      check(dc_unregister_graph(w->ctx, read_u8(b) % 3));
      break;
    case 8:
      check(dc_context_set_stream(w->ctx, read_u8(b) % 2 ? w->stream : NULL));
      break;
    default:
      check(dc_context_check(w->ctx));
  }
}

static void one_call(world *w, bytes *b) {
  uint8_t what = read_u8(b);
  switch (what % 9) {
    case 0:
      register_one(w, b);
      break;
    case 1:
      register_graph(w, b);
      break;
    case 2:
      reduce(w, b);
      break;
    case 3:
      prefetch(w, b);
      break;
    case 4:
      read_param(w, b);
      break;
    case 5:
      offload(w, b, what / 9);
      break;
    case 6:
      report(w, b);
      break;
    case 7:
      of_graph(w, b, what / 9);
      break;
    default:
      if (what & 1) {
        of_param(w, b, what / 9);
      } else {
        of_context(w, b, what / 9);
      }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
  static world w; /* static, as its memory must outlive the context */
  bytes b = {data, length};
  memset(&w, 0, sizeof w);
  PROMISE(dc_device_open("cpu", NULL, &w.device) == DC_OK);
  PROMISE(dc_stream_create(w.device, &w.stream) == DC_OK);
  PROMISE(dc_context_create(w.device, NULL, &w.ctx) == DC_OK);
  dc_config config = DC_CONFIG_INIT;
  uint8_t how = read_u8(&b);
  config.double_buffer = how & 1 ? -1 : 0;
  config.symmetric_memory = how & 2 ? 1 : 0;
  config.free_activation_threshold = how & 4 ? read_count(&b) : 0;
  config.sync_after_reduce = how & 8 ? (int32_t)read_count(&b) : 0;
  if (check(dc_init(w.ctx, NULL, &config, how & 16 ? read_count(&b) : 16)) == DC_OK) {
    for (int32_t i = 0; i < CALLS && b.left > 0; i++) {
      one_call(&w, &b);
    }
    check(dc_cleanup(w.ctx));
  }
  dc_context_destroy(w.ctx);
  dc_buffer_release(w.buffer);
  dc_stream_destroy(w.stream);
  dc_device_destroy(w.device);
  return 0;
}
