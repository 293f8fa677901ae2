/* Products of matrices wherever the handle's device computes them, and flights of matrices through a device. */
#include "linalg/batch_slice_cuda.h"

#include <inttypes.h>
#include <string.h>

enum { ALIGNMENT = 256 }; /* what NVIDIA's libraries want of a workspace's address */

/* ---- products ---- */

dc_status dc__linalg_check_gemm(dc_linalg *l, const char *fn) {
  if (!dc__linalg_is_cuda(l)) {
    return DC_OK;
  }
  if (l->device->ops->matmul_init == NULL) {
    return dc__device_require_host(fn, l->device);
  }
  const dc_status status = l->device->ops->matmul_init(l->device);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", fn, dc_last_error());
}

dc_status dc__linalg_synchronize(dc_linalg *l) {
  if (!dc__linalg_is_cuda(l)) {
    return DC_OK;
  }
  dc__device_sync_internal(l->device, NULL);
  return dc__device_check(l->device);
}

dc_status dc__linalg_copy_to_host(dc_linalg *l, void *to, const void *from, size_t bytes) {
  DC__TRY(dc__device_check(l->device)); /* one that failed is waited for no more */
  dc__stream_copy(l->device->internal_stream, to, from, bytes);
  return dc__linalg_synchronize(l);
}

/* dc__linalg_suballoc() of bytes that were added with PLACE more. */
static void *suballoc_aligned(void *memory, size_t *offset, int64_t bytes) {
  const uintptr_t part = (uintptr_t)dc__linalg_suballoc(memory, offset, bytes + ALIGNMENT, 1);
  return (void *)((part + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

bool dc__linalg_add_gemm_workspace(size_t *total, const dc_linalg *l) {
  return !dc__linalg_is_cuda(l) || dc__linalg_add_bytes(total, DC__CUDA_GEMM_WORKSPACE_BYTES + ALIGNMENT, 1);
}

void *dc__linalg_gemm_workspace(const dc_linalg *l, void *memory, size_t *offset) {
  return dc__linalg_is_cuda(l) ? suballoc_aligned(memory, offset, DC__CUDA_GEMM_WORKSPACE_BYTES) : NULL;
}

/* c = beta c, as a product of a column and a row of zeros, a piece of c at a time. */
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

void dc__linalg_gemm(dc_linalg *l, const dc__gemm *g, void *workspace) {
  if (g->batch == 0 || g->m == 0 || g->n == 0) {
    return;
  }
  if (!dc__linalg_is_cuda(l)) {
    dc__gemm_run(l->pool, g);
  } else if (g->k == 0) {
    scale_output(l->stream, g, workspace);
  } else {
    dc__cuda_gemm(l->stream, g, workspace, DC__CUDA_GEMM_WORKSPACE_BYTES);
  }
}

dc_status dc__linalg_check_alignment(const dc_linalg *l, const char *fn, const char *arg, const void *data,
                                     int32_t dtype) {
  const size_t size = dc_dtype_size(dtype);
  return !dc__linalg_is_cuda(l) || (uintptr_t)data % size == 0
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: %s.data = %p, must be a multiple of %zu on device \"%s\"", fn, arg, data,
                        size, l->device->name);
}

dc_status dc__batch_matmul(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, double alpha, double beta,
                           const dc__mat *out) {
  const dc__gemm g = dc__mat_gemm(a, b, alpha, beta, out);
  size_t bytes = 0;
  size_t offset = 0;
  void *memory = NULL;
  if (dc__linalg_is_cuda(l)) {
    (void)dc__linalg_add_gemm_workspace(&bytes, l);
    DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  }
  if (l->query) {
    return DC_OK;
  }
  dc__linalg_gemm(l, &g, dc__linalg_gemm_workspace(l, memory, &offset));
  return dc__linalg_synchronize(l);
}

/* ---- flights ---- */

int32_t dc__batch_slice_max_count(int64_t batch, size_t bytes) {
  const size_t fits = bytes > 0 ? DC__BATCH_SLICE_BYTES / bytes : DC__CUDA_BATCH_SLICE;
  const int64_t limit = fits == 0 ? 1 : fits < DC__CUDA_BATCH_SLICE ? (int64_t)fits : DC__CUDA_BATCH_SLICE;
  return (int32_t)(batch < limit ? batch : limit);
}

dc_status dc__batch_slice_init(dc__batch_slice *f, dc_linalg *l, const char *fn, int64_t batch, int64_t rows,
                               size_t bytes, size_t more) {
  const int64_t count = dc__batch_slice_max_count(batch, bytes);
  size_t total = 0;
  size_t all;
  size_t offset = 0;
  void *memory;
  memset(f, 0, sizeof *f);
  f->l = l;
  f->stream = l->device->internal_stream;
  if (__builtin_mul_overflow(bytes, (size_t)count, &all) || __builtin_add_overflow(all, more, &all) ||
      all > INT64_MAX / 4 || !dc__linalg_add_gemm_workspace(&total, l) ||
      !dc__linalg_add_bytes(&total, count, sizeof *f->reports) ||
      !dc__linalg_add_bytes(&total, count * rows, sizeof(double)) ||
      !dc__linalg_add_bytes(&total, (int64_t)all + ALIGNMENT, 1)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of %" PRId64 " rows", fn, rows);
  }
  DC__TRY(dc__linalg_scratch(l, fn, total, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  f->max_count = (int32_t)count;
  f->gemm_workspace = dc__linalg_gemm_workspace(l, memory, &offset);
  f->reports = dc__linalg_suballoc(memory, &offset, count, sizeof *f->reports);
  f->sums = dc__linalg_suballoc(memory, &offset, count * rows, sizeof(double));
  f->matrices = suballoc_aligned(memory, &offset, (int64_t)all);
  return DC_OK;
}

dc__batch_slice dc__batch_slice_subslice(const dc__batch_slice *f, int32_t begin, int32_t count) {
  dc__batch_slice some = *f;
  some.first += begin;
  some.count = count;
  return some;
}

bool dc__batch_slice_advance(dc__batch_slice *f, int64_t first, int64_t batch) {
  f->first = first;
  f->count = (int32_t)(batch - first < f->max_count ? batch - first : f->max_count);
  if (f->count > 0) {
    dc__batch_slice_clear_reports(f);
  }
  return f->count > 0;
}

void dc__batch_slice_clear_reports(dc__batch_slice *f) {
  dc__stream_zero(f->stream, f->reports, (size_t)f->count * sizeof *f->reports);
}

void dc__batch_slice_sync_reports(dc__batch_slice *f) {
  dc__stream_copy(f->stream, f->host_reports, f->reports, (size_t)f->count * sizeof *f->reports);
  dc__device_sync_internal(f->l->device, NULL);
}

dc__cuda_matrices dc__mat_cuda_view(const dc__mat *mat) {
  dc__cuda_matrices m = {.data = mat->data, .batch_stride = mat->batch_stride, .row_stride = mat->row_stride};
  m.col_stride = mat->col_stride;
  m.rows = mat->rows;
  m.cols = mat->cols;
  m.count = 1;
  m.wide = mat->dtype == DC_FLOAT64;
  return m;
}

dc__cuda_matrices dc__batch_slice_view(const dc__batch_slice *f, const dc__mat *mat) {
  dc__cuda_matrices m = dc__mat_cuda_view(mat);
  m.data = mat->pointers != NULL ? NULL : dc__element_ptr(mat->data, mat->dtype, f->first * mat->batch_stride);
  m.places = mat->pointers != NULL ? mat->pointers + f->first : NULL;
  m.batch_stride = mat->pointers != NULL ? 0 : mat->batch_stride;
  m.count = f->count;
  return m;
}

dc__cuda_matrices dc__batch_slice_dense_view(const dc__batch_slice *f, void *data, int32_t dtype, int64_t rows,
                                             int64_t cols) {
  dc__cuda_matrices m = {.data = data, .batch_stride = rows * cols, .row_stride = cols, .col_stride = 1};
  m.rows = rows;
  m.cols = cols;
  m.count = f->count;
  m.wide = dtype == DC_FLOAT64;
  return m;
}

void dc__batch_slice_measure(dc__batch_slice *f, const dc__cuda_matrices *from, bool mirrored) {
  const dc__cuda_measure_args args = {.from = *from, .reports = f->reports, .mirrored = mirrored};
  dc__cuda_measure(f->stream, &args);
}

void dc__batch_slice_reduce(dc__batch_slice *f, const dc__cuda_matrices *from, bool squares) {
  const dc__cuda_matrix_norm_args args = {.from = *from, .sums = f->sums, .reports = f->reports, .squares = squares};
  dc__cuda_matrix_norm(f->stream, &args);
}

bool dc__batch_slice_copy_to_host(dc__batch_slice *f, const dc__mat *mat, int32_t i, void *staging, dc__mat *host) {
  const size_t bytes = (size_t)(mat->rows * mat->cols) * dc_dtype_size(mat->dtype);
  const dc__batch_slice one = dc__batch_slice_subslice(f, i, 1);
  *host = *mat;
  host->data = dc__calloc(1, bytes);
  if (host->data == NULL) {
    return false;
  }
  host->pointers = NULL;
  host->batch = 1;
  host->batch_stride = 0;
  host->row_stride = mat->cols;
  host->col_stride = 1;
  dc__cuda_load_uniform(f->stream, dc__batch_slice_view(&one, mat),
                        dc__batch_slice_dense_view(&one, staging, mat->dtype, mat->rows, mat->cols), 1, 1);
  dc__stream_copy(f->stream, host->data, staging, bytes);
  dc__device_sync_internal(f->l->device, NULL);
  return true;
}

double dc__double_from_bits(uint64_t bits) {
  double number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
