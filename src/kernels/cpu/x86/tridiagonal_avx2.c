/* The reduction to tridiagonal form with AVX2. */
#define TRIDIAGONAL dc__tridiagonal_avx2
#include "kernels/tridiagonal_loops.h"
