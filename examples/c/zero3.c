/* ZeRO-3 from C: two ranks, as threads, fit y = w·x. Each holds half of w, of its gradient, and of the data; the
 * whole w exists only between gather and release. Prints the loss, and ends with 0 if it fell.
 *
 *     cc zero3.c -ldc -lpthread -o zero3 && ./zero3
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dc_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, WEIGHTS = 7, SHARD = (WEIGHTS + RANKS - 1) / RANKS, SAMPLES = 32, STEPS = 60 };
enum { GRAPH = 1, W = 10 }; /* ids are ours to choose */

#define CHECK(call)                             \
  do {                                          \
    if ((call) != DC_OK) {                      \
      fprintf(stderr, "%s\n", dc_last_error()); \
      exit(1);                                  \
    }                                           \
  } while (0)

static dc_comm *comms[RANKS];
static double losses[STEPS];

static dc_tensor vector(float *data, const int64_t *length) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data, t.shape = length, t.ndim = 1, t.dtype = DC_FLOAT32;
  return t;
}

/* Sample i's x, the same for every caller; y follows from the weights that are to be found. */
static float sample(int i, float x[WEIGHTS]) {
  float y = 0;
  for (int k = 0; k < WEIGHTS; k++) {
    x[k] = (float)((i * 31 + k * 17 + i * k * 7) % 19) / 9.0f - 1.0f;
    y += x[k] * (float)(k - 3);
  }
  return y;
}

static double backward(int rank, const float *w, float grad[WEIGHTS]) {
  double loss = 0;
  for (int k = 0; k < WEIGHTS; k++)
    grad[k] = 0;
  for (int i = rank; i < SAMPLES; i += RANKS) {
    float x[WEIGHTS], error = -sample(i, x);
    for (int k = 0; k < WEIGHTS; k++)
      error += w[k] * x[k];
    for (int k = 0; k < WEIGHTS; k++)
      grad[k] += 2 * error * x[k] * RANKS / SAMPLES;
    loss += (double)(error * error) * RANKS / SAMPLES;
  }
  return loss;
}

static void *train(void *argument) {
  int rank = (int)(intptr_t)argument;
  dc_device *device;
  dc_context *context;
  CHECK(dc_device_open("cpu", NULL, &device));
  CHECK(dc_context_create(device, NULL, &context));
  CHECK(dc_init(context, comms[rank], NULL, 1024));

  float weights[SHARD] = {0}, gradients[SHARD], grad[WEIGHTS];
  const int64_t whole = WEIGHTS, part = SHARD, ids[] = {W};
  dc_tensor shard = vector(weights, &part), shard_grad = vector(gradients, &part), full = DC_TENSOR_INIT;
  CHECK(dc_register_z3_param(context, W, &whole, 1, &shard, &shard_grad, 0, DC_DTYPE_NONE));
  CHECK(dc_register_graph_z3(context, GRAPH, ids, 1));

  for (int step = 0; step < STEPS; step++) {
    CHECK(dc_start_backward(context, 1));
    CHECK(dc_allgather_param(context, NULL, GRAPH, W, DC_DTYPE_NONE, &full));
    CHECK(dc_wait_allgather(context, NULL, GRAPH, W));
    double loss = backward(rank, full.data, grad);
    CHECK(dc_release_param(context, NULL, GRAPH, W, 1));
    dc_tensor full_grad = vector(grad, &whole);
    CHECK(dc_reduce_grad(context, &full_grad, GRAPH, W));
    CHECK(dc_end_backward(context, GRAPH, 0)); /* gradients = this rank's part of the mean over ranks */
    for (int k = 0; k < SHARD; k++)
      weights[k] -= 0.3f * gradients[k];
    CHECK(dc_context_params_updated(context, NULL, 0));
    if (rank == 0)
      losses[step] = loss;
  }
  dc_context_destroy(context);
  dc_device_destroy(device);
  dc_comm_destroy(comms[rank]);
  return NULL;
}

int main(void) {
  pthread_t threads[RANKS];
  CHECK(dc_comm_create_threads(RANKS, NULL, comms));
  for (intptr_t r = 0; r < RANKS; r++)
    if (pthread_create(&threads[r], NULL, train, (void *)r))
      return 1;
  for (int r = 0; r < RANKS; r++)
    pthread_join(threads[r], NULL);
  printf("libdc %s: loss %.4f at first, %.6f after %d steps\n", dc_version_string(), losses[0], losses[STEPS - 1],
         STEPS);
  return losses[STEPS - 1] < 1e-3 * losses[0] ? 0 : 1;
}
