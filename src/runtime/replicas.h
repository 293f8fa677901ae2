/* Hybrid sharding: a context whose ranks are several groups. */
#ifndef DC_RUNTIME_REPLICAS_H
#define DC_RUNTIME_REPLICAS_H

#include "runtime/runtime.h"

/* After the streams and the communicators are gone. Does nothing without replicas. */
void dc__replicas_free(dc_context *ctx);
/* Splits reduce_comm into gather_comm and replica_comm. */
dc_status dc__replicas_connect(dc_context *ctx, const char *fn);
/* Once no collective runs, before the communicators are released. Does nothing without replicas. */
void dc__replicas_disconnect(dc_context *ctx);
/* Lets gather_comm and replica_comm verify what they move if reduce_comm does, before they move something. Does nothing
 * without replicas. */
void dc__replicas_share_checksums(dc_context *ctx);
/* The first failure of the three communicators, with which the others end too. */
dc_status dc__replicas_check(dc_context *ctx);
/* Reduces a bucket's items, which it changes. Without memory it aborts the group. */
void dc__replicas_reduce(dc_context *ctx, dc_stream *stream, const dc__tag *tag, dc__buckets *buckets);
/* Bytes that a gradient's reduction, and the gather behind it, bring to this rank. */
int64_t dc__replicas_wire_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype);

#endif
