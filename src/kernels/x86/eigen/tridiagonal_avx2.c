/* The reduction to tridiagonal form with AVX2. */
#define TRIDIAGONAL dc__tridiagonal_avx2
#include "kernels/eigen/tridiagonal_tmpl.h"
