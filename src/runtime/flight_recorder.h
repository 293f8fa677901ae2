/* The flight recorder: what ran when, traces of it, and dumps to files. Part of runtime.h, which includes it. */
#ifndef DC_RUNTIME_FLIGHT_RECORDER_H
#define DC_RUNTIME_FLIGHT_RECORDER_H

#include "runtime/runtime.h"

/* ---- flight_recorder.c: the flight recorder, and traces out of it ---- */

/* Whose collectives an entry counts with: ranks that do the same have the same number for each. */
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
/* The context has its communicators now. */
void dc__recorder_set_group(dc_context *ctx);
/* Notes an operation that begins now; NULL: it could not be kept. The span is for the pieces of work it queues. */
dc__op_timing *dc__recorder_begin(dc_context *ctx, const dc__recorded_op *note);
/* After the last piece was queued: an operation that had nothing to do is done. */
void dc__recorder_submitted(dc__op_timing *span);
/* An operation that is the calling thread's own work, and its end. Returns status. */
dc__op_timing *dc__recorder_begin_call(dc_context *ctx, const dc__tag *tag, int64_t bytes);
dc_status dc__recorder_end_call(dc__op_timing *span, dc_status status);
/* dc__stream_copy() on the stream of a lane that was made, as an operation. */
void dc__recorded_copy(dc_context *ctx, const dc__tag *tag, int32_t lane, void *dst, const void *src, size_t bytes);
dc_status dc__trace_start(dc_context *ctx, int64_t capacity);
int64_t dc__trace_read(dc_context *ctx, char *events, size_t event_size, int64_t cap);

/* ---- flight_recorder_dump.c ---- */

/* Writes what is recorded to folder/rank-R.json, without the context's mutex. */
dc_status dc__trace_dump(dc_context *ctx, const char *fn, const char *folder);
dc_status dc__trace_dump_on_error(dc_context *ctx, const char *folder);
/* Of a call's status: keeps the first failure of the ranks' work, and dumps where the caller wants it. This thread's
 * last error stays. */
void dc__recorder_set_failure(dc_context *ctx, dc_status status);

#endif
