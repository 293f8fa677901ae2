/* Streams of another owner and CUDA graphs of them, through the driver's functions: a card's or the simulated one's. A
 * thread has one graph, that of its latest capture. Captures are global, as PyTorch's are. */
#ifndef TESTS_CUDA_GRAPH_H
#define TESTS_CUDA_GRAPH_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/driver.h"

#define GRAPH_FUNCTIONS(X)                                                             \
  X(cuStreamBeginCapture_v2, (dc__cu_stream stream, int mode))                         \
  X(cuStreamEndCapture, (dc__cu_stream stream, void **graph))                          \
  X(cuGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags)) \
  X(cuGraphLaunch, (void *exec, dc__cu_stream stream))                                 \
  X(cuGraphExecDestroy, (void *exec))                                                  \
  X(cuGraphDestroy, (void *graph))

static struct {
#define X(name, arguments) dc__cu_result(*name) arguments;
  DC__CU_FUNCTIONS(X)
  GRAPH_FUNCTIONS(X)
#undef X
} graph_driver;
static dc__cu_context graph_context; /* the first device's primary context, as libdc uses it */
static _Thread_local void *graph_latest;

static inline void graph_check(const char *call, dc__cu_result error) {
  if (error != 0) {
    fprintf(stderr, "%s: error %d of the driver\n", call, error); /* not fail_msg(): may be on any thread */
    abort();
  }
}
#define GRAPH_DRIVER(function, ...) graph_check(#function, graph_driver.function(__VA_ARGS__))
/* For calls that need a current context. */
#define GRAPH_DO(function, ...)                       \
  do {                                                \
    dc__cu_context ours_;                             \
    GRAPH_DRIVER(cuCtxPushCurrent_v2, graph_context); \
    GRAPH_DRIVER(function, __VA_ARGS__);              \
    GRAPH_DRIVER(cuCtxPopCurrent_v2, &ours_);         \
  } while (0)

static inline void graphs_open(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *found;
#define X(name, arguments)                                \
  found = library == NULL ? NULL : dlsym(library, #name); \
  graph_check(#name " is not there", found == NULL);      \
  memcpy(&graph_driver.name, &found, sizeof graph_driver.name);
  DC__CU_FUNCTIONS(X)
  GRAPH_FUNCTIONS(X)
#undef X
  GRAPH_DRIVER(cuInit, 0);
  GRAPH_DRIVER(cuDevicePrimaryCtxRetain, &graph_context, 0);
}

static inline void graphs_close(void) {
  GRAPH_DRIVER(cuDevicePrimaryCtxRelease_v2, 0);
}

static inline void *graph_stream(void) {
  dc__cu_stream stream;
  GRAPH_DO(cuStreamCreate, &stream, DC__CU_STREAM_NON_BLOCKING);
  return stream;
}

static inline void graph_stream_end(void *stream) {
  GRAPH_DO(cuStreamDestroy_v2, stream);
}

static inline void graph_capture(void *stream) {
  GRAPH_DO(cuStreamBeginCapture_v2, stream, 0);
}

static inline void graph_drop(void) {
  if (graph_latest != NULL) {
    GRAPH_DO(cuGraphExecDestroy, graph_latest);
    graph_latest = NULL;
  }
}

/* Aborts if a call broke the rules of a capture. */
static inline void graph_capture_end(void *stream) {
  void *graph;
  graph_drop();
  GRAPH_DO(cuStreamEndCapture, stream, &graph);
  GRAPH_DO(cuGraphInstantiateWithFlags, &graph_latest, graph, 0);
  GRAPH_DO(cuGraphDestroy, graph);
}

/* Invalidates the capture by a forbidden wait for its stream, as a call of another thread may. */
static inline void graph_spoil(void *stream) {
  dc__cu_context ours;
  GRAPH_DRIVER(cuCtxPushCurrent_v2, graph_context);
  graph_check("no error of a wait", graph_driver.cuStreamSynchronize(stream) == 0);
  GRAPH_DRIVER(cuCtxPopCurrent_v2, &ours);
}

static inline void graph_spoiled_end(void *stream) {
  void *graph = NULL;
  dc__cu_context ours;
  GRAPH_DRIVER(cuCtxPushCurrent_v2, graph_context);
  const dc__cu_result error = graph_driver.cuStreamEndCapture(stream, &graph);
  GRAPH_DRIVER(cuCtxPopCurrent_v2, &ours);
  graph_check("no error of a spoiled capture", error == 0 || graph != NULL);
}

static inline void graph_launch(void *stream) {
  GRAPH_DO(cuGraphLaunch, graph_latest, stream);
}

#endif
