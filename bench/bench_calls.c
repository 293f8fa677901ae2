/* What a call of an operator costs that starts no communication: the gather of a parameter that is there, its wait and
 * its release, and a call that fails. By the public interface, in one thread.
 *
 *   bench_calls [--json]      median nanoseconds a call */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dc_api.h"

enum { CALLS = 20000, ROUNDS = 31, ELEMENTS = 1024, ID = 7, GRAPH = 3 };

typedef dc_status (*operation)(dc_context *context);

static dc_status gather(dc_context *context) {
  dc_tensor out = DC_TENSOR_INIT;
  return dc_allgather_param(context, NULL, GRAPH, ID, DC_DTYPE_NONE, &out);
}

static dc_status wait(dc_context *context) {
  return dc_wait_allgather(context, NULL, GRAPH, ID);
}

static dc_status release(dc_context *context) {
  return dc_release_param(context, NULL, GRAPH, ID, 1);
}

static dc_status refused(dc_context *context) {
  return dc_wait_allgather(context, NULL, GRAPH, ID + 1) == DC_E_NOT_FOUND ? DC_OK : DC_E_INTERNAL;
}

static void check(dc_status status, const char *what) {
  if (status != DC_OK) {
    fprintf(stderr, "%s: %s\n", what, dc_last_error());
    exit(1);
  }
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median_ns(dc_context *context, operation call, const char *what) {
  double rounds[ROUNDS];
  for (int r = 0; r < ROUNDS; ++r) {
    struct timespec begin;
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < CALLS; ++i) {
      check(call(context), what);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    rounds[r] = ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / CALLS;
  }
  qsort(rounds, ROUNDS, sizeof rounds[0], by_value);
  return rounds[ROUNDS / 2];
}

/* One rank with one persistent parameter, gathered. */
static dc_context *make_context(void) {
  static float shard[ELEMENTS];
  static const int64_t shape[1] = {ELEMENTS};
  static const int64_t ids[1] = {ID};
  dc_device *device = NULL;
  dc_context *context = NULL;
  dc_tensor view = {sizeof view, shard, shape, NULL, 1, DC_FLOAT32, NULL};
  check(dc_device_open("cpu", NULL, &device), "device");
  check(dc_context_create(device, NULL, &context), "context");
  dc_device_destroy(device);
  check(dc_init(context, NULL, NULL, 1 << 20), "init");
  check(dc_register_z3_param(context, ID, shape, 1, &view, NULL, 1, DC_DTYPE_NONE), "parameter");
  check(dc_register_graph_z3(context, GRAPH, ids, 1), "graph");
  check(gather(context), "gather");
  check(wait(context), "wait");
  return context;
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    operation call;
  } rows[] = {{"allgather_param, gathered already", gather},
              {"wait_allgather, done already", wait},
              {"release_param, persistent", release},
              {"wait_allgather, refused", refused}};
  bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
  dc_context *context = make_context();
  printf(json ? "{" : "%-36s %s\n", "call", "ns");
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
    double ns = median_ns(context, rows[i].call, rows[i].name);
    if (json) {
      printf("%s\"%s\": %.1f", i == 0 ? "" : ", ", rows[i].name, ns);
    } else {
      printf("%-36s %.1f\n", rows[i].name, ns);
    }
  }
  printf(json ? "}\n" : "");
  dc_context_destroy(context);
  return 0;
}
