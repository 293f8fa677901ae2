/* Symmetric matrices in and out of a device, a flight at a time, as symmetric.c has one in the host's memory. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "linalg/spectral.h"
#include "linalg/there.h"

/* Where the fault of a matrix is: it is brought here, to be looked through. Without memory the text says [0, 0]. */
static void locate(dc__flight *f, const dc__job *job, int32_t i, void *through, dc__task *t) {
  dc__spectral r = *job->r;
  const dc__job here = {.l = job->l, .r = &r, .n = job->n};
  if (dc__flight_bring(f, &job->r->a, i, through, &r.a)) {
    dc__symmetric_locate(&here, 0, t);
    dc__free(r.a.data);
  }
}

void dc__symmetric_seen(dc__flight *f, const dc__job *job, void *through, dc__task *tasks) {
  for (int32_t i = 0; i < f->count; i++) {
    dc__task *t = &tasks[i];
    const double most = dc__flight_number(f->seen[i].most);
    memset(t, 0, sizeof *t);
    if (!dc__symmetric_check(job, t, isfinite(most), most, dc__flight_number(f->seen[i].apart))) {
      locate(f, job, i, through, t);
    }
  }
}

void dc__symmetric_bring(dc__flight *f, const dc__job *job, int32_t dtype, void *s) {
  const int32_t symmetry = job->r->options.symmetry;
  dc__cuda_load_args args = {.from = dc__flight_part(f, &job->r->a), .reports = f->reports, .mask = UINT32_MAX};
  args.to = dc__flight_dense(f, s, dtype, job->n, job->n);
  args.low = symmetry == DC_SYMMETRY_LOWER ? 1 : symmetry == DC_SYMMETRY_UPPER ? 0 : 0.5;
  args.high = 1 - args.low;
  dc__flight_measure(f, &args.from, true);
  dc__cuda_load(f->stream, &args);
}

void dc__symmetric_give(dc__flight *f, const dc__job *job, int32_t dtype, void *from, uint32_t mask, dc__task *tasks) {
  const dc__mat *out = &job->r->out;
  const double limit = out->dtype == DC_FLOAT64 ? DBL_MAX : (double)FLT_MAX;
  dc__cuda_load_args args = {.to = dc__flight_part(f, out), .low = 1};
  args.from = dc__flight_dense(f, from, dtype, job->n, job->n);
  dc__flight_forget(f);
  dc__flight_measure(f, &args.from, false);
  dc__flight_look(f);
  for (int32_t i = 0; i < f->count; i++) {
    const bool fits = dc__flight_number(f->seen[i].most) <= limit; /* false for NaN */
    const bool wanted = (mask >> i & 1u) != 0;
    tasks[i].status = wanted && !fits ? DC_E_NOT_FINITE : tasks[i].status;
    args.mask |= (uint32_t)(wanted && fits) << i;
    args.factor[i] = 1;
  }
  dc__cuda_load(f->stream, &args);
}

void dc__flight_report(const dc__flight *f, const dc__spectral *r, const dc__task *tasks, dc__task *failed,
                       int64_t *at) {
  for (int32_t i = 0; i < f->count; i++) {
    dc__spectral_write_info(r, &tasks[i], f->first + i);
    if (failed->status == DC_OK && tasks[i].status != DC_OK) {
      *failed = tasks[i];
      *at = f->first + i;
    }
  }
}
