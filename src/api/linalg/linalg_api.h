/* Shared by the public functions of second-order operators. */
#ifndef DC_API_LINALG_API_H
#define DC_API_LINALG_API_H

#include "linalg/linalg.h"

/* Locks the handle and makes its device current, until dc__linalg_leave(), which returns `status`. If entering fails,
 * there is nothing to leave. */
dc_status dc__linalg_enter(dc_linalg *linalg, const char *fn);
/* The same before a computation. DC_E_UNSUPPORTED on a device without a GEMM library. */
dc_status dc__linalg_enter_compute(dc_linalg *linalg, const char *fn);
dc_status dc__linalg_leave(dc_linalg *linalg, dc_status status);

/* DC_E_SHAPE unless `length` is `wanted`. */
dc_status dc__check_length(const char *fn, const char *arg, const char *what, int64_t length, int64_t wanted);
/* DC_E_SHAPE unless the matrix has these sizes. batch -1: it must not be batched. */
dc_status dc__check_matrix(const char *fn, const char *arg, const dc__mat *mat, int64_t batch, int64_t rows,
                           int64_t cols);
/* dc__mat_read(), which also refuses memory that the handle's device cannot read. */
dc_status dc__read_matrix(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t layout,
                          dc__mat *mat);
/* dc__mat_read_as(), with the same check, for the data alone. */
dc_status dc__read_vector(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const int64_t *shape, int32_t ndim, void **data);
/* Reads a contiguous output of `dtype` that has the shape of `like`. */
dc_status dc__read_output(const dc_linalg *l, const char *fn, const char *arg, const dc_tensor *tensor, int32_t dtype,
                          const dc__mat *like, dc__mat *out);
/* DC_E_INVALID if the contiguous output `out_arg` overlaps an element of another argument: inputs are read while
 * outputs are written. In a query tensors may share memory, since nothing is written. */
dc_status dc__check_apart(const dc_linalg *l, const char *fn, const char *out_arg, const dc__mat *out, const char *arg,
                          const dc__mat *in);
/* Contiguous elements, for dc__check_apart(). data NULL: none. */
dc__mat dc__elements(const void *data, int32_t dtype, int64_t count);

#endif
