/* A family of kernels as C++, and what stands for its images. */
#include SOURCE

#include "kernels/cuda/kernel_list.h"

#define X(number, name, shared) &name,

static const cudasim_kernel *const kernels[] = {KERNELS(X) nullptr};

extern "C" {
extern const cudasim_image IMAGE(80), IMAGE(90), IMAGE(ptx); /* constants are their file's own unless declared */
const cudasim_image IMAGE(80) = {8, kernels}, IMAGE(90) = {9, kernels}, IMAGE(ptx) = {0, kernels};
}
