/* Kronecker products on a device. */
#include "linalg/batch_slice_cuda.h"
#include "linalg/kron/kron.h"

static void kron_form_cuda(dc_linalg *l, const dc__mat *a, const dc__mat *b, const dc__mat *out) {
  const dc__cuda_kron_args args = {dc__mat_cuda_view(a), dc__mat_cuda_view(b), dc__mat_cuda_view(out)};
  dc__cuda_kron(l->device->internal_stream, &args);
}

/* Copies the eigenvalues to the host, since they are few, and checks them there. */
static dc_status check_values_cuda(dc_linalg *l, const dc__kron_damped *d) {
  const size_t size = d->wide ? sizeof(double) : sizeof(float);
  const size_t bytes[2] = {(size_t)d->rows * size, (size_t)d->cols * size};
  char *host = dc__calloc(1, bytes[0] + bytes[1] + 1);
  dc__kron_damped on_host = *d;
  if (host == NULL) {
    return DC_E_NO_MEMORY;
  }
  on_host.a = host;
  on_host.b = host + bytes[0];
  dc_status status = dc__linalg_copy_to_host(l, host, d->a, bytes[0]);
  status = status == DC_OK ? dc__linalg_copy_to_host(l, host + bytes[0], d->b, bytes[1]) : status;
  status = status == DC_OK ? dc__kron_check_values(&on_host) : status;
  dc__free(host);
  return status;
}

static void divide_damped_cuda(dc_linalg *l, const dc__kron_damped *d, void *x) {
  const dc__cuda_damp_args args = {.x = x,
                                   .a = d->a,
                                   .b = d->b,
                                   .count = d->count,
                                   .rows = d->rows,
                                   .cols = d->cols,
                                   .damping = d->damping,
                                   .refused = d->not_positive,
                                   .wide = d->wide};
  dc__cuda_damp(l->device->internal_stream, &args);
}

const dc__kron_work dc__kron_work_cuda = {
    .form = kron_form_cuda, .check_values = check_values_cuda, .divide_damped = divide_damped_cuda};
