/* The cast family with AVX-512. */
#define INIT dc__cast_avx512
#include "kernels/x86/elementwise/cast_vector.h"
