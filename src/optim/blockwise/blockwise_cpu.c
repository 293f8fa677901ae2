/* Operations on blocks, on the host. */
#include "optim/blockwise/blockwise.h"

static void blockwise_syrk_cpu(const dc__block_context *ctx, bool trans, int64_t n, int64_t k, const float *a,
                               double alpha, double beta, float *c) {
  dc__syrk(ctx->pool, ctx->scratch, trans, n, k, a, alpha, beta, c);
}

static void blockwise_gemm_cpu(const dc__block_context *ctx, const dc__gemm *g) {
  dc__gemm_on(ctx->pool, g, ctx->scratch);
}

/* In tiles that fit the first-level cache. */
static void blockwise_transpose_cpu(const dc__block_context *ctx, const float *from, int64_t rows, int64_t cols,
                                    float *to) {
  enum { TILE = 32 };
  (void)ctx;
  for (int64_t i0 = 0; i0 < rows; i0 += TILE) {
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
      for (int64_t i = i0; i < rows && i < i0 + TILE; i++) {
        for (int64_t j = j0; j < cols && j < j0 + TILE; j++) {
          to[j * rows + i] = from[i * cols + j];
        }
      }
    }
  }
}

static void blockwise_copy_cpu(const dc__block_context *ctx, float *to, const float *from, int64_t count) {
  (void)ctx;
  memcpy(to, from, (size_t)count * sizeof *to);
}

static void blockwise_scale_cpu(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, float factor) {
  const dc__side *side = &b->sides[d];
  (void)ctx;
  for (int64_t i = 0; i < side->n * side->n && side->info.status == DC_OK; i++) {
    side->matrix[i] *= factor;
  }
}

static void blockwise_adam_cpu(const dc__block_context *ctx, const dc__optim_block *b,
                               const dc__adamw_factors *factors) {
  float tile[DC__OPTIM_TILE];
  (void)ctx;
  for (int64_t from = 0; from < b->count; from += DC__OPTIM_TILE) {
    int64_t count = b->count - from < DC__OPTIM_TILE ? b->count - from : DC__OPTIM_TILE;
    const dc__update_span span = {.weight = tile,
                                  .grad = b->data + from,
                                  .state = {b->exp_avg + from, b->squares + from},
                                  .dtype = DC_FLOAT32,
                                  .grad_dtype = DC_FLOAT32,
                                  .factors = {.adamw = *factors}};
    memset(tile, 0, sizeof tile);
    dc__update_cpu(DC__UPDATE_ADAMW, &span, 0, count, 1);
    memcpy(b->data + from, tile, (size_t)count * sizeof *tile);
  }
}

static void blockwise_permute_cpu(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, int64_t inner) {
  const dc__side *side = &b->sides[d];
  float *temp = ctx->temp, *x = b->squares;
  size_t bytes = (size_t)inner * sizeof *x;
  for (int64_t from = 0; from < b->count && dc__side_is_permuted(side); from += side->n * inner) {
    for (int64_t j = 0; j < side->n; j++) {
      memcpy(temp + j * inner, x + from + side->order[j] * inner, bytes);
    }
    memcpy(x + from, temp, (size_t)side->n * bytes);
  }
}

static void blockwise_polar_cpu(const dc__block_context *ctx, const dc__optim_block *b, const dc__polar *p) {
  dc__polar one = *p;
  one.x = b->data;
  one.count = 1;
  dc__polar_cpu(ctx->pool, ctx->scratch, &one, ctx->temp);
}

static bool plan_scratch_cpu(dc__blockwise *self) {
  self->max_elements = 0;
  for (int64_t i = 0; i < self->block_count; i++) {
    const int64_t count = self->blocks[i].count;
    self->max_elements = count > self->max_elements ? count : self->max_elements;
  }
  return dc__slots_plan(&self->slots, self->head.linalg, self->block_count,
                        (size_t)self->temps * (size_t)self->max_elements * sizeof(float), &self->slots_bytes);
}

static void set_identity_cpu(const dc_linalg *l, float *a, int64_t n) {
  (void)l;
  for (int64_t i = 0; i < n; i++) {
    a[i * n + i] = 1;
  }
}

typedef struct blockwise_phase {
  dc__blockwise *self;
  dc__block_fn fn;
} blockwise_phase;

static void run_block(const blockwise_phase *p, int64_t index, dc__threadpool *pool, void *scratch) {
  dc__blockwise *self = p->self;
  const dc__optim_block *b = self->by_cost[index];
  if (self->skip[b->param]) {
    return;
  }
  int64_t slot = dc__slots_acquire(&self->slots);
  dc__block_context ctx = {.work = &dc__block_work_cpu, .pool = pool, .scratch = scratch};
  ctx.temp = dc__slots_memory(&self->slots, slot);
  ctx.temp_stride = b->count;
  p->fn(b, &self->steps[b->param], &ctx);
  dc__slots_release(&self->slots, slot);
}

static void run_small_block(void *arg, int64_t index, void *scratch) {
  const blockwise_phase *p = arg;
  run_block(p, p->self->large + index, NULL, scratch);
}

static void run_blocks_cpu(dc__blockwise *self, void *memory, dc__block_fn work) {
  blockwise_phase p = {self, work};
  dc__threadpool *pool = self->head.linalg->pool;
  size_t offset = 0;
  dc__slots_init(&self->slots, memory, &offset);
  for (int64_t i = 0; i < self->large; i++) {
    run_block(&p, i, pool, NULL);
  }
  dc__parallel_for(pool, self->block_count - self->large, run_small_block, &p);
}

const dc__block_work dc__block_work_cpu = {.syrk = blockwise_syrk_cpu,
                                           .gemm = blockwise_gemm_cpu,
                                           .transpose = blockwise_transpose_cpu,
                                           .copy = blockwise_copy_cpu,
                                           .scale = blockwise_scale_cpu,
                                           .graft_accumulate = dc__grafting_accumulate_cpu,
                                           .graft_direction = dc__grafting_direction_cpu,
                                           .graft_measure_norm = dc__grafting_norm_cpu,
                                           .graft_finish = dc__grafting_finish_cpu,
                                           .adam = blockwise_adam_cpu,
                                           .permute = blockwise_permute_cpu,
                                           .polar = blockwise_polar_cpu,
                                           .set_identity = set_identity_cpu,
                                           .plan_scratch = plan_scratch_cpu,
                                           .run = run_blocks_cpu};
