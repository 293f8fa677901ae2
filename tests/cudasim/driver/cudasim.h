/* A CUDA driver without a card: it provides on the CPU what libdc's CUDA device uses of libcuda.so.1. The device's own
 * sources, and its kernels compiled as C++, run on it unchanged, so their order of work, errors and results are tested
 * everywhere.
 *
 *   streams   queues with a thread each; work that no event orders runs in any order
 *   memory    addresses that the host cannot touch: a stray access of the host is a segmentation fault. A kernel or a
 *             copy that accesses memory that is not allocated, or that its card may not access, causes the driver's
 *             illegal address. After that all calls fail
 *   kernels   their threads run one after the other. Threads of a block that meet at barriers are fibers, which always
 *             run in the same order. The thread sanitizer takes them for threads, so a missing barrier is a race
 *   graphs    of one stream: captured work runs when the graph is launched
 *
 * Any function can be made to fail (cudasim_fail). docs/gpu-status.md lists what only a card can show. */
#ifndef TESTS_CUDASIM_H
#define TESTS_CUDASIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDASIM_API __attribute__((visibility("default")))

/* ---- for kernels (src/kernels/cuda/gpu.h) ---- */

/* The running thread of a kernel. */
typedef struct cudasim_thread {
  uint32_t block[3], blocks[3];
  uint32_t thread, threads;
} cudasim_thread;
CUDASIM_API const cudasim_thread *cudasim_me(void);
/* Returns the address of bytes in device or pinned memory. Ends the kernel if they are not allocated. */
CUDASIM_API void *cudasim_memory(const void *ptr, size_t bytes, size_t alignment);

/* For kernels whose threads meet: a block's shared memory, the same for each thread that reaches the site; and the
 * memory that the launch asked for. */
CUDASIM_API void *cudasim_shared(const void *site, size_t bytes);
CUDASIM_API void *cudasim_launch_shared(void);
/* Waits for the threads of the warp, or of the block if warp is 0. If a thread does not come, it is an error (719). */
CUDASIM_API void cudasim_sync(int warp);
/* Returns the values of the warp's threads, each at most a slot, one after the other. They are valid until the thread's
 * next exchange but one. An exchange orders no other memory. */
enum { CUDASIM_WARP = 32, CUDASIM_SLOT = 64 };
CUDASIM_API const unsigned char *cudasim_exchange(const void *own, size_t bytes);

/* An image that stands for machine code or PTX. Machine code is for cards of one major capability and for drivers of
 * CUDA 13, PTX for all. The list of kernels ends with NULL. PTX text as nvcc emits it is accepted too. */
typedef struct cudasim_kernel {
  const char *name;
  void (*run)(const void *args); /* NULL: the kernel is PTX (ptx/ptx.h) */
  size_t bytes;                  /* size of its argument */
  uint32_t threads;              /* most threads of a block */
  int wait_at_barrier;
} cudasim_kernel;
typedef struct cudasim_image {
  int major; /* 0: PTX */
  const cudasim_kernel *const *kernels;
} cudasim_image;

/* ---- for tests ---- */

/* Sets the driver to its state after a process's start: CUDA 13.0, one device of compute capability 9.0 and much
 * memory, unless the environment's CUDASIM_VERSION, CUDASIM_CARDS, CUDASIM_MAJOR and CUDASIM_MIB say otherwise. Nothing
 * may be open. */
CUDASIM_API void cudasim_reset(void);
CUDASIM_API void cudasim_set_version(int version);
CUDASIM_API void cudasim_set_devices(int count, int major, int pools);
/* Makes two cards unable to access each other's memory. */
CUDASIM_API void cudasim_deny_peer_access(int one, int other);
/* After `before` more calls of the function, one call returns the error. If the error loses the device, all later calls
 * fail too. */
CUDASIM_API void cudasim_fail(const char *function, int before, int error);
/* Returns the number of calls of a function since the reset. */
CUDASIM_API int cudasim_calls(const char *function);
/* Returns the number of this thread's calls of all functions, NCCL's too. */
CUDASIM_API int cudasim_thread_calls(void);
/* Returns how many algorithms cuBLASLt has searched since the process began, for products of `batch` matrices (at most
 * 32) that lie at multiples of `alignment` bytes (at most 16). */
CUDASIM_API int cudasim_searches(int batch, int alignment);
/* Returns the number of live streams, events, modules and blocks of memory: 0 when all were freed. */
CUDASIM_API int cudasim_live(void);
/* Returns the error that lost the device, for instance an access outside of allocated memory; 0: it is not lost. */
CUDASIM_API int cudasim_lost(void);
/* Until the reset, streams work only while the host waits for one. All other work is held back, so memory freed too
 * early is found. */
CUDASIM_API void cudasim_hold(void);
/* The number of contexts that this thread has pushed and not popped; and its capture mode, 0 as at its start. */
CUDASIM_API int cudasim_depth(void);
CUDASIM_API int cudasim_mode(void);
/* Returns the number of the device that is current on this thread; -1: none. */
CUDASIM_API int cudasim_current(void);

/* Allocates memory on a device outside of libdc: as cuMemAlloc, or from a pool that no other card may access. */
CUDASIM_API void *cudasim_alloc(int device, size_t bytes, int from_pool);
CUDASIM_API void cudasim_free(void *ptr);

/* A stream that is not libdc's and runs on any card, and its graphs. */
CUDASIM_API void *cudasim_stream(void);
CUDASIM_API void cudasim_stream_end(void *stream);
CUDASIM_API void cudasim_stream_call(void *stream, void (*fn)(void *user),
                                     void *user); /* in its order; calls no driver */
CUDASIM_API void cudasim_capture(void *stream);
/* Acts as a call that no capture allows, which another thread may make. */
CUDASIM_API void cudasim_spoil(void);
/* Ends the capture; returns 0 if a call broke the rules of a capture. The graph is kept until the thread's next one, or
 * the reset. */
CUDASIM_API int cudasim_capture_end(void *stream);
CUDASIM_API void cudasim_launch(void *stream); /* the thread's graph */
CUDASIM_API void cudasim_graph_end(void);      /* destroys it */
/* The number of the graph into which the stream is being captured, 0: none; and whether that graph still exists. */
CUDASIM_API unsigned long cudasim_graph_of(void *stream);
CUDASIM_API bool cudasim_graph_lives(unsigned long number);
/* An address at which tests read and write the device's memory; waits for nothing. */
CUDASIM_API void *cudasim_host_ptr(const void *ptr);

#ifdef __cplusplus
}
#endif

#endif
