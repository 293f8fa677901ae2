/* The kernels as C++, and the table that stands for their fat binary. */
#include "kernels/cuda/elementwise.cu"

extern "C" {
extern const cudasim_image dc__cuda_image; /* constants are their file's own unless declared */
const cudasim_image dc__cuda_image = {{
    {"dc__cast_kernel", dc__cast_kernel, sizeof(dc__cuda_binary_args)},
    {"dc__accumulate_kernel", dc__accumulate_kernel, sizeof(dc__cuda_binary_args)},
    {"dc__reduce_kernel", dc__reduce_kernel, sizeof(dc__cuda_reduce_args)},
}};
}
