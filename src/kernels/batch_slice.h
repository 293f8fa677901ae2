/* How many matrices of a batch go through an operator together on a device. */
#ifndef DC_KERNELS_BATCH_SLICE_H
#define DC_KERNELS_BATCH_SLICE_H

enum { DC__CUDA_BATCH_SLICE = 32 };

#endif
