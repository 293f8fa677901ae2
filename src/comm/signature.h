/* What a rank says of a collective before it, so that the ranks can compare: plain data, which may lie in shared memory
 * or go over a wire between machines of one byte order. */
#ifndef DC_COMM_SIGNATURE_H
#define DC_COMM_SIGNATURE_H

#include "comm/host_transport.h"
#include "comm/rank_set.h"

typedef struct dc__signature_item {
  int64_t total;
  int64_t id;
  uint64_t ranges; /* hash */
  int32_t dtype;
  int32_t reduce_op;
} dc__signature_item;

typedef struct dc__signature {
  int64_t graph_id;
  int64_t id;
  uint64_t word; /* of agree(); may differ */
  int32_t op;
  int32_t kind;
  int32_t count;
  int32_t root;
  int32_t memory_space; /* dc_device.memory_space of the data */
  int32_t captured;
  int32_t missing_recv; /* 1 + the first item of whose result this rank has no place for its part; 0: there is none */
  dc__signature_item items[DC__COMM_GROUP];
} dc__signature;

/* Items without ranges count as one range. */
void dc__signature_fill(dc__signature *call, const dc__coll *coll, int32_t rank, int32_t world, uint64_t word);
/* The first item of a reduction of whose result this rank owns a part without a place for it; -1: none. */
int32_t dc__coll_missing_recv(const dc__coll *coll, int32_t rank);
/* DC_E_STATE on all ranks: `rank` has no place for its part of a parameter's gradient. */
dc_status dc__coll_fail_missing_recv(int64_t id, int32_t rank);
/* DC_E_MISMATCH on all ranks: some wait in one call and others in another one. */
dc_status dc__signature_fail_deadlock(int32_t world, const dc__rank_set *some, const char *call,
                                      const dc__rank_set *others, const char *other_call);
/* Whether all ranks called the same: calls is one a rank, `rank` is this one's. */
dc_status dc__signature_compare(int32_t rank, int32_t world, const dc__signature *const *calls);

#endif
