/* Out-of-core products on a device, whose memory the budget bounds. C's tile stays on the device while k is summed.
 * Blocks of A and B in files pass through two pinned stages and a copy stream, into two alternating buffers per
 * operand. So the next blocks are read and copied while a product runs. Operands in device memory are used in place. */
#include "kernels/cuda/kernels_cuda.h"
#include "linalg/out_of_core/out_of_core.h"

enum {
  NUM_BUFFERS = 2,
  STAGE_BYTES = 4 << 20, /* pinned bytes per copy: enough to hide its launch latency */
  ALIGNMENT = DC__MATMUL_ALIGNMENT,
  TILE = 64 /* pieces are multiples of it */
};

/* Nanoseconds, for choosing a plan only: a product's launch on the host, and an element of C that is read and added
 * to. */
static const double GEMM_NS = 20000, ACCUMULATE_NS = 0.004;

/* Staging of a handle, reused between calls. Events: the last copy from or to a stage, the last copy or product that
 * used a buffer of A or B, and the last use of the tile. */
struct dc__staging {
  dc_stream *copies;
  char *pinned;
  dc_event *staged[NUM_BUFFERS], *used[2][NUM_BUFFERS], *tile;
};

/* A part of a matrix in a file, and dense memory for it. */
typedef struct out_of_core_block {
  const char *arg;
  const dc__matrix_source *source;
  char *memory;
  int64_t row, rows, col, cols; /* rows 0: none */
} out_of_core_block;

/* The transfer of A or B to the device. */
typedef struct out_of_core_operand {
  out_of_core_block present; /* the block in the current buffer */
  char *buffer[NUM_BUFFERS];
  dc_event **used;
  int32_t current;
} out_of_core_operand;

typedef struct out_of_core_pipeline {
  dc_linalg *l;
  const dc__out_of_core *w;
  struct dc__staging *staging;
  out_of_core_block pending_write[NUM_BUFFERS]; /* blocks that a stage holds, to be written before its reuse */
  int32_t current;
  out_of_core_operand a, b;
  char *tile, *gemm_workspace;
  size_t gemm_workspace_bytes;
  dc__file_failure failure;
} out_of_core_pipeline;

/* ---- staging ---- */

void dc__staging_destroy(dc_linalg *l) {
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
  ops->free(l->device, s->pinned, NUM_BUFFERS * STAGE_BYTES, DC_MEMORY_HOST);
  dc__free(s);
  l->staging = NULL;
}

static dc_status staging_init(dc_device *device, struct dc__staging *s) {
  const dc__device_ops *ops = device->ops;
  void *pinned;
  DC__TRY(ops->alloc(device, NUM_BUFFERS * STAGE_BYTES, DC_MEMORY_HOST, &pinned));
  s->pinned = pinned;
  DC__TRY(ops->stream_create(device, &s->copies));
  DC__TRY(ops->event_create(device, &s->tile));
  for (int32_t i = 0; i < NUM_BUFFERS; i++) {
    DC__TRY(ops->event_create(device, &s->staged[i]));
    DC__TRY(ops->event_create(device, &s->used[0][i]));
    DC__TRY(ops->event_create(device, &s->used[1][i]));
  }
  return DC_OK;
}

static dc_status staging_create(dc_linalg *l, const char *fn) {
  if (l->staging != NULL) {
    return DC_OK;
  }
  l->staging = dc__calloc(1, sizeof *l->staging);
  const dc_status status = l->staging == NULL ? DC_E_NO_MEMORY : staging_init(l->device, l->staging);
  if (status != DC_OK) {
    (void)dc__fail(status, "%s: %s", fn, dc_last_error());
    dc__staging_destroy(l);
  }
  return status;
}

/* ---- plans ---- */

static bool pipeline_fits(const dc__out_of_core *w, dc__out_of_core_plan *p) {
  (void)w;
  (void)p;
  return true;
}

/* Bytes of the tile and the buffers; SIZE_MAX on overflow. */
static size_t blocks_of(const dc__out_of_core *w, const dc__out_of_core_plan *p) {
  size_t total = 0;
  bool fine = true;
  if (dc__in_file(w->out)) {
    fine = dc__linalg_add_bytes(&total, p->mb * p->nb, w->out_size);
  }
  for (int32_t i = 0; i < NUM_BUFFERS; i++) {
    fine = fine && (!dc__in_file(w->a) || dc__linalg_add_bytes(&total, p->mb * p->kb, w->in_size));
    fine = fine && (!dc__in_file(w->b) || dc__linalg_add_bytes(&total, p->kb * p->nb, w->in_size));
  }
  return fine ? total : SIZE_MAX;
}

/* Bytes of GEMM workspace beside `bytes` of blocks: an eighth of them, up to the useful maximum. */
static size_t gemm_workspace_share(size_t bytes) {
  const size_t share = bytes / 8 / ALIGNMENT * ALIGNMENT;
  return share < DC__CUDA_GEMM_WORKSPACE_BYTES ? share : DC__CUDA_GEMM_WORKSPACE_BYTES;
}

static size_t pipeline_bytes(const dc__out_of_core *w, const dc__out_of_core_plan *p) {
  const size_t blocks = blocks_of(w, p);
  return blocks == SIZE_MAX
             ? SIZE_MAX
             : (ALIGNMENT + gemm_workspace_share(blocks) + blocks + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Products run tile by tile down a column of C, with k inside a tile. A block that the next product uses again is
 * not read again. The first blocks count twice, since no product overlaps with their transfer. */
static double cost_of(const dc__out_of_core *w, const dc__out_of_core_plan *p) {
  const double m = (double)w->m;
  const double n = (double)w->n;
  const double k = (double)w->k;
  const double i = (double)dc__num_pieces(w->m, p->mb);
  const double j = (double)dc__num_pieces(w->n, p->nb);
  const double t = (double)dc__num_pieces(w->k, p->kb);
  const double a = i * t > 1 ? j : 1;
  const double b = t > 1 ? i : 1;
  const double mb = (double)p->mb;
  const double nb = (double)p->nb;
  const double kb = (double)p->kb;
  return GEMM_NS * i * j * t + ACCUMULATE_NS * m * n * (t - 1) + dc__out_of_core_io_cost(w->a, false, a * t, m, kb) +
         dc__out_of_core_io_cost(w->a, false, 1, mb, kb) + dc__out_of_core_io_cost(w->b, false, b * j, k, nb) +
         dc__out_of_core_io_cost(w->b, false, 1, kb, nb) + dc__out_of_core_io_cost(w->out, true, j, m, nb);
}

static const dc__out_of_core_model cuda_model = {.fits = pipeline_fits, .bytes = pipeline_bytes, .cost = cost_of};

/* ---- blocks ---- */

static size_t out_of_core_block_bytes(const out_of_core_block *b) {
  return (size_t)(b->rows * b->cols) * dc_dtype_size(b->source->mat.dtype);
}

/* Returns the part of a block, from its byte `done` on, that fits into a stage: whole rows, or a part of one. */
static out_of_core_block stage_part(const out_of_core_block *b, size_t done) {
  const size_t size = dc_dtype_size(b->source->mat.dtype);
  const int64_t stage_elements = STAGE_BYTES / (int64_t)size;
  const int64_t row = (int64_t)(done / size) / b->cols;
  const int64_t col = (int64_t)(done / size) % b->cols;
  out_of_core_block part = *b;
  part.memory += done;
  part.row += row;
  part.col += col;
  part.cols = dc__min_int64(b->cols - col, stage_elements);
  part.rows = part.cols < b->cols ? 1 : dc__min_int64(b->rows - row, stage_elements / b->cols);
  return part;
}

typedef struct transfer_task {
  out_of_core_pipeline *x;
  const out_of_core_block *part;
  char *stage;
  bool write;
  int64_t shares;
} transfer_task;

static void transfer_share(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const transfer_task *t = arg;
  const out_of_core_block *p = t->part;
  const int64_t first = p->rows * index / t->shares;
  const int64_t rows = p->rows * (index + 1) / t->shares - first;
  char *memory = t->stage + (size_t)(first * p->cols) * dc_dtype_size(p->source->mat.dtype);
  const dc__matrix_part share = {.row = p->row + first, .rows = rows, .col = p->col, .cols = p->cols};
  (void)dc__file_io_block(&t->x->failure, p->arg, p->source, t->write, memory, &share);
}

/* Reads or writes a stage on the handle's threads. */
static void transfer_part(out_of_core_pipeline *x, const out_of_core_block *part, int32_t stage, bool write) {
  transfer_task t = {.x = x, .part = part, .stage = x->staging->pinned + (size_t)stage * STAGE_BYTES, .write = write};
  t.shares = dc__min_int64(dc__threadpool_threads(x->l->pool), part->rows);
  dc__parallel_for_cost(x->l->pool, t.shares, part->rows * part->cols / t.shares, transfer_share, &t);
}

static bool is_ok(out_of_core_pipeline *x) {
  return !dc__file_failed(&x->failure) && dc__device_check(x->l->device) == DC_OK;
}

/* Returns the next stage in turn, once its copy has finished and its pending block is written. */
static int32_t next_stage(out_of_core_pipeline *x) {
  x->current = (x->current + 1) % NUM_BUFFERS;
  dc__event_wait(x->staging->staged[x->current], NULL);
  if (x->pending_write[x->current].rows > 0 && is_ok(x)) {
    transfer_part(x, &x->pending_write[x->current], x->current, true);
  }
  x->pending_write[x->current].rows = 0;
  return x->current;
}

static void pipeline_read_block(out_of_core_pipeline *x, const out_of_core_block *b) {
  out_of_core_block part;
  for (size_t done = 0; done < out_of_core_block_bytes(b) && is_ok(x); done += out_of_core_block_bytes(&part)) {
    const int32_t stage = next_stage(x);
    part = stage_part(b, done);
    transfer_part(x, &part, stage, false);
    dc__stream_copy(x->staging->copies, part.memory, x->staging->pinned + (size_t)stage * STAGE_BYTES,
                    out_of_core_block_bytes(&part));
    dc__event_record(x->staging->staged[stage], x->staging->copies);
  }
}

static void write_block(out_of_core_pipeline *x, const out_of_core_block *b) {
  out_of_core_block part;
  for (size_t done = 0; done < out_of_core_block_bytes(b) && is_ok(x); done += out_of_core_block_bytes(&part)) {
    const int32_t stage = next_stage(x);
    part = stage_part(b, done);
    dc__stream_copy(x->staging->copies, x->staging->pinned + (size_t)stage * STAGE_BYTES, part.memory,
                    out_of_core_block_bytes(&part));
    dc__event_record(x->staging->staged[stage], x->staging->copies);
    x->pending_write[stage] = part;
  }
}

/* Returns a block of A or B for the next product: in place, or read into a buffer unless one has it already. */
static dc__mat operand_fetch(out_of_core_pipeline *x, out_of_core_operand *o, dc__matrix_part part) {
  const dc__matrix_source *s = o->present.source;
  if (dc__in_file(s) && (o->present.rows == 0 || o->present.row != part.row || o->present.col != part.col)) {
    o->current = (o->current + 1) % NUM_BUFFERS;
    const out_of_core_block next = {.arg = o->present.arg,
                                    .source = s,
                                    .memory = o->buffer[o->current],
                                    .row = part.row,
                                    .rows = part.rows,
                                    .col = part.col,
                                    .cols = part.cols};
    o->present = next;
    dc__event_wait(o->used[o->current], x->staging->copies);
    pipeline_read_block(x, &next);
    dc__event_record(o->used[o->current], x->staging->copies);
    dc__event_wait(o->used[o->current], x->l->device->internal_stream);
  }
  return dc__matrix_source_block(s, o->present.memory, &part);
}

/* Records that the queued product uses the operand's block. */
static void mark_used(out_of_core_pipeline *x, const out_of_core_operand *o) {
  if (dc__in_file(o->present.source)) {
    dc__event_record(o->used[o->current], x->l->device->internal_stream);
  }
}

/* ---- products ---- */

static void multiply_block(out_of_core_pipeline *x, const out_of_core_block *c, int64_t p) {
  const dc__out_of_core *w = x->w;
  dc_stream *stream = x->l->device->internal_stream;
  const int64_t depth = dc__min_int64(w->plan.kb, w->k - p);
  if (depth == 0) { /* C is in a file, and its tile is dense */
    dc__stream_zero(stream, c->memory, out_of_core_block_bytes(c));
    return;
  }
  const dc__mat a = operand_fetch(x, &x->a, (dc__matrix_part){.row = c->row, .rows = c->rows, .col = p, .cols = depth});
  const dc__mat b = operand_fetch(x, &x->b, (dc__matrix_part){.row = p, .rows = depth, .col = c->col, .cols = c->cols});
  const dc__matrix_part part = {.row = c->row, .rows = c->rows, .col = c->col, .cols = c->cols};
  const dc__mat sums = dc__matrix_source_block(w->out, c->memory, &part);
  const dc__gemm g = dc__mat_gemm(&a, &b, 1, p == 0 ? 0 : 1, &sums);
  dc__cuda_gemm(stream, &g, x->gemm_workspace, x->gemm_workspace_bytes);
  mark_used(x, &x->a);
  mark_used(x, &x->b);
}

/* Computes C's tiles in order. Only the copy of a finished tile delays the next one. */
static void multiply_tiles(out_of_core_pipeline *x) {
  const dc__out_of_core *w = x->w;
  const dc__out_of_core_plan *s = &w->plan;
  for (int64_t j = 0; j < w->n && is_ok(x); j += s->nb) {
    for (int64_t i = 0; i < w->m && is_ok(x); i += s->mb) {
      const out_of_core_block c = {.arg = "out",
                                   .source = w->out,
                                   .memory = x->tile,
                                   .row = i,
                                   .rows = dc__min_int64(s->mb, w->m - i),
                                   .col = j,
                                   .cols = dc__min_int64(s->nb, w->n - j)};
      int64_t p = 0;
      do {
        multiply_block(x, &c, p);
        p += s->kb;
      } while (p < w->k && is_ok(x));
      if (dc__in_file(w->out)) {
        dc__event_record(x->staging->tile, x->l->device->internal_stream);
        dc__event_wait(x->staging->tile, x->staging->copies);
        write_block(x, &c);
        dc__event_record(x->staging->tile, x->staging->copies);
        dc__event_wait(x->staging->tile, x->l->device->internal_stream);
      }
    }
  }
}

/* Aligns the beginning of the memory, which has ALIGNMENT bytes to spare. */
static char *staging_align(void *memory) {
  return (char *)(((uintptr_t)memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

/* Lays out the memory as pipeline_bytes() counts it. */
static void pipeline_layout(out_of_core_pipeline *x, void *memory) {
  const dc__out_of_core *w = x->w;
  const dc__out_of_core_plan *s = &w->plan;
  size_t offset = 0;
  x->gemm_workspace = staging_align(memory);
  x->gemm_workspace_bytes = gemm_workspace_share(blocks_of(w, s));
  char *blocks = x->gemm_workspace + x->gemm_workspace_bytes;
  if (dc__in_file(w->out)) {
    x->tile = dc__linalg_suballoc(blocks, &offset, s->mb * s->nb, w->out_size);
  }
  for (int32_t i = 0; i < NUM_BUFFERS; i++) {
    x->a.buffer[i] = dc__in_file(w->a) ? dc__linalg_suballoc(blocks, &offset, s->mb * s->kb, w->in_size) : NULL;
    x->b.buffer[i] = dc__in_file(w->b) ? dc__linalg_suballoc(blocks, &offset, s->kb * s->nb, w->in_size) : NULL;
  }
}

/* On return both streams are idle, even after a failure: the next call uses the same memory. */
static dc_status run_pipeline(dc_linalg *l, const dc__out_of_core *w, void *memory) {
  out_of_core_pipeline x = {.l = l, .w = w, .staging = l->staging};
  x.a.present = (out_of_core_block){.arg = "a", .source = w->a};
  x.b.present = (out_of_core_block){.arg = "b", .source = w->b};
  x.a.used = l->staging->used[0];
  x.b.used = l->staging->used[1];
  dc__file_failure_init(&x.failure);
  pipeline_layout(&x, memory);
  multiply_tiles(&x);
  for (int32_t i = 0; i < NUM_BUFFERS; i++) {
    (void)next_stage(&x);
  }
  (void)dc__stream_sync(l->staging->copies, 0);
  DC__TRY(dc__linalg_synchronize(l));
  return dc__file_status(&x.failure, w->fn);
}

/* Runs one product without files, with as much of the budget as it can use. */
static dc_status run_in_place(dc_linalg *l, const dc__out_of_core *w, int64_t budget) {
  const dc__gemm g = dc__mat_gemm(&w->a->mat, &w->b->mat, 1, 0, &w->out->mat);
  const size_t max_bytes = DC__CUDA_GEMM_WORKSPACE_BYTES + ALIGNMENT;
  const size_t bytes = (size_t)budget < max_bytes ? (size_t)budget / ALIGNMENT * ALIGNMENT : max_bytes;
  void *memory = NULL;
  if (w->k > 0 && bytes > ALIGNMENT) {
    DC__TRY(dc__linalg_scratch(l, w->fn, bytes, &memory));
  }
  if (l->query) {
    return DC_OK;
  }
  if (w->k > 0) {
    dc__cuda_gemm(l->device->internal_stream, &g, staging_align(memory), memory != NULL ? bytes - ALIGNMENT : 0);
  } else {
    dc__stream_zero(l->device->internal_stream, w->out->mat.data, (size_t)(w->m * w->n) * w->out_size);
  }
  return dc__linalg_synchronize(l);
}

dc_status dc__out_of_core_cuda(dc_linalg *l, dc__out_of_core *w, int64_t budget, int64_t *needed) {
  void *memory;
  if (!dc__in_file(w->out) && (w->k == 0 || (!dc__in_file(w->a) && !dc__in_file(w->b)))) {
    return run_in_place(l, w, budget);
  }
  w->model = &cuda_model;
  w->shape = (dc__gemm_shape){.rows = TILE, .columns = TILE, .slice = TILE};
  DC__TRY(dc__out_of_core_choose_plan(w, budget, needed));
  DC__TRY(dc__linalg_scratch(l, w->fn, pipeline_bytes(w, &w->plan), &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  DC__TRY(staging_create(l, w->fn));
  return run_pipeline(l, w, memory);
}
