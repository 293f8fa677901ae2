/* Gradients to the owners of blocks, directions back. Flows go in windows: one buffer holds a window's parameters
 * whole, one after the other, so a rank needs memory for the largest parameter and its own blocks, not for the model.
 * A gradient is gathered in its own order of elements; directions are gathered in the order of owners, so that each
 * rank sends one piece, and are put back in place by every rank for its own part. */
#include "optim/exchange.h"

#include <inttypes.h>
#include <string.h>

enum { WINDOW = 1 << 22 }; /* elements that are worth one round */

/* Products on a device read 16 bytes at a time where all operands begin at such a place, and may add in another order
 * then: so that a block's bits do not depend on where it lies, it begins at one. */
enum { DEVICE_GRAIN = 4 };

/* A block: where it is among those of its owner, and among all of its flow sorted by owner. */
typedef struct place {
  int64_t own;    /* in `owned`; -1: another rank's */
  int64_t packed; /* from the flow's begin */
} place;

typedef struct flow {
  dc__flow in;
  place *places;
  dc__range *parts;  /* of each rank, in the parameter */
  dc__range *packed; /* of each rank, in the order of owners */
  int64_t room;      /* elements in a window: as many as are packed */
  int64_t own;       /* where this rank's blocks begin in `owned` */
  bool whole;        /* every rank has all of it */
} flow;

struct dc__exchange {
  const char *fn;
  dc_device *device;
  dc_stream *on;    /* where blocks are cut out and put back */
  int32_t kind;     /* of memory: that of whoever computes */
  int64_t grain;    /* packed blocks begin at multiples of so many elements */
  dc_comm *comm;    /* NULL: one rank */
  dc_stream *moves; /* NULL: this thread. Ranks that share a device would wait for each other on its own stream */
  int32_t rank, world;
  flow *flows;
  int64_t count;
  place *places;
  dc__range *ranges;
  dc__coll_item *items; /* of one window */
  float *memory;        /* all three: */
  size_t bytes;
  float *owned; /* this rank's blocks */
  float *whole; /* a window's parameters */
  float *part;  /* this rank's part of one of them */
};

static const dc__tag gather_tag = {-1, -1, DC_OP_COMM_ALL_GATHER, NULL};

/* ---- agreement ---- */

dc_status dc__agree(const char *fn, dc_comm *comm, dc_status mine) {
  int64_t table[DC__COMM_MAX_WORLD];
  const int64_t status = mine;
  if (comm == NULL || comm->world == 1) {
    return mine;
  }
  DC__TRY(dc__comm_exchange(comm, &gather_tag, &status, 1, table));
  for (int32_t r = 0; r < comm->world && mine == DC_OK; r++) {
    if (table[r] != DC_OK) {
      return dc__fail(DC_E_ABORTED, "%s: nothing was done, since rank %" PRId32 " failed with %s", fn, r,
                      dc_status_name((dc_status)table[r]));
    }
  }
  return mine;
}

/* ---- making ---- */

static int64_t block_count(const dc__cut *cut, int64_t block) {
  dc__box box;
  dc__cut_box(cut, block, &box);
  return box.count;
}

/* Places blocks by owner: the ranks' pieces of the flow, and this rank's among all that it owns, *owned so far. */
static void place_blocks(dc__exchange *x, flow *f, int64_t *owned) {
  int64_t packed = 0;
  for (int32_t r = 0; r < x->world; r++) {
    f->packed[r].begin = packed;
    for (int64_t b = 0; b < f->in.cut->blocks; b++) {
      if (f->in.owners[b] == r) {
        f->places[b].packed = packed;
        f->places[b].own = r == x->rank ? *owned + packed - f->packed[r].begin : -1;
        packed += (block_count(f->in.cut, b) + x->grain - 1) / x->grain * x->grain;
      }
    }
    f->packed[r].count = packed - f->packed[r].begin;
  }
  f->room = packed;
  *owned += f->packed[x->rank].count;
}

/* Whole on every rank, or a partition: the parts cover all elements once. */
static dc_status check_parts(const dc__exchange *x, flow *f) {
  int64_t numel = f->in.cut->numel;
  int64_t covered = 0;
  int64_t sum = 0;
  f->whole = true;
  for (int32_t r = 0; r < x->world; r++) {
    f->whole = f->whole && f->parts[r].count == numel;
    sum += f->parts[r].count;
  }
  for (int64_t before = -1; before < covered;) {
    before = covered;
    for (int32_t r = 0; r < x->world; r++) {
      covered += f->parts[r].begin == covered ? f->parts[r].count : 0;
    }
  }
  if (f->whole || (covered == numel && sum == numel)) {
    return DC_OK;
  }
  return dc__fail(DC_E_MISMATCH,
                  "%s: the ranks' parts of parameter %" PRId64 " have %" PRId64 " element%s together and %" PRId64
                  " up to the first gap; they must make up its %" PRId64 ", or each be the whole",
                  x->fn, f->in.id, sum, DC__S(sum), covered, numel);
}

static dc_status learn_parts(dc__exchange *x, int64_t *mine, int64_t *table) {
  for (int64_t i = 0; i < x->count; i++) {
    mine[2 * i] = x->flows[i].in.offset;
    mine[2 * i + 1] = x->flows[i].in.count;
  }
  if (x->world > 1 && x->count > 0) {
    DC__TRY(dc__comm_exchange(x->comm, &gather_tag, mine, 2 * x->count, table));
  }
  const int64_t *told = x->world > 1 ? table : mine;
  for (int64_t i = 0; i < x->count; i++) {
    for (int32_t r = 0; r < x->world; r++) {
      const int64_t *at = &told[(r * x->count + i) * 2];
      x->flows[i].parts[r] = (dc__range){at[0], at[1]};
    }
    DC__TRY(check_parts(x, &x->flows[i]));
  }
  return DC_OK;
}

/* The flow after the last of the window that begins with `first`, and the window's elements. */
static int64_t window_end(const dc__exchange *x, int64_t first, int64_t *elements) {
  *elements = 0;
  int64_t end = first;
  while (end < x->count && (end == first || *elements + x->flows[end].room <= WINDOW)) {
    *elements += x->flows[end++].room;
  }
  return end;
}

/* Wants places. All but the parts is known without the other ranks. */
static dc_status allocate(dc__exchange *x) {
  int64_t blocks = 0;
  int64_t owned = 0;
  int64_t window = 0;
  int64_t part = 0;
  for (int64_t i = 0; i < x->count; i++) {
    blocks += x->flows[i].in.cut->blocks;
  }
  x->places = dc__calloc((size_t)blocks + 1, sizeof *x->places);
  x->ranges = dc__calloc(2 * (size_t)x->count * (size_t)x->world + 1, sizeof *x->ranges);
  x->items = dc__calloc((size_t)x->count + 1, sizeof *x->items);
  if (x->places == NULL || x->ranges == NULL || x->items == NULL) {
    return DC_E_NO_MEMORY;
  }
  blocks = 0;
  for (int64_t i = 0; i < x->count; i++) {
    flow *f = &x->flows[i];
    f->places = x->places + blocks;
    f->parts = x->ranges + 2 * i * x->world;
    f->packed = f->parts + x->world;
    blocks += f->in.cut->blocks;
    f->own = owned;
    place_blocks(x, f, &owned);
    part = f->in.count > part ? f->in.count : part;
  }
  for (int64_t i = 0, elements; i < x->count;) {
    i = window_end(x, i, &elements);
    window = elements > window ? elements : window;
  }
  x->bytes = (size_t)(owned + window + part + 1) * sizeof(float);
  void *memory;
  if (x->device->place != 0 && x->world > 1) {
    DC__TRY(x->device->ops->stream_create(x->device, &x->moves));
  }
  dc_status status = x->device->ops->alloc(x->device, x->bytes, x->kind, &memory);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %zu bytes for blocks: %s", x->fn, x->bytes, dc_last_error());
  }
  if (x->grain > 1) { /* what lies between blocks is gathered with them */
    dc__stream_zero(x->device->here, memory, x->bytes);
    dc__here_done(x->device, NULL);
  }
  x->memory = memory;
  x->owned = memory;
  x->whole = x->owned + owned;
  x->part = x->whole + window;
  return DC_OK;
}

void dc__exchange_destroy(dc__exchange *x) {
  if (x == NULL) {
    return;
  }
  if (x->memory != NULL) {
    x->device->ops->free(x->device, x->memory, x->bytes, x->kind);
  }
  if (x->moves != NULL) {
    x->device->ops->stream_destroy(x->moves);
  }
  dc__free(x->places);
  dc__free(x->ranges);
  dc__free(x->items);
  dc__free(x->flows);
  dc__free(x);
}

static dc__exchange *new_exchange(const char *fn, dc_device *device, dc_comm *comm, const dc__flow *flows,
                                  int64_t count) {
  dc__exchange *x = dc__calloc(1, sizeof *x);
  flow *copies = dc__calloc((size_t)count + 1, sizeof *copies);
  if (x == NULL || copies == NULL) {
    dc__free(x);
    dc__free(copies);
    return NULL;
  }
  for (int64_t i = 0; i < count; i++) {
    copies[i].in = flows[i];
  }
  *x = (dc__exchange){.fn = fn,
                      .device = device,
                      .on = device->here,
                      .grain = device->place != 0 ? DEVICE_GRAIN : 1,
                      .kind = device->place != 0 ? DC_MEMORY_DEVICE : DC_MEMORY_HOST,
                      .comm = comm,
                      .rank = comm != NULL ? comm->rank : 0,
                      .world = comm != NULL ? comm->world : 1,
                      .flows = copies,
                      .count = count};
  return x;
}

dc_status dc__exchange_create(const char *fn, dc_device *device, dc_comm *comm, const dc__flow *flows, int64_t count,
                              dc__exchange **exchange) {
  size_t words = 2 * (size_t)count + 1;
  dc__exchange *x = new_exchange(fn, device, comm, flows, count);
  int64_t *mine = dc__calloc(words, sizeof *mine);
  int64_t *table = dc__calloc(words * (size_t)(comm != NULL ? comm->world : 1), sizeof *table);
  dc_status status = x != NULL && mine != NULL && table != NULL ? allocate(x) : DC_E_NO_MEMORY;
  status = dc__agree(fn, comm, status);
  if (status == DC_OK) {
    status = learn_parts(x, mine, table);
  }
  dc__free(mine);
  dc__free(table);
  if (status != DC_OK) {
    dc__exchange_destroy(x);
    x = NULL;
  }
  *exchange = x;
  return status;
}

/* ---- steps ---- */

float *dc__exchange_block(const dc__exchange *x, int64_t of_flow, int64_t block) {
  int64_t own = x->flows[of_flow].places[block].own;
  return own >= 0 ? x->owned + own : NULL;
}

int64_t dc__exchange_bytes(const dc__exchange *x) {
  return (int64_t)x->bytes;
}

void dc__exchange_follow(dc__exchange *x, dc_stream *stream) {
  x->on = stream;
}

dc_stream *dc__exchange_moves(const dc__exchange *x) {
  return x->moves;
}

/* A rank's own block that is the whole parameter, and was or will be its part: needs no copy. */
static bool direct(const flow *f) {
  return f->whole && f->in.cut->blocks == 1;
}

static dc__coll_item gather_item(const flow *f, const dc__range *ranges, int64_t total, const float *send,
                                 float *recv) {
  dc__coll_item item = {
      .send = send, .recv = recv, .ranges = ranges, .total = total, .id = f->in.id, .dtype = DC_FLOAT32};
  return item;
}

static bool left_out(const bool *skip, int64_t i) {
  return skip != NULL && skip[i];
}

/* What was queued before is done first, and the items are there after. */
static dc_status gather(dc__exchange *x, int64_t items) {
  if (items == 0) {
    return DC_OK;
  }
  dc__here_done(x->device, NULL);
  dc__comm_all_gather(x->comm, x->moves, &gather_tag, x->items, items);
  DC__TRY(dc__stream_sync(x->moves, 0));
  return dc__comm_check(x->comm);
}

static void take_blocks(const dc__exchange *x, int64_t i, const float *whole) {
  const flow *f = &x->flows[i];
  for (int64_t b = 0; b < f->in.cut->blocks; b++) {
    if (f->places[b].own >= 0) {
      dc__box box;
      dc__cut_box(f->in.cut, b, &box);
      dc__box_take(x->on, f->in.cut, &box, whole, x->owned + f->places[b].own);
    }
  }
}

static dc_status window_in(dc__exchange *x, int64_t first, int64_t end, const bool *skip, dc__exchange_fill fill,
                           void *user) {
  int64_t items = 0;
  float *whole = x->whole;
  for (int64_t i = first; i < end; whole += x->flows[i++].room) {
    const flow *f = &x->flows[i];
    if (left_out(skip, i)) {
      continue;
    }
    if (!f->whole) {
      float *part = whole + f->in.offset;
      if (f->in.count > 0) {
        fill(user, i, part);
      }
      x->items[items++] = gather_item(f, f->parts, f->in.cut->numel, part, whole);
    } else if (f->packed[x->rank].count > 0) {
      fill(user, i, direct(f) ? dc__exchange_block(x, i, 0) : whole);
    }
  }
  DC__TRY(gather(x, items));
  whole = x->whole;
  for (int64_t i = first; i < end; whole += x->flows[i++].room) {
    if (!left_out(skip, i) && !direct(&x->flows[i])) {
      take_blocks(x, i, whole);
    }
  }
  return DC_OK;
}

dc_status dc__exchange_in(dc__exchange *x, const bool *skip, dc__exchange_fill fill, void *user) {
  for (int64_t i = 0, end, elements; i < x->count; i = end) {
    end = window_end(x, i, &elements);
    DC__TRY(window_in(x, i, end, skip, fill, user));
  }
  return DC_OK;
}

/* packed: the flow's directions in the order of owners. */
static void give_part(const dc__exchange *x, int64_t i, const float *packed, dc__exchange_apply apply, void *user) {
  const flow *f = &x->flows[i];
  if (f->in.count == 0) {
    return;
  }
  for (int64_t b = 0; b < f->in.cut->blocks && !direct(f); b++) {
    dc__box box;
    dc__cut_box(f->in.cut, b, &box);
    dc__box_give(x->on, f->in.cut, &box, packed + f->places[b].packed, f->in.offset, f->in.count, x->part);
  }
  apply(user, i, direct(f) ? packed : x->part);
}

static dc_status window_out(dc__exchange *x, int64_t first, int64_t end, const bool *skip, dc__exchange_apply apply,
                            void *user) {
  int64_t items = 0;
  float *whole = x->whole;
  for (int64_t i = first; i < end; whole += x->flows[i++].room) {
    const flow *f = &x->flows[i];
    if (x->world > 1 && !left_out(skip, i)) {
      x->items[items++] = gather_item(f, f->packed, f->room, x->owned + f->own, whole);
    }
  }
  DC__TRY(gather(x, items));
  whole = x->whole;
  for (int64_t i = first; i < end; whole += x->flows[i++].room) {
    if (!left_out(skip, i)) {
      give_part(x, i, x->world > 1 ? whole : x->owned + x->flows[i].own, apply, user);
    }
  }
  return DC_OK;
}

dc_status dc__exchange_out(dc__exchange *x, const bool *skip, dc__exchange_apply apply, void *user) {
  for (int64_t i = 0, end, elements; i < x->count; i = end) {
    end = window_end(x, i, &elements);
    DC__TRY(window_out(x, i, end, skip, apply, user));
  }
  return DC_OK;
}
