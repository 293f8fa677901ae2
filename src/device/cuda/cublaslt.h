/* cuBLASLt as a table that is filled at run time, with prototypes of our own, like the driver's in driver.h; `make
 * check-vendor-headers` compares them with cublasLt.h. The functions are in every cuBLASLt of CUDA 12 and 13. */
#ifndef DC_CUDA_CUBLASLT_H
#define DC_CUDA_CUBLASLT_H

#include "device/cuda/driver.h"

typedef struct cublasLtContext *dc__lt_handle;
typedef struct dc__lt_desc_st *dc__lt_desc;
typedef struct dc__lt_layout_st *dc__lt_layout;
typedef struct dc__lt_preference_st *dc__lt_preference;

typedef struct dc__lt_algo {
  uint64_t data[8];
} dc__lt_algo;

typedef struct dc__lt_found {
  dc__lt_algo algo;
  size_t workspace;
  int state; /* 0: the other fields are valid */
  float waves;
  int reserved[4];
} dc__lt_found;

enum { /* the numbers are the library's */
       DC__LT_ALLOC_FAILED = 3,
       DC__LT_INVALID_VALUE = 7,
       DC__LT_NOT_SUPPORTED = 15,
       DC__LT_MAJOR_VERSION = 0,
       DC__LT_R_32F = 0,
       DC__LT_R_64F = 1,
       DC__LT_R_16F = 2,
       DC__LT_R_16BF = 14,
       DC__LT_COMPUTE_32F = 68, /* without TF32 */
       DC__LT_COMPUTE_64F = 70,
       DC__LT_DESC_TRANSA = 3, /* attributes of a product */
       DC__LT_DESC_TRANSB = 4,
       DC__LT_DESC_EPILOGUE = 7,
       DC__LT_DESC_BIAS = 8,
       DC__LT_DESC_AUX = 11,
       DC__LT_DESC_AUX_LD = 12,
       DC__LT_EPILOGUE_NONE = 1,
       DC__LT_EPILOGUE_BIAS = 4,
       DC__LT_EPILOGUE_DGELU = 192,
       DC__LT_EPILOGUE_BGRADB = 512,
       DC__LT_LAYOUT_BATCH = 5, /* attributes of a matrix */
       DC__LT_LAYOUT_STRIDE = 6,
       DC__LT_PREFER_WORKSPACE = 1, /* attributes of a search */
       DC__LT_PREFER_REDUCTION = 3,
       DC__LT_PREFER_ALIGN_A = 5, /* those of B, C and D follow */
       DC__LT_REDUCTION_COMPUTE_TYPE = 2,
       DC__LT_OLDEST = 12, /* the oldest major version that is supported */
};

/* The library's contracts; tests/cudasim/vendor refuses what breaks them, except where a line says that it cannot.
 *
 * thread     Any thread may call, also several with one handle. The handle's device must be current.
 * error      A refused call leaves nothing on the stream. Wrong memory is an error of the device later.
 * alignment  The workspace is a multiple of 256 bytes. A, B, C and D have the alignments that the search was told, and
 *            DGELU wants rows of aux in multiples of 8 elements.
 * size       The workspace is not smaller than the algorithm's, and the stand-in overwrites both of its ends. Layouts
 *            have a leading dimension of at least their rows. D's matrices of a batch do not share elements. A batch
 *            has at most 65,535 matrices.
 * fit        Layouts fit the product at the search, at the check and at the call. An algorithm that was found for
 *            another batch is passed only after cublasLtMatmulAlgoCheck. Epilogues have no batch.
 * pointers   alpha and beta are the host's; they, and an epilogue's bias and aux, are not NULL.
 * lifetime   Descriptors may be destroyed when the call has returned. The workspace belongs to the product until the
 *            stream has run it.
 * capture    cublasLtMatmul may be captured. Its kernels are loaded at their first use, which the stand-in lacks. */
#define DC__LT_FUNCTIONS(X)                                                                                            \
  X(cublasLtGetProperty, (int type, int *value))                                                                       \
  X(cublasLtCreate, (dc__lt_handle * handle))                                                                          \
  X(cublasLtDestroy, (dc__lt_handle handle))                                                                           \
  X(cublasLtMatmulDescCreate, (dc__lt_desc * desc, int compute, int scale))                                            \
  X(cublasLtMatmulDescDestroy, (dc__lt_desc desc))                                                                     \
  X(cublasLtMatmulDescSetAttribute, (dc__lt_desc desc, int attribute, const void *value, size_t bytes))                \
  X(cublasLtMatrixLayoutCreate, (dc__lt_layout * layout, int type, uint64_t rows, uint64_t columns, int64_t ld))       \
  X(cublasLtMatrixLayoutSetAttribute, (dc__lt_layout layout, int attribute, const void *value, size_t bytes))          \
  X(cublasLtMatrixLayoutDestroy, (dc__lt_layout layout))                                                               \
  X(cublasLtMatmulPreferenceCreate, (dc__lt_preference * preference))                                                  \
  X(cublasLtMatmulPreferenceDestroy, (dc__lt_preference preference))                                                   \
  X(cublasLtMatmulPreferenceSetAttribute,                                                                              \
    (dc__lt_preference preference, int attribute, const void *value, size_t bytes))                                    \
  X(cublasLtMatmulAlgoGetHeuristic,                                                                                    \
    (dc__lt_handle handle, dc__lt_desc desc, dc__lt_layout a, dc__lt_layout b, dc__lt_layout c, dc__lt_layout d,       \
     dc__lt_preference preference, int wanted, dc__lt_found *found, int *count))                                       \
  X(cublasLtMatmulAlgoCheck, (dc__lt_handle handle, dc__lt_desc desc, dc__lt_layout a, dc__lt_layout b,                \
                              dc__lt_layout c, dc__lt_layout d, const dc__lt_algo *algo, dc__lt_found *found))         \
  X(cublasLtMatmul,                                                                                                    \
    (dc__lt_handle handle, dc__lt_desc desc, const void *alpha, const void *a, dc__lt_layout a_layout, const void *b,  \
     dc__lt_layout b_layout, const void *beta, const void *c, dc__lt_layout c_layout, void *d, dc__lt_layout d_layout, \
     const dc__lt_algo *algo, void *workspace, size_t workspace_bytes, dc__cu_stream stream))

typedef struct dc__lt {
#define X(name, arguments) int(*name) arguments;
  DC__LT_FUNCTIONS(X)
#undef X
} dc__lt;

#endif
