/* The flight recorder: a record of recent operations, its traces and dumps. runtime.h includes this file. */
#ifndef DC_RUNTIME_FLIGHT_RECORDER_H
#define DC_RUNTIME_FLIGHT_RECORDER_H

#include "runtime/runtime.h"

/* ---- flight_recorder.c: recording, and traces ---- */

/* The group in which an entry's collective is numbered. Ranks in step give the same collective the same number. */
enum { DC__GROUP_NONE, DC__GROUP_GATHER, DC__GROUP_REDUCE, DC__GROUPS };

typedef struct dc__recorded_op {
  const dc__tag *tag;
  int32_t lane;
  int32_t group;
  int32_t dtype; /* of the first tensor */
  int32_t count; /* tensors */
  int64_t bytes; /* of the whole tensors: the same on every rank */
  int64_t moved; /* to or from this rank */
} dc__recorded_op;

dc_status dc__recorder_create(dc_context *ctx);
void dc__recorder_free(dc_context *ctx);
/* Stores rank, world and transport, once the context has its communicators. */
void dc__recorder_set_group(dc_context *ctx);
/* Records an operation that begins now. Returns the span for the work that it queues; NULL if no entry is free. */
dc__op_timing *dc__recorder_begin(dc_context *ctx, const dc__recorded_op *note);
/* Call after the last piece of work is queued: ends the span of an operation that had nothing to do. */
void dc__recorder_submitted(dc__op_timing *span);
/* Begin and end of an operation that the calling thread does itself. The second returns `status`. */
dc__op_timing *dc__recorder_begin_call(dc_context *ctx, const dc__tag *tag, int64_t bytes);
dc_status dc__recorder_end_call(dc__op_timing *span, dc_status status);
/* dc__stream_copy() on the stream of a lane, which must exist, recorded as an operation. */
void dc__recorded_copy(dc_context *ctx, const dc__tag *tag, int32_t lane, void *dst, const void *src, size_t bytes);
dc_status dc__trace_start(dc_context *ctx, int64_t capacity);
int64_t dc__trace_read(dc_context *ctx, char *events, size_t event_size, int64_t cap);

/* ---- flight_recorder_dump.c ---- */

/* Writes the record to folder/rank-R.json, without the context's mutex. */
dc_status dc__trace_dump(dc_context *ctx, const char *fn, const char *folder);
dc_status dc__trace_dump_on_error(dc_context *ctx, const char *folder);
/* If a call's status is the first failure of the ranks' common work, keeps it, and dumps if the caller set a folder.
 * This thread's last error stays. */
void dc__recorder_set_failure(dc_context *ctx, dc_status status);

#endif
