/* The reduction to tridiagonal form with AVX-512. */
#define TRIDIAGONAL dc__tridiagonal_avx512
#include "kernels/eigen/tridiagonal_tmpl.h"
