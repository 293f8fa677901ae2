/* Shared by the files of the simulated driver. */
#ifndef TESTS_CUDASIM_INTERNAL_H
#define TESTS_CUDASIM_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"

/* The driver's functions, exported under the names in the table. */
CUDASIM_API int cuLaunchHostFunc(dc__cu_stream stream, void (*fn)(void *user), void *user); /* libdc does not use it */
#define X(name, arguments) CUDASIM_API dc__cu_result name arguments;
DC__CU_FUNCTIONS(X)
#undef X

enum {
  INVALID_VALUE = 1,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_PTX = 218,
  PEER_UNSUPPORTED = 217,
  ILLEGAL_ADDRESS = 700,
  MISALIGNED = 716,
  LAUNCH_FAILED = 719,
  INVALID_HANDLE = 400,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = DC__CU_CAPTURE_INVALIDATED,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906
};

/* ---- calls.c: common to all functions ---- */

/* Returns the error with which a call of this function must fail before it does anything; 0: none. */
CUDASIM_API int enter(const char *function, bool needs_context);
/* Returns the driver's answer to machine code for cards of that major capability; 0: PTX. */
CUDASIM_API int refuse_code(int major);
/* Called by functions that no capture allows, unless the thread has relaxed its mode. Returns the error. */
int unsafe(void);
/* From now on all calls fail. */
CUDASIM_API void lose_device(int error);
CUDASIM_API int lost(void);
CUDASIM_API void count_live(int change);
/* Makes a handle of a library, which counts as live, with the bytes of `value`, or zeros if it is NULL. */
CUDASIM_API int make_object(void **object, const void *value, size_t bytes);
CUDASIM_API int end_object(void *object, int error);
/* Makes the device current on this thread, which belongs to a library. */
CUDASIM_API void cudasim_become(int device);
void calls_reset(void);
int from_environment(const char *name, int otherwise); /* returns a number */
int device_of(dc__cu_context context);

#define ENTER(needs_context)                       \
  do {                                             \
    int error_ = enter(__func__, (needs_context)); \
    if (error_ != 0) {                             \
      return error_;                               \
    }                                              \
  } while (0)

/* ---- memory.c ---- */

/* Returns the address of bytes that the running card may access: in a device's memory, or with any_host also in host
 * memory. NULL: an illegal address. */
CUDASIM_API void *resolve_pointer(const void *ptr, size_t bytes, bool any_host);
/* The same for one byte; *bytes is the number of bytes from there to the end of its block. */
void *resolve_block(const void *ptr, size_t *bytes);
int memory_alloc(dc__cu_pool pool, size_t bytes, dc__cu_ptr *ptr);
int memory_free(const void *ptr, bool pinned);
void memory_reset(void);

/* ---- peer_access.c: which card may read which memory ---- */

enum { CUDASIM_DEVICES = 8, ANYBODY = -1 };
struct CUmemPoolHandle_st {
  int device, refs;
  unsigned readers; /* other cards that may access it, one bit each */
  bool contexts;    /* cards to whose context peer access was given may access it too */
};
extern pthread_mutex_t memory_mutex;
bool pool_is_open(dc__cu_pool pool, int device); /* both are called with the mutex held */
void pool_drop(dc__cu_pool pool);
void forget_context(int device);
void pools_reset(void);

/* ---- kernels.c ---- */

enum { CUDASIM_THREADS = 1024, CUDASIM_SHARED = 99 << 10 }; /* the most of a block */

typedef struct grid {
  const cudasim_kernel *kernel;
  uint32_t blocks[3], threads, shared_bytes;
  _Alignas(16) unsigned char args[DC__LAUNCH_BYTES];
} grid;

/* For a thread of the system: the result of cudasim_me(), and the grid whose threads meet. */
extern _Thread_local const cudasim_thread *current;
extern _Thread_local const grid *meeting;

cudasim_thread thread_of(const grid *g, uint32_t block, uint32_t thread);
static inline uint32_t blocks_of(const grid *g) {
  return g->blocks[0] * g->blocks[1] * g->blocks[2];
}
/* Ends the kernel because of an error, which becomes the device's. */
_Noreturn void fault(int error, const char *text);
/* Some threads wait for one that does not come: ends the grid, once. */
void report_stuck(void);

/* ---- shared_memory.c: memory of a block, and exchanges of warps ---- */

typedef struct shared shared;
extern _Thread_local shared *block_memory;
shared *shared_create(const grid *g);
void shared_clear(shared *b); /* between two blocks */
void shared_destroy(shared *b);

/* ---- fibers.c ---- */

/* Runs a grid whose threads meet. */
void run_meeting(const grid *g);
/* Called by a thread of such a grid: waits for the others of its warp or block. orders: it then sees their earlier
 * writes. */
void wait_at_barrier(bool warp, bool orders);
/* Ends all threads of the grid. */
_Noreturn void leave_meeting(void);
/* Ignores the simulator's own work between the calls, which orders nothing for a kernel. */
void tsan_ignore(bool on);

/* ---- stream.c: streams and events ---- */

typedef struct operation {
  struct operation *next;
  void (*run)(void *args);
  _Alignas(16) unsigned char args[DC__LAUNCH_BYTES + 64];
} operation;

/* The card for which this thread of the system works. */
extern _Thread_local int running_device;
/* Returns an error if the stream is part of an invalidated capture. */
CUDASIM_API int push(dc__cu_stream stream, void (*run)(void *args), const void *args, size_t bytes);
void queue_reset(void);
bool captures(void); /* whether any stream is being captured */

#endif
