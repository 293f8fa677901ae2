/* The matrix product in stream order, by the device's library. */
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/gemm/gemm.h"

/* The library's matrices are column-major: its D = B' A' is the row-major C = A B. */
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

/* The library does not compute GELU, since it would not round the input first: GELU of the kept input aux would differ.
 * So the product is written to aux, and a kernel computes GELU from there. The library's derivative uses aux. */
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
  } else if (g->epilogue == DC__EPILOGUE_GELU) { /* the product includes the bias, and is in aux if that is kept */
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
