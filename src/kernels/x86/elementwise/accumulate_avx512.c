/* The accumulate family with AVX-512. */
#define INIT dc__accumulate_avx512
#include "kernels/x86/elementwise/accumulate_vector.h"
