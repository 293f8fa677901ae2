/* Loading and storing symmetric matrices on a device, one slice at a time, as symmetric.c does in host memory. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "linalg/batch_slice_cuda.h"
#include "linalg/eigh/eigh.h"

/* Finds the position of an invalid entry in a copy on the host. If memory is short, the error text says [0, 0]. */
static void symmetric_locate_one(dc__batch_slice *f, const dc__spectral_job *job, int32_t i, void *staging,
                                 dc__spectral_task *t) {
  dc__spectral_request r = *job->r;
  const dc__spectral_job host_job = {.l = job->l, .r = &r, .n = job->n};
  if (dc__batch_slice_copy_to_host(f, &job->r->a, i, staging, &r.a)) {
    dc__symmetric_locate(&host_job, 0, t);
    dc__free(r.a.data);
  }
}

void dc__symmetric_check_slice(dc__batch_slice *f, const dc__spectral_job *job, void *staging,
                               dc__spectral_task *tasks) {
  for (int32_t i = 0; i < f->count; i++) {
    dc__spectral_task *t = &tasks[i];
    const dc__cuda_matrix_stats *report = &f->host_reports[i];
    const dc__symmetric_stats stats = {.max_abs = dc__double_from_bits(report->max_abs),
                                       .max_combined = dc__double_from_bits(report->max_combined),
                                       .asymmetry = dc__double_from_bits(report->asymmetry),
                                       .finite = isfinite(dc__double_from_bits(report->max_abs))};
    memset(t, 0, sizeof *t);
    if (!dc__symmetric_check(job, t, &stats)) {
      symmetric_locate_one(f, job, i, staging, t);
    }
  }
}

void dc__symmetric_load_slice(dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *s) {
  const dc__symmetric_weights w = dc__symmetric_weights_of(job->r->options.symmetry);
  dc__cuda_load_args args = {.from = dc__batch_slice_view(f, &job->r->a), .reports = f->reports, .mask = UINT32_MAX};
  args.to = dc__batch_slice_dense_view(f, s, dtype, job->n, job->n);
  args.low = w.low;
  args.high = w.high;
  dc__batch_slice_measure_symmetric(f, &args.from, w.low, w.high);
  dc__cuda_load(f->stream, &args);
}

void dc__symmetric_store_slice(dc__batch_slice *f, const dc__spectral_job *job, int32_t dtype, void *from,
                               uint32_t mask, dc__spectral_task *tasks) {
  const dc__mat *out = &job->r->out;
  const double limit = out->dtype == DC_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
  dc__cuda_load_args args = {.to = dc__batch_slice_view(f, out), .low = 1};
  args.from = dc__batch_slice_dense_view(f, from, dtype, job->n, job->n);
  dc__batch_slice_clear_reports(f);
  dc__batch_slice_measure(f, &args.from);
  dc__batch_slice_sync_reports(f);
  for (int32_t i = 0; i < f->count; i++) {
    const bool fits = dc__double_from_bits(f->host_reports[i].max_abs) <= limit; /* false for NaN */
    const bool wanted = (mask >> i & 1u) != 0;
    tasks[i].status = wanted && !fits ? DC_E_NOT_FINITE : tasks[i].status;
    args.mask |= (uint32_t)(wanted && fits) << i;
    args.factor[i] = 1;
  }
  dc__cuda_load(f->stream, &args);
}

void dc__batch_slice_write_info(const dc__batch_slice *f, const dc__spectral_request *r, const dc__spectral_task *tasks,
                                dc__spectral_task *failed, int64_t *at) {
  for (int32_t i = 0; i < f->count; i++) {
    dc__spectral_write_info(r, &tasks[i], f->first + i);
    if (failed->status == DC_OK && tasks[i].status != DC_OK) {
      *failed = tasks[i];
      *at = f->first + i;
    }
  }
}
