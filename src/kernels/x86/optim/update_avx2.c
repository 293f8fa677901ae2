/* The optimizers' elementwise work with AVX2. */
#define UPDATE dc__update_avx2
#include "kernels/x86/optim/update_vector.h"

/* After update_vector.h, whose functions it uses. */
#include "kernels/optim/update_tmpl.h"
