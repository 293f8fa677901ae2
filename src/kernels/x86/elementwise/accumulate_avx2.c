/* The accumulate family with AVX2. */
#define INIT dc__accumulate_avx2
#include "kernels/x86/elementwise/accumulate_vector.h"
