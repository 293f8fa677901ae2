/* The runtime: parameters, graphs, gathers, reductions, offload, on any device and any transport.
 *
 * Every function here runs with the context's mutex held, unless it says otherwise; `fn` is the public function's
 * name for error texts. include/dc_api.h describes the walk of a parameter. The files:
 *
 *   context.c   begin and end of a context, its streams and arenas, entering and leaving a call
 *   params.c    parameters: registering, finding, forgetting
 *   chunks.c    even splits, which parameters of one size share
 *   names.c     their names, for texts
 *   graphs.c    graphs, and the comparison of them over the ranks
 *   gather.c    all-gather, fused or not
 *   copies.c    gathered copies: wait, release, take
 *   reduce.c    gradient buckets and their reductions
 *   replicas.c  the same where groups of ranks have all parameters each
 *   grad_finite.c  whether the gradients of a step are finite
 *   offload.c   tensors and shards between device and host memory
 *   stats.c     statistics, dry runs
 *   capture.c   steps captured into CUDA graphs
 *   flight_recorder.c       what ran when
 *   flight_recorder_dump.c  its entries, as a file */
#ifndef DC_RUNTIME_H
#define DC_RUNTIME_H

#include <inttypes.h>

#include "comm/comm.h"
#include "kernels/kernels.h"

/* Streams of a context, in the order of dc_trace_event.lane. */
enum { DC__LANE_CALLER, DC__LANE_GATHER, DC__LANE_REDUCE, DC__LANE_OFFLOAD, DC__LANE_RELOAD, DC__LANES };

/* One gathered copy of a parameter's weights; a parameter has at most one a data type. */
typedef struct dc__gathered_copy {
  dc_buffer *buffer; /* NULL: no copy */
  dc_event *ready;   /* when it is complete; made once, kept */
  int64_t version;   /* weights it holds: current if it equals the parameter's */
  int32_t dtype;
  bool awaited;  /* by the caller's stream, which need not wait again */
  bool retained; /* and kept: the caller has a reference of its own, which must outlive the library's */
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
  int32_t graphs; /* that contain it */

  /* weights */
  const void *shard;       /* stage 3: this rank's range */
  const dc__range *chunks; /* each rank's real part of its chunk; shared by parameters of this size (chunks.c) */
  int64_t version;         /* raised by dc_context_params_updated */
  dc__gathered_copy copies[DC__COPIES];
  bool in_use;             /* waited for, and not released by the last of its users */
  int64_t planned_in;      /* the call of dc__gather, counted from 1, that planned it last */
  uint32_t planned_dtypes; /* in that call: a bit a type */
  int64_t users;           /* n_users of the release cycle under way; 0: none */
  int64_t released;        /* of them, so far */
  dc_event *last_read;     /* the caller's stream when copies were given back; made when needed */
  void *device_shard;      /* reloaded copy of a host shard; NULL: none */
  int64_t device_shard_version;
  dc_event *reloaded;
  dc_event *shard_read; /* the last gathers that may read a reloaded copy */

  /* gradient */
  void *grad;          /* this rank's part; NULL: it owns none */
  int64_t grad_count;  /* its real elements */
  int64_t grad_offset; /* within the flattened gradient */
  int32_t grad_dtype;
  int32_t expected_grad_dtype; /* DC_DTYPE_NONE: that of the gradient */
  const dc__range *owned;      /* each rank's part of the gradient, set when a graph is registered; even before */
  dc__range *own_split;        /* memory of `owned` if it is another split than `chunks`; else NULL */
  bool frozen;                 /* no rank wants a gradient */
  bool has_grad;               /* the buffer holds a sum to add to */
  bool keeps_grad;             /* and also in the next step */
  void *local_sum;             /* stage 1: the micro-batches' sum, whole; NULL: none */
  int32_t local_sum_dtype;
  dc__buckets *waits_in; /* where a gradient of it waits for a flush; NULL: nowhere */
  bool waits_whole;      /* that one is of stage 0: replicas sum other pieces of it, and its gather would undo theirs */
  int64_t pending;       /* reductions queued and not yet known to be done */
} dc__param;

/* An offloaded tensor: its host copy, kept over steps, and the device copy of one step. */
typedef struct dc__offloaded {
  int64_t *shape;
  int32_t ndim;
  int32_t dtype;
  size_t bytes;
  dc_buffer *host;
  dc_event *offloaded;
  dc_buffer *device; /* NULL: not reloaded */
  dc_event *reloaded;
  bool stale; /* the host copy was replaced since it was reloaded */
} dc__offloaded;

typedef struct dc__graph {
  int64_t id;
  int64_t ordinal; /* the same on every rank, as ids (addresses, say) need not be */
  int32_t stage;
  dc__map params; /* id → dc__param */
  dc__map values; /* id → dc__offloaded */
} dc__graph;

/* A gradient bucket: slots filled in the caller's order, reduced as one. */
typedef struct dc__bucket {
  void *data;
  int64_t capacity; /* elements */
  int64_t used;
  dc_event *done; /* its latest reduction */
} dc__bucket;

/* The buckets of one data type, and what the filling one holds. */
struct dc__buckets {
  int32_t dtype;
  int32_t filling; /* index of the bucket that takes gradients */
  dc__bucket half[2];
  dc__coll_item *items;
  int64_t item_count;
  int64_t item_capacity;
  dc__param **params; /* beside items */
  int64_t param_capacity;
  int64_t graph_ordinal; /* of the first item, for error texts */
};

enum { DC__BUCKET_TYPES = 4 }; /* the floating-point types */

typedef struct dc__counters {
  int64_t gathers, gather_hits, gather_wire_bytes;
  int64_t reductions, reduce_wire_bytes, flushes;
  int64_t d2h_bytes, h2d_bytes;
  int64_t allocations_base; /* subtracted from what the arenas count */
} dc__counters;

typedef struct dc__recorder dc__recorder; /* flight_recorder.h */

/* Memory of the device. */
typedef struct dc__arenas {
  dc__arena *gathered; /* full weights */
  dc__arena *working;  /* reloaded tensors, local sums, the caller's device memory */
  dc__arena *shared;   /* what peers read, and the caller's shared memory */
  dc__arena *buckets;  /* read by peers too; apart, so that what stays does not cut up the memory of large shards */
  dc__arena *staged;   /* one of these, for staged shards */
  dc__arena *reloaded; /* one of these, for reloaded shards */
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
  int32_t rank, world;

  dc_comm *gather_comm;                      /* own copies of the caller's communicator, so that both overlap */
  dc_comm *reduce_comm;                      /* the same as gather_comm where there can be only one */
  struct dc__replica_blocks *replica_blocks; /* replicas.c */
  dc_comm *replica_comm; /* with replicas, whose group `rank` and `world` are of; reduce_comm has all ranks then */
  dc_stream *lanes[DC__LANES]; /* [DC__LANE_CALLER] is the caller's; the others are made when first used */
  dc_event *caller_event;      /* the caller's stream, with work of the context queued */
  dc__arenas arenas;           /* in use */
  dc__arenas saved_arenas;     /* of captures; within one, those of the time outside. NULL: there was none yet */
  bool capturing;              /* the caller's stream is captured into a graph (capture.c) */
  bool stream_ordered;         /* memory of gathers is the gather stream's, in the order of the calls, so that it lies
                            alike on all ranks */
  dc__arena *host;             /* offloaded tensors, the caller's host memory */

  dc__map params;
  dc__map graphs;
  dc__map chunks; /* elements → dc__chunks */
  int64_t graph_ordinals;
  int64_t gather_calls;
  dc__buckets buckets[DC__BUCKET_TYPES];

  bool in_forward;
  bool update;   /* of dc_start_backward */
  bool boundary; /* a backward with update ended: the next one replaces gradients */
  bool profiling;
  dc_buffer *not_finite; /* a dc__nonfinite of the device, written in the caller's order; NULL: not checked */
  bool finite_known;     /* it is a whole step's */
  int64_t reload_bytes, offload_bytes;
  dc__counters counters;
  dc__recorder *recorder;

  dc__coll_item *items; /* scratch of a fused gather */
  int64_t item_capacity;
  void **scratch; /* staged shards of a fused gather */
  int64_t scratch_capacity;
};

/* ---- context.c ---- */

/* Locks a ready context that has not failed; on error it is not locked. */
dc_status dc__context_enter(dc_context *ctx, const char *fn);
/* Unlocks; returns status. */
dc_status dc__context_leave(dc_context *ctx, dc_status status);
/* The same around an operator, in which the device stays current and only the caller's allocator is called. */
dc_status dc__operator_enter(dc_context *ctx, const char *fn);
dc_status dc__operator_leave(dc_context *ctx, dc_status status);
dc_status dc__context_start(dc_context *ctx, const char *fn, dc_comm *comm, const dc_config *config,
                            int64_t bucket_elements);
dc_status dc__context_cleanup(dc_context *ctx);
/* dc__comm_all_gather_int64() on a group's communicator, recorded. */
dc_status dc__context_exchange(dc_context *ctx, int32_t group, dc__tag *tag, const int64_t *own, int64_t count,
                               int64_t *table);
/* The first failure of the asynchronous work, or DC_OK. */
dc_status dc__context_check(dc_context *ctx);
dc_status dc__arenas_create(dc_context *ctx, dc__arenas *arenas);
/* A stream of the context, made on first use; within a capture the caller's, on which all work is. */
dc_status dc__lane(dc_context *ctx, int32_t lane, dc_stream **stream);
/* Notes that work of the context was queued on the caller's stream; dc__context_synchronize waits for it. */
void dc__record_caller_event(dc_context *ctx);
/* Lets a stream of the context wait for what the caller has queued so far. */
void dc__wait_for_caller(dc_context *ctx, dc_stream *stream);
/* Records the event where the stream is; within a capture, whose order is that of the calls, it passes at once. */
void dc__context_record_event(dc_context *ctx, dc_event *event, dc_stream *stream);
/* Makes *event unless it is there. */
dc_status dc__ensure_event(dc_context *ctx, dc_event **event);
void dc__destroy_event(dc_context *ctx, dc_event **event);
/* Blocks until the streams made so far, and our work on the caller's, are done: the sync_* switches, abort, cleanup. */
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
/* Whether this rank's part of a reduced gradient has a buffer; every rank gets the same answer. */
dc_status dc__param_check_buffer(const dc_context *ctx, const char *fn, const dc__param *param);
dc_status dc__param_find(dc_context *ctx, const char *fn, int64_t id, dc__param **param);
/* count numbers; none may be NULL. */
dc_status dc__check_ids(const char *fn, const int64_t *ids, int64_t count);
void dc__params_free(dc_context *ctx);
/* The even split of a size, from a table that its parameters share; NULL: no memory. One dc__chunks_release() each. */
typedef struct dc__chunks dc__chunks;
const dc__range *dc__chunks_retain(dc_context *ctx, int64_t numel);
void dc__chunks_release(dc_context *ctx, int64_t numel);
/* The same split at another address, for gradients, whose split is not that of stage 0 although it looks the same. */
const dc__range *dc__chunks_even_split(const dc_context *ctx, int64_t numel);
/* A large gradient with an even split is reduced in pieces, which are as large as a bucket. Piece k has, of each rank's
 * chunk, the elements from k * width on, one slice behind the other. Slices have the same places in many pieces. */
int64_t dc__piece_width(const dc_context *ctx);
int64_t dc__piece_count(const dc_context *ctx, int64_t numel);
const dc__range *dc__chunks_piece(const dc_context *ctx, int64_t numel, int64_t k); /* of more than one */
/* ceil(numel / world), and rank's real part of that chunk. */
int64_t dc__chunk(int64_t numel, int32_t world);
dc__range dc__chunk_range(int64_t numel, int32_t world, int32_t rank);

/* ---- names.c ---- */

dc_status dc__name_set(dc_context *ctx, const char *fn, int64_t id, const char *name);
void dc__name_remove(dc_context *ctx, int64_t id);
/* Copies a text, with names behind the numbers of parameters that have one, as far as they fit. */
void dc__names_annotate(const dc_context *ctx, const char *plain, char *named, size_t cap);
/* The same to this thread's last error, of a call that failed. */
void dc__names_annotate_error(const dc_context *ctx, dc_status status);

/* ---- graphs.c ---- */

dc_status dc__graph_register(dc_context *ctx, const char *fn, int64_t graph_id, int32_t stage, const int64_t *ids,
                             int64_t count);
dc_status dc__graph_unregister(dc_context *ctx, const char *fn, int64_t graph_id);
dc_status dc__graphs_reset(dc_context *ctx, const char *fn);
dc_status dc__graph_find(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph);
/* The same, and only a stage-3 graph will do. */
dc_status dc__graph_find_stage3(dc_context *ctx, const char *fn, int64_t graph_id, dc__graph **graph);
/* A parameter of a graph; stage3: only a stage-3 graph will do. */
dc_status dc__graph_find_param(dc_context *ctx, const char *fn, int64_t graph_id, int64_t id, bool stage3,
                               dc__graph **graph, dc__param **param);
/* DC_E_BUSY if a gradient of the graph's parameters is on its way, or part of a local sum; graph NULL: of any. */
dc_status dc__graph_check_idle(const dc_context *ctx, const char *fn, const dc__graph *graph);
/* Forgets all graphs, busy or not. */
void dc__graphs_free(dc_context *ctx);

/* ---- gather.c ---- */

/* Starts to gather those of the parameters that are not there; dtypes NULL: each its own. All or nothing. */
dc_status dc__gather(dc_context *ctx, const char *fn, int32_t op, dc__graph *graph, dc__param *const *params,
                     const int32_t *dtypes, int64_t count);
/* Checks the type asked for and resolves DC_DTYPE_NONE. */
dc_status dc__gather_dtype(const char *fn, const dc__param *param, int32_t *dtype);

/* ---- copies.c ---- */

/* The current or coming copy in a type (DC_DTYPE_NONE: the shard's); NULL: none. */
dc__gathered_copy *dc__gather_copy(dc__param *param, int32_t dtype);
/* A current or coming copy with the exact values of the shard, from which other types may be cast without
 * communication; NULL: none. Earlier gathers must not change the result of a gather. */
dc__gathered_copy *dc__gather_source(dc__param *param);
bool dc__copy_is_current(const dc__param *param, const dc__gathered_copy *copy);
dc_status dc__gather_wait(dc_context *ctx, const char *fn, dc__param *param);
dc_status dc__gather_release(dc_context *ctx, const char *fn, dc__param *param, int64_t n_users);
dc_status dc__gather_retain(dc_context *ctx, const char *fn, dc__param *param, int32_t dtype, dc_buffer **buffer);
/* Frees a parameter's copies and ends its release cycle. */
void dc__gather_free(dc_context *ctx, dc__param *param);
void dc__gathered_copy_free(const dc_context *ctx, const dc__param *param, dc__gathered_copy *copy);
/* The event that must pass before the memory is used again; it is later than all others. */
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
/* Starts the reduction of all that waits in buckets. */
dc_status dc__reduce_flush(dc_context *ctx);
/* The type in which a gradient of this type is reduced, or added locally, now. */
int32_t dc__reduce_dtype(const dc__param *param, int32_t dtype);
/* Flushes and blocks until every gradient has arrived; at the end of a step local sums too. */
dc_status dc__reduce_finish(dc_context *ctx, const char *fn);
/* Forgets what waits in buckets and in local sums. */
void dc__reduce_drop(dc_context *ctx);
void dc__buckets_free(dc_context *ctx);

/* ---- finite.c ---- */

dc_status dc__grad_finite_init(dc_context *ctx);
void dc__grad_finite_destroy(dc_context *ctx);
/* Discards the findings so far. */
void dc__grad_finite_reset(dc_context *ctx);
/* Copies or adds the parameter's gradient on the caller's stream, and checks the result where the config says so. */
void dc__grad_combine(dc_context *ctx, int64_t id, const dc__combination *c);
/* The findings of all ranks; id may be NULL, and is written where one was found. */
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
/* Whether its device copy is there and not older than the weights. */
bool dc__shard_is_reloaded(const dc__param *param);
dc_status dc__reload_shard(dc_context *ctx, const dc__graph *graph, dc__param *param);
void dc__free_device_shard(dc_context *ctx, dc__param *param);
/* A buffer that dc_free_tensors was given: a reloaded tensor's is freed. False: it is the context's, and stays. */
bool dc__free_buffer(dc_context *ctx, dc_buffer *buffer);

/* ---- stats.c ---- */

void dc__stats(dc_context *ctx, dc_memory_stats *stats);
void dc__stats_reset(dc_context *ctx);
/* Bytes that a gradient's reduction brings to this rank. Stage 0 then gathers the means, which have the buffer's type.
 */
int64_t dc__reduction_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype);
dc_status dc__dry_run(dc_context *ctx, const char *fn, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                      dc_op_info *info);
/* Elements that a collective brings to this rank from others. */
int64_t dc__wire_elements(const dc_context *ctx, const dc__range *ranges, int64_t total, bool reduce);

/* ---- capture.c ---- */

/* Reads whether the caller's stream is captured now. Fails where a capture cannot begin, and once after one that ended
 * in the middle of a step. */
dc_status dc__capture_update(dc_context *ctx, const char *fn);

#include "runtime/flight_recorder.h"

#endif
