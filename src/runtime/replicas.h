/* Hybrid sharding: a context whose ranks form several groups. */
#ifndef DC_RUNTIME_REPLICAS_H
#define DC_RUNTIME_REPLICAS_H

#include "runtime/runtime.h"

/* Call after streams and communicators are released. Does nothing without replicas. */
void dc__replicas_free(dc_context *ctx);
/* Splits reduce_comm into gather_comm and replica_comm. */
dc_status dc__replicas_connect(dc_context *ctx, const char *fn);
/* Call when no collective runs, before the communicators are released. Does nothing without replicas. */
void dc__replicas_disconnect(dc_context *ctx);
/* Lets gather_comm and replica_comm verify what they move if reduce_comm does, before they move something. Does nothing
 * without replicas. */
void dc__replicas_share_checksums(dc_context *ctx);
/* Returns the first failure of the three communicators, and aborts the others with it. */
dc_status dc__replicas_check(dc_context *ctx);
/* Reduces a bucket's items, which it changes. Without memory it aborts the group. */
void dc__replicas_reduce(dc_context *ctx, dc_stream *stream, const dc__tag *tag, dc__buckets *buckets);
/* Bytes that this rank receives in a gradient's reduction and the gather that follows. */
int64_t dc__replicas_wire_bytes(const dc_context *ctx, int32_t stage, const dc__param *param, int32_t dtype);

#endif
