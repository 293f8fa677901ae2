/* The combine family with AVX2. */
#define INIT dc__combine_avx2
#include "kernels/x86/combine_vector.h"
