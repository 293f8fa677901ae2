/* An all-to-all: the ranks compare the sizes of the parts over the bootstrap communicator, and then NCCL sends and
 * receives them as one group. */
#include "comm/nccl/nccl.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

/* Compares the sizes over the bootstrap communicator, after the handshake. A difference fails the group as such, and
 * not as an abort. */
static dc_status gather_and_compare(dc__nccl *self, const dc__coll *coll, const int64_t *own, int64_t *rows) {
  dc__comm_note_handshakes(&self->head, 1);
  DC__TRY(dc__comm_all_gather_int64(self->bootstrap, &coll->tag, own, 2 * (int64_t)self->head.world, rows));
  const dc_status status = dc__coll_compare_counts(coll, self->head.world, rows);
  if (status != DC_OK) {
    self->bootstrap->ops->fail_group(self->bootstrap, status);
  }
  return dc__comm_check(self->bootstrap);
}

static dc_status compare_counts(dc__nccl *self, const dc__coll *coll) {
  const size_t row = 2 * (size_t)self->head.world;
  int64_t *own = dc__calloc(row * ((size_t)self->head.world + 1), sizeof *own);
  if (own == NULL) {
    return DC_E_NO_MEMORY;
  }
  dc__coll_list_counts(coll, self->head.world, own);
  const dc_status status = gather_and_compare(self, coll, own, own + row);
  dc__free(own);
  return status;
}

static dc_status send_and_receive(dc__nccl *self, void *native, const dc__coll_item *item, int32_t peer) {
  const dc__range to = item->ranges[peer], from = item->ranges[self->head.world + peer];
  const size_t size = dc_dtype_size(item->dtype);
  if (to.count > 0) {
    const void *data = dc__bytes_at(item->send, to.begin, item->dtype);
    DC__TRY(dc__nccl_check_result(
        self, "ncclSend",
        self->library.ncclSend(data, (size_t)to.count * size, DC__NCCL_INT8, peer, self->handle, native)));
  }
  if (from.count > 0) {
    char *data = (char *)item->recv + (size_t)from.begin * size;
    DC__TRY(dc__nccl_check_result(
        self, "ncclRecv",
        self->library.ncclRecv(data, (size_t)from.count * size, DC__NCCL_INT8, peer, self->handle, native)));
  }
  return DC_OK;
}

dc_status dc__nccl_send_parts(dc__nccl *self, void *native, const dc__coll_item *item) {
  for (int32_t i = 1; i < self->head.world; i++) { /* starts at the next rank, so that traffic spreads */
    DC__TRY(send_and_receive(self, native, item, (self->head.rank + i) % self->head.world));
  }
  return DC_OK;
}

static size_t bytes_of(const dc__coll_item *item, const dc__range *ranges, int32_t world) {
  return (size_t)(ranges[world - 1].begin + ranges[world - 1].count) * dc_dtype_size(item->dtype);
}

/* NCCL requires registered memory on both sides of a part or on neither, and a rank knows only its own side. So no side
 * passes registered memory. */
static dc_status exchange(dc__nccl *self, const dc__coll *coll, const char *name) {
  const dc__coll_item *item = &coll->items[0];
  const int32_t world = self->head.world;
  dc__coll moved = *coll;
  const size_t sent = bytes_of(item, item->ranges, world), received = bytes_of(item, item->ranges + world, world);
  const bool copies_send = sent > 0 && dc__nccl_is_registered(self, item->send);
  const bool copies_recv = received > 0 && dc__nccl_is_registered(self, item->recv);
  if (copies_send || copies_recv) {
    DC__TRY(dc__nccl_reserve_staging(self, (copies_send ? sent : 0) + (copies_recv ? received : 0)));
    moved.items[0].send = copies_send ? self->staging->ptr : item->send;
    moved.items[0].recv = copies_recv ? self->staging->ptr + (copies_send ? sent : 0) : item->recv;
  }
  if (copies_send) {
    dc__internal_copy(coll->stream, self->staging->ptr, item->send, sent);
  }
  DC__TRY(dc__nccl_submit(self, &moved, name));
  if (copies_recv) {
    dc__internal_copy(coll->stream, item->recv, moved.items[0].recv, received);
  }
  return DC_OK;
}

dc_status dc__nccl_all_to_all(dc__nccl *self, const dc__coll *coll, const char *name) {
  const dc__coll_item *item = &coll->items[0];
  const int32_t world = self->head.world, rank = self->head.rank;
  const size_t size = dc_dtype_size(item->dtype);
  const dc__range own = item->ranges[rank], place = item->ranges[world + rank];
  if (world > 1) {
    DC__TRY(compare_counts(self, coll));
    DC__TRY(exchange(self, coll, name));
  }
  if (own.count > 0) { /* after the copy of the received parts */
    dc__internal_copy(coll->stream, (char *)item->recv + (size_t)place.begin * size,
                      dc__bytes_at(item->send, own.begin, item->dtype), (size_t)own.count * size);
  }
  return DC_OK;
}
