/* Worlds, streams and memory for conformance.h, compiled once for real devices and once for the simulated one. */
#include "kernels/reference.h"

#include <time.h>

#include "conformance.h"

#ifdef ON_SIM
#include "sim/sim_ranks.h"
#endif

enum { RANKS = 64, BUFFERS = 96, STREAMS = 4 };

/* The objects that a rank's body has made; they are freed when it ends. */
typedef struct kept {
  dc_buffer *buffers[BUFFERS];
  dc_stream *streams[STREAMS];
  dc_stream *copies;
  int32_t buffer_count, stream_count;
  atomic_int gate; /* 1: closed */
} kept;

static kept all[RANKS];
static atomic_int flag;

typedef struct job {
  void (*body)(rank *r);
  const void *user;
} job;

const char *device_name(void) {
#ifdef ON_SIM
  return "sim";
#else
  return test_device();
#endif
}

static void return_memory(rank *r) {
  kept *own = &all[r->rank];
  open_gate(r);
  if (r->ctx != NULL) { /* queued work still uses the objects that are freed below */
    (void)dc_context_set_stream(r->ctx, NULL);
    (void)dc_cleanup(r->ctx);
  }
  for (int32_t i = 0; i < own->stream_count; i++) {
    dc_stream_destroy(own->streams[i]);
  }
  for (int32_t i = 0; i < own->buffer_count; i++) {
    dc_buffer_release(own->buffers[i]);
  }
  dc_stream_destroy(own->copies);
}

static void run_body(rank *r) {
  const job *j = r->user;
  memset(&all[r->rank], 0, sizeof all[r->rank]);
  r->user = j->user;
  j->body(r);
  if (r->failure[0] != '\0') {
    dc_comm_abort(r->comm, r->failure); /* others may be waiting for calls that this rank no longer makes */
  }
  return_memory(r);
}

#ifdef ON_SIM

static const char *run_seed(uint64_t seed, setup s, job *j) {
  atomic_store(&flag, 0);
  bool no_heap = seed % 3 == 2 && s.config.symmetric_memory == 0;
  return sim_ranks(&(sim_options){.seed = seed, .world = s.world, .no_heap = no_heap}, s, run_body, j);
}

void on_ranks(setup s, void (*body)(rank *r), const void *user) {
  uint64_t first = sim_setting("SIM_SEED", 1), seeds = sim_setting("SIM_SEEDS", s.world > 2 ? 3 : 8);
  job j = {body, user};
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    const char *failure = run_seed(seed, s, &j);
    if (failure[0] != '\0') {
      fail_msg("%s", failure);
    }
  }
}

void on_ranks_reported(setup s, void (*body)(rank *r), const char *report) {
  job j = {body, NULL};
  for (uint64_t seed = 1; seed <= 12; seed++) {
    const char *failure = run_seed(seed, s, &j);
    if (strstr(failure, report) == NULL) {
      fail_msg("seed %d: \"%s\" is not in \"%s\"", (int)seed, report, failure);
    }
  }
}

#else

void on_ranks(setup s, void (*body)(rank *r), const void *user) {
  atomic_store(&flag, 0);
  run_ranks(s, run_body, &(job){body, user});
}

#endif

void raise_flag(void) {
  atomic_store(&flag, 1);
}

/* ---- streams, gates and the flag ---- */

dc_status new_stream(rank *r, dc_stream **stream) {
  kept *own = &all[r->rank];
  dc_status status = own->stream_count < STREAMS ? dc_stream_create(r->device, stream) : DC_E_INTERNAL;
  if (status == DC_OK) {
    own->streams[own->stream_count++] = *stream;
  }
  return status;
}

#ifdef ON_SIM

static bool gate_is_open(void *gate) {
  return atomic_load(*(atomic_int **)gate) == 0;
}

static bool pass(void *gate) {
  (void)gate;
  return true;
}

static bool flag_is_up(void *none) {
  (void)none;
  return atomic_load(&flag) == 1;
}

dc_status await_flag(void) {
  sim_wait(flag_is_up, NULL, "the test's flag");
  return flag_is_up(NULL) ? DC_OK : DC_E_TIMEOUT;
}

void close_gate(rank *r, dc_stream *stream) {
  atomic_int *gate = &all[r->rank].gate;
  atomic_store(gate, 1);
  sim_push(stream, &(sim_work){gate_is_open, pass, {"gate", NULL, -1}}, &gate, sizeof gate);
}

#else

/* A test that fails may leave its gate closed or its flag down, so the wait ends after a minute. */
static dc_status await_number(atomic_int *at, int number) {
  for (int ms = 0; atomic_load(at) != number; ms++) {
    if (ms == 60000) {
      return DC_E_TIMEOUT;
    }
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return DC_OK;
}

static void wait_at_gate(void *gate) {
  (void)await_number(gate, 0);
}

dc_status await_flag(void) {
  return await_number(&flag, 1);
}

void close_gate(rank *r, dc_stream *stream) {
  atomic_store(&all[r->rank].gate, 1);
  (void)dc_stream_call(stream, wait_at_gate, &all[r->rank].gate);
}

#endif

void open_gate(rank *r) {
  atomic_store(&all[r->rank].gate, 0);
}

/* ---- memory ---- */

static dc_status allocate(rank *r, array *a, int64_t count, int32_t dtype, int32_t kind) {
  kept *own = &all[r->rank];
  if (own->buffer_count == BUFFERS) {
    return DC_E_INTERNAL;
  }
  dc_buffer **buffer = &own->buffers[own->buffer_count];
  dc_status status = dc_context_alloc(r->ctx, count * (int64_t)dc_dtype_size(dtype), kind, buffer);
  if (status == DC_OK) {
    own->buffer_count++;
    *a = (array){dc_buffer_data(*buffer), count, dtype};
  }
  return status;
}

dc_status new_array(rank *r, array *a, int64_t count, int32_t dtype) {
  return allocate(r, a, count, dtype, DC_MEMORY_DEVICE);
}

dc_status new_host_array(rank *r, array *a, int64_t count, int32_t dtype) {
  return allocate(r, a, count, dtype, DC_MEMORY_HOST);
}

const void *on_host(const void *data, size_t bytes) {
#ifdef ON_SIM
  sim_reads(data, bytes, "the test");
#else
  (void)bytes;
#endif
  return data;
}

dc_tensor tensor_of(const array *a) {
  return flat(a->data, &a->count, a->dtype);
}

/* Copies on a stream of the device, so that the test also works with memory that the host cannot read. */
static dc_status copy(rank *r, void *to, const void *from, size_t bytes) {
  dc_stream **stream = &all[r->rank].copies;
  dc_status status = *stream != NULL ? DC_OK : dc_stream_create(r->device, stream);
  if (status == DC_OK) {
    dc__stream_copy(*stream, to, from, bytes);
    status = dc_stream_synchronize(*stream, INT64_C(60000000000));
  }
  return status;
}

static value value_in(double x, int32_t dtype) {
  return dc__dtype_is_float(dtype) ? (value){x, 0, true} : (value){0, (int64_t)x, false};
}

dc_status write_to(rank *r, void *to, int32_t dtype, const double *values, int64_t count) {
  double raw[MOST];
  for (int64_t i = 0; i < count; i++) {
    put(raw, dtype, i, value_in(values[i], dtype));
  }
  return copy(r, to, raw, (size_t)count * dc_dtype_size(dtype));
}

dc_status read_from(rank *r, const void *from, int32_t dtype, double *values, int64_t count) {
  double raw[MOST];
  dc_status status = copy(r, raw, from, (size_t)count * dc_dtype_size(dtype));
  for (int64_t i = 0; i < count && status == DC_OK; i++) {
    value v = get(raw, dtype, i);
    values[i] = v.is_float ? v.f : (double)v.i;
  }
  return status;
}

double rounded(double x, int32_t dtype) {
  uint64_t raw;
  put(&raw, dtype, 0, value_in(x, dtype));
  value v = get(&raw, dtype, 0);
  return v.is_float ? v.f : (double)v.i;
}

bool holds(rank *r, const void *data, int32_t dtype, const double *expected, int64_t count) {
  double found[MOST];
  if (read_from(r, data, dtype, found, count) != DC_OK) {
    return false;
  }
  for (int64_t i = 0; i < count; i++) {
    if (found[i] != rounded(expected[i], dtype)) {
      fprintf(stderr, "rank %d: element %d is %a, must be %a\n", r->rank, (int)i, found[i],
              rounded(expected[i], dtype));
      return false;
    }
  }
  return true;
}

bool is_all(rank *r, const array *a, double x) {
  double expected[MOST];
  for (int64_t i = 0; i < a->count; i++) {
    expected[i] = x;
  }
  return holds(r, a->data, a->dtype, expected, a->count);
}

dc_status set_all(rank *r, const array *a, double x) {
  double values[MOST];
  for (int64_t i = 0; i < a->count; i++) {
    values[i] = x;
  }
  return write_to(r, a->data, a->dtype, values, a->count);
}
