/* Bounded products on a device, whose memory is what the budget bounds. C's tile stays there while k is summed. Blocks
 * of A and B that lie in files come through two pieces of pinned memory and a stream of copies, each operand's into two
 * buffers that take turns: while one product runs, the next one's blocks are read and copied. What lies in the device's
 * memory is used where it is. */
#include "linalg/bounded.h"

enum {
  TURNS = 2,
  STAGE = 4 << 20, /* pinned bytes that are copied at once: from here on a copy's start is nothing beside it */
  PLACE = 256,     /* what NVIDIA's libraries want of a workspace's address */
  TILE = 64        /* pieces come in multiples of it */
};

/* Nanoseconds, for the choice alone: what a product costs the host, and an element of C that is read and added to. */
static const double PRODUCT = 20000, AGAIN = 0.004;

/* What a handle keeps for its bounded products. Events: the last copy from or to a stage, the last copy or product that
 * used a buffer of A or B, and the last that used the tile. */
struct dc__staging {
  dc_stream *copies;
  char *pinned;
  dc_event *staged[TURNS], *used[2][TURNS], *tile;
};

/* A part of a matrix in a file, and dense memory for it. */
typedef struct block {
  const char *arg;
  const dc__source *source;
  char *memory;
  int64_t row, rows, col, cols; /* rows 0: none */
} block;

/* A's or B's way there. */
typedef struct operand {
  block present;
  char *buffer[TURNS];
  dc_event **used;
  int32_t turn;
} operand;

typedef struct there {
  dc_linalg *l;
  const dc__bounded *w;
  struct dc__staging *staging;
  block owed[TURNS]; /* what a stage brings here, to be written before it serves again */
  int32_t turn;
  operand a, b;
  char *tile, *product;
  size_t product_bytes;
  dc__file_failure failure;
} there;

/* ---- what a handle keeps ---- */

void dc__staging_close(dc_linalg *l) {
  struct dc__staging *s = l->staging;
  const dc__device_ops *ops = l->device->ops;
  if (s == NULL) {
    return;
  }
  dc_event *events[] = {s->staged[0],  s->staged[1],  s->used[0][0], s->used[0][1],
                        s->used[1][0], s->used[1][1], s->tile};
  for (size_t i = 0; i < DC__COUNT(events); i++) {
    if (events[i] != NULL) {
      ops->event_destroy(events[i]);
    }
  }
  if (s->copies != NULL) {
    ops->stream_destroy(s->copies);
  }
  ops->free(l->device, s->pinned, TURNS * STAGE, DC_MEMORY_HOST);
  dc__free(s);
  l->staging = NULL;
}

static dc_status make(dc_device *device, struct dc__staging *s) {
  const dc__device_ops *ops = device->ops;
  void *pinned;
  DC__TRY(ops->alloc(device, TURNS * STAGE, DC_MEMORY_HOST, &pinned));
  s->pinned = pinned;
  DC__TRY(ops->stream_create(device, &s->copies));
  DC__TRY(ops->event_create(device, &s->tile));
  for (int32_t i = 0; i < TURNS; i++) {
    DC__TRY(ops->event_create(device, &s->staged[i]));
    DC__TRY(ops->event_create(device, &s->used[0][i]));
    DC__TRY(ops->event_create(device, &s->used[1][i]));
  }
  return DC_OK;
}

static dc_status open_staging(dc_linalg *l, const char *fn) {
  if (l->staging != NULL) {
    return DC_OK;
  }
  l->staging = dc__calloc(1, sizeof *l->staging);
  const dc_status status = l->staging == NULL ? DC_E_NO_MEMORY : make(l->device, l->staging);
  if (status != DC_OK) {
    (void)dc__fail(status, "%s: %s", fn, dc_last_error());
    dc__staging_close(l);
  }
  return status;
}

/* ---- plans ---- */

static bool fits(const dc__bounded *w, dc__bounded_plan *p) {
  (void)w;
  (void)p;
  return true;
}

/* The tile and the buffers. */
static size_t blocks_of(const dc__bounded *w, const dc__bounded_plan *p) {
  size_t total = 0;
  bool fine = true;
  if (dc__in_file(w->out)) {
    fine = dc__linalg_add(&total, p->mb * p->nb, w->out_size);
  }
  for (int32_t i = 0; i < TURNS; i++) {
    fine = fine && (!dc__in_file(w->a) || dc__linalg_add(&total, p->mb * p->kb, w->in_size));
    fine = fine && (!dc__in_file(w->b) || dc__linalg_add(&total, p->kb * p->nb, w->in_size));
  }
  return fine ? total : SIZE_MAX;
}

/* What products may use beside `bytes` of blocks: an eighth, as far as more of it is of use. */
static size_t product_of(size_t bytes) {
  const size_t share = bytes / 8 / PLACE * PLACE;
  return share < DC__CUDA_PRODUCT_BYTES ? share : DC__CUDA_PRODUCT_BYTES;
}

static size_t bytes_of(const dc__bounded *w, const dc__bounded_plan *p) {
  const size_t blocks = blocks_of(w, p);
  return blocks == SIZE_MAX ? SIZE_MAX : (PLACE + product_of(blocks) + blocks + PLACE - 1) / PLACE * PLACE;
}

/* The order of products is tile by tile down a column of C's, k within a tile: a block that the next product wants too
 * is not read again. The first blocks count twice, since no product runs while they come. */
static double cost_of(const dc__bounded *w, const dc__bounded_plan *p) {
  const double m = (double)w->m;
  const double n = (double)w->n;
  const double k = (double)w->k;
  const double i = (double)dc__pieces(w->m, p->mb);
  const double j = (double)dc__pieces(w->n, p->nb);
  const double t = (double)dc__pieces(w->k, p->kb);
  const double a = i * t > 1 ? j : 1;
  const double b = t > 1 ? i : 1;
  const double mb = (double)p->mb;
  const double nb = (double)p->nb;
  const double kb = (double)p->kb;
  return PRODUCT * i * j * t + AGAIN * m * n * (t - 1) + dc__bounded_moves(w->a, false, a * t, m, kb) +
         dc__bounded_moves(w->a, false, 1, mb, kb) + dc__bounded_moves(w->b, false, b * j, k, nb) +
         dc__bounded_moves(w->b, false, 1, kb, nb) + dc__bounded_moves(w->out, true, j, m, nb);
}

static const dc__bounded_way way = {.fits = fits, .bytes = bytes_of, .cost = cost_of};

/* ---- blocks ---- */

static size_t block_bytes(const block *b) {
  return (size_t)(b->rows * b->cols) * dc_dtype_size(b->source->mat.dtype);
}

/* What fits into a stage of a block from its byte `done` on: whole rows, or a part of one. */
static block part_of(const block *b, size_t done) {
  const size_t size = dc_dtype_size(b->source->mat.dtype);
  const int64_t room = STAGE / (int64_t)size;
  const int64_t row = (int64_t)(done / size) / b->cols;
  const int64_t col = (int64_t)(done / size) % b->cols;
  block part = *b;
  part.memory += done;
  part.row += row;
  part.col += col;
  part.cols = dc__least(b->cols - col, room);
  part.rows = part.cols < b->cols ? 1 : dc__least(b->rows - row, room / b->cols);
  return part;
}

typedef struct transfer {
  there *x;
  const block *part;
  char *stage;
  bool write;
  int64_t shares;
} transfer;

static void move_share(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const transfer *t = arg;
  const block *p = t->part;
  const int64_t first = p->rows * index / t->shares;
  const int64_t rows = p->rows * (index + 1) / t->shares - first;
  char *memory = t->stage + (size_t)(first * p->cols) * dc_dtype_size(p->source->mat.dtype);
  (void)dc__file_move(&t->x->failure, p->arg, p->source, t->write, memory, p->row + first, rows, p->col, p->cols);
}

/* Between the file and a stage, on the handle's threads. */
static void move(there *x, const block *part, int32_t turn, bool write) {
  transfer t = {.x = x, .part = part, .stage = x->staging->pinned + (size_t)turn * STAGE, .write = write};
  t.shares = dc__least(dc__pool_threads(x->l->pool), part->rows);
  dc__parallel_sized(x->l->pool, t.shares, part->rows * part->cols / t.shares, move_share, &t);
}

static bool goes_on(there *x) {
  return !dc__file_failed(&x->failure) && dc__device_check(x->l->device) == DC_OK;
}

/* The stage whose turn it is, once its copy is done, and what it brought is written. */
static int32_t take_stage(there *x) {
  x->turn = (x->turn + 1) % TURNS;
  dc__event_wait(x->staging->staged[x->turn], NULL);
  if (x->owed[x->turn].rows > 0 && goes_on(x)) {
    move(x, &x->owed[x->turn], x->turn, true);
  }
  x->owed[x->turn].rows = 0;
  return x->turn;
}

static void read_block(there *x, const block *b) {
  block part;
  for (size_t done = 0; done < block_bytes(b) && goes_on(x); done += block_bytes(&part)) {
    const int32_t turn = take_stage(x);
    part = part_of(b, done);
    move(x, &part, turn, false);
    dc__stream_copy(x->staging->copies, part.memory, x->staging->pinned + (size_t)turn * STAGE, block_bytes(&part));
    dc__event_record(x->staging->staged[turn], x->staging->copies);
  }
}

static void write_block(there *x, const block *b) {
  block part;
  for (size_t done = 0; done < block_bytes(b) && goes_on(x); done += block_bytes(&part)) {
    const int32_t turn = take_stage(x);
    part = part_of(b, done);
    dc__stream_copy(x->staging->copies, x->staging->pinned + (size_t)turn * STAGE, part.memory, block_bytes(&part));
    dc__event_record(x->staging->staged[turn], x->staging->copies);
    x->owed[turn] = part;
  }
}

/* A block of A or B for the next product: in place, or where it was brought to. */
static dc__mat fetch(there *x, operand *o, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  const dc__source *s = o->present.source;
  if (dc__in_file(s) && (o->present.rows == 0 || o->present.row != row || o->present.col != col)) {
    o->turn = (o->turn + 1) % TURNS;
    const block next = {.arg = o->present.arg,
                        .source = s,
                        .memory = o->buffer[o->turn],
                        .row = row,
                        .rows = rows,
                        .col = col,
                        .cols = cols};
    o->present = next;
    dc__event_wait(o->used[o->turn], x->staging->copies);
    read_block(x, &next);
    dc__event_record(o->used[o->turn], x->staging->copies);
    dc__event_wait(o->used[o->turn], x->l->device->here);
  }
  return dc__source_part(s, o->present.memory, row, rows, col, cols);
}

/* The product that was queued reads the operand's block. */
static void use(there *x, const operand *o) {
  if (dc__in_file(o->present.source)) {
    dc__event_record(o->used[o->turn], x->l->device->here);
  }
}

/* ---- products ---- */

static void multiply(there *x, const block *c, int64_t p) {
  const dc__bounded *w = x->w;
  dc_stream *here = x->l->device->here;
  const int64_t depth = dc__least(w->plan.kb, w->k - p);
  if (depth == 0) { /* C is in a file, and its tile dense */
    dc__stream_zero(here, c->memory, block_bytes(c));
    return;
  }
  const dc__mat a = fetch(x, &x->a, c->row, c->rows, p, depth);
  const dc__mat b = fetch(x, &x->b, p, depth, c->col, c->cols);
  const dc__mat sums = dc__source_part(w->out, c->memory, c->row, c->rows, c->col, c->cols);
  const dc__gemm g = dc__mat_product(&a, &b, 1, p == 0 ? 0 : 1, &sums);
  dc__cuda_gemm(here, &g, x->product, x->product_bytes);
  use(x, &x->a);
  use(x, &x->b);
}

/* C's tiles one after the other. One that is written is copied away before the next is begun, and that is all that
 * waits for it. */
static void multiply_tiles(there *x) {
  const dc__bounded *w = x->w;
  const dc__bounded_plan *s = &w->plan;
  for (int64_t j = 0; j < w->n && goes_on(x); j += s->nb) {
    for (int64_t i = 0; i < w->m && goes_on(x); i += s->mb) {
      const block c = {.arg = "out",
                       .source = w->out,
                       .memory = x->tile,
                       .row = i,
                       .rows = dc__least(s->mb, w->m - i),
                       .col = j,
                       .cols = dc__least(s->nb, w->n - j)};
      int64_t p = 0;
      do {
        multiply(x, &c, p);
        p += s->kb;
      } while (p < w->k && goes_on(x));
      if (dc__in_file(w->out)) {
        dc__event_record(x->staging->tile, x->l->device->here);
        dc__event_wait(x->staging->tile, x->staging->copies);
        write_block(x, &c);
        dc__event_record(x->staging->tile, x->staging->copies);
        dc__event_wait(x->staging->tile, x->l->device->here);
      }
    }
  }
}

/* Memory with PLACE bytes more than it must have is given. */
static char *aligned(void *memory) {
  return (char *)(((uintptr_t)memory + PLACE - 1) / PLACE * PLACE);
}

/* Parts of the memory, as bytes_of() counts them. */
static void place(there *x, void *memory) {
  const dc__bounded *w = x->w;
  const dc__bounded_plan *s = &w->plan;
  size_t offset = 0;
  x->product = aligned(memory);
  x->product_bytes = product_of(blocks_of(w, s));
  char *blocks = x->product + x->product_bytes;
  if (dc__in_file(w->out)) {
    x->tile = dc__linalg_part(blocks, &offset, s->mb * s->nb, w->out_size);
  }
  for (int32_t i = 0; i < TURNS; i++) {
    x->a.buffer[i] = dc__in_file(w->a) ? dc__linalg_part(blocks, &offset, s->mb * s->kb, w->in_size) : NULL;
    x->b.buffer[i] = dc__in_file(w->b) ? dc__linalg_part(blocks, &offset, s->kb * s->nb, w->in_size) : NULL;
  }
}

/* Both streams are done when it returns, whatever failed: the next call uses the same memory. */
static dc_status run(dc_linalg *l, const dc__bounded *w, void *memory) {
  there x = {.l = l, .w = w, .staging = l->staging};
  x.a.present = (block){.arg = "a", .source = w->a};
  x.b.present = (block){.arg = "b", .source = w->b};
  x.a.used = l->staging->used[0];
  x.b.used = l->staging->used[1];
  dc__file_failure_init(&x.failure);
  place(&x, memory);
  multiply_tiles(&x);
  for (int32_t i = 0; i < TURNS; i++) {
    (void)take_stage(&x);
  }
  (void)dc__stream_sync(l->staging->copies, 0);
  DC__TRY(dc__linalg_done(l));
  return dc__file_told(&x.failure, w->fn);
}

/* Nothing to be read or written: one product, with as much of the budget as it can use. */
static dc_status run_in_place(dc_linalg *l, const dc__bounded *w, int64_t budget) {
  const dc__gemm g = dc__mat_product(&w->a->mat, &w->b->mat, 1, 0, &w->out->mat);
  const size_t most = DC__CUDA_PRODUCT_BYTES + PLACE;
  const size_t bytes = (size_t)budget < most ? (size_t)budget / PLACE * PLACE : most;
  void *memory = NULL;
  if (w->k > 0 && bytes > PLACE) {
    DC__TRY(dc__linalg_scratch(l, w->fn, bytes, &memory));
  }
  if (l->query) {
    return DC_OK;
  }
  if (w->k > 0) {
    dc__cuda_gemm(l->device->here, &g, aligned(memory), memory != NULL ? bytes - PLACE : 0);
  } else {
    dc__stream_zero(l->device->here, w->out->mat.data, (size_t)(w->m * w->n) * w->out_size);
  }
  return dc__linalg_done(l);
}

dc_status dc__bounded_there(dc_linalg *l, dc__bounded *w, int64_t budget, int64_t *needed) {
  void *memory;
  if (!dc__in_file(w->out) && (w->k == 0 || (!dc__in_file(w->a) && !dc__in_file(w->b)))) {
    return run_in_place(l, w, budget);
  }
  w->way = &way;
  w->shape = (dc__gemm_shape){.rows = TILE, .columns = TILE, .slice = TILE};
  DC__TRY(dc__bounded_choose(w, budget, needed));
  DC__TRY(dc__linalg_scratch(l, w->fn, bytes_of(w, &w->plan), &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  DC__TRY(open_staging(l, w->fn));
  return run(l, w, memory);
}
