/* CUDA's driver, libcuda.so.1, as a table that is filled at run time. The prototypes are our own, so that a build needs
 * no header of NVIDIA's, and a load none of its libraries. `make check-vendor-headers` compares them with cuda.h. Every
 * driver since CUDA 11.3 has these functions; names with _v2 are their names in the ABI. */
#ifndef DC_CUDA_DRIVER_H
#define DC_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int dc__cu_result;
typedef int dc__cu_device;
typedef unsigned long long dc__cu_ptr;
typedef struct CUctx_st *dc__cu_context;
typedef struct CUstream_st *dc__cu_stream;
typedef struct CUevent_st *dc__cu_event;
typedef struct CUmod_st *dc__cu_module;
typedef struct CUfunc_st *dc__cu_function;
typedef struct CUmemPoolHandle_st *dc__cu_pool;

typedef struct dc__cu_pool_props {
  int alloc_type;   /* 1: pinned, the only one */
  int handle_types; /* 0: not for other processes */
  struct {
    int type; /* 1: a device */
    int id;
  } location;
  void *security;
  size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
} dc__cu_pool_props;

/* A device's access to a pool's memory. */
typedef struct dc__cu_access {
  struct {
    int type; /* 1: a device */
    int id;
  } location;
  int flags;
} dc__cu_access;

enum { /* the numbers are the driver's */
       DC__CU_OUT_OF_MEMORY = 2,
       DC__CU_DEVICE_UNAVAILABLE = 46,
       DC__CU_INVALID_IMAGE = 200,
       DC__CU_NO_BINARY = 209,
       DC__CU_NOT_READY = 600,
       DC__CU_STREAM_NON_BLOCKING = 1,
       DC__CU_STREAM_LEGACY = 1, /* another name of the default stream, as an address */
       DC__CU_EVENT_BLOCKING_SYNC = 1,
       DC__CU_EVENT_NO_TIMING = 2,
       DC__CU_HOST_PORTABLE = 1,
       DC__CU_CAPTURE_RELAXED = 2,       /* capture mode: this thread's calls disturb no capture under way */
       DC__CU_CAPTURE_INVALIDATED = 901, /* error: a call has spoiled the capture that the stream is part of */
       DC__CU_STATUS_INVALIDATED = 2,    /* cuStreamIsCapturing's status for the same */
       DC__CU_ATTRIBUTE_MAJOR = 75,
       DC__CU_ATTRIBUTE_MINOR = 76,
       DC__CU_ATTRIBUTE_POOLS = 115,
       DC__CU_POINTER_ACCESS = 16, /* a pointer's attribute: the current context's access */
       DC__CU_ACCESS_READ = 1,
       DC__CU_ACCESS_ALL = 3,
       DC__CU_PEER_ALREADY = 704,        /* error: access is enabled already */
       DC__CU_FUNCTION_SHARED_BYTES = 8, /* a function's attribute: maximum bytes of dynamic shared memory */
       DC__CU_OLDEST_DRIVER = 12000,     /* CUDA 12.0, whose version the kernels' PTX has (scripts/cuda_image.py) */
};

/* The driver's contracts. tests/cudasim/driver refuses what breaks them, except where a line says that it cannot.
 *
 * thread     Any thread may call. Functions of contexts, memory, streams, events and modules want a current context. A
 *            launch or a record wants the stream's, or the event's, device.
 * error      An asynchronous error may be earlier work's; one that loses the device is returned by all later calls. A
 *            call that frees does so whatever it returns.
 * alignment  Memory of a pool and pinned memory begin at multiples of 256 bytes. A kernel's access wants the alignment
 *            of its type.
 * size       Allocations, copies and memsets want at least one byte. A grid has at most 65,535 blocks in y and z, and
 *            shared memory above 48 KiB wants cuFuncSetAttribute first.
 * flags      Streams are non-blocking. Events have no flags but the two above, waits for events and peer access have
 *            none. A pool's memory is pinned memory of a device.
 * lifetime   A pool's memory is freed when the stream of cuMemFreeAsync gets there, the pool after its last block. An
 *            event may be destroyed while a wait for it is queued. A launch copies its arguments before it returns.
 *            A module outlives its kernels' work, which the simulator does not check.
 * capture    Pinned memory, modules and waits of the host spoil a capture on any thread, unless this one relaxed its
 *            mode. cuCtxSynchronize does so in every mode, and so does a wait for captured work. Streams may not wait
 *            across a capture's border. A spoiled capture's streams take no work until it ends, without a graph. */
#define DC__CU_FUNCTIONS(X)                                                                                           \
  X(cuInit, (unsigned flags))                                                                                         \
  X(cuDriverGetVersion, (int *version))                                                                               \
  X(cuGetErrorName, (dc__cu_result error, const char **name))                                                         \
  X(cuGetErrorString, (dc__cu_result error, const char **text))                                                       \
  X(cuDeviceGetCount, (int *count))                                                                                   \
  X(cuDeviceGet, (dc__cu_device * device, int number))                                                                \
  X(cuDeviceGetName, (char *name, int length, dc__cu_device device))                                                  \
  X(cuDeviceGetAttribute, (int *value, int attribute, dc__cu_device device))                                          \
  X(cuDevicePrimaryCtxRetain, (dc__cu_context * context, dc__cu_device device))                                       \
  X(cuDevicePrimaryCtxRelease_v2, (dc__cu_device device))                                                             \
  X(cuCtxPushCurrent_v2, (dc__cu_context context))                                                                    \
  X(cuCtxPopCurrent_v2, (dc__cu_context * context))                                                                   \
  X(cuCtxSynchronize, (void))                                                                                         \
  X(cuThreadExchangeStreamCaptureMode, (int *mode))                                                                   \
  X(cuDeviceCanAccessPeer, (int *can, dc__cu_device device, dc__cu_device peer))                                      \
  X(cuCtxEnablePeerAccess, (dc__cu_context peer, unsigned flags))                                                     \
  X(cuPointerGetAttribute, (void *value, int attribute, dc__cu_ptr ptr))                                              \
  X(cuMemGetInfo_v2, (size_t * free_bytes, size_t * total))                                                           \
  X(cuMemPoolCreate, (dc__cu_pool * pool, const dc__cu_pool_props *props))                                            \
  X(cuMemPoolDestroy, (dc__cu_pool pool))                                                                             \
  X(cuMemPoolSetAccess, (dc__cu_pool pool, const dc__cu_access *whose, size_t count))                                 \
  X(cuMemAllocFromPoolAsync, (dc__cu_ptr * ptr, size_t bytes, dc__cu_pool pool, dc__cu_stream stream))                \
  X(cuMemFreeAsync, (dc__cu_ptr ptr, dc__cu_stream stream))                                                           \
  X(cuMemHostAlloc, (void **ptr, size_t bytes, unsigned flags))                                                       \
  X(cuMemFreeHost, (void *ptr))                                                                                       \
  X(cuStreamCreate, (dc__cu_stream * stream, unsigned flags))                                                         \
  X(cuStreamDestroy_v2, (dc__cu_stream stream))                                                                       \
  X(cuStreamSynchronize, (dc__cu_stream stream))                                                                      \
  X(cuStreamIsCapturing, (dc__cu_stream stream, int *status))                                                         \
  X(cuStreamWaitEvent, (dc__cu_stream stream, dc__cu_event event, unsigned flags))                                    \
  X(cuEventCreate, (dc__cu_event * event, unsigned flags))                                                            \
  X(cuEventDestroy_v2, (dc__cu_event event))                                                                          \
  X(cuEventRecord, (dc__cu_event event, dc__cu_stream stream))                                                        \
  X(cuEventQuery, (dc__cu_event event))                                                                               \
  X(cuEventSynchronize, (dc__cu_event event))                                                                         \
  X(cuEventElapsedTime, (float *milliseconds, dc__cu_event from, dc__cu_event to))                                    \
  X(cuMemcpyAsync, (dc__cu_ptr dst, dc__cu_ptr src, size_t bytes, dc__cu_stream stream))                              \
  X(cuMemsetD8Async, (dc__cu_ptr dst, unsigned char value, size_t bytes, dc__cu_stream stream))                       \
  X(cuModuleLoadData, (dc__cu_module * module, const void *image))                                                    \
  X(cuModuleUnload, (dc__cu_module module))                                                                           \
  X(cuModuleGetFunction, (dc__cu_function * function, dc__cu_module module, const char *name))                        \
  X(cuFuncSetAttribute, (dc__cu_function function, int attribute, int value))                                         \
  X(cuLaunchKernel,                                                                                                   \
    (dc__cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, dc__cu_stream stream, void **args, void **extra))

typedef struct dc__cuda_driver {
#define X(name, arguments) dc__cu_result(*name) arguments;
  DC__CU_FUNCTIONS(X)
#undef X
} dc__cuda_driver;

#endif
