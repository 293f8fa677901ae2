/* Orthogonal iteration in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_basis_begin(dc_stream *stream, const dc__cuda_basis_args *args) {
  enum { WARPS = 4, THREADS = DC__CUDA_MATRIX_THREADS };
  const int64_t n = args->n;
  dc__cuda_launch_rows(stream, DC__KERNEL_BASIS_VALUES, (n + WARPS - 1) / WARPS, WARPS * DC__CUDA_WARP, args->count,
                       args, sizeof *args);
  dc__cuda_launch_rows(stream, DC__KERNEL_BASIS_ORDER, (n + THREADS - 1) / THREADS, THREADS, args->count, args,
                       sizeof *args);
  dc__cuda_launch_rows(stream, DC__KERNEL_BASIS_SORT, n, n, args->count, args, sizeof *args);
}

void dc__cuda_basis_store(dc_stream *stream, const dc__cuda_basis_args *args) {
  dc__cuda_launch_rows(stream, DC__KERNEL_BASIS_STORE, args->n, args->n, args->count, args, sizeof *args);
}
