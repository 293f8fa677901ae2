/* Submits a call of the layer: on the calling thread, as a stream task, or as queued kernels. */
#include <inttypes.h>

#include "kernels/cuda/kernels_cuda.h"
#include "transformer/transformer_internal.h"

/* A queued call: the job and its function. The call owns the job's copy of cu_seqlens. */
typedef struct queued_job {
  void (*run)(const dc__layer_job *job);
  dc__layer_job job;
} queued_job;
_Static_assert(sizeof(queued_job) <= DC__TASK_BYTES, "a task's arguments");

static void run_queued(void *args) {
  queued_job *q = args;
  q->run(&q->job);
  dc__free((void *)(uintptr_t)q->job.size.cu_seqlens);
  dc__layer_release(q->job.layer);
}

/* Queues kernels on this thread. A NULL stream means the internal stream, for which the call waits. */
static dc_status submit_cuda(const char *fn, dc__layer_job *job, dc_stream *stream,
                             void (*run)(const dc__layer_job *job)) {
  dc_device *device = job->layer->device;
  if (job->size.batch * job->layer->config.heads * (job->size.max_seqlen / DC__CUDA_ATTENTION_ROWS + 1) > INT32_MAX) {
    return dc__fail(DC_E_SHAPE, "%s: call.batch = %" PRId64 " times seq_length = %" PRId64 " is too large", fn,
                    job->size.batch, job->size.max_seqlen);
  }
  job->stream = dc__stream_or_internal(device, stream);
  dc__device_begin(device);
  dc__layer_upload_offsets(job);
  run(job);
  dc__device_sync_internal(device, stream);
  dc__device_end(device);
  return dc__device_check(device);
}

/* The caller may change the offsets after the call, so a queued job has a copy. */
static dc_status submit_task(const char *fn, const dc__layer_job *job, dc_stream *stream,
                             void (*run)(const dc__layer_job *job)) {
  queued_job q = {run, *job};
  int32_t *offsets = NULL;
  if (job->size.cu_seqlens != NULL) {
    const size_t count = (size_t)job->size.batch + 1;
    offsets = dc__calloc(count, sizeof *offsets);
    if (offsets == NULL) {
      return DC_E_NO_MEMORY;
    }
    memcpy(offsets, job->size.cu_seqlens, count * sizeof *offsets);
    q.job.size.cu_seqlens = offsets;
  }
  dc__layer_retain(job->layer);
  dc_status status = stream->device->ops->stream_call(stream, run_queued, &q, sizeof q);
  if (status != DC_OK) {
    dc__layer_release(job->layer);
    dc__free(offsets);
    return dc__fail(status, "%s: %s", fn, dc_last_error());
  }
  return DC_OK;
}

/* An empty batch: nothing to compute, and weight gradients are zero unless they are accumulated. */
static dc_status submit_empty(const dc__layer_job *job, dc_stream *stream) {
  dc_device *device = job->layer->device;
  const bool is_cuda = dc__layer_is_cuda(job->layer);
  const size_t size = dc_dtype_size(job->layer->config.grad_dtype);
  dc__device_begin(device);
  for (int32_t i = 0; i < DC_LAYER_WEIGHTS; i++) {
    int64_t shape[2];
    const int64_t numel = dc__layer_weight_numel(job->layer, i, &shape[0], &shape[1]);
    if (job->grad_weight[i] != NULL && !job->accumulate) {
      dc__stream_zero(is_cuda ? dc__stream_or_internal(device, stream) : stream, job->grad_weight[i],
                      (size_t)numel * size);
    }
  }
  if (is_cuda) {
    dc__device_sync_internal(device, stream);
  }
  dc__device_end(device);
  return dc__device_check(device);
}

dc_status dc__layer_submit(const char *fn, dc__layer_job *job, dc_stream *stream,
                           void (*run)(const dc__layer_job *job)) {
  if (job->size.tokens == 0) {
    return submit_empty(job, stream);
  }
  if (dc__layer_is_cuda(job->layer)) {
    return submit_cuda(fn, job, stream, run);
  }
  if (stream != NULL) {
    return submit_task(fn, job, stream, run);
  }
  run(job);
  return DC_OK;
}

/* ---- tensors made on the host ---- */

/* Tensors for a device are computed in host memory and copied. */
dc_status dc__layer_host_buffer_alloc(const dc_layer *layer, size_t bytes, void **data) {
  if (dc__layer_is_cuda(layer)) {
    *data = dc__calloc(1, bytes);
    return *data != NULL ? DC_OK : DC_E_NO_MEMORY;
  }
  return DC_OK;
}

dc_status dc__layer_host_buffer_flush(const dc_layer *layer, size_t bytes, void *data, void *host) {
  if (host == data) {
    return DC_OK;
  }
  dc__device_begin(layer->device);
  dc__stream_copy(dc__stream_or_internal(layer->device, NULL), data, host, bytes);
  dc__device_sync_internal(layer->device, NULL);
  dc__device_end(layer->device);
  dc__free(host);
  return dc__device_check(layer->device);
}
