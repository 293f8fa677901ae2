/* A product's epilogue in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

void dc__cuda_epilogue(dc_stream *stream, const dc__cuda_epilogue_args *args) {
  dc__cuda_launch_row_pieces(stream, DC__KERNEL_EPILOGUE, args->rows, args->columns, args, sizeof *args);
}
