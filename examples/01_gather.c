/* Two ranks, as threads, gather a parameter of which each has half.
 *
 *     cc 01_gather.c $(pkg-config --cflags --libs dc) -pthread && ./a.out
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dc_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, WEIGHTS = 6, SHARD = WEIGHTS / RANKS, GRAPH = 1, PARAM = 7 }; /* ids are ours to choose */

static void check(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "%s: %s\n", dc_status_name(status), dc_last_error());
    exit(1);
  }
}

static void *rank(void *argument) {
  dc_comm *comm = argument;
  dc_device *device;
  dc_context *context;
  check(dc_device_open("cpu", NULL, &device));
  check(dc_context_create(device, NULL, &context));
  check(dc_init(context, comm, NULL, 1024));

  float weights[SHARD];
  for (int i = 0; i < SHARD; i++)
    weights[i] = (float)(dc_comm_rank(comm) * SHARD + i);
  const int64_t whole = WEIGHTS, part = SHARD, id = PARAM;
  dc_tensor shard = DC_TENSOR_INIT, full = DC_TENSOR_INIT;
  shard.data = weights, shard.shape = &part, shard.ndim = 1, shard.dtype = DC_FLOAT32;
  check(dc_register_z3_param(context, PARAM, &whole, 1, &shard, NULL, 0, DC_DTYPE_NONE));
  check(dc_register_graph_z3(context, GRAPH, &id, 1));

  check(dc_allgather_param(context, NULL, GRAPH, PARAM, DC_DTYPE_NONE, &full));
  check(dc_wait_allgather(context, NULL, GRAPH, PARAM));
  const float *w = full.data; /* all six, until the release */
  printf("rank %d of %d: %g %g %g %g %g %g\n", dc_comm_rank(comm), dc_comm_size(comm), w[0], w[1], w[2], w[3], w[4],
         w[5]);
  check(dc_release_param(context, NULL, GRAPH, PARAM, 1));

  dc_context_destroy(context);
  dc_device_destroy(device);
  dc_comm_destroy(comm);
  return NULL;
}

int main(void) {
  dc_comm *comms[RANKS];
  pthread_t threads[RANKS];
  check(dc_comm_create_threads(RANKS, NULL, comms));
  for (int r = 0; r < RANKS; r++)
    pthread_create(&threads[r], NULL, rank, comms[r]);
  for (int r = 0; r < RANKS; r++)
    pthread_join(threads[r], NULL);
  return 0;
}
