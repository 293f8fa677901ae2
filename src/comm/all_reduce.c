/* All-reduce as a reduce-scatter and an all-gather: each rank reduces one chunk and gathers the others'. */
#include "comm/comm.h"
#include "comm/host_transport.h"

typedef struct all_reduce_call {
  dc_comm *comm;
  dc_device *device; /* owns the data; NULL if the host does */
  dc_stream *stream; /* the one that collectives are issued to; NULL if this thread runs them (host_transport.h) */
  void *data;
  int64_t count;
  int32_t dtype;
  int32_t op;
  uint64_t number; /* of its first collective */
} all_reduce_call;

_Static_assert(sizeof(all_reduce_call) <= DC__HOST_FUNC_BYTES,
               "an all-reduce must fit into what is called behind others");

/* ---- the chunk ---- */

static void free_reduce_chunk(dc_comm *comm, dc__comm_scratch scratch) {
  if (scratch.device != NULL) {
    scratch.device->ops->free(scratch.device, scratch.ptr, scratch.bytes, DC_MEMORY_DEVICE);
    dc__device_release(scratch.device);
  } else if (scratch.ptr != NULL && comm->ops->heap_free != NULL && comm->memory_space == 0) {
    comm->ops->heap_free(comm, scratch.ptr, scratch.bytes);
  } else {
    dc__free(scratch.ptr);
  }
}

/* The communicator caches one chunk. A call takes it out of the cache while it needs it. */
static dc_status acquire_chunk(const all_reduce_call *a, size_t bytes, dc__comm_scratch *scratch) {
  dc_comm *comm = a->comm;
  pthread_mutex_lock(&comm->mutex);
  *scratch = comm->scratch;
  comm->scratch = (dc__comm_scratch){NULL, NULL, 0};
  pthread_mutex_unlock(&comm->mutex);
  if (scratch->ptr != NULL && scratch->bytes >= bytes && scratch->device == a->device) {
    return DC_OK;
  }
  free_reduce_chunk(comm, *scratch);
  *scratch = (dc__comm_scratch){NULL, NULL, bytes};
  if (a->device != NULL) {
    DC__TRY(a->device->ops->alloc(a->device, bytes, DC_MEMORY_DEVICE, &scratch->ptr));
    scratch->device = dc__device_retain(a->device);
    return DC_OK;
  }
  if (comm->ops->heap_alloc != NULL && comm->memory_space == 0) {
    return comm->ops->heap_alloc(comm, bytes, &scratch->ptr);
  }
  scratch->ptr = dc__calloc(1, bytes);
  return scratch->ptr != NULL ? DC_OK : DC_E_NO_MEMORY;
}

static void release_chunk(dc_comm *comm, dc__comm_scratch scratch) {
  pthread_mutex_lock(&comm->mutex);
  dc__comm_scratch old = comm->scratch;
  comm->scratch = scratch;
  pthread_mutex_unlock(&comm->mutex);
  free_reduce_chunk(comm, old);
}

void dc__comm_free_scratch(dc_comm *comm) {
  release_chunk(comm, (dc__comm_scratch){NULL, NULL, 0});
}

/* ---- the two collectives ---- */

/* Called in the stream's order, so a card's data is ready. run() moves it before it returns, or issues the move to the
 * stream. */
static void run_half(const all_reduce_call *a, int32_t kind, const dc__coll_item *item) {
  const dc__tag tag = {
      .graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_REDUCE, .number = a->number + (kind == DC__COLL_GATHER ? 1 : 0)};
  if (a->device != NULL && item->total > 0 && dc__comm_check(a->comm) == DC_OK) {
    const dc__coll coll = {.comm = a->comm,
                           .device = a->device,
                           .stream = a->stream,
                           .tag = tag,
                           .captured = dc__stream_captures(a->stream),
                           .kind = kind,
                           .count = 1,
                           .items = {*item}};
    a->comm->ops->run(a->comm, &coll);
  } else if (kind == DC__COLL_REDUCE) {
    dc__comm_reduce_scatter(a->comm, NULL, &tag, item, 1);
  } else {
    dc__comm_all_gather(a->comm, NULL, &tag, item, 1);
  }
}

/* The reduced chunk goes to `chunk`, which may lie inside the data. */
static void reduce_then_gather(const all_reduce_call *a, const dc__range *ranges, void *chunk) {
  dc__coll_item item = {.send = a->data,
                        .recv = chunk,
                        .ranges = ranges,
                        .total = a->count,
                        .id = -1,
                        .dtype = a->dtype,
                        .recv_dtype = a->dtype,
                        .reduce_op = a->op};
  run_half(a, DC__COLL_REDUCE, &item);
  item.send = chunk;
  item.recv = a->data;
  item.reduce_op = 0;
  if (dc__comm_check(a->comm) == DC_OK) {
    run_half(a, DC__COLL_GATHER, &item);
  }
}

/* A rank reduces into scratch memory, because peers may still read its data. Issued work (NCCL) sends each peer its
 * part once and does not read it again, so there the chunk is reduced in place. */
static void run_all_reduce(void *args) {
  const all_reduce_call *a = args;
  dc_comm *comm = a->comm;
  int64_t chunk = (a->count + comm->world - 1) / comm->world;
  size_t size = dc_dtype_size(a->dtype);
  dc__range ranges[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < comm->world; r++) {
    int64_t begin = r * chunk < a->count ? r * chunk : a->count;
    ranges[r] = (dc__range){begin, a->count - begin < chunk ? a->count - begin : chunk};
  }
  dc__comm_scratch scratch;
  dc_status status = DC_OK;
  if (a->stream != NULL) {
    reduce_then_gather(a, ranges, (char *)a->data + (size_t)ranges[comm->rank].begin * size);
  } else if ((status = acquire_chunk(a, (size_t)chunk * size, &scratch)) == DC_OK) {
    reduce_then_gather(a, ranges, scratch.ptr);
    release_chunk(comm, scratch);
  } else {
    comm->ops->abort(comm, dc_last_error()); /* first: all communicators of the group must keep this failure */
    dc__comm_fail(comm, status);
  }
  dc__comm_release(comm);
}

void dc__comm_all_reduce(dc_comm *comm, dc_stream *stream, void *data, int64_t count, int32_t dtype, int32_t op) {
  dc_device *device = stream == NULL || stream->device->memory_space == 0 ? NULL : stream->device;
  const all_reduce_call a = {.comm = dc__comm_retain(comm),
                             .device = device,
                             .stream = dc__host_is_stream_ordered(comm, stream) ? stream : NULL,
                             .data = data,
                             .count = count,
                             .dtype = dtype,
                             .op = op,
                             .number = dc__comm_number(comm, count > 0 ? 2 : 0)};
  dc__comm_note_request(comm, count > 0 ? 2 : 0); /* the task queues or runs them */
  if (dc__host_launch_func(comm, stream, run_all_reduce, &a, sizeof a) != DC_OK) {
    comm->ops->abort(comm, dc_last_error()); /* peers must not wait for this rank */
    dc__comm_release(comm);
  }
}
