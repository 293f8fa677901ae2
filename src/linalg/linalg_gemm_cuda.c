/* Matrix products by a device's GEMM library, queued on the handle's stream. */
#include "kernels/cuda/kernels_cuda.h"
#include "linalg/linalg.h"

static dc_status check_cuda(dc_linalg *l, const char *fn) {
  if (l->device->ops->matmul_init == NULL) {
    return dc__device_require_host(fn, l->device);
  }
  const dc_status status = l->device->ops->matmul_init(l->device);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", fn, dc_last_error());
}

static dc_status synchronize_cuda(dc_linalg *l) {
  dc__device_sync_internal(l->device, NULL);
  return dc__device_check(l->device);
}

/* c = beta c, one piece of c at a time, by adding the product of a column and a row of zeros. */
static void scale_output(dc_stream *stream, const dc__gemm *g, void *product) {
  const int64_t limit = DC__CUDA_GEMM_WORKSPACE_BYTES / 8;
  dc__stream_zero(stream, product, DC__CUDA_GEMM_WORKSPACE_BYTES);
  for (int64_t i = 0; i < g->m; i += limit) {
    for (int64_t j = 0; j < g->n; j += limit) {
      dc__gemm piece = *g;
      piece.m = g->m - i < limit ? g->m - i : limit;
      piece.n = g->n - j < limit ? g->n - j : limit;
      piece.k = piece.lda = 1;
      piece.ldb = piece.n;
      piece.trans_a = piece.trans_b = false;
      piece.stride_a = piece.stride_b = 0;
      piece.a = piece.b = product;
      piece.c = dc__element_ptr(g->c, g->out_dtype, i * g->ldc + j);
      dc__cuda_gemm(stream, &piece, NULL, 0);
    }
  }
}

/* The library takes fewer than 2^16 matrices per batch. With a power of two all parts have the same alignment, so the
 * library uses one algorithm for them. */
static void gemm_cuda(dc_linalg *l, const dc__gemm *g, void *workspace) {
  enum { MAX_BATCH = 1 << 15 };
  for (int64_t i = 0; i < g->batch; i += MAX_BATCH) {
    dc__gemm part = *g;
    part.batch = g->batch - i < MAX_BATCH ? g->batch - i : MAX_BATCH;
    part.a = dc__element_ptr(g->a, g->dtype, i * g->stride_a);
    part.b = dc__element_ptr(g->b, g->dtype, i * g->stride_b);
    part.c = dc__element_ptr(g->c, g->out_dtype, i * g->stride_c);
    if (part.k == 0) {
      scale_output(l->stream, &part, workspace);
    } else {
      dc__cuda_gemm(l->stream, &part, workspace, DC__CUDA_GEMM_WORKSPACE_BYTES);
    }
  }
}

const dc__linalg_work dc__linalg_work_cuda = {
    .memory_kind = DC_MEMORY_DEVICE,
    .gemm_workspace_bytes = DC__CUDA_GEMM_WORKSPACE_BYTES,
    .check_gemm = check_cuda,
    .gemm = gemm_cuda,
    .synchronize = synchronize_cuda,
};
