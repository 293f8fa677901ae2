/* The cost of the flight recorder: nanoseconds per entry, and the share of a ZeRO-3 step that its entries take. Entries
 * are timed alone, on the library's own objects, since the recorder cannot be turned off. A step is one forward and
 * backward of a model of LAYERS parameters on two ranks that are threads.
 *
 *   bench_recorder [--json]      medians of ROUNDS rounds */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/flight_recorder_internal.h"

enum { ENTRIES = 4096, ROUNDS = 101, STEPS = 41, LAYERS = 16, WORLD = 2, GRAPH = 1 };

static const dc__tag tag = {.graph_id = 1, .id = 7, .op = DC_OP_WAIT_ALLGATHER};

static void check(dc_status status) {
  if (status != DC_OK) {
    fprintf(stderr, "bench_recorder: %s\n", dc_last_error());
    exit(1);
  }
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, by_value);
  return values[count / 2];
}

/* ---- entries ---- */

/* A call that does its work itself: two times. */
static void call(dc_context *ctx) {
  dc__recorder_end_call(dc__recorder_begin_call(ctx, &tag, 0), DC_OK);
}

/* Work of a stream: three times, of which the stream takes two. */
static void queued(dc_context *ctx) {
  dc__op_timing *span =
      dc__recorder_begin(ctx, &(dc__recorded_op){.tag = &tag, .lane = DC__LANE_GATHER, .group = DC__GROUP_GATHER});
  dc__op_timing_expect(span);
  dc__op_timing_begin(span);
  dc__op_timing_end(span, false);
  dc__recorder_submitted(span);
}

static void clock_only(dc_context *ctx) {
  (void)ctx;
  (void)dc__ticks();
}

static double entry_ns(dc_context *ctx, void (*entry)(dc_context *ctx)) {
  double rounds[ROUNDS];
  for (int r = 0; r < ROUNDS; r++) {
    int64_t begin = dc__now_ns();
    for (int i = 0; i < ENTRIES; i++) {
      entry(ctx);
    }
    rounds[r] = (double)(dc__now_ns() - begin) / ENTRIES;
  }
  return median(rounds, ROUNDS);
}

/* ---- steps ---- */

typedef struct worker {
  dc_comm *comm;
  int64_t numel;
  double step_ns;
  double entries; /* a step */
} worker;

static dc_tensor flat(float *data, const int64_t *count) {
  return (dc_tensor){.struct_size = sizeof(dc_tensor), .data = data, .shape = count, .ndim = 1, .dtype = DC_FLOAT32};
}

static void step(dc_context *ctx, const dc_tensor *grad) {
  dc_tensor full = DC_TENSOR_INIT;
  for (int64_t pass = 0; pass < 2; pass++) {
    if (pass == 1) {
      check(dc_start_backward(ctx, 1));
    }
    for (int64_t i = 0; i < LAYERS; i++) {
      int64_t id = pass == 0 ? i : LAYERS - 1 - i;
      check(dc_allgather_param(ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full));
      check(dc_wait_allgather(ctx, NULL, GRAPH, id));
      check(dc_release_param(ctx, NULL, GRAPH, id, 1));
      if (pass == 1) {
        check(dc_reduce_grad(ctx, grad, GRAPH, id));
      }
    }
  }
  check(dc_end_backward(ctx, GRAPH, 0));
  check(dc_context_params_updated(ctx, NULL, 0));
}

static void *work(void *arg) {
  worker *w = arg;
  const int64_t part = w->numel / WORLD;
  float *memory = calloc((size_t)(w->numel + 2 * part * LAYERS), sizeof *memory);
  dc_device *device = NULL;
  dc_context *ctx = NULL;
  int64_t ids[LAYERS];
  double steps[STEPS];
  if (memory == NULL) {
    exit(1);
  }
  check(dc_device_open("cpu", NULL, &device));
  check(dc_context_create(device, NULL, &ctx));
  check(dc_init(ctx, w->comm, NULL, 1 << 20));
  for (int64_t i = 0; i < LAYERS; i++) {
    dc_tensor shard = flat(memory + w->numel + 2 * i * part, &part);
    dc_tensor grad = flat(memory + w->numel + (2 * i + 1) * part, &part);
    ids[i] = i;
    check(dc_register_z3_param(ctx, i, &w->numel, 1, &shard, &grad, 0, DC_DTYPE_NONE));
  }
  check(dc_register_graph_z3(ctx, GRAPH, ids, LAYERS));
  dc_tensor grad = flat(memory, &w->numel);
  int64_t recorded = 0;
  for (int s = -5; s < STEPS; s++) {
    int64_t begin = dc__now_ns();
    int64_t before = atomic_load(&ctx->recorder->recorded);
    step(ctx, &grad);
    recorded = atomic_load(&ctx->recorder->recorded) - before;
    if (s >= 0) {
      steps[s] = (double)(dc__now_ns() - begin);
    }
  }
  w->step_ns = median(steps, STEPS);
  w->entries = (double)recorded;
  dc_context_destroy(ctx);
  dc_device_destroy(device);
  dc_comm_destroy(w->comm);
  free(memory);
  return NULL;
}

static worker measure_step(int64_t numel) {
  dc_comm *comms[WORLD];
  pthread_t threads[WORLD];
  worker workers[WORLD];
  check(dc_comm_create_threads(WORLD, NULL, comms));
  for (int r = 0; r < WORLD; r++) {
    workers[r] = (worker){.comm = comms[r], .numel = numel};
    if (pthread_create(&threads[r], NULL, work, &workers[r]) != 0) {
      exit(1);
    }
  }
  for (int r = 0; r < WORLD; r++) {
    pthread_join(threads[r], NULL);
  }
  return workers[0];
}

int main(int argc, char **argv) {
  static const int64_t sizes[] = {1 << 10, 1 << 14, 1 << 18};
  bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
  dc_device *device = NULL;
  dc_context *ctx = NULL;
  check(dc_device_open("cpu", NULL, &device));
  check(dc_context_create(device, NULL, &ctx));
  check(dc_init(ctx, NULL, NULL, 1));
  double ticks = entry_ns(ctx, clock_only);
  double calls = entry_ns(ctx, call);
  double queues = entry_ns(ctx, queued);
  double worst = calls > queues ? calls : queues;
  if (json) {
    printf("{\"clock_ns\": %.1f, \"call_ns\": %.1f, \"queued_ns\": %.1f, \"steps\": [", ticks, calls, queues);
  } else {
    printf("%-28s %6.1f ns\n%-28s %6.1f ns\n%-28s %6.1f ns\n", "a reading of the clock", ticks, "an entry of a call",
           calls, "an entry of a stream's work", queues);
  }
  for (size_t i = 0; i < DC__COUNT(sizes); i++) {
    worker w = measure_step(sizes[i]);
    double share = 100 * w.entries * worst / w.step_ns;
    int64_t bytes = sizes[i] * (int64_t)sizeof(float);
    if (json) {
      printf("%s{\"parameter_bytes\": %" PRId64 ", \"entries\": %.0f, \"step_us\": %.1f, \"percent\": %.3f}",
             i > 0 ? ", " : "", bytes, w.entries, w.step_ns / 1e3, share);
    } else {
      printf("a step of %d parameters of %7" PRId64 " bytes: %9.1f us, %.0f entries, %.3f %%\n", LAYERS, bytes,
             w.step_ns / 1e3, w.entries, share);
    }
  }
  printf(json ? "]}\n" : "");
  dc_context_destroy(ctx);
  dc_device_destroy(device);
  return 0;
}
