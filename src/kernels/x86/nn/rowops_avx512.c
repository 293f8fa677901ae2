/* The rows of the transformer layer with AVX-512. */
#define ROWOPS dc__rowops_avx512
#include "kernels/nn/rowops_tmpl.h"
