/* The reduce family with AVX2. */
#define INIT dc__reduce_avx2
#include "kernels/x86/elementwise/reduce_vector.h"
