/* Warm starts of roots in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_warm_start_residual(dc_stream *stream, const dc__cuda_warm_start_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_WARM_START_RESIDUAL, args->n, args->n, args->count, args, sizeof *args);
}

void dc__cuda_warm_start_root(dc_stream *stream, const dc__cuda_warm_start_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_WARM_START_ROOT, args->n, args->n, args->count, args, sizeof *args);
}
