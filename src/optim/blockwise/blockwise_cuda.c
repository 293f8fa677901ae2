/* Operations on blocks, on a device: products and kernels, queued on the step's stream. Norms stay on the device, so
 * nothing waits. */
#include "kernels/cuda/kernels_cuda.h"
#include "optim/blockwise/blockwise.h"

static dc_stream *context_stream(const dc__block_context *ctx) {
  return ctx->linalg->stream;
}

/* Runs the product for all blocks of the batch, with the group's stride. Their number does not change the bits. */
static void blockwise_gemm_cuda(const dc__block_context *ctx, const dc__gemm *g) {
  dc__gemm all = *g;
  all.batch = ctx->count;
  all.batch_invariant = true;
  all.stride_a = dc__block_group_stride(g->m * g->k);
  all.stride_b = dc__block_group_stride(g->k * g->n);
  all.stride_c = dc__block_group_stride(g->m * g->n);
  dc__linalg_gemm(ctx->linalg, &all, ctx->gemm_workspace);
}

static void blockwise_syrk_cuda(const dc__block_context *ctx, bool trans, int64_t n, int64_t k, const float *a,
                                double alpha, double beta, float *c) {
  const dc__gemm g = dc__syrk_gemm(trans, n, k, a, alpha, beta, c);
  blockwise_gemm_cuda(ctx, &g);
}

static dc__cuda_matrices batch_view(const dc__block_context *ctx, const float *data, int64_t rows, int64_t cols) {
  dc__cuda_matrices m = {.data = (void *)(uintptr_t)data, .row_stride = cols, .col_stride = 1, .count = ctx->count};
  m.rows = rows;
  m.cols = cols;
  m.batch_stride = dc__block_group_stride(rows * cols);
  return m;
}

static void blockwise_transpose_cuda(const dc__block_context *ctx, const float *from, int64_t rows, int64_t cols,
                                     float *to) {
  dc__cuda_matrices transposed = batch_view(ctx, from, cols, rows);
  transposed.row_stride = 1;
  transposed.col_stride = cols;
  dc__cuda_load_uniform(context_stream(ctx), transposed, batch_view(ctx, to, cols, rows), UINT32_MAX, 1);
}

static void blockwise_copy_cuda(const dc__block_context *ctx, float *to, const float *from, int64_t count) {
  const int64_t all = (ctx->count - 1) * dc__block_group_stride(count) + count;
  dc__stream_copy(context_stream(ctx), to, from, (size_t)all * sizeof *to);
}

static void blockwise_scale_cuda(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, float factor) {
  const dc__side *side = &b->sides[d];
  const dc__cuda_matrices a = batch_view(ctx, side->matrix, side->n, side->n);
  uint32_t good = 0;
  for (int32_t i = 0; i < ctx->count; i++) {
    good |= (uint32_t)(ctx->blocks[i]->sides[d].info.status == DC_OK) << i;
  }
  dc__cuda_load_uniform(context_stream(ctx), a, a, good, (double)factor);
}

/* ---- Shampoo's ---- */

static dc__cuda_graft_args graft_args(const dc__block_context *ctx, const dc__graft *g) {
  return (dc__cuda_graft_args){.data = g->data,
                               .exp_avg = g->exp_avg,
                               .squares = g->squares,
                               .momentum = g->momentum,
                               .to = g->data,
                               .found = ctx->found,
                               .count = g->count,
                               .stride = dc__block_group_stride(g->count),
                               .batch = ctx->count,
                               .factors = g->factors};
}

static void graft_accumulate_cuda(const dc__block_context *ctx, const dc__graft *g) {
  const dc__cuda_graft_args args = graft_args(ctx, g);
  dc__cuda_graft_update(context_stream(ctx), &args);
}

static void graft_direction_cuda(const dc__block_context *ctx, const dc__graft *g) {
  const dc__cuda_graft_args args = graft_args(ctx, g);
  dc__cuda_graft_direction(context_stream(ctx), &args);
}

/* Writes the squared norms of x to the first or the second half of ctx->lengths. */
static void reduce_squares(const dc__block_context *ctx, const dc__graft *g, const float *x, int32_t which) {
  const dc__cuda_matrix_norm_args args = {.from = batch_view(ctx, x, g->rows, g->count / g->rows),
                                          .sums = ctx->sums,
                                          .reports = ctx->lengths + which * ctx->count,
                                          .squares = 1};
  dc__cuda_matrix_norm(context_stream(ctx), &args);
}

static void graft_measure_norm_cuda(dc__block_context *ctx, const dc__graft *g) {
  dc__cuda_graft_args args = graft_args(ctx, g);
  args.to = ctx->temp;
  dc__cuda_graft_direction(context_stream(ctx), &args);
  reduce_squares(ctx, g, args.to, 0);
}

static void graft_finish_cuda(const dc__block_context *ctx, const dc__graft *g, bool scaled) {
  dc__cuda_graft_args args = graft_args(ctx, g);
  if (scaled) {
    reduce_squares(ctx, g, g->data, 1);
    args.lengths = ctx->lengths;
  }
  dc__cuda_graft_finish(context_stream(ctx), &args);
}

/* ---- SOAP's ---- */

static void blockwise_adam_cuda(const dc__block_context *ctx, const dc__optim_block *b,
                                const dc__adamw_factors *factors) {
  const int64_t step = dc__block_group_stride(b->count);
  dc__update_batch batch = {.grad_scale = 1};
  dc__stream_zero(context_stream(ctx), ctx->temp, (size_t)(ctx->count * step) * sizeof *ctx->temp);
  for (int32_t i = 0; i < ctx->count; i++) {
    batch.spans[batch.spans_used++] = (dc__update_span){.weight = ctx->temp + i * step,
                                                        .grad = b->data + i * step,
                                                        .state = {b->exp_avg + i * step, b->squares + i * step},
                                                        .count = b->count,
                                                        .dtype = DC_FLOAT32,
                                                        .grad_dtype = DC_FLOAT32,
                                                        .factors = {.adamw = *factors}};
    if (batch.spans_used == DC__UPDATE_SPANS || i == ctx->count - 1) {
      dc__update_cuda(context_stream(ctx), DC__UPDATE_ADAMW, &batch);
      batch.spans_used = 0;
    }
  }
  blockwise_copy_cuda(ctx, b->data, ctx->temp, b->count);
}

/* The device decides whether an order is the identity. */
static void blockwise_permute_cuda(const dc__block_context *ctx, const dc__optim_block *b, int32_t d, int64_t inner) {
  dc__cuda_permute_args args = {
      .x = b->squares, .to = ctx->temp, .n = b->sides[d].n, .inner = inner, .count = b->count};
  args.stride = dc__block_group_stride(b->count);
  args.batch = ctx->count;
  for (int32_t i = 0; i < ctx->count; i++) {
    args.orders[i] = ctx->blocks[i]->sides[d].order;
  }
  dc__cuda_permute(context_stream(ctx), &args);
  blockwise_copy_cuda(ctx, b->squares, ctx->temp, b->count);
}

/* ---- Muon's ---- */

static void blockwise_polar_cuda(const dc__block_context *ctx, const dc__optim_block *b, const dc__polar *p) {
  dc__polar all = *p;
  all.x = b->data;
  all.stride = dc__block_group_stride(b->count);
  all.count = ctx->count;
  dc__polar_cuda(ctx->linalg, &all, ctx->temp, ctx->gemm_workspace, ctx->sums, ctx->lengths);
}

static void set_identity_cuda(const dc_linalg *l, float *a, int64_t n) {
  const dc__cuda_affine_args args = {.from = a, .to = a, .rows = n, .cols = n, .count = 1, .shift = {1}};
  dc__cuda_affine(l->device->internal_stream, &args);
}

/* ---- contexts ---- */

static bool plan_scratch_cuda(dc__blockwise *self) {
  dc__block_group_sort(self);
  return dc__linalg_add_gemm_workspace(&self->slots_bytes, self->head.linalg) &&
         dc__linalg_add_bytes(&self->slots_bytes, self->max_elements, (size_t)(self->temps + 1) * sizeof(float)) &&
         dc__linalg_add_bytes(&self->slots_bytes, self->max_rows, sizeof(double)) &&
         dc__linalg_add_bytes(&self->slots_bytes, 2 * DC__CUDA_BATCH_SLICE, sizeof(dc__cuda_matrix_stats));
}

dc__block_context dc__block_context_cuda(dc_linalg *l, void *memory, int64_t elements, int32_t temps, int64_t rows) {
  dc__block_context ctx = {.work = &dc__block_work_cuda, .linalg = l};
  size_t offset = 0;
  ctx.gemm_workspace = dc__linalg_gemm_workspace(l, memory, &offset);
  ctx.temp = dc__linalg_suballoc(memory, &offset, elements, (size_t)(temps + 1) * sizeof(float));
  ctx.temp_stride = elements;
  ctx.stack = ctx.temp + temps * elements;
  ctx.sums = dc__linalg_suballoc(memory, &offset, rows, sizeof(double));
  ctx.lengths = dc__linalg_suballoc(memory, &offset, 2 * DC__CUDA_BATCH_SLICE, sizeof(dc__cuda_matrix_stats));
  return ctx;
}

const dc__block_work dc__block_work_cuda = {.syrk = blockwise_syrk_cuda,
                                            .gemm = blockwise_gemm_cuda,
                                            .transpose = blockwise_transpose_cuda,
                                            .copy = blockwise_copy_cuda,
                                            .scale = blockwise_scale_cuda,
                                            .graft_accumulate = graft_accumulate_cuda,
                                            .graft_direction = graft_direction_cuda,
                                            .graft_measure_norm = graft_measure_norm_cuda,
                                            .graft_finish = graft_finish_cuda,
                                            .adam = blockwise_adam_cuda,
                                            .permute = blockwise_permute_cuda,
                                            .polar = blockwise_polar_cuda,
                                            .set_identity = set_identity_cuda,
                                            .plan_scratch = plan_scratch_cuda,
                                            .run = dc__block_group_run};
