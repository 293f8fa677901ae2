/* The matrix product with AVX-512. */
#define INIT dc__gemm_avx512
#include "kernels/x86/gemm/gemm_vector.h"
