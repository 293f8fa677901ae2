/* All-reduce out of the two collectives that a transport has: each rank reduces a chunk and gathers the others'. */
#include "comm/comm.h"
#include "comm/host.h"

typedef struct all_reduce {
  dc_comm *comm;
  void *data;
  int64_t count;
  int32_t dtype;
  int32_t op;
} all_reduce;

/* The communicator keeps one chunk; whoever needs it takes it away meanwhile. */
static dc_status take_scratch(dc_comm *comm, size_t bytes, void **ptr, size_t *got) {
  pthread_mutex_lock(&comm->mutex);
  *ptr = comm->scratch;
  *got = comm->scratch_bytes;
  comm->scratch = NULL;
  pthread_mutex_unlock(&comm->mutex);
  if (*ptr != NULL && *got >= bytes) {
    return DC_OK;
  }
  if (*ptr != NULL && comm->ops->heap_free != NULL) {
    comm->ops->heap_free(comm, *ptr, *got);
  } else {
    dc__free(*ptr);
  }
  *ptr = NULL;
  *got = bytes;
  if (comm->ops->heap_alloc != NULL) {
    return comm->ops->heap_alloc(comm, bytes, ptr);
  }
  *ptr = dc__calloc(1, bytes);
  return *ptr != NULL ? DC_OK : DC_E_NO_MEMORY;
}

static void put_scratch(dc_comm *comm, void *ptr, size_t bytes) {
  pthread_mutex_lock(&comm->mutex);
  void *old = comm->scratch;
  size_t old_bytes = comm->scratch_bytes;
  comm->scratch = ptr;
  comm->scratch_bytes = bytes;
  pthread_mutex_unlock(&comm->mutex);
  if (old != NULL && comm->ops->heap_free != NULL) {
    comm->ops->heap_free(comm, old, old_bytes);
  } else {
    dc__free(old);
  }
}

void dc__comm_drop_scratch(dc_comm *comm) {
  put_scratch(comm, NULL, 0);
}

/* A rank's chunk goes to memory of its own, because the others may
 * still read the data. */
static void run_all_reduce(void *args) {
  const all_reduce *a = args;
  dc_comm *comm = a->comm;
  int64_t chunk = (a->count + comm->world - 1) / comm->world;
  dc__range ranges[DC__COMM_MAX_WORLD];
  for (int32_t r = 0; r < comm->world; r++) {
    int64_t begin = r * chunk < a->count ? r * chunk : a->count;
    ranges[r] = (dc__range){begin, a->count - begin < chunk ? a->count - begin : chunk};
  }
  void *scratch = NULL;
  size_t bytes = 0;
  dc_status status = take_scratch(comm, (size_t)chunk * dc_dtype_size(a->dtype), &scratch, &bytes);
  if (status == DC_OK) {
    const dc__tag tag = {-1, -1, DC_OP_COMM_ALL_REDUCE, NULL};
    dc__coll_item item = {.send = a->data,
                          .recv = scratch,
                          .ranges = ranges,
                          .total = a->count,
                          .id = -1,
                          .dtype = a->dtype,
                          .recv_dtype = a->dtype,
                          .reduce_op = a->op};
    dc__comm_reduce_scatter(comm, NULL, &tag, &item, 1);
    item.send = scratch;
    item.recv = a->data;
    item.reduce_op = 0;
    if (dc__comm_check(comm) == DC_OK) {
      dc__comm_all_gather(comm, NULL, &tag, &item, 1);
    }
    put_scratch(comm, scratch, bytes);
  } else {
    comm->ops->abort(comm, dc_last_error()); /* first: the group's failure is that of all its communicators */
    dc__comm_fail(comm, status);
  }
  dc__comm_release(comm);
}

void dc__comm_all_reduce(dc_comm *comm, dc_stream *stream, void *data, int64_t count, int32_t dtype, int32_t op) {
  const all_reduce a = {dc__comm_retain(comm), data, count, dtype, op};
  dc__stream_call(stream, run_all_reduce, &a, sizeof a);
}
