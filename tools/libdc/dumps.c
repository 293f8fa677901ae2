/* The flight recorders' files of a folder: folder/rank-R.json, written by dc_context_trace_dump(). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tool.h"

/* The most that dc_context_trace_dump() can write: as many entries as a trace may keep, of at most 512 bytes. */
static const int64_t max_dump_bytes = INT64_C(16777216) * 512 + 65536;

/* Checks the file before anything is read, since reading a pipe would wait for its writer. "" or the reason why it
 * can't be a dump. */
static const char *refuse_file(int fd, char why[80]) {
  struct stat about;
  if (fstat(fd, &about) != 0) {
    return strerror(errno);
  }
  if (!S_ISREG(about.st_mode)) {
    return S_ISDIR(about.st_mode)    ? "it is a folder, must be a file"
           : S_ISFIFO(about.st_mode) ? "it is a pipe, must be a file"
                                     : "it is a device, must be a file";
  }
  if (about.st_size > max_dump_bytes) {
    snprintf(why, 80, "it has %" PRId64 " bytes, a dump has at most %" PRId64, (int64_t)about.st_size, max_dump_bytes);
    return why;
  }
  return "";
}

/* The text of a file of at most max_dump_bytes, also if it grows meanwhile; NULL with a text in error. A NUL ends the
 * reading: no dump has one, and a file with a hole may be larger than the memory. */
static char *read_all(int fd, const char **error) {
  size_t used = 0;
  size_t capacity = 1 << 16;
  char *text = malloc(capacity);
  for (ssize_t n = 1; text != NULL && n > 0;) {
    n = read(fd, text + used, capacity - used - 1);
    if (n < 0) {
      *error = strerror(errno);
    } else if (memchr(text + used, 0, (size_t)n) != NULL) {
      *error = "it has a NUL character, so it is no text";
      n = -1;
    } else if ((int64_t)(used += (size_t)n) > max_dump_bytes) {
      *error = "it grows while it is read";
      n = -1;
    }
    char *grown = n > 0 && capacity - used < 2 ? realloc(text, capacity *= 2) : text;
    if (n < 0 || grown == NULL) {
      free(text);
    }
    text = n < 0 ? NULL : grown;
  }
  if (text != NULL) {
    text[used] = '\0';
  }
  return text;
}

static char *read_file(int folder, const char *name, char why[80], const char **error) {
  int fd = openat(folder, name, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* opening a pipe may wait, too */
  if (fd < 0) {
    *error = errno == ENXIO ? "it is a socket or a device, must be a file" : strerror(errno);
    return NULL;
  }
  *error = refuse_file(fd, why);
  char *text = NULL;
  if ((*error)[0] == '\0') {
    *error = "out of memory";
    text = read_all(fd, error);
  }
  close(fd);
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
                 .name = text_of(v, "name"),
                 .dtype = text_of(v, "dtype"),
                 .group = text_of(v, "group"),
                 .stream = text_of(v, "stream"),
                 .state = text_of(v, "state")};
}

/* Ids may be anything; the other numbers must be in range. */
static bool is_valid_entry(const entry *e) {
  const int64_t numbers[] = {e->n, e->tensors, e->bytes, e->moved, e->seq, e->queued, e->begin, e->end};
  for (size_t i = 0; i < COUNT(numbers); i++) {
    if (numbers[i] < 0 || numbers[i] > INT64_C(1) << 61) {
      return false;
    }
  }
  return true;
}

/* Fills in a dump; "" or the fault of its JSON. */
static const char *dump_fill(dump *d, const json_value *v) {
  const json_value *entries = json_get(v, "entries");
  if (strcmp(text_of(v, "format"), "libdc flight recorder") != 0 || entries == NULL || entries->kind != J_ARRAY) {
    return "it is no dump of libdc's flight recorder";
  }
  if (int_of(v, "version") != 1) {
    return "its version is not 1, the only one that this libdc knows";
  }
  int64_t number = int_of(v, "rank");
  int64_t world = int_of(v, "world");
  if (world < 1 || world > MAX_RANKS || number < 0 || number >= world) {
    return "its rank and world are none";
  }
  d->rank = (int)number;
  d->world = (int)world;
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
    if (!is_valid_entry(&d->entries[i++])) {
      return "an entry has a number below 0 or over 2^61";
    }
  }
  return "";
}

static bool read_dump(const args *a, const char *folder, int folder_fd, const char *name, dump *d) {
  char text[128];
  const char *error = "";
  d->file = read_file(folder_fd, name, text, &error);
  if (d->file == NULL) {
    report_error(a, EXIT_UNAVAILABLE, "%s/%s can't be read: %s", folder, name, error);
    return false;
  }
  json_value *v = json_read(d->file, text, sizeof text);
  if (v == NULL) {
    report_error(a, EXIT_UNAVAILABLE, "%s/%s is no JSON: %s", folder, name, text);
    return false;
  }
  const char *fault = dump_fill(d, v);
  json_free(v);
  if (fault[0] != '\0') {
    report_error(a, EXIT_UNAVAILABLE, "%s/%s: %s", folder, name, fault);
  }
  return fault[0] == '\0';
}

static int compare_ranks(const void *a, const void *b) {
  return ((const dump *)a)->rank - ((const dump *)b)->rank;
}

/* Checks that the dumps are of one run. */
static bool dumps_check(const args *a, const char *argument, const char *folder, dumps *d) {
  if (d->count == 0) {
    report_error(a, EXIT_UNAVAILABLE, "%s = %s has no rank-R.json; dc_context_trace_dump and LIBDC_DUMP_DIR write them",
                 argument, folder);
    return false;
  }
  qsort(d->ranks, (size_t)d->count, sizeof *d->ranks, compare_ranks);
  d->world = d->ranks[0].world;
  for (int i = 1; i < d->count; i++) {
    if (d->ranks[i].world != d->world || d->ranks[i].rank == d->ranks[i - 1].rank) {
      report_error(a, EXIT_UNAVAILABLE, "%s = %s has dumps of more than one run: ranks %d of %d and %d of %d", argument,
                   folder, d->ranks[i - 1].rank, d->ranks[i - 1].world, d->ranks[i].rank, d->ranks[i].world);
      return false;
    }
  }
  return true;
}

/* A time on another clock; 0 stays, which is none. */
static void move_time(int64_t *ns, int64_t offset) {
  *ns = *ns == 0 ? 0 : *ns + offset > 0 ? *ns + offset : 1;
}

/* Each machine's clock counts from its own start. The times of all ranks are put on the first one's, by the wall clock,
 * which machines have in common. Ranks of one machine have one clock already, and the wall clock is less exact. */
static void dumps_align_clocks(dumps *d) {
  const dump *first = &d->ranks[0];
  for (int i = 1; i < d->count; i++) {
    dump *one = &d->ranks[i];
    if (strcmp(one->host, first->host) == 0) {
      continue;
    }
    int64_t offset = (one->wall - one->time) - (first->wall - first->time);
    move_time(&one->time, offset);
    for (int64_t k = 0; k < one->count; k++) {
      entry *e = &one->entries[k];
      move_time(&e->queued, offset);
      move_time(&e->begin, offset);
      move_time(&e->end, offset);
    }
  }
}

/* "rank-" and a number as dc_context_trace_dump() writes it. */
static bool is_dump(const char *name) {
  int number;
  int end = 0;
  return name[0] != '\0' && strncmp(name, "rank-", 5) == 0 && name[5] >= '0' && name[5] <= '9' &&
         sscanf(name + 5, "%4d.json%n", &number, &end) == 1 && end > 0 && name[5 + end] == '\0';
}

static bool read_folder(const args *a, const char *argument, const char *folder, DIR *dir, dumps *d) {
  for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
    if (!is_dump(e->d_name)) {
      continue;
    }
    if (d->count == MAX_RANKS) {
      report_error(a, EXIT_UNAVAILABLE, "%s = %s has more than %d dumps, which no run has", argument, folder,
                   MAX_RANKS);
      return false;
    }
    if (!read_dump(a, folder, dirfd(dir), e->d_name, &d->ranks[d->count++])) {
      return false;
    }
  }
  return true;
}

bool dumps_read(const args *a, const char *argument, const char *folder, dumps *d) {
  *d = (dumps){.ranks = calloc(MAX_RANKS, sizeof *d->ranks)};
  DIR *dir = opendir(folder);
  if (dir == NULL || d->ranks == NULL) {
    report_error(a, EXIT_UNAVAILABLE, "%s = %s can't be read: %s", argument, folder, strerror(errno));
    free(d->ranks);
    if (dir != NULL) {
      closedir(dir);
    }
    return false;
  }
  bool well = read_folder(a, argument, folder, dir, d) && dumps_check(a, argument, folder, d);
  closedir(dir);
  if (well) {
    dumps_align_clocks(d);
  } else {
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
