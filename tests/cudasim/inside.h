/* Between the files of the simulated driver. */
#ifndef TESTS_CUDASIM_INSIDE_H
#define TESTS_CUDASIM_INSIDE_H

#include <pthread.h>
#include <stdbool.h>

#include "cudasim.h"
#include "device/cuda/driver.h"

/* The driver's functions, exported by the names of the table. */
#define X(name, arguments) CUDASIM_API dc__cu_result name arguments;
DC__CU_FUNCTIONS(X)
#undef X

enum { ILLEGAL_ADDRESS = 700, MISALIGNED = 716, INVALID_VALUE = 1, INVALID_CONTEXT = 201, CAPTURE_UNSUPPORTED = 900 };

/* ---- calls.c: what every function begins with ---- */

/* The error that a call of this function returns before it does anything; 0: none. */
int enter(const char *function, bool needs_context);
/* A call that no capture allows, unless the thread has relaxed it. */
int unsafe(void);
/* All calls fail from now on. */
void lose_device(int error);
int lost(void);
void count_live(int change);
void calls_reset(void);

#define ENTER(needs_context)                       \
  do {                                             \
    int error_ = enter(__func__, (needs_context)); \
    if (error_ != 0) {                             \
      return error_;                               \
    }                                              \
  } while (0)

/* ---- memory.c ---- */

/* Where the bytes lie: in the device's memory, or for a copy anywhere. NULL: an illegal address. */
void *place_of(const void *ptr, size_t bytes, bool any_host);
void memory_reset(void);

/* ---- queue.c: streams and events ---- */

typedef struct operation {
  struct operation *next;
  void (*run)(void *args);
  _Alignas(16) unsigned char args[960];
} operation;

void push(dc__cu_stream stream, void (*run)(void *args), const void *args, size_t bytes);
void queue_reset(void);
bool captures(void); /* some stream does */
void spoil_capture(void);

#endif
