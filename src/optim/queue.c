/* Steps on the caller's stream. On a device with memory of its own AdamW's, SGD's and one rank of Muon's are kernels
 * that the stream does in its turn, and the host waits for nothing: what it would look at, a gradient that is not
 * finite, the number of the step, the learning rate, is in the device's memory, where kernels look at it. So a launch
 * of a graph into which a step was captured is a step like any other. On the CPU a step is one task of the stream,
 * which uses the handle: the next call waits for it. */
#include "optim/inside.h"

bool dc__optim_counts_there(const dc_optimizer *o) {
  return o->kind->queue != NULL && dc__optim_is_there(o) && o->comm == NULL;
}

/* A task cannot fail, as what allocates scratch for matrices may. */
bool dc__optim_queues(const dc_optimizer *o) {
  return dc__optim_is_there(o) ? dc__optim_counts_there(o)
                               : o->kind->queue != NULL && o->stream != NULL && !o->kind->matrices;
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
  if (dc__stream_captures(o->stream)) {
    return dc__fail(DC_E_STATE, "%s: the stream is captured into a CUDA graph, where the host cannot wait", fn);
  }
  if (o->stream != NULL) {
    DC__TRY(dc__stream_sync(o->stream, 0));
  } else if (o->done != NULL) { /* of the stream set before */
    DC__TRY(o->done->device->ops->event_sync(o->done, 0));
  }
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

static void count(dc_stream *on, dc__update_begin *begin) {
  dc__update_begin_there(on, begin);
  begin->records_used = 0;
  begin->tally = NULL; /* a step counts once */
}

dc__update_record *dc__optim_record(const dc__optim_param *p) {
  return (dc__update_record *)(void *)p->step;
}

/* Parameters of a group are counted together. */
void dc__optim_begin_there(dc_optimizer *o, int32_t kernel, dc__optim_rule_fn rule, dc__update_batch *batch) {
  dc_stream *on = o->linalg->on;
  const bool looks = dc__optim_wants_look(o);
  batch->found = looks || o->found_inf != NULL ? &o->look->found : NULL;
  batch->scale = dc__optim_heed_there(o, on);
  dc__update_begin begin = {.kind = kernel, .found = batch->found, .tally = o->look};
  int32_t group = -1;
  if (looks) {
    dc__optim_look_there(o, on, batch->scale);
  }
  for (int64_t i = 0; i < o->count; i++) {
    const dc__optim_param *p = &o->params[i];
    if (!dc__optim_has_grad(o, p)) {
      continue;
    }
    if (begin.records_used == DC__UPDATE_RECORDS || (begin.records_used > 0 && p->group != group)) {
      count(on, &begin);
    }
    if (p->group != group) {
      group = p->group;
      rule(dc__optim_options(o, p), &begin.rule);
      begin.lr = o->groups[group].rate;
    }
    begin.records[begin.records_used++] = dc__optim_record(p);
  }
  if (begin.records_used > 0 || begin.tally != NULL) {
    count(on, &begin);
  }
}

static dc_status queue_there(dc_optimizer *o, const char *fn) {
  o->linalg->on = dc__stream_or_here(o->linalg->device, o->stream);
  const dc_status status = o->kind->queue(o, fn);
  o->linalg->on = o->linalg->device->here;
  return status;
}

dc_status dc__optim_queue(dc_optimizer *o, const char *fn, dc__task_fn task) {
  int64_t bad = o->count;
  if (!dc__optim_is_there(o)) {
    DC__TRY(o->stream->device->ops->stream_call(o->stream, task, &o, sizeof o));
    return queued(o);
  }
  DC__TRY(queue_there(o, fn));
  if (o->stream != NULL || !dc__optim_wants_look(o)) {
    return queued(o);
  }
  DC__TRY(dc__optim_found_there(o, &bad));
  return bad >= o->count ? DC_OK
                         : dc__fail(DC_E_NOT_FINITE, "%s: grads[%" PRId64 "] times grad_scale is not finite%s", fn, bad,
                                    dc__optim_limit(o));
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
