/* The copy family with AVX-512. */
#define INIT dc__copy_avx512
#include "kernels/x86/elementwise/copy_vector.h"
