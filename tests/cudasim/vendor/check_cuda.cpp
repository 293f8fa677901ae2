/* Compiled, not run (make check-vendor-headers): our prototypes of the driver's functions against NVIDIA's cuda.h. */
#include <cuda.h>

#include "device/cuda/driver.h"
#include "same_type.h"

#define X(name, arguments) \
  static_assert(same<decltype(dc__cuda_driver::name), decltype(&::name)>::value, #name " differs from cuda.h");
DC__CU_FUNCTIONS(X)
#undef X

NUMBER(DC__CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
NUMBER(DC__CU_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
NUMBER(DC__CU_NOT_READY, CUDA_ERROR_NOT_READY);
NUMBER(DC__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
NUMBER(DC__CU_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
NUMBER(DC__CU_EVENT_NO_TIMING, CU_EVENT_DISABLE_TIMING);
NUMBER(DC__CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
NUMBER(DC__CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
NUMBER(DC__CU_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
NUMBER(DC__CU_STATUS_INVALIDATED, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
NUMBER(DC__CU_ATTRIBUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
NUMBER(DC__CU_ATTRIBUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
NUMBER(DC__CU_ATTRIBUTE_POOLS, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
NUMBER(DC__CU_FUNCTION_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
NUMBER(DC__CU_POINTER_ACCESS, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
NUMBER(DC__CU_ACCESS_READ, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ);
NUMBER(DC__CU_ACCESS_ALL, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
NUMBER(DC__CU_PEER_ALREADY, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);

static_assert(sizeof(dc__cu_pool_props) == sizeof(CUmemPoolProps), "CUmemPoolProps has another size");
static_assert(offsetof(dc__cu_pool_props, location) == offsetof(CUmemPoolProps, location), "location lies elsewhere");
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == 1 && CU_MEM_LOCATION_TYPE_DEVICE == 1, "what pools are made of");
static_assert(sizeof(dc__cu_access) == sizeof(CUmemAccessDesc), "CUmemAccessDesc has another size");
static_assert(offsetof(dc__cu_access, flags) == offsetof(CUmemAccessDesc, flags), "its flags lie elsewhere");
