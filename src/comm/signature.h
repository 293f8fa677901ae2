/* The description of a collective that each rank publishes before it starts, for comparison. Plain data: it lies in
 * shared memory, or goes over a wire between machines of one byte order. */
#ifndef DC_COMM_SIGNATURE_H
#define DC_COMM_SIGNATURE_H

#include "comm/host_transport.h"
#include "comm/rank_set.h"

/* The communicator and the position of a call. Calls that are equal otherwise may belong to other copies, or be earlier
 * or later ones. */
typedef struct dc__call_order {
  uint64_t origin; /* dc_comm.origin */
  uint64_t number; /* dc__comm_number() */
} dc__call_order;

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
  dc__call_order order;
  int32_t op;
  int32_t kind;
  int32_t count;
  int32_t root;
  int32_t memory_space; /* dc_device.memory_space of the data */
  int32_t captured;
  int32_t missing_recv; /* 1 + the index from dc__coll_missing_recv() */
  dc__signature_item items[DC__COMM_GROUP];
} dc__signature;

/* Fills in the signature of a collective on `comm`. Items may have no ranges. */
void dc__signature_fill(dc__signature *call, const dc_comm *comm, const dc__coll *coll, uint64_t word);
uint64_t dc__digest_add(uint64_t digest, uint64_t value);
/* A hash of what dc__signature_compare() compares for equality. */
uint64_t dc__signature_digest(const dc__signature *call);
/* The first item of a reduction whose result has a part for this rank, but no recv buffer; -1: none. */
int32_t dc__coll_missing_recv(const dc__coll *coll, int32_t rank);
/* DC_E_STATE on all ranks: `rank` has no buffer for its part of a parameter's gradient. */
dc_status dc__coll_fail_missing_recv(int64_t id, int32_t rank);
/* DC_E_MISMATCH on all ranks: the two sets wait for each other in different calls. */
dc_status dc__signature_fail_deadlock(int32_t world, const dc__rank_set *some, const char *call,
                                      const dc__rank_set *others, const char *other_call);
/* DC_E_MISMATCH if they differ. `call` names it in the error text; `low` is the lower rank. */
dc_status dc__call_order_compare(const char *call, int32_t low, dc__call_order low_order, int32_t high,
                                 dc__call_order high_order);
/* Compares the ranks' calls, one per rank; `rank` is this one. */
dc_status dc__signature_compare(int32_t rank, int32_t world, const dc__signature *const *calls);

#endif
