/* The combine family with AVX2. */
#define INIT dc__combine_avx2
#include "kernels/x86/elementwise/combine_vector.h"
