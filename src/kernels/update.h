/* Elementwise work of the optimizers on float32. One text in plain C (update_loops.h) is compiled for every instruction
 * set; without contraction, all give the same bits, and an element's do not depend on where it lies. */
#ifndef DC_KERNELS_UPDATE_H
#define DC_KERNELS_UPDATE_H

#include "base/base.h"
#include "kernels/update_element.h"

/* most, the largest v so far: NULL without amsgrad. */
void dc__update_adamw(float *w, float *m, float *v, float *most, const float *g, int64_t count,
                      const dc__adamw_factors *factors);

/* b NULL: no momentum. */
void dc__update_sgd(float *w, float *b, const float *g, int64_t count, const dc__sgd_factors *factors);

/* y[i] = x[i] * scale. */
void dc__update_scale(float *y, const float *x, int64_t count, float scale);
/* Whether all elements are below 2^exponent in size, -126 to 128; with 128, whether none is NaN or infinite. */
bool dc__update_below(const float *x, int64_t count, int32_t exponent);
/* master[i] = w[i] where rounded[i], the master as its weight's type has it, is not w[i], bit for bit. */
void dc__update_follow(float *master, const float *rounded, const float *w, int64_t count);

/* The same on a device with memory of its own, in the order of a stream; kind: enum dc__update_kind. */
void dc__update_there(dc_stream *stream, int32_t kind, const dc__update_batch *batch);
void dc__update_begin_there(dc_stream *stream, const dc__update_begin *begin);
void dc__update_number_there(dc_stream *stream, double *to, double value);

#endif
