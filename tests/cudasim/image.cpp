/* A family of kernels as C++, and what stands for its fat binary. */
#include SOURCE

#include "kernels/cuda/list.h"

#define X(number, name, shared) &name,

extern "C" {
extern const cudasim_image IMAGE; /* constants are their file's own unless declared */
const cudasim_image IMAGE = {KERNELS(X) nullptr};
}
