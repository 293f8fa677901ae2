/* Where data goes in the rounds of a small collective. A way is the distance in ranks from a part of a reduction to its
 * owner. Its binary digits say in which rounds the part hops. */
#include "comm/tcp/relay/relay.h"

#include <string.h>

#include "comm/windows.h"

static int64_t item_total(const dc__coll_item *item) {
  return item->total * (int64_t)dc_dtype_size(item->dtype);
}

enum {
  LEAST_WORLD = 4, /* with fewer ranks, direct messages are as few */
  /* Above these sizes passing data on costs more than messages to each rank. */
  MAX_GATHERED = 4 << 10, /* bytes per rank */
  MAX_REDUCED = 8 << 10,  /* bytes in all */
  MAX_PARTS = 256 << 10   /* bytes of a reduction in scratch memory, if all parts are as large as the largest */
};

bool dc__tcp_relays(const dc__tcp *self) {
  return self->head.world >= LEAST_WORLD;
}

bool dc__tcp_is_small(const dc__tcp_plan *p) {
  const dc__coll *coll = p->coll;
  int64_t bytes = 0;
  if (!dc__tcp_relays(p->self) || (p->has_data && coll->kind == DC__COLL_ALL_TO_ALL)) {
    return false; /* in an all-to-all each byte is for one rank */
  }
  for (int32_t i = 0; i < coll->count && p->has_data; i++) {
    int64_t total = item_total(&coll->items[i]);
    if (total > (int64_t)MAX_GATHERED * p->self->head.world - bytes) {
      return false;
    }
    bytes += total;
  }
  bool reduces = p->has_data && coll->kind == DC__COLL_REDUCE;
  return !reduces ||
         (bytes <= MAX_REDUCED && dc__max_part_bytes(coll, p->self->head.world) * p->self->head.world <= MAX_PARTS);
}

/* ---- data: between the caller's memory and blocks ---- */

static int64_t packed_part(const dc__coll *coll, int32_t r) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += dc__item_bytes(&coll->items[i], r);
  }
  return bytes;
}

/* Returns the end of the copy. An empty tensor may be NULL, which must not be passed to memcpy(). */
static char *copy_bytes(char *to, const void *from, int64_t bytes) {
  if (bytes == 0) {
    return to;
  }
  memcpy(to, from, (size_t)bytes);
  return to + bytes;
}

/* The blocks of a gather begin with this rank's part, those of a broadcast with the root's data. */
static void pack_whole(dc__tcp_relay *c) {
  const dc__coll *coll = c->plan->coll;
  char *to = c->blocks;
  for (int32_t i = 0; i < coll->count; i++) {
    const dc__coll_item *item = &coll->items[i];
    bool sends = coll->kind == DC__COLL_GATHER || coll->root == c->me;
    int64_t bytes = coll->kind == DC__COLL_GATHER ? dc__item_bytes(item, c->me) : item_total(item);
    to = copy_bytes(to, item->send, sends ? bytes : 0);
  }
  c->held = to - c->blocks;
}

/* Puts each part of the tensors at the index of its way. */
static void pack_parts(const dc__tcp_relay *c) {
  const dc__coll *coll = c->plan->coll;
  for (int32_t way = 1; way < c->world; way++) {
    int32_t owner = dc__tcp_relay_rank(c, way);
    char *to = c->blocks + way * c->stride;
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      if (item_total(item) > 0) {
        to = copy_bytes(to, dc__bytes_at(item->send, item->ranges[owner].begin, item->dtype),
                        dc__item_bytes(item, owner));
      }
    }
  }
}

static void unpack_gathered(const dc__tcp_relay *c) {
  const dc__coll *coll = c->plan->coll;
  const char *from = c->blocks + c->part[c->me];
  for (int32_t way = 1; way < c->world; way++) {
    int32_t r = dc__tcp_relay_rank(c, -way);
    for (int32_t i = 0; i < coll->count; i++) {
      const dc__coll_item *item = &coll->items[i];
      int64_t begin = item->ranges[r].begin * (int64_t)dc_dtype_size(item->dtype), bytes = dc__item_bytes(item, r);
      if (bytes > 0) {
        memcpy((char *)item->recv + begin, from, (size_t)bytes);
      }
      from += bytes;
    }
  }
  dc__tcp_copy_own(c->plan->self, coll);
}

static void unpack_broadcast(const dc__tcp_relay *c) {
  const dc__coll *coll = c->plan->coll;
  const char *from = c->blocks;
  for (int32_t i = 0; i < coll->count && coll->root != c->me; i++) {
    (void)copy_bytes(coll->items[i].recv, from, item_total(&coll->items[i]));
    from += item_total(&coll->items[i]);
  }
}

/* Copies the parts to where those of a direct exchange lie. */
static void unpack_parts(const dc__tcp_relay *c) {
  const dc__coll *coll = c->plan->coll;
  int64_t part = dc__tcp_part_bytes(coll, c->me);
  for (int32_t way = 1; way < c->world; way++) {
    const char *from = c->blocks + way * c->stride;
    char *to = c->plan->self->scratch + dc__tcp_relay_rank(c, -way) * part;
    for (int32_t i = 0; i < coll->count; i++) {
      int64_t bytes = dc__item_bytes(&coll->items[i], c->me);
      (void)copy_bytes(to, from, bytes);
      from += bytes;
      to += dc__item_stride(&coll->items[i], c->me);
    }
  }
  dc__tcp_reduce_own(c->plan->self, coll);
}

dc_status dc__tcp_relay_begin(dc__tcp_relay *c) {
  dc__tcp *self = c->plan->self;
  const dc__coll *coll = c->plan->coll;
  int64_t parts = 0, total = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    total += item_total(&coll->items[i]);
  }
  if (coll->kind == DC__COLL_REDUCE || coll->kind == DC__COLL_GATHER) {
    for (int32_t r = 0; r < c->world; r++) {
      c->part[r] = packed_part(coll, r);
      c->stride = c->part[r] > c->stride ? c->part[r] : c->stride;
    }
  }
  if (coll->kind == DC__COLL_REDUCE) {
    parts = dc__tcp_part_bytes(coll, c->me) * c->world;
    total = 2 * c->world * c->stride; /* at most half of the blocks go in a round */
  }
  DC__TRY(dc__tcp_reserve_scratch(self, parts + total + 1));
  c->blocks = self->scratch + parts;
  c->packed = c->blocks + c->world * c->stride;
  if (coll->kind == DC__COLL_REDUCE) {
    pack_parts(c);
  } else if (coll->kind != DC__COLL_BARRIER) {
    pack_whole(c);
  }
  return DC_OK;
}

void dc__tcp_relay_end(const dc__tcp_relay *c) {
  int32_t kind = c->plan->coll->kind;
  if (kind == DC__COLL_REDUCE) {
    unpack_parts(c);
  } else if (kind == DC__COLL_GATHER) {
    unpack_gathered(c);
  } else if (kind == DC__COLL_BROADCAST) {
    unpack_broadcast(c);
  }
}

/* ---- data: of a round ---- */

static void fill_gather(const dc__tcp_relay *c, dc__tcp_round *round) {
  int32_t left = c->world - round->distance, blocks = round->distance < left ? round->distance : left;
  for (int32_t i = 0; i < blocks; i++) {
    round->out_bytes += c->part[dc__tcp_relay_rank(c, -i)];
    round->in_bytes += c->part[dc__tcp_relay_rank(c, -round->distance - i)];
  }
  round->out = c->blocks;
  round->in = c->blocks + c->held;
}

static void fill_broadcast(const dc__tcp_relay *c, dc__tcp_round *round) {
  const dc__coll *coll = c->plan->coll;
  int64_t bytes = 0;
  for (int32_t i = 0; i < coll->count; i++) {
    bytes += item_total(&coll->items[i]);
  }
  int32_t behind_root = dc__tcp_relay_rank(c, -coll->root);
  bool sends = behind_root < round->distance && behind_root + round->distance < c->world;
  bool receives = behind_root >= round->distance && behind_root < 2 * round->distance;
  round->out = round->in = c->blocks;
  round->out_bytes = sends ? bytes : 0;
  round->in_bytes = receives ? bytes : 0;
}

/* Whether a block hops in this round. The block's owner is as many ranks ahead as the rest of its way. */
static bool hops(const dc__tcp_round *round, int32_t way) {
  return (way & round->distance) != 0;
}

static int64_t block_bytes(const dc__tcp_relay *c, const dc__tcp_round *round, int32_t way, bool arrived) {
  int32_t rest = way & ~(2 * round->distance - 1);
  return c->part[dc__tcp_relay_rank(c, arrived ? rest : rest + round->distance)];
}

static void fill_reduce(const dc__tcp_relay *c, dc__tcp_round *round) {
  char *to = c->packed;
  for (int32_t way = 1; way < c->world; way++) {
    if (hops(round, way)) {
      to = copy_bytes(to, c->blocks + way * c->stride, block_bytes(c, round, way, false));
      round->in_bytes += block_bytes(c, round, way, true);
    }
  }
  round->out = c->packed;
  round->out_bytes = to - c->packed;
  round->in = to;
}

void dc__tcp_relay_store(dc__tcp_relay *c, const dc__tcp_round *round) {
  const char *from = round->in;
  for (int32_t way = 1; c->plan->coll->kind == DC__COLL_REDUCE && way < c->world; way++) {
    if (hops(round, way)) {
      int64_t bytes = block_bytes(c, round, way, true);
      (void)copy_bytes(c->blocks + way * c->stride, from, bytes);
      from += bytes;
    }
  }
  c->held += round->in_bytes;
}

void dc__tcp_relay_fill(const dc__tcp_relay *c, dc__tcp_round *round) {
  if (c->plan->coll->kind == DC__COLL_REDUCE) {
    fill_reduce(c, round);
  } else if (c->plan->coll->kind == DC__COLL_GATHER) {
    fill_gather(c, round);
  } else if (c->plan->coll->kind == DC__COLL_BROADCAST) {
    fill_broadcast(c, round);
  }
}
