/* Dumps the flight recorder to a JSON file, one per rank, which is written completely or not at all. A dump allocates
 * nothing and does not lock the context's mutex, as it is needed when calls hang or memory is short. `libdc trace` and
 * `libdc doctor` read the files. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/flight_recorder_internal.h"

enum { PATH_BYTES = 4096, CHUNK = 16384, MAX_LINE = 512 }; /* bytes; MAX_LINE for one dump_printf() */
static const int64_t STUCK_NS = 2000000000;

/* ---- writing ---- */

typedef struct dump_file {
  int fd;
  int error; /* the first one */
  size_t used;
  char text[CHUNK];
} dump_file;

static void dump_flush(dump_file *f) {
  size_t done = 0;
  while (f->error == 0 && done < f->used) {
    ssize_t n = write(f->fd, f->text + done, f->used - done);
    if (n >= 0) {
      done += (size_t)n;
    } else if (errno != EINTR) {
      f->error = errno;
    }
  }
  f->used = 0;
}

DC__PRINTF(2, 3) static void dump_printf(dump_file *f, const char *format, ...) {
  if (sizeof f->text - f->used < MAX_LINE) {
    dump_flush(f);
  }
  va_list args;
  va_start(args, format);
  int n = vsnprintf(f->text + f->used, MAX_LINE, format, args); /* no call formats more */
  va_end(args);
  f->used += n > 0 && n < MAX_LINE ? (size_t)n : 0;
}

/* Names are the caller's bytes, and an error's text may end within a character. JSON is UTF-8 alone. */
static void dump_string(dump_file *f, const char *text) {
  dump_printf(f, "\"");
  for (size_t length = 0; *text != '\0'; text += length > 0 ? length : 1) {
    uint32_t code = 0;
    length = dc__utf8_decode(text, 4, &code);
    if (length == 0) {
      dump_printf(f, "\\ufffd");
    } else if (code == '"' || code == '\\' || code < 0x20) {
      dump_printf(f, "\\u%04" PRIx32, code);
    } else {
      dump_printf(f, "%.*s", (int)length, text);
    }
  }
  dump_printf(f, "\"");
}

/* ---- what is written ---- */

/* Writes one entry. Returns false if it was overwritten meanwhile. */
static bool dump_entry(dump_file *f, const dc__recorder *r, const dc__clocks *c, dc__recorder_entry *e, int64_t serial,
                       const char *separator) {
  static const char *const lanes[DC__LANES] = {"caller", "gather", "reduce", "offload", "reload"};
  static const char *const groups[DC__GROUPS] = {"none", "gather", "reduce"};
  if (atomic_load(&e->serial) != serial) {
    return false;
  }
  int64_t queued = dc__clocks_ns(c, atomic_load(&e->queued));
  const dc__span_interval times = dc__span_times(&e->span, c);
  bool failed = atomic_load(&e->span.failed) != 0;
  long long id = atomic_load(&e->id);
  long long bytes = atomic_load(&e->bytes);
  long long moved = atomic_load(&e->moved);
  int32_t graph = atomic_load(&e->graph);
  uint32_t seq = (uint32_t)atomic_load(&e->seq);
  int32_t op = atomic_load(&e->op);
  int32_t kind = atomic_load(&e->kind);
  int32_t count = atomic_load(&e->count);
  if (atomic_load(&e->serial) != serial) {
    return false;
  }
  bool is_offload = op >= DC_OP_OFFLOAD_TENSOR && op <= DC_OP_WAIT_RELOAD; /* its ids are not those of parameters */
  const char *name = is_offload ? NULL : dc__map_get(&r->names, id);
  const char *state = times.begun == 0 ? "queued" : times.ended == 0 ? "running" : failed ? "failed" : "done";
  dump_printf(f, "%s\n{\"n\":%" PRId64 ",\"op\":\"%s\",\"graph\":%" PRId32 ",\"id\":%lld", separator, serial,
              dc_op_name(op), graph, id);
  if (name != NULL) {
    dump_printf(f, ",\"name\":");
    dump_string(f, name);
  }
  dump_printf(f, ",\"tensors\":%" PRId32, count);
  dump_printf(f,
              ",\"dtype\":\"%s\",\"bytes\":%lld,\"moved\":%lld,\"group\":\"%s\",\"seq\":%" PRIu32 ",\"stream\":\"%s\"",
              dc_dtype_name(kind >> 16), bytes, moved, groups[kind >> 8 & 255], seq, lanes[kind & 255]);
  dump_printf(f, ",\"state\":\"%s\",\"queued_ns\":%" PRId64 ",\"begin_ns\":%" PRId64 ",\"end_ns\":%" PRId64 "}", state,
              queued, times.begun, times.ended);
  return true;
}

static void dump_header(dump_file *f, const dc__recorder *r, const dc__clocks *c) {
  struct timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  char host[256] = "";
  (void)gethostname(host, sizeof host - 1);
  dump_printf(f, "{\"format\":\"libdc flight recorder\",\"version\":1,\"libdc\":\"%s\"", dc_version_string());
  dump_printf(f, ",\"rank\":%d,\"world\":%d,\"pid\":%ld,\"host\":", atomic_load(&r->rank), atomic_load(&r->world),
              (long)getpid());
  dump_string(f, host);
  dump_printf(f, ",\"transport\":\"%s\",\"time_ns\":%" PRId64 ",\"wall_ns\":%" PRId64, atomic_load(&r->transport),
              c->ns, (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec);
  dump_printf(f, ",\"status\":\"%s\",\"error\":", dc_status_name(r->failure.status));
  dump_string(f, r->failure.text);
}

/* The first serial in the ring if `last` is the latest. */
static int64_t first_kept(const dc__recorder *r, int64_t last) {
  return last > r->ring->capacity ? last - r->ring->capacity + 1 : 1;
}

/* With the recorder's mutex held. */
static void dump_all(dump_file *f, const dc__recorder *r) {
  const dc__clocks c = dc__recorder_clocks(r);
  int64_t last = atomic_load(&r->recorded);
  dump_header(f, r, &c);
  dump_printf(f, ",\"recorded\":%" PRId64 ",\"dropped\":%lld,\"entries\":[", last, (long long)atomic_load(&r->dropped));
  const char *separator = "";
  for (int64_t serial = first_kept(r, last); serial <= last; serial++) {
    if (dump_entry(f, r, &c, dc__ring_entry(r->ring, serial), serial, separator)) {
      separator = ",";
    }
  }
  dump_printf(f, "]}\n");
  dump_flush(f);
}

/* The file has another name until it is complete, so readers of the folder find all of it or nothing. */
static dc_status dump_write_file(const dc__recorder *r, const char *fn, const char *folder) {
  char path[PATH_BYTES];
  char part[PATH_BYTES];
  int rank = atomic_load(&r->rank);
  int n = snprintf(path, sizeof path, "%s/rank-%d.json", folder, rank);
  int m = snprintf(part, sizeof part, "%s/.rank-%d.%ld.%p.part", folder, rank, (long)getpid(), (const void *)r);
  if (n >= PATH_BYTES || m >= PATH_BYTES) {
    return dc__fail(DC_E_INVALID, "%s: folder has %zu bytes, at most %d are allowed", fn, strlen(folder),
                    PATH_BYTES - 96);
  }
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
    return dc__fail(DC_E_SYSTEM, "%s: folder %.400s can't be made: %s", fn, folder, strerror(errno));
  }
  dump_file f = {.fd = dc__above_streams(open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666))};
  if (f.fd < 0) {
    return dc__fail(DC_E_SYSTEM, "%s: no file can be written in folder %.400s: %s", fn, folder, strerror(errno));
  }
  dump_all(&f, r);
  if (f.error == 0 && fsync(f.fd) != 0 && errno != EINVAL && errno != EROFS) {
    f.error = errno;
  }
  if (close(f.fd) != 0 && f.error == 0) {
    f.error = errno;
  }
  if (f.error == 0 && rename(part, path) != 0) {
    f.error = errno;
  }
  if (f.error != 0) {
    (void)unlink(part);
    return dc__fail(DC_E_SYSTEM, "%s: %.400s can't be written: %s", fn, path, strerror(f.error));
  }
  return DC_OK;
}

dc_status dc__trace_dump(dc_context *ctx, const char *fn, const char *folder) {
  dc__recorder *r = ctx->recorder;
  if (atomic_load(&r->world) == 0) {
    return dc__fail(DC_E_STATE, "%s: the context has no rank yet; call dc_init first", fn);
  }
  pthread_mutex_lock(&r->mutex);
  dc_status status = dump_write_file(r, fn, folder);
  pthread_mutex_unlock(&r->mutex);
  return status;
}

/* ---- failures ---- */

dc_status dc__trace_dump_on_error(dc_context *ctx, const char *folder) {
  char *copy = NULL;
  if (folder != NULL) {
    copy = dc__strdup(folder);
    if (copy == NULL) {
      return DC_E_NO_MEMORY;
    }
  }
  pthread_mutex_lock(&ctx->recorder->mutex);
  char *old = ctx->recorder->folder;
  ctx->recorder->folder = copy;
  pthread_mutex_unlock(&ctx->recorder->mutex);
  dc__free(old);
  return DC_OK;
}

/* Errors that end the ranks' work together, as opposed to a wrong argument. */
static bool is_failure(dc_status status) {
  return status <= DC_E_MISMATCH;
}

/* With the recorder's mutex held, so that the ring is not replaced. */
static bool has_running_collective(const dc__recorder *r) {
  const dc__clocks c = dc__recorder_clocks(r);
  int64_t last = atomic_load(&r->recorded);
  for (int64_t serial = first_kept(r, last); serial <= last; serial++) {
    dc__recorder_entry *e = dc__ring_entry(r->ring, serial);
    const dc__span_interval times = dc__span_times(&e->span, &c);
    if ((atomic_load(&e->kind) >> 8 & 255) != DC__GROUP_NONE && times.begun != 0 && times.ended == 0) {
      return true;
    }
  }
  return false;
}

/* The caller may see a failure before the stream's thread has ended the collective that failed, which a dump would then
 * show as running. A collective that does not end within STUCK_NS is stuck, and is dumped as running. */
static void wait_for_failed_collective(const dc__recorder *r) {
  const struct timespec pause = {.tv_nsec = 100000};
  int64_t deadline = dc__now_ns() + STUCK_NS;
  while (has_running_collective(r) && dc__now_ns() < deadline) {
    nanosleep(&pause, NULL);
  }
}

void dc__recorder_set_failure(dc_context *ctx, dc_status status) {
  dc__recorder *r = ctx->recorder;
  if (!is_failure(status) || r->failure.status != DC_OK) { /* written under the context's mutex alone */
    return;
  }
  pthread_mutex_lock(&r->mutex);
  dc__failure_keep(&r->failure, status);
  bool dump = r->folder != NULL && atomic_load(&r->world) > 0;
  if (dump) {
    wait_for_failed_collective(r);
  }
  if (dump && dump_write_file(r, "dump", r->folder) != DC_OK) {
    dc__logf(ctx, DC_LOG_WARNING, "no dump of rank %" PRId32 ": %s", ctx->rank, dc_last_error());
  }
  (void)dc__failure_raise(&r->failure); /* restores the call's error, which the dump may have replaced */
  pthread_mutex_unlock(&r->mutex);
}
