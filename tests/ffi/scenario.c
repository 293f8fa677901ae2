/* The scenario that runs in every language. One rank of two processes takes a step of ZeRO-3, and gets a log line
 * through a callback and an error with its text. The source is both C and C++. Usage: scenario RANK NAME. */
#include <dc_api.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, WEIGHTS = 5, SHARD = 3, GRAPH = 1, ID = 7 };

static void check(dc_status status) {
  if (status != DC_OK) {
    printf("%s: %s\n", dc_status_name(status), dc_last_error());
    exit(1);
  }
}

static void print(const char *name, const float *values, int count) {
  printf("%s", name);
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    printf(" %08" PRIx32, bits);
  }
  printf("\n");
}

static void log_line(int32_t level, const char *message, void *user) {
  printf("log %s %" PRId32 " %s\n", (const char *)user, level, message);
}

static dc_tensor flat(float *data, const int64_t *length) {
  dc_tensor tensor;
  dc_tensor_init(&tensor, sizeof tensor);
  tensor.data = data;
  tensor.shape = length;
  tensor.ndim = 1;
  tensor.dtype = DC_FLOAT32;
  return tensor;
}

static void step(dc_context *context, int rank) {
  const int64_t whole = WEIGHTS, part = SHARD, id = ID;
  float weights[SHARD], gradient[SHARD], own[WEIGHTS];
  for (int i = 0; i < SHARD; i++) {
    weights[i] = (float)(rank * SHARD + i) * 0.5f - 1.0f; /* elements past the end are padding */
  }
  dc_tensor shard = flat(weights, &part), grad = flat(gradient, &part), full = flat(NULL, NULL);
  check(dc_register_z3_param(context, ID, &whole, 1, &shard, &grad, 0, DC_DTYPE_NONE));
  check(dc_register_graph_z3(context, GRAPH, &id, 1));

  check(dc_start_forward(context));
  check(dc_allgather_param(context, NULL, GRAPH, ID, DC_DTYPE_NONE, &full));
  check(dc_wait_allgather(context, NULL, GRAPH, ID));
  print("full", (const float *)full.data, WEIGHTS);
  for (int i = 0; i < WEIGHTS; i++) {
    own[i] = ((const float *)full.data)[i] * (float)(rank + 1);
  }
  check(dc_release_param(context, NULL, GRAPH, ID, 2));
  check(dc_end_forward(context)); /* logs that one of two users has not released it */
  check(dc_release_param(context, NULL, GRAPH, ID, 2));

  check(dc_start_backward(context, 1));
  dc_tensor own_grad = flat(own, &whole);
  check(dc_reduce_grad(context, &own_grad, GRAPH, ID));
  check(dc_end_backward(context, GRAPH, 0));
  print("grad", gradient, SHARD);
  for (int i = 0; i < SHARD; i++) {
    weights[i] -= 0.5f * gradient[i];
  }
  check(dc_context_params_updated(context, &id, 1));
  check(dc_allgather_param(context, NULL, GRAPH, ID, DC_DTYPE_NONE, &full));
  check(dc_wait_allgather(context, NULL, GRAPH, ID));
  print("full", (const float *)full.data, WEIGHTS);
  check(dc_release_param(context, NULL, GRAPH, ID, 1));

  dc_status status = dc_allgather_param(context, NULL, GRAPH, 99, DC_DTYPE_NONE, &full);
  printf("error %" PRId32 " %s %s\n", status, dc_status_name(status), dc_last_error());
  dc_memory_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  check(dc_context_get_memory_stats(context, &stats));
  printf("stats %" PRId64 " %" PRId64 " %" PRId64 "\n", stats.gathers, stats.reductions, stats.registered_params);
}

int main(int argc, char **argv) {
  if (argc != 3) {
    return 2;
  }
  int rank = atoi(argv[1]);
  char user[] = "mine";
  dc_comm *comm;
  dc_device *device;
  dc_context *context;
  dc_context_options options;
  printf("libdc %s %" PRIu32 "\n", dc_version_string(), dc_api_version());
  check(dc_comm_create_processes(argv[2], rank, RANKS, NULL, &comm));
  check(dc_device_open("cpu", NULL, &device));
  dc_context_options_init(&options, sizeof options);
  options.log = log_line;
  options.log_user = user;
  check(dc_context_create(device, &options, &context));
  check(dc_init(context, comm, NULL, 64));
  step(context, rank);
  dc_context_destroy(context);
  dc_device_destroy(device);
  dc_comm_destroy(comm);
  printf("done\n");
  return 0;
}
