#include "scenario.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* LARGE is read in place, SMALL is staged; a gradient of LARGE makes its bucket grow. */
enum { SMALL = 10, LARGE = 40000, GRAPH = 1, OTHER = 2, SUMMED = 3, VALUE = 9, MOST = 2, STEPS = 2 };

/* The caller's memory. It is static, since the caller's own malloc may be refused as well. */
typedef struct memory {
  float shards[2][LARGE], grads[2][LARGE], gradient[LARGE], whole[SMALL], summed[SMALL], copy[SMALL];
} memory;

typedef struct actor {
  ending end;
  memory *m;
  dc_comm *comm;
  dc_device *device;
  dc_context *ctx;
  dc_stream *stream;
  dc_buffer *taken, *shared;
  int32_t rank, world;
  const char *folder;
} actor;

static memory memories[MOST];
static const int64_t ids[2] = {5, 6}, numel[2] = {SMALL, LARGE}, small = SMALL;

static float weight(int64_t id, int64_t i) {
  return (float)((id * 31 + i * 7) % 61 - 30) / 4.0f;
}

static float gradient(int64_t id, int32_t rank, int64_t i) {
  return (float)((id + i) % 9 - 4 + 2 * rank);
}

static dc_tensor flat(void *data, const int64_t *count, int32_t dtype) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = count;
  t.ndim = 1;
  t.dtype = dtype;
  return t;
}

/* Returns whether a failed call may be made again: its error names the refused resource, and the context, if there is
 * one, is alive. */
static int again(actor *a, dc_status status, const char *call) {
  char text[512];
  snprintf(text, sizeof text, "%s", dc_last_error());
  a->end.first = a->end.first == DC_OK ? status : a->end.first;
  dc_status now = a->ctx == NULL ? DC_OK : dc_context_check(a->ctx);
  int alive = now == DC_OK || now == DC_E_STATE; /* DC_E_STATE: not initialised yet */
  a->end.last = status;
  snprintf(a->end.text, sizeof a->end.text, "%s%.90s: %s", text[0] == '\0' ? "wrong: no text: " : "", call, text);
  if (!alive && now != status) {
    snprintf(a->end.text, sizeof a->end.text, "wrong: %.90s gave %s (%.200s), but the context's failure is %s", call,
             dc_status_name(status), text, dc_status_name(now));
  }
  return alive && (status == DC_E_NO_MEMORY || status == DC_E_SYSTEM);
}

#define DO(a, call)                                           \
  do {                                                        \
    dc_status do_status = (call);                             \
    if (do_status != DC_OK && again((a), do_status, #call)) { \
      do_status = (call);                                     \
      if (do_status != DC_OK) {                               \
        (void)again((a), do_status, #call);                   \
      }                                                       \
    }                                                         \
    if (do_status != DC_OK) {                                 \
      return 0;                                               \
    }                                                         \
    (a)->end.last = DC_OK;                                    \
  } while (0)

#define MUST(a, condition)                                                                            \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      (a)->end.last = DC_E_INTERNAL;                                                                  \
      snprintf((a)->end.text, sizeof(a)->end.text, "wrong: rank %d: %s", (int)(a)->rank, #condition); \
      return 0;                                                                                       \
    }                                                                                                 \
  } while (0)

static int64_t chunk(const actor *a, int p) {
  return (numel[p] + a->world - 1) / a->world;
}

static int64_t own_count(const actor *a, int p) {
  int64_t begin = a->rank * chunk(a, p), rest = numel[p] - begin;
  return rest < 0 ? 0 : rest < chunk(a, p) ? rest : chunk(a, p);
}

static int set_up(actor *a) {
  DO(a, dc_device_open("cpu", NULL, &a->device));
  DO(a, dc_context_create(a->device, NULL, &a->ctx));
  DO(a, dc_init(a->ctx, a->comm, NULL, 100));
  DO(a, dc_stream_create(a->device, &a->stream));
  for (int p = 0; p < 2; p++) {
    const int64_t length = chunk(a, p);
    for (int64_t i = 0; i < own_count(a, p); i++) {
      a->m->shards[p][i] = weight(ids[p], a->rank * length + i);
    }
    dc_tensor shard = flat(a->m->shards[p], &length, DC_FLOAT32), grad = flat(a->m->grads[p], &length, DC_FLOAT32);
    DO(a, dc_register_z3_param(a->ctx, ids[p], &numel[p], 1, &shard, &grad, 0, DC_DTYPE_NONE));
  }
  dc_tensor whole = flat(a->m->whole, &small, DC_FLOAT32);
  DO(a, dc_register_param(a->ctx, 7, &small, 1, NULL, &whole, 0));
  DO(a, dc_register_graph_z3(a->ctx, GRAPH, ids, 2));
  const int64_t other = 7, sum = 8, none = 0;
  DO(a, dc_register_graph_z0(a->ctx, OTHER, &other, 1));
  dc_tensor summed = flat(a->m->summed, a->rank == 0 ? &small : &none, DC_FLOAT32); /* rank 0 owns the whole gradient */
  DO(a, dc_register_param(a->ctx, sum, &small, 1, NULL, &summed, 0));
  DO(a, dc_register_graph_z1(a->ctx, SUMMED, &sum, 1));
  DO(a, dc_context_trace_start(a->ctx, 64));
  return 1;
}

static int forward(actor *a) {
  dc_tensor full = DC_TENSOR_INIT, value = flat(a->m->copy, &small, DC_FLOAT32), out = DC_TENSOR_INIT;
  DO(a, dc_prefetch_params_fused(a->ctx, GRAPH, ids, NULL, 2));
  for (int p = 0; p < 2; p++) {
    DO(a, dc_allgather_param(a->ctx, NULL, GRAPH, ids[p], DC_DTYPE_NONE, &full));
    DO(a, dc_wait_allgather(a->ctx, NULL, GRAPH, ids[p]));
    DO(a, dc_stream_synchronize(a->stream, 0));
    DO(a, dc_context_check(a->ctx)); /* a gather that failed would show here */
    for (int64_t i = 0; i < numel[p]; i++) {
      MUST(a, ((const float *)full.data)[i] == weight(ids[p], i));
    }
  }
  DO(a, dc_allgather_param(a->ctx, NULL, GRAPH, ids[0], DC_BFLOAT16, &full));
  DO(a, dc_release_param(a->ctx, NULL, GRAPH, ids[0], 1));
  DO(a, dc_take_param(a->ctx, GRAPH, ids[1], DC_DTYPE_NONE, &a->taken));
  dc_buffer_release(a->taken);
  a->taken = NULL;
  DO(a, dc_reload_parameter(a->ctx, NULL, GRAPH, ids[0]));
  DO(a, dc_set_persistent(a->ctx, ids[0]));
  DO(a, dc_clear_persistent(a->ctx, ids[0]));
  DO(a, dc_offload_parameter(a->ctx, NULL, GRAPH, ids[0]));
  DO(a, dc_offload_tensor(a->ctx, &value, GRAPH, VALUE, &out));
  DO(a, dc_wait_offload(a->ctx, NULL, GRAPH, VALUE, &out));
  DO(a, dc_reload_tensor(a->ctx, NULL, GRAPH, VALUE, &out));
  DO(a, dc_wait_reload(a->ctx, NULL, GRAPH, VALUE, &out));
  DO(a, dc_stream_synchronize(a->stream, 0));
  return 1;
}

static int reduce(actor *a, int64_t graph, int64_t id, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    a->m->gradient[i] = gradient(id, a->rank, i);
  }
  dc_tensor grad = flat(a->m->gradient, &count, DC_FLOAT32);
  DO(a, dc_reduce_grad(a->ctx, &grad, graph, id));
  DO(a, dc_stream_synchronize(a->stream, 0));
  return 1;
}

static int backward(actor *a, int step) {
  DO(a, dc_start_backward(a->ctx, 0));
  if (!reduce(a, SUMMED, 8, small)) {
    return 0;
  }
  DO(a, dc_start_backward(a->ctx, 1));
  if (!reduce(a, SUMMED, 8, small) || !reduce(a, GRAPH, ids[0], numel[0]) || !reduce(a, GRAPH, ids[1], numel[1]) ||
      !reduce(a, OTHER, 7, small)) {
    return 0;
  }
  DO(a, dc_end_backward(a->ctx, GRAPH, step == 0));
  for (int p = 0; p < 2; p++) {
    for (int64_t i = 0; i < own_count(a, p); i++) {
      float mean = gradient(ids[p], 0, a->rank * chunk(a, p) + i) + (float)(a->world - 1);
      MUST(a, a->m->grads[p][i] == mean);
    }
  }
  for (int64_t i = 0; i < small; i++) {
    MUST(a, a->m->whole[i] == gradient(7, 0, i) + (float)(a->world - 1));
    MUST(a, a->rank != 0 || a->m->summed[i] == 2 * (gradient(8, 0, i) + (float)(a->world - 1)));
  }
  DO(a, dc_context_params_updated(a->ctx, NULL, 0));
  return 1;
}

static int run_actor(actor *a) {
  if (!set_up(a)) {
    return 0;
  }
  DO(a, dc_context_alloc(a->ctx, 100, DC_MEMORY_SHARED, &a->shared));
  for (int step = 0; step < STEPS; step++) {
    DO(a, dc_context_set_stream(a->ctx, step == 0 ? NULL : a->stream));
    if (!forward(a) || !backward(a, step)) {
      return 0;
    }
  }
  for (int64_t i = 0; i < small; i++) {
    a->m->copy[i] = (float)i;
  }
  dc_tensor all = flat(a->m->copy, &small, DC_FLOAT32);
  DO(a, dc_comm_all_reduce(a->comm, &all, DC_SUM, NULL));
  for (int64_t i = 0; i < small; i++) {
    MUST(a, a->m->copy[i] == (float)(i * a->world));
  }
  DO(a, dc_comm_barrier(a->comm));
  if (a->folder != NULL) {
    DO(a, dc_context_trace_dump(a->ctx, a->folder));
  }
  return 1;
}

/* A failed context returns the same status from every later call, and its resources are freed. */
static void tear_down(actor *a) {
  dc_memory_stats stats = {.struct_size = sizeof stats};
  dc_status failure = a->ctx == NULL ? DC_OK : dc_context_check(a->ctx);
  if (failure != DC_OK && failure != DC_E_STATE &&
      (dc_end_backward(a->ctx, GRAPH, 0) != failure || dc_context_get_memory_stats(a->ctx, &stats) != failure)) {
    snprintf(a->end.text, sizeof a->end.text, "wrong: after %s a call gave another status: %.400s",
             dc_status_name(failure), dc_last_error());
  }
  dc_buffer_release(a->taken);
  dc_buffer_release(a->shared);
  dc_context_destroy(a->ctx);
  dc_stream_destroy(a->stream);
  dc_device_destroy(a->device);
  dc_comm_destroy(a->comm);
}

ending scenario_run(dc_comm *comm, const char *folder) {
  actor a = {.comm = comm, .rank = dc_comm_rank(comm), .world = dc_comm_size(comm), .folder = folder};
  a.end.made = 1;
  a.m = &memories[a.rank];
  (void)run_actor(&a);
  tear_down(&a);
  return a.end;
}

ending scenario_run_process(const char *name, int32_t rank, int32_t world, int64_t timeout_ns) {
  dc_comm_options options = DC_COMM_OPTIONS_INIT;
  dc_comm *comm = NULL;
  options.timeout_ns = timeout_ns;
  options.heap_bytes = (size_t)64 << 20;
  dc_status status = dc_comm_create_processes(name, rank, world, &options, &comm);
  if (status == DC_OK) {
    return scenario_run(comm, NULL);
  }
  ending end = {.first = status, .last = status};
  snprintf(end.text, sizeof end.text, "%s%s", comm != NULL ? "wrong: a handle and an error: " : "", dc_last_error());
  return end;
}
