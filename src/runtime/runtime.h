/* The runtime: parameters, graphs, gathers, reductions, offload, on any device and any transport.
 *
 * Callers hold the context's mutex, unless a function's comment says otherwise. `fn` is the name of the public
 * function, for error texts. include/dc_api.h lists the steps in the life of a ZeRO-3 parameter. The files:
 *
 *   context.c   start and cleanup of a context, its streams and arenas, entering and leaving a call
 *   params.c    parameters: registering, finding, forgetting
 *   chunks.c    even splits, shared by parameters of the same size
 *   names.c     names of parameters, for error texts and logs
 *   graphs.c    graphs, and the check that they agree on all ranks
 *   gather.c    all-gather, fused or not
 *   copies.c    gathered copies: wait, release, take
 *   reduce.c    gradient buckets and their reductions
 *   replicas.c  hybrid sharding: reductions over groups of ranks, each of which has all parameters
 *   grad_finite.c  whether the gradients of a step are finite
 *   offload.c   tensors and shards between device and host memory
 *   stats.c     statistics, dry runs
 *   capture.c   steps captured into CUDA graphs
 *   flight_recorder.c       the record of recent operations, and traces
 *   flight_recorder_dump.c  writes that record to a file */
#ifndef DC_RUNTIME_H
#define DC_RUNTIME_H

#include <inttypes.h>

#include "comm/comm.h"
#include "kernels/kernels.h"

/* Streams of a context, in the order of dc_trace_event.lane. */
enum { DC__LANE_CALLER, DC__LANE_GATHER, DC__LANE_REDUCE, DC__LANE_OFFLOAD, DC__LANE_RELOAD, DC__LANES };

/* One gathered copy of a parameter's weights. A parameter has at most one copy per data type. */
typedef struct dc__gathered_copy {
  dc_buffer *buffer; /* NULL: no copy */
  dc_event *ready;   /* passes when the copy is complete; created once and kept */
  int64_t version;   /* of its weights; the copy is current if this equals the parameter's version */
  int32_t dtype;
  bool awaited;  /* the caller's stream already waits for `ready` */
  bool retained; /* a caller holds a reference too, which stays valid after the library frees the copy */
} dc__gathered_copy;

enum { DC__COPIES = 4 };

typedef struct dc__buckets dc__buckets;

typedef struct dc__param {
  int64_t id;
  int64_t *shape;
  int64_t numel;
  int64_t chunk; /* ceil(numel / world): the shard length of stage 3 */
  int32_t ndim;
  int32_t dtype; /* of the weights; DC_DTYPE_NONE if none were given */
  bool sharded;  /* registered for stage 3 */
  bool persistent;
  int32_t graphs; /* number of graphs that contain it */

  /* weights */
  const void *shard;       /* stage 3: this rank's shard */
  const dc__range *chunks; /* each rank's chunk without padding; shared by parameters of the same size (chunks.c) */
  int64_t version;         /* incremented by dc_context_params_updated */
  dc__gathered_copy copies[DC__COPIES];
  bool in_use;             /* a caller waited for it, and its last user has not released it */
  int64_t planned_in;      /* number, from 1, of the latest dc__gather call that planned it */
  uint32_t planned_dtypes; /* the types planned in that call, one bit each */
  int64_t users;           /* n_users of the current release cycle; 0: none */
  int64_t released;        /* users that have released it in that cycle */
  dc_event *last_read;     /* the caller's last read of freed copies or of a local sum; created on demand */
  void *device_shard;      /* reloaded copy of a host shard; NULL: none */
  int64_t device_shard_version;
  dc_event *reloaded;
  dc_event *shard_read; /* passes after the last gather that may read device_shard */

  /* gradient */
  void *grad;          /* this rank's part; NULL: it owns none */
  int64_t grad_count;  /* its elements, without padding */
  int64_t grad_offset; /* within the flattened gradient */
  int32_t grad_dtype;
  int32_t expected_grad_dtype; /* type of reductions; DC_DTYPE_NONE: the gradient's */
  const dc__range *owned;      /* each rank's part of the gradient; even until a graph is registered */
  dc__range *own_split;        /* storage of `owned` if that split is not even; else NULL */
  bool frozen;                 /* no rank wants a gradient */
  bool has_grad;               /* the buffer holds a sum to add to */
  bool keeps_grad;             /* the next step's first reduction adds to that sum too */
  void *local_sum;             /* stage 1: this rank's sum of whole gradients over micro-batches; NULL: none */
  int32_t local_sum_dtype;
  dc__buckets *waits_in; /* the buckets in which its gradient waits for a flush; NULL: none */
  bool waits_whole;      /* it waits for stage 0. With replicas, its gather would overwrite another stage's pieces */
  int64_t pending;       /* reductions queued and not yet known to be done */
} dc__param;

/* An offloaded tensor: its host copy, kept across steps, and its device copy, which lasts for one step. */
typedef struct dc__offloaded {
  int64_t *shape;
  int32_t ndim;
  int32_t dtype;
  size_t bytes;
  dc_buffer *host;
  dc_event *offloaded;
  dc_buffer *device; /* NULL: not reloaded */
  dc_event *reloaded;
  bool stale; /* the host copy was overwritten after the reload */
} dc__offloaded;

typedef struct dc__graph {
  int64_t id;
  int64_t ordinal; /* the same on every rank; ids may differ, as they may be addresses */
  int32_t stage;
  dc__map params; /* id → dc__param */
  dc__map values; /* id → dc__offloaded */
} dc__graph;

/* A gradient bucket: slots are filled in the order of the calls and reduced together. */
typedef struct dc__bucket {
  void *data;
  int64_t capacity; /* elements */
  int64_t used;
  dc_event *done; /* passes when its latest reduction is done */
} dc__bucket;

/* The buckets of one data type, and the contents of the one that is being filled. */
struct dc__buckets {
  int32_t dtype;
  int32_t filling; /* index of the bucket that takes gradients */
  dc__bucket half[2];
  dc__coll_item *items;
  int64_t item_count;
  int64_t item_capacity;
  dc__param **params; /* the parameter of each item */
  int64_t param_capacity;
  int64_t graph_ordinal; /* of the first item, for error texts */
};

enum { DC__BUCKET_TYPES = 4 }; /* the floating-point types */

typedef struct dc__counters {
  int64_t gathers, gather_hits, gather_wire_bytes;
  int64_t reductions, reduce_wire_bytes, flushes;
  int64_t d2h_bytes, h2d_bytes;
  int64_t allocations_base; /* the arenas' allocations at the last reset */
} dc__counters;

typedef struct dc__recorder dc__recorder; /* flight_recorder.h */

/* Memory of the device. */
typedef struct dc__arenas {
  dc__arena *gathered; /* full weights */
  dc__arena *working;  /* reloaded tensors, local sums, the caller's device memory */
  dc__arena *shared;   /* memory that peers read, and the caller's shared memory */
  dc__arena *buckets;  /* read by peers too; separate, so that long-lived buckets do not fragment `shared` */
  dc__arena *staged;   /* one of the above, for staged shards */
  dc__arena *reloaded; /* one of the above, for reloaded shards */
} dc__arenas;

typedef enum dc__state { DC__NEW, DC__READY, DC__CLEANED } dc__state;

struct dc_context {
  int32_t handle; /* DC__HANDLE_CONTEXT */
  pthread_mutex_t mutex;
  dc_device *device;
  dc_log_fn log;
  void *log_user;
  dc__state state;
  dc_config config;
  int64_t bucket_elements;
  int32_t rank, world; /* in gather_comm */

  dc_comm *gather_comm;                      /* copies of the caller's communicator: two, so that both overlap */
  dc_comm *reduce_comm;                      /* the same as gather_comm where there can be only one */
  struct dc__replica_blocks *replica_blocks; /* replicas.c */
  dc_comm *replica_comm; /* NULL without replicas; with them, reduce_comm has all ranks and gather_comm one group */
  dc_stream *lanes[DC__LANES]; /* [DC__LANE_CALLER] is the caller's; the others are created on first use */
  dc_event *caller_event;      /* passes after the context's work on the caller's stream */
  dc__arenas arenas;           /* in use */
  dc__arenas saved_arenas;     /* for captures; during a capture those for other times. NULL before the first capture */
  bool capturing;              /* the caller's stream is captured into a graph (capture.c) */
  bool stream_ordered; /* gathers allocate in the order of calls on the gather stream, for equal offsets on all ranks */
  dc__arena *host;     /* offloaded tensors, the caller's host memory */

  dc__map params;
  dc__map graphs;
  dc__map chunks; /* elements → dc__chunks */
  int64_t graph_ordinals;
  int64_t gather_calls;
  dc__buckets buckets[DC__BUCKET_TYPES];

  bool in_forward;
  bool update;   /* argument of dc_start_backward */
  bool boundary; /* a backward with update ended: the next one replaces gradients */
  bool profiling;
  dc_buffer *not_finite; /* a dc__nonfinite in device memory, in order of the caller's stream; NULL: no checks */
  bool finite_known;     /* not_finite covers a whole step */
  int64_t reload_bytes, offload_bytes;
  dc__counters counters;
  dc__recorder *recorder;

  dc__coll_item *items; /* scratch of a fused gather */
  int64_t item_capacity;
};

/* ---- context.c ---- */

/* Locks the context. Fails, without the lock, unless the context is ready and has not failed. */
dc_status dc__context_enter(dc_context *ctx, const char *fn);
/* Unlocks; returns status. */
dc_status dc__context_leave(dc_context *ctx, dc_status status);
/* The same for an operator: the device stays current, and of the caller's functions only the allocator runs. */
dc_status dc__operator_enter(dc_context *ctx, const char *fn);
dc_status dc__operator_leave(dc_context *ctx, dc_status status);
dc_status dc__context_start(dc_context *ctx, const char *fn, dc_comm *comm, const dc_config *config,
                            int64_t bucket_elements);
dc_status dc__context_cleanup(dc_context *ctx);
/* dc__comm_all_gather_int64() on the communicator of `group` (DC__GROUP_*), with an entry in the flight recorder. */
dc_status dc__context_exchange(dc_context *ctx, int32_t group, dc__tag *tag, const int64_t *own, int64_t count,
                               int64_t *table);
/* Returns the first failure of asynchronous work, or DC_OK. */
dc_status dc__context_check(dc_context *ctx);
dc_status dc__arenas_create(dc_context *ctx, dc__arenas *arenas);
/* Gets a stream of the context, created on first use. During a capture it is the caller's, which has all work. */
dc_status dc__lane(dc_context *ctx, int32_t lane, dc_stream **stream);
/* Call after queuing work on the caller's stream, so that dc__context_synchronize waits for it. */
void dc__record_caller_event(dc_context *ctx);
/* Lets a stream of the context wait for what the caller has queued so far. */
void dc__wait_for_caller(dc_context *ctx, dc_stream *stream);
/* Records the event on the stream. During a capture it passes at once, as all work is in the order of the calls. */
void dc__context_record_event(dc_context *ctx, dc_event *event, dc_stream *stream);
/* Creates *event if it is NULL. */
dc_status dc__ensure_event(dc_context *ctx, dc_event **event);
void dc__destroy_event(dc_context *ctx, dc_event **event);
/* Blocks until the context's streams, and its work on the caller's stream, are done. */
dc_status dc__context_synchronize(dc_context *ctx);
void dc__logf(dc_context *ctx, int32_t level, const char *format, ...) DC__PRINTF(3, 4);

/* ---- params.c ---- */

typedef struct dc__param_spec {
  int64_t id;
  const int64_t *shape;
  int32_t ndim;
  bool sharded;
  bool persistent;
  int32_t expected_grad_dtype;
  int64_t offset;
  const dc_tensor *tensor; /* weights or shard */
  const dc_tensor *grad;
} dc__param_spec;

dc_status dc__param_register(dc_context *ctx, const char *fn, const dc__param_spec *spec);
dc_status dc__param_unregister(dc_context *ctx, const char *fn, int64_t id);
dc_status dc__param_set_grad(dc_context *ctx, const char *fn, int64_t id, const dc_tensor *grad, int64_t offset);
/* Fails if this rank's part of the gradient has no buffer. Ranks that made the same calls get the same result. */
dc_status dc__param_check_buffer(const dc_context *ctx, const char *fn, const dc__param *param);
dc_status dc__param_find(dc_context *ctx, const char *fn, int64_t id, dc__param **param);
/* Checks a list of count ids, which may be NULL if count is 0. */
dc_status dc__check_ids(const char *fn, const int64_t *ids, int64_t count);
void dc__params_free(dc_context *ctx);
/* Returns the even split of a size, shared by its parameters; NULL: no memory. Release it as often as retained. */
typedef struct dc__chunks dc__chunks;
const dc__range *dc__chunks_retain(dc_context *ctx, int64_t numel);
void dc__chunks_release(dc_context *ctx, int64_t numel);
/* The same split at another address, for gradients: item.ranges == param->chunks marks an item of stage 0. */
const dc__range *dc__chunks_even_split(const dc_context *ctx, int64_t numel);
/* A large gradient with an even split is reduced in pieces of a bucket's size. Piece k holds a slice of each rank's
 * chunk, from element k * width of the chunk on, one slice after another. Most pieces have the same layout. */
int64_t dc__piece_width(const dc_context *ctx);
int64_t dc__piece_count(const dc_context *ctx, int64_t numel);
const dc__range *dc__chunks_piece(const dc_context *ctx, int64_t numel, int64_t k); /* if it has several */
/* ceil(numel / world), and rank's real part of that chunk. */
int64_t dc__chunk(int64_t numel, int32_t world);
dc__range dc__chunk_range(int64_t numel, int32_t world, int32_t rank);

/* ---- names.c ---- */

dc_status dc__name_set(dc_context *ctx, const char *fn, int64_t id, const char *name);
void dc__name_remove(dc_context *ctx, int64_t id);
/* Copies a text, and adds the name of each parameter that it mentions by id, as far as there is space. */
void dc__names_annotate(const dc_context *ctx, const char *plain, char *named, size_t cap);
/* Does the same to this thread's last error if the call failed. */
void dc__names_annotate_error(const dc_context *ctx, dc_status status);

/* ---- graphs.c ---- */

dc_status dc__graph_register(dc_context *ctx, const char *fn, int64_t graph_id, int32_t stage, const int64_t *ids,
                             int64_t count);
dc_status dc__graph_unregister(dc_context *ctx, const char *fn, int64_t graph_id);
dc_status dc__graphs_reset(dc_context *ctx, const char *fn);
dc_status dc__graph_find(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph);
/* The same, but fails unless the graph is of stage 3. */
dc_status dc__graph_find_stage3(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph);
/* Finds a graph and a parameter of it. With stage3, the graph must be of stage 3. */
dc_status dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                               dc__graph **graph, dc__param **param);
/* DC_E_BUSY if a gradient of the graph's parameters, or of any if NULL, is being reduced or is in a local sum. */
dc_status dc__graph_check_idle(const dc_context *ctx, const char *fn, const dc__graph *graph);
/* Forgets all graphs, busy or not. */
void dc__graphs_free(dc_context *ctx);

/* ---- gather.c ---- */

/* Starts a gather of all parameters without a current copy, or of none on error. dtypes NULL: each in its own type. */
dc_status dc__gather(dc_context *ctx, const char *fn, int32_t op, dc__graph *graph, dc__param *const *params,
                     const int32_t *dtypes, int64_t count);
/* Checks the type asked for and resolves DC_DTYPE_NONE. */
dc_status dc__gather_dtype(const char *fn, const dc__param *param, int32_t *dtype);

/* ---- copies.c ---- */

/* The copy in a type (DC_DTYPE_NONE: the shard's), which may be incomplete or stale; NULL: none. */
dc__gathered_copy *dc__gather_copy(dc__param *param, int32_t dtype);
/* A current copy, maybe incomplete, with the exact values of the shard; NULL: none. Other types are cast from it
 * without communication. Inexact copies do not count, so results do not depend on earlier gathers. */
dc__gathered_copy *dc__gather_source(dc__param *param);
bool dc__copy_is_current(const dc__param *param, const dc__gathered_copy *copy);
dc_status dc__gather_wait(dc_context *ctx, const char *fn, dc__param *param);
dc_status dc__gather_release(dc_context *ctx, const char *fn, dc__param *param, int64_t n_users);
dc_status dc__gather_retain(dc_context *ctx, const char *fn, dc__param *param, int32_t dtype, dc_buffer **buffer);
/* Frees a parameter's copies and ends its release cycle. */
void dc__gather_free(dc_context *ctx, dc__param *param);
void dc__gathered_copy_free(const dc_context *ctx, const dc__param *param, dc__gathered_copy *copy);
/* `event`, which must be the last, or NULL where the order of the stream alone makes reuse of memory safe. */
dc_event *dc__event_unless_in_order(const dc_context *ctx, dc_event *event);

/* Whether a caller may read its copies: from the first wait, or release, to the last release. */
static inline bool dc__param_in_use(const dc__param *param) {
  return param->in_use || param->users > 0;
}

static inline void dc__param_end_use(dc__param *param) {
  param->in_use = false;
  param->users = param->released = 0;
}

/* ---- reduce.c ---- */

dc_status dc__reduce_grad(dc_context *ctx, const char *fn, dc__graph *graph, dc__param *param, const dc_tensor *grad);
/* Starts the reduction of all gradients in buckets. */
dc_status dc__reduce_flush(dc_context *ctx);
/* The type in which a gradient of `dtype` is reduced now, or added locally. */
int32_t dc__reduce_dtype(const dc__param *param, int32_t dtype);
/* Flushes and blocks until every gradient is reduced. At the end of a step it reduces local sums first. */
dc_status dc__reduce_finish(dc_context *ctx, const char *fn);
/* Discards gradients in buckets and local sums. */
void dc__reduce_drop(dc_context *ctx);
void dc__buckets_free(dc_context *ctx);

/* ---- grad_finite.c ---- */

dc_status dc__grad_finite_init(dc_context *ctx);
void dc__grad_finite_destroy(dc_context *ctx);
/* Discards the findings so far. */
void dc__grad_finite_reset(dc_context *ctx);
/* Copies or adds the parameter's gradient on the caller's stream, and checks the result if config.check_finite is 1. */
void dc__grad_combine(dc_context *ctx, int64_t id, const dc__combination *c);
/* Combines the findings of all ranks. Sets *id, unless NULL, to the lowest parameter with a nonfinite gradient. */
dc_status dc__grad_finite_query(dc_context *ctx, const char *fn, int32_t *finite, int64_t *id);

/* ---- offload.c ---- */

dc_status dc__offload_tensor(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, const dc_tensor *tensor,
                             dc_tensor *out);
dc_status dc__reload_tensor(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, dc_tensor *out);
dc_status dc__wait_offload(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, dc_tensor *out);
dc_status dc__wait_reload(dc_context *ctx, const char *fn, dc__graph *graph, int64_t id, const dc_tensor *tensor,
                          dc_tensor *out);
dc_status dc__offloaded_find(dc__graph *graph, const char *fn, int64_t id, dc__offloaded **value);
void dc__offloaded_drop_device(dc_context *ctx, dc__graph *graph);
void dc__offloaded_free(dc_context *ctx, dc__graph *graph);
/* Whether the shard has a device copy of the current weights. */
bool dc__shard_is_reloaded(const dc__param *param);
dc_status dc__reload_shard(dc_context *ctx, const dc__graph *graph, dc__param *param);
void dc__free_device_shard(dc_context *ctx, dc__param *param);
/* For dc_free_tensors: frees a reloaded tensor's buffer. Returns false if the context keeps the buffer. */
bool dc__free_buffer(dc_context *ctx, dc_buffer *buffer);

/* ---- stats.c ---- */

void dc__stats(dc_context *ctx, dc_memory_stats *stats);
void dc__stats_reset(dc_context *ctx);
/* Bytes that this rank receives to reduce a gradient, at stage 0 with the gather of means in the buffer's type. */
int64_t dc__reduction_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype);
dc_status dc__dry_run(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                      dc_op_info *info);
/* Elements that this rank receives from other ranks in a collective. */
int64_t dc__wire_elements(const dc_context *ctx, const dc__range *ranges, int64_t total, bool reduce);

/* ---- capture.c ---- */

/* Reads whether the caller's stream is captured now. Fails if a capture cannot begin here, and once after a capture
 * that ended in the middle of a step. */
dc_status dc__capture_update(dc_context *ctx, const char *fn);

#include "runtime/flight_recorder.h"

#endif
