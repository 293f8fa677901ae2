/* A training at any stage with any number of replicas, which has the bits of plain ZeRO on as many ranks. Gradients are
 * added over micro-batches, also 16-bit ones, and are larger than a bucket. */
#ifndef DC_TESTS_REPLICA_TRAINER_H
#define DC_TESTS_REPLICA_TRAINER_H

#include "comm_data.h"

enum { PARAMS = 4, STEPS = 3, BUCKET = 4096, LARGEST = 70001 };

static const int64_t numels[PARAMS] = {185, 7, LARGEST, 1};
static const int32_t grad_types[PARAMS] = {DC_FLOAT32, DC_BFLOAT16, DC_FLOAT32, DC_FLOAT64};

typedef struct setting {
  int32_t stage, replicas;
  uint64_t *hashes; /* one for each rank */
  int64_t *wire;    /* bytes of reductions, one for each rank; NULL: not wanted */
} setting;

typedef struct trainer {
  const setting *s;
  dc_comm *comm, *group; /* comm: all ranks; group: those that share the parameters */
  dc_device *device;
  dc_context *context;
  float *whole[PARAMS]; /* the weights, whole on all ranks */
  float *own[PARAMS];   /* this rank's part */
  float *grad[PARAMS];  /* gradient of the rank's part; stage 0: the whole one */
  int64_t offsets[PARAMS], counts[PARAMS];
} trainer;

static inline int open_trainer(trainer *t) {
  const int32_t replicas = t->s->replicas, size = dc_comm_size(t->comm) / replicas;
  dc_config config = {.struct_size = sizeof config, .replicas = replicas, .check_finite = 1};
  CHECK_OK(dc_comm_split(t->comm, dc_comm_rank(t->comm) / size, 0, &t->group));
  CHECK_OK(dc_device_open("cpu", NULL, &t->device));
  CHECK_OK(dc_context_create(t->device, NULL, &t->context));
  CHECK_OK(dc_init(t->context, t->comm, &config, BUCKET));
  for (int64_t i = 0; i < PARAMS; i++) {
    CHECK_OK(dc_shard_range(numels[i], dc_comm_rank(t->group), size, &t->offsets[i], &t->counts[i]));
    t->whole[i] = make(DC_FLOAT32, 50 + (int32_t)i, numels[i]);
    t->own[i] = malloc((size_t)numels[i] * sizeof(float));
    t->grad[i] = calloc((size_t)numels[i], sizeof(float));
    memcpy(t->own[i], t->whole[i] + t->offsets[i], (size_t)t->counts[i] * sizeof(float));
    const bool sharded = t->s->stage == 3;
    const dc_tensor weights = flat(sharded ? t->own[i] : t->whole[i], sharded ? &t->counts[i] : &numels[i], DC_FLOAT32);
    dc_tensor grad = flat(t->grad[i], t->s->stage == 0 ? &numels[i] : &t->counts[i], DC_FLOAT32);
    CHECK_OK(sharded ? dc_register_z3_param(t->context, i, &numels[i], 1, &weights, &grad, 0, DC_DTYPE_NONE)
                     : dc_register_param(t->context, i, &numels[i], 1, &weights, &grad,
                                         t->s->stage == 0 ? 0 : t->offsets[i]));
  }
  const int64_t ids[PARAMS] = {0, 1, 2, 3};
  CHECK_OK(t->s->stage == 0   ? dc_register_graph_z0(t->context, 1, ids, PARAMS)
           : t->s->stage == 1 ? dc_register_graph_z1(t->context, 1, ids, PARAMS)
           : t->s->stage == 2 ? dc_register_graph_z2(t->context, 1, ids, PARAMS)
                              : dc_register_graph_z3(t->context, 1, ids, PARAMS));
  return 0;
}

static inline void close_trainer(trainer *t) {
  dc_context_destroy(t->context);
  dc_device_destroy(t->device);
  dc_comm_destroy(t->group);
  for (int i = 0; i < PARAMS; i++) {
    free(t->whole[i]);
    free(t->own[i]);
    free(t->grad[i]);
  }
}

/* A gradient that depends on weights, rank and step. */
static inline int reduce_param(const trainer *t, int64_t i, const float *weights, int step, int micro) {
  float *values = make(DC_FLOAT32, dc_comm_rank(t->comm) * 7 + step * 3 + micro, numels[i]);
  void *grad = malloc((size_t)numels[i] * 8);
  for (int64_t k = 0; k < numels[i]; k++) {
    values[k] = values[k] / 90.0f + weights[k] * 0.01f;
  }
  dc__cast(grad, grad_types[i], values, DC_FLOAT32, numels[i]);
  const dc_tensor tensor = flat(grad, &numels[i], grad_types[i]);
  CHECK_OK(dc_reduce_grad(t->context, &tensor, 1, i));
  free(grad);
  free(values);
  return 0;
}

static inline int run_backward(trainer *t, int step, int micro, bool update) {
  CHECK_OK(dc_start_backward(t->context, update));
  for (int64_t i = PARAMS - 1; i >= 0; i--) {
    const float *weights = t->whole[i];
    if (t->s->stage == 3) {
      dc_tensor full = DC_TENSOR_INIT;
      CHECK_OK(dc_allgather_param(t->context, NULL, 1, i, DC_DTYPE_NONE, &full));
      CHECK_OK(dc_wait_allgather(t->context, NULL, 1, i));
      weights = full.data;
      CHECK(memcmp(weights, t->whole[i], (size_t)numels[i] * sizeof(float)) == 0);
    }
    CHECK(reduce_param(t, i, weights, step, micro) == 0);
    if (t->s->stage == 3) {
      CHECK_OK(dc_release_param(t->context, NULL, 1, i, 1));
    }
  }
  CHECK_OK(dc_end_backward(t->context, 1, 0));
  return 0;
}

/* Each rank updates its part, and the group's ranks exchange the parts. */
static inline int update_weights(trainer *t) {
  for (int64_t i = 0; i < PARAMS; i++) {
    const float *grad = t->grad[i] + (t->s->stage == 0 ? t->offsets[i] : 0);
    int64_t counts[DC__COMM_MAX_WORLD];
    for (int32_t r = 0; r < dc_comm_size(t->group); r++) {
      int64_t offset;
      CHECK_OK(dc_shard_range(numels[i], r, dc_comm_size(t->group), &offset, &counts[r]));
    }
    for (int64_t k = 0; k < t->counts[i]; k++) {
      t->own[i][k] -= 0.1f * grad[k];
    }
    const dc_tensor part = flat(t->own[i], &t->counts[i], DC_FLOAT32);
    dc_tensor whole = flat(t->whole[i], &numels[i], DC_FLOAT32);
    CHECK_OK(dc_comm_all_gather(t->group, &part, &whole, counts, NULL));
  }
  CHECK_OK(dc_context_params_updated(t->context, NULL, 0));
  return 0;
}

static inline int run_steps(trainer *t) {
  int32_t finite = 0;
  for (int step = 0; step < STEPS; step++) {
    CHECK(run_backward(t, step, 0, step == 2) == 0); /* the last step has one micro-batch */
    CHECK(step == 2 || run_backward(t, step, 1, true) == 0);
    CHECK_OK(dc_context_grads_finite(t->context, &finite, NULL));
    CHECK(finite == 1 && update_weights(t) == 0);
  }
  return 0;
}

static inline int train(dc_comm *comm, void *arg) {
  trainer t = {.s = arg, .comm = comm};
  uint64_t hash = UINT64_C(14695981039346656037);
  dc_memory_stats stats = {.struct_size = sizeof stats};
  CHECK(open_trainer(&t) == 0 && run_steps(&t) == 0);
  CHECK_OK(dc_context_get_memory_stats(t.context, &stats));
  for (int i = 0; i < PARAMS; i++) {
    const unsigned char *bytes = (const unsigned char *)t.whole[i];
    for (size_t k = 0; k < (size_t)numels[i] * sizeof(float); k++) {
      hash = (hash ^ bytes[k]) * UINT64_C(1099511628211);
    }
  }
  t.s->hashes[dc_comm_rank(comm)] = hash;
  if (t.s->wire != NULL) {
    t.s->wire[dc_comm_rank(comm)] = stats.reduce_wire_bytes;
  }
  close_trainer(&t);
  return 0;
}

#endif
