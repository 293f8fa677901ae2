/* Compiled, not run (make check-vendor-headers): our prototypes of the driver's functions against NVIDIA's cuda.h. Types
 * agree when they are passed alike: pointers, integers and enumerations of one size. */
#include <type_traits>

#include <cuda.h>

#include "device/cuda/driver.h"

namespace {

template <typename T> constexpr int kind() {
  return std::is_pointer<T>::value ? 1 : std::is_enum<T>::value || std::is_integral<T>::value ? 2 : 3;
}

template <typename A, typename B> constexpr bool alike() {
  return sizeof(A) == sizeof(B) && kind<A>() == kind<B>() && kind<A>() != 3;
}

template <typename F, typename G> struct same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct same<R (*)(A...), S (*)(B...)>
    : std::integral_constant<bool, sizeof...(A) == sizeof...(B) && alike<R, S>() && (alike<A, B>() && ...)> {};

/* A thread of one argument less, or of another kind, is found. */
static_assert(!same<int (*)(int), int (*)(int *)>::value, "");

#define X(name, arguments) \
  static_assert(same<decltype(dc__cuda_driver::name), decltype(&::name)>::value, #name " differs from cuda.h");
DC__CU_FUNCTIONS(X)
#undef X

#define NUMBER(ours, theirs) static_assert((int)(ours) == (int)(theirs), #ours " differs from cuda.h")
NUMBER(DC__CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
NUMBER(DC__CU_NOT_READY, CUDA_ERROR_NOT_READY);
NUMBER(DC__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
NUMBER(DC__CU_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
NUMBER(DC__CU_EVENT_NO_TIMING, CU_EVENT_DISABLE_TIMING);
NUMBER(DC__CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
NUMBER(DC__CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
NUMBER(DC__CU_ATTRIBUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
NUMBER(DC__CU_ATTRIBUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
NUMBER(DC__CU_ATTRIBUTE_POOLS, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);

static_assert(sizeof(dc__cu_pool_props) == sizeof(CUmemPoolProps), "CUmemPoolProps has another size");
static_assert(offsetof(dc__cu_pool_props, location) == offsetof(CUmemPoolProps, location), "location lies elsewhere");
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == 1 && CU_MEM_LOCATION_TYPE_DEVICE == 1, "what pools are made of");

} // namespace
