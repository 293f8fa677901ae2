/* An all-to-all over MPI: one exchange of the parts' sizes, and one of the data. Between the two, the ranks do another
 * handshake over the control communicator. So no rank gives MPI data that a rank with other sizes would not take. Parts
 * beyond the reach of MPI's int offsets go in rounds through scratch memory. */
#include <string.h>

#include "comm/mpi/mpi.h"
#include "comm/windows.h"

/* A rank that finds other sizes fails the group while others still exchange theirs. All have begun, so all end soon. An
 * abandoned request would make MPI unusable for every other communicator too. */
static const int64_t sizes_grace_ns = INT64_C(2000000000);

/* The message from each rank to each other one. */
typedef struct part_size {
  int64_t count;   /* elements that it sends to the other one */
  int64_t largest; /* bytes of the largest part that it sends */
  int64_t packed;  /* 1 if some of its data is beyond MPI's int offsets */
} part_size;

/* Bytes of send, whose ranges begin at index 0, or of recv, whose ranges begin at index world. */
static int64_t end_of(const dc__mpi_round *r, int32_t first) {
  const dc__coll_item *item = &r->coll->items[0];
  const dc__range last = item->ranges[first + r->self->head.world - 1];
  return (last.begin + last.count) * (int64_t)dc_dtype_size(item->dtype);
}

dc_status dc__mpi_plan_all_to_all(dc__mpi_round *r) {
  const int32_t world = r->self->head.world;
  r->packed = end_of(r, 0) > r->self->max_bytes || end_of(r, world) > r->self->max_bytes;
  r->largest = dc__max_part_bytes(r->coll, world);
  DC__TRY(dc__mpi_reserve_scratch(r->self, 0, world * (int64_t)sizeof(part_size)));
  return dc__mpi_reserve_scratch(r->self, 1, world * (int64_t)sizeof(part_size));
}

/* Exchanges bytes, with the counts and offsets in the vectors 0 to 3 of the first item. */
static dc_status exchange(const dc__mpi_round *r, const void *send, void *recv) {
  dc__mpi *self = r->self;
  DC__TRY(dc__mpi_add_request(
      r, "MPI_Ialltoallv",
      self->mpi->calls->ialltoallv(self->mpi, send, dc__mpi_vector(self, 0, 0), dc__mpi_vector(self, 0, 1), recv,
                                   dc__mpi_vector(self, 0, 2), dc__mpi_vector(self, 0, 3), self->comm,
                                   dc__mpi_next_request(r))));
  return dc__mpi_wait_all(r->wait);
}

static void set_vectors(const dc__mpi *self, int32_t rank, int64_t send, int64_t send_at, int64_t recv,
                        int64_t recv_at) {
  const int64_t values[] = {send, send_at, recv, recv_at};
  for (int32_t i = 0; i < (int32_t)DC__COUNT(values); i++) {
    dc__mpi_vector(self, 0, i)[rank] = (int)values[i];
  }
}

static dc_status compare_sizes(dc__mpi_round *r) {
  dc__mpi *self = r->self;
  const int32_t world = self->head.world, rank = self->head.rank;
  const dc__range *ranges = r->coll->items[0].ranges;
  part_size *own = (part_size *)(void *)self->scratch[0], *theirs = (part_size *)(void *)self->scratch[1];
  for (int32_t peer = 0; peer < world; peer++) {
    own[peer] = (part_size){ranges[peer].count, r->largest, r->packed};
    set_vectors(self, peer, sizeof *own, peer * (int64_t)sizeof *own, sizeof *own, peer * (int64_t)sizeof *own);
  }
  r->wait->grace_ns = sizes_grace_ns;
  DC__TRY(exchange(r, own, theirs));
  r->wait->grace_ns = 0;
  for (int32_t peer = 0; peer < world; peer++) {
    const int64_t expected = ranges[world + peer].count;
    if (theirs[peer].count != expected) {
      return dc__coll_fail_counts(r->coll, peer, theirs[peer].count, rank, expected);
    }
    r->largest = theirs[peer].largest > r->largest ? theirs[peer].largest : r->largest;
    r->packed = r->packed || theirs[peer].packed != 0;
  }
  return DC_OK;
}

static dc_status exchange_in_place(const dc__mpi_round *r) {
  dc__mpi *self = r->self;
  const int32_t world = self->head.world;
  const dc__coll_item *item = &r->coll->items[0];
  const int64_t size = (int64_t)dc_dtype_size(item->dtype);
  for (int32_t peer = 0; peer < world; peer++) {
    const dc__range to = item->ranges[peer], from = item->ranges[world + peer];
    set_vectors(self, peer, to.count * size, to.begin * size, from.count * size, from.begin * size);
  }
  /* The address of an empty tensor may be any, also the one that means MPI_IN_PLACE. */
  return exchange(r, end_of(r, 0) > 0 ? item->send : self->scratch[0],
                  end_of(r, world) > 0 ? item->recv : self->scratch[1]);
}

static dc_status exchange_window(const dc__mpi_round *r) {
  dc__mpi *self = r->self;
  const int32_t world = self->head.world;
  const dc__coll_item *item = &r->coll->items[0];
  const int64_t size = (int64_t)dc_dtype_size(item->dtype);
  for (int32_t peer = 0; peer < world; peer++) {
    const dc__window_slice to = dc__window_intersect(item, peer, 0, r->lo, r->size);
    const dc__window_slice from = dc__window_intersect(item, world + peer, 0, r->lo, r->size);
    set_vectors(self, peer, to.count * size, peer * r->size, from.count * size, peer * r->size);
    if (to.count > 0) {
      memcpy(self->scratch[0] + peer * r->size,
             dc__bytes_at(item->send, item->ranges[peer].begin + to.begin, item->dtype), (size_t)(to.count * size));
    }
  }
  DC__TRY(exchange(r, self->scratch[0], self->scratch[1]));
  for (int32_t peer = 0; peer < world; peer++) {
    const dc__window_slice from = dc__window_intersect(item, world + peer, 0, r->lo, r->size);
    if (from.count > 0) {
      memcpy((char *)item->recv + (item->ranges[world + peer].begin + from.begin) * size,
             self->scratch[1] + peer * r->size, (size_t)(from.count * size));
    }
  }
  return DC_OK;
}

static dc_status exchange_packed(dc__mpi_round *r) {
  for (; r->lo < r->largest; r->lo += r->size) {
    DC__TRY(exchange_window(r));
  }
  return DC_OK;
}

/* The second handshake. A rank with other sizes, or without the memory, does not take part. */
static dc_status meet_again(const dc__mpi_round *r) {
  dc__mpi *self = r->self;
  dc__comm_note_handshakes(&self->head, 1);
  (void)self->head.ops->agree(&self->head, r->coll, 0);
  return dc__comm_check(self->control);
}

dc_status dc__mpi_all_to_all(dc__mpi_round *r) {
  dc__mpi *self = r->self;
  DC__TRY(compare_sizes(r));
  if (r->packed) { /* on all ranks */
    r->size = dc__mpi_round_bytes(self, r->largest);
    DC__TRY(dc__mpi_reserve_scratch(self, 0, r->size * self->head.world));
    DC__TRY(dc__mpi_reserve_scratch(self, 1, r->size * self->head.world));
  }
  DC__TRY(meet_again(r));
  return r->packed ? exchange_packed(r) : exchange_in_place(r);
}
