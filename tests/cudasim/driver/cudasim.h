/* A CUDA driver without a card: libcuda.so.1 as the CUDA device of libdc uses it, on the CPU. The device's own sources,
 * and its kernels compiled as C++, run on it unchanged, so that their order of work, their errors and their results
 * are tested everywhere.
 *
 *   streams   queues with a thread each; work that no event orders runs in any order
 *   memory    addresses that the host cannot touch: a stray access of the host is a segmentation fault. A kernel or a
 *             copy that accesses memory that is not allocated, or that its card may not access, causes the driver's
 *             illegal address. After that all calls fail
 *   kernels   their threads run one after the other. Threads of a block that meet at barriers are fibers, which always
 *             run in the same order. The thread sanitizer takes them for threads, so a missing barrier is a race
 *   graphs    of one stream: captured work runs when the graph is launched
 *
 * Any function can be made to fail (cudasim_fail). docs/gpu-status.md lists what a card alone can show. */
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

/* The thread that runs. */
typedef struct cudasim_thread {
  uint32_t block[3], blocks[3];
  uint32_t thread, threads;
} cudasim_thread;
CUDASIM_API const cudasim_thread *cudasim_me(void);
/* The address of bytes of the device's or of pinned memory; ends the kernel if they are not there. */
CUDASIM_API void *cudasim_memory(const void *ptr, size_t bytes, size_t alignment);

/* For kernels whose threads meet. Memory of the block, the same for each of its threads that comes to the site; memory
 * that the launch asked for. */
CUDASIM_API void *cudasim_shared(const void *site, size_t bytes);
CUDASIM_API void *cudasim_launch_shared(void);
/* Waits for the threads of the warp or the block. A thread that does not come is an error (719). */
CUDASIM_API void cudasim_sync(int warp);
/* The value of each of the warp's threads, at most a slot, one after the other; until the thread's next exchange but
 * one. It orders nothing else. */
enum { CUDASIM_WARP = 32, CUDASIM_SLOT = 64 };
CUDASIM_API const unsigned char *cudasim_exchange(const void *own, size_t bytes);

/* An image that stands for machine code or PTX. Machine code is for cards of one major capability and for drivers of
 * CUDA 13, PTX for all. The kernels end with NULL. PTX text is taken too, as nvcc emits it. */
typedef struct cudasim_kernel {
  const char *name;
  void (*run)(const void *args); /* NULL: it is PTX (ptx/ptx.h) */
  size_t bytes;                  /* of its argument */
  uint32_t threads;              /* most of a block */
  int wait_at_barrier;
} cudasim_kernel;
typedef struct cudasim_image {
  int major; /* 0: PTX */
  const cudasim_kernel *const *kernels;
} cudasim_image;

/* ---- for tests ---- */

/* A driver as after a process's start: of CUDA 13.0, with one device of compute capability 9.0 and much memory. The
 * environment's CUDASIM_VERSION, CUDASIM_CARDS, CUDASIM_MAJOR and CUDASIM_MIB say otherwise. Nothing may be open. */
CUDASIM_API void cudasim_reset(void);
CUDASIM_API void cudasim_set_version(int version);
CUDASIM_API void cudasim_set_devices(int count, int major, int pools);
/* Two cards without access to each other's memory. */
CUDASIM_API void cudasim_deny_peer_access(int one, int other);
/* The function's call after `before` others from now on returns the error. All later calls fail too if the error is one
 * that loses the device. */
CUDASIM_API void cudasim_fail(const char *function, int before, int error);
/* Calls of a function since the reset. */
CUDASIM_API int cudasim_calls(const char *function);
/* Calls of all functions, NCCL's too, by this thread since it began. */
CUDASIM_API int cudasim_thread_calls(void);
/* Algorithms that cuBLASLt has found for products of `batch` matrices, at most 32, that lie at multiples of `alignment`
 * bytes, at most 16, since the process began. */
CUDASIM_API int cudasim_searches(int batch, int alignment);
/* Streams, events, modules and blocks of memory that exist: 0 when all were freed. */
CUDASIM_API int cudasim_live(void);
/* The error by which the device was lost, an access outside of allocated memory, say; 0: it is not lost. */
CUDASIM_API int cudasim_lost(void);
/* From now on, until the reset, streams work only while the host waits for one. All other work is held back, so that
 * memory freed too early is found. */
CUDASIM_API void cudasim_hold(void);
/* Contexts that this thread has pushed and not popped; its mode of capture, 0 as after its start. */
CUDASIM_API int cudasim_depth(void);
CUDASIM_API int cudasim_mode(void);
/* The number of the device that is current on this thread; -1: none. */
CUDASIM_API int cudasim_current(void);

/* Memory of a device that is not libdc's: cuMemAlloc's, or that of a pool to which no other card has access. */
CUDASIM_API void *cudasim_alloc(int device, size_t bytes, int from_pool);
CUDASIM_API void cudasim_free(void *ptr);

/* A stream that is not libdc's and runs on any card, and graphs of it. */
CUDASIM_API void *cudasim_stream(void);
CUDASIM_API void cudasim_stream_end(void *stream);
CUDASIM_API void cudasim_stream_call(void *stream, void (*fn)(void *user),
                                     void *user); /* in its order; calls no driver */
CUDASIM_API void cudasim_capture(void *stream);
/* As a call that no capture allows, which another thread may make. */
CUDASIM_API void cudasim_spoil(void);
/* Ends the capture; 0: a call broke the rules of a capture. The graph is kept until the thread's next one, or the
 * reset. */
CUDASIM_API int cudasim_capture_end(void *stream);
CUDASIM_API void cudasim_launch(void *stream); /* the thread's graph */
CUDASIM_API void cudasim_graph_end(void);      /* destroys it */
/* The number of the graph that the stream is captured into, 0: none; and whether that graph is still there. */
CUDASIM_API unsigned long cudasim_graph_of(void *stream);
CUDASIM_API bool cudasim_graph_lives(unsigned long number);
/* Reads and writes memory of the device, for tests; waits for nothing. */
CUDASIM_API void *cudasim_host_ptr(const void *ptr);

#ifdef __cplusplus
}
#endif

#endif
