/* A small ZeRO-3 training on any communicator; tests compare its losses' bits between transports. */
#ifndef DC_TESTS_COMM_TRAINER_H
#define DC_TESTS_COMM_TRAINER_H

#include "comm_data.h"

enum { TRAINER_STEPS = 12, TRAINER_INPUTS = 37, TRAINER_OUTPUTS = 5, TRAINER_ROWS = 3, TRAINER_BYTES = 4096 };
enum { TRAINER_WEIGHTS = TRAINER_INPUTS * TRAINER_OUTPUTS, TRAINER_ID = 7, TRAINER_GRAPH = 1 };

/* Returns the squared error of y = W x on the rank's own rows, and adds its gradient. */
static inline float trainer_loss(const float *w, float *grad, int32_t rank, int step) {
  float loss = 0;
  for (int row = 0; row < TRAINER_ROWS; row++) {
    for (int o = 0; o < TRAINER_OUTPUTS; o++) {
      float sum = 0;
      for (int i = 0; i < TRAINER_INPUTS; i++) {
        sum += w[o * TRAINER_INPUTS + i] * sample(rank, step * 1000 + row * 100 + i) / 30.0f;
      }
      float error = sum - sample(rank, row + o);
      loss += error * error;
      for (int i = 0; i < TRAINER_INPUTS; i++) {
        grad[o * TRAINER_INPUTS + i] += error * sample(rank, step * 1000 + row * 100 + i) / 900.0f;
      }
    }
  }
  return loss;
}

static inline int trainer_step(dc_context *context, dc_comm *comm, int step, float *shard, float *shard_grad,
                               int64_t count, uint64_t *hash) {
  const int64_t id = TRAINER_ID, whole = TRAINER_WEIGHTS, one = 1;
  float grad[TRAINER_WEIGHTS] = {0};
  dc_tensor full = DC_TENSOR_INIT;
  CHECK_OK(dc_start_backward(context, 1));
  CHECK_OK(dc_allgather_param(context, NULL, TRAINER_GRAPH, id, DC_DTYPE_NONE, &full));
  CHECK_OK(dc_wait_allgather(context, NULL, TRAINER_GRAPH, id));
  float loss = trainer_loss(full.data, grad, dc_comm_rank(comm), step);
  CHECK_OK(dc_release_param(context, NULL, TRAINER_GRAPH, id, 1));
  const dc_tensor from = flat(grad, &whole, DC_FLOAT32);
  CHECK_OK(dc_reduce_grad(context, &from, TRAINER_GRAPH, id));
  CHECK_OK(dc_end_backward(context, TRAINER_GRAPH, 0));
  for (int64_t i = 0; i < count; i++) {
    shard[i] -= 0.01f * shard_grad[i];
  }
  CHECK_OK(dc_context_params_updated(context, &id, 1));
  dc_tensor mean = flat(&loss, &one, DC_FLOAT32);
  CHECK_OK(dc_comm_all_reduce(comm, &mean, DC_MEAN, NULL));
  uint32_t bits;
  memcpy(&bits, &loss, sizeof bits);
  *hash = (*hash ^ bits) * UINT64_C(1099511628211);
  return 0;
}

/* arg: uint64_t[], to which each rank writes the hash of its losses' bits. */
static inline int train_and_hash(dc_comm *comm, void *arg) {
  int32_t rank = dc_comm_rank(comm), world = dc_comm_size(comm);
  uint64_t *hashes = arg, hash = UINT64_C(14695981039346656037);
  int64_t per = (TRAINER_WEIGHTS + world - 1) / world, begin = rank * per;
  int64_t count = begin >= TRAINER_WEIGHTS ? 0 : TRAINER_WEIGHTS - begin < per ? TRAINER_WEIGHTS - begin : per;
  const int64_t shape[2] = {TRAINER_OUTPUTS, TRAINER_INPUTS}, id = TRAINER_ID;
  float shard[TRAINER_WEIGHTS], shard_grad[TRAINER_WEIGHTS] = {0};
  dc_device *device = NULL;
  dc_context *context = NULL;
  for (int64_t i = 0; i < count; i++) {
    shard[i] = sample(100, begin + i) / 300.0f;
  }
  CHECK_OK(dc_device_open("cpu", NULL, &device));
  CHECK_OK(dc_context_create(device, NULL, &context));
  CHECK_OK(dc_init(context, comm, NULL, TRAINER_BYTES));
  const dc_tensor weights = flat(shard, &count, DC_FLOAT32);
  dc_tensor grad = flat(shard_grad, &count, DC_FLOAT32);
  CHECK_OK(dc_register_z3_param(context, id, shape, 2, &weights, &grad, 0, DC_DTYPE_NONE));
  CHECK_OK(dc_register_graph_z3(context, TRAINER_GRAPH, &id, 1));
  for (int step = 0; step < TRAINER_STEPS; step++) {
    CHECK(trainer_step(context, comm, step, shard, shard_grad, count, &hash) == 0);
  }
  dc_context_destroy(context);
  dc_device_destroy(device);
  hashes[rank] = hash;
  return 0;
}

#endif
