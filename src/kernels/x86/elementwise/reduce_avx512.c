/* The reduce family with AVX-512. */
#define INIT dc__reduce_avx512
#include "kernels/x86/elementwise/reduce_vector.h"
