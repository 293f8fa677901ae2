/* Threads of one process as ranks on several machines, told apart by options.node, for the tests of two levels. */
#ifndef DC_TESTS_LEVELS_NODES_H
#define DC_TESTS_LEVELS_NODES_H

#include "comm_ranks.h"

#include "comm/levels/levels.h"

typedef struct layout {
  int32_t world, per_node; /* per_node 0: all ranks on this machine; negative: round-robin over -per_node machines */
  int32_t length;          /* number of ranks in a block; 1: no blocks */
} layout;

typedef struct node_job {
  const layout *layout;
  const char *name, *address;
  int32_t rank;
  rank_fn fn;
  void *arg;
  int result;
} node_job;

static inline void *run_on_node(void *arg) {
  node_job *job = arg;
  const layout *l = job->layout;
  char node[32];
  dc_comm *comm = NULL;
  snprintf(node, sizeof node, "node %d",
           l->per_node < 0 ? job->rank % -l->per_node : job->rank / (l->per_node + !l->per_node));
  const dc_comm_options options = {
      .struct_size = sizeof options, .timeout_ns = 60000 * MS, .node = l->per_node == 0 ? NULL : node};
  job->result = 1;
  if (dc_comm_create_tcp(job->address, job->name, job->rank, l->world, &options, &comm) == DC_OK) {
    job->result = job->fn(comm, job->arg);
    dc_comm_destroy(comm);
  } else {
    fprintf(stderr, "rank %d: %s\n", job->rank, dc_last_error());
  }
  return NULL;
}

static inline int on_nodes(const layout *l, rank_fn fn, void *arg) {
  char name[64], address[64];
  pthread_t threads[16];
  node_job jobs[16];
  int result = 0;
  fresh_name(name);
  fresh_address(address);
  for (int32_t r = 0; r < l->world; r++) {
    jobs[r] = (node_job){l, name, address, r, fn, arg, 0};
    pthread_create(&threads[r], NULL, run_on_node, &jobs[r]);
  }
  for (int32_t r = 0; r < l->world; r++) {
    pthread_join(threads[r], NULL);
    result += jobs[r].result;
  }
  return result;
}

static inline int32_t length_of(dc_comm *comm) {
  return strcmp(comm->ops->name, "two levels") == 0 ? ((const dc__levels *)comm)->length : 1;
}

#endif
