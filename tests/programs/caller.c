/* Accesses to memory that the caller itself makes, on its stream or on the host. */
#include <stdarg.h>

#include "program.h"

struct touch {
  rank *r;
  atomic_int *failed;
  void *data;
  const char *what;
  int64_t count;
  int32_t dtype;
  bool write;
  double values[];
};

void program_fail(atomic_int *failed, rank *r, const char *format, ...) {
  int none = 0;
  if (!atomic_compare_exchange_strong(failed, &none, 1)) {
    return; /* only the first failure is the cause */
  }
  int used = snprintf(r->failure, sizeof r->failure, "rank %d of %d: ", r->rank, r->world);
  va_list args;
  va_start(args, format);
  vsnprintf(r->failure + used, sizeof r->failure - (size_t)used, format, args);
  va_end(args);
  atomic_store(failed, 2);
}

touch *new_touch(program *p, const void *data, int64_t count, int32_t dtype, bool write, const char *what) {
  touch *t = calloc(1, sizeof *t + (size_t)count * sizeof *t->values);
  *t = (touch){.r = p->r,
               .failed = p->failed,
               .data = (void *)(uintptr_t)data,
               .what = what,
               .count = count,
               .dtype = dtype,
               .write = write};
  return t;
}

double *touch_values(touch *t) {
  return t->values;
}

static void compare(const touch *t) {
  double found[256];
  for (int64_t begin = 0; begin < t->count; begin += 256) {
    int64_t count = t->count - begin < 256 ? t->count - begin : 256;
    ground_cast(found, DC_FLOAT64, (const char *)t->data + (size_t)begin * dc_dtype_size(t->dtype), t->dtype, count);
    for (int64_t i = 0; i < count; i++) {
      if (found[i] != t->values[begin + i]) {
        program_fail(t->failed, t->r, "%s: element %" PRId64 " of %" PRId64 " (%s) is %g, must be %g", t->what,
                     begin + i, t->count, dc_dtype_name(t->dtype), found[i], t->values[begin + i]);
        return;
      }
    }
  }
}

static void run_touch(void *arg) {
  touch *t = arg;
  size_t bytes = (size_t)t->count * dc_dtype_size(t->dtype);
  if (t->write) {
    ground_writes(t->data, bytes, t->what);
    ground_cast(t->data, t->dtype, t->values, DC_FLOAT64, t->count);
  } else {
    ground_reads(t->data, bytes, t->what);
    compare(t);
  }
  free(t);
}

void on_caller(program *p, touch *t) {
  if (p->caller == NULL) {
    run_touch(t);
  } else if (dc_stream_call(p->caller, run_touch, t) != DC_OK) {
    program_fail(p->failed, p->r, "dc_stream_call: %s", dc_last_error());
    free(t);
  }
}

void sync_caller(program *p) {
  if (p->caller != NULL) {
    OK(p, dc_stream_synchronize(p->caller, 0));
  }
}

/* ---- bytes ---- */

int64_t wire_bytes(const program *p, bool of_gathers) {
  dc_memory_stats stats = DC_MEMORY_STATS_INIT;
  return dc_context_get_memory_stats(p->ctx, &stats) != DC_OK ? -1
         : of_gathers                                         ? stats.gather_wire_bytes
                                                              : stats.reduce_wire_bytes;
}

int64_t dry_bytes(const program *p, int32_t op, int64_t graph, int64_t id, int32_t dtype) {
  dc_op_info info = DC_OP_INFO_INIT;
  return dc_context_dry_run(p->ctx, op, graph, id, dtype, &info) == DC_OK ? info.wire_bytes : -1;
}
