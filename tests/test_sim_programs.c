/* Random legal programs on simulated worlds. Each rank draws the same program from the seed, runs it on libdc, and
 * keeps a model beside it: what every value must be, one thing after the other. The reads and writes of a caller who
 * computes on a stream of his own, or on the host, are noted too, so a program passes if all values are the model's
 * and the checker has nothing to say.
 *
 *   SIM_PROGRAMS=100000 SIM_SEED=1 test_sim_programs       so many, from a seed on */
#include "sim/ranks.h"

void __real_dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count); /* not noted */

enum { PARAMS = 4, TYPES = 3, VALUES = 2, LONGEST = 40, STEPS = 50, GRAPH = 10, OTHER_GRAPH = 11 };

static const int32_t types[TYPES] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16};
static const int64_t lengths[] = {0, 1, 2, 3, 5, 8, 17, LONGEST};

/* A gathered copy: not there, coming, or waited for. */
typedef enum copy_state { NONE, COMING, READY } copy_state;

typedef struct copy {
  copy_state state;
  int64_t version; /* of the weights it holds */
  int64_t gather;  /* the gather that brought it */
  bool from_shard; /* not from a copy in another type */
  const void *data;
} copy;

typedef struct param {
  int64_t id, numel, chunk, begin, count; /* this rank's part of the gradient */
  float *shard, *grad;
  int64_t version;
  bool persistent;
  int64_t users, released;
  copy copies[TYPES];
  bool reloaded;     /* the shard, since the last drop */
  int64_t reloading; /* gathers started before a reload that may still read the shard; -1: none does */
  bool has_grad, unknown, pending;
  int32_t grad_dtype;
  float expected[LONGEST];         /* the whole gradient */
  float local[SIM_RANKS][LONGEST]; /* stage 1: each rank's sum */
  bool has_local;
  bool shared; /* in both graphs */
} param;

/* A tensor of the caller's that is offloaded and reloaded. */
typedef struct value {
  float *source;
  int64_t content, host, device; /* which content each holds; -1: none */
  bool offload_waited, reload_waited;
  const void *host_data, *device_data;
} value;

typedef struct program {
  rank *r;
  uint64_t state; /* of the random numbers, the same on all ranks */
  int32_t stage;
  dc_stream *streams[2], *caller;
  param params[PARAMS];
  int64_t count;
  value values[VALUES];
  int64_t contents;
  int64_t gathers, waited, lost; /* started; the last one waited for; the last one dropped before */
  bool update, boundary, profiling;
  int64_t reductions;
} program;

static uint64_t pick(program *p, uint64_t below) {
  p->state += UINT64_C(0x9e3779b97f4a7c15);
  uint64_t z = (p->state ^ (p->state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % below;
}

/* Exact in all types, also when a few are added. */
static float weight(int64_t id, int64_t version, int64_t i) {
  return (float)((id * 31 + version * 13 + i * 7) % 61 - 30) / 4.0f;
}

static float gradient(int32_t by, int64_t id, int64_t reduction, int64_t i) {
  return (float)((by * 5 + id * 3 + reduction * 11 + i * 2) % 9 - 4);
}

/* ---- the caller's own work, on his stream or on the host ---- */

typedef struct touch {
  rank *r;
  void *data;
  const char *what;
  int64_t count;
  int32_t dtype;
  bool write;
  float values[LONGEST];
} touch;

static void run_touch(void *arg) {
  touch *t = arg;
  size_t bytes = (size_t)t->count * dc_dtype_size(t->dtype);
  if (t->write) {
    sim_writes(t->data, bytes, t->what);
    __real_dc__cast(t->data, t->dtype, t->values, DC_FLOAT32, t->count);
  } else {
    float found[LONGEST];
    sim_reads(t->data, bytes, t->what);
    __real_dc__cast(found, DC_FLOAT32, t->data, t->dtype, t->count);
    for (int64_t i = 0; i < t->count && t->r->failure[0] == '\0'; i++) {
      if (found[i] != t->values[i]) {
        snprintf(t->r->failure, sizeof t->r->failure, "rank %d: %s: element %d is %g, must be %g", t->r->rank, t->what,
                 (int)i, (double)found[i], (double)t->values[i]);
      }
    }
  }
  free(t);
}

static touch *new_touch(program *p, const void *data, int64_t count, int32_t dtype, const char *what) {
  touch *t = calloc(1, sizeof *t);
  *t = (touch){.r = p->r, .data = (void *)(uintptr_t)data, .what = what, .count = count, .dtype = dtype};
  return t;
}

static void on_caller(program *p, touch *t) {
  if (p->caller == NULL) {
    run_touch(t);
  } else {
    (void)dc_stream_call(p->caller, run_touch, t);
  }
}

static void sync_caller(program *p) {
  if (p->caller != NULL) {
    (void)dc_stream_synchronize(p->caller, 0);
  }
}

/* ---- weights ---- */

static bool has_copy(const param *a) {
  return a->copies[0].state != NONE || a->copies[1].state != NONE || a->copies[2].state != NONE;
}

static void model_gather(program *p, param *a, int t) {
  copy *c = &a->copies[t];
  if (c->state == NONE || c->version != a->version) {
    c->from_shard = true;
    for (int other = 0; other < TYPES; other++) {
      c->from_shard = c->from_shard && (a->copies[other].state == NONE || a->copies[other].version != a->version);
    }
    c->state = COMING;
    c->version = a->version;
    c->gather = ++p->gathers;
  }
}

static void model_drop(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    if (a->copies[t].state == COMING) {
      p->lost = p->gathers; /* nobody knows when it is done, until a later one was waited for */
    }
    a->copies[t].state = NONE;
  }
  a->users = a->released = 0;
}

static void model_wait(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    copy *c = &a->copies[t];
    if (c->state == COMING) {
      c->state = READY;
      p->waited = c->gather > p->waited ? c->gather : p->waited;
      if (c->from_shard && a->reloaded && c->gather > a->reloading) {
        a->reloading = -1;
      }
    }
  }
}

static void gather(program *p, param *a, int64_t graph) {
  rank *r = p->r;
  int t = (int)pick(p, TYPES);
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, dc_allgather_param(r->ctx, NULL, graph, a->id, t == 0 && pick(p, 2) == 0 ? DC_DTYPE_NONE : types[t], &full));
  CHECK(r, full.dtype == types[t] && full.shape[0] == a->numel);
  model_gather(p, a, t);
  a->copies[t].data = full.data;
}

static void prefetch(program *p) {
  rank *r = p->r;
  int64_t ids[PARAMS], n = 0;
  int32_t dtypes[PARAMS];
  for (int64_t i = 0; i < p->count; i++) {
    if (pick(p, 2) == 0) {
      int t = (int)pick(p, TYPES);
      ids[n] = p->params[i].id;
      dtypes[n++] = types[t];
    }
  }
  OK(r, dc_prefetch_params_fused(r->ctx, GRAPH, ids, dtypes, n));
  for (int64_t i = 0; i < n; i++) {
    param *a = &p->params[ids[i]];
    int t = dtypes[i] == DC_FLOAT32 ? 0 : dtypes[i] == DC_BFLOAT16 ? 1 : 2;
    dc_tensor full = DC_TENSOR_INIT;
    model_gather(p, a, t);
    OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, a->id, dtypes[i], &full)); /* a hit, which says where it is */
    a->copies[t].data = full.data;
  }
}

static void use(program *p, param *a) {
  for (int t = 0; t < TYPES; t++) {
    const copy *c = &a->copies[t];
    if (c->state == READY) {
      touch *look = new_touch(p, c->data, a->numel, types[t], "a gathered weight");
      for (int64_t i = 0; i < a->numel; i++) {
        look->values[i] = weight(a->id, c->version, i);
      }
      on_caller(p, look);
    }
  }
}

static void wait_and_use(program *p, param *a, int64_t graph) {
  rank *r = p->r;
  OK(r, dc_wait_allgather(r->ctx, NULL, graph, a->id));
  model_wait(p, a);
  use(p, a);
}

static void release(program *p, param *a, int64_t graph) {
  rank *r = p->r;
  int64_t users = a->users != 0 ? a->users : 1 + (int64_t)pick(p, 2);
  OK(r, dc_release_param(r->ctx, NULL, graph, a->id, users));
  a->users = users;
  if (++a->released == users) {
    a->users = a->released = 0;
    if (!a->persistent) {
      model_drop(p, a);
    }
  }
}

static void take(program *p, param *a) {
  rank *r = p->r;
  int t = (int)pick(p, TYPES);
  copy *c = &a->copies[t];
  if (c->state == NONE || a->users != 0) {
    return;
  }
  dc_buffer *buffer;
  OK(r, dc_take_param(r->ctx, GRAPH, a->id, types[t], &buffer));
  CHECK(r, dc_buffer_data(buffer) == c->data);
  model_wait(p, a);
  use(p, a);
  sync_caller(p); /* done reading */
  dc_buffer_release(buffer);
  c->state = a->persistent ? c->state : NONE;
}

static void persistence(program *p, param *a) {
  rank *r = p->r;
  if (a->persistent) {
    OK(r, dc_clear_persistent(r->ctx, a->id));
    a->persistent = false;
    if (a->users == 0) {
      model_drop(p, a);
    }
    return;
  }
  OK(r, dc_set_persistent(r->ctx, a->id));
  model_gather(p, a, 0);
  a->persistent = true;
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, dc_allgather_param(r->ctx, NULL, GRAPH, a->id, DC_DTYPE_NONE, &full));
  a->copies[0].data = full.data;
}

static void forget(program *p, param *a) {
  rank *r = p->r;
  bool all = pick(p, 2) == 0;
  OK(r, all ? dc_clear_all_gathered_params(r->ctx) : dc_invalidate_gathered_param(r->ctx, a->id));
  for (int64_t i = 0; i < p->count; i++) {
    param *b = &p->params[i];
    if ((all || b == a) && !b->persistent) {
      model_drop(p, b);
    }
  }
}

/* The optimizer writes the shards, once nothing reads them any more as far as the caller can know. */
static void update(program *p) {
  rank *r = p->r;
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    if (has_copy(a)) {
      OK(r, dc_wait_allgather(r->ctx, NULL, a->shared && pick(p, 2) == 0 ? OTHER_GRAPH : GRAPH, a->id));
      model_wait(p, a);
    }
  }
  bool unknown = p->lost > p->waited;
  for (int64_t i = 0; i < p->count; i++) {
    unknown = unknown || p->params[i].reloading >= 0;
  }
  if (unknown) {
    return;
  }
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->version++;
    a->reloaded = false;
    int64_t begin = r->rank * a->chunk < a->numel ? r->rank * a->chunk : a->numel;
    int64_t mine = a->numel - begin < a->chunk ? a->numel - begin : a->chunk;
    touch *t = new_touch(p, a->shard, mine, DC_FLOAT32, "the optimizer");
    t->write = true;
    for (int64_t k = 0; k < mine; k++) {
      t->values[k] = weight(a->id, a->version, begin + k);
    }
    on_caller(p, t);
  }
  OK(r, dc_params_updated(r->ctx, NULL, 0));
}

static void shard_to_device(program *p, param *a) {
  rank *r = p->r;
  if (pick(p, 2) == 0) {
    OK(r, dc_offload_parameter(r->ctx, NULL, GRAPH, a->id));
    a->reloaded = false;
  } else {
    OK(r, dc_reload_parameter(r->ctx, NULL, GRAPH, a->id));
    a->reloading = a->reloaded ? a->reloading : p->gathers;
    a->reloaded = true;
  }
}

/* ---- tensors of the caller ---- */

static float content(int64_t which, int64_t i) {
  return (float)((which * 17 + i * 3) % 50);
}

static void expect_content(program *p, const void *data, int64_t which, const char *what) {
  touch *look = new_touch(p, data, LONGEST, DC_FLOAT32, what);
  for (int64_t i = 0; i < LONGEST; i++) {
    look->values[i] = content(which, i);
  }
  on_caller(p, look);
}

static void offload(program *p, value *v, int64_t id) {
  rank *r = p->r;
  int64_t shape = LONGEST;
  if (v->content < 0 || v->offload_waited) { /* only then may the source be written again */
    v->content = ++p->contents;
    touch *t = new_touch(p, v->source, LONGEST, DC_FLOAT32, "an activation");
    t->write = true;
    for (int64_t i = 0; i < LONGEST; i++) {
      t->values[i] = content(v->content, i);
    }
    on_caller(p, t);
  }
  dc_tensor a = flat(v->source, &shape, DC_FLOAT32), out = DC_TENSOR_INIT;
  OK(r, dc_offload_tensor(r->ctx, &a, GRAPH, id, &out));
  v->host = v->content;
  v->host_data = out.data;
  v->offload_waited = p->caller == NULL;
}

static void reload(program *p, value *v, int64_t id) {
  rank *r = p->r;
  dc_tensor out = DC_TENSOR_INIT;
  if (v->host < 0) {
    return;
  }
  switch (pick(p, 4)) {
    case 0:
      OK(r, dc_wait_offload(r->ctx, NULL, GRAPH, id, &out));
      v->offload_waited = true;
      expect_content(p, v->host_data, v->host, "an offloaded tensor");
      break;
    case 1:
      if (v->device >= 0 && v->reload_waited && pick(p, 2) == 0) {
        int64_t shape = LONGEST;
        int32_t freed;
        dc_tensor t = flat((void *)(uintptr_t)v->device_data, &shape, DC_FLOAT32);
        OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, id, &out));
        t.buffer = out.buffer;
        OK(r, dc_free_tensors(r->ctx, &t, sizeof t, 1, &freed));
        CHECK(r, freed == !p->profiling);
        v->device = freed == 1 ? -1 : v->device;
      }
      break;
    case 2:
      OK(r, dc_reload_tensor(r->ctx, NULL, GRAPH, id, &out));
      if (v->device < 0) {
        v->device = v->host;
        v->reload_waited = false;
      }
      v->device_data = out.data;
      break;
    default:
      if (v->device >= 0) {
        OK(r, dc_wait_reload(r->ctx, NULL, GRAPH, id, &out));
        v->reload_waited = true;
        expect_content(p, v->device_data, v->device, "a reloaded tensor");
      }
  }
}

/* ---- gradients ---- */

static void start_backward(program *p) {
  rank *r = p->r;
  bool with_update = pick(p, 2) == 0;
  OK(r, dc_start_backward(r->ctx, with_update));
  for (int64_t i = 0; i < p->count && p->boundary; i++) {
    p->params[i].has_grad = false;
  }
  p->boundary = false;
  p->update = with_update;
}

static void model_reduce(program *p, param *a) {
  bool locally = p->stage == 1 && !p->update;
  for (int64_t i = 0; i < a->numel; i++) {
    float sum = 0;
    for (int32_t by = 0; by < p->r->world; by++) {
      a->local[by][i] = (a->has_local ? a->local[by][i] : 0.0f) + gradient(by, a->id, p->reductions, i);
      sum += a->local[by][i];
    }
    float mean = sum / (float)p->r->world;
    if (!locally) {
      a->expected[i] = a->has_grad ? a->expected[i] + mean : mean;
    }
  }
  a->unknown = a->unknown && (locally || a->has_grad);
  a->has_grad = a->has_grad || !locally;
  a->has_local = locally;
  a->pending = a->pending || !locally;
}

static void reduce(program *p, param *a, int64_t graph) {
  rank *r = p->r;
  size_t bytes = (size_t)a->numel * dc_dtype_size(a->grad_dtype);
  void *memory = sim_new(bytes);
  touch *t = new_touch(p, memory, a->numel, a->grad_dtype, "the backward");
  t->write = true;
  for (int64_t i = 0; i < a->numel; i++) {
    t->values[i] = gradient(r->rank, a->id, p->reductions, i);
  }
  on_caller(p, t);
  dc_tensor g = flat(memory, &a->numel, a->grad_dtype);
  OK(r, dc_reduce_grad(r->ctx, &g, graph, a->id));
  t = new_touch(p, memory, a->numel, a->grad_dtype, "what takes the gradient's memory next");
  t->write = true;
  on_caller(p, t);
  if (!p->profiling) {
    model_reduce(p, a);
  }
  p->reductions++;
}

static void look_at_gradients(program *p) {
  rank *r = p->r;
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->pending = false;
    sim_reads(a->grad, (size_t)a->count * sizeof(float), "a gradient, by the optimizer");
    for (int64_t k = 0; k < a->count && !a->unknown; k++) {
      CHECK(r, a->grad[k] == a->expected[a->begin + k]);
    }
  }
}

static void end_backward(program *p) {
  rank *r = p->r;
  int64_t graph = pick(p, 3) == 0 ? OTHER_GRAPH : GRAPH;
  OK(r, dc_end_backward(r->ctx, graph, (int32_t)pick(p, 2)));
  for (int64_t i = 0; i < p->count && p->update; i++) {
    param *a = &p->params[i];
    bool member = graph == GRAPH || a->shared;
    a->has_grad = a->has_grad && (!member || a->shared);
  }
  p->boundary = p->boundary || p->update;
  for (int i = 0; i < VALUES && graph == GRAPH; i++) {
    p->values[i].device = -1;
  }
  look_at_gradients(p);
}

static void abort_step(program *p) {
  rank *r = p->r;
  OK(r, dc_step_abort(r->ctx));
  for (int64_t i = 0; i < p->count; i++) {
    param *a = &p->params[i];
    a->users = a->released = 0;
    if (!a->persistent) {
      model_drop(p, a);
    }
    a->unknown = true; /* who knows which buckets were full */
    a->has_grad = a->has_local = a->pending = false;
    a->reloading = -1;
  }
  for (int i = 0; i < VALUES; i++) {
    p->values[i].device = -1;
  }
  p->waited = p->gathers; /* the streams are drained */
}

/* ---- graphs and buffers that change in the middle ---- */

static dc_status register_graphs(program *p, bool first, bool second) {
  dc_status (*const by_stage[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  int64_t ids[PARAMS], shared[PARAMS], n = 0;
  for (int64_t i = 0; i < p->count; i++) {
    ids[i] = shared[n] = i;
    n += p->params[i].shared;
  }
  dc_status status = first ? by_stage[p->stage](p->r->ctx, GRAPH, ids, p->count) : DC_OK;
  return status == DC_OK && second ? by_stage[p->stage](p->r->ctx, OTHER_GRAPH, shared, n) : status;
}

static void register_again(program *p) {
  rank *r = p->r;
  bool pending = false, sums = false, reset = pick(p, 2) == 0, other = pick(p, 2) == 0;
  for (int64_t i = 0; i < p->count; i++) {
    pending = pending || p->params[i].pending;
    sums = sums || p->params[i].has_local;
  }
  if (pending || (reset && sums)) {
    return;
  }
  if (reset) {
    OK(r, dc_reset(r->ctx));
  }
  OK(r, register_graphs(p, reset || !other, reset || other));
  for (int i = 0; i < VALUES && (reset || !other); i++) { /* they were the old graph's */
    p->values[i].host = p->values[i].device = -1;
    p->values[i].offload_waited = true; /* registering drains the streams */
  }
}

static void new_grad_buffer(program *p, param *a) {
  rank *r = p->r;
  if (a->pending) {
    return;
  }
  int64_t length = p->stage == 3 ? a->chunk : a->count;
  a->grad = sim_new((size_t)length * sizeof(float));
  dc_tensor grad = flat(a->grad, &length, DC_FLOAT32);
  OK(r, dc_update_param_grad_buffer(r->ctx, a->id, &grad, p->stage == 3 ? 0 : a->begin));
  sync_caller(p);
  a->has_grad = a->unknown = false;
  memset(a->expected, 0, sizeof a->expected);
}

/* ---- a program ---- */

static void set_stream(program *p) {
  dc_stream *const choice[] = {NULL, p->streams[0], p->streams[1]};
  p->caller = choice[pick(p, 3)];
  OK(p->r, dc_set_stream(p->r->ctx, p->caller));
}

static void step_gradients(program *p, param *a, int64_t graph) {
  rank *r = p->r;
  switch (pick(p, 8)) {
    case 0:
      start_backward(p);
      break;
    case 1:
      end_backward(p);
      break;
    case 2:
      if (pick(p, 3) == 0) {
        OK(r, dc_accumulate_grads(r->ctx, &a->id, 1));
        a->has_grad = true;
      }
      break;
    default:
      reduce(p, a, graph);
  }
}

static void step_weights(program *p, param *a, int64_t graph) {
  switch (pick(p, 12)) {
    case 0:
    case 1:
      gather(p, a, graph);
      break;
    case 2:
      prefetch(p);
      break;
    case 3:
      if (has_copy(a) && pick(p, 3) == 0) {
        release(p, a, graph); /* perhaps before it has come */
      }
      break;
    case 4:
      take(p, a);
      break;
    case 5:
      persistence(p, a);
      break;
    case 6:
      if (pick(p, 3) == 0) {
        forget(p, a);
      }
      break;
    case 7:
      update(p);
      break;
    case 8:
      shard_to_device(p, a);
      break;
    default:
      if (has_copy(a)) {
        wait_and_use(p, a, graph);
        if (p->r->failure[0] == '\0' && pick(p, 2) == 0) {
          release(p, a, graph);
        }
      }
  }
}

static void step_rarely(program *p, param *a) {
  rank *r = p->r;
  switch (pick(p, 5)) {
    case 0:
      p->profiling = !p->profiling;
      OK(r, dc_enable_profiling(r->ctx, p->profiling));
      break;
    case 1:
      register_again(p);
      break;
    case 2:
      new_grad_buffer(p, a);
      break;
    case 3:
      abort_step(p);
      break;
    default:
      sync_caller(p);
  }
}

static void step(program *p) {
  param *a = &p->params[pick(p, (uint64_t)p->count)];
  int64_t graph = a->shared && pick(p, 2) == 0 ? OTHER_GRAPH : GRAPH;
  uint64_t kind = pick(p, 20);
  if (kind == 0) {
    set_stream(p);
  } else if (kind == 1) {
    step_rarely(p, a);
  } else if (kind < 8 || p->stage < 3) {
    step_gradients(p, a, graph);
  } else if (kind < 11) {
    int64_t v = (int64_t)pick(p, VALUES);
    if (pick(p, 3) == 0) {
      offload(p, &p->values[v], v);
    } else {
      reload(p, &p->values[v], v);
    }
  } else {
    step_weights(p, a, graph);
  }
}

/* Which part of a gradient this rank gets. */
static void own(const program *p, param *a) {
  const rank *r = p->r;
  if (p->stage == 0) {
    a->count = a->numel;
  } else if (p->stage == 3) {
    a->begin = r->rank * a->chunk < a->numel ? r->rank * a->chunk : a->numel;
    a->count = a->numel - a->begin < a->chunk ? a->numel - a->begin : a->chunk;
  } else { /* cut once, somewhere: all others own nothing */
    int64_t cut = a->numel * (a->id + 1) / 5;
    a->begin = r->rank == 0 ? 0 : cut;
    a->count = r->world == 1 ? a->numel : r->rank == 0 ? cut : r->rank == 1 ? a->numel - cut : 0;
  }
}

static void add_param(program *p, int64_t id) {
  rank *r = p->r;
  param *a = &p->params[id];
  a->id = id;
  a->numel = lengths[pick(p, sizeof lengths / sizeof lengths[0])];
  a->chunk = ceil_div(a->numel, r->world);
  a->grad_dtype = types[pick(p, TYPES)];
  a->persistent = p->stage == 3 && pick(p, 4) == 0;
  a->shared = pick(p, 2) == 0;
  a->reloading = -1;
  own(p, a);
  int64_t padded = p->stage == 3 ? a->chunk : a->count;
  a->grad = sim_new((size_t)padded * sizeof(float));
  dc_tensor grad = flat(a->grad, &padded, DC_FLOAT32);
  int32_t expected = pick(p, 3) == 0 ? DC_FLOAT32 : DC_DTYPE_NONE;
  if (p->stage < 3) {
    OK(r, dc_register_param(r->ctx, id, &a->numel, 1, NULL, &grad, a->begin));
    return;
  }
  a->shard = sim_new((size_t)a->chunk * sizeof(float)); /* padding is never written, and must never be read */
  int64_t begin = a->begin;
  sim_writes(a->shard, (size_t)a->count * sizeof(float), "the first weights");
  for (int64_t i = 0; i < a->count; i++) {
    a->shard[i] = weight(id, 0, begin + i);
  }
  dc_tensor shard = flat(a->shard, &a->chunk, DC_FLOAT32);
  OK(r, dc_register_z3_param(r->ctx, id, &a->numel, 1, &shard, &grad, a->persistent, expected));
}

static void set_up(program *p) {
  rank *r = p->r;
  p->stage = pick(p, 2) == 0 ? 3 : (int32_t)pick(p, 4);
  p->count = 1 + (int64_t)pick(p, PARAMS);
  for (int i = 0; i < 2; i++) {
    OK(r, dc_stream_create(r->device, &p->streams[i]));
  }
  set_stream(p);
  for (int64_t i = 0; i < p->count && r->failure[0] == '\0'; i++) {
    add_param(p, i);
  }
  for (int i = 0; i < VALUES; i++) {
    p->values[i] = (value){.source = sim_new(LONGEST * sizeof(float)), .content = -1, .host = -1, .device = -1};
  }
  CHECK(r, r->failure[0] == '\0');
  OK(r, register_graphs(p, true, true));
  sync_caller(p); /* gradients are set to zero on his stream, and are read on the host */
}

static void run_program(rank *r) {
  program *p = calloc(1, sizeof *p);
  p->r = r;
  p->state = *(const uint64_t *)r->user;
  set_up(p);
  for (int i = 0; i < STEPS && r->failure[0] == '\0'; i++) {
    step(p);
  }
  sync_caller(p);
  if (r->failure[0] == '\0') {
    (void)dc_set_stream(r->ctx, NULL);
    end_backward(p);
  }
  if (r->failure[0] != '\0') {
    dc_comm_abort(r->comm, r->failure);
  }
  (void)dc_set_stream(r->ctx, NULL);
  for (int i = 0; i < 2; i++) {
    dc_stream_destroy(p->streams[i]);
  }
  free(p);
}

/* World, config and kind of communicator belong to the program. */
static const char *run_seed(uint64_t seed) {
  static const int64_t buckets[] = {1, 30, 1000};
  program draws = {.state = seed * 7919};
  sim_options options = {.seed = seed, .world = 1 + (int32_t)pick(&draws, pick(&draws, 16) == 0 ? SIM_RANKS : 4)};
  options.no_heap = pick(&draws, 4) == 0;
  options.one_channel = pick(&draws, 5) == 0;
  setup s = {.world = options.world, .bucket = buckets[pick(&draws, 3)]};
  s.config.double_buffer = pick(&draws, 4) == 0 ? -1 : 0;
  s.config.symmetric_memory = !options.no_heap && pick(&draws, 3) == 0;
  s.config.sync_after_reduce = pick(&draws, 16) == 0;
  s.config.sync_before_allgather = pick(&draws, 16) == 0;
  s.config.free_activation_threshold = -1;
  return sim_ranks(&options, s, run_program, &seed);
}

/* conformance: 122 */
static void test_programs(void **state) {
  (void)state;
  /* Sanitizers and valgrind are slow here: without a number of programs, what 20 s are enough for. */
  uint64_t first = sim_setting("SIM_SEED", 1), count = sim_setting("SIM_PROGRAMS", 0);
  int64_t end = count > 0 ? INT64_MAX : dc__now_ns() + INT64_C(20000000000);
  count = count > 0 ? count : 3000;
  uint64_t seed = first;
  for (; seed < first + count && (dc__now_ns() < end || seed < first + 10); seed++) {
    const char *failure = run_seed(seed);
    if (failure[0] != '\0') {
      fail_msg("%s", failure);
    }
  }
  print_message("%" PRIu64 " programs\n", seed - first);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_programs)};
  return cmocka_run_group_tests_name("programs", tests, NULL, NULL);
}
