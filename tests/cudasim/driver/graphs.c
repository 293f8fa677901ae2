/* Graphs of the simulated driver under the driver's own names, for tests that also run on a card (cuda_graph.h). A
 * thread has the graph of its latest capture. */
#include "cuda_graph.h"
#include "cudasim_internal.h"

#define X(name, arguments) CUDASIM_API dc__cu_result name arguments;
GRAPH_FUNCTIONS(X)
#undef X

static char latest; /* its address stands for the graph */

int cuStreamBeginCapture_v2(dc__cu_stream stream, int mode) {
  ENTER(true);
  cudasim_capture(stream);
  return mode == 0 ? 0 : INVALID_VALUE; /* only the global mode, which is the strictest and PyTorch's */
}

int cuStreamEndCapture(dc__cu_stream stream, void **graph) {
  ENTER(true);
  const bool fine = cudasim_capture_end(stream) != 0;
  *graph = fine ? &latest : NULL;
  return fine ? 0 : CAPTURE_INVALIDATED;
}

int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
  ENTER(true);
  *exec = graph;
  return flags == 0 && graph == &latest ? 0 : INVALID_VALUE;
}

int cuGraphLaunch(void *exec, dc__cu_stream stream) {
  ENTER(true);
  if (exec != &latest) {
    return INVALID_HANDLE;
  }
  cudasim_launch(stream);
  return 0;
}

int cuGraphExecDestroy(void *exec) {
  ENTER(true);
  cudasim_graph_end();
  return exec == &latest ? 0 : INVALID_HANDLE;
}

int cuGraphDestroy(void *graph) {
  ENTER(true);
  return graph == &latest ? 0 : INVALID_HANDLE;
}
