/* The reduction to tridiagonal form with AVX-512. */
#define TRIDIAGONAL dc__tridiagonal_avx512
#include "kernels/tridiagonal_loops.h"
