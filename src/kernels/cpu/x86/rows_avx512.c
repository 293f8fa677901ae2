/* The rows of the transformer layer with AVX-512. */
#define ROWS dc__rows_avx512
#include "kernels/rows_loops.h"
