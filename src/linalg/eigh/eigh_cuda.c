/* Eigendecompositions on a device, one slice of the batch at a time. Kernels load and store, the device's solver
 * decomposes, and the host maps eigenvalues by the same code as for the CPU. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/eigh/eigh_cuda.h"

enum { ALIGNMENT = 256 }; /* alignment of arrays */

/* ---- loading ---- */

/* Measures and checks the matrices, and sets each one's compute type. */
static void measure_slice(dc__eigh_cuda *w) {
  dc__batch_slice *f = &w->slice;
  const dc__cuda_matrices a = dc__batch_slice_view(f, &w->job.r->a);
  const dc__symmetric_weights weights = dc__symmetric_weights_of(w->job.r->options.symmetry);
  dc__batch_slice_measure_symmetric(f, &a, weights.low, weights.high);
  dc__batch_slice_reduce(f, &a, false);
  dc__batch_slice_sync_reports(f);
  dc__symmetric_check_slice(f, &w->job, w->s, w->tasks);
  for (int32_t i = 0; i < f->count; i++) {
    w->tasks[i].dtype = dc__spectral_compute_dtype(w->job.r, f->host_reports[i].norm);
    w->tasks[i].values = w->eigenvalues + i * w->job.n;
  }
}

static bool needs_decomposition(const dc__spectral_task *t) {
  return t->status == DC_OK && !t->solved;
}

/* Moves *begin to the next matrix that needs a decomposition, and counts the neighbours from there that need one of the
 * same type. */
static int32_t count_same_dtype(const dc__eigh_cuda *w, int32_t *begin) {
  const int32_t count = w->slice.count;
  while (*begin < count && !needs_decomposition(&w->tasks[*begin])) {
    (*begin)++;
  }
  int32_t end = *begin;
  while (end < count && needs_decomposition(&w->tasks[end]) && w->tasks[end].dtype == w->tasks[*begin].dtype) {
    end++;
  }
  return end - *begin;
}

/* ---- results ---- */

/* Returns the mask of the matrices with eigenvectors in s. */
static uint32_t solved_mask(const dc__batch_slice *f, const dc__spectral_task *tasks) {
  uint32_t mask = 0;
  for (int32_t i = 0; i < f->count; i++) {
    mask |= (uint32_t)(tasks[i].status == DC_OK && tasks[i].solved) << i;
  }
  return mask;
}

/* Stores rows as the columns of the caller's matrices. */
static void store_vectors(const dc__eigh_cuda *w, const dc__batch_slice *f, int32_t dtype, void *rows, uint32_t mask,
                          const dc__mat *to, bool descending) {
  const int64_t n = w->job.n;
  dc__cuda_matrices from = dc__batch_slice_dense_view(f, rows, dtype, n, n);
  from.row_stride = 1;
  from.col_stride = descending ? -n : n;
  from.data = dc__element_ptr(rows, dtype, descending ? (n - 1) * n : 0);
  dc__cuda_load_uniform(f->stream, from, dc__batch_slice_view(f, to), mask, 1);
}

static void store_eigh(const dc__eigh_cuda *w, const dc__batch_slice *f, int32_t dtype, dc__spectral_task *tasks) {
  const dc__spectral_request *r = w->job.r;
  const int64_t n = w->job.n;
  const bool descending = r->options.descending == 1;
  const dc__mat values = {.data = r->values,
                          .pointers = w->value_pointers,
                          .dtype = r->a.dtype,
                          .batch_stride = n,
                          .rows = 1,
                          .cols = n,
                          .col_stride = 1};
  dc__cuda_load_args args = {.from = dc__batch_slice_dense_view(f, w->values, dtype, 1, n),
                             .to = dc__batch_slice_view(f, &values)};
  args.from.col_stride = descending ? -1 : 1;
  args.from.data = dc__element_ptr(w->values, dtype, descending ? n - 1 : 0);
  for (int32_t i = 0; i < f->count; i++) {
    args.factor[i] = ldexp(1, tasks[i].exponent);
    tasks[i].solved = tasks[i].solved && dc__eigh_fits(&w->job, &tasks[i]);
  }
  args.mask = solved_mask(f, tasks);
  if (r->values != NULL) {
    dc__cuda_load(f->stream, &args);
  }
  if (r->vectors) {
    store_vectors(w, f, dtype, w->s, args.mask, &r->out, descending);
  }
}

/* As finish_power() of matrix_power.c: V diag(f) V^T = Y^T Y, with rows of Y = sqrt(f) times the eigenvectors. */
static void store_power(const dc__eigh_cuda *w, dc__batch_slice *f, int32_t dtype, dc__spectral_task *tasks) {
  const dc__spectral_request *r = w->job.r;
  const int64_t n = w->job.n;
  const dc__cuda_scale_args scale = {
      .x = w->s, .factors = w->factors, .rows = n, .cols = n, .count = f->count, .wide = dtype == DC_FLOAT64};
  dc__gemm square = dc__square_gemm(dtype, n, w->s, w->s, w->result);
  for (int32_t i = 0; i < f->count; i++) {
    dc__spectral_task *t = &tasks[i];
    const bool regular = t->solved && dc__regularise_eigenvalues(&w->job, t);
    for (int64_t j = 0; j < n; j++) {
      w->host_values[i * n + j] = regular && t->values[j] >= 0 ? sqrt(pow(t->values[j], r->power)) : 0;
    }
  }
  if (r->basis.data != NULL) {
    dc__stream_copy(f->stream, w->rotated, w->s, (size_t)(f->count * n * n) * dc_dtype_size(dtype));
  }
  dc__stream_copy(f->stream, w->factors, w->host_values, (size_t)(f->count * n) * sizeof *w->factors);
  dc__cuda_scale(f->stream, &scale);
  square.trans_a = true;
  square.batch = f->count;
  square.batch_invariant = r->grouped != NULL;
  square.stride_a = square.stride_b = square.stride_c = n * n;
  dc__linalg_gemm(f->l, &square, f->gemm_workspace);
  dc__symmetric_store_slice(f, &w->job, dtype, w->result, solved_mask(f, tasks), tasks);
  if (r->basis.data != NULL) { /* only of matrices whose results fit */
    store_vectors(w, f, dtype, w->rotated, solved_mask(f, tasks), &r->basis, false);
  }
}

/* ---- solving ---- */

/* Reads the solver's status of a matrix. A matrix that failed in float32 is to be retried in float64. */
static void check_solver_info(const dc__eigh_cuda *w, int32_t dtype, int32_t i, dc__spectral_task *t) {
  const int64_t n = w->job.n;
  bool good = w->host_info[i] == 0;
  for (int64_t j = 0; j < n; j++) {
    const double value = dc__load_element(w->host_values, dtype == DC_FLOAT64, i * n + j);
    good = good && isfinite(value);
    t->values[j] = ldexp(value, t->exponent);
  }
  t->solved = good;
  if (good) {
    t->path = t->path == DC_PATH_RETRIED ? DC_PATH_RETRIED : DC_PATH_FRESH;
  } else if (dtype == DC_FLOAT32) {
    t->path = DC_PATH_RETRIED;
    t->dtype = DC_FLOAT64;
  } else {
    t->status = DC_E_NOT_CONVERGED;
  }
}

/* Loads, decomposes and stores a slice whose matrices have one compute type. */
static dc_status decompose_slice(dc__eigh_cuda *w, dc__batch_slice *f, dc__spectral_task *tasks) {
  const int32_t dtype = tasks[0].dtype;
  const size_t bytes = (size_t)(f->count * w->job.n) * dc_dtype_size(dtype);
  dc__failure failure = {.status = DC_OK};
  w->eigen.dtype = dtype;
  w->eigen.count = f->count;
  w->eigen.failure = &failure;
  dc__batch_slice_clear_reports(f);
  dc__symmetric_load_slice(f, &w->job, dtype, w->s);
  DC__TRY(f->l->device->ops->stream_eigh(f->stream, &w->eigen));
  dc__stream_copy(f->stream, w->host_values, w->values, bytes);
  dc__stream_copy(f->stream, w->host_info, w->found, (size_t)f->count * sizeof *w->host_info);
  DC__TRY(dc__linalg_synchronize(f->l));
  if (failure.status != DC_OK) {
    return dc__fail(failure.status, "%s: %s", w->job.r->fn, failure.text);
  }
  for (int32_t i = 0; i < f->count; i++) {
    check_solver_info(w, dtype, i, &tasks[i]);
  }
  if (w->job.r->op == DC__SPECTRAL_EIGH) {
    store_eigh(w, f, dtype, tasks);
  } else {
    store_power(w, f, dtype, tasks);
  }
  return dc__linalg_synchronize(f->l);
}

static dc_status eigh_run(dc__eigh_cuda *w) {
  const dc__spectral_request *r = w->job.r;
  dc__spectral_task failed = {.status = DC_OK};
  int64_t at = 0;
  for (int64_t first = 0; dc__batch_slice_advance(&w->slice, first, r->a.batch); first += w->slice.count) {
    int32_t begin = 0;
    measure_slice(w);
    for (int32_t count; dc__wants_warm_start(r) && (count = count_same_dtype(w, &begin)) > 0; begin += count) {
      dc__batch_slice some = dc__batch_slice_subslice(&w->slice, begin, count);
      DC__TRY(dc__root_warm_start_cuda(w, &some, w->tasks + begin));
    }
    begin = 0; /* matrices to be retried stay in place */
    for (int32_t count; (count = count_same_dtype(w, &begin)) > 0;) {
      dc__batch_slice some = dc__batch_slice_subslice(&w->slice, begin, count);
      DC__TRY(decompose_slice(w, &some, w->tasks + begin));
    }
    dc__batch_slice_write_info(&w->slice, r, w->tasks, &failed, &at);
  }
  return failed.status == DC_OK ? DC_OK : dc__spectral_fail(r, &failed, at);
}

/* ---- memory ---- */

/* Numbers of a slice's arrays on the device, in the order of eigh_alloc(): all, without a basis, and with a basis but
 * no warm start. NORMS is a matrix's number of norms. */
enum { ARRAYS = 9, ALWAYS = 5, WITH_BASIS = 6, NORMS = DC__WARM_POWER_STEPS * DC__PROBES };

static size_t eigh_align_up(size_t bytes) {
  return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Sets each array's bytes per matrix, 0 for one that is not needed. Returns their sum. */
static size_t array_bytes(const dc__spectral_request *r, size_t arrays[ARRAYS]) {
  const int64_t n = r->a.rows;
  const size_t row = (size_t)n * sizeof(double), square = (size_t)n * row;
  const size_t wanted[ARRAYS] = {square,
                                 square,
                                 row,
                                 row,
                                 sizeof(int32_t),
                                 square,
                                 NORMS * row,
                                 NORMS * sizeof(double),
                                 r->grouped != NULL ? square : 0};
  const int32_t count = dc__wants_warm_start(r) ? ARRAYS : r->basis.data != NULL ? WITH_BASIS : ALWAYS;
  size_t total = 0;
  memset(arrays, 0, ARRAYS * sizeof *arrays);
  for (int32_t i = 0; i < count; i++) {
    arrays[i] = eigh_align_up(wanted[i]);
    total += arrays[i];
  }
  return total;
}

/* Device tables of pointers for a batch whose matrices are not contiguous. */
enum { TABLE_A, TABLE_OUT, TABLE_BASIS, TABLE_VALUES, TABLES };

static size_t table_bytes(const dc__spectral_request *r) {
  return r->grouped == NULL ? 0 : TABLES * (size_t)r->a.batch * sizeof(void *);
}

static void fill_tables(dc__eigh_cuda *w, dc__spectral_request *r, void **host_table, void *device_table) {
  void *const *tables = device_table;
  const int64_t batch = r->a.batch;
  for (int64_t i = 0; i < batch; i++) {
    host_table[TABLE_A * batch + i] = r->grouped[i].a.data;
    host_table[TABLE_OUT * batch + i] = r->grouped[i].out.data;
    host_table[TABLE_BASIS * batch + i] = r->grouped[i].basis.data;
    host_table[TABLE_VALUES * batch + i] = r->grouped[i].values;
  }
  r->a.pointers = tables + TABLE_A * batch;
  r->out.pointers = tables + TABLE_OUT * batch;
  r->basis.pointers = tables + TABLE_BASIS * batch;
  w->value_pointers = tables + TABLE_VALUES * batch;
  dc__stream_copy(w->slice.stream, device_table, host_table, table_bytes(r));
}

/* Sets the solver's workspaces to the larger ones of both types. */
static dc_status query_workspace(dc__eigh_cuda *w) {
  dc_device *device = w->job.l->device;
  dc__eigh narrow = w->eigen;
  narrow.dtype = DC_FLOAT32;
  w->eigen.dtype = DC_FLOAT64;
  dc_status status = device->ops->eigh_workspace_size(device, &narrow);
  status = status != DC_OK ? status : device->ops->eigh_workspace_size(device, &w->eigen);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", w->job.r->fn, dc_last_error());
  }
  const dc__eigh *e = &w->eigen;
  w->eigen.workspace_bytes = narrow.workspace_bytes > e->workspace_bytes ? narrow.workspace_bytes : e->workspace_bytes;
  w->eigen.host_bytes = narrow.host_bytes > e->host_bytes ? narrow.host_bytes : e->host_bytes;
  return DC_OK;
}

/* Allocates *host, which the caller frees. `tables` is on the device. */
static dc_status eigh_alloc_host(dc__eigh_cuda *w, dc__spectral_request *r, void *tables, void **host) {
  const int64_t max_count = w->slice.max_count, n = w->job.n;
  const int64_t row = n > NORMS ? n : NORMS;
  size_t bytes = 0, offset = 0;
  const bool fits = dc__linalg_add_bytes(&bytes, (int64_t)w->eigen.host_bytes, 1) &&
                    dc__linalg_add_bytes(&bytes, max_count * (row + n), sizeof(double)) &&
                    dc__linalg_add_bytes(&bytes, max_count, sizeof(int32_t)) &&
                    dc__linalg_add_bytes(&bytes, n * DC__PROBES, sizeof(double)) &&
                    dc__linalg_add_bytes(&bytes, (int64_t)table_bytes(r), 1);
  *host = fits ? dc__calloc(1, bytes) : NULL;
  if (*host == NULL) {
    return DC_E_NO_MEMORY;
  }
  w->eigen.host = dc__linalg_suballoc(*host, &offset, (int64_t)w->eigen.host_bytes, 1);
  w->host_values = dc__linalg_suballoc(*host, &offset, max_count * (row + n), sizeof(double));
  w->eigenvalues = w->host_values + max_count * row;
  w->host_info = dc__linalg_suballoc(*host, &offset, max_count, sizeof(int32_t));
  w->host_probes = dc__linalg_suballoc(*host, &offset, n * DC__PROBES, sizeof(double));
  if (dc__wants_warm_start(r)) {
    dc__warm_start_probes(w->host_probes, r->basis.dtype, n);
  }
  if (r->grouped != NULL) {
    fill_tables(w, r, dc__linalg_suballoc(*host, &offset, (int64_t)table_bytes(r), 1), tables);
  }
  return DC_OK;
}

/* Allocates device memory for solver and arrays, and host memory. r is the job's request, whose pointers it sets. */
static dc_status eigh_alloc(dc__eigh_cuda *w, dc__spectral_request *r, int64_t batch, void **host) {
  size_t arrays[ARRAYS];
  const size_t bytes = array_bytes(r, arrays);
  w->eigen.count = dc__batch_slice_max_count(batch, bytes);
  DC__TRY(query_workspace(w));
  DC__TRY(dc__batch_slice_init(&w->slice, w->job.l, r->fn, batch, w->job.n, bytes,
                               eigh_align_up(table_bytes(r)) + w->eigen.workspace_bytes));
  if (w->slice.max_count == 0) {
    return DC_OK;
  }
  void **const to[ARRAYS] = {&w->s,
                             &w->result,
                             &w->values,
                             (void **)&w->factors,
                             (void **)&w->found,
                             &w->rotated,
                             (void **)&w->probes,
                             (void **)&w->norms,
                             &w->basis};
  char *at = w->slice.matrices;
  for (int32_t i = 0; i < ARRAYS; i++) {
    *to[i] = at;
    at += (size_t)w->slice.max_count * arrays[i];
  }
  w->eigen.workspace = at + eigh_align_up(table_bytes(r));
  w->eigen.a = w->s;
  w->eigen.values = w->values;
  w->eigen.info = w->found;
  return eigh_alloc_host(w, r, at, host);
}

dc_status dc__spectral_cuda(dc_linalg *l, const dc__spectral_request *request) {
  dc__spectral_request own = *request;
  const dc__spectral_request *r = &own;
  const int64_t n = r->a.rows;
  dc__eigh_cuda w = {
      .job = {.l = l, .r = r, .n = n},
      .eigen = {.n = n, .vectors = r->op != DC__SPECTRAL_EIGH || r->vectors, .batch_invariant = r->grouped != NULL}};
  void *host = NULL;
  int64_t bytes;
  if (__builtin_mul_overflow(n, n, &bytes) || __builtin_mul_overflow(bytes, 64, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", r->fn);
  }
  const dc__spectral_task nothing = {.status = DC_OK};
  for (int64_t i = 0; n == 0 && !l->query && i < r->a.batch; i++) {
    dc__spectral_write_info(r, &nothing, i);
  }
  dc_status status = eigh_alloc(&w, &own, n > 0 ? r->a.batch : 0, &host);
  if (status == DC_OK && w.slice.max_count > 0) {
    status = eigh_run(&w);
    if (status != DC_OK) { /* copies that use this memory may still run */
      dc__device_sync_internal(l->device, NULL);
    }
  }
  dc__free(host);
  return status;
}
