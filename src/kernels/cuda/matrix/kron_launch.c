/* Kronecker products in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_kron(dc_stream *stream, const dc__cuda_kron_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_KRON, args->to.rows, args->to.cols, 1, args, sizeof *args);
}

void dc__cuda_damp(dc_stream *stream, const dc__cuda_damp_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_DAMP, args->count * args->rows, args->cols, 1, args, sizeof *args);
}
