/* What stream.c calls for devices that have kernels; the functions of kernels.h of the same names say what they do. */
#ifndef DC_KERNELS_CUDA_LAUNCH_H
#define DC_KERNELS_CUDA_LAUNCH_H

#include "device/device.h"

void dc__cuda_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);
void dc__cuda_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                         int64_t count);
void dc__cuda_reduce(dc_stream *stream, void *dst, int32_t dst_dtype, const void *const *src, int32_t n,
                     int32_t src_dtype, int64_t count, bool mean, bool accumulate);

#endif
