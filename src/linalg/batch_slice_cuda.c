/* Slices of a batch on a device. */
#include "linalg/batch_slice_cuda.h"

#include <inttypes.h>
#include <string.h>

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
      !dc__linalg_add_bytes(&total, (int64_t)all + DC__DEVICE_ALIGNMENT, 1)) {
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
  f->matrices = dc__linalg_suballoc_aligned(memory, &offset, (int64_t)all);
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
  m.pointers = mat->pointers != NULL ? mat->pointers + f->first : NULL;
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

void dc__batch_slice_measure(dc__batch_slice *f, const dc__cuda_matrices *from) {
  const dc__cuda_measure_args args = {.from = *from, .reports = f->reports};
  dc__cuda_measure(f->stream, &args);
}

void dc__batch_slice_measure_symmetric(dc__batch_slice *f, const dc__cuda_matrices *from, double low, double high) {
  const dc__cuda_measure_args args = {.from = *from, .reports = f->reports, .low = low, .high = high};
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
