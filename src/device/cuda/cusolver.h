/* cuSOLVER as a table that is filled at run time, with prototypes of our own, like cuBLASLt's in cublaslt.h; `make
 * check-vendor-headers` compares them with cusolverDn.h. The functions are in every cuSOLVER of CUDA 12 and 13, those
 * for batches in that of CUDA 12.8 and later. */
#ifndef DC_CUDA_CUSOLVER_H
#define DC_CUDA_CUSOLVER_H

#include "device/cuda/driver.h"

typedef struct cusolverDnContext *dc__cusolver_handle;
typedef struct cusolverDnParams *dc__cusolver_params;

enum { /* the numbers are the library's */
       DC__CUSOLVER_ALLOC_FAILED = 2,
       DC__CUSOLVER_VALUES = 0, /* eigenvalues alone, or with vectors */
       DC__CUSOLVER_VECTORS = 1,
       DC__CUSOLVER_LOWER = 0,
       DC__CUSOLVER_R_32F = 0,
       DC__CUSOLVER_R_64F = 1,
       DC__CUSOLVER_OLDEST = 11000,
       DC__CUSOLVER_OLDEST_BATCHED = 11702,
};

/* The library's contracts; tests/cudasim/vendor refuses what breaks them, except where a line says that it cannot.
 *
 * thread     One thread at a time uses a handle, which also has a stream. The stand-in cannot see two that take turns
 *            without a lock.
 * error      A matrix that does not converge is reported by info on the device, not by the call.
 * size       Workspaces are not smaller than those of the same arguments' _bufferSize. A batch has at most 2^31 / 8
 *            elements. Matrix, values and computation have one type.
 * lifetime   Workspaces, also the host's, belong to the call until the stream has run it.
 * capture    Decompositions may wait for their stream, which no capture allows. Those of the stand-in do not wait. */
#define DC__CUSOLVER_FUNCTIONS(X)                                                                                    \
  X(cusolverGetVersion, (int *version))                                                                              \
  X(cusolverDnCreate, (dc__cusolver_handle * handle))                                                                \
  X(cusolverDnDestroy, (dc__cusolver_handle handle))                                                                 \
  X(cusolverDnSetStream, (dc__cusolver_handle handle, dc__cu_stream stream))                                         \
  X(cusolverDnCreateParams, (dc__cusolver_params * params))                                                          \
  X(cusolverDnDestroyParams, (dc__cusolver_params params))                                                           \
  X(cusolverDnXsyevd_bufferSize, (dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, \
                                  int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,      \
                                  int compute_type, size_t *device_bytes, size_t *host_bytes))                       \
  X(cusolverDnXsyevd, (dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, int64_t n, \
                       int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,        \
                       size_t device_bytes, void *host, size_t host_bytes, int *info))                               \
  X(cusolverDnSgeqrf_bufferSize, (dc__cusolver_handle handle, int m, int n, float *a, int lda, int *size))           \
  X(cusolverDnSgeqrf,                                                                                                \
    (dc__cusolver_handle handle, int m, int n, float *a, int lda, float *tau, float *work, int size, int *info))     \
  X(cusolverDnSorgqr_bufferSize,                                                                                     \
    (dc__cusolver_handle handle, int m, int n, int k, const float *a, int lda, const float *tau, int *size))         \
  X(cusolverDnSorgqr, (dc__cusolver_handle handle, int m, int n, int k, float *a, int lda, const float *tau,         \
                       float *work, int size, int *info))

#define DC__CUSOLVER_BATCH_FUNCTIONS(X)                                                                          \
  X(cusolverDnXsyevBatched_bufferSize,                                                                           \
    (dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, int64_t n, int a_type,   \
     const void *a, int64_t lda, int w_type, const void *w, int compute_type, size_t *device_bytes,              \
     size_t *host_bytes, int64_t count))                                                                         \
  X(cusolverDnXsyevBatched,                                                                                      \
    (dc__cusolver_handle handle, dc__cusolver_params params, int vectors, int triangle, int64_t n, int a_type,   \
     void *a, int64_t lda, int w_type, void *w, int compute_type, void *device, size_t device_bytes, void *host, \
     size_t host_bytes, int *info, int64_t count))

typedef struct dc__cusolver {
#define X(name, arguments) int(*name) arguments;
  DC__CUSOLVER_FUNCTIONS(X)
  DC__CUSOLVER_BATCH_FUNCTIONS(X)
#undef X
} dc__cusolver;

#endif
