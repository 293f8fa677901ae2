/* libdc bench: collectives and operators, each alternating with a memcpy, so that a machine that is slow for a while
 * slows both. All ranks measure; rank 0 reports. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tool.h"

enum { GRAPH = 1, PARAM = 7 };

/* The buffers and the context of one rank. */
typedef struct bench {
  rank *r;
  int64_t bytes, count; /* of the whole tensor; float32 elements */
  int64_t part;         /* elements of a rank's part */
  int64_t turns;
  float *whole, *other;
  dc_device *device;
  dc_context *context;
} bench;

typedef bool (*work_fn)(const bench *b);

static bool bench_call_ok(const bench *b, const char *what, dc_status status) {
  return status == DC_OK || rank_fail(b->r, "%s: %s (%s)", what, dc_last_error(), dc_status_name(status));
}

/* ---- the measured work ---- */

static bool bench_all_gather(const bench *b) {
  dc_tensor send = flat(b->other, &b->part, DC_FLOAT32);
  dc_tensor recv = flat(b->whole, &b->count, DC_FLOAT32);
  return bench_call_ok(b, "all-gather", dc_comm_all_gather(b->r->comm, &send, &recv, NULL, NULL));
}

static bool bench_reduce_scatter(const bench *b) {
  dc_tensor send = flat(b->whole, &b->count, DC_FLOAT32);
  dc_tensor recv = flat(b->other, &b->part, DC_FLOAT32);
  return bench_call_ok(b, "reduce-scatter", dc_comm_reduce_scatter(b->r->comm, &send, &recv, NULL, DC_SUM, NULL));
}

static bool bench_all_reduce(const bench *b) {
  dc_tensor data = flat(b->whole, &b->count, DC_FLOAT32);
  return bench_call_ok(b, "all-reduce", dc_comm_all_reduce(b->r->comm, &data, DC_SUM, NULL));
}

static bool bench_broadcast(const bench *b) {
  dc_tensor data = flat(b->whole, &b->count, DC_FLOAT32);
  return bench_call_ok(b, "broadcast", dc_comm_broadcast(b->r->comm, &data, 0, NULL));
}

static bool bench_gather_param(const bench *b) {
  dc_tensor out = DC_TENSOR_INIT;
  return bench_call_ok(b, "dc_allgather_param",
                       dc_allgather_param(b->context, NULL, GRAPH, PARAM, DC_DTYPE_NONE, &out)) &&
         bench_call_ok(b, "dc_wait_allgather", dc_wait_allgather(b->context, NULL, GRAPH, PARAM)) &&
         bench_call_ok(b, "dc_release_param", dc_release_param(b->context, NULL, GRAPH, PARAM, 1));
}

static bool bench_reduce_grad(const bench *b) {
  dc_tensor grad = flat(b->whole, &b->count, DC_FLOAT32);
  return bench_call_ok(b, "dc_reduce_grad", dc_reduce_grad(b->context, &grad, GRAPH, PARAM)) &&
         bench_call_ok(b, "dc_end_backward", dc_end_backward(b->context, GRAPH, 0));
}

static bool bench_gather_again(const bench *b) {
  dc_tensor out = DC_TENSOR_INIT;
  return bench_call_ok(b, "dc_allgather_param",
                       dc_allgather_param(b->context, NULL, GRAPH, PARAM + 1, DC_DTYPE_NONE, &out)) &&
         bench_call_ok(b, "dc_wait_allgather", dc_wait_allgather(b->context, NULL, GRAPH, PARAM + 1));
}

static const struct {
  const char *name;
  work_fn run;
  bool moves; /* the whole tensor: compared with memcpy, at every size */
} rows[] = {{"all-gather", bench_all_gather, true},         {"reduce-scatter", bench_reduce_scatter, true},
            {"all-reduce", bench_all_reduce, true},         {"broadcast", bench_broadcast, true},
            {"ZeRO-3 gather", bench_gather_param, true},    {"ZeRO-3 gradient", bench_reduce_grad, true},
            {"gathered already", bench_gather_again, false}};

/* ---- measuring ---- */

static int compare_doubles(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int64_t count) {
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return values[count / 2];
}

/* Small work is repeated, so that a turn lasts long enough to be timed. */
static int64_t repeats_of(const bench *b, size_t row) {
  return !rows[row].moves ? 1000 : b->bytes < 1 << 20 ? (1 << 20) / b->bytes / 8 + 1 : 1;
}

static void bench_memcpy(const bench *b) {
  memcpy(b->other, b->whole, (size_t)b->bytes);
  __asm__ volatile("" : : "r"(b->other) : "memory"); /* keeps the compiler from removing the copy */
}

/* Microseconds of the work and of the copy, medians of the turns. */
static bool measure_row(const bench *b, size_t row, double *times, double *work_us, double *copy_us) {
  int64_t n = repeats_of(b, row);
  double *copies = times + b->turns;
  for (int64_t turn = -1; turn < b->turns; turn++) { /* the first warms up */
    if (!bench_call_ok(b, "barrier", dc_comm_barrier(b->r->comm))) {
      return false;
    }
    int64_t begin = now_ns();
    for (int64_t i = 0; i < n; i++) {
      if (!rows[row].run(b)) {
        return false;
      }
    }
    int64_t middle = now_ns();
    for (int64_t i = 0; i < n && rows[row].moves; i++) {
      bench_memcpy(b);
    }
    if (turn >= 0) {
      times[turn] = (double)(middle - begin) / (double)n / 1e3;
      copies[turn] = (double)(now_ns() - middle) / (double)n / 1e3;
    }
  }
  *work_us = median(times, b->turns);
  *copy_us = median(copies, b->turns);
  return true;
}

/* A parameter of the tensor's size, and a small one that stays gathered. */
static bool make_context(bench *b) {
  const int64_t shape[1] = {b->count};
  const int64_t few = 1024;
  const int64_t few_part = (few + b->r->world - 1) / b->r->world;
  const int64_t ids[2] = {PARAM, PARAM + 1};
  dc_tensor shard = flat(b->other, &b->part, DC_FLOAT32);
  dc_tensor grad = flat(b->other + b->part, &b->part, DC_FLOAT32);
  dc_tensor small = flat(b->other, &few_part, DC_FLOAT32);
  return bench_call_ok(b, "dc_context_create", dc_context_create(b->device, NULL, &b->context)) &&
         bench_call_ok(b, "dc_init", dc_init(b->context, b->r->comm, NULL, b->count)) &&
         bench_call_ok(b, "dc_register_z3_param",
                       dc_register_z3_param(b->context, PARAM, shape, 1, &shard, &grad, 0, DC_DTYPE_NONE)) &&
         bench_call_ok(b, "dc_register_z3_param",
                       dc_register_z3_param(b->context, PARAM + 1, &few, 1, &small, NULL, 1, DC_DTYPE_NONE)) &&
         bench_call_ok(b, "dc_register_graph_z3", dc_register_graph_z3(b->context, GRAPH, ids, 2)) &&
         bench_gather_again(b);
}

/* Appends "row bytes work copy" lines to the rank's text. */
static bool measure_size(bench *b, double *times, bool last) {
  bool well = make_context(b);
  for (size_t row = 0; row < COUNT(rows) && well; row++) {
    double work;
    double copy;
    if (rows[row].moves || last) {
      well = measure_row(b, row, times, &work, &copy);
      size_t used = strlen(b->r->text);
      if (well) {
        snprintf(b->r->text + used, sizeof b->r->text - used, "%zu %" PRId64 " %.4f %.4f\n", row, b->bytes, work, copy);
      }
    }
  }
  dc_context_destroy(b->context);
  b->context = NULL;
  return well;
}

bool bench_rank(rank *r) {
  int64_t most;
  bench b = {.r = r};
  if (sscanf(r->argument, "%" SCNd64 " %" SCNd64, &most, &b.turns) != 2) {
    return rank_fail(r, "its argument is %s", r->argument);
  }
  size_t capacity = (size_t)most + 4096 + 64 * sizeof(float); /* two parts of a rank alone are twice the whole */
  b.whole = calloc(1, capacity);
  b.other = calloc(2, capacity);
  double *times = calloc((size_t)b.turns * 2, sizeof *times);
  bool well = b.whole != NULL && b.other != NULL && times != NULL;
  well = well ? bench_call_ok(&b, "dc_device_open", dc_device_open("cpu", NULL, &b.device))
              : rank_fail(r, "out of memory");
  b.bytes = most;
  while (b.bytes >= 16 * BENCH_MIN_BYTES) {
    b.bytes /= 16;
  }
  for (; b.bytes <= most && well; b.bytes *= 16) {
    b.part = b.bytes / (int64_t)sizeof(float) / r->world;
    b.part += b.part == 0;
    b.count = b.part * r->world;
    well = measure_size(&b, times, b.bytes * 16 > most);
  }
  dc_device_destroy(b.device);
  free(b.whole);
  free(b.other);
  free(times);
  return well;
}

/* ---- the report ---- */

static void print_row(json *j, bool as_json, size_t row, int64_t bytes, double work, double copy) {
  bool moves = rows[row].moves;
  if (as_json) {
    json_open(j, NULL, '{');
    json_text(j, "name", rows[row].name);
    json_number(j, "us", work);
    if (moves) {
      json_int(j, "bytes", bytes);
      json_number(j, "gb_s", (double)bytes / work / 1e3);
      json_number(j, "memcpy_us", copy);
      json_number(j, "of_memcpy", copy / work);
    }
    json_close(j, '}');
  } else if (moves) {
    printf("%-18s %12" PRId64 " %12.2f %10.2f %11.0f %%\n", rows[row].name, bytes, work, (double)bytes / work / 1e3,
           100 * copy / work);
  } else {
    printf("%-18s %12s %12.3f\n", rows[row].name, "", work);
  }
}

int run_bench(const args *a) {
  int64_t ranks = number_of(a, "--ranks", 2);
  int64_t bytes = number_of(a, "--bytes", 1 << 24);
  int64_t turns = number_of(a, "--turns", 31);
  const char *transport = has_option(a, "--transport") ? value_of(a, "--transport") : "processes";
  bool as_json = has_option(a, "--json");
  char argument[64];
  char text[4096];
  snprintf(argument, sizeof argument, "%" PRId64 " %" PRId64, bytes, turns);
  bool live = isatty(STDERR_FILENO) == 1;
  if (live) {
    fprintf(stderr, "... %d rank%s, up to %" PRId64 " bytes", (int)ranks, plural_s(ranks), bytes);
  }
  bool processes = strcmp(transport, "processes") == 0;
  const job *j = find_job("bench");
  bool well = (processes ? run_processes : run_threads)(j, (int)ranks, argument, text, sizeof text);
  if (live) {
    fputs("\r\033[K", stderr);
  }
  if (!well) {
    return report_error(a, EXIT_FAILED, "%s", text);
  }
  json out = {.file = stdout};
  if (as_json) {
    json_open(&out, NULL, '{');
    json_text(&out, "library", dc_version_string());
    json_int(&out, "ranks", ranks);
    json_text(&out, "transport", transport);
    json_int(&out, "turns", turns);
    json_open(&out, "rows", '[');
  } else {
    printf("%d rank%s as %s\n%-18s %12s %12s %10s %13s\n", (int)ranks, plural_s(ranks), transport, "", "bytes", "us",
           "GB/s", "of memcpy");
  }
  for (char *line = text; *line != '\0'; line += strcspn(line, "\n") + 1) {
    size_t row;
    double work;
    double copy;
    if (sscanf(line, "%zu %" SCNd64 " %lf %lf", &row, &bytes, &work, &copy) == 4 && row < COUNT(rows)) {
      print_row(&out, as_json, row, bytes, work, copy);
    }
  }
  if (as_json) {
    json_close(&out, ']');
    json_close(&out, '}');
  }
  return EXIT_OK;
}
