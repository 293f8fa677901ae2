/* The optimizers' elementwise work with AVX-512. */
#define UPDATE dc__update_avx512
#include "kernels/x86/optim/update_vector.h"

/* After its vectors. */
#include "kernels/optim/update_tmpl.h"
