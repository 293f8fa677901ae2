/* A block and its sides' matrices. A block is viewed as [n, rest], its first dimension and all others. Transposed to
 * [rest, n], it has the next dimension first. A product with a matrix transposes too, so after one product per
 * dimension the layout is the original one. */
#include "optim/blockwise/blockwise.h"

void dc__block_update_factors(const dc__optim_block *b, double beta, double alpha, const dc__block_context *ctx) {
  const float *transposed = b->data;
  for (int32_t d = 0; d < b->order; d++) {
    const dc__side *side = &b->sides[d];
    int64_t other_elements = b->count / side->n;
    bool last = d > 0 && d == b->order - 1; /* the last dimension is the columns */
    if (side->factor != NULL) {
      ctx->work->syrk(ctx, last, side->n, other_elements, last ? b->data : transposed, alpha, beta, side->factor);
    }
    if (d + 2 < b->order) {
      float *next = ctx->temp + (d % 2) * ctx->temp_stride;
      ctx->work->transpose(ctx, transposed, side->n, other_elements, next);
      transposed = next;
    }
  }
}

/* to [rest, n] = from [n, rest]^T times the side's matrix, or its transpose. */
static void multiply_side(const dc__side *side, int64_t other_elements, const float *from, bool back,
                          const dc__block_context *ctx, float *to) {
  const dc__gemm g = dc__gemm_dense(DC_FLOAT32, true, back, other_elements, side->n, side->n, from, side->matrix, to);
  ctx->work->gemm(ctx, &g);
}

void dc__block_multiply_sides(const dc__optim_block *b, float *x, bool back, const dc__block_context *ctx) {
  float *from = x;
  float *to = ctx->temp;
  bool any = false;
  for (int32_t d = 0; d < b->order; d++) {
    any = any || b->sides[d].factor != NULL;
  }
  for (int32_t d = 0; d < b->order && any; d++) {
    int64_t other_elements = b->count / b->sides[d].n;
    if (b->sides[d].factor != NULL) {
      multiply_side(&b->sides[d], other_elements, from, back, ctx, to);
    } else {
      ctx->work->transpose(ctx, from, b->sides[d].n, other_elements, to);
    }
    float *swap = from;
    from = to;
    to = swap;
  }
  if (from != x) {
    ctx->work->copy(ctx, x, from, b->count);
  }
}

bool dc__side_is_permuted(const dc__side *side) {
  bool permutes = false;
  for (int64_t j = 0; j < side->n && side->info.status == DC_OK; j++) {
    permutes = permutes || side->order[j] != j;
  }
  return permutes;
}

dc__mat dc__side_mat(void *data, int32_t dtype, int64_t n) {
  return (dc__mat){.data = data, .dtype = dtype, .batch = 1, .rows = n, .cols = n, .row_stride = n, .col_stride = 1};
}
