/* Steps on a device: kernels update whole parameters, a few per launch, in stream order. */
#include "optim/optim_internal.h"

bool dc__optim_is_cuda(const dc_optimizer *o) {
  return o->linalg->device->memory_space != 0;
}

static dc_status check_alignment(const char *fn, const char *arg, int64_t i, const void *data, int32_t dtype) {
  return (uintptr_t)data % dc_dtype_size(dtype) == 0
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: %s[%" PRId64 "].data = %p, must be a multiple of %zu", fn, arg, i, data,
                        dc_dtype_size(dtype));
}

dc_status dc__optim_check_alignment(const dc_optimizer *o, const char *fn) {
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_io *io = &o->io[i];
    if (io->grad_dtype != DC_DTYPE_NONE && o->params[i].count > 0) {
      DC__TRY(check_alignment(fn, "weights", i, io->weight, o->params[i].dtype));
      DC__TRY(check_alignment(fn, "grads", i, io->grad, io->grad_dtype));
    }
  }
  return DC_OK;
}

static void update_launch_batch(dc_stream *on, int32_t kind, dc__update_batch *batch) {
  if (batch->spans_used > 0) {
    dc__update_cuda(on, kind, batch);
    batch->spans_used = 0;
  }
}

void dc__optim_fill_span(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *span) {
  const dc__optim_io *io = &o->io[p - o->params];
  span->weight = io->weight;
  span->grad = io->grad;
  span->master = p->master;
  span->count = p->count;
  span->index = p - o->params;
  span->dtype = p->dtype;
  span->grad_dtype = io->grad_dtype;
}

void dc__optim_launch_param(const dc_optimizer *o, int32_t kind, const dc__optim_param *p, dc__update_batch *batch) {
  batch->spans_used = 1;
  batch->grad_scale = (float)o->grad_scale;
  dc__optim_fill_span(o, p, &batch->spans[0]);
  update_launch_batch(o->linalg->stream, kind, batch);
}

void dc__optim_launch_spans(const dc_optimizer *o, dc_stream *on, int32_t kind, dc__update_batch *batch,
                            dc__optim_span_fn fn) {
  batch->spans_used = 0;
  batch->grad_scale = (float)o->grad_scale;
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    dc__update_span span = {0};
    dc__optim_fill_span(o, p, &span);
    if (span.grad_dtype != DC_DTYPE_NONE && p->count > 0 && fn(o, p, &span)) {
      batch->spans[batch->spans_used++] = span;
    }
    if (batch->spans_used == DC__UPDATE_SPANS) {
      update_launch_batch(on, kind, batch);
    }
  }
  update_launch_batch(on, kind, batch);
}

static bool span_is_checked(const dc_optimizer *o, const dc__optim_param *p, dc__update_span *span) {
  (void)span;
  return o->groups[p->group].check_finite;
}

void dc__optim_scan_nonfinite_cuda(const dc_optimizer *o, dc_stream *on, const float *scale) {
  dc__update_batch batch = {
      .exponent = o->kind->exponent, .indices = o->count, .found = &o->device_state->found, .scale = scale};
  if (scale == NULL) { /* otherwise dc__optim_read_grad_scaler_cuda() has done so */
    dc__stream_zero(on, &o->device_state->found, sizeof o->device_state->found);
  }
  dc__optim_launch_spans(o, on, DC__UPDATE_SCAN_OVERFLOW, &batch, span_is_checked);
}

dc_status dc__optim_first_nonfinite_cuda(const dc_optimizer *o, int64_t *index) {
  dc_device *device = o->linalg->device;
  uint64_t found = 0;
  dc__stream_copy(device->internal_stream, &found, &o->device_state->found, sizeof found);
  dc__device_sync_internal(device, NULL);
  *index = found == DC__UPDATE_FOUND_INF ? INT64_MAX : o->count - (int64_t)found;
  return dc__device_check(device);
}
