/* Timestamps of the flight recorder. They are the driver's events, since a host function would stall the stream, and
 * are read on demand. */
#include "device/cuda/cuda.h"

enum { EPOCH_MS = 8000 }; /* a float of this many milliseconds still resolves half a microsecond */

static dc__cuda_device *timestamp_device(const dc__timestamp *stamp) {
  return (dc__cuda_device *)stamp->device;
}

/* ---- allocation ---- */

static dc__cuda_timestamp *timestamp_alloc(dc__cuda_device *device) {
  pthread_mutex_lock(&device->mutex);
  dc__cuda_timestamp *s = device->free_timestamps;
  if (s != NULL) {
    device->free_timestamps = s->next;
  }
  pthread_mutex_unlock(&device->mutex);
  if (s != NULL) {
    return s;
  }
  s = dc__calloc(1, sizeof *s);
  if (s == NULL) {
    return NULL;
  }
  s->head.device = &device->head;
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  dc__cu_result error = device->driver.cuEventCreate(&s->native, DC__CU_EVENT_BLOCKING_SYNC);
  dc__cuda_context_leave(entry);
  if (error != 0) {
    (void)dc__cuda_return_error(device, "cuEventCreate", error);
    dc__free(s);
    return NULL;
  }
  return s;
}

void dc__cuda_timestamp_release(dc__timestamp *stamp) {
  dc__cuda_timestamp *s = (dc__cuda_timestamp *)stamp;
  if (s == NULL || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  dc__cuda_device *device = timestamp_device(stamp);
  pthread_mutex_lock(&device->mutex);
  s->next = device->free_timestamps;
  device->free_timestamps = s;
  pthread_mutex_unlock(&device->mutex);
}

/* Called with the device entered. */
void dc__cuda_timestamps_free(dc__cuda_device *device) {
  while (device->free_timestamps != NULL) {
    dc__cuda_timestamp *next = device->free_timestamps->next;
    (void)device->driver.cuEventDestroy_v2(device->free_timestamps->native);
    dc__free(device->free_timestamps);
    device->free_timestamps = next;
  }
  for (int32_t i = 0; i < DC__CUDA_EPOCHS; i++) {
    if (device->epochs[i].native != NULL) {
      (void)device->driver.cuEventDestroy_v2(device->epochs[i].native);
    }
  }
}

/* ---- recording ---- */

/* Begins a new epoch if the latest is too old. Called with the mutex held and the device entered. Returns the driver's
 * error. */
static dc__cu_result ensure_epoch(dc__cuda_device *device, int64_t now) {
  if (device->epoch != 0 && now - device->epochs[device->epoch % DC__CUDA_EPOCHS].ns < EPOCH_MS * INT64_C(1000000)) {
    return 0;
  }
  dc__cuda_epoch *next = &device->epochs[(device->epoch + 1) % DC__CUDA_EPOCHS];
  dc__cu_result error =
      next->native != NULL ? 0 : device->driver.cuEventCreate(&next->native, DC__CU_EVENT_BLOCKING_SYNC);
  error = error != 0 ? error : device->driver.cuEventRecord(next->native, device->alloc_stream);
  if (error == 0) {
    next->ns = now;
    next->passed = false;
    device->epoch++;
  }
  return error;
}

/* A graph would record the event at each run. So in a capture, and if the driver refuses, the host's time is taken. */
static void issue_timestamp(dc__cuda_stream *stream, void *args) {
  dc__cuda_timestamp *s = *(dc__cuda_timestamp **)args;
  dc__cuda_device *device = timestamp_device(&s->head);
  bool captures = dc__cuda_is_capturing(stream);
  int64_t now = dc__now_ns();
  pthread_mutex_lock(&device->mutex);
  dc__cu_result error = captures ? 0 : ensure_epoch(device, now);
  error = captures || error != 0 ? error : device->driver.cuEventRecord(s->native, stream->native);
  s->ns = now;
  s->epoch = device->epoch;
  atomic_store(&s->state, captures || error != 0 ? DC__EVENT_PASSED : DC__EVENT_ISSUED);
  pthread_mutex_unlock(&device->mutex);
  if (error != 0) {
    (void)dc__cuda_return_error(device, "cuEventRecord", error);
  }
  dc__cuda_timestamp_release(&s->head);
}

dc__timestamp *dc__cuda_stream_timestamp(dc_stream *stream) {
  dc__cuda_timestamp *s = timestamp_alloc((dc__cuda_device *)stream->device);
  if (s == NULL) {
    return NULL;
  }
  atomic_store(&s->refs, 2); /* references of the caller and of the record */
  atomic_store(&s->state, DC__EVENT_QUEUED);
  if (dc__cuda_submit((dc__cuda_stream *)stream, issue_timestamp, &s, sizeof s, false) != DC_OK) {
    dc__cuda_timestamp_release(&s->head);
    dc__cuda_timestamp_release(&s->head);
    return NULL;
  }
  return &s->head;
}

/* ---- reading ---- */

/* Returns the stamp's time, or 0 if it has not passed. Called with the device entered, and with the mutex held, since
 * its epoch may be recorded anew at any time. The epoch's event is on another stream, and may pass later than the
 * stamp. A stamp that was not ready is not queried again: it could pass in between, and would get its time of issue. */
static int64_t timestamp_read(dc__cuda_device *device, dc__cuda_timestamp *s) {
  dc__cuda_epoch *epoch = &device->epochs[s->epoch % DC__CUDA_EPOCHS];
  const bool current = s->epoch + DC__CUDA_EPOCHS > device->epoch;
  float milliseconds = 0;
  epoch->passed = epoch->passed || (current && device->driver.cuEventQuery(epoch->native) == 0);
  if (current && epoch->passed) {
    dc__cu_result error = device->driver.cuEventElapsedTime(&milliseconds, epoch->native, s->native);
    if (error == 0 || error == DC__CU_NOT_READY) {
      return error == 0 ? epoch->ns + (int64_t)((double)milliseconds * 1e6) : 0;
    }
  }
  return device->driver.cuEventQuery(s->native) == 0 ? s->ns : 0; /* without its epoch: its time of issue is close */
}

int64_t dc__cuda_timestamp_ns(dc__timestamp *stamp) {
  dc__cuda_timestamp *s = (dc__cuda_timestamp *)stamp;
  dc__cuda_device *device = timestamp_device(stamp);
  dc__cuda_context_guard entry = dc__cuda_context_enter(device);
  pthread_mutex_lock(&device->mutex);
  int state = atomic_load(&s->state);
  int64_t ns = state == DC__EVENT_ISSUED ? timestamp_read(device, s) : state == DC__EVENT_PASSED ? s->ns : 0;
  pthread_mutex_unlock(&device->mutex);
  dc__cuda_context_leave(entry);
  return ns;
}
