/* Gradients to the owners of blocks, directions back, in windows of parameters that one buffer holds whole. So a rank
 * needs memory for the largest parameter and its own blocks only. Gradients are gathered in element order, directions
 * in owner order, so each rank sends one piece, and every rank unpacks its own part. */
#include "optim/redistribute.h"

#include <inttypes.h>
#include <string.h>

enum { WINDOW_ELEMENTS = 1 << 22 }; /* elements that are worth one round */

/* GEMM on a device reads 16 bytes at a time if all operands are so aligned, and may then add in another order.
 * Aligned blocks make the bits independent of their position. */
enum { DEVICE_ALIGNMENT = 4 };

/* A block's offsets: among its owner's blocks, and in its entry sorted by owner. */
typedef struct block_offset {
  int64_t own;    /* in `owned`; -1 if another rank's */
  int64_t packed; /* from the entry's begin */
} block_offset;

typedef struct redistribute_entry {
  dc__redist_entry in;
  block_offset *offsets;
  dc__range *parts;     /* of each rank, in element order */
  dc__range *packed;    /* of each rank, in owner order */
  int64_t packed_count; /* elements in a window, as packed */
  int64_t own;          /* offset of this rank's blocks in `owned` */
  bool whole;           /* every rank has all of it */
} redistribute_entry;

struct dc__redistribute {
  const char *fn;
  dc_device *device;
  dc_stream *stream;      /* where blocks are cut out and put back */
  int32_t kind;           /* the device's memory space */
  int64_t alignment;      /* of packed blocks, in elements */
  dc_comm *comm;          /* NULL for one rank */
  dc_stream *comm_stream; /* NULL for this thread. On the internal stream ranks that share a device would wait for each
                             other */
  int32_t rank, world;
  redistribute_entry *entries;
  int64_t count;
  block_offset *offsets;
  dc__range *ranges;
  dc__coll_item *items; /* of one window */
  float *memory;        /* all three: */
  size_t bytes;
  float *owned; /* this rank's blocks */
  float *whole; /* a window's parameters */
  float *part;  /* this rank's part of one of them */
};

static const dc__tag gather_tag = {.graph_id = -1, .id = -1, .op = DC_OP_COMM_ALL_GATHER};

/* ---- agreement ---- */

dc_status dc__optim_agree_status(const char *fn, dc_comm *comm, dc_status own_status) {
  int64_t table[DC__COMM_MAX_WORLD];
  const int64_t status = own_status;
  if (comm == NULL || comm->world == 1) {
    return own_status;
  }
  DC__TRY(dc__comm_all_gather_int64(comm, &gather_tag, &status, 1, table));
  for (int32_t r = 0; r < comm->world && own_status == DC_OK; r++) {
    if (table[r] != DC_OK) {
      return dc__fail(DC_E_ABORTED, "%s: nothing was done, since rank %" PRId32 " failed with %s", fn, r,
                      dc_status_name((dc_status)table[r]));
    }
  }
  return own_status;
}

/* ---- setup ---- */

static int64_t block_count(const dc__partition *partition, int64_t block) {
  dc__box box;
  dc__partition_box(partition, block, &box);
  return box.count;
}

/* Assigns blocks by owner: offsets in the ranks' pieces of the entry, and in all that this rank owns, *owned so far. */
static void assign_offsets(dc__redistribute *x, redistribute_entry *f, int64_t *owned) {
  int64_t packed = 0;
  for (int32_t r = 0; r < x->world; r++) {
    f->packed[r].begin = packed;
    for (int64_t b = 0; b < f->in.partition->blocks; b++) {
      if (f->in.owners[b] == r) {
        f->offsets[b].packed = packed;
        f->offsets[b].own = r == x->rank ? *owned + packed - f->packed[r].begin : -1;
        packed += (block_count(f->in.partition, b) + x->alignment - 1) / x->alignment * x->alignment;
      }
    }
    f->packed[r].count = packed - f->packed[r].begin;
  }
  f->packed_count = packed;
  *owned += f->packed[x->rank].count;
}

/* Checks that parts are whole on every rank, or cover each element once. */
static dc_status check_parts(const dc__redistribute *x, redistribute_entry *f) {
  int64_t numel = f->in.partition->numel;
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
                  x->fn, f->in.id, sum, DC__PLURAL_S(sum), covered, numel);
}

static dc_status gather_parts(dc__redistribute *x, int64_t *own_parts, int64_t *table) {
  for (int64_t i = 0; i < x->count; i++) {
    own_parts[2 * i] = x->entries[i].in.offset;
    own_parts[2 * i + 1] = x->entries[i].in.count;
  }
  if (x->world > 1 && x->count > 0) {
    DC__TRY(dc__comm_all_gather_int64(x->comm, &gather_tag, own_parts, 2 * x->count, table));
  }
  const int64_t *gathered = x->world > 1 ? table : own_parts;
  for (int64_t i = 0; i < x->count; i++) {
    for (int32_t r = 0; r < x->world; r++) {
      const int64_t *at = &gathered[(r * x->count + i) * 2];
      x->entries[i].parts[r] = (dc__range){at[0], at[1]};
    }
    DC__TRY(check_parts(x, &x->entries[i]));
  }
  return DC_OK;
}

/* Returns the end of the window that begins with entry `first`. *elements: those of the window. */
static int64_t window_end(const dc__redistribute *x, int64_t first, int64_t *elements) {
  *elements = 0;
  int64_t end = first;
  while (end < x->count && (end == first || *elements + x->entries[end].packed_count <= WINDOW_ELEMENTS)) {
    *elements += x->entries[end++].packed_count;
  }
  return end;
}

/* Sets offsets. Only the parts need the other ranks. */
static dc_status redistribute_alloc(dc__redistribute *x) {
  int64_t blocks = 0;
  int64_t owned = 0;
  int64_t window = 0;
  int64_t part = 0;
  for (int64_t i = 0; i < x->count; i++) {
    blocks += x->entries[i].in.partition->blocks;
  }
  x->offsets = dc__calloc((size_t)blocks + 1, sizeof *x->offsets);
  x->ranges = dc__calloc(2 * (size_t)x->count * (size_t)x->world + 1, sizeof *x->ranges);
  x->items = dc__calloc((size_t)x->count + 1, sizeof *x->items);
  if (x->offsets == NULL || x->ranges == NULL || x->items == NULL) {
    return DC_E_NO_MEMORY;
  }
  blocks = 0;
  for (int64_t i = 0; i < x->count; i++) {
    redistribute_entry *f = &x->entries[i];
    f->offsets = x->offsets + blocks;
    f->parts = x->ranges + 2 * i * x->world;
    f->packed = f->parts + x->world;
    blocks += f->in.partition->blocks;
    f->own = owned;
    assign_offsets(x, f, &owned);
    part = f->in.count > part ? f->in.count : part;
  }
  for (int64_t i = 0, elements; i < x->count;) {
    i = window_end(x, i, &elements);
    window = elements > window ? elements : window;
  }
  x->bytes = (size_t)(owned + window + part + 1) * sizeof(float);
  void *memory;
  if (x->device->memory_space != 0 && x->world > 1) {
    DC__TRY(x->device->ops->stream_create(x->device, &x->comm_stream));
  }
  dc_status status = x->device->ops->alloc(x->device, x->bytes, x->kind, &memory);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %zu bytes for blocks: %s", x->fn, x->bytes, dc_last_error());
  }
  if (x->alignment > 1) { /* padding between blocks is gathered with them */
    dc__stream_zero(x->device->internal_stream, memory, x->bytes);
    dc__device_sync_internal(x->device, NULL);
  }
  x->memory = memory;
  x->owned = memory;
  x->whole = x->owned + owned;
  x->part = x->whole + window;
  return DC_OK;
}

void dc__redistribute_destroy(dc__redistribute *x) {
  if (x == NULL) {
    return;
  }
  if (x->memory != NULL) {
    x->device->ops->free(x->device, x->memory, x->bytes, x->kind);
  }
  if (x->comm_stream != NULL) {
    x->device->ops->stream_destroy(x->comm_stream);
  }
  dc__free(x->offsets);
  dc__free(x->ranges);
  dc__free(x->items);
  dc__free(x->entries);
  dc__free(x);
}

static dc__redistribute *new_redistribute(const char *fn, dc_device *device, dc_comm *comm,
                                          const dc__redist_entry *entries, int64_t count) {
  dc__redistribute *x = dc__calloc(1, sizeof *x);
  redistribute_entry *copies = dc__calloc((size_t)count + 1, sizeof *copies);
  if (x == NULL || copies == NULL) {
    dc__free(x);
    dc__free(copies);
    return NULL;
  }
  for (int64_t i = 0; i < count; i++) {
    copies[i].in = entries[i];
  }
  *x = (dc__redistribute){.fn = fn,
                          .device = device,
                          .stream = device->internal_stream,
                          .alignment = device->memory_space != 0 ? DEVICE_ALIGNMENT : 1,
                          .kind = device->memory_space != 0 ? DC_MEMORY_DEVICE : DC_MEMORY_HOST,
                          .comm = comm,
                          .rank = comm != NULL ? comm->rank : 0,
                          .world = comm != NULL ? comm->world : 1,
                          .entries = copies,
                          .count = count};
  return x;
}

dc_status dc__redistribute_create(const char *fn, dc_device *device, dc_comm *comm, const dc__redist_entry *entries,
                                  int64_t count, dc__redistribute **redistribute) {
  size_t words = 2 * (size_t)count + 1;
  dc__redistribute *x = new_redistribute(fn, device, comm, entries, count);
  int64_t *own_parts = dc__calloc(words, sizeof *own_parts);
  int64_t *table = dc__calloc(words * (size_t)(comm != NULL ? comm->world : 1), sizeof *table);
  dc_status status = x != NULL && own_parts != NULL && table != NULL ? redistribute_alloc(x) : DC_E_NO_MEMORY;
  status = dc__optim_agree_status(fn, comm, status);
  if (status == DC_OK) {
    status = gather_parts(x, own_parts, table);
  }
  dc__free(own_parts);
  dc__free(table);
  if (status != DC_OK) {
    dc__redistribute_destroy(x);
    x = NULL;
  }
  *redistribute = x;
  return status;
}

/* ---- steps ---- */

float *dc__redistribute_block(const dc__redistribute *x, int64_t of_flow, int64_t block) {
  int64_t own = x->entries[of_flow].offsets[block].own;
  return own >= 0 ? x->owned + own : NULL;
}

int64_t dc__redistribute_bytes(const dc__redistribute *x) {
  return (int64_t)x->bytes;
}

void dc__redistribute_set_stream(dc__redistribute *x, dc_stream *stream) {
  x->stream = stream;
}

dc_stream *dc__redistribute_comm_stream(const dc__redistribute *x) {
  return x->comm_stream;
}

/* Whether a rank's own block is its whole part of the parameter, so that no copy is needed. */
static bool is_direct(const redistribute_entry *f) {
  return f->whole && f->in.partition->blocks == 1;
}

static dc__coll_item redistribute_gather_item(const redistribute_entry *f, const dc__range *ranges, int64_t total,
                                              const float *send, float *recv) {
  dc__coll_item item = {
      .send = send, .recv = recv, .ranges = ranges, .total = total, .id = f->in.id, .dtype = DC_FLOAT32};
  return item;
}

static bool is_skipped(const bool *skip, int64_t i) {
  return skip != NULL && skip[i];
}

/* Waits for queued work, then completes the items. */
static dc_status gather_window(dc__redistribute *x, int64_t items) {
  if (items == 0) {
    return DC_OK;
  }
  dc__device_sync_internal(x->device, NULL);
  dc__comm_all_gather(x->comm, x->comm_stream, &gather_tag, x->items, items);
  DC__TRY(dc__stream_sync(x->comm_stream, 0));
  return dc__comm_check(x->comm);
}

static void pack_blocks(const dc__redistribute *x, int64_t i, const float *whole) {
  const redistribute_entry *f = &x->entries[i];
  for (int64_t b = 0; b < f->in.partition->blocks; b++) {
    if (f->offsets[b].own >= 0) {
      dc__box box;
      dc__partition_box(f->in.partition, b, &box);
      dc__box_pack(x->stream, f->in.partition, &box, whole, x->owned + f->offsets[b].own);
    }
  }
}

static dc_status window_to_owners(dc__redistribute *x, int64_t first, int64_t end, const bool *skip, dc__fill_fn fill,
                                  void *user) {
  int64_t items = 0;
  float *whole = x->whole;
  for (int64_t i = first; i < end; whole += x->entries[i++].packed_count) {
    const redistribute_entry *f = &x->entries[i];
    if (is_skipped(skip, i)) {
      continue;
    }
    if (!f->whole) {
      float *part = whole + f->in.offset;
      if (f->in.count > 0) {
        fill(user, i, part);
      }
      x->items[items++] = redistribute_gather_item(f, f->parts, f->in.partition->numel, part, whole);
    } else if (f->packed[x->rank].count > 0) {
      fill(user, i, is_direct(f) ? dc__redistribute_block(x, i, 0) : whole);
    }
  }
  DC__TRY(gather_window(x, items));
  whole = x->whole;
  for (int64_t i = first; i < end; whole += x->entries[i++].packed_count) {
    if (!is_skipped(skip, i) && !is_direct(&x->entries[i])) {
      pack_blocks(x, i, whole);
    }
  }
  return DC_OK;
}

dc_status dc__redistribute_to_owners(dc__redistribute *x, const bool *skip, dc__fill_fn fill, void *user) {
  for (int64_t i = 0, end, elements; i < x->count; i = end) {
    end = window_end(x, i, &elements);
    DC__TRY(window_to_owners(x, i, end, skip, fill, user));
  }
  return DC_OK;
}

/* packed: the entry's directions in owner order. */
static void unpack_part(const dc__redistribute *x, int64_t i, const float *packed, dc__apply_fn apply, void *user) {
  const redistribute_entry *f = &x->entries[i];
  if (f->in.count == 0) {
    return;
  }
  for (int64_t b = 0; b < f->in.partition->blocks && !is_direct(f); b++) {
    dc__box box;
    dc__partition_box(f->in.partition, b, &box);
    dc__box_unpack(x->stream, f->in.partition, &box, packed + f->offsets[b].packed, f->in.offset, f->in.count, x->part);
  }
  apply(user, i, is_direct(f) ? packed : x->part);
}

static dc_status window_from_owners(dc__redistribute *x, int64_t first, int64_t end, const bool *skip,
                                    dc__apply_fn apply, void *user) {
  int64_t items = 0;
  float *whole = x->whole;
  for (int64_t i = first; i < end; whole += x->entries[i++].packed_count) {
    const redistribute_entry *f = &x->entries[i];
    if (x->world > 1 && !is_skipped(skip, i)) {
      x->items[items++] = redistribute_gather_item(f, f->packed, f->packed_count, x->owned + f->own, whole);
    }
  }
  DC__TRY(gather_window(x, items));
  whole = x->whole;
  for (int64_t i = first; i < end; whole += x->entries[i++].packed_count) {
    if (!is_skipped(skip, i)) {
      unpack_part(x, i, x->world > 1 ? whole : x->owned + x->entries[i].own, apply, user);
    }
  }
  return DC_OK;
}

dc_status dc__redistribute_from_owners(dc__redistribute *x, const bool *skip, dc__apply_fn apply, void *user) {
  for (int64_t i = 0, end, elements; i < x->count; i = end) {
    end = window_end(x, i, &elements);
    DC__TRY(window_from_owners(x, i, end, skip, apply, user));
  }
  return DC_OK;
}
