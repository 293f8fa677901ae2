/* What ran when: a ring of events, written in stream order with the times at which the work really began and ended. */
#include <string.h>

#include "runtime/runtime.h"

struct dc__trace {
  pthread_mutex_t mutex; /* streams write while callers read */
  int64_t capacity;
  int64_t begun;  /* marks given out, ever */
  int64_t oldest; /* first mark not yet read */
  dc_trace_event events[];
};

dc_status dc__trace_start(dc_context *ctx, int64_t capacity) {
  DC__TRY(dc__drain(ctx)); /* streams hold pointers to the old trace */
  dc__trace_free(ctx);
  if (capacity == 0) {
    return DC_OK;
  }
  dc__trace *trace = dc__calloc(1, sizeof *trace + (size_t)capacity * sizeof(dc_trace_event));
  if (trace == NULL) {
    return DC_E_NO_MEMORY;
  }
  pthread_mutex_init(&trace->mutex, NULL);
  trace->capacity = capacity;
  ctx->trace = trace;
  return DC_OK;
}

void dc__trace_free(dc_context *ctx) {
  if (ctx->trace != NULL) {
    pthread_mutex_destroy(&ctx->trace->mutex);
    dc__free(ctx->trace);
    ctx->trace = NULL;
  }
}

typedef struct mark_args {
  dc__trace *trace;
  int64_t mark;
  int64_t bytes;
  bool end;
} mark_args;

static void mark_task(void *arg) {
  mark_args *a = arg;
  dc__trace *trace = a->trace;
  pthread_mutex_lock(&trace->mutex);
  if (trace->begun - a->mark <= trace->capacity) { /* its place was not taken by a later one */
    dc_trace_event *event = &trace->events[a->mark % trace->capacity];
    if (a->end) {
      event->bytes = a->bytes;
      event->end_ns = dc__now_ns();
    } else {
      event->begin_ns = dc__now_ns();
    }
  }
  pthread_mutex_unlock(&trace->mutex);
}

int64_t dc__trace_begin(dc_context *ctx, dc_stream *stream, int32_t lane, const dc__tag *tag) {
  dc__trace *trace = ctx->trace;
  if (trace == NULL) {
    return -1;
  }
  pthread_mutex_lock(&trace->mutex);
  int64_t mark = trace->begun++;
  if (trace->begun - trace->oldest > trace->capacity) {
    trace->oldest = trace->begun - trace->capacity;
  }
  trace->events[mark % trace->capacity] =
      (dc_trace_event){.graph_id = tag->graph_id, .id = tag->id, .op = tag->op, .lane = lane};
  pthread_mutex_unlock(&trace->mutex);
  mark_args args = {trace, mark, 0, false};
  dc__stream_call(stream, mark_task, &args, sizeof args);
  return mark;
}

void dc__trace_end(dc_context *ctx, dc_stream *stream, int64_t mark, int64_t bytes) {
  if (mark >= 0 && ctx->trace != NULL) {
    mark_args args = {ctx->trace, mark, bytes, true};
    dc__stream_call(stream, mark_task, &args, sizeof args);
  }
}

int64_t dc__trace_read(dc_context *ctx, char *events, size_t event_size, int64_t cap) {
  dc__trace *trace = ctx->trace;
  int64_t count = 0;
  if (trace == NULL) {
    return 0;
  }
  pthread_mutex_lock(&trace->mutex);
  /* An event that has not ended holds back those after it, so that none is lost. */
  while (count < cap && trace->oldest < trace->begun && trace->events[trace->oldest % trace->capacity].end_ns != 0) {
    const dc_trace_event *event = &trace->events[trace->oldest % trace->capacity];
    memcpy(events + (size_t)count * event_size, event, event_size < sizeof *event ? event_size : sizeof *event);
    trace->oldest++;
    count++;
  }
  pthread_mutex_unlock(&trace->mutex);
  return count;
}
