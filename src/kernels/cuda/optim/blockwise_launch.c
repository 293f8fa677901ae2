/* Blocks of parameters in stream order, on devices that have kernels of their own. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

enum { MAX_BLOCKS = 4096 };

_Static_assert(sizeof(dc__cuda_box_copy_args) <= DC__LAUNCH_BYTES, "a box must fit into a launch");

void dc__cuda_box_copy(dc_stream *stream, const dc__cuda_box_copy_args *args) {
  dc__cuda_launch_elements(stream, DC__KERNEL_BOX_COPY, args->count, MAX_BLOCKS, args, sizeof *args);
}

void dc__cuda_stack(dc_stream *stream, const dc__cuda_stack_args *args) {
  dc__cuda_launch_batch(stream, DC__KERNEL_STACK, args->count, args->batch, args, sizeof *args);
}

void dc__cuda_graft_update(dc_stream *stream, const dc__cuda_graft_args *args) {
  dc__cuda_launch_batch(stream, DC__KERNEL_GRAFT_UPDATE, args->count, args->batch, args, sizeof *args);
}

void dc__cuda_graft_direction(dc_stream *stream, const dc__cuda_graft_args *args) {
  dc__cuda_launch_batch(stream, DC__KERNEL_GRAFT_DIRECTION, args->count, args->batch, args, sizeof *args);
}

void dc__cuda_graft_finish(dc_stream *stream, const dc__cuda_graft_args *args) {
  dc__cuda_launch_batch(stream, DC__KERNEL_GRAFT_FINISH, args->count, args->batch, args, sizeof *args);
}

void dc__cuda_permute(dc_stream *stream, const dc__cuda_permute_args *args) {
  dc__cuda_launch_batch(stream, DC__KERNEL_PERMUTE, args->count, args->batch, args, sizeof *args);
}
