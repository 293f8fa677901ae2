/* Ranks for the tests of the adapter's CUDA key, and operators as the dispatcher calls them. */
#include "adapter_run.h"

#include "adapter.h"
#include "cudasim.h"
#include "device/device.h"

const int64_t SHAPE[2] = {3, 5}, NONE[1] = {0}, MANY[1] = {LARGE};

/* ---- a rank ---- */

dct_tensor tensor_of(const run *r, int32_t ndim, const int64_t *sizes) {
  return torchsim_tensor(r->on, r->on == SIM_CUDA ? 0 : -1, SIM_FLOAT32, ndim, sizes);
}

static void copy(const run *r, void *dst, const void *src, size_t bytes) {
  dc_stream *stream = NULL;
  if (r->on == SIM_CPU) {
    memcpy(dst, src, bytes);
  } else if (dc_stream_wrap(r->device, r->native, &stream) == DC_OK) {
    dc__stream_copy(stream, dst, src, bytes);
    (void)dc_stream_synchronize(stream, 0);
    dc_stream_destroy(stream);
  }
}

/* In the order of the current stream; waits until the values are written. */
void write_values(const run *r, dct_tensor t, float first) {
  float values[LARGE];
  for (int i = 0; i < LARGE; i++) {
    values[i] = first + (float)i;
  }
  copy(r, torchsim_data(t), values, sizeof(float) * (size_t)torchsim_numel(t));
}

void read_values(const run *r, dct_tensor t, float *values) {
  copy(r, values, torchsim_data(t), sizeof(float) * (size_t)torchsim_numel(t));
}

void set_stream(run *r, void *native) {
  r->native = native;
  torchsim_set_stream(native);
}

static dc_tensor described(dct_tensor t, const int64_t *count) {
  return flat(torchsim_data(t), count, DC_FLOAT32);
}

dc_status open_run(run *r, const char *key, dc_comm *comm, int64_t graph) {
  const dc_config config = {.struct_size = sizeof config, .free_activation_threshold = 16};
  const int64_t ids[2] = {0, 1};
  memset(r, 0, sizeof *r);
  r->key = key;
  r->on = strcmp(key, "CUDA") == 0 ? SIM_CUDA : SIM_CPU;
  r->graph = graph;
  dc_status status = dc_device_open(r->on == SIM_CUDA ? "cuda" : "cpu", NULL, &r->device);
  status = status != DC_OK ? status : dc_context_create(r->device, NULL, &r->context);
  status = status != DC_OK ? status : dc_init(r->context, comm, &config, 1024);
  const int64_t length[1] = {comm == NULL ? NUMEL : (NUMEL + 1) / 2};
  for (int i = 0; i < 2 && status == DC_OK; i++) {
    r->shard[i] = tensor_of(r, 1, length);
    r->grad[i] = tensor_of(r, 1, length);
    dc_tensor shard = described(r->shard[i], length), grad = described(r->grad[i], length);
    status = dc_register_z3_param(r->context, i, SHAPE, 2, &shard, &grad, 0, DC_DTYPE_NONE);
    write_values(r, r->shard[i], (float)(1 + 100 * i));
  }
  status = status != DC_OK ? status : dc_register_graph_z3(r->context, graph, ids, 2);
  if (status == DC_OK && r->on == SIM_CUDA && dct_track_stream(r->context, r->device, 0) != NULL) {
    status = DC_E_INVALID;
  }
  return status == DC_OK && dct_bind(graph, r->context) != 0 ? DC_E_NO_MEMORY : status;
}

void close_run(run *r) {
  (void)dct_bind(r->graph, NULL);
  if (dct_get_context() == r->context) {
    dct_set_context(NULL);
  }
  dct_untrack_stream(r->context);
  dc_context_destroy(r->context);
  dc_device_destroy(r->device);
  for (int i = 0; i < 2; i++) {
    torchsim_drop(r->shard[i]);
    torchsim_drop(r->grad[i]);
  }
}

/* ---- operators ---- */

/* Calls nothing after a failure. Returns the operator's result, if it has one. */
dct_value call(run *r, const char *ns, const char *name, const char *key, dct_value *stack, uint64_t inputs,
               uint64_t outputs) {
  if (r->error != NULL) {
    return 0;
  }
  r->error = torchsim_call(ns, name, key, stack, inputs, outputs);
  return r->error == NULL && outputs > 0 ? stack[0] : 0;
}

/* Calls an operator with (a, graph, id), and `more` if it has a fourth argument. Takes over the tensor. */
static dct_tensor with_id(run *r, const char *ns, const char *name, dct_tensor a, int64_t id, dct_value more,
                          uint64_t outputs) {
  dct_value stack[4] = {dct_as_value(a), (dct_value)r->graph, (dct_value)id, more};
  bool four = strcmp(name, "allgather_param") == 0 || strcmp(name, "release_param") == 0 || strcmp(name, "take") == 0;
  if (r->error != NULL) {
    torchsim_drop(a);
    return NULL;
  }
  int32_t index;
  const char *key = torchsim_device(a, &index) == SIM_CUDA ? "CUDA" : "CPU";
  return dct_as_tensor(call(r, ns, name, key, stack, four ? 4 : 3, outputs));
}

dct_tensor op(run *r, const char *name, dct_tensor a, int64_t id) {
  return with_id(r, "dc", name, a, id, strcmp(name, "release_param") == 0, 1);
}

/* Passes a list of one tensor, which it takes over. The operator names no graph, so it only works in the default
 * context. */
void free_one(run *r, dct_tensor t) {
  const dct_value items[1] = {dct_as_value(t)};
  dct_value stack[1] = {0};
  if (r->error == NULL && dct_get_context() == r->context) {
    stack[0] = torchsim_list(items, 1, true);
    (void)call(r, "dc", "free_tensors", "CompositeExplicitAutograd", stack, 1, 0);
  } else {
    torchsim_drop(t);
  }
}

void end_backward(run *r) {
  dct_value stack[1] = {(dct_value)r->graph};
  (void)call(r, "dc", "end_backward", "CompositeExplicitAutograd", stack, 1, 0);
}

/* Reads a result's values, and frees it. Does nothing without a result. */
void keep(run *r, dct_tensor t, float *values) {
  if (t != NULL) {
    if (r->error == NULL) {
      read_values(r, t, values);
    }
    torchsim_drop(t);
  }
}

dct_tensor token(const run *r) {
  return tensor_of(r, 1, NONE);
}

/* Takes both parameters in one call. */
static void take_steps(run *r, float *to) {
  const dct_value ids[2] = {0, 1};
  if (r->error == NULL) {
    dct_value stack[3] = {(dct_value)r->graph, torchsim_list(ids, 2, false), 0};
    dct_value list = call(r, "dc_rt", "take_params", "CompositeExplicitAutograd", stack, 3, 1);
    dct_tensor taken[2] = {NULL, NULL};
    if (r->error == NULL) {
      torchsim_items(list, taken, 2);
    }
    keep(r, taken[0], to);
    keep(r, taken[1], to + NUMEL);
  }
}

void gather_steps(run *r, float *to) {
  const dct_value ids[2] = {0, 1}, types[2] = {SIM_FLOAT32, SIM_FLOAT32};
  const dct_value tokens[2] = {dct_as_value(token(r)), dct_as_value(token(r))};
  dct_value stack[4] = {(dct_value)r->graph, torchsim_list(tokens, 2, true), torchsim_list(ids, 2, false),
                        torchsim_some(torchsim_list(types, 2, false))};
  (void)call(r, "dc", "prefetch_params_fused", "CompositeExplicitAutograd", stack, 4, 0);
  dct_tensor w = with_id(r, "dc", "allgather_param", token(r), 0, r->error == NULL ? torchsim_some(SIM_FLOAT32) : 0, 1);
  w = w == NULL ? NULL : op(r, "wait_allgather", w, 0);
  dct_tensor again = w == NULL ? NULL : torchsim_again(w);
  keep(r, w, to);
  w = again == NULL ? NULL : op(r, "release_param", again, 0);
  if (w != NULL) {
    torchsim_drop(w);
  }
  keep(r, with_id(r, "dc_rt", "take", token(r), 1, 0, 1), to + NUMEL);
  take_steps(r, to);
}

static void gradient_steps(run *r, float *to) {
  const int64_t turned[2] = {5, 3};
  if (dc_start_backward(r->context, 1) != DC_OK) {
    r->error = dc_last_error();
  }
  for (int i = 0; i < 2; i++) {
    dct_tensor whole = tensor_of(r, 2, i == 0 ? turned : SHAPE);
    write_values(r, whole, (float)(7 + i));
    dct_tensor grad = i == 0 ? torchsim_transposed(whole) : torchsim_again(whole);
    torchsim_drop(whole);
    dct_tensor nothing = op(r, "reduce_grad", grad, i); /* the last reference: its memory may be reused from here on */
    if (nothing != NULL) {
      int32_t index = 0;
      r->error = torchsim_device(nothing, &index) != r->on || torchsim_numel(nothing) != 0 ? "a wrong result" : NULL;
      torchsim_drop(nothing);
    }
  }
  end_backward(r);
  for (int i = 0; i < 2 && r->error == NULL; i++) {
    read_values(r, r->grad[i], to + i * NUMEL);
  }
}

void offload_steps(run *r, float *to) {
  dct_tensor x = tensor_of(r, 1, MANY);
  write_values(r, x, 50);
  dct_tensor host = op(r, "offload_tensor", x, 3);
  host = host == NULL ? NULL : op(r, "wait_offload", host, 3);
  dct_tensor again = host == NULL ? NULL : torchsim_again(host);
  int32_t index = 0;
  if (host != NULL && torchsim_device(host, &index) != SIM_CPU) {
    r->error = "the host copy is not on the CPU";
  }
  keep(r, host, to);
  dct_tensor back = again == NULL ? NULL : op(r, "reload_tensor", again, 3);
  back = back == NULL ? NULL : op(r, "wait_reload", back, 3);
  if (back != NULL) {
    r->error = torchsim_device(back, &index) != r->on ? "the reloaded copy is not on the device" : NULL;
    again = torchsim_again(back);
    keep(r, back, to + LARGE);
    free_one(r, again);
  }
  free_one(r, tensor_of(r, 1, MANY));
  (void)with_id(r, "dc", "reload_parameter", token(r), 0, 0, 0);
  (void)with_id(r, "dc", "offload_parameter", token(r), 0, 0, 0);
}

/* Calls all thirteen operators. Returns readable results as values. */
void operators(run *r, float *values) {
  memset(values, 0, FLOATS * sizeof *values);
  gather_steps(r, values);
  gradient_steps(r, values + 2 * NUMEL);
  offload_steps(r, values + 4 * NUMEL);
}

/* ---- a world around a test ---- */

dc_device *memory;
void *streams[3];
int registered; /* number of libraries, which stay registered */

void drain_stream(void *native) {
  dc_stream *stream;
  assert_int_equal(dc_stream_wrap(memory, native, &stream), DC_OK);
  assert_int_equal(dc_stream_synchronize(stream, 0), DC_OK);
  dc_stream_destroy(stream);
}

int set_up(void **state) {
  (void)state;
  cudasim_reset();
  assert_int_equal(dc_device_open("cuda", NULL, &memory), DC_OK);
  torchsim_use(memory);
  for (int i = 1; i < 3; i++) {
    streams[i] = cudasim_stream();
  }
  torchsim_set_stream(streams[0]);
  return 0;
}

int tear_down(void **state) {
  (void)state;
  drain_stream(streams[0]);
  for (int i = 1; i < 3; i++) {
    cudasim_stream_end(streams[i]); /* runs the queued work first */
  }
  torchsim_use(NULL);
  dc_device_destroy(memory);
  assert_int_equal(torchsim_live(), registered);
  assert_int_equal(cudasim_live(), 0);
  assert_int_equal(cudasim_depth(), 0);
  return 0;
}

run opened(const char *key) {
  run r;
  assert_int_equal(open_run(&r, key, NULL, GRAPH), DC_OK);
  set_stream(&r, streams[0]);
  dct_set_context(r.context);
  return r;
}

void expect_no_error(const run *r) {
  if (r->error != NULL) {
    fail_msg("%s", r->error);
  }
}
