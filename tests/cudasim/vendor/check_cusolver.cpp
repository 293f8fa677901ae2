/* Compiled, not run (make check-vendor-headers): our prototypes of cuSOLVER's functions against NVIDIA's cusolverDn.h.
 */
#include <cusolverDn.h>

#include "device/cuda/cusolver.h"
#include "same_type.h"

#define X(name, arguments) \
  static_assert(same<decltype(dc__cusolver::name), decltype(&::name)>::value, #name " differs from cusolverDn.h");
DC__CUSOLVER_FUNCTIONS(X)
#if CUSOLVER_VERSION >= 11702
DC__CUSOLVER_BATCH_FUNCTIONS(X)
#endif
#undef X

NUMBER(DC__CUSOLVER_ALLOC_FAILED, CUSOLVER_STATUS_ALLOC_FAILED);
NUMBER(DC__CUSOLVER_VALUES, CUSOLVER_EIG_MODE_NOVECTOR);
NUMBER(DC__CUSOLVER_VECTORS, CUSOLVER_EIG_MODE_VECTOR);
NUMBER(DC__CUSOLVER_LOWER, CUBLAS_FILL_MODE_LOWER);
NUMBER(DC__CUSOLVER_R_32F, CUDA_R_32F);
NUMBER(DC__CUSOLVER_R_64F, CUDA_R_64F);
