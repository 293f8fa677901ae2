/* The optimizers' elementwise work with AVX2. */
#define UPDATE dc__update_avx2
#include "kernels/cpu/x86/update_vector.h"
#include "kernels/update_loops.h"
