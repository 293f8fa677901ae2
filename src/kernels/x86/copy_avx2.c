/* The copy family with AVX2. */
#define INIT dc__copy_avx2
#include "kernels/x86/copy_vector.h"
