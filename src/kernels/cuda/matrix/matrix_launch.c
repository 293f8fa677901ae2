/* The matrix operators' shared work other than products, in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_measure(dc_stream *stream, const dc__cuda_measure_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_MEASURE, args->from.rows, args->from.cols, args->from.count, args,
                       sizeof *args);
}

void dc__cuda_load(dc_stream *stream, const dc__cuda_load_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_LOAD, args->to.rows, args->to.cols, args->to.count, args, sizeof *args);
}

void dc__cuda_load_uniform(dc_stream *stream, dc__cuda_matrices from, dc__cuda_matrices to, uint32_t mask,
                           double factor) {
  dc__cuda_load_args args = {.from = from, .to = to, .mask = mask};
  for (int32_t i = 0; i < to.count; i++) {
    args.factor[i] = factor;
  }
  dc__cuda_load(stream, &args);
}

void dc__cuda_matrix_norm(dc_stream *stream, const dc__cuda_matrix_norm_args *args) {
  enum { WARPS = 4 }; /* warps of a block, each with a row */
  dc__cuda_launch_rows(stream, DC__KERNEL_ROW_SUMS, (args->from.rows + WARPS - 1) / WARPS, WARPS * DC__CUDA_WARP,
                       args->from.count, args, sizeof *args);
  dc__cuda_launch_warps(stream, DC__KERNEL_MATRIX_NORM, args->from.count, args, sizeof *args);
}

void dc__cuda_affine(dc_stream *stream, const dc__cuda_affine_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_AFFINE, args->rows, args->cols, args->count, args, sizeof *args);
}

void dc__cuda_scale(dc_stream *stream, const dc__cuda_scale_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_SCALE, args->rows, args->cols, args->count, args, sizeof *args);
}
