/* Queues blocking collectives on streams, and names them in error texts. */
#include "comm/host_transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(dc__coll) <= DC__LAUNCH_BYTES, "a group of collectives must fit into what a stream issues");

static void begin_timing_task(void *arg) {
  dc__op_timing *span;
  memcpy(&span, arg, sizeof span);
  dc__op_timing_begin(span);
}

static void end_timing_task(void *arg) {
  dc__op_timing *span;
  memcpy(&span, arg, sizeof span);
  dc__op_timing_end(span, false);
}

static bool has_timestamps(const dc_stream *stream) {
  return stream != NULL && stream->device->ops->stream_timestamp != NULL;
}

void dc__op_timing_begin_on(dc__op_timing *span, dc_stream *stream) {
  if (span == NULL) {
    return;
  }
  dc__op_timing_expect(span);
  if (!has_timestamps(stream)) {
    dc__stream_call(stream, begin_timing_task, &span, sizeof span);
  } else if (atomic_load(&span->first) == NULL && atomic_load(&span->begun) == 0) {
    dc__timestamp *timestamp = stream->device->ops->stream_timestamp(stream);
    atomic_store(&span->first, timestamp);
    if (timestamp == NULL) {
      dc__op_timing_begin(span);
    }
  }
}

void dc__op_timing_end_on(dc__op_timing *span, dc_stream *stream) {
  if (span == NULL) {
    return;
  }
  if (!has_timestamps(stream)) {
    dc__stream_call(stream, end_timing_task, &span, sizeof span);
    return;
  }
  dc__timestamp *timestamp = stream->device->ops->stream_timestamp(stream);
  if (timestamp != NULL) {
    dc__timestamp *before = atomic_exchange(&span->last, timestamp);
    if (before != NULL) {
      stream->device->ops->timestamp_release(before);
    }
  }
  dc__op_timing_end(span, false); /* the host's part, which counts if the device gave no timestamp */
}

/* A rank whose device failed aborts the group: its data may never have been computed. */
static bool check_runnable(dc_comm *comm, const dc__coll *coll) {
  if (dc__comm_check(comm) != DC_OK) {
    return false;
  }
  if (coll->device == NULL || dc__device_check(coll->device) == DC_OK) {
    return true;
  }
  comm->ops->abort(comm, dc_last_error());
  return false;
}

bool dc__host_is_stream_ordered(const dc_comm *comm, const dc_stream *stream) {
  return comm->stream_ordered && stream != NULL && stream->device->memory_space != 0;
}

/* Drops the reference of submit_collective(), which kept the communicator alive while the collective was queued. Issued
 * work is timed on the stream (dc__op_timing_begin_on); the timing here is the host's part. */
static void run_collective_task(void *args) {
  const dc__coll *coll = args;
  dc_comm *comm = coll->comm;
  bool runs = check_runnable(comm, coll);
  if (coll->stream == NULL || !runs) {
    dc__op_timing_begin(coll->tag.span);
  }
  if (runs) {
    comm->ops->run(comm, coll);
  }
  dc__op_timing_end(coll->tag.span, atomic_load_explicit(&comm->failed, memory_order_acquire) != 0);
  dc__comm_release(comm);
}

static void run_issued_task(void *native, void *args) {
  (void)native;
  run_collective_task(args);
}

/* A single rank waits for no peer and needs no other thread. If the stream has no memory for the call, the abort keeps
 * peers from waiting for this rank. */
static void launch_collective(dc_comm *comm, dc_stream *stream, const dc__coll *coll, size_t bytes) {
  dc_status status = coll->stream != NULL
                         ? stream->device->ops->stream_issue(stream, run_issued_task, coll, bytes, comm->world > 1)
                         : dc__stream_try_call(stream, run_collective_task, coll, bytes);
  if (status != DC_OK) {
    comm->ops->abort(comm, dc_last_error());
    dc__op_timing_begin(coll->tag.span);
    dc__op_timing_end(coll->tag.span, true);
    dc__comm_release(comm);
  }
}

static void submit_collective(dc_comm *comm, dc_stream *stream, dc__coll *coll, const dc__coll_item *items) {
  coll->comm = dc__comm_retain(comm);
  coll->device = stream == NULL ? NULL : stream->device;
  coll->stream = dc__host_is_stream_ordered(comm, stream) ? stream : NULL;
  coll->captured = dc__stream_captures(coll->stream);
  if (coll->tag.number == 0) { /* dc__comm_all_reduce() has counted its two collectives */
    coll->tag.number = dc__comm_number(comm, 1);
    dc__comm_note_request(comm, 1);
  }
  dc__op_timing_expect(coll->tag.span);
  size_t bytes = (size_t)coll->count * sizeof *items;
  memmove(coll->items, items, bytes);
  launch_collective(comm, stream, coll, offsetof(dc__coll, items) + bytes);
}

typedef struct host_func {
  dc__task_fn fn;
  _Alignas(max_align_t) unsigned char args[DC__HOST_FUNC_BYTES];
} host_func;

static void run_host_func(void *native, void *args) {
  host_func *b = args;
  (void)native;
  b->fn(b->args);
}

dc_status dc__host_launch_func(dc_comm *comm, dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes) {
  host_func b = {.fn = fn};
  memcpy(b.args, args, bytes);
  return dc__host_is_stream_ordered(comm, stream)
             ? stream->device->ops->stream_issue(stream, run_host_func, &b, sizeof b, comm->world > 1)
             : dc__stream_try_call(stream, fn, args, bytes);
}

void dc__host_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int32_t count) {
  dc__coll coll = {.tag = *tag, .kind = DC__COLL_GATHER, .count = count};
  submit_collective(comm, stream, &coll, items);
}

void dc__host_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                             int32_t count) {
  dc__coll coll = {.tag = *tag, .kind = DC__COLL_REDUCE, .count = count};
  submit_collective(comm, stream, &coll, items);
}

void dc__host_broadcast(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root) {
  dc__coll coll = {.tag = *tag, .kind = DC__COLL_BROADCAST, .count = 1, .root = root};
  const dc__coll_item item = {
      .send = comm->rank == root ? data : NULL, .recv = data, .total = (int64_t)bytes, .id = tag->id, .dtype = DC_INT8};
  submit_collective(comm, stream, &coll, &item);
}

void dc__host_all_to_all(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *item,
                         int32_t root) {
  dc__coll coll = {.tag = *tag, .kind = DC__COLL_ALL_TO_ALL, .count = 1, .root = root};
  submit_collective(comm, stream, &coll, item);
}

void dc__host_barrier(dc_comm *comm, const dc__tag *tag) {
  dc__coll coll = {.tag = *tag, .kind = DC__COLL_BARRIER};
  submit_collective(comm, NULL, &coll, coll.items);
}

/* FNV-1a over 64-bit words. */
uint64_t dc__coll_ranges_hash(const dc__coll_item *item, int32_t world) {
  uint64_t hash = UINT64_C(14695981039346656037);
  for (int32_t r = 0; r < world && item->ranges != NULL; r++) {
    hash = (hash ^ (uint64_t)item->ranges[r].begin) * UINT64_C(1099511628211);
    hash = (hash ^ (uint64_t)item->ranges[r].count) * UINT64_C(1099511628211);
  }
  return hash;
}

void dc__coll_describe_op(char text[DC__COLL_TEXT], int32_t op, int64_t id) {
  if (id < 0) {
    snprintf(text, DC__COLL_TEXT, "%s", dc_op_name(op));
  } else {
    snprintf(text, DC__COLL_TEXT, "%s of parameter %" PRId64, dc_op_name(op), id);
  }
}

dc_status dc__coll_fail_capture_mismatch(int32_t captures, const dc__tag *captured, int32_t other,
                                         const dc__tag *plain) {
  char captured_text[DC__COLL_TEXT];
  char plain_text[DC__COLL_TEXT];
  dc__coll_describe_op(captured_text, captured->op, captured->id);
  dc__coll_describe_op(plain_text, plain->op, plain->id);
  return dc__fail(DC_E_MISMATCH,
                  "rank %" PRId32 " captured %s into a CUDA graph where rank %" PRId32
                  " called %s and captured nothing; all ranks must capture a step, or none",
                  captures, captured_text, other, plain_text);
}

dc_status dc__coll_fail_counts(const dc__coll *coll, int32_t from, int64_t sent, int32_t to, int64_t expected) {
  return dc__fail(DC_E_MISMATCH,
                  "%s: rank %" PRId32 " sends %" PRId64 " element%s to rank %" PRId32 ", which expects %" PRId64,
                  dc_op_name(coll->tag.op), coll->first + from, sent, DC__PLURAL_S(sent), coll->first + to, expected);
}

void dc__coll_list_counts(const dc__coll *coll, int32_t world, int64_t *row) {
  for (int32_t i = 0; i < 2 * world; i++) {
    row[i] = coll->items[0].ranges[i].count;
  }
}

dc_status dc__coll_compare_counts(const dc__coll *coll, int32_t world, const int64_t *rows) {
  const int64_t length = 2 * (int64_t)world;
  for (int32_t from = 0; from < world; from++) {
    for (int32_t to = 0; to < world; to++) {
      const int64_t sent = rows[from * length + to], expected = rows[to * length + world + from];
      if (sent != expected) {
        return dc__coll_fail_counts(coll, from, sent, to, expected);
      }
    }
  }
  return DC_OK;
}

void dc__coll_describe(char text[DC__COLL_TEXT], const dc__coll_name *name) {
  dc__coll_describe_op(text, name->op, name->id);
  size_t used = strlen(text);
  if (name->graph_id != DC__COLL_NO_GRAPH) {
    used += (size_t)snprintf(text + used, DC__COLL_TEXT - used, " in graph %" PRId64, name->graph_id);
  }
  if (name->kind == DC__COLL_BROADCAST) {
    snprintf(text + used, DC__COLL_TEXT - used, " (%" PRId64 " byte%s from rank %" PRId32 ")", name->total,
             DC__PLURAL_S(name->total), name->root);
  } else if (name->kind == DC__COLL_ALL_TO_ALL) { /* sizes may differ from rank to rank */
    char root[24] = "";
    if (name->op != DC_OP_COMM_ALL_TO_ALL) {
      snprintf(root, sizeof root, ", root %" PRId32, name->root);
    }
    snprintf(text + used, DC__COLL_TEXT - used, " (%s%s)", dc_dtype_name(name->dtype), root);
  } else if (name->kind != DC__COLL_BARRIER) {
    char tensors[40] = "";
    if (name->count > 1) {
      snprintf(tensors, sizeof tensors, ", one of %" PRId32 " tensors", name->count);
    }
    const char *op = name->kind != DC__COLL_REDUCE ? "" : name->reduce_op == DC_MEAN ? ", mean" : ", sum";
    snprintf(text + used, DC__COLL_TEXT - used, " (%" PRId64 " element%s, %s%s%s)", name->total,
             DC__PLURAL_S(name->total), dc_dtype_name(name->dtype), op, tensors);
  }
}
