/* The accumulate family with AVX-512. */
#define INIT dc__accumulate_avx512
#include "kernels/cpu/x86/accumulate_vector.h"
