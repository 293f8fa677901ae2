/* The dumps as PyTorch's flight recorder writes its own (format 2.10), one file a rank. They are a pickle, which
 * torchfrtrace loads, or JSON of the same shape, as its own JSON dumps are.
 *
 * A collective's tensors may be split raggedly, so they are the "v" kinds, and the size is that of the whole on every
 * rank. The analyser knows no libdc back end: the name says gloo, followed by libdc's own name. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tool.h"

/* One writer for both: pickles have opcodes where JSON has brackets. */
typedef struct sink {
  json j;
  bool pickle;
  FILE *file;
} sink;

static void put_bytes(sink *s, const void *bytes, size_t count) {
  fwrite(bytes, 1, count, s->file);
}

static void put_size(sink *s, uint64_t size, int bytes) { /* little-endian */
  for (int i = 0; i < bytes; i++) {
    fputc((int)(size >> 8 * i & 255), s->file);
  }
}

static void pickle_text(sink *s, const char *sink_text) {
  fputc('X', s->file); /* BINUNICODE */
  put_size(s, strlen(sink_text), 4);
  put_bytes(s, sink_text, strlen(sink_text));
}

static void pickle_key(sink *s, const char *name) {
  if (s->pickle && name != NULL) {
    pickle_text(s, name);
  }
}

static void sink_begin(sink *s, const char *name, char bracket) {
  if (!s->pickle) {
    json_open(&s->j, name, bracket);
    return;
  }
  pickle_key(s, name);
  fputs(bracket == '{' ? "}(" : "](", s->file); /* EMPTY_DICT or EMPTY_LIST, MARK */
}

static void sink_end(sink *s, char bracket) {
  if (!s->pickle) {
    json_close(&s->j, bracket);
    return;
  }
  fputc(bracket == '}' ? 'u' : 'e', s->file); /* SETITEMS or APPENDS */
}

static void sink_text(sink *s, const char *name, const char *is) {
  if (!s->pickle) {
    json_text(&s->j, name, is);
    return;
  }
  pickle_key(s, name);
  pickle_text(s, is);
}

static void sink_number(sink *s, const char *name, int64_t is) {
  if (!s->pickle) {
    json_int(&s->j, name, is);
    return;
  }
  pickle_key(s, name);
  put_bytes(s, "\x8a\x08", 2); /* LONG1 of eight bytes */
  put_size(s, (uint64_t)is, 8);
}

static void sink_boolean(sink *s, const char *name, bool is) {
  if (!s->pickle) {
    json_bool(&s->j, name, is);
    return;
  }
  pickle_key(s, name);
  fputc(is ? '\x88' : '\x89', s->file); /* NEWTRUE, NEWFALSE */
}

/* ---- what the analyser reads ---- */

static const struct {
  const char *ours, *name;
  int bytes;
} dtypes[] = {{"float32", "Float", 4}, {"float64", "Double", 8}, {"float16", "Half", 2}, {"bfloat16", "BFloat16", 2},
              {"int8", "Char", 1},     {"int32", "Int", 4},      {"int64", "Long", 8},   {"uint8", "Byte", 1}};

static void put_group(sink *s, const dumps *d, const char *name) {
  char ranks[MAX_RANKS * 5 + 3] = "[";
  for (int r = 0; r < d->world; r++) {
    snprintf(ranks + strlen(ranks), sizeof ranks - strlen(ranks), "%s%d", r == 0 ? "" : ", ", r);
  }
  strcat(ranks, "]");
  sink_begin(s, name, '{');
  sink_text(s, "name", name);
  sink_text(s, "desc", "libdc");
  sink_text(s, "ranks", ranks);
  sink_end(s, '}');
}

static void put_tensors(sink *s, const char *sizes, const char *types, const entry *e) {
  const char *name = "Byte";
  int bytes = 1;
  for (size_t i = 0; i < COUNT(dtypes); i++) {
    if (strcmp(e->dtype, dtypes[i].ours) == 0 && e->bytes % dtypes[i].bytes == 0) {
      name = dtypes[i].name;
      bytes = dtypes[i].bytes;
    }
  }
  sink_begin(s, sizes, '[');
  sink_begin(s, NULL, '[');
  sink_number(s, NULL, e->bytes / bytes);
  sink_end(s, ']');
  sink_end(s, ']');
  sink_begin(s, types, '[');
  sink_text(s, NULL, name);
  sink_end(s, ']');
}

static void put_collective(sink *s, const dump *d, const entry *e, int64_t record) {
  int64_t wall = d->wall - d->time; /* their times are since 1970 */
  bool reduce = strcmp(e->group, "reduce") == 0 || strcmp(e->op, "reduce_grad") == 0;
  bool done = strcmp(e->state, "done") == 0;
  char name[160];
  snprintf(name, sizeof name, "gloo:%s %s(%" PRId64 ")", reduce ? "reduce_scatter_v" : "all_gather_v", e->op, e->id);
  sink_begin(s, NULL, '{');
  sink_number(s, "record_id", record);
  sink_number(s, "pg_id", strcmp(e->group, "reduce") == 0);
  sink_begin(s, "process_group", '[');
  sink_text(s, NULL, e->group);
  sink_text(s, NULL, "libdc");
  sink_end(s, ']');
  sink_number(s, "collective_seq_id", e->seq);
  sink_number(s, "p2p_seq_id", 0);
  sink_number(s, "op_id", e->n);
  sink_text(s, "profiling_name", name);
  put_tensors(s, "input_sizes", "input_dtypes", e);
  put_tensors(s, "output_sizes", "output_dtypes", e);
  sink_text(s, "state", done ? "completed" : e->begin > 0 ? "started" : "scheduled");
  sink_number(s, "time_created_ns", e->queued + wall);
  sink_number(s, "time_discovered_started_ns", e->begin > 0 ? e->begin + wall : 0);
  sink_number(s, "time_discovered_completed_ns", done ? e->end + wall : 0);
  sink_boolean(s, "retired", done);
  sink_boolean(s, "is_p2p", false);
  sink_begin(s, "frames", '[');
  sink_end(s, ']');
  sink_end(s, '}');
}

static bool is_reduce(const entry *e) {
  return strcmp(e->group, "reduce") == 0;
}

/* A collective's record is its number among those of both groups, which the ranks have in common. */
static void put_entries(sink *s, const dump *d) {
  int64_t latest[2] = {0, 0};
  for (int64_t i = d->count - 1; i >= 0; i--) { /* before the first of a group that is still there */
    if (d->entries[i].seq > 0) {
      latest[is_reduce(&d->entries[i])] = d->entries[i].seq - 1;
    }
  }
  sink_begin(s, "entries", '[');
  for (int64_t i = 0; i < d->count; i++) {
    const entry *e = &d->entries[i];
    if (e->seq > 0) {
      latest[is_reduce(e)] = e->seq;
      put_collective(s, d, e, latest[0] + latest[1] - 1);
    }
  }
  sink_end(s, ']');
}

static void put_dump(sink *s, const dumps *all, const dump *d) {
  if (s->pickle) {
    put_bytes(s, "\x80\x02", 2); /* PROTO 2 */
  }
  sink_begin(s, NULL, '{');
  sink_text(s, "version", "2.10");
  sink_begin(s, "pg_config", '{');
  put_group(s, all, "gather");
  put_group(s, all, "reduce");
  sink_end(s, '}');
  put_entries(s, d);
  sink_end(s, '}');
  if (s->pickle) {
    fputc('.', s->file); /* STOP */
  }
}

/* The number of "rank_" and a number, or -1. */
static int rank_of(const char *name) {
  int number = -1;
  int end = 0;
  bool well = strncmp(name, "rank_", 5) == 0 && name[5] >= '0' && name[5] <= '9' &&
              sscanf(name + 5, "%4d%n", &number, &end) == 1 && name[5 + end] == '\0';
  return well ? number : -1;
}

/* The analyser takes every rank_N of the folder for a rank of this run, so those of another run must not be there. */
static int refuse_other_ranks(const args *a, const dumps *d, const char *folder) {
  bool written[MAX_RANKS] = {false};
  for (int r = 0; r < d->count; r++) {
    written[d->ranks[r].rank] = true;
  }
  DIR *dir = opendir(folder);
  if (dir == NULL) {
    return report_error(a, EXIT_UNAVAILABLE, "--output = %s can't be read: %s", folder, strerror(errno));
  }
  int code = EXIT_OK;
  for (struct dirent *e = readdir(dir); e != NULL && code == EXIT_OK; e = readdir(dir)) {
    int named = rank_of(e->d_name);
    if (named >= 0 && (named >= MAX_RANKS || !written[named])) {
      code = report_error(a, EXIT_UNAVAILABLE, "--output = %s has %s of another run; remove it, or name another folder",
                          folder, e->d_name);
    }
  }
  closedir(dir);
  return code;
}

int write_torch(const args *a, const dumps *d, const char *folder, bool pickle) {
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
    return report_error(a, EXIT_UNAVAILABLE, "--output = %s can't be made: %s", folder, strerror(errno));
  }
  int refused = refuse_other_ranks(a, d, folder);
  if (refused != EXIT_OK) {
    return refused;
  }
  for (int r = 0; r < d->count; r++) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/rank_%d", folder, d->ranks[r].rank); /* fits: mkdir() takes no longer folder */
    FILE *file = fopen(path, "we");
    if (file == NULL) {
      return report_error(a, EXIT_UNAVAILABLE, "--output = %s can't be written: %s", path, strerror(errno));
    }
    sink s = {.j = {.file = file}, .pickle = pickle, .file = file};
    put_dump(&s, d, &d->ranks[r]);
    int code = finish_file(a, file, path);
    if (code != EXIT_OK) {
      return code;
    }
  }
  return EXIT_OK;
}
