/* For transports whose collectives are done by a host thread: one blocking run(), queued as a stream's task. Of those
 * that issue (comm.h) it lets the ranks meet and queues the rest on the stream, in its place there, and does not wait
 * for the device. */
#ifndef DC_COMM_HOST_TRANSPORT_H
#define DC_COMM_HOST_TRANSPORT_H

#include "comm/comm.h"

/* One group of items. A broadcast is one item of bytes: recv is the data on every rank, send too on the root. */
struct dc__coll {
  dc_comm *comm;
  dc_device *device; /* of the stream it was queued on; NULL: the data is the host's */
  dc_stream *stream; /* on which run() is to issue it; NULL: run() does it */
  dc__tag tag;
  int32_t kind;
  int32_t count;
  int32_t root;     /* broadcast */
  int32_t captured; /* 1: what run() issues becomes part of a graph, on every rank */
  dc__coll_item items[DC__COMM_GROUP];
};

/* The table's functions; they call comm->ops->run, unless the communicator has failed. */
void dc__host_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int32_t count);
void dc__host_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                             int32_t count);
void dc__host_broadcast(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root);
void dc__host_barrier(dc_comm *comm, const dc__tag *tag);

enum { DC__HOST_FUNC_BYTES = 64 };
/* Whether run() issues collectives to the stream. */
bool dc__host_is_stream_ordered(const dc_comm *comm, const dc_stream *stream);
/* fn(args), at most DC__HOST_FUNC_BYTES, which touches no device, behind the collectives that were queued on the
 * stream: they have run(). */
void dc__host_launch_func(dc_comm *comm, dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);

/* What the ranks compare. */
uint64_t dc__coll_ranges_hash(const dc__coll_item *item, int32_t world);

/* How a call is named in error texts: "reduce_grad of parameter 3 (12 elements, float32)". */
typedef struct dc__coll_name {
  int64_t graph_id; /* DC__COLL_NO_GRAPH: leave it out */
  int64_t id;
  int64_t total;
  int32_t op;
  int32_t kind;
  int32_t count; /* items in the group */
  int32_t dtype;
  int32_t reduce_op;
  int32_t root;
} dc__coll_name;

enum { DC__COLL_NO_GRAPH = -1, DC__COLL_TEXT = 160 };

void dc__coll_describe(char text[DC__COLL_TEXT], const dc__coll_name *name);
/* "reduce_grad of parameter 3", for waits. */
void dc__coll_describe_op(char text[DC__COLL_TEXT], int32_t op, int64_t id);
/* Of two ranks, one of which captures: DC_E_MISMATCH. */
dc_status dc__coll_fail_capture_mismatch(int32_t captures, const dc__tag *captured, int32_t other,
                                         const dc__tag *plain);

#endif
