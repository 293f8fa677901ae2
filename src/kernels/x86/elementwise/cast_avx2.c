/* The cast family with AVX2. */
#define INIT dc__cast_avx2
#include "kernels/x86/elementwise/cast_vector.h"
