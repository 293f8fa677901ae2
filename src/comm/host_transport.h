/* For transports whose collectives run on a host thread, as one blocking run() that is queued as a stream task. In a
 * stream-ordered transport (dc_comm.stream_ordered) run() does the handshake, issues the rest to the stream and does
 * not wait for the device. */
#ifndef DC_COMM_HOST_TRANSPORT_H
#define DC_COMM_HOST_TRANSPORT_H

#include "comm/comm.h"

/* One group of items. A broadcast is one item of bytes, with the data in recv and, on the root, in send too. */
struct dc__coll {
  dc_comm *comm;
  dc_device *device; /* the device of the stream it was queued on; NULL if the data is on the host */
  dc_stream *stream; /* the stream that run() issues it to; NULL if run() moves the data itself */
  dc__tag tag;
  int32_t kind;
  int32_t count;
  int32_t root;     /* of a broadcast, or of an all-to-all that is a gather or scatter */
  int32_t first;    /* the number that rank 0 has in the caller's communicator, for error texts */
  int32_t captured; /* 1 if the issued work becomes part of a graph, on every rank */
  dc__coll_item items[DC__COMM_GROUP];
};

/* Functions for the table. They queue comm->ops->run, which a failed communicator skips. */
void dc__host_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int32_t count);
void dc__host_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                             int32_t count);
void dc__host_broadcast(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root);
void dc__host_all_to_all(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *item, int32_t root);
void dc__host_barrier(dc_comm *comm, const dc__tag *tag);

enum { DC__HOST_FUNC_BYTES = 64 };
/* Whether run() issues collectives to the stream. */
bool dc__host_is_stream_ordered(const dc_comm *comm, const dc_stream *stream);
/* Calls fn(args) once run() of all collectives queued on the stream has returned. args has at most DC__HOST_FUNC_BYTES;
 * fn touches no device. On an error fn is not called. */
dc_status dc__host_launch_func(dc_comm *comm, dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);

/* Part of the signature that ranks compare. */
uint64_t dc__coll_ranges_hash(const dc__coll_item *item, int32_t world);

/* How a call is named in error texts: "reduce_grad of parameter 3 (12 elements, float32)". */
typedef struct dc__coll_name {
  int64_t graph_id; /* DC__COLL_NO_GRAPH to leave it out */
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
/* "reduce_grad of parameter 3", without sizes. */
void dc__coll_describe_op(char text[DC__COLL_TEXT], int32_t op, int64_t id);
/* DC_E_MISMATCH: in an all-to-all, a rank sends a number of elements that the receiver does not expect. */
dc_status dc__coll_fail_counts(const dc__coll *coll, int32_t from, int64_t sent, int32_t to, int64_t expected);
/* For transports that tell every rank all sizes of an all-to-all. Each rank has a row of 2 * world counts: the elements
 * that it sends to each rank, then those that it expects from each. All ranks find the same difference. */
void dc__coll_list_counts(const dc__coll *coll, int32_t world, int64_t *row);
dc_status dc__coll_compare_counts(const dc__coll *coll, int32_t world, const int64_t *rows);
/* DC_E_MISMATCH: only one of two ranks captures a graph. */
dc_status dc__coll_fail_capture_mismatch(int32_t captures, const dc__tag *captured, int32_t other,
                                         const dc__tag *plain);

#endif
