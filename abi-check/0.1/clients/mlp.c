/* ZeRO-3 from C: two ranks, as threads, teach a small network to read digits. Each holds half of the weights and of
 * their gradients; whole weights exist only between gather and release. Prints the loss and its bits, which are those
 * that examples/rust/mlp.rs and examples/python/mlp.py print.
 *
 *     cc -ffp-contract=off mlp.c -ldc -lpthread -o mlp && ./mlp
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dc_api.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, BATCH = 40, STEPS = 60, PIXELS = 64, HIDDEN = 16, DIGITS = 10 };
enum { ROW1 = PIXELS + 1, ROW2 = HIDDEN + 1 }; /* weights, then the bias */
enum { N1 = HIDDEN * ROW1, N2 = DIGITS * ROW2, GRAPH = 1, W1 = 10, W2 = 20 };
static const double rate = 0.0625;

static const uint64_t font[DIGITS] = {
    0x3c666e7666663c00, 0x1818381818187e00, 0x3c66060c30607e00, 0x3c66061c06663c00, 0x060e1e667f060600,
    0x7e607c0606663c00, 0x3c66607c66663c00, 0x7e660c1818181800, 0x3c66663c66663c00, 0x3c66663e06663c00,
};

#define CHECK(call)                             \
  do {                                          \
    if ((call) != DC_OK) {                      \
      fprintf(stderr, "%s\n", dc_last_error()); \
      exit(1);                                  \
    }                                           \
  } while (0)

/* A generator that is the same in every language: Knuth's MMIX, upper half. */
static uint32_t next(uint64_t *state) {
  *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(*state >> 32);
}

/* A digit drawn in 64 pixels with noise; the same number gives the same picture. */
static int picture(int number, double pixels[PIXELS]) {
  uint64_t state = (uint64_t)number + 1;
  for (int at = 0; at < PIXELS; at++) {
    uint32_t ink = font[number % DIGITS] >> (63 - at) & 1 ? 12 : 0;
    pixels[at] = (ink + (next(&state) >> 30)) / 16.0;
  }
  return number % DIGITS;
}

/* One picture's loss; adds its gradient. */
static double learn(int number, const double *w1, const double *w2, double *g1, double *g2) {
  double x[PIXELS], h[HIDDEN], dh[HIDDEN] = {0}, loss = 0;
  int digit = picture(number, x);
  for (int j = 0; j < HIDDEN; j++) {
    double sum = w1[j * ROW1 + PIXELS];
    for (int k = 0; k < PIXELS; k++)
      sum += w1[j * ROW1 + k] * x[k];
    h[j] = sum > 0 ? sum : 0;
  }
  for (int c = 0; c < DIGITS; c++) {
    double sum = w2[c * ROW2 + HIDDEN];
    for (int j = 0; j < HIDDEN; j++)
      sum += w2[c * ROW2 + j] * h[j];
    double error = sum - (c == digit ? 1 : 0), d = 2 * error / (BATCH / RANKS);
    loss += error * error;
    for (int j = 0; j < HIDDEN; j++) {
      g2[c * ROW2 + j] += d * h[j];
      dh[j] += d * w2[c * ROW2 + j];
    }
    g2[c * ROW2 + HIDDEN] += d;
  }
  for (int j = 0; j < HIDDEN; j++) {
    if (h[j] > 0) {
      for (int k = 0; k < PIXELS; k++)
        g1[j * ROW1 + k] += dh[j] * x[k];
      g1[j * ROW1 + PIXELS] += dh[j];
    }
  }
  return loss;
}

static dc_tensor flat(double *data, const int64_t *count) {
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data, t.shape = count, t.ndim = 1, t.dtype = DC_FLOAT64;
  return t;
}

/* A rank's part of a parameter: half of its weights, half of its gradient, and the gradient of its own pictures. */
typedef struct param {
  int64_t id, numel, half, shape[2];
  double shard[N1 / RANKS], grad[N1 / RANKS], whole_grad[N1];
} param;

static void set_up(dc_context *context, param *p, uint64_t *state, int rank, double scale) {
  for (int64_t at = 0; at < p->numel; at++) {
    double weight = ((double)(next(state) >> 16) - 32768) / (32768 * scale);
    if (at / p->half == rank)
      p->shard[at % p->half] = weight;
  }
  dc_tensor shard = flat(p->shard, &p->half), grad = flat(p->grad, &p->half);
  CHECK(dc_register_z3_param(context, p->id, p->shape, 2, &shard, &grad, 0, DC_DTYPE_NONE));
}

static void reduce(dc_context *context, param *p) {
  dc_tensor grad = flat(p->whole_grad, &p->numel);
  CHECK(dc_reduce_grad(context, &grad, GRAPH, p->id));
}

static dc_comm *comms[RANKS];
static double losses[STEPS];

static void *train(void *argument) {
  int rank = (int)(intptr_t)argument;
  uint64_t state = 0;
  dc_device *device;
  dc_context *context;
  CHECK(dc_device_open("cpu", NULL, &device));
  CHECK(dc_context_create(device, NULL, &context));
  CHECK(dc_init(context, comms[rank], NULL, 4096));
  param one = {W1, N1, N1 / RANKS, {HIDDEN, ROW1}, {0}, {0}, {0}};
  param two = {W2, N2, N2 / RANKS, {DIGITS, ROW2}, {0}, {0}, {0}}, *params[] = {&one, &two};
  const int64_t ids[] = {W1, W2}, scalar = 1;
  set_up(context, &one, &state, rank, 8);
  set_up(context, &two, &state, rank, 4);
  CHECK(dc_register_graph_z3(context, GRAPH, ids, 2));

  for (int step = 0; step < STEPS; step++) {
    dc_tensor full[2] = {DC_TENSOR_INIT, DC_TENSOR_INIT};
    double loss = 0;
    CHECK(dc_start_backward(context, 1));
    CHECK(dc_prefetch_params_fused(context, GRAPH, ids, NULL, 2));
    for (int p = 0; p < 2; p++) {
      CHECK(dc_allgather_param(context, NULL, GRAPH, ids[p], DC_DTYPE_NONE, &full[p]));
      CHECK(dc_wait_allgather(context, NULL, GRAPH, ids[p]));
      memset(params[p]->whole_grad, 0, sizeof params[p]->whole_grad);
    }
    for (int number = step * BATCH + rank; number < (step + 1) * BATCH; number += RANKS)
      loss += learn(number, full[0].data, full[1].data, one.whole_grad, two.whole_grad);
    for (int p = 0; p < 2; p++) {
      CHECK(dc_release_param(context, NULL, GRAPH, ids[p], 1));
      reduce(context, params[p]);
    }
    CHECK(dc_end_backward(context, GRAPH, 0)); /* grad = this rank's half of the mean over ranks */
    for (int p = 0; p < 2; p++)
      for (int64_t at = 0; at < params[p]->half; at++)
        params[p]->shard[at] -= rate * params[p]->grad[at];
    CHECK(dc_context_params_updated(context, ids, 2));
    loss /= BATCH / RANKS;
    dc_tensor mean = flat(&loss, &scalar);
    CHECK(dc_comm_all_reduce(comms[rank], &mean, DC_MEAN, NULL));
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
  for (int step = 0; step < STEPS; step++) {
    uint64_t bits;
    memcpy(&bits, &losses[step], sizeof bits);
    printf("step %2d loss %.6f %016" PRIx64 "\n", step, losses[step], bits);
  }
  return losses[STEPS - 1] < losses[0] / 2 ? 0 : 1;
}
