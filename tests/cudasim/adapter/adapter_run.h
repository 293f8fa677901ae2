/* Ranks for the tests of the adapter's CUDA key, and operators as the dispatcher calls them. */
#ifndef TESTS_ADAPTER_RUN_H
#define TESTS_ADAPTER_RUN_H

#include "harness.h"
#include "torchsim.h"

enum { GRAPH = 5, NUMEL = 15, LARGE = 40, FLOATS = 160 };
extern const int64_t SHAPE[2], NONE[1], MANY[1];

/* A rank's context with two parameters, on the CPU or tracking this thread's current stream. */
typedef struct run {
  const char *key;
  int32_t on;
  dc_device *device;
  dc_context *context;
  void *native;
  dct_tensor shard[2], grad[2];
  int64_t graph;
  const char *error; /* the first error; NULL: none */
} run;

/* A world of one without a comm. dc_free_tensors() names no graph, so it is called for the default context only. */
dc_status open_run(run *r, const char *key, dc_comm *comm, int64_t graph);
void close_run(run *r);
/* Sets this thread's current stream, on which the run's values are written and read. */
void set_stream(run *r, void *native);

dct_tensor tensor_of(const run *r, int32_t ndim, const int64_t *sizes);
dct_tensor token(const run *r); /* an empty tensor */
/* Writes first, first + 1, … in the order of the current stream, and waits. */
void write_values(const run *r, dct_tensor t, float first);
void read_values(const run *r, dct_tensor t, float *values);

/* Operators take over the tensors that they are given. After a failure they return NULL without a call. */
dct_value call(run *r, const char *ns, const char *name, const char *key, dct_value *stack, uint64_t inputs,
               uint64_t outputs);
dct_tensor op(run *r, const char *name, dct_tensor a, int64_t id); /* an operator of dc, by a's key; has a result */
void free_one(run *r, dct_tensor t);
void end_backward(run *r);
/* Reads a result's values, and frees it. */
void keep(run *r, dct_tensor t, float *values);

void gather_steps(run *r, float *to);  /* 2 NUMEL: both parameters' weights */
void offload_steps(run *r, float *to); /* 2 LARGE: the host's copy and the reloaded one */
/* Calls all thirteen operators. Returns readable results as FLOATS values: weights, gradients, copies. */
void operators(run *r, float *values);

/* ---- around a test ---- */

extern dc_device *memory; /* the device of PyTorch's memory */
extern void *streams[3];  /* streams of PyTorch; the first is NULL, the default one, and is current */
extern int registered;    /* number of libraries, which stay registered */
int set_up(void **state);
int tear_down(void **state);
run opened(const char *key);
void expect_no_error(const run *r); /* no operator of the run has failed */
void drain_stream(void *native);

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
