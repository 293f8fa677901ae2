/* The rows of the transformer layer with AVX2. */
#define ROWOPS dc__rowops_avx2
#include "kernels/nn/rowops_tmpl.h"
