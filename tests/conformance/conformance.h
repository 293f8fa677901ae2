/* The base of the conformance tests. Each test's name has the numbers of the checks (checks.txt) that it covers:
 * check_35_… covers the 35th, check_51_52_… two of them.
 *
 * The tests run on any device: memory is the device's own, and is only written and read by copies on a stream of that
 * device. There is one program per file and device. With ON_SIM it runs on the simulated device, with a world for every
 * seed and the race checker. Otherwise it runs on the device that LIBDC_TEST_DEVICE names, by default "cpu". */
#ifndef TESTS_CONFORMANCE_H
#define TESTS_CONFORMANCE_H

#include "address.h" /* before the harness, which then knows about TCP */
#include "device/device.h"
#include "harness.h"

enum { GRAPH = 7, MOST = 1100 /* most elements of a parameter */ };

/* ---- worlds ---- */

/* Runs body on every rank; fails with the first rank's failure, or the checker's report. Objects that the helpers below
 * made for a rank are freed when its body ends. */
void on_ranks(setup s, void (*body)(rank *r), const void *user);

#ifdef ON_SIM
/* The body breaks a rule for callers; the checker must report it in every order of execution. */
void on_ranks_reported(setup s, void (*body)(rank *r), const char *report);
#endif

/* The name of the device under test. */
const char *device_name(void);

/* One rank raises the flag, and others wait for it. The flag is not part of the library, so it orders nothing for the
 * checker. */
void raise_flag(void);
dc_status await_flag(void);

/* ---- streams ---- */

/* Makes a stream that is destroyed when the body has ended. */
dc_status new_stream(rank *r, dc_stream **stream);
/* Stops a stream until open_gate(): work queued on it later waits. */
void close_gate(rank *r, dc_stream *stream);
void open_gate(rank *r);

/* ---- memory of the device ---- */

typedef struct array {
  void *data;
  int64_t count;
  int32_t dtype;
} array;

/* Makes a zeroed array that is freed when the body has ended. */
dc_status new_array(rank *r, array *a, int64_t count, int32_t dtype);
/* The same in host memory. */
dc_status new_host_array(rank *r, array *a, int64_t count, int32_t dtype);
/* Returns memory that the host itself can read: host memory only. */
const void *on_host(const void *data, size_t bytes);
/* The array as a flat tensor, which is valid as long as the array is. */
dc_tensor tensor_of(const array *a);
/* Copies to and from the device, and waits. Elements are rounded to their type. */
dc_status write_to(rank *r, void *to, int32_t dtype, const double *values, int64_t count);
dc_status read_from(rank *r, const void *from, int32_t dtype, double *values, int64_t count);
/* Returns whether the first count elements are the expected ones, rounded to the type. */
bool holds(rank *r, const void *data, int32_t dtype, const double *expected, int64_t count);
bool is_all(rank *r, const array *a, double value);
dc_status set_all(rank *r, const array *a, double value);
double rounded(double x, int32_t dtype);

/* ---- parameters ---- */

/* How a parameter is registered; 0 in a field means the usual value. register_param() fills in the last fields. */
typedef struct param {
  int64_t id;
  int64_t shape[3];
  int32_t ndim;     /* 0 with shape[0] not 0 means 1 */
  int32_t stage;    /* 0 to 3 */
  int32_t dtype;    /* type of the weights; 0: float32 */
  int32_t grad;     /* type of the gradient buffer; 0: float32 */
  int32_t expected; /* expected_grad_dtype */
  int32_t persistent;
  bool frozen;
  bool on_host; /* the weights are in host memory */

  int64_t numel;
  int64_t padded;       /* elements of the registered shard and gradient buffer on this rank */
  int64_t begin, count; /* this rank's part of the gradient, in elements */
  array weights;        /* the shard, or the whole parameter */
  array buffer;         /* the gradient buffer; its padding is poisoned before the registration */
  array source;         /* this rank's whole gradient, float32 */
} param;

/* Registers the parameter with weights weight(id, 0, i). */
dc_status register_param(rank *r, param *p);
dc_status register_graph(rank *r, int64_t graph, int32_t stage, const int64_t *ids, int64_t count);
/* Registers one parameter, in the graph GRAPH of its own. */
dc_status register_one(rank *r, param *p);

double weight(int64_t id, int64_t version, int64_t i);
/* Writes this rank's part of another version of the weights, without telling the library. */
dc_status set_weights(rank *r, const param *p, int64_t version);
/* Calls dc_allgather_param and dc_wait_allgather. */
dc_status gather(rank *r, int64_t graph, const param *p, int32_t dtype, dc_tensor *full);
/* Returns whether the tensor is the whole parameter, with the values of that version, its shape and the type
 * (DC_DTYPE_NONE: the parameter's). */
bool is_whole(rank *r, const dc_tensor *full, const param *p, int32_t dtype, int64_t version);

/* Small integers, so that sums are exact. */
double gradient(int32_t by, int64_t id, int64_t step, int64_t i);
/* Reduces this rank's gradient of a step as a type, and overwrites the source once the call has returned. */
dc_status reduce_as(rank *r, int64_t graph, param *p, int64_t step, int32_t dtype);
dc_status reduce(rank *r, int64_t graph, param *p, int64_t step);
/* Returns whether the gradient buffer has the means of steps first … last, added up, and zeros in its padding. Stage 1
 * adds before it divides. */
bool has_grad(rank *r, const param *p, int64_t first, int64_t last);
/* Runs a backward of one parameter. */
dc_status backward(rank *r, param *p, int32_t update, int64_t step);

/* ---- observing the library ---- */

dc_memory_stats stats_of(rank *r);
/* Returns how often an operator ran on a lane since dc_context_trace_start, and drops the rest of the trace. */
int64_t traced(rank *r, int32_t op, int32_t lane);

/* A device's table with counters: watch_device() installs it on this rank's device until the device is closed. */
typedef struct watch {
  dc__device_ops ops;
  const dc__device_ops *real;
  atomic_int live[4];   /* allocations not yet freed, by enum dc_memory_kind */
  atomic_int made[4];   /* allocations in all, by kind */
  atomic_int drained;   /* how often the host waited for an event: once each time the context drains its streams */
  atomic_int refuse[4]; /* by kind; 1: allocations fail */
} watch;
watch *watch_device(rank *r);

#ifndef ON_SIM
/* A group of two whose other rank mirrors this one: collectives never wait, and are counted. They access memory behind
 * the simulator's back, so it does not support them. */
typedef struct echo {
  atomic_int gathers, reductions, broadcasts, barriers; /* calls of the caller's table, by kind */
  atomic_int fail;                                      /* what the next calls return; 0: they succeed */
} echo;
dc_status echo_comm(echo *e, dc_comm **comm);
/* Returns false on a card, where NCCL would look for the other rank. */
bool echo_is_without_cards(const rank *r);
#endif

#endif
