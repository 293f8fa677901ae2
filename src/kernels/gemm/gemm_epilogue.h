/* The epilogue of a matrix product (gemm.h), row by row. */
#ifndef DC_KERNELS_GEMM_EPILOGUE_H
#define DC_KERNELS_GEMM_EPILOGUE_H

#include "kernels/gemm/gemm.h"

enum { DC__GEMM_EPILOGUE_COLUMNS = 1024 }; /* maximum number of columns that are finished at a time */

/* Finish `count` elements of row i of C, from column j on, from their sums t. Sums in float32 are overwritten. c and
 * aux are those of one matrix of the batch. */
void dc__gemm_epilogue_f32(const dc__gemm *g, void *c, void *aux, float *t, int64_t i, int64_t j, int64_t count);
void dc__gemm_epilogue_f64(const dc__gemm *g, double *c, const double *restrict t, int64_t i, int64_t j, int64_t count);

#endif
