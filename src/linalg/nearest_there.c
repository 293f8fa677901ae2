/* The nearest Kronecker product on a device. The kernels decide when the iteration has ended; the host looks once in a
 * few steps. */
#include "linalg/nearest.h"

#include <math.h>

#include "linalg/there.h"

enum { LOOK = 16, THREADS = 1 << 17 }; /* steps between looks; threads that fill a device */

typedef struct way {
  dc__flight f;
  dc__cuda_nearest_args args;
  double *totals; /* [2]: squares of the residual and of x */
  void *through;
  int64_t through_bytes;
} way;

/* In how many chunks of rows a vector of `count` elements is made, each by so many threads. */
static int32_t chunks_of(int64_t count, int64_t threads, int64_t rows) {
  const int64_t wanted = THREADS / (count < THREADS ? count * threads : THREADS) + 1;
  return (int32_t)(wanted < rows ? wanted : rows);
}

/* Lays out the matrices of the flight: at first, without memory, to count their bytes. false: too many. */
static bool place(way *w, size_t *bytes) {
  dc__cuda_nearest_args *a = &w->args;
  const int64_t outer = a->m * a->n;
  const int64_t inner = a->p * a->q;
  const int64_t parts = a->chunks[0] * inner > a->chunks[1] * outer ? a->chunks[0] * inner : a->chunks[1] * outer;
  struct {
    void **to;
    int64_t count;
  } const all[] = {{(void **)&a->u, outer},
                   {(void **)&a->v, inner},
                   {(void **)&a->parts, parts},
                   {(void **)&a->fresh, outer > inner ? outer : inner},
                   {(void **)&a->squares, DC__CUDA_NEAREST_BLOCKS},
                   {(void **)&a->traces, DC__CUDA_NEAREST_BLOCKS},
                   {(void **)&a->apart, 2 * a->x.rows},
                   {(void **)&w->totals, 2},
                   {(void **)&a->found, sizeof *a->found / sizeof(double) + 1},
                   {&w->through, a->x.cols}};
  *bytes = 0;
  for (size_t i = 0; i < DC__COUNT(all); i++) {
    *all[i].to = w->f.squares != NULL ? w->f.squares + *bytes : NULL;
    if (!dc__linalg_add(bytes, all[i].count, sizeof(double))) {
      return false;
    }
  }
  return true;
}

/* x's largest entry, to its scale; where the fault is, row by row. */
static dc_status measure(way *w, const char *fn, const dc__mat *x, int *exponent) {
  double most;
  dc__flight_measure(&w->f, &w->args.x, false);
  dc__flight_look(&w->f);
  DC__TRY(dc__device_check(w->f.l->device));
  most = dc__flight_number(w->f.seen[0].most);
  for (int64_t row = 0; row < x->rows && !isfinite(most); row++) {
    dc__mat line = *x;
    dc__mat here;
    double ignored = 0;
    line.data = dc__element(x->data, x->dtype, row * x->row_stride);
    line.rows = 1;
    if (!dc__flight_bring(&w->f, &line, 0, w->through, &here)) {
      return DC_E_NO_MEMORY;
    }
    const dc_status status = dc__nearest_check(fn, &here, row, &ignored);
    dc__free(here.data);
    DC__TRY(status);
  }
  *exponent = dc__nearest_exponent(most);
  const dc__scale scale = dc__scale_of(-*exponent);
  w->args.first = scale.first;
  w->args.second = scale.second;
  return DC_OK;
}

static dc_status iterate(way *w, const char *fn, dc__cuda_nearest_found *found) {
  dc_linalg *l = w->f.l;
  dc__stream_zero(w->f.stream, w->args.found, sizeof *found);
  dc__stream_zero(w->f.stream, w->args.v, (size_t)(w->args.p * w->args.q) * sizeof(double));
  dc__cuda_nearest_begin(w->f.stream, &w->args);
  do {
    for (int32_t step = 0; step < LOOK; step++) {
      dc__cuda_nearest_step(w->f.stream, &w->args);
    }
    DC__TRY(dc__linalg_bring(l, found, w->args.found, sizeof *found));
  } while (dc__nearest_goes_on(&found->state));
  return found->state.still >= DC__NEAREST_STILL ? DC_OK : dc__nearest_lost(fn);
}

static void store(const way *w, const double *from, double factor, const dc__mat *to) {
  const dc__cuda_matrices x = dc__flight_dense(&w->f, (void *)(uintptr_t)from, DC_FLOAT64, to->rows, to->cols);
  dc__cuda_load_alike(w->f.stream, x, dc__matrices_of(to), 1, factor);
}

/* An x without entries, of which a or b may have some. */
static dc_status clear(dc_linalg *l, const dc__mat *a, const dc__mat *b, double *residual) {
  const dc__mat *const both[] = {a, b};
  for (int i = 0; i < 2; i++) {
    dc__stream_zero(l->device->here, both[i]->data,
                    (size_t)(both[i]->rows * both[i]->cols) * dc_dtype_size(both[i]->dtype));
  }
  if (residual != NULL) {
    *residual = 0;
  }
  return dc__linalg_done(l);
}

dc_status dc__nearest_there(dc_linalg *l, const char *fn, const dc__mat *x, const dc__mat *a, const dc__mat *b,
                            double *residual) {
  way w = {.args = {.x = dc__matrices_of(x), .m = a->rows, .n = a->cols, .p = b->rows, .q = b->cols}};
  dc__cuda_nearest_found found;
  double totals[2];
  size_t bytes;
  int exponent;
  const int64_t batch = x->rows * x->cols > 0 ? 1 : 0;
  w.args.enough = dc__nearest_enough(x->dtype);
  w.args.chunks[0] = batch > 0 ? chunks_of(w.args.p * w.args.q, 1, w.args.m) : 0;
  w.args.chunks[1] = batch > 0 ? chunks_of(w.args.m * w.args.n, 32, w.args.p) : 0;
  if (!place(&w, &bytes)) {
    return dc__kron_too_large(fn);
  }
  DC__TRY(dc__flight_open(&w.f, l, fn, batch, x->rows, bytes, 0));
  if (!dc__flight_next(&w.f, 0, batch)) {
    return l->query ? DC_OK : clear(l, a, b, residual);
  }
  (void)place(&w, &bytes);
  DC__TRY(measure(&w, fn, x, &exponent));
  DC__TRY(iterate(&w, fn, &found));
  const dc__cuda_totals_args add = {w.args.apart, w.totals, 2, x->rows, 2, 2, 1};
  dc__stream_zero(w.f.stream, w.totals, sizeof totals);
  dc__cuda_nearest_apart(w.f.stream, &w.args);
  dc__cuda_totals(w.f.stream, &add);
  DC__TRY(dc__linalg_bring(l, totals, w.totals, sizeof totals));
  /* a and b get the same norm, and half of the power of two that was taken out each. */
  const double factor = copysign(sqrt(found.state.sigma), found.trace);
  store(&w, w.args.u, ldexp(factor, exponent / 2), a);
  store(&w, w.args.v, ldexp(factor, exponent / 2), b);
  if (residual != NULL) {
    *residual = totals[1] > 0 ? sqrt(totals[0] / totals[1]) : 0;
  }
  return dc__linalg_done(l);
}
