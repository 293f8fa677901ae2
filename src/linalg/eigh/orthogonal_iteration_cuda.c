/* Orthogonal iteration on a device, with the steps of orthogonal_iteration.c. A slice of the batch goes through
 * kernels and products, and the device's solver does the QR. The host does not wait: the device checks the result. */
#include "linalg/batch_slice_cuda.h"
#include "linalg/eigh/eigh.h"

enum { ALIGNMENT = 256 }; /* alignment of arrays */

typedef struct iteration_slice {
  dc__spectral_job job;
  dc__batch_slice slice;
  dc__qr qr;
  dc__cuda_basis_args args;
  float *s, *q, *p; /* [max_count, n, n]: the matrices, then the orthonormal result; the vectors; their images */
} iteration_slice;

static size_t iteration_align_up(size_t bytes) {
  return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static dc_status iteration_alloc(iteration_slice *w, const dc__orthogonal_iteration_batch *b) {
  dc_device *device = w->job.l->device;
  const int64_t n = w->job.n;
  const size_t row = (size_t)n * sizeof(float), square = iteration_align_up((size_t)n * row);
  const size_t found = iteration_align_up(2 * sizeof(int32_t));
  w->qr.n = n;
  const dc_status status = device->ops->qr_workspace_size(device, &w->qr);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", b->fn, dc_last_error());
  }
  DC__TRY(dc__batch_slice_init(&w->slice, w->job.l, b->fn, b->a.batch, n, 3 * square + found,
                               iteration_align_up(row) + w->qr.workspace_bytes));
  if (w->slice.max_count == 0) {
    return DC_OK;
  }
  const size_t max_count = (size_t)w->slice.max_count;
  char *at = w->slice.matrices;
  w->s = (float *)(void *)at;
  w->q = (float *)(void *)(at += max_count * square);
  w->p = (float *)(void *)(at += max_count * square);
  w->args.found = (int32_t *)(void *)(at += max_count * square);
  w->qr.tau = (float *)(void *)(at += max_count * found);
  w->qr.workspace = at + iteration_align_up(row);
  return DC_OK;
}

/* Loads the matrices into s and the vectors into q's rows, and computes their images p = q s. */
static void iteration_load(const iteration_slice *w, dc__batch_slice *f, const dc__orthogonal_iteration_batch *b) {
  const int64_t n = w->job.n;
  dc__cuda_matrices columns = dc__batch_slice_dense_view(f, w->q, DC_FLOAT32, n, n);
  dc__gemm images = dc__square_gemm(DC_FLOAT32, n, w->q, w->s, w->p);
  dc__symmetric_load_slice(f, &w->job, DC_FLOAT32, w->s);
  columns.row_stride = 1;
  columns.col_stride = n;
  dc__cuda_load_uniform(f->stream, dc__batch_slice_view(f, &b->basis), columns, UINT32_MAX, 1);
  images.batch = f->count;
  images.batch_invariant = true;
  images.stride_a = images.stride_b = images.stride_c = n * n;
  dc__linalg_gemm(f->l, &images, f->gemm_workspace);
}

static dc_status iteration_step(iteration_slice *w, const dc__orthogonal_iteration_batch *b) {
  dc__batch_slice *f = &w->slice;
  const int64_t n = w->job.n;
  const dc__cuda_matrices sorted = dc__batch_slice_dense_view(f, w->s, DC_FLOAT32, n, n);
  w->args.q = w->q;
  w->args.p = w->p;
  w->args.sorted = w->qr.a = w->s;
  w->args.values = f->sums;
  w->args.reports = f->reports;
  w->args.to = b->basis.pointers + f->first;
  w->args.orders = b->orders + f->first;
  w->args.failed = b->failed + f->first;
  w->args.n = n;
  w->args.count = f->count;
  w->qr.count = f->count;
  w->qr.info = w->args.found;
  iteration_load(w, f, b);
  dc__cuda_basis_begin(f->stream, &w->args);
  DC__TRY(f->l->device->ops->stream_qr(f->stream, &w->qr));
  dc__batch_slice_clear_reports(f);
  dc__batch_slice_measure(f, &sorted);
  dc__cuda_basis_store(f->stream, &w->args);
  return DC_OK;
}

dc_status dc__orthogonal_iteration_cuda(dc_linalg *l, const dc__orthogonal_iteration_batch *b) {
  dc__spectral_request r = {.fn = b->fn, .a = b->a, .options = DC_SPECTRAL_OPTIONS_INIT};
  iteration_slice w = {.job = {.l = l, .r = &r, .n = b->a.rows}};
  r.options.symmetry = DC_SYMMETRY_LOWER;
  int64_t bytes;
  if (__builtin_mul_overflow(w.job.n, w.job.n, &bytes) || __builtin_mul_overflow(bytes, 16, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", b->fn);
  }
  DC__TRY(iteration_alloc(&w, b));
  for (int64_t first = 0; w.slice.max_count > 0 && dc__batch_slice_advance(&w.slice, first, b->a.batch);
       first += w.slice.count) {
    DC__TRY(iteration_step(&w, b));
  }
  return dc__device_check(l->device);
}
