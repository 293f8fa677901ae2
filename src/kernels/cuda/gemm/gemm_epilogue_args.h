/* The arguments of the kernel for a product's epilogue (gemm_epilogue.cu), as the host and the device see them. */
#ifndef DC_KERNELS_CUDA_GEMM_EPILOGUE_ARGS_H
#define DC_KERNELS_CUDA_GEMM_EPILOGUE_ARGS_H

#include <stdint.h>

#include "kernels/cuda/threads.h"

/* An epilogue of a product: enum dc__epilogue, on x. */
typedef struct dc__cuda_epilogue_args {
  const void *x;
  void *out;
  const void *bias; /* may be NULL */
  void *aux;        /* GELU: written; may be NULL or x. Its backward: read */
  int64_t rows, columns;
  int32_t dtype, epilogue, gelu;
} dc__cuda_epilogue_args;

#endif
