/* NCCL (libnccl.so.2) as a function table filled at run time. The prototypes are libdc's own, so the build needs no
 * NVIDIA header and the library no NCCL. `make check-vendor-headers` compares them with nccl.h. The functions are those
 * of NCCL 2.19, and optional later ones, which may be NULL. The config ends with 2.19's fields; its version field tells
 * newer versions so. */
#ifndef DC_COMM_NCCL_LIBRARY_H
#define DC_COMM_NCCL_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#include "dc_api.h"

typedef int dc__nccl_result;
typedef struct ncclComm *dc__nccl_handle;
typedef void *dc__nccl_window;
typedef struct dc__nccl_id {
  char bytes[128];
} dc__nccl_id;

typedef struct dc__nccl_config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
} dc__nccl_config;

enum { /* the numbers are NCCL's */
       DC__NCCL_OK = 0,
       DC__NCCL_CUDA_ERROR = 1,
       DC__NCCL_INVALID_ARGUMENT = 4,
       DC__NCCL_INVALID_USAGE = 5,
       DC__NCCL_REMOTE_ERROR = 6,
       DC__NCCL_IN_PROGRESS = 7,
       DC__NCCL_INT8 = 0,
       DC__NCCL_SYMMETRIC = 1,           /* of a window: it is used at equal offsets */
       DC__NCCL_MIN_VERSION = 21900,     /* 2.19.0 */
       DC__NCCL_WINDOWS_VERSION = 22700, /* 2.27.0 */
};
#define DC__NCCL_MAGIC 0xcafebeefU
#define DC__NCCL_UNSET INT32_MIN

/* NCCL's contracts; tests/cudasim/nccl refuses calls that break them, except where a line says that it cannot.
 *
 * thread     One thread at a time uses a communicator; ncclCommGetAsyncError and ncclCommAbort may come from any. One
 *            thread makes the calls of a group, from ncclGroupStart to ncclGroupEnd.
 * progress   Communicators do not block. A call may return DC__NCCL_IN_PROGRESS; until ncclCommGetAsyncError returns
 *            another state, the communicator takes no call but an abort. A group of several ranks is put on its stream
 *            by a thread of NCCL's.
 * fit        All ranks make the same calls in the same order, of the same sizes, for peers of the communicator.
 * error      A call returns its error, or ncclCommGetAsyncError finds it; another rank's error is not reported here.
 * lifetime   Buffers stay until the stream is past the group, and are neither freed nor deregistered before.
 *            ncclCommDestroy and ncclCommAbort end the handle whatever they return. All ranks of a machine call them,
 *            and a call may wait for the others.
 * capture    A group on a captured stream runs with each launch; its communicator stays while the graph does, so
 *            that ncclCommAbort waits for it. Connections and registrations are made before. */
#define DC__NCCL_FUNCTIONS(X)                                                                                       \
  X(ncclGetVersion, dc__nccl_result, (int *version))                                                                \
  X(ncclGetUniqueId, dc__nccl_result, (dc__nccl_id * id))                                                           \
  X(ncclCommInitRankConfig, dc__nccl_result,                                                                        \
    (dc__nccl_handle * comm, int ranks, dc__nccl_id id, int rank, dc__nccl_config *config))                         \
  X(ncclCommFinalize, dc__nccl_result, (dc__nccl_handle comm))                                                      \
  X(ncclCommDestroy, dc__nccl_result, (dc__nccl_handle comm))                                                       \
  X(ncclCommAbort, dc__nccl_result, (dc__nccl_handle comm))                                                         \
  X(ncclCommGetAsyncError, dc__nccl_result, (dc__nccl_handle comm, dc__nccl_result * error))                        \
  X(ncclGetErrorString, const char *, (dc__nccl_result error))                                                      \
  X(ncclGetLastError, const char *, (dc__nccl_handle comm))                                                         \
  X(ncclGroupStart, dc__nccl_result, (void))                                                                        \
  X(ncclGroupEnd, dc__nccl_result, (void))                                                                          \
  X(ncclAllGather, dc__nccl_result,                                                                                 \
    (const void *send, void *recv, size_t count, int dtype, dc__nccl_handle comm, void *stream))                    \
  X(ncclBroadcast, dc__nccl_result,                                                                                 \
    (const void *send, void *recv, size_t count, int dtype, int root, dc__nccl_handle comm, void *stream))          \
  X(ncclSend, dc__nccl_result,                                                                                      \
    (const void *data, size_t count, int dtype, int peer, dc__nccl_handle comm, void *stream))                      \
  X(ncclRecv, dc__nccl_result, (void *data, size_t count, int dtype, int peer, dc__nccl_handle comm, void *stream)) \
  X(ncclMemAlloc, dc__nccl_result, (void **ptr, size_t bytes))                                                      \
  X(ncclMemFree, dc__nccl_result, (void *ptr))                                                                      \
  X(ncclCommRegister, dc__nccl_result, (const dc__nccl_handle comm, void *data, size_t bytes, void **handle))       \
  X(ncclCommDeregister, dc__nccl_result, (const dc__nccl_handle comm, void *handle))

/* Windows: registration is collective. NCCL may write *window until the communicator is ready again; it is NULL if the
 * cards support none. */
#define DC__NCCL_OPTIONAL_FUNCTIONS(X)                                                    \
  X(ncclCommWindowRegister, dc__nccl_result,                                              \
    (dc__nccl_handle comm, void *data, size_t bytes, dc__nccl_window *window, int flags)) \
  X(ncclCommWindowDeregister, dc__nccl_result, (dc__nccl_handle comm, dc__nccl_window window))

typedef struct dc__nccl_library {
  int version; /* 22907 is 2.29.7 */
#define X(name, result, arguments) result(*name) arguments;
  DC__NCCL_FUNCTIONS(X)
  DC__NCCL_OPTIONAL_FUNCTIONS(X)
#undef X
} dc__nccl_library;

/* DC_E_UNSUPPORTED if there is no usable NCCL, with the reason. */
dc_status dc__nccl_open(dc__nccl_library *library);

#endif
