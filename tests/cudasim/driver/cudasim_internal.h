/* Between the files of the simulated driver. */
#ifndef TESTS_CUDASIM_INTERNAL_H
#define TESTS_CUDASIM_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "cudasim.h"
#include "device/cuda/driver.h"
#include "device/device.h"

/* The driver's functions, exported by the names of the table. */
CUDASIM_API int cuLaunchHostFunc(dc__cu_stream stream, void (*fn)(void *user), void *user); /* libdc does without */
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

/* The error that a call of this function returns before it does anything; 0: none. */
CUDASIM_API int enter(const char *function, bool needs_context);
/* The driver's answer to machine code for cards of that capability, 0: PTX. */
CUDASIM_API int refuse_code(int major);
/* A call that no capture allows, unless the thread has relaxed it. */
int unsafe(void);
/* All calls fail from now on. */
CUDASIM_API void lose_device(int error);
CUDASIM_API int lost(void);
CUDASIM_API void count_live(int change);
/* A handle of a library, which counts as live; with the bytes of `value`, or zeros. */
CUDASIM_API int make_object(void **object, const void *value, size_t bytes);
CUDASIM_API int end_object(void *object, int error);
/* Makes the device current on this thread, which is a library's own. */
CUDASIM_API void cudasim_become(int device);
void calls_reset(void);
int from_environment(const char *name, int otherwise); /* a number */
int device_of(dc__cu_context context);

#define ENTER(needs_context)                       \
  do {                                             \
    int error_ = enter(__func__, (needs_context)); \
    if (error_ != 0) {                             \
      return error_;                               \
    }                                              \
  } while (0)

/* ---- memory.c ---- */

/* The address of bytes that the running card accesses: in a device's memory, or for a copy anywhere. NULL: an illegal
 * address. */
CUDASIM_API void *resolve_pointer(const void *ptr, size_t bytes, bool any_host);
/* The same of one byte; *bytes: that its block has from there on. */
void *resolve_block(const void *ptr, size_t *bytes);
int memory_alloc(dc__cu_pool pool, size_t bytes, dc__cu_ptr *ptr);
int memory_free(const void *ptr, bool pinned);
void memory_reset(void);

/* ---- peer_access.c: which card may read which memory ---- */

enum { CUDASIM_DEVICES = 8, ANYBODY = -1 };
struct CUmemPoolHandle_st {
  int device, refs;
  unsigned readers; /* other cards, a bit each */
  bool contexts;    /* also those whose context was given access to its device's */
};
extern pthread_mutex_t memory_mutex;
bool pool_is_open(dc__cu_pool pool, int device); /* both with the mutex held */
void pool_drop(dc__cu_pool pool);
void forget_context(int device);
void pools_reset(void);

/* ---- kernels.c ---- */

enum { CUDASIM_THREADS = 1024, CUDASIM_SHARED = 99 << 10 }; /* most of a block */

typedef struct grid {
  const cudasim_kernel *kernel;
  uint32_t blocks[3], threads, shared_bytes;
  _Alignas(16) unsigned char args[DC__LAUNCH_BYTES];
} grid;

/* Of the system's thread: what cudasim_me() returns, and the grid whose threads meet. */
extern _Thread_local const cudasim_thread *current;
extern _Thread_local const grid *meeting;

cudasim_thread thread_of(const grid *g, uint32_t block, uint32_t thread);
static inline uint32_t blocks_of(const grid *g) {
  return g->blocks[0] * g->blocks[1] * g->blocks[2];
}
/* The kernel is over because of an error, which is the device's. */
_Noreturn void fault(int error, const char *text);
/* Threads wait for one that does not come; the first that notices it ends the grid. */
void report_stuck(void);

/* ---- shared_memory.c: memory of a block, and exchanges of warps ---- */

typedef struct shared shared;
extern _Thread_local shared *block_memory;
shared *shared_create(const grid *g);
void shared_clear(shared *b); /* before the next block */
void shared_destroy(shared *b);

/* ---- fibers.c ---- */

/* Runs a grid whose threads meet. */
void run_meeting(const grid *g);
/* Of a thread of such a grid: waits for the others of its warp, or of its block. orders: their earlier writes are
 * visible after it. */
void wait_at_barrier(bool warp, bool orders);
/* All threads of the grid end. */
_Noreturn void leave_meeting(void);
/* The simulator's own work between the calls orders nothing. */
void tsan_ignore(bool on);

/* ---- stream.c: streams and events ---- */

typedef struct operation {
  struct operation *next;
  void (*run)(void *args);
  _Alignas(16) unsigned char args[DC__LAUNCH_BYTES + 64];
} operation;

/* Of the system's thread: the card whose work it does. */
extern _Thread_local int running_device;
/* An error if the stream is part of a capture that was spoiled. */
CUDASIM_API int push(dc__cu_stream stream, void (*run)(void *args), const void *args, size_t bytes);
void queue_reset(void);
bool captures(void); /* some stream does */

#endif
