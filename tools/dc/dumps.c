/* The flight recorders' files of a folder: folder/rank-R.json, written by dc_trace_dump(). */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dc.h"

static char *read_file(const char *path) {
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    return NULL;
  }
  size_t used = 0;
  size_t capacity = 1 << 16;
  char *text = malloc(capacity);
  for (size_t n = 1; text != NULL && n > 0; used += n) {
    if (capacity - used < 2) {
      char *grown = realloc(text, capacity *= 2);
      if (grown == NULL) {
        free(text);
      }
      text = grown;
    }
    n = text == NULL ? 0 : fread(text + used, 1, capacity - used - 1, file);
  }
  if (text != NULL) {
    text[used] = '\0';
    if (ferror(file) || strlen(text) != used) {
      free(text);
      text = NULL;
      errno = errno == 0 ? EINVAL : errno;
    }
  }
  fclose(file);
  return text;
}

static const char *text_of(const json_value *object, const char *key) {
  const json_value *v = json_get(object, key);
  return v != NULL && v->kind == J_TEXT ? v->text : "";
}

static int64_t int_of(const json_value *object, const char *key) {
  const json_value *v = json_get(object, key);
  return v != NULL && v->kind == J_NUMBER ? v->number : 0;
}

static entry entry_of(const json_value *v) {
  return (entry){.n = int_of(v, "n"),
                 .graph = int_of(v, "graph"),
                 .id = int_of(v, "id"),
                 .tensors = int_of(v, "tensors"),
                 .bytes = int_of(v, "bytes"),
                 .moved = int_of(v, "moved"),
                 .seq = int_of(v, "seq"),
                 .queued = int_of(v, "queued_ns"),
                 .begin = int_of(v, "begin_ns"),
                 .end = int_of(v, "end_ns"),
                 .op = text_of(v, "op"),
                 .dtype = text_of(v, "dtype"),
                 .group = text_of(v, "group"),
                 .stream = text_of(v, "stream"),
                 .state = text_of(v, "state")};
}

/* Ids may be anything; with the rest one can count. */
static bool countable(const entry *e) {
  const int64_t numbers[] = {e->n, e->tensors, e->bytes, e->moved, e->seq, e->queued, e->begin, e->end};
  for (size_t i = 0; i < COUNT(numbers); i++) {
    if (numbers[i] < 0 || numbers[i] > INT64_C(1) << 61) {
      return false;
    }
  }
  return true;
}

/* "" or what is wrong with it as a dump. */
static const char *fill(dump *d, const json_value *v) {
  const json_value *entries = json_get(v, "entries");
  if (strcmp(text_of(v, "format"), "libdc flight recorder") != 0 || entries == NULL || entries->kind != J_ARRAY) {
    return "it is no dump of libdc's flight recorder";
  }
  if (int_of(v, "version") != 1) {
    return "its version is not 1, the only one that this dc knows";
  }
  d->rank = (int)int_of(v, "rank");
  d->world = (int)int_of(v, "world");
  if (d->world < 1 || d->world > 64 || d->rank < 0 || d->rank >= d->world) {
    return "its rank and world are none";
  }
  d->pid = int_of(v, "pid");
  d->time = int_of(v, "time_ns");
  d->wall = int_of(v, "wall_ns");
  if (d->time < 0 || d->time > INT64_C(1) << 61 || d->wall < 0 || d->wall > INT64_C(1) << 61) {
    return "its times are none";
  }
  d->recorded = int_of(v, "recorded");
  d->dropped = int_of(v, "dropped");
  d->libdc = text_of(v, "libdc");
  d->host = text_of(v, "host");
  d->transport = text_of(v, "transport");
  d->status = text_of(v, "status");
  d->error = text_of(v, "error");
  for (const json_value *e = entries->first; e != NULL; e = e->next) {
    d->count++;
  }
  d->entries = calloc((size_t)d->count + 1, sizeof *d->entries);
  if (d->entries == NULL) {
    return "out of memory";
  }
  int64_t i = 0;
  for (const json_value *e = entries->first; e != NULL; e = e->next) {
    d->entries[i] = entry_of(e);
    if (!countable(&d->entries[i++])) {
      return "an entry has a number below 0 or over 2^61";
    }
  }
  return "";
}

static bool read_dump(const args *a, const char *path, dump *d) {
  char error[128];
  d->file = read_file(path);
  if (d->file == NULL) {
    complain(a, EXIT_CANNOT, "%s can't be read: %s", path, strerror(errno));
    return false;
  }
  json_value *v = json_read(d->file, error, sizeof error);
  if (v == NULL) {
    complain(a, EXIT_CANNOT, "%s is no JSON: %s", path, error);
    return false;
  }
  const char *fault = fill(d, v);
  json_free(v);
  if (fault[0] != '\0') {
    complain(a, EXIT_CANNOT, "%s: %s", path, fault);
  }
  return fault[0] == '\0';
}

static int by_rank(const void *a, const void *b) {
  return ((const dump *)a)->rank - ((const dump *)b)->rank;
}

/* Do they belong together? */
static bool fit(const args *a, const char *folder, dumps *d) {
  if (d->count == 0) {
    complain(a, EXIT_CANNOT, "FOLDER = %s has no rank-R.json; dc_trace_dump and DC_DUMP_DIR write them", folder);
    return false;
  }
  qsort(d->ranks, (size_t)d->count, sizeof *d->ranks, by_rank);
  d->world = d->ranks[0].world;
  for (int i = 1; i < d->count; i++) {
    if (d->ranks[i].world != d->world || d->ranks[i].rank == d->ranks[i - 1].rank) {
      complain(a, EXIT_CANNOT, "FOLDER = %s has dumps of more than one run: ranks %d of %d and %d of %d", folder,
               d->ranks[i - 1].rank, d->ranks[i - 1].world, d->ranks[i].rank, d->ranks[i].world);
      return false;
    }
  }
  return true;
}

bool dumps_read(const args *a, const char *folder, dumps *d) {
  enum { MOST = 64 };
  *d = (dumps){.ranks = calloc(MOST, sizeof *d->ranks)};
  DIR *dir = opendir(folder);
  if (dir == NULL || d->ranks == NULL) {
    complain(a, EXIT_CANNOT, "FOLDER = %s can't be read: %s", folder, strerror(errno));
    free(d->ranks);
    if (dir != NULL) {
      closedir(dir);
    }
    return false;
  }
  bool well = true;
  for (struct dirent *e = readdir(dir); e != NULL && well && d->count < MOST; e = readdir(dir)) {
    int number;
    int end = 0;
    if (sscanf(e->d_name, "rank-%2d.json%n", &number, &end) == 1 && end > 0 && e->d_name[end] == '\0') {
      char path[4096];
      snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
      well = read_dump(a, path, &d->ranks[d->count++]);
    }
  }
  closedir(dir);
  well = well && fit(a, folder, d);
  if (!well) {
    dumps_free(d);
  }
  return well;
}

void dumps_free(dumps *d) {
  for (int i = 0; i < d->count; i++) {
    free(d->ranks[i].entries);
    free(d->ranks[i].file);
  }
  free(d->ranks);
  *d = (dumps){0};
}
