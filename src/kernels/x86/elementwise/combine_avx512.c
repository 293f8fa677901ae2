/* The combine family with AVX-512. */
#define INIT dc__combine_avx512
#include "kernels/x86/elementwise/combine_vector.h"
