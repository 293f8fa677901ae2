/* Steps on the caller's stream. On a device, the steps of AdamW, SGD and one-rank Muon are kernels in stream order, and
 * the host waits for nothing. Kernels check gradients and read step numbers and learning rates in device memory. So
 * each launch of a captured graph is a full step. On the CPU a step is one stream task, which uses the handle: the next
 * call waits for it. */
#include "optim/optim_internal.h"

bool dc__optim_counts_on_device(const dc_optimizer *o) {
  return o->kind->enqueue != NULL && dc__optim_is_cuda(o) && o->comm == NULL;
}

/* A task cannot report failure, so it must not allocate, as linear algebra may. */
bool dc__optim_is_async(const dc_optimizer *o) {
  return dc__optim_is_cuda(o) ? dc__optim_counts_on_device(o)
                              : o->kind->enqueue != NULL && o->stream != NULL && !o->kind->matrices;
}

/* ---- streams ---- */

dc_status dc__optim_set_stream(dc_optimizer *o, const char *fn, dc_stream *stream) {
  dc_device *device = o->linalg->device;
  DC__TRY(dc__stream_check_device(fn, stream, "optimizer", device));
  if (stream == o->stream) {
    return DC_OK;
  }
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE, "%s: the stream set before is captured into a CUDA graph; end the capture first", fn);
  }
  if (o->done == NULL) {
    DC__TRY(device->ops->event_create(device, &o->done));
  }
  dc__event_wait(o->done, dc__stream_or_internal(device, stream));
  o->stream = stream;
  return dc__device_check(device);
}

dc_status dc__optim_wait_task(const dc_optimizer *o) {
  return o->done == NULL || dc__optim_is_cuda(o) ? DC_OK : o->done->device->ops->event_sync(o->done, 0);
}

dc_status dc__optim_synchronize(const dc_optimizer *o, const char *fn) {
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE, "%s: the stream is captured into a CUDA graph, where the host cannot wait", fn);
  }
  if (o->stream != NULL) {
    DC__TRY(dc__stream_sync(o->stream, 0));
  } else if (o->done != NULL) { /* from the previous stream */
    DC__TRY(o->done->device->ops->event_sync(o->done, 0));
  }
  return dc__device_check(o->linalg->device);
}

/* Records `done` after all queued work, unless in a capture, which queues none. Without a stream, waits. */
static dc_status record_done(const dc_optimizer *o) {
  dc_device *device = o->linalg->device;
  if (o->stream != NULL && !dc__stream_captures(o->stream)) {
    dc__event_record(o->done, o->stream);
  }
  dc__device_sync_internal(device, o->stream);
  return dc__device_check(device);
}

/* ---- steps ---- */

static void launch_counts(dc_stream *on, dc__update_begin *begin) {
  dc__update_begin_cuda(on, begin);
  begin->records_used = 0;
  begin->status = NULL; /* count each step once */
}

dc__update_step_state *dc__optim_step_record(const dc__optim_param *p) {
  return (dc__update_step_state *)(void *)p->step;
}

/* Adjacent parameters of a group share a launch that counts their steps. */
void dc__optim_begin_step_cuda(dc_optimizer *o, int32_t kernel, dc__optim_rule_fn rule, dc__update_batch *batch) {
  dc_stream *on = o->linalg->stream;
  const bool checks_finite = dc__optim_checks_finite(o);
  batch->found = checks_finite || o->found_inf != NULL ? &o->device_state->found : NULL;
  batch->scale = dc__optim_read_grad_scaler_cuda(o, on);
  dc__update_begin begin = {.kind = kernel, .found = batch->found, .status = o->device_state};
  int32_t group = -1;
  if (checks_finite) {
    dc__optim_scan_nonfinite_cuda(o, on, batch->scale);
  }
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    if (!dc__optim_has_grad(o, p)) {
      continue;
    }
    if (begin.records_used == DC__UPDATE_RECORDS || (begin.records_used > 0 && p->group != group)) {
      launch_counts(on, &begin);
    }
    if (p->group != group) {
      group = p->group;
      rule(dc__optim_options(o, p), &begin.rule);
      begin.lr = o->groups[group].device_lr;
    }
    begin.records[begin.records_used++] = dc__optim_step_record(p);
  }
  if (begin.records_used > 0 || begin.status != NULL) {
    launch_counts(on, &begin);
  }
}

static dc_status enqueue_cuda(dc_optimizer *o, const char *fn) {
  o->linalg->stream = dc__stream_or_internal(o->linalg->device, o->stream);
  const dc_status status = o->kind->enqueue(o, fn);
  o->linalg->stream = o->linalg->device->internal_stream;
  return status;
}

dc_status dc__optim_enqueue(dc_optimizer *o, const char *fn, dc__task_fn task) {
  int64_t bad = o->count;
  if (!dc__optim_is_cuda(o)) {
    DC__TRY(o->stream->device->ops->stream_call(o->stream, task, &o, sizeof o));
    return record_done(o);
  }
  DC__TRY(enqueue_cuda(o, fn));
  if (o->stream != NULL || !dc__optim_checks_finite(o)) {
    return record_done(o);
  }
  DC__TRY(dc__optim_first_nonfinite_cuda(o, &bad));
  return bad >= o->count ? DC_OK
                         : dc__fail(DC_E_NOT_FINITE, "%s: grads[%" PRId64 "] times grad_scale is not finite%s", fn, bad,
                                    dc__optim_limit(o));
}

dc_status dc__optim_read_device_state(const dc_optimizer *o, dc_optimizer_stats *stats) {
  dc_device *device = o->linalg->device;
  dc__update_status device_state = {0};
  dc__stream_copy(device->internal_stream, &device_state, o->device_state, sizeof device_state);
  dc__device_sync_internal(device, NULL);
  stats->steps = device_state.steps;
  stats->skipped_steps = device_state.skipped;
  return dc__device_check(device);
}

/* ---- learning rates ---- */

dc_status dc__optim_alloc_device_lr(dc_optimizer *o, const char *fn) {
  for (int32_t g = 0; g < o->group_count && dc__optim_counts_on_device(o); g++) {
    dc__optim_group *group = &o->groups[g];
    void *device_lr;
    if (group->device_lr == NULL) {
      DC__TRY(dc__arena_alloc(o->arena, NULL, sizeof *group->device_lr, &device_lr));
      group->device_lr = device_lr;
      DC__TRY(dc__optim_set_device_lr(o, fn, group->device_lr, group->lr));
    }
  }
  return DC_OK;
}

dc_status dc__optim_set_device_lr(const dc_optimizer *o, const char *fn, double *device_lr, double lr) {
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE,
                    "%s: the stream is captured into a CUDA graph, each launch of which would set lr again: set it "
                    "before the capture, or between launches",
                    fn);
  }
  dc__update_set_scalar_cuda(dc__stream_or_internal(o->linalg->device, o->stream), device_lr, lr);
  return record_done(o);
}
