/* The base of the conformance tests. Each test carries the numbers of the checks (checks.txt) that it shows: check_35_…
 * shows the 35th, check_51_52_… two of them.
 *
 * They run on any device: memory is the device's own, and is written and read by copies on a stream of that device
 * alone. One program a file and device: ON_SIM puts the simulated device under it, with a world for every seed and the
 * race checker; otherwise it is the device that LIBDC_TEST_DEVICE names, "cpu" if it names none. */
#ifndef TESTS_CONFORMANCE_H
#define TESTS_CONFORMANCE_H

#include "address.h" /* before the harness, which then knows of TCP */
#include "device/device.h"
#include "harness.h"

enum { GRAPH = 7, MOST = 1100 /* elements of a parameter */ };

/* ---- worlds ---- */

/* Runs body on every rank; fails with the first rank's failure, or the checker's report. Objects that the helpers below
 * made for a rank are freed when its body ends. */
void on_ranks(setup s, void (*body)(rank *r), const void *user);

#ifdef ON_SIM
/* The body does what no caller may; the checker must say so, whatever the order of things happens to be. */
void on_ranks_reported(setup s, void (*body)(rank *r), const char *report);
#endif

/* The name of the device under test. */
const char *device_name(void);

/* One rank raises the flag, others wait for it; not a thing of the library's, so it orders nothing for the checker. */
void raise_flag(void);
dc_status await_flag(void);

/* ---- streams ---- */

/* A stream that is destroyed when the body has ended. */
dc_status new_stream(rank *r, dc_stream **stream);
/* Stops a stream until open_gate(): what is queued on it later waits. */
void close_gate(rank *r, dc_stream *stream);
void open_gate(rank *r);

/* ---- memory of the device ---- */

typedef struct array {
  void *data;
  int64_t count;
  int32_t dtype;
} array;

/* Zeroed, and released when the body has ended. */
dc_status new_array(rank *r, array *a, int64_t count, int32_t dtype);
/* The same in host memory. */
dc_status new_host_array(rank *r, array *a, int64_t count, int32_t dtype);
/* For memory that the host itself reads: host memory only. */
const void *on_host(const void *data, size_t bytes);
/* The array as a flat tensor, which is valid as long as the array is. */
dc_tensor tensor_of(const array *a);
/* Copies to and from the device, and waits; elements are rounded as their type wants it. */
dc_status write_to(rank *r, void *to, int32_t dtype, const double *values, int64_t count);
dc_status read_from(rank *r, const void *from, int32_t dtype, double *values, int64_t count);
/* The first count elements are the expected ones, rounded to the type. */
bool holds(rank *r, const void *data, int32_t dtype, const double *expected, int64_t count);
bool is_all(rank *r, const array *a, double value);
dc_status set_all(rank *r, const array *a, double value);
double rounded(double x, int32_t dtype);

/* ---- parameters ---- */

/* How one is registered: 0 in a field is what is usual. The findings of register_param() come last. */
typedef struct param {
  int64_t id;
  int64_t shape[3];
  int32_t ndim;     /* 0 and shape[0] not 0: 1 */
  int32_t stage;    /* 0 to 3 */
  int32_t dtype;    /* of the weights; float32 */
  int32_t grad;     /* of the gradient buffer; float32 */
  int32_t expected; /* expected_grad_dtype */
  int32_t persistent;
  bool frozen;
  bool on_host; /* the weights lie in host memory */

  int64_t numel;
  int64_t padded;       /* length of what is registered on this rank: shard, and gradient buffer */
  int64_t begin, count; /* this rank's part of the gradient */
  array weights;        /* shard, or all of it */
  array buffer;         /* for the gradient; its padding is poisoned before the registration */
  array source;         /* a gradient of this rank, whole, float32 */
} param;

/* Registers it with weights weight(id, 0, i). */
dc_status register_param(rank *r, param *p);
dc_status register_graph(rank *r, int64_t graph, int32_t stage, const int64_t *ids, int64_t count);
/* One parameter and a graph of its own, GRAPH. */
dc_status register_one(rank *r, param *p);

double weight(int64_t id, int64_t version, int64_t i);
/* Writes this rank's part of another version of the weights; says nothing to the library. */
dc_status set_weights(rank *r, const param *p, int64_t version);
/* dc_allgather_param and dc_wait_allgather. */
dc_status gather(rank *r, int64_t graph, const param *p, int32_t dtype, dc_tensor *full);
/* The tensor is the whole parameter: values of that version, shape and type (DC_DTYPE_NONE: the parameter's). */
bool is_whole(rank *r, const dc_tensor *full, const param *p, int32_t dtype, int64_t version);

/* Small integers, so that sums are exact. */
double gradient(int32_t by, int64_t id, int64_t step, int64_t i);
/* Reduces this rank's gradient of a step as a type, and spoils the source when the call is back. */
dc_status reduce_as(rank *r, int64_t graph, param *p, int64_t step, int32_t dtype);
dc_status reduce(rank *r, int64_t graph, param *p, int64_t step);
/* The gradient buffer has the means of steps first … last, added up, and zeros in its padding. Stage 1 adds before it
 * divides. */
bool has_grad(rank *r, const param *p, int64_t first, int64_t last);
/* A backward of one parameter. */
dc_status backward(rank *r, param *p, int32_t update, int64_t step);

/* ---- looking on ---- */

dc_memory_stats stats_of(rank *r);
/* How often an operator ran on a lane since dc_context_trace_start; the rest of the trace is dropped. */
int64_t traced(rank *r, int32_t op, int32_t lane);

/* The device's table with a counter in it: installed on this rank's device by watch_device(), until its end. */
typedef struct watch {
  dc__device_ops ops;
  const dc__device_ops *real;
  atomic_int live[4];   /* allocations not yet freed, by enum dc_memory_kind */
  atomic_int made[4];   /* allocations, by kind */
  atomic_int drained;   /* waits of the host for an event: one each time the context drains its streams */
  atomic_int refuse[4]; /* by kind: 1 lets allocations fail */
} watch;
watch *watch_device(rank *r);

#ifndef ON_SIM
/* A group of two of which the other rank is this one again: collectives never wait, and are counted. They touch memory
 * behind the simulator's back, so it does not have them. */
typedef struct echo {
  atomic_int gathers, reductions, broadcasts, barriers; /* calls of the caller's table */
  atomic_int fail;                                      /* not 0: what the next calls return */
} echo;
dc_status echo_comm(echo *e, dc_comm **comm);
/* A card, on which NCCL would look for the other rank. */
bool echo_is_without_cards(const rank *r);
#endif

#endif
