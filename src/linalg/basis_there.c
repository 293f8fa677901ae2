/* Steps of orthogonal iteration on a device, as basis.c takes one: a few matrices at a time go through kernels and
 * products, and the device's solver makes their vectors orthonormal. Nothing is waited for: whether a matrix got there
 * is for the device to say, too. */
#include "linalg/spectral.h"
#include "linalg/there.h"

enum { PLACE = 256 }; /* arrays lie at multiples of it */

typedef struct stepping {
  dc__job job;
  dc__flight flight;
  dc__qr qr;
  dc__cuda_basis_args args;
  float *s, *q, *p; /* [most, n, n]: the matrices, then what becomes orthonormal; the vectors; their images */
} stepping;

static size_t rounded(size_t bytes) {
  return (bytes + PLACE - 1) / PLACE * PLACE;
}

static dc_status open(stepping *w, const dc__basis_steps *b) {
  dc_device *device = w->job.l->device;
  const int64_t n = w->job.n;
  const size_t row = (size_t)n * sizeof(float), square = rounded((size_t)n * row);
  const size_t found = rounded(2 * sizeof(int32_t));
  w->qr.n = n;
  const dc_status status = device->ops->qr_room(device, &w->qr);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", b->fn, dc_last_error());
  }
  DC__TRY(dc__flight_open(&w->flight, w->job.l, b->fn, b->a.batch, n, 3 * square + found,
                          rounded(row) + w->qr.workspace_bytes));
  if (w->flight.most == 0) {
    return DC_OK;
  }
  const size_t most = (size_t)w->flight.most;
  char *at = w->flight.squares;
  w->s = (float *)(void *)at;
  w->q = (float *)(void *)(at += most * square);
  w->p = (float *)(void *)(at += most * square);
  w->args.found = (int32_t *)(void *)(at += most * square);
  w->qr.tau = (float *)(void *)(at += most * found);
  w->qr.workspace = at + rounded(row);
  return DC_OK;
}

/* Vectors a row, and p = q s, their images. */
static void bring(const stepping *w, dc__flight *f, const dc__basis_steps *b) {
  const int64_t n = w->job.n;
  dc__cuda_matrices columns = dc__flight_dense(f, w->q, DC_FLOAT32, n, n);
  dc__gemm images = dc__square_product(DC_FLOAT32, n, w->q, w->s, w->p);
  dc__symmetric_bring(f, &w->job, DC_FLOAT32, w->s);
  columns.row_stride = 1;
  columns.col_stride = n;
  dc__cuda_load_alike(f->stream, dc__flight_part(f, &b->basis), columns, UINT32_MAX, 1);
  images.batch = f->count;
  images.alike = true;
  images.stride_a = images.stride_b = images.stride_c = n * n;
  dc__linalg_gemm(f->l, &images, f->product);
}

static dc_status step(stepping *w, const dc__basis_steps *b) {
  dc__flight *f = &w->flight;
  const int64_t n = w->job.n;
  const dc__cuda_matrices sorted = dc__flight_dense(f, w->s, DC_FLOAT32, n, n);
  w->args.q = w->q;
  w->args.p = w->p;
  w->args.sorted = w->qr.a = w->s;
  w->args.values = f->sums;
  w->args.reports = f->reports;
  w->args.to = b->basis.places + f->first;
  w->args.orders = b->orders + f->first;
  w->args.failed = b->failed + f->first;
  w->args.n = n;
  w->args.count = f->count;
  w->qr.count = f->count;
  w->qr.found = w->args.found;
  bring(w, f, b);
  dc__cuda_basis_begin(f->stream, &w->args);
  DC__TRY(f->l->device->ops->stream_qr(f->stream, &w->qr));
  dc__flight_forget(f);
  dc__flight_measure(f, &sorted, false);
  dc__cuda_basis_give(f->stream, &w->args);
  return DC_OK;
}

dc_status dc__basis_there(dc_linalg *l, const dc__basis_steps *b) {
  dc__spectral r = {.fn = b->fn, .a = b->a, .options = DC_SPECTRAL_OPTIONS_INIT};
  stepping w = {.job = {.l = l, .r = &r, .n = b->a.rows}};
  r.options.symmetry = DC_SYMMETRY_LOWER;
  int64_t bytes;
  if (__builtin_mul_overflow(w.job.n, w.job.n, &bytes) || __builtin_mul_overflow(bytes, 16, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", b->fn);
  }
  DC__TRY(open(&w, b));
  for (int64_t first = 0; w.flight.most > 0 && dc__flight_next(&w.flight, first, b->a.batch); first += w.flight.count) {
    DC__TRY(step(&w, b));
  }
  return dc__device_check(l->device);
}
