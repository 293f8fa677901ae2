/* A trainer's schedule of calls, which is the same for ranks that compute and for a rank that counts. */
#ifndef TESTS_SCHEDULE_H
#define TESTS_SCHEDULE_H

#include "harness.h"
#include "sanitized.h"

enum { SCHEDULE_LAYERS = 4, SCHEDULE_PARAMS = 3, SCHEDULE_STEPS = 2, SCHEDULE_MICRO_BATCHES = 2, SCHEDULE_RANKS = 8 };

typedef struct schedule {
  int32_t stage;
  int32_t replicas; /* number of groups of ranks that each hold all parameters */
  int32_t offload;  /* stage 3 only. 1: of activations; 2: shards are reloaded from host memory too */
  int32_t dtype;    /* type of gathered weights and of gradients */
  bool prefetch;
} schedule;

/* A rank's statistics after each step. */
typedef struct schedule_result {
  dc_memory_stats steps[SCHEDULE_STEPS];
} schedule_result;

typedef struct schedule_job {
  schedule s;
  schedule_result results[SCHEDULE_RANKS];
} schedule_job;

/* A large matrix, a vector that divides evenly among few ranks, and a vector with fewer elements than ranks. */
#ifdef SANITIZED
static const int64_t schedule_sizes[SCHEDULE_PARAMS] = {90007, 1500, 3};
#else
static const int64_t schedule_sizes[SCHEDULE_PARAMS] = {900007, 1500, 3};
#endif

typedef struct schedule_param {
  int64_t numel;
  float *weights, *grad, *full_grad;
} schedule_param;

static inline dc_status schedule_register(rank *r, const schedule *s, int64_t id, schedule_param *p) {
  const int32_t group = r->world / s->replicas;
  int64_t offset = 0, own = p->numel;
  if (s->stage > 0 && dc_shard_range(p->numel, r->rank % group, group, &offset, &own) != DC_OK) {
    return DC_E_INVALID;
  }
  int64_t padded = ceil_div(p->numel, group);
  p->weights = calloc((size_t)p->numel, sizeof(float));
  p->grad = calloc((size_t)p->numel, sizeof(float));
  p->full_grad = calloc((size_t)p->numel, sizeof(float)); /* all bits zero, which is 0 in every type */
  dc_tensor weights = flat(p->weights, s->stage == 3 ? &padded : &p->numel, DC_FLOAT32);
  dc_tensor grad = flat(p->grad, s->stage == 3 ? &padded : &own, DC_FLOAT32);
  return s->stage == 3 ? dc_register_z3_param(r->ctx, id, &p->numel, 1, &weights, &grad, 0, DC_DTYPE_NONE)
                       : dc_register_param(r->ctx, id, &p->numel, 1, &weights, &grad, offset);
}

static inline dc_status schedule_gather(rank *r, const schedule *s, int layer, int next) {
  int64_t ids[SCHEDULE_PARAMS];
  int32_t dtypes[SCHEDULE_PARAMS];
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = DC_OK;
  for (int i = 0; i < SCHEDULE_PARAMS && s->stage == 3; i++) {
    ids[i] = next * SCHEDULE_PARAMS + i;
    dtypes[i] = s->dtype;
    int64_t id = (int64_t)layer * SCHEDULE_PARAMS + i;
    status = status != DC_OK ? status : s->offload == 2 ? dc_reload_parameter(r->ctx, NULL, 1, id) : DC_OK;
    status = status != DC_OK ? status : dc_allgather_param(r->ctx, NULL, 1, id, s->dtype, &full);
    status = status != DC_OK ? status : dc_wait_allgather(r->ctx, NULL, 1, id);
  }
  bool prefetches = s->stage == 3 && s->prefetch && next >= 0 && next < SCHEDULE_LAYERS;
  return status != DC_OK || !prefetches ? status : dc_prefetch_params_fused(r->ctx, 1, ids, dtypes, SCHEDULE_PARAMS);
}

static inline dc_status schedule_release(rank *r, const schedule *s, int layer) {
  dc_status status = DC_OK;
  for (int i = 0; i < SCHEDULE_PARAMS && s->stage == 3; i++) {
    int64_t id = (int64_t)layer * SCHEDULE_PARAMS + i;
    status = status != DC_OK ? status : dc_release_param(r->ctx, NULL, 1, id, 1);
    status = status != DC_OK || s->offload != 2 ? status : dc_offload_parameter(r->ctx, NULL, 1, id);
  }
  return status;
}

static inline void schedule_micro_batch(rank *r, const schedule *s, schedule_param *params, int32_t update) {
  static float activation[70001];
  const int64_t activation_numel = 70001;
  dc_tensor kept = flat(activation, &activation_numel, DC_FLOAT32), out = DC_TENSOR_INIT;
  OK(r, dc_start_forward(r->ctx));
  for (int layer = 0; layer < SCHEDULE_LAYERS; layer++) {
    OK(r, schedule_gather(r, s, layer, layer + 1));
    OK(r, s->offload > 0 ? dc_offload_tensor(r->ctx, &kept, 1, layer, &out) : DC_OK);
    OK(r, s->offload > 0 ? dc_wait_offload(r->ctx, NULL, 1, layer, &out) : DC_OK);
    OK(r, schedule_release(r, s, layer));
  }
  OK(r, dc_end_forward(r->ctx));
  OK(r, dc_start_backward(r->ctx, update));
  for (int layer = SCHEDULE_LAYERS - 1; layer >= 0; layer--) {
    OK(r, schedule_gather(r, s, layer, layer - 1));
    OK(r, s->offload > 0 ? dc_reload_tensor(r->ctx, NULL, 1, layer, &out) : DC_OK);
    OK(r, s->offload > 0 ? dc_wait_reload(r->ctx, NULL, 1, layer, &out) : DC_OK);
    for (int i = 0; i < SCHEDULE_PARAMS; i++) {
      const schedule_param *p = &params[layer * SCHEDULE_PARAMS + i];
      dc_tensor grad = flat(p->full_grad, &p->numel, s->dtype);
      OK(r, dc_reduce_grad(r->ctx, &grad, 1, layer * SCHEDULE_PARAMS + i));
    }
    OK(r, schedule_release(r, s, layer));
  }
  OK(r, dc_end_backward(r->ctx, 1, update));
}

/* The body of a rank, whose r->user is a schedule_job. */
static inline void schedule_run(rank *r) {
  schedule_job *job = (schedule_job *)(uintptr_t)r->user;
  enum { PARAMS = SCHEDULE_LAYERS * SCHEDULE_PARAMS };
  schedule_param params[PARAMS] = {{0}};
  int64_t ids[PARAMS];
  dc_status (*const registers[])(dc_context *, int64_t, const int64_t *, int64_t) = {
      dc_register_graph_z0, dc_register_graph_z1, dc_register_graph_z2, dc_register_graph_z3};
  for (int i = 0; i < PARAMS; i++) {
    params[i].numel = schedule_sizes[i % SCHEDULE_PARAMS];
    ids[i] = i;
    OK(r, schedule_register(r, &job->s, i, &params[i]));
  }
  OK(r, registers[job->s.stage](r->ctx, 1, ids, PARAMS));
  for (int step = 0; step < SCHEDULE_STEPS; step++) {
    for (int micro = 0; micro < SCHEDULE_MICRO_BATCHES && r->failure[0] == '\0'; micro++) {
      schedule_micro_batch(r, &job->s, params, micro == SCHEDULE_MICRO_BATCHES - 1);
    }
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
    dc_memory_stats *stats = &job->results[r->rank].steps[step];
    *stats = (dc_memory_stats)DC_MEMORY_STATS_INIT;
    OK(r, dc_context_get_memory_stats(r->ctx, stats));
  }
  OK(r, dc_cleanup(r->ctx)); /* before the memory of its parameters is freed */
  for (int i = 0; i < PARAMS; i++) {
    free(params[i].weights);
    free(params[i].grad);
    free(params[i].full_grad);
  }
}

#endif
