/* Compiled, not run (make check-vendor-headers): our prototypes of NCCL's functions against NVIDIA's nccl.h, from 2.19
 * on. */
#include <climits>
#include <cstddef>

#include <nccl.h>

#include "same_type.h"
#include "comm/nccl/library.h"

/* The one struct that is passed by value. */
template <> constexpr int kind<ncclUniqueId>() {
  return 4;
}
template <> constexpr int kind<dc__nccl_id>() {
  return 4;
}

#define X(name, result, arguments) \
  static_assert(same<decltype(dc__nccl_library::name), decltype(&::name)>::value, #name " differs from nccl.h");
DC__NCCL_FUNCTIONS(X)
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
DC__NCCL_OPTIONAL_FUNCTIONS(X)
NUMBER(DC__NCCL_SYMMETRIC, NCCL_WIN_COLL_SYMMETRIC);
NUMBER(DC__NCCL_WINDOWS_VERSION, NCCL_VERSION(2, 27, 0));
#endif
#undef X

NUMBER(DC__NCCL_OK, ncclSuccess);
NUMBER(DC__NCCL_CUDA_ERROR, ncclUnhandledCudaError);
NUMBER(DC__NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
NUMBER(DC__NCCL_INVALID_USAGE, ncclInvalidUsage);
NUMBER(DC__NCCL_REMOTE_ERROR, ncclRemoteError);
NUMBER(DC__NCCL_IN_PROGRESS, ncclInProgress);
NUMBER(DC__NCCL_INT8, ncclInt8);
NUMBER(DC__NCCL_MIN_VERSION, NCCL_VERSION(2, 19, 0));
NUMBER(DC__NCCL_UNSET, NCCL_CONFIG_UNDEF_INT);
static_assert(sizeof(ncclUniqueId) == sizeof(dc__nccl_id), "ncclUniqueId has another size");

#define FIELD(ours, theirs) \
  static_assert(offsetof(dc__nccl_config, ours) == offsetof(ncclConfig_t, theirs), #theirs " lies elsewhere")
FIELD(magic, magic);
FIELD(version, version);
FIELD(blocking, blocking);
FIELD(cga_cluster_size, cgaClusterSize);
FIELD(min_ctas, minCTAs);
FIELD(max_ctas, maxCTAs);
FIELD(net_name, netName);
FIELD(split_share, splitShare);
constexpr ncclConfig_t usual = NCCL_CONFIG_INITIALIZER;
static_assert(usual.magic == DC__NCCL_MAGIC, "the config's mark is another");
