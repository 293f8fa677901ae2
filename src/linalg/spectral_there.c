/* Eigendecompositions on a device, a few matrices at a time. Kernels bring them in and out, the device's solver has the
 * decomposition itself, and what becomes of eigenvalues is decided here, by the CPU's own text. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "linalg/spectral_there.h"

enum { PLACE = 256 }; /* arrays lie at multiples of it */

/* ---- in ---- */

/* In which type each matrix is decomposed, where it can be. */
static void look(dc__decomposing *w) {
  dc__flight *f = &w->flight;
  const dc__cuda_matrices a = dc__flight_part(f, &w->job.r->a);
  dc__flight_measure(f, &a, true);
  dc__flight_fold(f, &a, false);
  dc__flight_look(f);
  dc__symmetric_seen(f, &w->job, w->s, w->tasks);
  for (int32_t i = 0; i < f->count; i++) {
    w->tasks[i].dtype = dc__computing_type(w->job.r, f->seen[i].fold);
    w->tasks[i].values = w->eigenvalues + i * w->job.n;
  }
}

static bool waits(const dc__task *t) {
  return t->status == DC_OK && !t->solved;
}

/* The number of the first matrices that wait for a decomposition of one type, from *begin on. */
static int32_t together(const dc__decomposing *w, int32_t *begin) {
  const int32_t count = w->flight.count;
  while (*begin < count && !waits(&w->tasks[*begin])) {
    (*begin)++;
  }
  int32_t end = *begin;
  while (end < count && waits(&w->tasks[end]) && w->tasks[end].dtype == w->tasks[*begin].dtype) {
    end++;
  }
  return end - *begin;
}

/* ---- out ---- */

/* A bit a matrix that has its eigenvectors in s. */
static uint32_t solved(const dc__flight *f, const dc__task *tasks) {
  uint32_t mask = 0;
  for (int32_t i = 0; i < f->count; i++) {
    mask |= (uint32_t)(tasks[i].status == DC_OK && tasks[i].solved) << i;
  }
  return mask;
}

/* The rows of s into the columns of the caller's matrices. */
static void give_vectors(const dc__decomposing *w, const dc__flight *f, int32_t dtype, uint32_t mask, const dc__mat *to,
                         bool descending) {
  const int64_t n = w->job.n;
  dc__cuda_matrices from = dc__flight_dense(f, w->s, dtype, n, n);
  from.row_stride = 1;
  from.col_stride = descending ? -n : n;
  from.data = dc__element(w->s, dtype, descending ? (n - 1) * n : 0);
  dc__cuda_load_alike(f->stream, from, dc__flight_part(f, to), mask, 1);
}

static void give_eigh(const dc__decomposing *w, const dc__flight *f, int32_t dtype, dc__task *tasks) {
  const dc__spectral *r = w->job.r;
  const int64_t n = w->job.n;
  const bool descending = r->options.descending == 1;
  const dc__mat values = {.data = r->values,
                          .places = w->values_at,
                          .dtype = r->a.dtype,
                          .batch_stride = n,
                          .rows = 1,
                          .cols = n,
                          .col_stride = 1};
  dc__cuda_load_args args = {.from = dc__flight_dense(f, w->values, dtype, 1, n), .to = dc__flight_part(f, &values)};
  args.from.col_stride = descending ? -1 : 1;
  args.from.data = dc__element(w->values, dtype, descending ? n - 1 : 0);
  for (int32_t i = 0; i < f->count; i++) {
    args.factor[i] = ldexp(1, tasks[i].exponent);
    tasks[i].solved = tasks[i].solved && dc__eigh_fits(&w->job, &tasks[i]);
  }
  args.mask = solved(f, tasks);
  if (r->values != NULL) {
    dc__cuda_load(f->stream, &args);
  }
  if (r->vectors) {
    give_vectors(w, f, dtype, args.mask, &r->out, descending);
  }
}

/* As finish_power() of power.c: V diag(f) V^T = Y^T Y, with rows of Y = sqrt(f) times the eigenvectors. */
static void give_power(const dc__decomposing *w, dc__flight *f, int32_t dtype, dc__task *tasks) {
  const dc__spectral *r = w->job.r;
  const int64_t n = w->job.n;
  const dc__cuda_scale_args scale = {w->s, w->factors, n, n, f->count, dtype == DC_FLOAT64};
  dc__gemm square = dc__square_product(dtype, n, w->s, w->s, w->result);
  for (int32_t i = 0; i < f->count; i++) {
    dc__task *t = &tasks[i];
    const bool regular = t->solved && dc__regularise(&w->job, t);
    for (int64_t j = 0; j < n; j++) {
      w->numbers[i * n + j] = regular && t->values[j] >= 0 ? sqrt(pow(t->values[j], r->power)) : 0;
    }
  }
  const uint32_t mask = solved(f, tasks);
  if (r->basis.data != NULL) {
    give_vectors(w, f, dtype, mask, &r->basis, false);
  }
  dc__stream_copy(f->stream, w->factors, w->numbers, (size_t)(f->count * n) * sizeof *w->factors);
  dc__cuda_scale(f->stream, &scale);
  square.trans_a = true;
  square.batch = f->count;
  square.stride_a = square.stride_b = square.stride_c = n * n;
  dc__linalg_gemm(f->l, &square, f->product);
  dc__symmetric_give(f, &w->job, dtype, w->result, mask, tasks);
}

/* ---- between ---- */

/* What the solver says of a matrix. One that failed in float32 waits for another time. */
static void judge(const dc__decomposing *w, int32_t dtype, int32_t i, dc__task *t) {
  const int64_t n = w->job.n;
  bool good = w->said[i] == 0;
  for (int64_t j = 0; j < n; j++) {
    const double value = dc__get(w->numbers, dtype == DC_FLOAT64, i * n + j);
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

/* Matrices that go together, from the caller's memory and back to it. */
static dc_status decompose(dc__decomposing *w, dc__flight *f, dc__task *tasks) {
  const int32_t dtype = tasks[0].dtype;
  const size_t bytes = (size_t)(f->count * w->job.n) * dc_dtype_size(dtype);
  dc__failure failure = {.status = DC_OK};
  w->eigen.dtype = dtype;
  w->eigen.count = f->count;
  w->eigen.failure = &failure;
  dc__flight_forget(f);
  dc__symmetric_bring(f, &w->job, dtype, w->s);
  DC__TRY(f->l->device->ops->stream_eigen(f->stream, &w->eigen));
  dc__stream_copy(f->stream, w->numbers, w->values, bytes);
  dc__stream_copy(f->stream, w->said, w->found, (size_t)f->count * sizeof *w->said);
  DC__TRY(dc__linalg_done(f->l));
  if (failure.status != DC_OK) {
    return dc__fail(failure.status, "%s: %s", w->job.r->fn, failure.text);
  }
  for (int32_t i = 0; i < f->count; i++) {
    judge(w, dtype, i, &tasks[i]);
  }
  if (w->job.r->op == DC__SPECTRAL_EIGH) {
    give_eigh(w, f, dtype, tasks);
  } else {
    give_power(w, f, dtype, tasks);
  }
  return dc__linalg_done(f->l);
}

static dc_status run(dc__decomposing *w) {
  const dc__spectral *r = w->job.r;
  dc__task failed = {.status = DC_OK};
  int64_t at = 0;
  for (int64_t first = 0; dc__flight_next(&w->flight, first, r->a.batch); first += w->flight.count) {
    int32_t begin = 0;
    look(w);
    for (int32_t count; dc__wants_warm(r) && (count = together(w, &begin)) > 0; begin += count) {
      dc__flight some = dc__flight_some(&w->flight, begin, count);
      DC__TRY(dc__warm_there(w, &some, w->tasks + begin));
    }
    begin = 0; /* those that are to be repeated stay where they are */
    for (int32_t count; (count = together(w, &begin)) > 0;) {
      dc__flight some = dc__flight_some(&w->flight, begin, count);
      DC__TRY(decompose(w, &some, w->tasks + begin));
    }
    dc__flight_report(&w->flight, r, w->tasks, &failed, &at);
  }
  return failed.status == DC_OK ? DC_OK : dc__spectral_explain(r, &failed, at);
}

/* ---- memory ---- */

/* A flight's arrays on the device, in the order of open(): how many bytes of each are a matrix's. */
enum { ARRAYS = 9, ALWAYS = 5, NORMS = DC__WARM_STEPS * DC__PROBES };

static size_t rounded(size_t bytes) {
  return (bytes + PLACE - 1) / PLACE * PLACE;
}

static size_t array_bytes(const dc__spectral *r, size_t arrays[ARRAYS]) {
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
                                 r->each != NULL ? square : 0};
  size_t total = 0;
  memset(arrays, 0, ARRAYS * sizeof *arrays);
  for (int32_t i = 0; i < (dc__wants_warm(r) ? ARRAYS : ALWAYS); i++) {
    arrays[i] = rounded(wanted[i]);
    total += arrays[i];
  }
  return total;
}

/* Tables of where a batch's matrices lie that are in many places. */
enum { TABLE_A, TABLE_OUT, TABLE_BASIS, TABLE_VALUES, TABLES };

static size_t table_bytes(const dc__spectral *r) {
  return r->each == NULL ? 0 : TABLES * (size_t)r->a.batch * sizeof(void *);
}

static void fill_tables(dc__decomposing *w, dc__spectral *r, void **here, void *there) {
  void *const *tables = there;
  const int64_t batch = r->a.batch;
  for (int64_t i = 0; i < batch; i++) {
    here[TABLE_A * batch + i] = r->each[i].a.data;
    here[TABLE_OUT * batch + i] = r->each[i].out.data;
    here[TABLE_BASIS * batch + i] = r->each[i].basis.data;
    here[TABLE_VALUES * batch + i] = r->each[i].values;
  }
  r->a.places = tables + TABLE_A * batch;
  r->out.places = tables + TABLE_OUT * batch;
  r->basis.places = tables + TABLE_BASIS * batch;
  w->values_at = tables + TABLE_VALUES * batch;
  dc__stream_copy(w->flight.stream, there, here, table_bytes(r));
}

/* The most that the solver wants in either type. */
static dc_status ask(dc__decomposing *w) {
  dc_device *device = w->job.l->device;
  dc__eigen narrow = w->eigen;
  narrow.dtype = DC_FLOAT32;
  w->eigen.dtype = DC_FLOAT64;
  dc_status status = device->ops->eigen_room(device, &narrow);
  status = status != DC_OK ? status : device->ops->eigen_room(device, &w->eigen);
  if (status != DC_OK) {
    return dc__fail(status, "%s: %s", w->job.r->fn, dc_last_error());
  }
  const dc__eigen *e = &w->eigen;
  w->eigen.workspace_bytes = narrow.workspace_bytes > e->workspace_bytes ? narrow.workspace_bytes : e->workspace_bytes;
  w->eigen.host_bytes = narrow.host_bytes > e->host_bytes ? narrow.host_bytes : e->host_bytes;
  return DC_OK;
}

/* What is here; the caller's to free. tables: of the device. */
static dc_status open_here(dc__decomposing *w, dc__spectral *r, void *tables, void **host) {
  const int64_t most = w->flight.most, n = w->job.n;
  const int64_t row = n > NORMS ? n : NORMS;
  size_t bytes = 0, offset = 0;
  const bool fits =
      dc__linalg_add(&bytes, (int64_t)w->eigen.host_bytes, 1) &&
      dc__linalg_add(&bytes, most * (row + n), sizeof(double)) && dc__linalg_add(&bytes, most, sizeof(int32_t)) &&
      dc__linalg_add(&bytes, n * DC__PROBES, sizeof(double)) && dc__linalg_add(&bytes, (int64_t)table_bytes(r), 1);
  *host = fits ? dc__calloc(1, bytes) : NULL;
  if (*host == NULL) {
    return DC_E_NO_MEMORY;
  }
  w->eigen.host = dc__linalg_part(*host, &offset, (int64_t)w->eigen.host_bytes, 1);
  w->numbers = dc__linalg_part(*host, &offset, most * (row + n), sizeof(double));
  w->eigenvalues = w->numbers + most * row;
  w->said = dc__linalg_part(*host, &offset, most, sizeof(int32_t));
  w->noise = dc__linalg_part(*host, &offset, n * DC__PROBES, sizeof(double));
  if (dc__wants_warm(r)) {
    dc__warm_noise(w->noise, r->basis.dtype, n);
  }
  if (r->each != NULL) {
    fill_tables(w, r, dc__linalg_part(*host, &offset, (int64_t)table_bytes(r), 1), tables);
  }
  return DC_OK;
}

/* Memory of the device, for the solver and the arrays, and here. r: the job's. */
static dc_status open(dc__decomposing *w, dc__spectral *r, int64_t batch, void **host) {
  size_t arrays[ARRAYS];
  const size_t bytes = array_bytes(r, arrays);
  w->eigen.count = dc__flight_most(batch, bytes);
  DC__TRY(ask(w));
  DC__TRY(dc__flight_open(&w->flight, w->job.l, r->fn, batch, w->job.n, bytes,
                          rounded(table_bytes(r)) + w->eigen.workspace_bytes));
  if (w->flight.most == 0) {
    return DC_OK;
  }
  void **const to[ARRAYS] = {&w->s,
                             &w->result,
                             &w->values,
                             (void **)&w->factors,
                             (void **)&w->found,
                             &w->turned,
                             (void **)&w->probes,
                             (void **)&w->norms,
                             &w->basis};
  char *at = w->flight.squares;
  for (int32_t i = 0; i < ARRAYS; i++) {
    *to[i] = at;
    at += (size_t)w->flight.most * arrays[i];
  }
  w->eigen.workspace = at + rounded(table_bytes(r));
  w->eigen.a = w->s;
  w->eigen.values = w->values;
  w->eigen.found = w->found;
  return open_here(w, r, at, host);
}

dc_status dc__spectral_there(dc_linalg *l, const dc__spectral *request) {
  dc__spectral own = *request;
  const dc__spectral *r = &own;
  const int64_t n = r->a.rows;
  dc__decomposing w = {
      .job = {.l = l, .r = r, .n = n},
      .eigen = {.n = n, .vectors = r->op != DC__SPECTRAL_EIGH || r->vectors, .alike = r->each != NULL}};
  void *host = NULL;
  int64_t bytes;
  if (__builtin_mul_overflow(n, n, &bytes) || __builtin_mul_overflow(bytes, 64, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold matrices of this size", r->fn);
  }
  const dc__task nothing = {.status = DC_OK};
  for (int64_t i = 0; n == 0 && !l->query && i < r->a.batch; i++) {
    dc__spectral_write_info(r, &nothing, i);
  }
  dc_status status = open(&w, &own, n > 0 ? r->a.batch : 0, &host);
  if (status == DC_OK && w.flight.most > 0) {
    status = run(&w);
    if (status != DC_OK) { /* copies may be under way from or to memory that goes now */
      dc__here_done(l->device, NULL);
    }
  }
  dc__free(host);
  return status;
}
