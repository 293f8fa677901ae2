/* Random programs. Each rank draws the same one from a seed and runs it on libdc. Beside it, a sequential model says
 * what every value must be. The model computes in float64 and rounds where libdc rounds, so values are compared bit for
 * bit. Weights have a third in them, which every type rounds differently, and sums of gradients outgrow the 16-bit
 * types.
 *
 *   generator.c   draws the next call, from the seed and the calls that are legal now
 *   weights.c, tensors.c, gradients.c   the calls, and the caller's own accesses to the memory
 *   illegal.c     calls that must be refused, and change nothing
 *   model.c       where each value is gathered, reduced and held
 *   on_sim.c, on_threads.c   the platform: simulated ranks under the race checker, or the CPU device and threads */
#ifndef TESTS_PROGRAM_H
#define TESTS_PROGRAM_H

#include <inttypes.h>
#include <stdatomic.h>

#include "harness.h"

#undef CHECK
#undef OK
#undef FAILS

enum {
  PARAMS = 4,
  TYPES = 3, /* types in which a parameter is gathered: the shard's and two more */
  VALUES = 3,
  CONTEXTS = 2,
  TENSOR = 40,
  STEPS = 50,
  GRAPH = 10,
  OTHER_GRAPH = 11,
  RANKS = 8
};

/* ---- the platform ---- */

typedef struct ground {
  int32_t world;
  uint64_t seed;
  bool no_heap, one_channel; /* kind of the simulated group */
  bool checksums;            /* of the local group */
} ground;

extern const char *const ground_name;
extern const int64_t ground_large; /* number of elements of the largest parameters */

/* Runs body on every rank. Returns "", or the first failure with the seed. */
const char *ground_run(const ground *g, setup s, void (*body)(rank *r), const void *user);
/* The caller accesses memory, on the host or in a task of a stream. */
void ground_reads(const void *ptr, size_t bytes, const char *what);
void ground_writes(const void *ptr, size_t bytes, const char *what);
/* Allocates memory of a rank that lives until its world ends. */
void *ground_new(size_t bytes);
/* Converts for the caller, without being recorded by the checker. */
void ground_cast(void *dst, int32_t dst_dtype, const void *src, int32_t src_dtype, int64_t count);

/* ---- the model ---- */

/* A gathered copy: it does not exist, is being gathered, or was waited for. */
typedef enum copy_state { NONE, COMING, READY } copy_state;

typedef struct copy {
  copy_state state;
  int64_t version; /* version of the weights that it holds */
  int64_t gather;  /* number of the gather that made it */
  bool from_shard; /* false: cast from an exact copy in another type */
  const void *data;
} copy;

typedef struct param {
  int64_t id, numel, chunk, begin, count; /* begin, count: this rank's part of the gradient */
  int64_t shape[3];
  int32_t ndim;
  int32_t types[TYPES]; /* types[0] is the shard's */
  void *shard, *grad;
  int32_t grad_type, buffer_type, expected_type; /* of most gradients, of the buffer, in reductions */
  int64_t version;
  bool persistent, in_use; /* in_use: from a wait to the last release */
  int64_t users, released;
  copy copies[TYPES];
  bool reloaded;     /* the shard was reloaded since it was last dropped */
  int64_t reloading; /* number of gathers before a reload that may still read the shard; -1: none */
  bool has_grad, unknown, pending;
  bool keeps_grad;  /* the next step adds to the gradient */
  double *expected; /* values of the whole gradient */
  double *local;    /* stage 1: each rank's sum, [rank * numel + i] */
  int32_t local_type;
  bool has_local;
  bool unbound; /* stage 1: has no buffer until the step's last backward */
  bool shared;  /* is in both graphs */
} param;

/* A tensor of the caller, which is offloaded and reloaded. */
typedef struct value {
  int64_t graph, id;
  void *source;
  int32_t dtype;
  int64_t content, host, device; /* number of the content that each holds; -1: none */
  bool offload_waited, reload_waited;
  bool stale;     /* was offloaded again after its last reload */
  bool read_back; /* the device copy itself is being offloaded */
  const void *host_data, *device_data;
} value;

/* A context, and the model's state of it. */
typedef struct program {
  rank *r;
  dc_context *ctx;
  uint64_t *state;                /* of the random numbers, which are the same on all ranks */
  uint64_t private_state;         /* of this rank's own random numbers, for illegal calls */
  atomic_int *failed;             /* 1: claimed, 2: r->failure is written; tasks of streams fail too */
  int32_t group_rank, group_size; /* within this rank's group, in which parameters are split */
  bool illegal;
  int32_t stage;
  dc_stream *streams[2], *caller;
  param params[PARAMS];
  int64_t count;
  value values[VALUES];
  int64_t contents;
  int64_t gathers, waited, lost; /* number started; the last one waited for; the last one dropped before that */
  bool update, boundary, profiling;
  int64_t reductions;
  int64_t wire; /* bytes of reductions, as dry runs reported them */
} program;

void program_fail(atomic_int *failed, rank *r, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define CHECK(p, condition)                                                                           \
  do {                                                                                                \
    if (!(condition)) {                                                                               \
      program_fail((p)->failed, (p)->r, "%s:%d: %s (last error: %s)", __FILE__, __LINE__, #condition, \
                   dc_last_error());                                                                  \
      return;                                                                                         \
    }                                                                                                 \
  } while (0)

#define OK(p, call) CHECK(p, (call) == DC_OK)

static inline bool broken(const program *p) {
  return atomic_load(p->failed) != 0;
}

uint64_t pick(program *p, uint64_t below);

/* Rounds x to a type. */
double rounded(double x, int32_t dtype);
double weight(int64_t id, int64_t version, int64_t i);
double gradient(const program *p, int32_t by, int64_t id, int64_t i);
double content(int64_t which, int64_t i);
/* Returns the bytes received over the wire so far. */
int64_t wire_bytes(const program *p, bool of_gathers);
/* Returns the bytes that a call would receive. */
int64_t dry_bytes(const program *p, int32_t op, int64_t graph, int64_t id, int32_t dtype);

bool has_copy(const param *a);
void model_gather(program *p, param *a, int t);
void model_drop(program *p, param *a);
void model_wait(program *p, param *a);
void model_reduce(program *p, param *a, int32_t dtype);
void model_end(program *p);
void model_abort(program *p);

/* ---- accesses of the caller itself, on its stream or on the host ---- */

typedef struct touch touch;
/* Reads or writes count elements, which must be, or become, values[i]. */
touch *new_touch(program *p, const void *data, int64_t count, int32_t dtype, bool write, const char *what);
double *touch_values(touch *t);
void on_caller(program *p, touch *t);
void sync_caller(program *p);

/* ---- the calls ---- */

void gather(program *p, param *a, int64_t graph);
void prefetch(program *p);
void wait_and_use(program *p, param *a, int64_t graph);
void release(program *p, param *a, int64_t graph);
void take(program *p, param *a);
void persistence(program *p, param *a);
void forget(program *p, param *a);
void update_weights(program *p);
void shard_to_device(program *p, param *a);

void offload(program *p, value *v);
void reload(program *p, value *v);

void start_backward(program *p);
void reduce(program *p, param *a, int64_t graph);
void end_backward(program *p);
void abort_step(program *p);
dc_status register_graphs(program *p, bool first, bool second);
void register_again(program *p);
void new_grad_buffer(program *p, param *a);

/* Makes a call that must be refused. */
void illegal_call(program *p);
/* The ranks make different calls: every rank gets an error, and later calls fail too. */
void mismatch(program *p);

/* generator.c: runs a program on a rank of the world; user is a program_spec. */
typedef struct program_spec {
  uint64_t seed;
  bool illegal;
} program_spec;
const char *run_seed(const program_spec *spec);

#endif
