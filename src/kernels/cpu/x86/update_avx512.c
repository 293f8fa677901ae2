/* The optimizers' elementwise work with AVX-512. */
#define UPDATE dc__update_avx512
#include "kernels/cpu/x86/update_vector.h"
#include "kernels/update_loops.h"
