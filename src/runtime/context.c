/* Start and cleanup of a context, its streams and arenas, entering and leaving a call. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime/replicas.h"
#include "runtime/runtime.h"

/* ---- calls ---- */

dc_status dc__context_enter(dc_context *ctx, const char *fn) {
  DC__TRY(dc__handle_check(fn, "context", ctx, DC__HANDLE_CONTEXT));
  DC__TRY(dc__owner_check(fn, "context", &ctx->device->owner));
  pthread_mutex_lock(&ctx->mutex);
  dc_status status = DC_OK;
  if (ctx->state == DC__NEW) {
    status = dc__fail(DC_E_STATE, "%s: the context is not initialised; call dc_init first", fn);
  } else if (ctx->state == DC__CLEANED) {
    status = dc__fail(DC_E_STATE, "%s: the context was cleaned up; only dc_context_destroy is left", fn);
  } else {
    status = dc__context_check(ctx);
    status = status != DC_OK ? status : dc__capture_update(ctx, fn);
  }
  if (status != DC_OK) {
    (void)dc__context_leave(ctx, status);
  }
  return status;
}

dc_status dc__context_leave(dc_context *ctx, dc_status status) {
  dc__names_annotate_error(ctx, status);
  dc__recorder_set_failure(ctx, status);
  pthread_mutex_unlock(&ctx->mutex);
  return status;
}

dc_status dc__operator_enter(dc_context *ctx, const char *fn) {
  DC__TRY(dc__handle_check(fn, "context", ctx, DC__HANDLE_CONTEXT));
  dc__device_begin(ctx->device);
  dc_status status = dc__context_enter(ctx, fn);
  if (status != DC_OK) {
    dc__device_end(ctx->device);
  }
  return status;
}

dc_status dc__operator_leave(dc_context *ctx, dc_status status) {
  dc__device_end(ctx->device); /* before a failure is dumped: a dump may call the caller's log */
  return dc__context_leave(ctx, status);
}

dc_status dc__context_check(dc_context *ctx) {
  if (dc__device_check(ctx->device) != DC_OK) {
    ctx->reduce_comm->ops->abort(ctx->reduce_comm, dc_last_error()); /* the others wait for this rank */
    (void)(ctx->replica_comm == NULL ? DC_OK : dc__replicas_check(ctx));
    return dc__device_check(ctx->device);
  }
  if (ctx->replica_comm != NULL) {
    return dc__replicas_check(ctx);
  }
  DC__TRY(dc__comm_check(ctx->gather_comm));
  return ctx->reduce_comm == ctx->gather_comm ? DC_OK : dc__comm_check(ctx->reduce_comm);
}

void dc__logf(dc_context *ctx, int32_t level, const char *format, ...) {
  if (ctx->log == NULL) {
    return;
  }
  char line[512];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  char named[512];
  dc__names_annotate(ctx, line, named, sizeof named);
  ctx->log(level, named, ctx->log_user);
}

/* ---- streams and events ---- */

dc_status dc__lane(dc_context *ctx, int32_t lane, dc_stream **stream) {
  if (ctx->capturing) {
    *stream = ctx->lanes[DC__LANE_CALLER];
    return DC_OK;
  }
  if (lane == DC__LANE_REDUCE && ctx->reduce_comm == ctx->gather_comm) {
    lane = DC__LANE_GATHER; /* one communicator: its collectives must run in the order in which they were called */
  }
  if (ctx->lanes[lane] == NULL) {
    DC__TRY(ctx->device->ops->stream_create(ctx->device, &ctx->lanes[lane]));
  }
  *stream = ctx->lanes[lane];
  return DC_OK;
}

void dc__context_record_event(dc_context *ctx, dc_event *event, dc_stream *stream) {
  dc__event_record(event, ctx->capturing ? NULL : stream);
}

void dc__record_caller_event(dc_context *ctx) {
  if (ctx->lanes[DC__LANE_CALLER] != NULL) {
    dc__context_record_event(ctx, ctx->caller_event, ctx->lanes[DC__LANE_CALLER]);
  }
}

void dc__wait_for_caller(dc_context *ctx, dc_stream *stream) {
  if (ctx->lanes[DC__LANE_CALLER] != NULL) {
    dc__record_caller_event(ctx);
    dc__event_wait(ctx->caller_event, stream);
  }
}

dc_status dc__ensure_event(dc_context *ctx, dc_event **event) {
  return *event != NULL ? DC_OK : ctx->device->ops->event_create(ctx->device, event);
}

void dc__destroy_event(dc_context *ctx, dc_event **event) {
  if (*event != NULL) {
    dc__arena *arenas[] = {ctx->host,
                           ctx->arenas.gathered,
                           ctx->arenas.working,
                           ctx->arenas.shared,
                           ctx->arenas.buckets,
                           ctx->saved_arenas.gathered,
                           ctx->saved_arenas.working,
                           ctx->saved_arenas.shared,
                           ctx->saved_arenas.buckets};
    for (size_t i = 0; i < DC__COUNT(arenas); i++) {
      dc__arena_forget_event(arenas[i], *event);
    }
    ctx->device->ops->event_destroy(*event);
    *event = NULL;
  }
}

/* Waits for every stream even after a failure, as callers free memory afterwards. */
dc_status dc__context_synchronize(dc_context *ctx) {
  dc_status status = dc__context_check(ctx); /* once this sees a failure, no task waits for other ranks */
  dc__event_wait(ctx->caller_event, NULL);   /* our work on the caller's stream, which may be destroyed by now */
  for (int32_t lane = DC__LANE_GATHER; lane < DC__LANES; lane++) {
    dc_status done = dc__stream_sync(ctx->lanes[lane], 0); /* no timeout: tasks that wait for ranks have deadlines */
    status = status != DC_OK ? status : done;
  }
  return status != DC_OK ? status : dc__context_check(ctx);
}

/* ---- arenas ---- */

static dc_status heap_alloc(void *comm, size_t bytes, void **ptr) {
  return ((dc_comm *)comm)->ops->heap_alloc(comm, bytes, ptr);
}

static void heap_free(void *comm, void *ptr, size_t bytes) {
  ((dc_comm *)comm)->ops->heap_free(comm, ptr, bytes);
}

static void heap_done(void *comm) {
  dc__comm_release(comm);
}

/* Host memory from the device, which makes copies to and from it fast (pinned memory on CUDA). */
static dc_status host_alloc(void *device, size_t bytes, void **ptr) {
  return ((dc_device *)device)->ops->alloc(device, bytes, DC_MEMORY_HOST, ptr);
}

static void host_free(void *device, void *ptr, size_t bytes) {
  ((dc_device *)device)->ops->free(device, ptr, bytes, DC_MEMORY_HOST);
}

static void host_done(void *device) {
  dc__device_release(device);
}

/* An arena of the communicator's heap. */
static dc_status make_heap_arena(dc_context *ctx, dc_comm *comm, bool stream_ordered, dc__arena **arena) {
  dc__arena_source heap = {
      .alloc = heap_alloc, .free = heap_free, .done = heap_done, .user = comm, .stream_ordered = stream_ordered};
  DC__TRY(dc__arena_create(ctx->device, &heap, arena));
  dc__comm_retain(comm); /* until heap_done */
  return DC_OK;
}

/* On the CPU, peers can read the communicator's heap only. On CUDA, any device memory can be exchanged, and registered
 * memory without a copy. Registration needs the same offsets on all ranks, so gathers allocate in the order of the
 * calls, independent of events. Buckets are not registered: their data is received in other memory to be summed, and
 * NCCL needs both sides registered or none. */
dc_status dc__arenas_create(dc_context *ctx, dc__arenas *arenas) {
  bool on_card = ctx->device->memory_space != 0;
  bool has_heap =
      ctx->gather_comm->ops->heap_alloc != NULL && ctx->gather_comm->memory_space == ctx->device->memory_space;
  ctx->stream_ordered = has_heap && on_card && ctx->config.symmetric_memory == 1;
  DC__TRY(ctx->stream_ordered ? make_heap_arena(ctx, ctx->gather_comm, true, &arenas->gathered)
                              : dc__arena_create(ctx->device, NULL, &arenas->gathered));
  DC__TRY(ctx->stream_ordered || (has_heap && !on_card) ? make_heap_arena(ctx, ctx->gather_comm, false, &arenas->shared)
                                                        : dc__arena_create(ctx->device, NULL, &arenas->shared));
  DC__TRY(has_heap && !on_card ? make_heap_arena(ctx, ctx->reduce_comm, false, &arenas->buckets)
                               : dc__arena_create(ctx->device, NULL, &arenas->buckets));
  DC__TRY(dc__arena_create(ctx->device, NULL, &arenas->working));
  arenas->staged = ctx->stream_ordered ? arenas->gathered : arenas->shared;
  arenas->reloaded = ctx->stream_ordered ? arenas->working : arenas->shared; /* events change addresses in `shared` */
  return DC_OK;
}

static dc_status make_host_arena(dc_context *ctx) {
  dc__arena_source host = {.alloc = host_alloc, .free = host_free, .done = host_done, .user = ctx->device};
  DC__TRY(dc__arena_create(ctx->device, &host, &ctx->host));
  dc__device_retain(ctx->device); /* until host_done */
  return DC_OK;
}

/* ---- life ---- */

dc_status dc__context_exchange(dc_context *ctx, int32_t group, dc__tag *tag, const int64_t *own, int64_t count,
                               int64_t *table) {
  dc_comm *comm = group == DC__GROUP_REDUCE ? ctx->reduce_comm : ctx->gather_comm;
  int64_t bytes = count * comm->world * (int64_t)sizeof *table;
  tag->span = dc__recorder_begin(
      ctx,
      &(dc__recorded_op){.tag = tag, .group = group, .dtype = DC_INT64, .count = 1, .bytes = bytes, .moved = bytes});
  dc_status status = dc__comm_all_gather_int64(comm, tag, own, count, table);
  dc__recorder_submitted(tag->span);
  return status;
}

/* Compares the ranks' configurations. `own` has the order of `names`. */
static dc_status agree_on_config(dc_context *ctx, const char *fn) {
  static const char *const names[] = {"library version",
                                      "world size",
                                      "initial_reduce_bucket_size",
                                      "symmetric_memory",
                                      "double_buffer",
                                      "sync_before_reduce",
                                      "sync_after_reduce",
                                      "sync_before_allgather",
                                      "sync_after_allgather",
                                      "check_finite",
                                      "replicas"};
  enum { FIELDS = DC__COUNT(names) };
  const dc_config *c = &ctx->config;
  int64_t own[FIELDS] = {DC_API_VERSION,
                         ctx->world,
                         ctx->bucket_elements,
                         c->symmetric_memory,
                         c->double_buffer,
                         c->sync_before_reduce,
                         c->sync_after_reduce,
                         c->sync_before_allgather,
                         c->sync_after_allgather,
                         c->check_finite,
                         c->replicas};
  dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_INIT};
  int64_t *table = dc__calloc((size_t)ctx->world * FIELDS, sizeof *table);
  if (table == NULL) {
    ctx->gather_comm->ops->abort(ctx->gather_comm, "a rank has no memory for a context");
    return DC_E_NO_MEMORY;
  }
  dc_status status = dc__context_exchange(ctx, DC__GROUP_GATHER, &tag, own, FIELDS, table);
  for (int32_t i = 0; status == DC_OK && i < ctx->world * FIELDS; i++) {
    const int32_t rank = i / FIELDS, field = i % FIELDS;
    if (table[i] != own[field]) {
      status = dc__fail(DC_E_MISMATCH,
                        "%s: %s = %" PRId64 " on rank %" PRId32 ", but %" PRId64 " on rank %" PRId32
                        "; it must be the same on every rank",
                        fn, names[field], own[field], ctx->rank, table[i], rank);
    }
  }
  dc__free(table);
  return status;
}

/* Creates a private copy of the caller's communicator that can exchange the device's memory. */
static dc_status copy_comm(dc_context *ctx, const char *fn, dc_comm *comm, dc_comm **copy) {
  if (comm == NULL) {
    return dc__comm_create_self(copy);
  }
  if (ctx->device->memory_space == 0 || comm->supports_device) {
    return dc__comm_acquire_exclusive(fn, comm, copy);
  }
  dc_status status = dc__comm_create_nccl(comm, ctx->device, copy);
  return status == DC_OK ? DC_OK
                         : dc__fail(status,
                                    "%s: ranks of this communicator (%s) exchange memory of device \"%s\" through "
                                    "NCCL: %s",
                                    fn, comm->ops->name, ctx->device->name, dc_last_error());
}

/* The ranks compare their configurations over the first communicator, since the config decides which others they
 * create. */
static dc_status make_comms(dc_context *ctx, const char *fn, dc_comm *comm) {
  DC__TRY(copy_comm(ctx, fn, comm, &ctx->gather_comm));
  ctx->rank = ctx->gather_comm->rank;
  ctx->world = ctx->gather_comm->world;
  dc__recorder_set_group(ctx);
  DC__TRY(agree_on_config(ctx, fn));
  if (ctx->config.replicas > 1) {
    ctx->reduce_comm = ctx->gather_comm;
    ctx->gather_comm = NULL;
    DC__TRY(dc__replicas_connect(ctx, fn));
    ctx->rank = ctx->gather_comm->rank;
    ctx->world = ctx->gather_comm->world;
    return DC_OK;
  }
  dc_status status = dc__comm_dup(ctx->gather_comm, &ctx->reduce_comm);
  if (status == DC_E_UNSUPPORTED) {
    ctx->reduce_comm = dc__comm_retain(ctx->gather_comm);
    status = DC_OK;
  }
  return status;
}

static void free_resources(dc_context *ctx) {
  dc__graphs_free(ctx);
  dc__params_free(ctx);
  dc__buckets_free(ctx);
  dc__grad_finite_destroy(ctx);
  if (ctx->host != NULL) {
    dc__destroy_event(ctx, &ctx->caller_event);
  }
  for (int32_t lane = DC__LANE_GATHER; lane < DC__LANES; lane++) {
    if (ctx->lanes[lane] != NULL) {
      ctx->device->ops->stream_destroy(ctx->lanes[lane]);
      ctx->lanes[lane] = NULL;
    }
  }
  dc__arena **arenas[] = {&ctx->host,
                          &ctx->arenas.gathered,
                          &ctx->arenas.working,
                          &ctx->arenas.shared,
                          &ctx->arenas.buckets,
                          &ctx->saved_arenas.gathered,
                          &ctx->saved_arenas.working,
                          &ctx->saved_arenas.shared,
                          &ctx->saved_arenas.buckets};
  for (size_t i = 0; i < DC__COUNT(arenas); i++) {
    dc__arena_release(*arenas[i]);
    *arenas[i] = NULL;
  }
  dc__free(ctx->items);
  ctx->items = NULL;
  ctx->item_capacity = 0;
  dc__replicas_disconnect(ctx);
  dc__comm_release(ctx->replica_comm);
  dc__comm_release_exclusive(ctx->reduce_comm); /* the caller's own if it cannot be copied */
  dc__comm_release_exclusive(ctx->gather_comm);
  ctx->replica_comm = ctx->reduce_comm = ctx->gather_comm = NULL;
  dc__replicas_free(ctx);
}

static dc_status context_start(dc_context *ctx, const char *fn, dc_comm *comm) {
  DC__TRY(make_comms(ctx, fn, comm));
  DC__TRY(dc__comm_check_device(fn, ctx->gather_comm, ctx->device));
  DC__TRY(dc__arenas_create(ctx, &ctx->arenas));
  DC__TRY(make_host_arena(ctx));
  DC__TRY(dc__ensure_event(ctx, &ctx->caller_event));
  DC__TRY(dc__grad_finite_init(ctx));
  if (ctx->config.symmetric_memory == 1 && ctx->world > 1 && ctx->gather_comm->ops->peer_accessible == NULL) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "%s: config.symmetric_memory = 1, but ranks of this communicator (%s) cannot read "
                    "each other's memory",
                    fn, ctx->gather_comm->ops->name);
  }
  return DC_OK;
}

dc_status dc__context_start(dc_context *ctx, const char *fn, dc_comm *comm, const dc_config *config,
                            int64_t bucket_elements) {
  ctx->config = *config;
  ctx->config.double_buffer += config->double_buffer == 0; /* fills in defaults, as ranks compare effective values */
  ctx->config.replicas += config->replicas == 0;
  ctx->bucket_elements = bucket_elements;
  dc_status status = context_start(ctx, fn, comm);
  if (status != DC_OK) {
    free_resources(ctx);
    return status;
  }
  ctx->state = DC__READY;
  dc__stats_reset(ctx);
  return DC_OK;
}

dc_status dc__context_cleanup(dc_context *ctx) {
  if (ctx->state == DC__READY) {
    dc__recorder_set_failure(ctx, dc__context_synchronize(ctx)); /* a failed context is cleaned up too */
    ctx->lanes[DC__LANE_CALLER] = NULL;                          /* the caller may have destroyed it by now */
    free_resources(ctx);
    ctx->state = DC__CLEANED;
  }
  return DC_OK;
}
