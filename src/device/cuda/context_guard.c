/* A thread's current context, and the state that it keeps during an operator. */
#include "device/cuda/cuda.h"

enum { UNKNOWN = -1 };

static _Thread_local struct {
  dc__cuda_device *current;         /* the device whose context this thread pushed last; NULL if none */
  dc__cuda_device *operator_device; /* the device that an operator keeps current from its first use on; NULL if none */
  int operators;                    /* nested operators */
  dc__cuda_context_guard entry;     /* the guard of operator_device, undone by the outermost operator's end */
  uint64_t capture_stream;          /* serial of the stream last queried in this operator; 0 if none */
  bool is_capturing;                /* the query's result */
} thread_state;

dc__cuda_context_guard dc__cuda_context_enter(dc__cuda_device *device) {
  dc__cuda_context_guard entry = {NULL, thread_state.current, DC__CU_CAPTURE_RELAXED};
  if (thread_state.current == device || DC__CUDA_KEEP(device, cuCtxPushCurrent_v2, device->context) != DC_OK) {
    return entry; /* nothing was pushed, so nothing may be popped */
  }
  if (device->driver.cuThreadExchangeStreamCaptureMode(&entry.mode) != 0) {
    entry.mode = UNKNOWN;
  }
  entry.device = thread_state.current = device;
  if (thread_state.operator_device == device && entry.outer == NULL) {
    thread_state.entry = entry;
    entry.device = NULL;
  }
  return entry;
}

void dc__cuda_context_leave(dc__cuda_context_guard entry) {
  dc__cu_context ours;
  if (entry.device == NULL) {
    return;
  }
  if (entry.mode != UNKNOWN) {
    (void)entry.device->driver.cuThreadExchangeStreamCaptureMode(&entry.mode);
  }
  (void)entry.device->driver.cuCtxPopCurrent_v2(&ours);
  thread_state.current = entry.outer;
}

void dc__cuda_device_begin(dc_device *device) {
  if (thread_state.operators++ == 0) {
    thread_state.operator_device = (dc__cuda_device *)device;
    thread_state.capture_stream = 0;
  }
}

void dc__cuda_device_pause(dc_device *device) {
  (void)device;
  dc__cuda_context_leave(thread_state.entry);
  thread_state.entry.device = NULL;
  thread_state.capture_stream = 0;
}

void dc__cuda_device_end(dc_device *device) {
  if (--thread_state.operators == 0) {
    thread_state.operator_device = NULL;
    dc__cuda_device_pause(device);
  }
}

/* ---- captures ---- */

/* No graph can be captured on the default stream, and a query of it may be an error. Other code does not know the
 * library's own streams, so one becomes part of a graph only by a wait for a captured point. No thread begins or ends a
 * capture within an operator. */
bool dc__cuda_is_capturing(dc__cuda_stream *stream) {
  const bool is_default = stream->native == NULL || (uintptr_t)stream->native == DC__CU_STREAM_LEGACY;
  if (is_default || (!stream->is_foreign && !stream->joined_capture)) {
    return false;
  }
  if (thread_state.operators == 0 || thread_state.capture_stream != stream->serial) {
    int capturing = 0;
    (void)DC__CUDA_KEEP((dc__cuda_device *)stream->head.device, cuStreamIsCapturing, stream->native, &capturing);
    thread_state.is_capturing = capturing != 0;
    thread_state.capture_stream = stream->serial;
  }
  return thread_state.is_capturing;
}

void dc__cuda_join_capture(dc__cuda_stream *stream) {
  stream->joined_capture = true;
  thread_state.capture_stream = 0;
}

bool dc__cuda_is_capture_spoiled(dc__cuda_stream *stream) {
  const dc__cuda_device *device = (dc__cuda_device *)stream->head.device;
  int status = 0;
  return dc__cuda_is_capturing(stream) && device->driver.cuStreamIsCapturing(stream->native, &status) == 0 &&
         status == DC__CU_STATUS_INVALIDATED;
}
