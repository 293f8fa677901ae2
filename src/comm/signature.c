/* Fills and compares the signatures of collectives. */
#include "comm/signature.h"

#include <inttypes.h>
#include <string.h>

int32_t dc__coll_missing_recv(const dc__coll *coll, int32_t rank) {
  for (int32_t i = 0; coll->kind == DC__COLL_REDUCE && i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    if (item->lacks_recv || (item->recv == NULL && item->ranges[rank].count > 0)) {
      return i;
    }
  }
  return -1;
}

dc_status dc__coll_fail_missing_recv(int64_t id, int32_t rank) {
  return dc__fail(DC_E_STATE,
                  "dc_reduce_grad: the gradient buffer of parameter %" PRId64
                  " was taken away by dc_context_update_param_grad_buffer on rank %" PRId32 "; give it one first",
                  id, rank);
}

void dc__signature_fill(dc__signature *call, const dc_comm *comm, const dc__coll *coll, uint64_t word) {
  call->graph_id = coll->tag.graph_id;
  call->id = coll->tag.id;
  call->word = word;
  call->order = (dc__call_order){.origin = comm->origin, .number = coll->tag.number};
  call->op = coll->tag.op;
  call->kind = coll->kind;
  call->count = coll->count;
  call->root = coll->root;
  call->memory_space = coll->device == NULL ? 0 : coll->device->memory_space;
  call->captured = coll->captured;
  call->missing_recv = 1 + dc__coll_missing_recv(coll, comm->rank);
  const bool shared = coll->kind != DC__COLL_ALL_TO_ALL; /* an all-to-all's sizes differ by rank */
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    call->items[i] = (dc__signature_item){.total = shared ? item->total : 0,
                                          .id = item->id,
                                          .ranges = shared ? dc__coll_ranges_hash(item, comm->world) : 0,
                                          .dtype = item->dtype,
                                          .reduce_op = item->reduce_op};
  }
}

uint64_t dc__digest_add(uint64_t digest, uint64_t value) {
  digest = (digest ^ value) * UINT64_C(0x9e3779b97f4a7c15);
  return digest ^ digest >> 32;
}

uint64_t dc__signature_digest(const dc__signature *call) {
  const uint64_t head[] = {(uint64_t)call->graph_id, (uint64_t)call->id,       (uint64_t)call->op,
                           (uint64_t)call->kind,     (uint64_t)call->root,     (uint64_t)call->count,
                           call->memory_space == 0,  (uint64_t)call->captured, call->order.origin,
                           call->order.number};
  uint64_t digest = 1;
  for (size_t i = 0; i < DC__COUNT(head); i++) {
    digest = dc__digest_add(digest, head[i]);
  }
  for (int32_t i = 0; i < call->count; i++) {
    const dc__signature_item *item = &call->items[i];
    digest = dc__digest_add(digest, (uint64_t)item->total);
    digest = dc__digest_add(digest, (uint64_t)item->id);
    digest = dc__digest_add(digest, item->ranges);
    digest = dc__digest_add(digest, (uint64_t)item->dtype << 32 | (uint32_t)item->reduce_op);
  }
  return digest;
}

static bool is_same_item(const dc__signature_item *a, const dc__signature_item *b) {
  return a->total == b->total && a->id == b->id && a->ranges == b->ranges && a->dtype == b->dtype &&
         a->reduce_op == b->reduce_op;
}

/* The first item in which two calls differ; -1: none. */
static int32_t first_difference(const dc__signature *a, const dc__signature *b) {
  int32_t count = a->count < b->count ? a->count : b->count;
  for (int32_t i = 0; i < count; i++) {
    if (!is_same_item(&a->items[i], &b->items[i])) {
      return i;
    }
  }
  bool same = a->op == b->op && a->graph_id == b->graph_id && a->id == b->id && a->kind == b->kind &&
              a->root == b->root && a->count == b->count && (a->memory_space == 0) == (b->memory_space == 0);
  return same ? -1 : 0;
}

static void describe_signature(char text[DC__COLL_TEXT], const dc__signature *call, int32_t item, bool graph) {
  bool has = item < call->count;
  const dc__coll_name name = {.graph_id = graph ? call->graph_id : DC__COLL_NO_GRAPH,
                              .id = has ? call->items[item].id : call->id,
                              .total = has ? call->items[item].total : 0,
                              .op = call->op,
                              .kind = call->kind,
                              .count = call->count,
                              .dtype = has ? call->items[item].dtype : DC_DTYPE_NONE,
                              .reduce_op = has ? call->items[item].reduce_op : 0,
                              .root = call->root};
  dc__coll_describe(text, &name);
}

static int32_t lowest_rank(const dc__rank_set *set, int32_t world) {
  int32_t r = 0;
  while (r < world && !dc__rank_set_has(set, r)) {
    r++;
  }
  return r;
}

dc_status dc__signature_fail_deadlock(int32_t world, const dc__rank_set *some, const char *call,
                                      const dc__rank_set *others, const char *other_call) {
  bool swapped = lowest_rank(others, world) < lowest_rank(some, world);
  const dc__rank_list low = dc__rank_list_of(swapped ? others : some, world),
                      high = dc__rank_list_of(swapped ? some : others, world);
  return dc__fail(DC_E_MISMATCH,
                  "rank%s %s %s in %s where rank%s %s %s in %s, and they wait for each other; all ranks must make the "
                  "same calls of a context and its communicator in the same order",
                  DC__PLURAL_S(low.count), low.text, low.count == 1 ? "is" : "are", swapped ? other_call : call,
                  DC__PLURAL_S(high.count), high.text, high.count == 1 ? "is" : "are", swapped ? call : other_call);
}

static dc__tag tag_of(const dc__signature *call) {
  return (dc__tag){.graph_id = call->graph_id, .id = call->id, .op = call->op};
}

dc_status dc__call_order_compare(const char *call, int32_t low, dc__call_order low_order, int32_t high,
                                 dc__call_order high_order) {
  if (low_order.origin != high_order.origin) {
    return dc__fail(DC_E_MISMATCH,
                    "%s: rank %" PRId32 " has another copy of a communicator than rank %" PRId32
                    "; all ranks must make the copies of a group's communicators in the same order, as dc_comm_dup and "
                    "dc_init do",
                    call, high, low);
  }
  if (low_order.number != high_order.number) {
    const bool low_is_later = low_order.number > high_order.number;
    return dc__fail(DC_E_MISMATCH,
                    "%s: rank %" PRId32 " runs a later call of this communicator than rank %" PRId32
                    "; calls on several streams, or on a stream and on none, need an event between them to keep "
                    "their order",
                    call, low_is_later ? low : high, low_is_later ? high : low);
  }
  return DC_OK;
}

static dc_status compare_order(int32_t rank, int32_t other, const dc__signature *const *calls) {
  const int32_t low = other < rank ? other : rank, high = other < rank ? rank : other;
  const dc__call_order a = calls[low]->order, b = calls[high]->order;
  if (a.origin == b.origin && a.number == b.number) {
    return DC_OK; /* without the text, which takes longer than all comparisons */
  }
  char text[DC__COLL_TEXT];
  describe_signature(text, calls[low], 0, false);
  return dc__call_order_compare(text, low, a, high, b);
}

dc_status dc__signature_compare(int32_t rank, int32_t world, const dc__signature *const *calls) {
  const dc__signature *own = calls[rank];
  for (int32_t r = 0; r < world; r++) {
    if (own->captured != calls[r]->captured) {
      int32_t captures = own->captured != 0 ? rank : r;
      int32_t other = own->captured != 0 ? r : rank;
      const dc__tag captured = tag_of(calls[captures]), plain = tag_of(calls[other]);
      return dc__coll_fail_capture_mismatch(captures, &captured, other, &plain);
    }
    int32_t item = first_difference(own, calls[r]);
    if (item >= 0) {
      /* The lower rank is the reference, so that both ranks report the same. */
      int32_t low = r < rank ? r : rank;
      int32_t high = r < rank ? rank : r;
      bool graph = own->graph_id != calls[r]->graph_id;
      char low_text[DC__COLL_TEXT];
      char high_text[DC__COLL_TEXT];
      describe_signature(low_text, calls[low], item, graph);
      describe_signature(high_text, calls[high], item, graph);
      const char *split = strcmp(low_text, high_text) != 0                        ? ""
                          : calls[low]->memory_space == calls[high]->memory_space ? ", split differently over the ranks"
                                                                                  : " with memory of another device";
      return dc__fail(DC_E_MISMATCH, "rank %" PRId32 " called %s where rank %" PRId32 " called %s%s", high, high_text,
                      low, low_text, split);
    }
    DC__TRY(compare_order(rank, r, calls));
  }
  for (int32_t r = 0; r < world; r++) {
    if (calls[r]->missing_recv > 0 && calls[r]->missing_recv <= own->count) {
      return dc__coll_fail_missing_recv(own->items[calls[r]->missing_recv - 1].id, r);
    }
  }
  return DC_OK;
}
