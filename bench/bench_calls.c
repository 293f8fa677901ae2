/* The cost of operators on the thread that calls them. Calls are the gather of a parameter that is there, its wait and
 * its release, and a call that fails. Another is a gather that communicates, with its wait and its release, on a stream
 * that is not waited for while the clock runs. By the public interface, in one thread, with one rank.
 *
 *   bench_calls [--json] [--device NAME] [--nccl]      median nanoseconds */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checked.h"

enum { CALLS = 20000, ROUNDS = 31, BURST = 16, ELEMENTS = 1024, KEPT = 7, MOVED = 8, GRAPH = 3 };

typedef struct setting {
  dc_context *context;
  dc_stream *stream;
} setting;

typedef dc_status (*operation)(const setting *s);

static dc_status gather_one(const setting *s, int64_t id) {
  dc_tensor out = DC_TENSOR_INIT;
  return dc_allgather_param(s->context, NULL, GRAPH, id, DC_DTYPE_NONE, &out);
}

static dc_status gather(const setting *s) {
  return gather_one(s, KEPT);
}

static dc_status wait(const setting *s) {
  return dc_wait_allgather(s->context, NULL, GRAPH, KEPT);
}

static dc_status release(const setting *s) {
  return dc_release_param(s->context, NULL, GRAPH, KEPT, 1);
}

static dc_status refused(const setting *s) {
  return dc_wait_allgather(s->context, NULL, GRAPH, MOVED + 1) == DC_E_NOT_FOUND ? DC_OK : DC_E_INTERNAL;
}

static dc_status move(const setting *s) {
  dc_status status = gather_one(s, MOVED);
  status = status != DC_OK ? status : dc_wait_allgather(s->context, NULL, GRAPH, MOVED);
  return status != DC_OK ? status : dc_release_param(s->context, NULL, GRAPH, MOVED, 1);
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

static double now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static double burst_ns(const setting *s, operation call, int count, const char *what) {
  const double begin = now_ns();
  for (int i = 0; i < count; i++) {
    check(call(s), what);
  }
  return now_ns() - begin;
}

/* In bursts that no queue is full of, with waits for the stream between, which do not count; 0: all at once. */
static double median_ns(const setting *s, operation call, int burst, const char *what) {
  double rounds[ROUNDS];
  for (int r = 0; r < ROUNDS; r++) {
    const int calls = burst == 0 ? CALLS : CALLS / 10 / burst * burst;
    rounds[r] = 0;
    for (int done = 0; done < calls; done += burst == 0 ? calls : burst) {
      rounds[r] += burst_ns(s, call, burst == 0 ? calls : burst, what) / calls;
      check(burst == 0 ? DC_OK : dc_stream_synchronize(s->stream, 0), "stream");
    }
  }
  qsort(rounds, ROUNDS, sizeof rounds[0], by_value);
  return rounds[ROUNDS / 2];
}

static void add_parameter(dc_context *context, int64_t id, int32_t persistent) {
  static const int64_t shape[1] = {ELEMENTS};
  dc_buffer *shard; /* until the process ends */
  check(dc_context_alloc(context, (int64_t)(ELEMENTS * sizeof(float)), DC_MEMORY_DEVICE, &shard), "memory");
  dc_tensor view = {
      .struct_size = sizeof view, .data = dc_buffer_data(shard), .shape = shape, .ndim = 1, .dtype = DC_FLOAT32};
  check(dc_register_z3_param(context, id, shape, 1, &view, NULL, persistent, DC_DTYPE_NONE), "parameter");
}

/* One rank, a persistent parameter, gathered, and one that is not. */
static setting set_up(const char *name, bool nccl) {
  static const int64_t ids[2] = {KEPT, MOVED};
  setting s;
  dc_device *device;
  dc_comm *base = NULL, *comm = NULL;
  check(dc_device_open(name, NULL, &device), "device");
  if (nccl) {
    check(dc_comm_create_threads(1, NULL, &base), "threads");
    check(dc_comm_create_nccl(base, device, &comm), "NCCL");
  }
  check(dc_context_create(device, NULL, &s.context), "context");
  check(dc_stream_create(device, &s.stream), "stream");
  check(dc_init(s.context, comm, NULL, 1 << 20), "init");
  check(dc_context_set_stream(s.context, s.stream), "stream");
  add_parameter(s.context, KEPT, 1);
  add_parameter(s.context, MOVED, 0);
  check(dc_register_graph_z3(s.context, GRAPH, ids, 2), "graph");
  check(gather(&s), "gather");
  check(wait(&s), "wait");
  check(dc_stream_synchronize(s.stream, 0), "stream");
  dc_comm_destroy(comm);
  dc_comm_destroy(base);
  dc_device_destroy(device);
  return s;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    operation call;
    int burst;
  } rows[] = {{"allgather_param, gathered already", gather, 0},
              {"wait_allgather, done already", wait, 0},
              {"release_param, persistent", release, 0},
              {"wait_allgather, refused", refused, 0},
              {"gather, wait and release", move, BURST}};
  const char *device = "cpu";
  bool json = false, nccl = false;
  for (int i = 1; i < argc; i++) {
    json = json || strcmp(argv[i], "--json") == 0;
    nccl = nccl || strcmp(argv[i], "--nccl") == 0;
    if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
      device = argv[++i];
    }
  }
  const setting s = set_up(device, nccl);
  printf(json ? "{" : "%-36s %s\n", "call", "ns");
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    double ns = median_ns(&s, rows[i].call, rows[i].burst, rows[i].name);
    if (json) {
      printf("%s\"%s\": %.1f", i == 0 ? "" : ", ", rows[i].name, ns);
    } else {
      printf("%-36s %.1f\n", rows[i].name, ns);
    }
  }
  printf(json ? "}\n" : "");
  dc_context_destroy(s.context);
  dc_stream_destroy(s.stream);
  return 0;
}
