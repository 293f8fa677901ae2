/* Chapter 5: collectives on tensors. Checks arguments and turns counts into ranges; src/comm does the rest. */
#include "comm/comm.h"

#include <inttypes.h>

/* ---- checks ---- */

static dc_status check_comm(const char *fn, dc_comm *comm, dc_stream *stream) {
  DC__TRY(dc__handle_check(fn, "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__owner_check(fn, "communicator", &comm->owner));
  DC__TRY(dc__handle_check_optional(fn, "stream", stream, DC__HANDLE_STREAM));
  if (stream != NULL) {
    DC__TRY(dc__owner_check(fn, "stream", &stream->device->owner));
    DC__TRY(dc__comm_check_device(fn, comm, stream->device));
    DC__TRY(comm->device == NULL ? DC_OK : dc__stream_check_device(fn, stream, "communicator", comm->device));
  }
  if (!comm->stream_ordered && dc__stream_captures(stream)) {
    return dc__fail(DC_E_UNSUPPORTED,
                    "%s: the stream is captured into a CUDA graph, which cannot hold a collective of this communicator "
                    "(%s)",
                    fn, comm->ops->name);
  }
  return dc__comm_check(comm);
}

static dc_status check_no_group(const char *fn, dc_comm *comm) {
  return dc__comm_group_is_open(comm)
             ? dc__fail(DC_E_STATE, "%s: a group is open, which takes all-gathers and reduce-scatters only", fn)
             : DC_OK;
}

static dc_status read_coll_tensor(const char *fn, const char *argument, const dc_tensor *src, dc_tensor *dst,
                                  int64_t *numel) {
  DC__TRY(dc__tensor_read(fn, argument, src, false, dst, numel));
  if (!dc__dtype_is_castable(dst->dtype)) {
    return dc__fail(DC_E_DTYPE,
                    "%s: %s is %s; collectives take float32, float64, float16, bfloat16, int8, int32 and int64", fn,
                    argument, dc_dtype_name(dst->dtype));
  }
  return DC_OK;
}

/* Sets the ranks' ranges, one after another. If counts is NULL, each has `each` elements. */
static dc_status ranges_of_counts(const char *fn, const char *argument, const dc_comm *comm, const int64_t *counts,
                                  int64_t each, dc__range *ranges, int64_t *total) {
  *total = 0;
  for (int32_t r = 0; r < comm->world; r++) {
    int64_t count = counts != NULL ? counts[r] : each;
    ranges[r] = (dc__range){*total, count};
    if (count < 0 || __builtin_add_overflow(*total, count, total)) {
      return dc__fail(DC_E_INVALID, "%s: %s[%" PRId32 "] = %" PRId64 ", must be >= 0 and the sum an int64", fn,
                      argument, r, count);
    }
  }
  return DC_OK;
}

static dc_status check_numel(const char *fn, const char *argument, int64_t numel, const char *what, int64_t expected) {
  return numel == expected ? DC_OK
                           : dc__fail(DC_E_SHAPE, "%s: %s has %" PRId64 " element%s, must have %s = %" PRId64, fn,
                                      argument, numel, DC__PLURAL_S(numel), what, expected);
}

typedef struct send_recv_pair {
  dc_tensor send;
  dc_tensor recv;
  int64_t send_count;
  int64_t recv_count;
} send_recv_pair;

static dc_status read_send_recv(const char *fn, const dc_tensor *send, const dc_tensor *recv, send_recv_pair *p) {
  DC__TRY(read_coll_tensor(fn, "send", send, &p->send, &p->send_count));
  DC__TRY(read_coll_tensor(fn, "recv", recv, &p->recv, &p->recv_count));
  return p->send.dtype == p->recv.dtype ? DC_OK
                                        : dc__fail(DC_E_DTYPE, "%s: send is %s, but recv is %s", fn,
                                                   dc_dtype_name(p->send.dtype), dc_dtype_name(p->recv.dtype));
}

static dc_status check_reduce_op(const char *fn, int32_t op, int32_t dtype) {
  if (op != DC_SUM && op != DC_MEAN) {
    return dc__fail(DC_E_INVALID, "%s: op = %" PRId32 ", must be DC_SUM (1) or DC_MEAN (2)", fn, op);
  }
  if (op == DC_MEAN && !dc__dtype_is_float(dtype)) {
    return dc__fail(DC_E_DTYPE, "%s: %s takes DC_SUM only", fn, dc_dtype_name(dtype));
  }
  return DC_OK;
}

/* On a device, sums are computed by kernels, which need aligned elements. */
static dc_status check_summable(const char *fn, const char *argument, const dc_tensor *t, int64_t count,
                                const dc_stream *stream) {
  return stream == NULL
             ? DC_OK
             : dc__device_check_alignment(fn, argument, stream->device, t->data, count, dc_dtype_size(t->dtype));
}

static bool tensors_overlap(const void *a, int64_t a_count, const void *b, int64_t b_count, int32_t dtype) {
  const size_t size = dc_dtype_size(dtype);
  return dc__ranges_overlap(a, (size_t)a_count * size, b, (size_t)b_count * size);
}

/* ---- all-gather and reduce-scatter ---- */

dc_status dc_comm_all_gather(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts,
                             dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_all_gather";
  DC__TRY(check_comm(fn, comm, stream));
  send_recv_pair p;
  dc__range ranges[DC__COMM_MAX_WORLD];
  int64_t total;
  DC__TRY(read_send_recv(fn, send, recv, &p));
  DC__TRY(ranges_of_counts(fn, "counts", comm, counts, p.send_count, ranges, &total));
  DC__TRY(check_numel(fn, "send", p.send_count, "counts[rank]", ranges[comm->rank].count));
  DC__TRY(check_numel(fn, "recv", p.recv_count, "the sum of counts", total));
  const char *own_part = p.recv.data; /* NULL if nothing is gathered */
  if (p.recv_count != 0) {
    own_part += (size_t)ranges[comm->rank].begin * dc_dtype_size(p.recv.dtype);
  }
  if (p.send.data != own_part && tensors_overlap(p.send.data, p.send_count, p.recv.data, p.recv_count, p.recv.dtype)) {
    return dc__fail(DC_E_INVALID, "%s: send overlaps recv, but is not this rank's place in it", fn);
  }
  const dc__coll_item item = {
      .send = p.send.data, .recv = p.recv.data, .ranges = ranges, .total = total, .id = -1, .dtype = p.recv.dtype};
  return dc__comm_submit(comm, stream, DC__COLL_GATHER, &item);
}

dc_status dc_comm_reduce_scatter(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts,
                                 int32_t op, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_reduce_scatter";
  DC__TRY(check_comm(fn, comm, stream));
  send_recv_pair p;
  dc__range ranges[DC__COMM_MAX_WORLD];
  int64_t total;
  DC__TRY(read_send_recv(fn, send, recv, &p));
  DC__TRY(check_reduce_op(fn, op, p.send.dtype));
  DC__TRY(check_summable(fn, "send", &p.send, p.send_count, stream));
  DC__TRY(check_summable(fn, "recv", &p.recv, p.recv_count, stream));
  DC__TRY(ranges_of_counts(fn, "counts", comm, counts, p.recv_count, ranges, &total));
  DC__TRY(check_numel(fn, "recv", p.recv_count, "counts[rank]", ranges[comm->rank].count));
  DC__TRY(check_numel(fn, "send", p.send_count, "the sum of counts", total));
  if (tensors_overlap(p.send.data, p.send_count, p.recv.data, p.recv_count, p.recv.dtype)) {
    return dc__fail(DC_E_INVALID, "%s: send and recv overlap", fn);
  }
  const dc__coll_item item = {.send = p.send.data,
                              .recv = p.recv.data,
                              .ranges = ranges,
                              .total = total,
                              .id = -1,
                              .dtype = p.send.dtype,
                              .recv_dtype = p.recv.dtype,
                              .reduce_op = op};
  return dc__comm_submit(comm, stream, DC__COLL_REDUCE, &item);
}

/* ---- all-to-all, gather, scatter ---- */

/* Sets the parts of send or recv. If counts is NULL, all have the same number of elements. */
static dc_status read_parts(const char *fn, const char *tensor, int64_t numel, const char *argument,
                            const dc_comm *comm, const int64_t *counts, dc__range *ranges) {
  int64_t total;
  if (counts == NULL && numel % comm->world != 0) {
    return dc__fail(DC_E_SHAPE,
                    "%s: %s has %" PRId64 " element%s, must be a multiple of the %" PRId32 " ranks where %s is NULL",
                    fn, tensor, numel, DC__PLURAL_S(numel), comm->world, argument);
  }
  DC__TRY(ranges_of_counts(fn, argument, comm, counts, numel / comm->world, ranges, &total));
  return check_numel(fn, tensor, numel, "the sum of its counts", total);
}

/* Sets the parts of a tensor that goes to, or comes from, one rank only. */
static void place_one_part(const dc_comm *comm, int32_t rank, int64_t count, dc__range *ranges) {
  for (int32_t r = 0; r < comm->world; r++) {
    ranges[r] = (dc__range){r > rank ? count : 0, r == rank ? count : 0};
  }
}

static dc_status check_root(const char *fn, const dc_comm *comm, int32_t root) {
  return root >= 0 && root < comm->world
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: root = %" PRId32 ", must be 0 to %" PRId32, fn, root, comm->world - 1);
}

/* On the root, reads the tensor that only the root uses. Other ranks ignore the argument and use an empty tensor. */
static dc_status read_root_tensor(const char *fn, const char *argument, const dc_tensor *tensor, bool is_root,
                                  const dc_tensor *other, dc_tensor *out, int64_t *count) {
  *out = (dc_tensor){.dtype = other->dtype};
  *count = 0;
  DC__TRY(is_root ? read_coll_tensor(fn, argument, tensor, out, count) : DC_OK);
  return out->dtype == other->dtype ? DC_OK
                                    : dc__fail(DC_E_DTYPE, "%s: %s is %s, must be %s as this rank's part", fn, argument,
                                               dc_dtype_name(out->dtype), dc_dtype_name(other->dtype));
}

static dc_status submit_parts(const char *fn, dc_comm *comm, dc_stream *stream, int32_t op, int32_t root,
                              const send_recv_pair *p, const dc__range *ranges) {
  if (tensors_overlap(p->send.data, p->send_count, p->recv.data, p->recv_count, p->send.dtype)) {
    return dc__fail(DC_E_INVALID, "%s: send and recv overlap", fn);
  }
  DC__TRY(check_no_group(fn, comm));
  const dc__coll_item item = {.send = p->send.data,
                              .recv = p->recv.data,
                              .ranges = ranges,
                              .total = p->send_count,
                              .id = -1,
                              .dtype = p->send.dtype};
  return dc__comm_all_to_all(comm, stream, op, root, &item);
}

dc_status dc_comm_all_to_all(dc_comm *comm, const dc_tensor *send, const int64_t *send_counts, dc_tensor *recv,
                             const int64_t *recv_counts, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_all_to_all";
  DC__TRY(check_comm(fn, comm, stream));
  send_recv_pair p;
  dc__range ranges[2 * DC__COMM_MAX_WORLD];
  DC__TRY(read_send_recv(fn, send, recv, &p));
  DC__TRY(read_parts(fn, "send", p.send_count, "send_counts", comm, send_counts, ranges));
  DC__TRY(read_parts(fn, "recv", p.recv_count, "recv_counts", comm, recv_counts, ranges + comm->world));
  return submit_parts(fn, comm, stream, DC_OP_COMM_ALL_TO_ALL, 0, &p, ranges);
}

dc_status dc_comm_gather(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts, int32_t root,
                         dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_gather";
  DC__TRY(check_comm(fn, comm, stream));
  send_recv_pair p;
  dc__range ranges[2 * DC__COMM_MAX_WORLD];
  DC__TRY(check_root(fn, comm, root));
  const bool is_root = comm->rank == root;
  DC__TRY(read_coll_tensor(fn, "send", send, &p.send, &p.send_count));
  DC__TRY(read_root_tensor(fn, "recv", recv, is_root, &p.send, &p.recv, &p.recv_count));
  place_one_part(comm, root, p.send_count, ranges);
  DC__TRY(read_parts(fn, "recv", p.recv_count, "counts", comm, is_root ? counts : NULL, ranges + comm->world));
  return submit_parts(fn, comm, stream, DC_OP_COMM_GATHER, root, &p, ranges);
}

dc_status dc_comm_scatter(dc_comm *comm, const dc_tensor *send, const int64_t *counts, dc_tensor *recv, int32_t root,
                          dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_scatter";
  DC__TRY(check_comm(fn, comm, stream));
  send_recv_pair p;
  dc__range ranges[2 * DC__COMM_MAX_WORLD];
  DC__TRY(check_root(fn, comm, root));
  const bool is_root = comm->rank == root;
  DC__TRY(read_coll_tensor(fn, "recv", recv, &p.recv, &p.recv_count));
  DC__TRY(read_root_tensor(fn, "send", send, is_root, &p.recv, &p.send, &p.send_count));
  DC__TRY(read_parts(fn, "send", p.send_count, "counts", comm, is_root ? counts : NULL, ranges));
  place_one_part(comm, root, p.recv_count, ranges + comm->world);
  return submit_parts(fn, comm, stream, DC_OP_COMM_SCATTER, root, &p, ranges);
}

/* ---- all-reduce, broadcast, barrier ---- */

dc_status dc_comm_all_reduce(dc_comm *comm, dc_tensor *data, int32_t op, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_all_reduce";
  DC__TRY(check_comm(fn, comm, stream));
  dc_tensor tensor;
  int64_t count;
  DC__TRY(read_coll_tensor(fn, "data", data, &tensor, &count));
  DC__TRY(check_reduce_op(fn, op, tensor.dtype));
  DC__TRY(check_summable(fn, "data", &tensor, count, stream));
  DC__TRY(check_no_group(fn, comm));
  dc__comm_all_reduce(comm, stream, tensor.data, count, tensor.dtype, op);
  return stream == NULL ? dc__comm_check(comm) : DC_OK;
}

dc_status dc_comm_broadcast(dc_comm *comm, dc_tensor *data, int32_t root, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_broadcast";
  DC__TRY(check_comm(fn, comm, stream));
  dc_tensor tensor;
  int64_t count;
  DC__TRY(read_coll_tensor(fn, "data", data, &tensor, &count));
  DC__TRY(check_root(fn, comm, root));
  DC__TRY(check_no_group(fn, comm));
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_BROADCAST};
  dc__comm_broadcast(comm, stream, &tag, tensor.data, (size_t)count * dc_dtype_size(tensor.dtype), root);
  return stream == NULL ? dc__comm_check(comm) : DC_OK;
}

dc_status dc_comm_barrier(dc_comm *comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_barrier";
  DC__TRY(check_comm(fn, comm, NULL));
  DC__TRY(check_no_group(fn, comm));
  const dc__tag tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_BARRIER};
  comm->ops->barrier(comm, &tag);
  return dc__comm_check(comm);
}

/* ---- groups ---- */

dc_status dc_comm_group_begin(dc_comm *comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_group_begin";
  DC__TRY(check_comm(fn, comm, NULL));
  return dc__comm_group_begin(fn, comm);
}

dc_status dc_comm_group_end(dc_comm *comm, dc_stream *stream) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_group_end";
  DC__TRY(dc__handle_check(fn, "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__owner_check(fn, "communicator", &comm->owner));
  const dc_status status = dc__handle_check_optional(fn, "stream", stream, DC__HANDLE_STREAM);
  if (status != DC_OK) {
    dc__comm_group_drop(comm); /* any error closes the group */
    return status;
  }
  return dc__comm_group_end(fn, comm, stream);
}
