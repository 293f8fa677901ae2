/* The optimizers' elementwise work in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/threads.h"
#include "kernels/optim/update.h"

_Static_assert(sizeof(dc__update_batch) <= DC__LAUNCH_BYTES, "a batch must fit into a launch");
_Static_assert(sizeof(dc__update_begin) <= DC__LAUNCH_BYTES, "a step's beginning must fit into a launch");
_Static_assert((int)DC__UPDATE_RECORDS <= (int)DC__CUDA_THREADS, "a block begins a step, a thread a parameter");

void dc__update_cuda(dc_stream *stream, int32_t kind, const dc__update_batch *batch) {
  int64_t max = 0;
  for (int32_t i = 0; i < batch->spans_used; i++) {
    max = batch->spans[i].count > max ? batch->spans[i].count : max;
  }
  dc__cuda_launch_batch(stream, DC__KERNEL_ADAMW + kind, max, batch->spans_used, batch, sizeof *batch);
}

void dc__update_begin_cuda(dc_stream *stream, const dc__update_begin *begin) {
  dc__cuda_launch_elements(stream, DC__KERNEL_UPDATE_BEGIN, 1, 1, begin, sizeof *begin);
}

void dc__update_read_scaler_cuda(dc_stream *stream, const dc__update_read_scaler *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_UPDATE_READ_SCALER, 1, 1, args, sizeof *args);
}

void dc__update_set_scalar_cuda(dc_stream *stream, double *to, double value) {
  const dc__update_set_scalar args = {.to = to, .value = value};
  dc__cuda_launch_elements(stream, DC__KERNEL_UPDATE_SET_SCALAR, 1, 1, &args, sizeof args);
}
