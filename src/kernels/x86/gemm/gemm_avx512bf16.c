/* The matrix product with AVX-512's bfloat16 products. */
#define INIT dc__gemm_avx512bf16
#include "kernels/x86/gemm/gemm_vector.h"
