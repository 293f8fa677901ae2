/* Matrix products by packed panels and tiles. A task is a block of C. Its part of B is packed as a whole if it fits
 * scratch memory, and kept for the thread's next block of the same columns. If several threads would pack the same
 * part, all pack together first. The block is computed strip by strip of its rows: A is packed for each slice of k, the
 * tiles add to an accumulator, and the epilogue writes the strip. Reused data of a strip stays in the second-level
 * cache. */
#include "kernels/gemm/gemm.h"

#include <string.h>

#include "kernels/gemm/gemm_epilogue.h"
#include "kernels/gemm/pack.h"
#include "kernels/kernels.h"

enum {
  STEPS = 256,                       /* words in k of a slice: a panel of B stays in the first-level cache */
  STRIP = 168,                       /* rows of a strip, in whole tiles */
  MAX_M = 3 * 168,                   /* rows of a strip and of a block, if B is not packed as a whole */
  MAX_N = DC__GEMM_EPILOGUE_COLUMNS, /* columns of a block, half as many for float64 */
  MIN_SIDE = 128,                    /* the smallest part of a side when it is cut for more tasks */
  BLOCKS_EACH = 8,                   /* maximum number of blocks per thread when cut for more tasks */
  LATE_PART = 8,                     /* a late thread costs 1 / LATE_PART of a block */
  PACK_COST = 32,                    /* multiplications that take as long as packing an element */
  MAX_B_BYTES = 5 << 20,             /* bytes of B packed as a whole */
  GROUP = 256,                       /* columns of B that a thread packs at a time for all threads */
  PREFETCH_ROWS = 2,                 /* rows of C by which the epilogue prefetches ahead */
  ALIGN = 64
};

_Static_assert(DC__SCRATCH_HEADER + STRIP * STEPS * 8 + STRIP * (MAX_N * 4 + 2 * ALIGN) <= DC__GEMM_PACKED_SCRATCH,
               "A packed, and the sums, of a product with a packed B");

/* The plain tiles. */
enum { MR_PLAIN = 4, NR_PLAIN = 8 };

#define TILE_PLAIN(name, type)                                                                     \
  static void name(int64_t steps, const void *a, const void *b, void *acc, int64_t ld, bool add) { \
    const type *x = a;                                                                             \
    const type *y = b;                                                                             \
    type sum[MR_PLAIN][NR_PLAIN] = {{0}};                                                          \
    for (int64_t p = 0; p < steps; p++, x += MR_PLAIN, y += NR_PLAIN) {                            \
      for (int64_t i = 0; i < MR_PLAIN; i++) {                                                     \
        for (int64_t j = 0; j < NR_PLAIN; j++) {                                                   \
          sum[i][j] += x[i] * y[j];                                                                \
        }                                                                                          \
      }                                                                                            \
    }                                                                                              \
    type *out = acc;                                                                               \
    for (int64_t i = 0; i < MR_PLAIN; i++) {                                                       \
      for (int64_t j = 0; j < NR_PLAIN; j++) {                                                     \
        out[i * ld + j] = add ? out[i * ld + j] + sum[i][j] : sum[i][j];                           \
      }                                                                                            \
    }                                                                                              \
  }

TILE_PLAIN(tile_f32, float)
TILE_PLAIN(tile_f64, double)

/* One product, as the tasks see it. */
typedef struct gemm_plan {
  const dc__gemm *g;
  dc__tile tile;
  int32_t kind;               /* DC__TILE_* */
  int64_t steps;              /* words in k */
  bool whole;                 /* B's part of a block is packed as a whole */
  int64_t blocks_m, blocks_n; /* of one matrix */
  dc__operand a, b;
} gemm_plan;

static int64_t gemm_round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}
static int64_t div_up(int64_t x, int64_t max) {
  return x < 1 ? 1 : (x + max - 1) / max;
}

static int64_t whole_tiles(int64_t rows, const dc__tile *tile) {
  return rows / tile->mr * tile->mr;
}

/* Returns where part `index` of `parts` of a side begins, in whole tiles; parts differ by at most one tile. */
static int64_t begin_of(int64_t size, int64_t tile, int64_t parts, int64_t index) {
  int64_t begin = div_up(size, tile) * index / parts * tile;
  return begin < size ? begin : size;
}
static int64_t longest_of(int64_t size, int64_t tile, int64_t parts) {
  return div_up(div_up(size, tile), parts) * tile;
}

/* Returns the cost of a cut over all threads, in multiplications. A is packed for every block of columns. Unless B is
 * packed beforehand, every thread packs it for its columns. The last round may leave threads idle, and a thread may
 * come late. */
static double gemm_cost(const gemm_plan *p, int64_t threads, int64_t blocks_m, int64_t blocks_n) {
  const dc__gemm *g = p->g;
  const double work = (double)g->m * (double)g->n * (double)g->batch;
  const int64_t tasks = blocks_m * blocks_n * g->batch;
  const double late = (double)(div_up(tasks, threads) * threads) + (double)threads / LATE_PART;
  const int64_t times = g->packed != NULL ? 0 : p->whole && threads < blocks_m ? threads : blocks_m;
  const double packed = (double)g->m * (double)blocks_n + (double)g->n * (double)times;
  return work * late / (double)tasks + PACK_COST * packed * (double)g->batch;
}

/* Chooses the cheapest cut into blocks for the number of threads. */
static void gemm_choose_blocks(gemm_plan *p, int64_t threads) {
  const dc__gemm *g = p->g;
  int64_t max_n = p->kind == DC__TILE_F64 ? MAX_N / 2 : MAX_N;
  int64_t fit = MAX_B_BYTES / (int64_t)dc__tile_word(p->kind) / (p->steps > 0 ? p->steps : 1) / p->tile.nr * p->tile.nr;
  p->whole = g->packed != NULL || fit >= MIN_SIDE || fit >= g->n;
  const int64_t min_m = p->whole ? 1 : div_up(g->m, whole_tiles(MAX_M, &p->tile));
  const int64_t min_n = div_up(g->n, p->whole && g->packed == NULL && fit < max_n ? fit : max_n);
  const int64_t max = threads > 1 ? threads * BLOCKS_EACH / g->batch : 1;
  p->blocks_m = min_m;
  p->blocks_n = min_n;
  double min_cost = gemm_cost(p, threads, min_m, min_n);
  for (int64_t n = min_n; n == min_n || (n <= max && g->n / n >= MIN_SIDE); n++) {
    for (int64_t m = min_m + 1; m * n <= max && g->m / m >= MIN_SIDE; m++) {
      double cost = gemm_cost(p, threads, m, n);
      if (cost < min_cost) {
        min_cost = cost;
        p->blocks_m = m;
        p->blocks_n = n;
      }
    }
  }
}

static dc__tile tile_of(int32_t dtype, int32_t *kind) {
  const dc__tile *tiles = dc__active_kernels()->tile;
  const bool wide = dtype == DC_FLOAT64, pairs = dtype == DC_BFLOAT16 && tiles[DC__TILE_BF16].fn != NULL;
  const dc__tile plain = {.fn = wide ? tile_f64 : tile_f32,
                          .pack_rows = wide ? dc__pack_rows_f64 : dc__pack_rows_f32,
                          .pack_columns = wide ? dc__pack_columns_f64 : dc__pack_columns_f32,
                          .mr = MR_PLAIN,
                          .nr = NR_PLAIN};
  *kind = pairs ? DC__TILE_BF16 : wide ? DC__TILE_F64 : DC__TILE_F32;
  return tiles[*kind].fn != NULL ? tiles[*kind] : plain;
}

static gemm_plan gemm_make_plan(const dc__gemm *g, int32_t threads) {
  gemm_plan p = {.g = g};
  p.tile = tile_of(g->dtype, &p.kind);
  p.steps = div_up(g->k, dc__tile_depth(p.kind));
  p.a = (dc__operand){.data = g->a, .ld = g->lda, .dtype = g->dtype, .k_runs = !g->trans_a};
  p.b = (dc__operand){.data = g->b, .ld = g->ldb, .dtype = g->dtype, .k_runs = g->trans_b};
  gemm_choose_blocks(&p, threads);
  return p;
}

/* One task's block, and its parts of scratch memory. */
typedef struct gemm_block {
  int64_t matrix, i, j, m, n;
  int64_t across; /* n, as a multiple of the tile */
  int64_t ld;     /* of acc: more than across, so that its rows do not fall on the same lines of the cache */
  dc__operand a, b;
  char *packed_a, *acc;
  char *packed_b;         /* this block's alone; NULL if all of B is packed */
  int64_t *packed_number; /* the number of the columns of B that packed_b has */
  int64_t number;         /* the number of this block's columns */
} gemm_block;

/* Multiplies the strip's rows by a slice of k. */
static void multiply_slice(const gemm_plan *p, const gemm_block *at, const char *b, int64_t rows, int64_t steps,
                           bool add) {
  const size_t word = dc__tile_word(p->kind);
  if (p->tile.begin != NULL) {
    p->tile.begin();
  }
  for (int64_t j = 0; j < at->across; j += p->tile.nr) {
    for (int64_t i = 0; i < rows; i += p->tile.mr) {
      p->tile.fn(steps, at->packed_a + (size_t)(i * steps) * word, b + (size_t)(j * steps) * word,
                 at->acc + (size_t)(i * at->ld + j) * word, at->ld, add);
    }
  }
  if (p->tile.end != NULL) {
    p->tile.end();
  }
}

/* Runs the epilogue of the strip's rows, from row `first` of C on. */
static void gemm_epilogue_strip(const gemm_plan *p, const gemm_block *at, int64_t first, int64_t rows) {
  const dc__gemm *g = p->g;
  void *c = dc__at(g->c, g->out_dtype, at->matrix * g->stride_c);
  void *aux = g->aux != NULL ? dc__at(g->aux, g->out_dtype, at->matrix * g->stride_c) : NULL;
  for (int64_t i = 0; i < rows; i++) {
    if (i + PREFETCH_ROWS < rows) {
      const int64_t later = (first + i + PREFETCH_ROWS) * g->ldc + at->j;
      dc__prefetch(dc__at(c, g->out_dtype, later), (size_t)at->n * dc_dtype_size(g->out_dtype));
      if (aux != NULL) {
        dc__prefetch(dc__at(aux, g->out_dtype, later), (size_t)at->n * dc_dtype_size(g->out_dtype));
      }
    }
    void *sums = at->acc + (size_t)(i * at->ld) * dc__tile_word(p->kind);
    if (p->kind == DC__TILE_F64) {
      dc__gemm_epilogue_f64(g, c, sums, first + i, at->j, at->n);
    } else {
      dc__gemm_epilogue_f32(g, c, aux, sums, first + i, at->j, at->n);
    }
  }
}

/* Returns the block's part of B in a slice of k, packed. */
static const char *b_slice(const gemm_plan *p, const gemm_block *at, int64_t begin, int64_t k, int64_t part,
                           int64_t steps) {
  const size_t word = dc__tile_word(p->kind);
  if (at->packed_b == NULL) {
    return (const char *)p->g->packed + (size_t)(begin * gemm_round_up(p->g->n, p->tile.nr) + at->j * steps) * word;
  }
  char *b = at->packed_b + (p->whole ? (size_t)(begin * at->across) * word : 0);
  if (*at->packed_number != at->number) {
    dc__pack(b, &p->tile, p->kind, p->tile.nr, &at->b, at->j, at->n, k, part);
  }
  return b;
}

/* Computes `rows` rows of the block from its row `first` on. */
static void gemm_run_strip(const gemm_plan *p, const gemm_block *at, int64_t first, int64_t rows) {
  const int64_t depth = dc__tile_depth(p->kind);
  const size_t word = dc__tile_word(p->kind);
  if (p->g->k == 0) {
    memset(at->acc, 0, (size_t)(rows * at->ld) * word);
  }
  for (int64_t begin = 0; begin * depth < p->g->k; begin += STEPS) {
    const int64_t k = begin * depth;
    const int64_t part = p->g->k - k < STEPS * depth ? p->g->k - k : STEPS * depth;
    const int64_t steps = (part + depth - 1) / depth;
    const char *b = b_slice(p, at, begin, k, part, steps);
    dc__pack_a(at->packed_a, &p->tile, p->kind, &at->a, at->i + first, rows, k, part);
    multiply_slice(p, at, b, rows, steps, begin > 0);
  }
  *at->packed_number = p->whole ? at->number : 0;
  gemm_epilogue_strip(p, at, at->i + first, rows);
}

/* Scratch memory has the number of the columns whose B is packed, or 0; then A, the sums and B. */
static void gemm_run_block(const gemm_plan *p, int64_t index, char *scratch) {
  const dc__gemm *g = p->g;
  const int64_t word = (int64_t)dc__tile_word(p->kind);
  /* If B is packed beforehand, blocks of the same rows follow each other. */
  const int64_t columns = g->packed != NULL ? index % p->blocks_n : index / p->blocks_m;
  const int64_t rows = g->packed != NULL ? index / p->blocks_n : index % p->blocks_m;
  gemm_block at = {.matrix = columns / p->blocks_n, .a = p->a, .b = p->b, .packed_number = (int64_t *)(void *)scratch};
  at.number = columns + 1;
  at.i = begin_of(g->m, p->tile.mr, p->blocks_m, rows);
  at.j = begin_of(g->n, p->tile.nr, p->blocks_n, columns % p->blocks_n);
  at.m = begin_of(g->m, p->tile.mr, p->blocks_m, rows + 1) - at.i;
  at.n = begin_of(g->n, p->tile.nr, p->blocks_n, columns % p->blocks_n + 1) - at.j;
  if (at.m <= 0 || at.n <= 0) {
    return;
  }
  const int64_t strip = whole_tiles(p->whole ? STRIP : MAX_M, &p->tile);
  const int64_t slice = p->steps < STEPS ? p->steps : STEPS;
  const int64_t widest = longest_of(g->n, p->tile.nr, p->blocks_n);
  at.across = gemm_round_up(at.n, p->tile.nr);
  at.ld = gemm_round_up(at.across, ALIGN / word) + ALIGN / word;
  at.packed_a = scratch + DC__SCRATCH_HEADER;
  at.acc = at.packed_a + gemm_round_up(strip * slice * word, ALIGN);
  at.a.data = dc__const_at(at.a.data, at.a.dtype, at.matrix * g->stride_a);
  if (g->packed == NULL) {
    at.packed_b = at.acc + strip * (widest + 2 * ALIGN / word) * word;
    at.b.data = dc__const_at(at.b.data, at.b.dtype, at.matrix * g->stride_b);
  }
  const int64_t strips = div_up(at.m, strip);
  for (int64_t i = 0; i < strips; i++) {
    const int64_t first = begin_of(at.m, p->tile.mr, strips, i);
    gemm_run_strip(p, &at, first, begin_of(at.m, p->tile.mr, strips, i + 1) - first);
  }
}

static void run_task(void *arg, int64_t index, void *scratch) {
  gemm_run_block(arg, index, scratch);
}

static void run_blocks(dc__threadpool *pool, const dc__gemm *gemm, void *scratch) {
  gemm_plan p = gemm_make_plan(gemm, dc__threadpool_threads(pool));
  /* A product's operations are cheap: at least eight run at a time. */
  const int64_t elements = div_up(gemm->m, p.blocks_m) * div_up(gemm->n, p.blocks_n);
  int64_t cost = gemm->k < (1 << 20) ? elements * gemm->k / 8 : INT64_MAX;
  dc__parallel_for_scratch(pool, scratch, p.blocks_m * p.blocks_n * gemm->batch, cost, run_task, &p);
}

/* ---- B packed beforehand: by the caller, or by all threads for all of them ---- */

typedef struct gemm_packing {
  const dc__gemm *g;
  dc__tile tile;
  int32_t kind;
  int64_t slice, groups; /* elements in k of a piece; pieces of a slice */
  char *packed;
} gemm_packing;

static gemm_packing packing_of(const dc__gemm *g, int64_t groups, void *packed) {
  gemm_packing p = {.g = g, .groups = groups, .packed = packed};
  p.tile = tile_of(g->dtype, &p.kind);
  p.slice = STEPS * dc__tile_depth(p.kind);
  return p;
}

static int64_t pieces_of(const gemm_packing *p) {
  return div_up(p->g->k, p->slice) * p->groups;
}

static void pack_piece(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  const gemm_packing *p = arg;
  const dc__gemm *g = p->g;
  const int64_t k = index / p->groups * p->slice;
  const int64_t j = begin_of(g->n, p->tile.nr, p->groups, index % p->groups);
  const int64_t columns = begin_of(g->n, p->tile.nr, p->groups, index % p->groups + 1) - j;
  const int64_t part = g->k - k < p->slice ? g->k - k : p->slice;
  const int64_t steps = (part + dc__tile_depth(p->kind) - 1) / dc__tile_depth(p->kind);
  const dc__operand b = {.data = g->b, .ld = g->ldb, .dtype = g->dtype, .k_runs = g->trans_b};
  char *to = p->packed + dc__gemm_packed_bytes(g->dtype, g->n, k) + (size_t)(j * steps) * dc__tile_word(p->kind);
  dc__pack(to, &p->tile, p->kind, p->tile.nr, &b, j, columns, k, part);
}

_Static_assert(DC__GEMM_PACKED_SCRATCH + MAX_B_BYTES <= DC__SCRATCH_BYTES, "a shared B beside its caller's own work");

/* Packs as many columns of B at a time as fit the caller's scratch memory beside its own work. */
static void run_shared(dc__threadpool *pool, const dc__gemm *gemm, int64_t columns, char *scratch) {
  char *packed = scratch + DC__GEMM_PACKED_SCRATCH;
  const int64_t tile = dc__gemm_shape_of(gemm->dtype).columns;
  const int64_t parts = div_up(gemm->n, columns);
  for (int64_t i = 0; i < parts; i++) {
    const int64_t j = begin_of(gemm->n, tile, parts, i);
    dc__gemm g = *gemm;
    g.n = begin_of(gemm->n, tile, parts, i + 1) - j;
    g.b = dc__const_at(g.b, g.dtype, g.trans_b ? j * g.ldb : j);
    g.c = dc__at(g.c, g.out_dtype, j);
    g.aux = g.aux != NULL ? dc__at(g.aux, g.out_dtype, j) : NULL;
    g.bias = g.bias != NULL ? dc__const_at(g.bias, g.dtype, j) : NULL;
    gemm_packing task = packing_of(&g, div_up(g.n, GROUP), packed);
    dc__parallel_for_scratch(pool, scratch, pieces_of(&task), GROUP * task.slice, pack_piece, &task);
    g.packed = packed;
    run_blocks(pool, &g, scratch);
  }
}

/* Returns how many columns of B are packed for all threads at a time. 0: each thread packs for itself, since there are
 * enough matrices, only one block of rows, or a long k. */
static int64_t shared_columns(dc__threadpool *pool, const dc__gemm *g) {
  if (dc__threadpool_threads(pool) == 1 || g->batch > 1 || g->packed != NULL || g->m < 2 * MIN_SIDE || g->k == 0) {
    return 0;
  }
  int32_t kind;
  const dc__tile tile = tile_of(g->dtype, &kind);
  const int64_t steps = div_up(g->k, dc__tile_depth(kind));
  const int64_t columns = MAX_B_BYTES / (int64_t)dc__tile_word(kind) / steps / tile.nr * tile.nr;
  return columns >= MIN_SIDE || columns >= g->n ? columns : 0;
}

void dc__gemm_run(dc__threadpool *pool, const dc__gemm *gemm) {
  void *scratch = dc__scratch_acquire(pool);
  const int64_t columns = shared_columns(pool, gemm);
  if (columns > 0) {
    run_shared(pool, gemm, columns, scratch);
  } else {
    run_blocks(pool, gemm, scratch);
  }
  dc__scratch_release(pool, scratch);
}

void dc__gemm_serial(const dc__gemm *gemm, void *scratch) {
  gemm_plan p = gemm_make_plan(gemm, 1);
  memset(scratch, 0, DC__SCRATCH_HEADER);
  for (int64_t index = 0; index < p.blocks_m * p.blocks_n * gemm->batch; index++) {
    gemm_run_block(&p, index, scratch);
  }
}

void dc__gemm_on(dc__threadpool *pool, const dc__gemm *gemm, void *scratch) {
  if (pool == NULL) {
    dc__gemm_serial(gemm, scratch);
  } else {
    dc__gemm_run(pool, gemm);
  }
}

dc__gemm_shape dc__gemm_shape_of(int32_t dtype) {
  int32_t kind;
  const dc__tile tile = tile_of(dtype, &kind);
  return (dc__gemm_shape){tile.mr, tile.nr, STEPS * dc__tile_depth(kind)};
}

size_t dc__gemm_packed_bytes(int32_t dtype, int64_t n, int64_t k) {
  int32_t kind;
  const dc__tile tile = tile_of(dtype, &kind);
  const int64_t steps = k / dc__tile_depth(kind) + k % dc__tile_depth(kind);
  size_t bytes;
  return __builtin_mul_overflow((size_t)gemm_round_up(n, tile.nr), (size_t)steps, &bytes) ||
                 __builtin_mul_overflow(bytes, dc__tile_word(kind), &bytes)
             ? SIZE_MAX
             : bytes;
}

void dc__gemm_pack(const dc__gemm *g, void *packed) {
  gemm_packing p = packing_of(g, 1, packed);
  for (int64_t i = 0; g->k > 0 && i < pieces_of(&p); i++) {
    pack_piece(&p, i, NULL);
  }
}
