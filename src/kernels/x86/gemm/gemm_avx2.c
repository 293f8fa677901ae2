/* The matrix product with AVX2. */
#define INIT dc__gemm_avx2
#include "kernels/x86/gemm/gemm_vector.h"
