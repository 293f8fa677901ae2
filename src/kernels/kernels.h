/* The header of the module, with the elementwise work of runtime and transports on host memory. Each family has a plain
 * C version, which is the reference, and faster ones under the same stem in x86/, chosen by cpuid. 16-bit floats are
 * computed in float32 and rounded to nearest even, once. */
#ifndef DC_KERNELS_H
#define DC_KERNELS_H

#include "device/device.h"
#include "kernels/batch_slice.h"
#include "kernels/eigen/nearest_kron.h"
#include "kernels/eigen/newton_convergence.h"
#include "kernels/eigen/tridiagonal.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/nonfinite.h"
#include "kernels/gemm/blas.h"
#include "kernels/gemm/gemm.h"
#include "kernels/nn/rowops.h"
#include "kernels/optim/update.h"
#include "kernels/threadpool.h"

/* A device's report on a matrix; kernels/cuda/matrix/matrix_args.h defines it. */
typedef struct dc__cuda_matrix_stats dc__cuda_matrix_stats;

/* cast.c: dst[i] = (dst_dtype)src[i], for the seven types of dc__dtype_is_castable. Float to integer truncates. dst and
 * src must not overlap. */
void dc__cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);

/* accumulate.c: dst[i] += src[i], computed in float32 (float64 if either is; integers in int64), stored in dst's
 * type. */
void dc__accumulate(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);

/* combine.c: dst = src, or dst += src with `add`, for floating-point types, with the bits of dc__cast() and
 * dc__accumulate(). Returns whether all elements of dst are finite afterwards. */
bool dc__combine(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count, bool add);

/* reduce.c: the fixed-order reduction over ranks.
 *   t = tree(src[0][i], …, src[n-1][i]): ((0+1)+(2+3))+…, pairs of neighbours, a lone last one moves up.
 *   r = t / n if mean, else t. The type is float32 for 16-bit types and float32, and float64 for float64. Integers are
 *   summed in their own type (wrapping) and take no mean.
 *   dst[i] = accumulate ? dst[i] + r : r. First r is converted to dst's type; the sum is as in dc__accumulate.
 * dst may be one of the sources only at the same element and type. */
void dc__reduce(const dc__reduction *r);
/* Divides float32 or float64 values by n, as dc__reduce() does for a mean. */
void dc__divide(void *values, int32_t dtype, int64_t count, int32_t n);

/* copy.c: memcpy; large copies use non-temporal stores, so that a gathered weight does not evict the caller's data from
 * the caches. */
void dc__copy(void *dst, const void *src, size_t bytes);

/* Prefetches memory that will be used soon, where hardware prefetchers cannot predict that. */
static inline void dc__prefetch(const void *memory, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch((const char *)memory + at);
  }
}

/* stream.c: cast and accumulate in stream order, or with a NULL stream on the calling thread. A device with memory of
 * its own has kernels of its own (cuda/), which need elements aligned to their size. */
void dc__stream_cast(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                     int64_t count);
void dc__stream_accumulate(dc_stream *stream, void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype,
                           int64_t count);

/* dc__combine() in stream order. If an element of dst is not finite, sets `found` in *nonfinite, which is in device
 * memory, and raises its key to `key`. nonfinite may be NULL. */
void dc__stream_combine(dc_stream *stream, const dc__combination *c, dc__nonfinite *nonfinite, uint64_t key);

/* dc__reduce() and dc__copy() on the calling thread if `internal` is NULL. Otherwise it is the internal stream of the
 * data's device, where they are queued; the caller then calls dc__device_sync_internal(). */
void dc__internal_reduce(dc_stream *internal, const dc__reduction *r);
void dc__internal_copy(dc_stream *internal, void *dst, const void *src, size_t bytes);

/* Levels of instruction sets, each of which includes those below it: plain C, AVX2, AVX-512, its bfloat16 products,
 * AMX. */
enum { DC__KERNELS_LEVELS = 5 };
extern const char *const dc__kernels_names[DC__KERNELS_LEVELS];
/* Limits the level that may be used, for tests. Returns the level in use. */
int32_t dc__kernels_limit(int32_t limit);
int32_t dc__kernels_level(void);
/* Returns DC_E_INVALID if LIBDC_CPU in the environment is no level's name. */
dc_status dc__kernels_check(const char *fn);

#endif
