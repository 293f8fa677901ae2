/* Matrix products by packed panels and tiles. A task is a block of C: for each slice of k both operands are packed,
 * the tiles add to an accumulator in scratch memory, and at the end the epilogue writes C. */
#include "kernels/gemm.h"

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/pack.h"

enum {
  STEPS = 256,     /* words in k of a slice: a panel of the narrow operand stays in the first-level cache */
  MOST_M = 518,    /* rows of a block: its slice of A stays in the second-level cache */
  MOST_N = 1024,   /* columns of a block, half as many for float64 */
  LEAST = 128,     /* a side is not cut into less than this for the sake of more tasks */
  BLOCKS_EACH = 2, /* blocks that a thread should have, so that a late one does not cost much */
  ALIGN = 64
};

/* The plain tiles. */
enum { MR_PLAIN = 4, NR_PLAIN = 8 };

#define TILE_PLAIN(name, type)                                               \
  static void name(int64_t steps, const void *a, const void *b, void *acc) { \
    const type *x = a;                                                       \
    const type *y = b;                                                       \
    type sum[MR_PLAIN][NR_PLAIN] = {{0}};                                    \
    for (int64_t p = 0; p < steps; p++, x += MR_PLAIN, y += NR_PLAIN) {      \
      for (int64_t i = 0; i < MR_PLAIN; i++) {                               \
        for (int64_t j = 0; j < NR_PLAIN; j++) {                             \
          sum[i][j] += x[i] * y[j];                                          \
        }                                                                    \
      }                                                                      \
    }                                                                        \
    type *out = acc;                                                         \
    for (int64_t i = 0; i < MR_PLAIN; i++) {                                 \
      for (int64_t j = 0; j < NR_PLAIN; j++) {                               \
        out[i * NR_PLAIN + j] += sum[i][j];                                  \
      }                                                                      \
    }                                                                        \
  }

TILE_PLAIN(tile_f32, float)
TILE_PLAIN(tile_f64, double)

/* One product, as the tasks see it. */
typedef struct plan {
  const dc__gemm *g;
  dc__tile tile;
  int32_t kind;               /* DC__TILE_* */
  int64_t block_m, block_n;   /* multiples of the tile */
  int64_t blocks_m, blocks_n; /* of one matrix */
  dc__operand a, b;
} plan;

static int64_t up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}
static int64_t cuts(int64_t x, int64_t most) {
  return x < 1 ? 1 : (x + most - 1) / most;
}

/* The blocks: few, so that little is packed twice, but enough for the threads. */
static void cut(plan *p, int32_t threads) {
  int64_t most_n = p->kind == DC__TILE_F64 ? MOST_N / 2 : MOST_N;
  p->blocks_m = cuts(p->g->m, MOST_M / p->tile.mr * p->tile.mr);
  p->blocks_n = cuts(p->g->n, most_n);
  while (threads > 1) {
    int64_t tasks = p->blocks_m * p->blocks_n * p->g->batch;
    if (tasks >= (int64_t)threads * BLOCKS_EACH && (tasks % threads == 0 || tasks > 8 * (int64_t)threads)) {
      break;
    }
    bool wide = p->g->n / p->blocks_n >= p->g->m / p->blocks_m;
    int64_t *side = wide ? &p->blocks_n : &p->blocks_m;
    if ((wide ? p->g->n : p->g->m) / (*side + 1) < LEAST) {
      break;
    }
    ++*side;
  }
  p->block_m = up((p->g->m + p->blocks_m - 1) / p->blocks_m, p->tile.mr);
  p->block_n = up((p->g->n + p->blocks_n - 1) / p->blocks_n, p->tile.nr);
}

static plan make_plan(const dc__gemm *g, int32_t threads) {
  const dc__kernels *table = dc__kernels_table();
  plan p = {.g = g};
  p.kind = g->dtype == DC_FLOAT64 ? DC__TILE_F64 : DC__TILE_F32;
  if (g->dtype == DC_BFLOAT16 && table->tile[DC__TILE_BF16].fn != NULL) {
    p.kind = DC__TILE_BF16;
  }
  p.tile = table->tile[p.kind];
  if (p.tile.fn == NULL) {
    p.tile = (dc__tile){p.kind == DC__TILE_F64 ? tile_f64 : tile_f32, MR_PLAIN, NR_PLAIN};
  }
  p.a = (dc__operand){g->a, g->lda, g->dtype, !g->trans_a};
  p.b = (dc__operand){g->b, g->ldb, g->dtype, g->trans_b};
  cut(&p, threads);
  return p;
}

static void load_row(float *row, const void *src, int32_t dtype, int64_t i, int64_t count) {
  dc__cast(row, DC_FLOAT32, dc__const_at(src, dtype, i), dtype, count);
}

/* Row i of C from column j on: `count` sums t in float32. */
static void finish_f32(const dc__gemm *g, void *c, void *aux, float *t, int64_t i, int64_t j, int64_t count) {
  int64_t at = i * g->ldc + j;
  float row[MOST_N];
  if (g->alpha != 1) {
    for (int64_t x = 0; x < count; x++) {
      t[x] *= (float)g->alpha;
    }
  }
  if (g->beta != 0) {
    load_row(row, c, g->out_dtype, at, count);
    for (int64_t x = 0; x < count; x++) {
      t[x] += (float)g->beta * row[x];
    }
  }
  if (g->bias != NULL && (g->epilogue == DC__EPILOGUE_BIAS || g->epilogue == DC__EPILOGUE_GELU)) {
    load_row(row, g->bias, g->dtype, j, count);
    for (int64_t x = 0; x < count; x++) {
      t[x] += row[x];
    }
  }
  if (g->epilogue == DC__EPILOGUE_GELU) {
    char rounded[MOST_N * sizeof(float)];
    void *kept = aux != NULL ? dc__at(aux, g->out_dtype, at) : rounded;
    dc__cast(kept, g->out_dtype, t, DC_FLOAT32, count);
    load_row(t, kept, g->out_dtype, 0, count);
    dc__gelu(t, t, count, g->gelu);
  } else if (g->epilogue == DC__EPILOGUE_GELU_BACK) {
    load_row(row, aux, g->out_dtype, at, count);
    dc__gelu_back(t, row, count, g->gelu);
  }
  dc__cast(dc__at(c, g->out_dtype, at), g->out_dtype, t, DC_FLOAT32, count);
}

static void finish_f64(const dc__gemm *g, double *c, const double *t, int64_t i, int64_t j, int64_t count) {
  double *out = c + i * g->ldc + j;
  const double *bias = g->epilogue == DC__EPILOGUE_BIAS ? g->bias : NULL;
  for (int64_t x = 0; x < count; x++) {
    double sum = g->alpha * t[x] + (g->beta != 0 ? g->beta * out[x] : 0);
    out[x] = bias != NULL ? sum + bias[j + x] : sum;
  }
}

/* What one task computes, and where in scratch memory. */
typedef struct block {
  int64_t matrix, i, j, m, n; /* m and n: multiples of the tile */
  char *a, *b, *acc;          /* acc: tile after tile, along its rows */
} block;

static void multiply_slice(const plan *p, const block *at, int64_t steps) {
  size_t word = dc__tile_word(p->kind);
  size_t tile_bytes = (size_t)(p->tile.mr * p->tile.nr) * word;
  size_t strip = tile_bytes * (size_t)(at->n / p->tile.nr);
  for (int64_t j = 0; j < at->n; j += p->tile.nr) {
    char *acc = at->acc + (size_t)(j / p->tile.nr) * tile_bytes;
    for (int64_t i = 0; i < at->m; i += p->tile.mr, acc += strip) {
      p->tile.fn(steps, at->a + (size_t)(i * steps) * word, at->b + (size_t)(j * steps) * word, acc);
    }
  }
}

/* Rows of C from the accumulators: a row's pieces are brought together first, so that the epilogue has long loops. */
static void finish_block(const plan *p, const block *at, int64_t m, int64_t n) {
  const dc__gemm *g = p->g;
  void *c = dc__at(g->c, g->out_dtype, at->matrix * g->stride_c);
  void *aux = g->aux != NULL ? dc__at(g->aux, g->out_dtype, at->matrix * g->stride_c) : NULL;
  size_t piece = (size_t)p->tile.nr * dc__tile_word(p->kind);
  size_t tile = piece * (size_t)p->tile.mr;
  int64_t across = at->n / p->tile.nr;
  union {
    float f32[MOST_N];
    double f64[MOST_N / 2];
  } row;
  for (int64_t i = 0; i < m; i++) {
    const char *from = at->acc + (size_t)(i / p->tile.mr * across) * tile + (size_t)(i % p->tile.mr) * piece;
    for (int64_t x = 0; x < across; x++) {
      memcpy((char *)&row + (size_t)x * piece, from + (size_t)x * tile, piece);
    }
    if (p->kind == DC__TILE_F64) {
      finish_f64(g, c, row.f64, at->i + i, at->j, n);
    } else {
      finish_f32(g, c, aux, row.f32, at->i + i, at->j, n);
    }
  }
}

static void run_block(const plan *p, int64_t index, char *scratch) {
  const dc__gemm *g = p->g;
  int64_t i = index % p->blocks_m * p->block_m;
  int64_t j = index / p->blocks_m % p->blocks_n * p->block_n;
  int64_t m = g->m - i < p->block_m ? g->m - i : p->block_m;
  int64_t n = g->n - j < p->block_n ? g->n - j : p->block_n;
  if (m <= 0 || n <= 0) {
    return;
  }
  size_t word = dc__tile_word(p->kind);
  block at = {.matrix = index / (p->blocks_m * p->blocks_n), .i = i, .j = j};
  at.m = up(m, p->tile.mr);
  at.n = up(n, p->tile.nr);
  at.a = scratch;
  at.b = at.a + up(at.m * STEPS * (int64_t)word, ALIGN);
  at.acc = at.b + up(at.n * STEPS * (int64_t)word, ALIGN);
  memset(at.acc, 0, (size_t)(at.m * at.n) * word);
  dc__operand a = p->a;
  dc__operand b = p->b;
  a.data = dc__const_at(a.data, a.dtype, at.matrix * g->stride_a);
  b.data = dc__const_at(b.data, b.dtype, at.matrix * g->stride_b);
  int64_t depth = STEPS * dc__tile_depth(p->kind);
  for (int64_t k = 0; k < g->k; k += depth) {
    int64_t part = g->k - k < depth ? g->k - k : depth;
    dc__pack(at.a, p->kind, p->tile.mr, &a, i, m, k, part);
    dc__pack(at.b, p->kind, p->tile.nr, &b, j, n, k, part);
    multiply_slice(p, &at, (part + dc__tile_depth(p->kind) - 1) / dc__tile_depth(p->kind));
  }
  finish_block(p, &at, m, n);
}

static void run_task(void *arg, int64_t index, void *scratch) {
  run_block(arg, index, scratch);
}

void dc__gemm_run(dc__pool *pool, const dc__gemm *gemm) {
  plan p = make_plan(gemm, dc__pool_threads(pool));
  /* A product's operations are cheap: eight at a time, and more. */
  int64_t cost = gemm->k < (1 << 20) ? p.block_m * p.block_n * gemm->k / 8 : INT64_MAX;
  dc__parallel_sized(pool, p.blocks_m * p.blocks_n * gemm->batch, cost, run_task, &p);
}

void dc__gemm_serial(const dc__gemm *gemm, void *scratch) {
  plan p = make_plan(gemm, 1);
  for (int64_t index = 0; index < p.blocks_m * p.blocks_n * gemm->batch; index++) {
    run_block(&p, index, scratch);
  }
}
