/* Sizes of blocks that several families share. */
#ifndef DC_KERNELS_CUDA_THREADS_H
#define DC_KERNELS_CUDA_THREADS_H

enum {
  DC__CUDA_THREADS = 256,    /* of a block, where the work is by elements */
  DC__CUDA_ROW_THREADS = 512 /* at most, of a block that has a row at a time, a thread 8 of its columns */
};

#endif
