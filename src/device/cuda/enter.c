/* What a thread has made current, and what it knows of it for as long as an operator lasts. */
#include "device/cuda/cuda.h"

enum { UNKNOWN = -1 };

static _Thread_local struct {
  dc__cuda_device *current; /* whose context this thread has pushed last; NULL: none */
  dc__cuda_device *kept;    /* that an operator keeps current from its first use on; NULL: none */
  int operators;            /* one in the other */
  dc__cuda_entry entry;     /* the kept one's, undone by the outermost operator's end */
  uint64_t asked;           /* a stream's serial, in this operator; 0: none */
  bool captures;            /* the answer */
} here;

dc__cuda_entry dc__cuda_enter(dc__cuda_device *device) {
  dc__cuda_entry entry = {NULL, here.current, DC__CU_CAPTURE_RELAXED};
  if (here.current == device || DC__CUDA_KEEP(device, cuCtxPushCurrent_v2, device->context) != DC_OK) {
    return entry; /* of nothing: what is current is not ours to take away */
  }
  if (device->driver.cuThreadExchangeStreamCaptureMode(&entry.mode) != 0) {
    entry.mode = UNKNOWN;
  }
  entry.device = here.current = device;
  if (here.kept == device && entry.outer == NULL) {
    here.entry = entry;
    entry.device = NULL;
  }
  return entry;
}

void dc__cuda_leave(dc__cuda_entry entry) {
  dc__cu_context ours;
  if (entry.device == NULL) {
    return;
  }
  if (entry.mode != UNKNOWN) {
    (void)entry.device->driver.cuThreadExchangeStreamCaptureMode(&entry.mode);
  }
  (void)entry.device->driver.cuCtxPopCurrent_v2(&ours);
  here.current = entry.outer;
}

void dc__cuda_begin(dc_device *device) {
  if (here.operators++ == 0) {
    here.kept = (dc__cuda_device *)device;
    here.asked = 0;
  }
}

void dc__cuda_pause(dc_device *device) {
  (void)device;
  dc__cuda_leave(here.entry);
  here.entry.device = NULL;
  here.asked = 0;
}

void dc__cuda_end(dc_device *device) {
  if (--here.operators == 0) {
    here.kept = NULL;
    dc__cuda_pause(device);
  }
}

/* ---- captures ---- */

/* No graph can be captured on the default stream, and asking it may be an error. A stream of ours nobody else knows:
 * only a wait for a captured mark takes it into a graph. And nobody begins or ends a capture while he is in an
 * operator. */
bool dc__cuda_is_capturing(dc__cuda_stream *stream) {
  const bool is_default = stream->native == NULL || (uintptr_t)stream->native == DC__CU_STREAM_LEGACY;
  if (is_default || (!stream->wrapped && !stream->joined)) {
    return false;
  }
  if (here.operators == 0 || here.asked != stream->serial) {
    int capturing = 0;
    (void)DC__CUDA_KEEP((dc__cuda_device *)stream->head.device, cuStreamIsCapturing, stream->native, &capturing);
    here.captures = capturing != 0;
    here.asked = stream->serial;
  }
  return here.captures;
}

void dc__cuda_joined(dc__cuda_stream *stream) {
  stream->joined = true;
  here.asked = 0;
}
