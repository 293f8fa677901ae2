/* cuSOLVER as a table that is filled at run time, with prototypes of our own, as cublaslt.h has cuBLASLt's; `make
 * check-vendor-headers` compares them with cusolverDn.h. The functions are in every cuSOLVER of CUDA 12 and 13, those
 * for batches in that of CUDA 12.8 and later. */
#ifndef DC_CUDA_CUSOLVER_H
#define DC_CUDA_CUSOLVER_H

#include "device/cuda/driver.h"

typedef struct cusolverDnContext *dc__solver_handle;
typedef struct cusolverDnParams *dc__solver_params;

enum { /* the numbers are the library's */
       DC__SOLVER_ALLOC_FAILED = 2,
       DC__SOLVER_VALUES = 0, /* alone, or with vectors */
       DC__SOLVER_VECTORS = 1,
       DC__SOLVER_LOWER = 0,
       DC__SOLVER_R_32F = 0,
       DC__SOLVER_R_64F = 1,
       DC__SOLVER_OLDEST = 11000,
       DC__SOLVER_BATCHES = 11702,
};

#define DC__SOLVER_FUNCTIONS(X)                                                                                  \
  X(cusolverGetVersion, (int *version))                                                                          \
  X(cusolverDnCreate, (dc__solver_handle * handle))                                                              \
  X(cusolverDnDestroy, (dc__solver_handle handle))                                                               \
  X(cusolverDnSetStream, (dc__solver_handle handle, dc__cu_stream stream))                                       \
  X(cusolverDnCreateParams, (dc__solver_params * params))                                                        \
  X(cusolverDnDestroyParams, (dc__solver_params params))                                                         \
  X(cusolverDnXsyevd_bufferSize, (dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, \
                                  int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,  \
                                  int compute_type, size_t *device_bytes, size_t *host_bytes))                   \
  X(cusolverDnXsyevd, (dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, int64_t n, \
                       int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,    \
                       size_t device_bytes, void *host, size_t host_bytes, int *info))                           \
  X(cusolverDnSgeqrf_bufferSize, (dc__solver_handle handle, int m, int n, float *a, int lda, int *size))         \
  X(cusolverDnSgeqrf,                                                                                            \
    (dc__solver_handle handle, int m, int n, float *a, int lda, float *tau, float *work, int size, int *info))   \
  X(cusolverDnSorgqr_bufferSize,                                                                                 \
    (dc__solver_handle handle, int m, int n, int k, const float *a, int lda, const float *tau, int *size))       \
  X(cusolverDnSorgqr, (dc__solver_handle handle, int m, int n, int k, float *a, int lda, const float *tau,       \
                       float *work, int size, int *info))

#define DC__SOLVER_BATCH_FUNCTIONS(X)                                                                                  \
  X(cusolverDnXsyevBatched_bufferSize, (dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, \
                                        int64_t n, int a_type, const void *a, int64_t lda, int w_type, const void *w,  \
                                        int compute_type, size_t *device_bytes, size_t *host_bytes, int64_t count))    \
  X(cusolverDnXsyevBatched, (dc__solver_handle handle, dc__solver_params params, int vectors, int triangle, int64_t n, \
                             int a_type, void *a, int64_t lda, int w_type, void *w, int compute_type, void *device,    \
                             size_t device_bytes, void *host, size_t host_bytes, int *info, int64_t count))

typedef struct dc__solver {
#define X(name, arguments) int(*name) arguments;
  DC__SOLVER_FUNCTIONS(X)
  DC__SOLVER_BATCH_FUNCTIONS(X)
#undef X
} dc__solver;

#endif
