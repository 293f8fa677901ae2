/* Compiled, not run (make check-vendor-headers): our prototypes of cuBLASLt's functions against NVIDIA's cublasLt.h. */
#include <cublasLt.h>

#include "device/cuda/cublaslt.h"
#include "vendor_same.h"

#define X(name, arguments) \
  static_assert(same<decltype(dc__lt::name), decltype(&::name)>::value, #name " differs from cublasLt.h");
DC__LT_FUNCTIONS(X)
#undef X

NUMBER(DC__LT_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED);
NUMBER(DC__LT_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED);
NUMBER(DC__LT_MAJOR_VERSION, MAJOR_VERSION);
NUMBER(DC__LT_R_32F, CUDA_R_32F);
NUMBER(DC__LT_R_64F, CUDA_R_64F);
NUMBER(DC__LT_R_16F, CUDA_R_16F);
NUMBER(DC__LT_R_16BF, CUDA_R_16BF);
NUMBER(DC__LT_COMPUTE_32F, CUBLAS_COMPUTE_32F);
NUMBER(DC__LT_COMPUTE_64F, CUBLAS_COMPUTE_64F);
NUMBER(DC__LT_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA);
NUMBER(DC__LT_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB);
NUMBER(DC__LT_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
NUMBER(DC__LT_DESC_BIAS, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
NUMBER(DC__LT_DESC_AUX, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
NUMBER(DC__LT_DESC_AUX_LD, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
NUMBER(DC__LT_EPILOGUE_NONE, CUBLASLT_EPILOGUE_DEFAULT);
NUMBER(DC__LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
NUMBER(DC__LT_EPILOGUE_GELU_BACK, CUBLASLT_EPILOGUE_DGELU);
NUMBER(DC__LT_PREFER_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
NUMBER(DC__LT_PREFER_REDUCTION, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
NUMBER(DC__LT_PREFER_ALIGN_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
NUMBER(DC__LT_PREFER_ALIGN_A + 1, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
NUMBER(DC__LT_PREFER_ALIGN_A + 2, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
NUMBER(DC__LT_PREFER_ALIGN_A + 3, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
NUMBER(DC__LT_REDUCTION_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);

static_assert(sizeof(dc__lt_algo) == sizeof(cublasLtMatmulAlgo_t), "cublasLtMatmulAlgo_t has another size");
static_assert(sizeof(dc__lt_found) == sizeof(cublasLtMatmulHeuristicResult_t), "a heuristic's result has another size");
static_assert(offsetof(dc__lt_found, state) == offsetof(cublasLtMatmulHeuristicResult_t, state), "its state lies elsewhere");
static_assert(CUBLAS_OP_N == 0 && CUBLAS_OP_T == 1 && sizeof(cublasOperation_t) == sizeof(int), "transposed or not");
static_assert(sizeof(cublasLtEpilogue_t) == sizeof(int), "an epilogue is an int");
