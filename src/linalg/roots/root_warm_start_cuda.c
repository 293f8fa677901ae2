/* Roots from an earlier basis on a device, as in root_warm_start.c, one slice of the batch at a time. The host decides
 * twice whether a basis is near enough: by Q's orthonormality and Q^T A Q's diagonal, and by the size of the rest. */
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh_cuda.h"

static char *warm_start_probe(const dc__eigh_cuda *w, int32_t step) {
  return w->probes + (size_t)step * (size_t)w->slice.max_count * (size_t)w->job.n * DC__PROBES * sizeof(double);
}

/* c = op(a) b + beta c for each matrix; b and c have `cols` columns. */
typedef struct warm_start_product {
  int32_t dtype;
  bool trans_a, trans_b;
  const void *a, *b;
  int64_t cols; /* of b and c; rows and depth are n */
  double beta;
  void *c;
} warm_start_product;

static void warm_start_gemm(const dc__eigh_cuda *w, dc__batch_slice *f, const warm_start_product *p) {
  const int64_t n = w->job.n;
  dc__gemm g = dc__square_gemm(p->dtype, n, p->a, p->b, p->c);
  g.trans_a = p->trans_a;
  g.trans_b = p->trans_b;
  g.n = g.ldc = p->cols;
  g.ldb = p->trans_b ? n : p->cols;
  g.beta = p->beta;
  g.batch = f->count;
  g.batch_invariant = w->job.r->grouped != NULL;
  g.stride_a = n * n;
  g.stride_b = g.stride_c = n * p->cols;
  dc__linalg_gemm(f->l, &g, f->gemm_workspace);
}

/* Computes rotated = Q^T A Q, with its diagonal in values. Reports receive the error of Q^T Q v. */
static void rotate_to_basis(dc__eigh_cuda *w, dc__batch_slice *f, int32_t dtype, const void *q) {
  const int64_t n = w->job.n;
  const size_t bytes = (size_t)(n * DC__PROBES) * dc_dtype_size(dtype);
  const dc__cuda_matrices back = dc__batch_slice_dense_view(f, warm_start_probe(w, 2), dtype, n, DC__PROBES);
  dc__cuda_matrices diagonal = dc__batch_slice_dense_view(f, w->rotated, dtype, 1, n);
  diagonal.batch_stride = n * n;
  diagonal.col_stride = n + 1;
  for (int32_t i = 0; i < f->count; i++) {
    dc__stream_copy(f->stream, warm_start_probe(w, 0) + (size_t)i * bytes, w->host_probes, bytes);
  }
  dc__stream_copy(f->stream, warm_start_probe(w, 2), warm_start_probe(w, 0), (size_t)f->count * bytes);
  warm_start_gemm(
      w, f,
      &(warm_start_product){
          .dtype = dtype, .a = q, .b = warm_start_probe(w, 0), .cols = DC__PROBES, .c = warm_start_probe(w, 1)});
  warm_start_gemm(w, f,
                  &(warm_start_product){.dtype = dtype,
                                        .trans_a = true,
                                        .a = q,
                                        .b = warm_start_probe(w, 1),
                                        .cols = DC__PROBES,
                                        .beta = -1,
                                        .c = warm_start_probe(w, 2)});
  dc__batch_slice_clear_reports(f);
  dc__symmetric_load_slice(f, &w->job, dtype, w->s);
  warm_start_gemm(w, f, &(warm_start_product){.dtype = dtype, .a = w->s, .b = q, .cols = n, .c = w->result});
  warm_start_gemm(
      w, f, &(warm_start_product){.dtype = dtype, .trans_a = true, .a = q, .b = w->result, .cols = n, .c = w->rotated});
  dc__cuda_load_uniform(f->stream, diagonal, dc__batch_slice_dense_view(f, w->values, dtype, 1, n), UINT32_MAX, 1);
  dc__batch_slice_clear_reports(f);
  dc__batch_slice_measure(f, &back);
}

/* Returns the mask of the matrices with an orthonormal basis and a diagonal that is allowed. Sets factors to the
 * diagonals' inverse square roots. */
static uint32_t check_diagonal(dc__eigh_cuda *w, dc__batch_slice *f, int32_t dtype, dc__spectral_task *tasks) {
  const int64_t n = w->job.n;
  uint32_t mask = 0;
  dc__stream_copy(f->stream, w->host_values, w->values, (size_t)(f->count * n) * dc_dtype_size(dtype));
  dc__batch_slice_sync_reports(f);
  for (int32_t i = 0; i < f->count; i++) {
    dc__spectral_task *t = &tasks[i];
    for (int64_t j = 0; j < n; j++) {
      t->values[j] = ldexp(dc__load_element(w->host_values, dtype == DC_FLOAT64, i * n + j), t->exponent);
    }
    const bool orthonormal = dc__double_from_bits(f->host_reports[i].max_abs) <= dc__orthonormal_tolerance(dtype);
    mask |= (uint32_t)(orthonormal && dc__regularise_eigenvalues(&w->job, t)) << i;
    t->status = DC_OK; /* an approximate eigenvalue may be negative although the matrix's are not */
  }
  for (int32_t i = 0; i < f->count; i++) { /* a loop of its own, since host_values had another type so far */
    for (int64_t j = 0; j < n; j++) {
      w->host_values[i * n + j] = (mask >> i & 1u) != 0 ? 1 / sqrt(tasks[i].values[j]) : 0;
    }
  }
  dc__stream_copy(f->stream, w->factors, w->host_values, (size_t)(f->count * n) * sizeof *w->factors);
  return mask;
}

static dc__cuda_warm_start_args warm_start_args(const dc__eigh_cuda *w, const dc__batch_slice *f, int32_t dtype,
                                                const dc__spectral_task *tasks) {
  dc__cuda_warm_start_args args = {.from = w->rotated, .to = w->result, .factors = w->factors, .n = w->job.n};
  args.count = f->count;
  args.wide = args.to_wide = dtype == DC_FLOAT64;
  for (int32_t i = 0; i < f->count; i++) {
    const dc__pow2_scale scale = dc__pow2_scale_of(tasks[i].exponent);
    args.first[i] = scale.first;
    args.second[i] = scale.second;
  }
  return args;
}

/* Returns the bits of `mask` whose matrices have a rest that is small enough for first order. */
static uint32_t check_rest(dc__eigh_cuda *w, dc__batch_slice *f, int32_t dtype, uint32_t mask,
                           dc__spectral_task *tasks) {
  const int64_t n = w->job.n;
  const dc__cuda_warm_start_args rest = warm_start_args(w, f, dtype, tasks);
  const int64_t norms = f->count * DC__PROBES;
  dc__cuda_warm_start_residual(f->stream, &rest);
  for (int32_t step = 0; step < DC__WARM_POWER_STEPS; step++) {
    if (step > 0) {
      warm_start_gemm(w, f,
                      &(warm_start_product){.dtype = dtype,
                                            .a = w->result,
                                            .b = warm_start_probe(w, step - 1),
                                            .cols = DC__PROBES,
                                            .c = warm_start_probe(w, step)});
    }
    dc__cuda_matrix_norm_args columns = {.sums = w->norms + step * norms, .reports = f->reports, .squares = 1};
    columns.from = dc__batch_slice_dense_view(f, warm_start_probe(w, step), dtype, DC__PROBES, n);
    columns.from.row_stride = 1;
    columns.from.col_stride = DC__PROBES;
    dc__cuda_matrix_norm(f->stream, &columns);
  }
  dc__stream_copy(f->stream, w->host_values, w->norms, (size_t)(DC__WARM_POWER_STEPS * norms) * sizeof *w->norms);
  dc__device_sync_internal(f->l->device, NULL);
  for (int32_t i = 0; i < f->count; i++) {
    double max_stretch = 0; /* the largest square of a step's growth */
    for (int64_t at = i * DC__PROBES; at < (i + 1) * DC__PROBES; at++) {
      for (int32_t step = 1; step < DC__WARM_POWER_STEPS; step++) {
        const double before = w->host_values[(step - 1) * norms + at];
        const double stretch = before > 0 ? w->host_values[step * norms + at] / before : 0;
        max_stretch = stretch > max_stretch || isnan(stretch) ? stretch : max_stretch; /* NaN stays */
      }
    }
    tasks[i].change = (mask >> i & 1u) != 0 ? max_stretch : 0;
    mask &= ~((uint32_t) !(max_stretch <= w->job.r->options.tolerance) << i);
  }
  return mask;
}

/* Loads the basis, converted to `dtype`, into `to`. */
static void warm_start_load_basis(const dc__eigh_cuda *w, const dc__batch_slice *f, int32_t dtype, void *to) {
  const int64_t n = w->job.n;
  dc__cuda_load_uniform(f->stream, dc__batch_slice_view(f, &w->job.r->basis),
                        dc__batch_slice_dense_view(f, to, dtype, n, n), UINT32_MAX, 1);
}

/* out = (Q G) (Q G)^T. */
static void warm_start_store(dc__eigh_cuda *w, dc__batch_slice *f, int32_t dtype, const void *q, uint32_t mask,
                             dc__spectral_task *tasks) {
  const int64_t n = w->job.n;
  const int32_t finishing = dc__warm_start_result_dtype(w->job.r, dtype);
  dc__cuda_warm_start_args args = warm_start_args(w, f, dtype, tasks);
  args.root = w->job.r->root;
  args.to_wide = finishing == DC_FLOAT64;
  for (int64_t i = 0; i < f->count * n; i++) {
    const bool wanted = (mask >> (i / n) & 1u) != 0;
    w->host_values[i] = wanted ? pow(tasks[i / n].values[i % n], 1 / (double)args.root) : 1;
  }
  dc__stream_copy(f->stream, w->factors, w->host_values, (size_t)(f->count * n) * sizeof *w->factors);
  dc__cuda_warm_start_root(f->stream, &args);
  if (finishing != dtype) {
    warm_start_load_basis(w, f, finishing, w->s);
    q = w->s;
  }
  warm_start_gemm(w, f, &(warm_start_product){.dtype = finishing, .a = q, .b = w->result, .cols = n, .c = w->rotated});
  warm_start_gemm(
      w, f,
      &(warm_start_product){
          .dtype = finishing, .a = w->rotated, .trans_b = true, .b = w->rotated, .cols = n, .c = w->result});
  dc__symmetric_store_slice(f, &w->job, finishing, w->result, mask, tasks);
  for (int32_t i = 0; i < f->count; i++) {
    if ((mask >> i & 1u) != 0) {
      tasks[i].solved = tasks[i].status == DC_OK;
      tasks[i].path = tasks[i].solved ? DC_PATH_WARM : tasks[i].path;
      tasks[i].status = DC_OK; /* failed here, but may succeed without the warm start */
    }
  }
}

dc_status dc__root_warm_start_cuda(dc__eigh_cuda *w, dc__batch_slice *f, dc__spectral_task *tasks) {
  const dc__mat *basis = &w->job.r->basis;
  const void *q =
      basis->pointers != NULL ? w->basis : dc__element_ptr(basis->data, basis->dtype, f->first * w->job.n * w->job.n);
  if (basis->pointers != NULL) { /* products need a contiguous basis */
    warm_start_load_basis(w, f, basis->dtype, w->basis);
  }
  rotate_to_basis(w, f, basis->dtype, q);
  uint32_t mask = check_diagonal(w, f, basis->dtype, tasks);
  mask = mask != 0 ? check_rest(w, f, basis->dtype, mask, tasks) : 0;
  if (mask != 0) {
    warm_start_store(w, f, basis->dtype, q, mask, tasks);
  }
  return dc__linalg_synchronize(f->l);
}
