/* Whether all ranks called the same collective. */
#include <inttypes.h>
#include <string.h>

#include "comm/local/local.h"

static bool same_item(const dc__local_item *a, const dc__local_item *b) {
  return a->total == b->total && a->id == b->id && a->ranges == b->ranges && a->dtype == b->dtype &&
         a->reduce_op == b->reduce_op;
}

/* The first item in which two calls differ; -1: none. */
static int32_t difference(const dc__local_call *a, const dc__local_call *b) {
  int32_t count = a->count < b->count ? a->count : b->count;
  for (int32_t i = 0; i < count; i++) {
    if (!same_item(&a->items[i], &b->items[i])) {
      return i;
    }
  }
  bool same = a->tag.op == b->tag.op && a->tag.graph_id == b->tag.graph_id && a->tag.id == b->tag.id &&
              a->kind == b->kind && a->root == b->root && a->count == b->count && a->place == b->place;
  return same ? -1 : 0;
}

static void describe(char text[DC__COLL_TEXT], const dc__local_call *call, int32_t item, bool graph) {
  bool has = item < call->count;
  const dc__coll_name name = {.graph_id = graph ? call->tag.graph_id : DC__COLL_NO_GRAPH,
                              .id = has ? call->items[item].id : call->tag.id,
                              .total = has ? call->items[item].total : 0,
                              .op = call->tag.op,
                              .kind = call->kind,
                              .count = call->count,
                              .dtype = has ? call->items[item].dtype : DC_DTYPE_NONE,
                              .reduce_op = has ? call->items[item].reduce_op : 0,
                              .root = call->root};
  dc__coll_describe(text, &name);
}

dc_status dc__local_compare(const dc__local *self, const dc__local_call *const *calls) {
  const dc__local_call *mine = calls[self->head.rank];
  for (int32_t r = 0; r < self->head.world; r++) {
    if (mine->captured != calls[r]->captured) {
      int32_t captures = mine->captured != 0 ? self->head.rank : r;
      int32_t other = mine->captured != 0 ? r : self->head.rank;
      return dc__coll_half_captured(captures, &calls[captures]->tag, other, &calls[other]->tag);
    }
    int32_t item = difference(mine, calls[r]);
    if (item >= 0) {
      /* The lower rank is the one that the other is measured by, so that both ranks say the same. */
      int32_t low = r < self->head.rank ? r : self->head.rank;
      int32_t high = r < self->head.rank ? self->head.rank : r;
      bool graph = mine->tag.graph_id != calls[r]->tag.graph_id;
      char low_text[DC__COLL_TEXT];
      char high_text[DC__COLL_TEXT];
      describe(low_text, calls[low], item, graph);
      describe(high_text, calls[high], item, graph);
      const char *split = strcmp(low_text, high_text) != 0          ? ""
                          : calls[low]->place == calls[high]->place ? ", split differently over the ranks"
                                                                    : " with memory of another device";
      return dc__fail(DC_E_MISMATCH, "rank %" PRId32 " called %s where rank %" PRId32 " called %s%s", high, high_text,
                      low, low_text, split);
    }
  }
  return DC_OK;
}
