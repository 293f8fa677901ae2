/* Tensors over memory of libdc: each holds one reference to its dc_buffer, and can be found again by its address. */
#ifndef DCT_TENSOR_STORAGE_H
#define DCT_TENSOR_STORAGE_H

#include "shim.h"

/* A tensor over data, which lies in buffer, contiguous if strides is NULL. Takes over the caller's reference, also on
 * failure. NULL and a text in *error if it cannot be made. data is given apart from the buffer because a parameter's
 * memory may be revoked while the reference lives on. */
dct_tensor dct_storage_tensor(void *data, const int64_t *shape, const int64_t *strides, int32_t ndim, int32_t dtype,
                              int32_t device, int32_t index, dc_buffer *buffer, const char **error);

/* A new reference to the buffer that a tensor's first byte belongs to; NULL if the memory is not libdc's. */
dc_buffer *dct_storage_find(const void *data);

#endif
