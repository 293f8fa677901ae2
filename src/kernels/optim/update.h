/* Elementwise work of the optimizers, computed in float32. One source in plain C (update_tmpl.h) is compiled for every
 * instruction set. Without contraction all give the same bits, and an element's bits do not depend on its position. */
#ifndef DC_KERNELS_UPDATE_H
#define DC_KERNELS_UPDATE_H

#include "base/base.h"
#include "kernels/optim/update_math.h"

/* Runs a step for `count` elements of a span, from element `from` on, in one pass over memory. kind is DC__UPDATE_ADAMW
 * or DC__UPDATE_SGD. Weights and gradients are float32, float16 or bfloat16, at any address. 16-bit weights have a
 * master, which is synchronized with them first. The gradient is multiplied by scale. */
void dc__update_cpu(int32_t kind, const dc__update_span *span, int64_t from, int64_t count, float scale);

/* x[i] = scale * from[i], where `from` has one of the three types. */
void dc__update_read(float *x, const void *from, int32_t dtype, int64_t count, float scale);
/* Whether all magnitudes are below 2^exponent, for exponents from -126 to 128. 2^128 means that all are finite. */
bool dc__update_is_below(const float *x, int64_t count, int32_t exponent);
/* master[i] = w[i] where the master, rounded to the weights' 16-bit type, is not w[i] bit for bit. */
void dc__update_sync_master(float *master, const void *w, int32_t dtype, int64_t count);

/* The same on a device with memory of its own, in stream order. kind is an enum dc__update_kind. */
void dc__update_cuda(dc_stream *stream, int32_t kind, const dc__update_batch *batch);
void dc__update_begin_cuda(dc_stream *stream, const dc__update_begin *begin);
void dc__update_read_scaler_cuda(dc_stream *stream, const dc__update_read_scaler *args);
void dc__update_set_scalar_cuda(dc_stream *stream, double *to, double value);

#endif
