/* Products of matrices wherever the handle's device computes them, and flights of matrices through a device. */
#include "linalg/there.h"

#include <inttypes.h>
#include <string.h>

enum { PLACE = 256 }; /* what NVIDIA's libraries want of a workspace's address */

/* ---- products ---- */

dc_status dc__linalg_ready(dc_linalg *l, const char *fn) {
  if (!dc__linalg_is_there(l)) {
    return DC_OK;
  }
  if (l->device->ops->product_ready == NULL) {
    return dc__device_is_host(fn, l->device);
  }
  const dc_status status = l->device->ops->product_ready(l->device);
  return status == DC_OK ? DC_OK : dc__fail(status, "%s: %s", fn, dc_last_error());
}

dc_status dc__linalg_done(dc_linalg *l) {
  if (!dc__linalg_is_there(l)) {
    return DC_OK;
  }
  dc__here_done(l->device, NULL);
  return dc__device_check(l->device);
}

dc_status dc__linalg_bring(dc_linalg *l, void *to, const void *from, size_t bytes) {
  DC__TRY(dc__device_check(l->device)); /* one that failed is waited for no more */
  dc__stream_copy(l->device->here, to, from, bytes);
  return dc__linalg_done(l);
}

/* dc__linalg_part() of bytes that were added with PLACE more. */
static void *placed(void *memory, size_t *offset, int64_t bytes) {
  const uintptr_t part = (uintptr_t)dc__linalg_part(memory, offset, bytes + PLACE, 1);
  return (void *)((part + PLACE - 1) / PLACE * PLACE);
}

bool dc__linalg_add_product(size_t *total, const dc_linalg *l) {
  return !dc__linalg_is_there(l) || dc__linalg_add(total, DC__CUDA_PRODUCT_BYTES + PLACE, 1);
}

void *dc__linalg_product(const dc_linalg *l, void *memory, size_t *offset) {
  return dc__linalg_is_there(l) ? placed(memory, offset, DC__CUDA_PRODUCT_BYTES) : NULL;
}

/* c = beta c, as a product of a column and a row of zeros, a piece of c at a time. */
static void scale(dc_stream *stream, const dc__gemm *g, void *product) {
  const int64_t most = DC__CUDA_PRODUCT_BYTES / 8;
  dc__stream_zero(stream, product, DC__CUDA_PRODUCT_BYTES);
  for (int64_t i = 0; i < g->m; i += most) {
    for (int64_t j = 0; j < g->n; j += most) {
      dc__gemm piece = *g;
      piece.m = g->m - i < most ? g->m - i : most;
      piece.n = g->n - j < most ? g->n - j : most;
      piece.k = piece.lda = 1;
      piece.ldb = piece.n;
      piece.trans_a = piece.trans_b = false;
      piece.stride_a = piece.stride_b = 0;
      piece.a = piece.b = product;
      piece.c = dc__element(g->c, g->out_dtype, i * g->ldc + j);
      dc__cuda_gemm(stream, &piece, NULL, 0);
    }
  }
}

void dc__linalg_gemm(dc_linalg *l, const dc__gemm *g, void *product) {
  if (g->batch == 0 || g->m == 0 || g->n == 0) {
    return;
  }
  if (!dc__linalg_is_there(l)) {
    dc__gemm_run(l->pool, g);
  } else if (g->k == 0) {
    scale(l->on, g, product);
  } else {
    dc__cuda_gemm(l->on, g, product, DC__CUDA_PRODUCT_BYTES);
  }
}

dc_status dc__linalg_lies(const dc_linalg *l, const char *fn, const char *arg, const void *data, int32_t dtype) {
  const size_t size = dc_dtype_size(dtype);
  return !dc__linalg_is_there(l) || (uintptr_t)data % size == 0
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: %s.data = %p, must be a multiple of %zu on device \"%s\"", fn, arg, data,
                        size, l->device->name);
}

dc_status dc__batch_matmul(dc_linalg *l, const char *fn, const dc__mat *a, const dc__mat *b, double alpha, double beta,
                           const dc__mat *out) {
  const dc__gemm g = dc__mat_product(a, b, alpha, beta, out);
  size_t bytes = 0;
  size_t offset = 0;
  void *memory = NULL;
  if (dc__linalg_is_there(l)) {
    (void)dc__linalg_add_product(&bytes, l);
    DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
  }
  if (l->query) {
    return DC_OK;
  }
  dc__linalg_gemm(l, &g, dc__linalg_product(l, memory, &offset));
  return dc__linalg_done(l);
}

/* ---- flights ---- */

int32_t dc__flight_most(int64_t batch, size_t bytes) {
  const size_t fits = bytes > 0 ? DC__FLIGHT_BYTES / bytes : DC__CUDA_FLIGHT;
  const int64_t most = fits == 0 ? 1 : fits < DC__CUDA_FLIGHT ? (int64_t)fits : DC__CUDA_FLIGHT;
  return (int32_t)(batch < most ? batch : most);
}

dc_status dc__flight_open(dc__flight *f, dc_linalg *l, const char *fn, int64_t batch, int64_t rows, size_t bytes,
                          size_t more) {
  const int64_t count = dc__flight_most(batch, bytes);
  size_t total = 0;
  size_t all;
  size_t offset = 0;
  void *memory;
  memset(f, 0, sizeof *f);
  f->l = l;
  f->stream = l->device->here;
  if (__builtin_mul_overflow(bytes, (size_t)count, &all) || __builtin_add_overflow(all, more, &all) ||
      all > INT64_MAX / 4 || !dc__linalg_add_product(&total, l) || !dc__linalg_add(&total, count, sizeof *f->reports) ||
      !dc__linalg_add(&total, count * rows, sizeof(double)) || !dc__linalg_add(&total, (int64_t)all + PLACE, 1)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of %" PRId64 " rows", fn, rows);
  }
  DC__TRY(dc__linalg_scratch(l, fn, total, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  f->most = (int32_t)count;
  f->product = dc__linalg_product(l, memory, &offset);
  f->reports = dc__linalg_part(memory, &offset, count, sizeof *f->reports);
  f->sums = dc__linalg_part(memory, &offset, count * rows, sizeof(double));
  f->squares = placed(memory, &offset, (int64_t)all);
  return DC_OK;
}

dc__flight dc__flight_some(const dc__flight *f, int32_t begin, int32_t count) {
  dc__flight some = *f;
  some.first += begin;
  some.count = count;
  return some;
}

bool dc__flight_next(dc__flight *f, int64_t first, int64_t batch) {
  f->first = first;
  f->count = (int32_t)(batch - first < f->most ? batch - first : f->most);
  if (f->count > 0) {
    dc__flight_forget(f);
  }
  return f->count > 0;
}

void dc__flight_forget(dc__flight *f) {
  dc__stream_zero(f->stream, f->reports, (size_t)f->count * sizeof *f->reports);
}

void dc__flight_look(dc__flight *f) {
  dc__stream_copy(f->stream, f->seen, f->reports, (size_t)f->count * sizeof *f->reports);
  dc__here_done(f->l->device, NULL);
}

dc__cuda_matrices dc__matrices_of(const dc__mat *mat) {
  dc__cuda_matrices m = {.data = mat->data, .batch_stride = mat->batch_stride, .row_stride = mat->row_stride};
  m.col_stride = mat->col_stride;
  m.rows = mat->rows;
  m.cols = mat->cols;
  m.count = 1;
  m.wide = mat->dtype == DC_FLOAT64;
  return m;
}

dc__cuda_matrices dc__flight_part(const dc__flight *f, const dc__mat *mat) {
  dc__cuda_matrices m = dc__matrices_of(mat);
  m.data = mat->places != NULL ? NULL : dc__element(mat->data, mat->dtype, f->first * mat->batch_stride);
  m.places = mat->places != NULL ? mat->places + f->first : NULL;
  m.batch_stride = mat->places != NULL ? 0 : mat->batch_stride;
  m.count = f->count;
  return m;
}

dc__cuda_matrices dc__flight_dense(const dc__flight *f, void *data, int32_t dtype, int64_t rows, int64_t cols) {
  dc__cuda_matrices m = {.data = data, .batch_stride = rows * cols, .row_stride = cols, .col_stride = 1};
  m.rows = rows;
  m.cols = cols;
  m.count = f->count;
  m.wide = dtype == DC_FLOAT64;
  return m;
}

void dc__flight_measure(dc__flight *f, const dc__cuda_matrices *from, bool mirrored) {
  const dc__cuda_measure_args args = {.from = *from, .reports = f->reports, .mirrored = mirrored};
  dc__cuda_measure(f->stream, &args);
}

void dc__flight_fold(dc__flight *f, const dc__cuda_matrices *from, bool squares) {
  const dc__cuda_fold_args args = {.from = *from, .sums = f->sums, .reports = f->reports, .squares = squares};
  dc__cuda_fold(f->stream, &args);
}

bool dc__flight_bring(dc__flight *f, const dc__mat *mat, int32_t i, void *through, dc__mat *here) {
  const size_t bytes = (size_t)(mat->rows * mat->cols) * dc_dtype_size(mat->dtype);
  const dc__flight one = dc__flight_some(f, i, 1);
  *here = *mat;
  here->data = dc__calloc(1, bytes);
  if (here->data == NULL) {
    return false;
  }
  here->places = NULL;
  here->batch = 1;
  here->batch_stride = 0;
  here->row_stride = mat->cols;
  here->col_stride = 1;
  dc__cuda_load_alike(f->stream, dc__flight_part(&one, mat),
                      dc__flight_dense(&one, through, mat->dtype, mat->rows, mat->cols), 1, 1);
  dc__stream_copy(f->stream, here->data, through, bytes);
  dc__here_done(f->l->device, NULL);
  return true;
}

double dc__flight_number(uint64_t bits) {
  double number;
  memcpy(&number, &bits, sizeof number);
  return number;
}
