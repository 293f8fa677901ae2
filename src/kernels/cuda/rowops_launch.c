/* The layer's rows and its matrix products in stream order, on devices that have kernels of their own. */
#include <string.h>

#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/gemm/gemm.h"

static void rowops_launch(dc_stream *stream, int32_t kernel, int64_t blocks, int64_t blocks_y, int64_t threads,
                          const void *args, size_t bytes) {
  enum { MAX_BLOCKS = 1 << 20 };
  stream->device->ops->stream_launch(stream,
                                     &(dc__launch){.kernel = kernel,
                                                   .blocks = (uint32_t)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS),
                                                   .blocks_y = (uint32_t)blocks_y,
                                                   .threads = (uint32_t)threads,
                                                   .args = args,
                                                   .bytes = bytes});
}

/* Of a block that has a row at a time, a thread 8 of its columns. */
static int64_t row_warps(int64_t columns) {
  const int64_t warps = (columns + 255) / 256;
  return warps < DC__CUDA_ROW_THREADS / 32 ? warps : DC__CUDA_ROW_THREADS / 32;
}

static void launch_rows(dc_stream *stream, int32_t kernel, int64_t rows, int64_t columns, const void *args,
                        size_t bytes) {
  rowops_launch(stream, kernel, rows, 1, 32 * row_warps(columns), args, bytes);
}

void dc__cuda_residual(dc_stream *stream, const dc__cuda_residual_args *args) {
  launch_rows(stream, DC__KERNEL_RESIDUAL, args->rows, args->columns, args, sizeof *args);
}

void dc__cuda_layernorm(dc_stream *stream, const dc__cuda_layernorm_args *args) {
  launch_rows(stream, DC__KERNEL_LAYERNORM, args->rows, args->columns, args, sizeof *args);
}

/* The second step of `count` sums. */
static void launch_parts(dc_stream *stream, const dc__cuda_sums *sums, int64_t count) {
  rowops_launch(stream, DC__KERNEL_SUM_PARTS, (sums->columns + 31) / 32, count, DC__CUDA_PART_THREADS, sums,
                sizeof *sums);
}

/* Of LN's backward, which are all on the card at once; the same on every card, as the order of the sums is. */
static int64_t back_blocks(int64_t rows, int64_t columns) {
  const int64_t max = DC__CUDA_MIN_SMS * (DC__CUDA_BACKWARD_WARPS / row_warps(columns));
  return rows < max ? rows : max;
}

void dc__cuda_layernorm_backward(dc_stream *stream, const dc__cuda_layernorm_backward_args *args) {
  dc__cuda_layernorm_backward_args a = *args;
  a.sums.chunks = back_blocks(a.rows, a.columns);
  a.sums.columns = a.columns;
  launch_rows(stream, DC__KERNEL_LAYERNORM_BACKWARD, a.sums.chunks, a.columns, &a, sizeof a);
  if (a.sums.parts != NULL) {
    launch_parts(stream, &a.sums, 2);
  }
}

void dc__cuda_dropout_rows(dc_stream *stream, const dc__cuda_dropout_args *args) {
  launch_rows(stream, DC__KERNEL_DROPOUT, args->rows, args->columns, args, sizeof *args);
}

void dc__cuda_epilogue(dc_stream *stream, const dc__cuda_epilogue_args *args) {
  launch_rows(stream, DC__KERNEL_EPILOGUE, args->rows, args->columns, args, sizeof *args);
}

static int64_t chunks_of(int64_t rows) {
  return (rows + DC__CUDA_CHUNK - 1) / DC__CUDA_CHUNK;
}

int64_t dc__cuda_sum_parts(int64_t rows, int64_t normal, int64_t widest) {
  const int64_t back = 2 * normal * back_blocks(rows, normal);
  const int64_t plain = widest * chunks_of(rows);
  return (back > plain ? back : plain) * (int64_t)sizeof(float);
}

void dc__cuda_column_sums(dc_stream *stream, const dc__cuda_sum_args *args) {
  enum { WIDE = 8 * DC__CUDA_SUM_THREADS };
  dc__cuda_sum_args a = *args;
  a.sums.chunks = chunks_of(a.rows);
  a.sums.columns = a.columns;
  rowops_launch(stream, DC__KERNEL_SUM_CHUNKS, a.sums.chunks, (a.columns + WIDE - 1) / WIDE, DC__CUDA_SUM_THREADS, &a,
                sizeof a);
  launch_parts(stream, &a.sums, 1);
}

void dc__cuda_offsets(dc_stream *stream, int32_t *to, const int32_t *offsets, int64_t count) {
  for (int64_t at = 0; at < count; at += DC__CUDA_OFFSETS) {
    dc__cuda_offsets_args args = {.to = to + at};
    args.count = (int32_t)(count - at < DC__CUDA_OFFSETS ? count - at : DC__CUDA_OFFSETS);
    memcpy(args.values, offsets + at, (size_t)args.count * sizeof *offsets);
    rowops_launch(stream, DC__KERNEL_OFFSETS, 1, 1, DC__CUDA_OFFSETS, &args, sizeof args);
  }
}

/* ---- products ---- */

/* What is D = B' A' by columns is C = A B by rows. */
static dc__matmul product_of(const dc__gemm *g, void *workspace, size_t bytes) {
  dc__matmul p = {.dtype = g->dtype, .out_dtype = g->out_dtype, .trans_a = g->trans_b, .trans_b = g->trans_a};
  p.m = g->n;
  p.n = g->m;
  p.k = g->k;
  p.a = g->b;
  p.b = g->a;
  p.d = g->c;
  p.lda = g->ldb;
  p.ldb = g->lda;
  p.ldd = g->ldc;
  p.batch = g->batch;
  p.heuristic_batch = g->batch_invariant ? DC__CUDA_BATCH_SLICE : 0;
  p.stride_a = g->stride_b;
  p.stride_b = g->stride_a;
  p.stride_d = g->stride_c;
  p.alpha = g->alpha;
  p.beta = g->beta;
  p.workspace = workspace;
  p.workspace_bytes = bytes;
  return p;
}

/* GELU is not left to the library: its input would not be rounded first, so that GELU of what is kept would differ from
 * the GELU of the forward. So the product goes to where the input is kept, and a kernel makes GELU of that. The
 * library's derivative is that of what was kept. */
void dc__cuda_gemm(dc_stream *stream, const dc__gemm *g, void *workspace, size_t bytes) {
  bool (*multiply)(dc_stream *, const dc__matmul *) = stream->device->ops->stream_matmul;
  dc__matmul p = product_of(g, workspace, bytes);
  dc__cuda_epilogue_args e = {.out = g->c, .bias = g->bias, .aux = g->aux, .rows = g->m, .columns = g->n};
  e.dtype = g->out_dtype;
  e.epilogue = g->epilogue;
  e.gelu = g->gelu;
  if (g->epilogue == DC__EPILOGUE_GELU && g->aux != NULL) {
    p.d = g->aux;
  }
  e.x = p.d;
  if (g->epilogue == DC__EPILOGUE_GELU_BACK) {
    p.epilogue = g->gelu == DC__GELU_TANH ? DC__MATMUL_DGELU : DC__MATMUL_NONE;
    p.epilogue_ptr = g->aux;
  } else if (g->bias != NULL) {
    p.epilogue = DC__MATMUL_BIAS;
    p.epilogue_ptr = g->bias;
  }
  bool done = p.epilogue != DC__MATMUL_NONE && multiply(stream, &p);
  if (!done) {
    p.epilogue = DC__MATMUL_NONE;
    p.epilogue_ptr = NULL;
    (void)multiply(stream, &p);
  } else if (g->epilogue == DC__EPILOGUE_GELU) { /* the bias is in the product, and that is where it is kept */
    e.bias = NULL;
    e.aux = NULL;
  }
  if (g->epilogue == DC__EPILOGUE_GELU || (g->epilogue != DC__EPILOGUE_NONE && !done)) {
    dc__cuda_epilogue(stream, &e);
  }
}

bool dc__cuda_gemm_sums(dc_stream *stream, const dc__gemm *g, void *sums, void *workspace, size_t bytes) {
  bool (*multiply)(dc_stream *, const dc__matmul *) = stream->device->ops->stream_matmul;
  dc__matmul p = product_of(g, workspace, bytes);
  p.epilogue = DC__MATMUL_BGRADB;
  p.epilogue_ptr = sums;
  if (multiply(stream, &p)) {
    return true;
  }
  p.epilogue = DC__MATMUL_NONE;
  p.epilogue_ptr = NULL;
  (void)multiply(stream, &p);
  return false;
}
