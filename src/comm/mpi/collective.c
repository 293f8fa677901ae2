/* One collective: the ranks compare their calls over the control communicator, and then MPI moves the bytes. Gathers go
 * between the callers' buffers; reductions are received in rounds of scratch memory and added in the order of ranks.
 * Small groups, and tensors beyond the reach of MPI's int offsets, are packed. */
#include <string.h>

#include "comm/mpi/mpi.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

enum {
  STAGING_BYTES = 64 << 20,  /* bytes that a round receives from all ranks */
  PACKED_BYTES = 256 << 10,  /* bytes up to which a group of several tensors moves as one */
  BROADCAST_BYTES = 1 << 30, /* bytes of one call */
  VECTORS = 4                /* counts and offsets of sent data, then of received data */
};

int *dc__mpi_alloc_vectors(int32_t world) {
  return dc__calloc((size_t)DC__COMM_GROUP * VECTORS * (size_t)world, sizeof(int));
}

int *dc__mpi_vector(const dc__mpi *self, int32_t item, int32_t which) {
  return self->vectors + ((size_t)item * VECTORS + (size_t)which) * (size_t)self->head.world;
}

dc_status dc__mpi_reserve_scratch(dc__mpi *self, int32_t which, int64_t bytes) {
  if (self->scratch_bytes[which] < (size_t)bytes) {
    dc__free(self->scratch[which]);
    self->scratch_bytes[which] = 0;
    self->scratch[which] = dc__calloc(1, (size_t)bytes);
    if (self->scratch[which] == NULL) {
      return DC_E_NO_MEMORY;
    }
    self->scratch_bytes[which] = (size_t)bytes;
  }
  return DC_OK;
}

static int64_t total_bytes(const dc__coll_item *item) {
  return item->total * (int64_t)dc_dtype_size(item->dtype);
}

/* Bytes up to the end of the last range: a column of two levels has ranges in a tensor larger than their total. */
static int64_t reach_of(const dc__coll_item *item, int32_t world) {
  int64_t reach = item->total;
  for (int32_t r = 0; r < world; r++) {
    const int64_t end = item->ranges[r].begin + item->ranges[r].count;
    reach = end > reach ? end : reach;
  }
  return reach * (int64_t)dc_dtype_size(item->dtype);
}

static bool is_packed(const dc__mpi *self, const dc__coll *coll) {
  int64_t sum = 0, largest = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    const int64_t reach = reach_of(&coll->items[i], self->head.world);
    sum += total_bytes(&coll->items[i]);
    largest = reach > largest ? reach : largest;
  }
  return largest > self->max_bytes || (coll->count > 1 && sum <= PACKED_BYTES);
}

/* Adds a request that MPI has started, or abandons those before it. */
dc_status dc__mpi_add_request(const dc__mpi_round *r, const char *call, int error) {
  dc_status status = dc__mpi_check_result(r->wait, call, error);
  if (status != DC_OK) {
    dc__mpi_abandon(r->wait);
    return status;
  }
  r->wait->count++;
  return DC_OK;
}

dc__mpi_handle *dc__mpi_next_request(const dc__mpi_round *r) {
  return &r->wait->requests[r->wait->count];
}

/* Starts to gather the parts, of which this rank's is in recv already. Two ranks exchange them in a message each, which
 * takes less time than MPI's collective. */
static dc_status start_gather(const dc__mpi_round *r, char *recv, const int *counts, const int *at) {
  const dc__mpi *self = r->self;
  const dc__mpi_library *mpi = self->mpi;
  const int32_t rank = self->head.rank, peer = 1 - rank;
  if (self->head.world != 2) {
    return dc__mpi_add_request(r, "MPI_Iallgatherv",
                               mpi->calls->iallgatherv(mpi, recv, counts, at, self->comm, dc__mpi_next_request(r)));
  }
  DC__TRY(dc__mpi_add_request(r, "MPI_Irecv",
                              mpi->calls->irecv(mpi, recv + at[peer], counts[peer], peer, DC__MPI_TAG_DATA, self->comm,
                                                dc__mpi_next_request(r))));
  return dc__mpi_add_request(r, "MPI_Isend",
                             mpi->calls->isend(mpi, recv + at[rank], counts[rank], peer, DC__MPI_TAG_DATA, self->comm,
                                               dc__mpi_next_request(r)));
}

/* ---- packed data ---- */

typedef void (*slice_fn)(const dc__mpi_round *r, const dc__coll_item *item, int32_t rank, dc__window_slice slice);

/* Calls fn for each slice of a rank's part that falls into the round. Returns the bytes up to the last one's end. */
static int64_t each_slice(const dc__mpi_round *r, int32_t rank, slice_fn fn) {
  int64_t pos = 0, end = 0;
  for (int32_t i = 0; i < r->coll->count; i++) {
    const dc__coll_item *item = &r->coll->items[i];
    dc__window_slice slice = dc__window_intersect(item, rank, pos, r->lo, r->size);
    pos += dc__item_stride(item, rank);
    if (slice.count > 0) {
      end = slice.at + slice.count * (int64_t)dc_dtype_size(item->dtype);
      if (fn != NULL) {
        fn(r, item, rank, slice);
      }
    }
  }
  return end;
}

static void copy_elements(void *to, const void *from, int64_t count, int32_t dtype) {
  memcpy(to, from, (size_t)count * dc_dtype_size(dtype));
}

static void pack_contribution(const dc__mpi_round *r, const dc__coll_item *item, int32_t rank, dc__window_slice slice) {
  copy_elements(r->self->scratch[0] + rank * r->size + slice.at,
                dc__bytes_at(item->send, item->ranges[rank].begin + slice.begin, item->dtype), slice.count,
                item->dtype);
}

static void pack_own(const dc__mpi_round *r, const dc__coll_item *item, int32_t rank, dc__window_slice slice) {
  copy_elements(r->self->scratch[1] + rank * r->size + slice.at, dc__bytes_at(item->send, slice.begin, item->dtype),
                slice.count, item->dtype);
}

static void unpack_gathered(const dc__mpi_round *r, const dc__coll_item *item, int32_t rank, dc__window_slice slice) {
  char *to = (char *)item->recv + (item->ranges[rank].begin + slice.begin) * (int64_t)dc_dtype_size(item->dtype);
  if (rank != r->self->head.rank || to != dc__bytes_at(item->send, slice.begin, item->dtype)) {
    copy_elements(to, r->self->scratch[1] + rank * r->size + slice.at, slice.count, item->dtype);
  }
}

static dc_status gather_packed(const dc__mpi_round *r) {
  dc__mpi *self = r->self;
  int *counts = dc__mpi_vector(self, 0, 0), *at = dc__mpi_vector(self, 0, 1);
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    counts[rank] = (int)each_slice(r, rank, rank == self->head.rank ? pack_own : NULL);
    at[rank] = (int)(rank * r->size);
  }
  DC__TRY(start_gather(r, self->scratch[1], counts, at));
  DC__TRY(dc__mpi_wait_all(r->wait));
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    (void)each_slice(r, rank, unpack_gathered);
  }
  return DC_OK;
}

static dc_status exchange_packed(const dc__mpi_round *r) {
  dc__mpi *self = r->self;
  int *send_counts = dc__mpi_vector(self, 0, 0), *at = dc__mpi_vector(self, 0, 1),
      *recv_counts = dc__mpi_vector(self, 0, 2);
  int64_t own = each_slice(r, self->head.rank, NULL);
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    bool other = rank != self->head.rank;
    send_counts[rank] = other ? (int)each_slice(r, rank, pack_contribution) : 0;
    recv_counts[rank] = other ? (int)own : 0;
    at[rank] = (int)(rank * r->size);
  }
  DC__TRY(
      dc__mpi_add_request(r, "MPI_Ialltoallv",
                          self->mpi->calls->ialltoallv(self->mpi, self->scratch[0], send_counts, at, self->scratch[1],
                                                       recv_counts, at, self->comm, dc__mpi_next_request(r))));
  return dc__mpi_wait_all(r->wait);
}

/* ---- data in place ---- */

static dc_status gather_item(const dc__mpi_round *r, int32_t i) {
  dc__mpi *self = r->self;
  const dc__coll_item *item = &r->coll->items[i];
  int64_t size = (int64_t)dc_dtype_size(item->dtype), bytes = dc__item_bytes(item, self->head.rank);
  int *counts = dc__mpi_vector(self, i, 0), *at = dc__mpi_vector(self, i, 1);
  char *own = (char *)item->recv + item->ranges[self->head.rank].begin * size;
  if (bytes > 0 && own != item->send) {
    memcpy(own, item->send, (size_t)bytes);
  }
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    counts[rank] = (int)dc__item_bytes(item, rank);
    at[rank] = (int)(item->ranges[rank].begin * size);
  }
  return start_gather(r, item->recv, counts, at);
}

static dc_status gather_in_place(const dc__mpi_round *r) {
  for (int32_t i = 0; i < r->coll->count; i++) {
    DC__TRY(gather_item(r, i));
  }
  return dc__mpi_wait_all(r->wait);
}

/* Sends each rank its slice of an item, and receives the others' slices of this rank's range. `pos` is the item's
 * position in each rank's part, and moves on to the next item. */
static dc_status exchange_item(const dc__mpi_round *r, int32_t i, int64_t *pos) {
  dc__mpi *self = r->self;
  const dc__coll_item *item = &r->coll->items[i];
  int64_t size = (int64_t)dc_dtype_size(item->dtype);
  int *send_counts = dc__mpi_vector(self, i, 0), *send_at = dc__mpi_vector(self, i, 1);
  int *recv_counts = dc__mpi_vector(self, i, 2), *recv_at = dc__mpi_vector(self, i, 3);
  dc__window_slice own = dc__window_intersect(item, self->head.rank, pos[self->head.rank], r->lo, r->size);
  for (int32_t rank = 0; rank < self->head.world; rank++) {
    dc__window_slice slice = dc__window_intersect(item, rank, pos[rank], r->lo, r->size);
    bool other = rank != self->head.rank;
    send_counts[rank] = other ? (int)(slice.count * size) : 0;
    send_at[rank] = (int)((item->ranges[rank].begin + slice.begin) * size);
    recv_counts[rank] = other ? (int)(own.count * size) : 0;
    recv_at[rank] = (int)(rank * r->size + own.at);
    pos[rank] += dc__item_stride(item, rank);
  }
  return dc__mpi_add_request(r, "MPI_Ialltoallv",
                             self->mpi->calls->ialltoallv(self->mpi, item->send, send_counts, send_at, self->scratch[1],
                                                          recv_counts, recv_at, self->comm, dc__mpi_next_request(r)));
}

static dc_status exchange_in_place(const dc__mpi_round *r) {
  int64_t pos[DC__COMM_MAX_WORLD] = {0};
  for (int32_t i = 0; i < r->coll->count; i++) {
    DC__TRY(exchange_item(r, i, pos));
  }
  return dc__mpi_wait_all(r->wait);
}

/* ---- the collectives ---- */

int64_t dc__mpi_round_bytes(const dc__mpi *self, int64_t largest) {
  int64_t most = (STAGING_BYTES / self->head.world) & ~(int64_t)(DC__PART_ALIGN - 1);
  return largest < most ? largest : most;
}

/* Computes sizes and reserves memory for them, before the ranks compare their calls. After that, the others' MPI calls
 * would wait for a rank that fails alone, and cannot be cancelled. */
static dc_status plan_rounds(dc__mpi_round *r) {
  const dc__coll *coll = r->coll;
  const int32_t world = r->self->head.world;
  if (coll->kind == DC__COLL_ALL_TO_ALL) {
    return dc__mpi_plan_all_to_all(r);
  }
  if (coll->kind != DC__COLL_GATHER && coll->kind != DC__COLL_REDUCE) {
    return DC_OK;
  }
  r->packed = is_packed(r->self, coll);
  r->largest = dc__max_part_bytes(coll, world);
  r->size = dc__mpi_round_bytes(r->self, r->largest);
  if (r->packed || coll->kind == DC__COLL_REDUCE) {
    DC__TRY(dc__mpi_reserve_scratch(r->self, 1, r->size * world));
  }
  return r->packed && coll->kind == DC__COLL_REDUCE ? dc__mpi_reserve_scratch(r->self, 0, r->size * world) : DC_OK;
}

static dc_status mpi_gather(dc__mpi_round *r) {
  if (!r->packed) {
    return gather_in_place(r);
  }
  for (; r->lo < r->largest; r->lo += r->size) {
    DC__TRY(gather_packed(r));
  }
  return DC_OK;
}

static void add_contributions(const dc__mpi_round *r, const dc__coll_item *item, int32_t rank, dc__window_slice slice) {
  const void *src[DC__COMM_MAX_WORLD];
  for (int32_t peer = 0; peer < r->self->head.world; peer++) {
    src[peer] = peer == rank ? dc__bytes_at(item->send, item->ranges[rank].begin + slice.begin, item->dtype)
                             : r->self->scratch[1] + peer * r->size + slice.at;
  }
  void *dst = (char *)item->recv + slice.begin * (int64_t)dc_dtype_size(item->recv_dtype);
  const dc__reduction sum = dc__item_reduction(item, dst, src, r->self->head.world, slice.count);
  dc__reduce(&sum);
}

static dc_status mpi_reduce(dc__mpi_round *r) {
  for (; r->lo < r->largest; r->lo += r->size) {
    DC__TRY(r->packed ? exchange_packed(r) : exchange_in_place(r));
    (void)each_slice(r, r->self->head.rank, add_contributions);
  }
  return DC_OK;
}

static dc_status mpi_broadcast(const dc__mpi_round *r) {
  const dc__coll_item *item = &r->coll->items[0];
  for (int64_t done = 0; done < item->total; done += BROADCAST_BYTES) {
    int64_t left = item->total - done;
    int count = (int)(left < BROADCAST_BYTES ? left : BROADCAST_BYTES);
    DC__TRY(dc__mpi_add_request(r, "MPI_Ibcast",
                                r->self->mpi->calls->ibcast(r->self->mpi, (char *)item->recv + done, count,
                                                            r->coll->root, r->self->comm, dc__mpi_next_request(r))));
    DC__TRY(dc__mpi_wait_all(r->wait));
  }
  return DC_OK;
}

static dc_status mpi_run_collective(dc__mpi *self, const dc__coll *coll, dc__mpi_wait *wait) {
  dc__mpi_round r = {.self = self, .coll = coll, .wait = wait};
  DC__TRY(dc__comm_check(self->control));
  DC__TRY(plan_rounds(&r));
  (void)self->head.ops->agree(&self->head, coll, 0);
  DC__TRY(dc__comm_check(self->control));
  DC__TRY(coll->kind == DC__COLL_GATHER       ? mpi_gather(&r)
          : coll->kind == DC__COLL_REDUCE     ? mpi_reduce(&r)
          : coll->kind == DC__COLL_BROADCAST  ? mpi_broadcast(&r)
          : coll->kind == DC__COLL_ALL_TO_ALL ? dc__mpi_all_to_all(&r)
                                              : DC_OK); /* a barrier is the comparison alone */
  atomic_fetch_add_explicit(&self->head.wire_bytes, dc__received_bytes(coll, self->head.rank, self->head.world),
                            memory_order_relaxed);
  return DC_OK;
}

void dc__mpi_fail(dc__mpi *self, dc_status status) {
  dc__tcp_group *group = ((dc__tcp *)self->control)->group;
  if (atomic_load(&group->failed) == 0) {
    dc__tcp_group_fail(group, status);
  }
  dc__comm_fail(&self->head, dc__comm_check(self->control));
}

void dc__mpi_run(dc_comm *comm, const dc__coll *coll) {
  dc__mpi *self = (dc__mpi *)comm;
  char name[DC__COLL_TEXT];
  dc__coll_describe_op(name, coll->tag.op, coll->tag.id);
  pthread_mutex_lock(&self->collective_mutex);
  dc__mpi_wait wait = {
      .mpi = self->mpi, .control = self->control, .rank = comm->rank, .timeout_ns = comm->timeout_ns, .what = name};
  dc_status status = mpi_run_collective(self, coll, &wait);
  self->abandoned = self->abandoned || wait.count > 0;
  if (status != DC_OK) {
    dc__mpi_fail(self, status);
  }
  pthread_mutex_unlock(&self->collective_mutex);
}
