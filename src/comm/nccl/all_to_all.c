/* An all-to-all: the ranks compare the sizes of the parts over the bootstrap communicator, and then NCCL sends and
 * receives them as one group. */
#include "comm/nccl/nccl.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

/* Gathers each rank's sizes over the bootstrap communicator, behind the handshake. */
static dc_status gather_counts(dc__nccl *self, const dc__coll *coll, const int64_t *own, int64_t *all) {
  const int32_t world = self->head.world;
  dc__range rows[DC__NCCL_MAX_WORLD];
  for (int32_t r = 0; r < world; r++) {
    rows[r] = (dc__range){2 * (int64_t)world * r, 2 * (int64_t)world};
  }
  if (self->head.usage != NULL) { /* so that later requests have the numbers of their handshakes */
    atomic_fetch_add_explicit(&self->head.usage->requested, 1, memory_order_release);
  }
  const dc__coll counts = {.comm = self->bootstrap,
                           .tag = coll->tag,
                           .kind = DC__COLL_GATHER,
                           .count = 1,
                           .captured = coll->captured,
                           .items = {{.send = own,
                                      .recv = all,
                                      .ranges = rows,
                                      .total = 2 * (int64_t)world * world,
                                      .id = -1,
                                      .dtype = DC_INT64}}};
  self->bootstrap->ops->run(self->bootstrap, &counts);
  return dc__comm_check(self->bootstrap);
}

/* All ranks find the same difference, and the group fails with it rather than with an abort. */
static dc_status find_other_count(dc__nccl *self, const dc__coll *coll, const int64_t *all) {
  const int32_t world = self->head.world;
  for (int32_t i = 0; i < world * world; i++) {
    const int32_t from = i / world, to = i % world;
    const int64_t sent = all[from * 2 * (int64_t)world + to], expected = all[(to * 2 + 1) * (int64_t)world + from];
    if (sent != expected) {
      self->bootstrap->ops->fail_group(self->bootstrap, dc__coll_fail_counts(coll, from, sent, to, expected));
      return dc__comm_check(self->bootstrap);
    }
  }
  return DC_OK;
}

static dc_status compare_counts(dc__nccl *self, const dc__coll *coll) {
  const int32_t world = self->head.world;
  int64_t *own = dc__calloc(2 * (size_t)world * ((size_t)world + 1), sizeof *own);
  if (own == NULL) {
    return DC_E_NO_MEMORY;
  }
  for (int32_t i = 0; i < 2 * world; i++) {
    own[i] = coll->items[0].ranges[i].count;
  }
  dc_status status = gather_counts(self, coll, own, own + 2 * world);
  status = status == DC_OK ? find_other_count(self, coll, own + 2 * world) : status;
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

/* As one NCCL group, which is ended even if a call fails. */
static dc_status enqueue_exchange(dc__nccl *self, void *native, void *args) {
  const dc__coll_item *item = args;
  DC__TRY(dc__nccl_check_alive(self));
  DC__TRY(dc__nccl_check_result(self, "ncclGroupStart", self->library.ncclGroupStart()));
  dc_status status = DC_OK;
  for (int32_t i = 1; i < self->head.world && status == DC_OK; i++) { /* starts at its neighbour */
    status = send_and_receive(self, native, item, (self->head.rank + i) % self->head.world);
  }
  dc__nccl_result ended = self->library.ncclGroupEnd();
  return status != DC_OK ? status : dc__nccl_check_result(self, "ncclGroupEnd", ended);
}

static size_t bytes_of(const dc__coll_item *item, const dc__range *ranges, int32_t world) {
  return (size_t)(ranges[world - 1].begin + ranges[world - 1].count) * dc_dtype_size(item->dtype);
}

/* NCCL requires registered memory on both sides of a part or on neither, and a rank knows its own alone. So no side
 * gives it registered memory. */
static dc_status exchange(dc__nccl *self, const dc__coll *coll, const char *name) {
  const dc__coll_item *item = &coll->items[0];
  const int32_t world = self->head.world;
  const size_t sent = bytes_of(item, item->ranges, world), received = bytes_of(item, item->ranges + world, world);
  const bool copies_send = sent > 0 && dc__nccl_is_registered(self, item->send);
  const bool copies_recv = received > 0 && dc__nccl_is_registered(self, item->recv);
  dc__coll_item moved = *item;
  if (copies_send || copies_recv) {
    DC__TRY(dc__nccl_reserve_staging(self, (copies_send ? sent : 0) + (copies_recv ? received : 0)));
    moved.send = copies_send ? self->staging->ptr : item->send;
    moved.recv = copies_recv ? self->staging->ptr + (copies_send ? sent : 0) : item->recv;
  }
  if (copies_send) {
    dc__internal_copy(coll->stream, self->staging->ptr, item->send, sent);
  }
  DC__TRY(dc__nccl_call_and_wait(self, coll->stream, enqueue_exchange, &moved, "ncclGroupEnd", name));
  if (copies_recv) {
    dc__internal_copy(coll->stream, item->recv, moved.recv, received);
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
  if (own.count > 0) { /* behind the copy of what came */
    dc__internal_copy(coll->stream, (char *)item->recv + (size_t)place.begin * size,
                      dc__bytes_at(item->send, own.begin, item->dtype), (size_t)own.count * size);
  }
  return DC_OK;
}
