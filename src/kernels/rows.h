/* Elementwise work of the transformer layer on rows of float32. One text in plain C (rows_loops.h) is compiled for
 * every instruction set; without contraction, and with sums in a fixed number of lanes, all give the same bits. */
#ifndef DC_KERNELS_ROWS_H
#define DC_KERNELS_ROWS_H

#include "base/base.h"

/* y[i] = gelu(x[i]); y may be x. form: enum dc__gelu_form. */
void dc__gelu(float *y, const float *x, int64_t count, int32_t form);
/* g[i] *= gelu'(x[i]). */
void dc__gelu_back(float *g, const float *x, int64_t count, int32_t form);

#endif
