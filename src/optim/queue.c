/* Steps on the caller's stream. On a device with memory of its own AdamW's and SGD's are kernels that the stream does
 * in its turn, and the host waits for nothing: what it would look at, a gradient that is not finite, the number of the
 * step, the learning rate, is in the device's memory, where kernels look at it. So a launch of a graph into which a
 * step was captured is a step like any other. On the CPU a step is one task of the stream, which uses the handle: the
 * next call waits for it. */
#include "optim/inside.h"

bool dc__optim_counts_there(const dc_optimizer *o) {
  return o->kind->queue != NULL && dc__optim_is_there(o);
}

/* ---- streams ---- */

dc_status dc__optim_set_stream(dc_optimizer *o, const char *fn, dc_stream *stream) {
  dc_device *device = o->linalg->device;
  if (stream != NULL && stream->device->place != device->place) {
    return dc__fail(DC_E_INVALID, "%s: stream is of device \"%s\", must be of the optimizer's, \"%s\"", fn,
                    stream->device->name, device->name);
  }
  if (stream == o->stream) {
    return DC_OK;
  }
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE, "%s: the stream set before is captured into a CUDA graph; end the capture first", fn);
  }
  if (o->done == NULL) {
    DC__TRY(device->ops->event_create(device, &o->done));
  }
  dc__event_wait(o->done, dc__stream_or_here(device, stream));
  o->stream = stream;
  return dc__device_check(device);
}

dc_status dc__optim_await(const dc_optimizer *o) {
  return o->done == NULL || dc__optim_is_there(o) ? DC_OK : o->done->device->ops->event_sync(o->done, 0);
}

dc_status dc__optim_settle(const dc_optimizer *o, const char *fn) {
  if (o->stream == NULL) {
    return DC_OK;
  }
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE, "%s: the stream is captured into a CUDA graph, where the host cannot wait", fn);
  }
  DC__TRY(dc__stream_sync(o->stream, 0));
  return dc__device_check(o->linalg->device);
}

/* What was queued is what comes before `done`; in a capture nothing was. Without a stream: until it is done. */
static dc_status queued(const dc_optimizer *o) {
  dc_device *device = o->linalg->device;
  if (o->stream != NULL && !dc__stream_captures(o->stream)) {
    dc__event_record(o->done, o->stream);
  }
  dc__here_done(device, o->stream);
  return dc__device_check(device);
}

/* ---- steps ---- */

dc_status dc__optim_queue(dc_optimizer *o, const char *fn, dc__task_fn task) {
  int64_t bad = o->count;
  if (!dc__optim_is_there(o)) {
    DC__TRY(o->stream->device->ops->stream_call(o->stream, task, &o, sizeof o));
    return queued(o);
  }
  o->kind->queue(o, dc__stream_or_here(o->linalg->device, o->stream));
  if (o->stream != NULL || !dc__optim_wants_look(o)) {
    return queued(o);
  }
  DC__TRY(dc__optim_found_there(o, &bad));
  return bad >= o->count ? DC_OK
                         : dc__fail(DC_E_NOT_FINITE, "%s: grads[%" PRId64 "] times grad_scale is not finite", fn, bad);
}

dc_status dc__optim_read_look(const dc_optimizer *o, dc_optimizer_stats *stats) {
  dc_device *device = o->linalg->device;
  dc__update_look look = {0};
  dc__stream_copy(device->here, &look, o->look, sizeof look);
  dc__here_done(device, NULL);
  stats->steps = look.steps;
  stats->skipped_steps = look.skipped;
  return dc__device_check(device);
}

/* ---- learning rates ---- */

dc_status dc__optim_make_rates(dc_optimizer *o, const char *fn) {
  for (int32_t g = 0; g < o->group_count && dc__optim_counts_there(o); g++) {
    dc__optim_group *group = &o->groups[g];
    void *rate;
    if (group->rate == NULL) {
      DC__TRY(dc__arena_alloc(o->arena, NULL, sizeof *group->rate, &rate));
      group->rate = rate;
      DC__TRY(dc__optim_tell_rate(o, fn, group->rate, group->lr));
    }
  }
  return DC_OK;
}

dc_status dc__optim_tell_rate(const dc_optimizer *o, const char *fn, double *rate, double lr) {
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE,
                    "%s: the stream is captured into a CUDA graph, each launch of which would set lr again: set it "
                    "before the capture, or between launches",
                    fn);
  }
  dc__update_number_there(dc__stream_or_here(o->linalg->device, o->stream), rate, lr);
  return queued(o);
}
