/* Collectives of a single rank on a device's stream: copies and reductions queued on the stream, without a
 * handshake. */
#include "comm/host_transport.h"
#include "comm/shm/shm.h"
#include "comm/windows.h"
#include "kernels/kernels.h"

static bool is_single_rank(const dc_comm *comm, const dc_stream *stream) {
  return comm->single_rank && stream != NULL && stream->device->memory_space != 0;
}

void dc__shm_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                        int32_t count) {
  if (!is_single_rank(comm, stream)) {
    dc__host_all_gather(comm, stream, tag, items, count);
    return;
  }
  dc__op_timing_begin_on(tag->span, stream);
  for (int32_t i = 0; i < count && dc__comm_check(comm) == DC_OK; i++) {
    if (items[i].send != items[i].recv) {
      dc__stream_copy(stream, items[i].recv, items[i].send, (size_t)items[i].total * dc_dtype_size(items[i].dtype));
    }
  }
  dc__op_timing_end_on(tag->span, stream);
}

void dc__shm_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                            int32_t count) {
  if (!is_single_rank(comm, stream)) {
    dc__host_reduce_scatter(comm, stream, tag, items, count);
    return;
  }
  dc__op_timing_begin_on(tag->span, stream);
  for (int32_t i = 0; i < count && dc__comm_check(comm) == DC_OK; i++) {
    const dc__coll_item *item = &items[i];
    const dc__reduction sum = dc__item_reduction(item, item->recv, &item->send, 1, item->total);
    dc__internal_reduce(stream, &sum);
  }
  dc__op_timing_end_on(tag->span, stream);
}

void dc__shm_all_to_all(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *item, int32_t root) {
  if (is_single_rank(comm, stream)) { /* the rank's own part is everything */
    dc__shm_all_gather(comm, stream, tag, item, 1);
  } else {
    dc__host_all_to_all(comm, stream, tag, item, root);
  }
}
