/* libdc trace: the dumps of a folder as a trace for Perfetto or Chrome, or as PyTorch's flight recorder has them. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "tool.h"

/* ---- Perfetto: ranks are processes, streams are threads ---- */

static const char *const lanes[] = {"caller", "gather", "reduce", "offload", "reload"};

static int lane_of(const entry *e) {
  for (int i = 0; i < (int)COUNT(lanes); i++) {
    if (strcmp(e->stream, lanes[i]) == 0) {
      return i;
    }
  }
  return 0;
}

static void put_name(json *j, int number, int lane, const char *what, const char *name) {
  json_open(j, NULL, '{');
  json_text(j, "ph", "M");
  json_text(j, "name", what);
  json_int(j, "pid", number);
  json_int(j, "tid", lane);
  json_open(j, "args", '{');
  json_text(j, "name", name);
  json_close(j, '}');
  json_close(j, '}');
}

/* Microseconds from the first event on: Chrome's unit, and small enough to keep the nanoseconds. */
static void put_time(json *j, const char *key, int64_t ns) {
  json_number(j, key, (double)ns / 1000);
}

static void put_entry(json *j, const dump *d, const entry *e, int64_t zero) {
  int64_t begin = e->begin > 0 ? e->begin : e->queued;
  int64_t end = e->end >= begin ? e->end : d->time > begin ? d->time : begin; /* not ended: until the dump */
  json_open(j, NULL, '{');
  json_text(j, "ph", "X");
  json_text(j, "name", e->op);
  json_text(j, "cat", e->stream);
  json_int(j, "pid", d->rank);
  json_int(j, "tid", lane_of(e));
  put_time(j, "ts", begin - zero);
  put_time(j, "dur", end - begin);
  json_open(j, "args", '{');
  json_text(j, "state", e->state);
  json_int(j, "graph", e->graph);
  json_int(j, "parameter", e->id);
  if (e->name[0] != '\0') {
    json_text(j, "name", e->name);
  }
  json_int(j, "tensors", e->tensors);
  json_text(j, "dtype", e->dtype);
  json_int(j, "bytes", e->bytes);
  json_int(j, "moved", e->moved);
  json_text(j, "group", e->group);
  json_int(j, "seq", e->seq);
  put_time(j, "queued", e->queued - zero);
  json_close(j, '}');
  json_close(j, '}');
}

/* An arrow's end: 's' leaves the gather, 'f' arrives at the wait. */
static void put_arrow(json *j, const dump *d, const entry *e, char end, int64_t ns, int64_t id) {
  char phase[2] = {end, '\0'};
  json_open(j, NULL, '{');
  json_text(j, "ph", phase);
  json_text(j, "name", "gathered");
  json_text(j, "cat", "gather");
  if (end == 'f') {
    json_text(j, "bp", "e");
  }
  json_int(j, "id", id);
  json_int(j, "pid", d->rank);
  json_int(j, "tid", lane_of(e));
  put_time(j, "ts", ns);
  json_close(j, '}');
}

/* From the latest gather of a parameter to the wait for it. */
static void put_arrows(json *j, const dump *d, int64_t zero) {
  for (int64_t i = 0; i < d->count; i++) {
    const entry *wait = &d->entries[i];
    if (strcmp(wait->op, "wait_allgather") != 0) {
      continue;
    }
    for (int64_t k = i - 1; k >= 0; k--) {
      const entry *gather = &d->entries[k];
      if (gather->id == wait->id && strcmp(gather->stream, "gather") == 0) {
        if (gather->begin > 0 && wait->begin > 0) {
          int64_t id = d->rank * INT64_C(1000000000000) + wait->n;
          put_arrow(j, d, gather, 's', gather->begin - zero, id);
          put_arrow(j, d, wait, 'f', (wait->end > 0 ? wait->end : d->time) - zero, id);
        }
        break;
      }
      if (gather->id == wait->id && strcmp(gather->op, "release_param") == 0) {
        break;
      }
    }
  }
}

static void write_perfetto(FILE *file, const dumps *d) {
  json j = {.file = file};
  int64_t zero = INT64_MAX;
  for (int r = 0; r < d->count; r++) {
    for (int64_t i = 0; i < d->ranks[r].count; i++) {
      zero = d->ranks[r].entries[i].queued < zero ? d->ranks[r].entries[i].queued : zero;
    }
  }
  json_open(&j, NULL, '{');
  json_text(&j, "displayTimeUnit", "ns");
  json_open(&j, "traceEvents", '[');
  for (int r = 0; r < d->count; r++) {
    const dump *one = &d->ranks[r];
    char name[300];
    snprintf(name, sizeof name, "rank %d (pid %" PRId64 " on %s)", one->rank, one->pid, one->host);
    put_name(&j, one->rank, 0, "process_name", name);
    for (int i = 0; i < (int)COUNT(lanes); i++) {
      put_name(&j, one->rank, i, "thread_name", lanes[i]);
    }
    for (int64_t i = 0; i < one->count; i++) {
      put_entry(&j, one, &one->entries[i], zero);
    }
    put_arrows(&j, one, zero);
  }
  json_close(&j, ']');
  json_close(&j, '}');
}

/* ---- the command ---- */

static int write_one_file(const args *a, const dumps *d, const char *path) {
  if (path == NULL) {
    write_perfetto(stdout, d); /* main() checks that it was written */
    return EXIT_OK;
  }
  FILE *file = fopen(path, "we");
  if (file == NULL) {
    return report_error(a, EXIT_UNAVAILABLE, "--output = %s can't be written: %s", path, strerror(errno));
  }
  write_perfetto(file, d);
  return finish_file(a, file, path);
}

/* The written files, for a terminal or as JSON. */
static void print_summary(const args *a, const dumps *d, const char *path, const char *format) {
  int64_t entries = 0;
  for (int r = 0; r < d->count; r++) {
    entries += d->ranks[r].count;
  }
  if (has_option(a, "--json")) {
    json j = {.file = stdout};
    json_open(&j, NULL, '{');
    json_text(&j, "output", path);
    json_text(&j, "format", format);
    json_int(&j, "ranks", d->count);
    json_int(&j, "entries", entries);
    json_close(&j, '}');
  } else {
    printf("%s: %" PRId64 " operation%s of %d rank%s%s\n", path, entries, plural_s(entries), d->count,
           plural_s(d->count), strcmp(format, "perfetto") == 0 ? "; open it with https://ui.perfetto.dev" : "");
  }
}

int run_trace(const args *a) {
  const char *format = has_option(a, "--format") ? value_of(a, "--format") : "perfetto";
  const char *path = value_of(a, "--output");
  bool perfetto = strcmp(format, "perfetto") == 0;
  if (path == NULL && !perfetto) {
    return report_error(a, EXIT_USAGE, "--output is missing, must be a folder for --format = %s", format);
  }
  if (path == NULL && has_option(a, "--json")) {
    return report_error(a, EXIT_USAGE, "--output is missing: with --json the report goes to standard output");
  }
  dumps d;
  if (!dumps_read(a, "FOLDER", a->operand, &d)) {
    return EXIT_UNAVAILABLE;
  }
  int code = perfetto ? write_one_file(a, &d, path) : write_torch(a, &d, path, strcmp(format, "torch") == 0);
  if (code == EXIT_OK && path != NULL) {
    print_summary(a, &d, path, format);
  }
  dumps_free(&d);
  return code;
}
