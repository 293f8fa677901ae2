/* The copy family with AVX2. */
#define INIT dc__copy_avx2
#include "kernels/x86/elementwise/copy_vector.h"
