/* Draws the next call. All ranks draw the same numbers, so all make the same calls. */
#include "program.h"

static const int32_t weight_types[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16, DC_INT8, DC_INT32, DC_INT64};
static const int32_t float_types[] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16, DC_FLOAT64};
static const int64_t lengths[] = {0, 1, 2, 3, 5, 8, 17, 40, 61};

static void set_stream(program *p) {
  dc_stream *const choice[] = {NULL, p->streams[0], p->streams[1]};
  p->caller = choice[pick(p, 3)];
  OK(p, dc_context_set_stream(p->ctx, p->caller));
}

static void step_gradients(program *p, param *a, int64_t graph) {
  switch (pick(p, 8)) {
    case 0:
      start_backward(p);
      break;
    case 1:
      end_backward(p);
      break;
    case 2:
      if (pick(p, 3) == 0) {
        OK(p, dc_context_accumulate_grads(p->ctx, &a->id, 1));
        a->has_grad = true;
        a->keeps_grad = p->boundary;
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
        release(p, a, graph); /* possibly before the gather is complete */
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
      update_weights(p);
      break;
    case 8:
      shard_to_device(p, a);
      break;
    default:
      if (has_copy(a)) {
        wait_and_use(p, a, graph);
        if (!broken(p) && pick(p, 2) == 0) {
          release(p, a, graph);
        }
      }
  }
}

/* Uses one tensor several times, since its next content may arrive while a copy of the last one still exists. */
static void step_tensors(program *p) {
  value *v = &p->values[pick(p, VALUES)];
  for (uint64_t times = 1 + pick(p, 6); times > 0 && !broken(p); times--) {
    if (pick(p, 3) == 0) {
      offload(p, v);
    } else {
      reload(p, v);
    }
  }
}

static void step_rarely(program *p, param *a) {
  switch (pick(p, 5)) {
    case 0:
      p->profiling = !p->profiling;
      OK(p, dc_enable_profiling(p->ctx, p->profiling));
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
    step_tensors(p);
  } else {
    step_weights(p, a, graph);
  }
}

/* ---- set-up ---- */

/* Which part of a gradient this rank gets. */
static void own(const program *p, param *a) {
  const int32_t r = p->group_rank;
  if (p->stage == 0) {
    a->count = a->numel;
  } else if (p->stage == 3) {
    a->begin = r * a->chunk < a->numel ? r * a->chunk : a->numel;
    a->count = a->numel - a->begin < a->chunk ? a->numel - a->begin : a->chunk;
  } else { /* one rank owns it all, the others nothing */
    int64_t cut = a->numel * (a->id + 1) / 5;
    a->begin = r == 0 ? 0 : cut;
    a->count = p->group_size == 1 ? a->numel : r == 0 ? cut : r == 1 ? a->numel - cut : 0;
  }
}

static void generate_param(program *p, param *a, int64_t id) {
  a->id = id;
  a->numel = pick(p, 24) == 0 ? ground_large : lengths[pick(p, sizeof lengths / sizeof lengths[0])];
  a->chunk = ceil_div(a->numel, p->group_size);
  a->ndim = a->numel == 1 && pick(p, 2) == 0 ? 0 : pick(p, 2) == 0 ? 1 : 3;
  a->shape[0] = a->ndim == 3 ? 1 : a->numel;
  a->shape[1] = a->numel;
  a->shape[2] = 1;
  a->types[0] = pick(p, 2) == 0 ? DC_FLOAT32 : weight_types[pick(p, 7)];
  for (int t = 1; t < TYPES; t++) {
    do {
      a->types[t] = weight_types[pick(p, 7)];
    } while (a->types[t] == a->types[0] || (t == 2 && a->types[2] == a->types[1]));
  }
  a->grad_type = float_types[pick(p, 4)];
  a->buffer_type = pick(p, 2) == 0 ? DC_FLOAT32 : float_types[pick(p, 4)];
  a->expected_type = p->stage == 3 && pick(p, 3) == 0 ? float_types[pick(p, 4)] : DC_DTYPE_NONE;
  a->persistent = p->stage == 3 && pick(p, 4) == 0;
  a->shared = pick(p, 2) == 0;
  a->reloading = -1;
  own(p, a);
  a->expected = calloc((size_t)a->numel + 1, sizeof *a->expected);
  a->local = calloc((size_t)(a->numel * p->r->world) + 1, sizeof *a->local);
}

static void add_param(program *p, int64_t id) {
  param *a = &p->params[id];
  generate_param(p, a, id);
  int64_t padded = p->stage == 3 ? a->chunk : a->count;
  a->grad = ground_new((size_t)padded * dc_dtype_size(a->buffer_type));
  dc_tensor grad = flat(a->grad, &padded, a->buffer_type);
  if (p->stage < 3) {
    OK(p, dc_register_param(p->ctx, id, a->shape, a->ndim, NULL, &grad, a->begin));
    return;
  }
  size_t size = dc_dtype_size(a->types[0]);
  a->shard = ground_new((size_t)a->chunk * size); /* padding is never initialised, and must never be read */
  ground_writes(a->shard, (size_t)a->count * size, "the first weights");
  for (int64_t i = 0; i < a->count; i++) {
    double w = weight(id, 0, a->begin + i);
    ground_cast((char *)a->shard + (size_t)i * size, a->types[0], &w, DC_FLOAT64, 1);
  }
  dc_tensor shard = flat(a->shard, &a->chunk, a->types[0]);
  OK(p, dc_register_z3_param(p->ctx, id, a->shape, a->ndim, &shard, &grad, a->persistent, a->expected_type));
}

static void set_up(program *p) {
  p->stage = pick(p, 2) == 0 ? 3 : (int32_t)pick(p, 4);
  p->count = 1 + (int64_t)pick(p, PARAMS);
  for (int i = 0; i < 2; i++) {
    OK(p, dc_stream_create(p->r->device, &p->streams[i]));
  }
  set_stream(p);
  for (int64_t i = 0; i < p->count && !broken(p); i++) {
    add_param(p, i);
  }
  for (int i = 0; i < VALUES; i++) {
    int32_t dtype = weight_types[pick(p, 7)];
    void *source = ground_new(TENSOR * dc_dtype_size(dtype));
    p->values[i] = (value){.graph = i == 2 ? OTHER_GRAPH : GRAPH, /* the last has the same id as the first */
                           .id = i % 2,
                           .source = source,
                           .dtype = dtype,
                           .content = -1,
                           .host = -1,
                           .device = -1};
  }
  CHECK(p, !broken(p));
  OK(p, register_graphs(p, true, true));
  sync_caller(p); /* gradients are zeroed on the caller's stream, and read on the host */
}

/* ---- a program on a rank ---- */

typedef struct cast_of_ranks {
  const program_spec *spec;
  const setup *s;
  uint64_t state;
  int32_t contexts;
} cast_of_ranks;

/* A rank's second context. */
static void open_second(program *p, const setup *s) {
  dc_config config = s->config;
  config.struct_size = sizeof config;
  OK(p, dc_context_create(p->r->device, NULL, &p->ctx));
  OK(p, dc_init(p->ctx, p->r->comm, &config, s->bucket));
}

static void finish(program *p) {
  sync_caller(p);
  OK(p, dc_context_set_stream(p->ctx, NULL));
  p->caller = NULL;
  end_backward(p);
}

static void close(program *p) {
  (void)dc_context_set_stream(p->ctx, NULL);
  for (int i = 0; i < 2; i++) {
    dc_stream_destroy(p->streams[i]);
  }
  for (int64_t i = 0; i < p->count; i++) {
    free(p->params[i].expected);
    free(p->params[i].local);
  }
  if (p->ctx != p->r->ctx) {
    dc_context_destroy(p->ctx);
  }
}

static void run_program(rank *r) {
  const cast_of_ranks *all = r->user;
  program *programs = calloc(CONTEXTS, sizeof *programs);
  uint64_t state = all->state;
  atomic_int failed = 0;
  for (int32_t c = 0; c < all->contexts && failed == 0; c++) {
    program *p = &programs[c];
    *p = (program){.r = r, .ctx = r->ctx, .state = &state, .failed = &failed, .illegal = all->spec->illegal};
    p->group_size = r->world / (all->s->config.replicas > 1 ? all->s->config.replicas : 1);
    p->group_rank = r->rank % p->group_size;
    p->private_state = all->state + (uint64_t)r->rank * 977 + (uint64_t)c;
    if (c > 0) {
      open_second(p, all->s);
    }
    if (!broken(p)) {
      set_up(p);
    }
  }
  for (int i = 0; i < STEPS && failed == 0; i++) {
    program *p = &programs[pick(&programs[0], (uint64_t)all->contexts)];
    step(p);
    if (p->illegal && !broken(p)) {
      illegal_call(p);
    }
  }
  for (int32_t c = 0; c < all->contexts && failed == 0; c++) {
    finish(&programs[c]);
  }
  if (all->spec->illegal && failed == 0 && pick(&programs[0], 3) == 0) {
    mismatch(&programs[0]);
  }
  if (failed != 0) {
    dc_comm_abort(r->comm, r->failure);
  }
  for (int32_t c = 0; c < all->contexts; c++) {
    if (programs[c].ctx != NULL) {
      close(&programs[c]);
    }
  }
  free(programs);
}

/* The seed also decides the world, the config and the kind of communicator. */
const char *run_seed(const program_spec *spec) {
  static const int64_t buckets[] = {1, 30, 1000};
  cast_of_ranks all = {.spec = spec, .state = spec->seed * 7919};
  program draws = {.state = &all.state};
  ground g = {.seed = spec->seed};
  g.world = 1 + (int32_t)pick(&draws, pick(&draws, 16) == 0 ? RANKS : 4);
  g.no_heap = pick(&draws, 4) == 0;
  g.one_channel = pick(&draws, 5) == 0;
  g.checksums = pick(&draws, 4) == 0;
  all.contexts = g.world <= 4 && pick(&draws, 6) == 0 && !g.one_channel ? 2 : 1;
  setup s = {.world = g.world, .bucket = buckets[pick(&draws, 3)]};
  s.config.double_buffer = pick(&draws, 4) == 0 ? -1 : 0;
  s.config.symmetric_memory = !g.no_heap && pick(&draws, 3) == 0;
  s.config.sync_after_reduce = pick(&draws, 16) == 0;
  s.config.sync_before_allgather = pick(&draws, 16) == 0;
  s.config.free_activation_threshold = -1;
  if (pick(&draws, 3) == 0) {
    s.config.replicas = g.world % 2 == 0 && pick(&draws, 2) == 0 ? 2 : g.world;
  }
  all.s = &s;
  return ground_run(&g, s, run_program, &all);
}
