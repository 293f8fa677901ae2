/* The rows of the transformer layer with AVX2. */
#define ROWS dc__rows_avx2
#include "kernels/rows_loops.h"
