/* Batches of symmetric matrices. With many matrices, each runs on one thread from end to end. With few, they share
 * the threads inside a product. LAPACK always runs on one thread, so the bits do not depend on the number of
 * threads. It is also faster than a threaded LAPACK on one matrix after the other. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "linalg/eigh/eigh.h"

/* LAPACK's integers have 32 bits. Of the workspaces of its eigensolvers that of syevd, 2 n n + 6 n + 1, fits them up to
 * this order, which the header promises for all. That of stedc, n n + 4 n + 1, would fit up to 46338. */
enum { MAX_LAPACK_ROWS = 32766 };

/* A batch with its memory. Each matrix in progress has a slot. */
typedef struct spectral_batch {
  dc__spectral_job job;
  dc__slots slots;
} spectral_batch;

static int64_t work_size(const dc__spectral_request *r) {
  int64_t n = r->a.rows;
  if (r->op == DC__SPECTRAL_NEWTON) {
    return 6 * n * n;
  }
  int64_t vectors = 2 * n * n + 3 * DC__PROBES * n + 1;
  int64_t rational = dc__tridiagonal_work(n);
  return vectors > rational ? vectors : rational;
}

/* The parts of a slot, in the order of bind_slot(). */
static bool slot_size(const dc__spectral_request *r, size_t *bytes) {
  int64_t n = r->a.rows;
  int64_t square = 0;
  *bytes = 0;
  return !__builtin_mul_overflow(n, n, &square) && square <= INT64_MAX / 8 &&
         dc__linalg_add_bytes(bytes, square, sizeof(double)) &&
         dc__linalg_add_bytes(bytes, work_size(r), sizeof(double)) &&
         dc__linalg_add_bytes(bytes, 2 * n, sizeof(double)) && dc__linalg_add_bytes(bytes, 5 * n + 3, sizeof(int32_t));
}

static void bind_slot(const spectral_batch *b, dc__spectral_task *t, int64_t slot) {
  int64_t n = b->job.n;
  void *memory = dc__slots_memory(&b->slots, slot);
  size_t offset = 0;
  t->s = dc__linalg_suballoc(memory, &offset, n * n, sizeof(double));
  t->work = dc__linalg_suballoc(memory, &offset, work_size(b->job.r), sizeof(double));
  t->values = dc__linalg_suballoc(memory, &offset, 2 * n, sizeof(double));
  t->iwork = dc__linalg_suballoc(memory, &offset, 5 * n + 3, sizeof(int32_t));
}

/* float32 is enough where epsilon hides the error of its small eigenvalues. */
int32_t dc__spectral_compute_dtype(const dc__spectral_request *r, double bound) {
  const dc__mat *a = &r->a;
  if (r->basis.data != NULL) {
    return r->basis.dtype;
  }
  if (r->options.precision != DC_DTYPE_NONE) {
    return r->options.precision;
  }
  if (r->op == DC__SPECTRAL_EIGH || r->op == DC__SPECTRAL_NEWTON || a->dtype == DC_FLOAT64) {
    return a->dtype;
  }
  double relative = fmax(r->options.eps_rel, bound > 0 ? r->options.eps_abs / bound : 1);
  return relative >= 32 * (double)a->rows * dc__epsilon(DC_FLOAT32) ? DC_FLOAT32 : DC_FLOAT64;
}

/* Bounds the largest eigenvalue by the sum of the diagonal's magnitudes. */
static int32_t matrix_compute_dtype(const dc__spectral_request *r, int64_t index) {
  const dc__mat *a = &r->a;
  double trace = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    trace += fabs(dc__load_element(a->data, a->dtype == DC_FLOAT64, dc__mat_offset(a, index, i, i)));
  }
  return dc__spectral_compute_dtype(r, trace);
}

/* Loads in the compute type, or in float64 for reduction to tridiagonal form. */
static bool load_matrix(const spectral_batch *b, int64_t index, dc__spectral_task *t) {
  const dc__spectral_request *r = b->job.r;
  bool typed = r->op == DC__SPECTRAL_NEWTON || r->op == DC__SPECTRAL_ORTHOGONAL_ITERATION || dc__wants_warm_start(r);
  t->dtype = typed ? matrix_compute_dtype(r, index) : DC_FLOAT64;
  return dc__symmetric_load(&b->job, index, t);
}

/* Computes the part that runs on one thread: the root of a tridiagonal matrix, or eigenvectors. */
static void solve_matrix(const spectral_batch *b, int64_t index, void *scratch) {
  const dc__spectral_job *job = &b->job;
  int32_t root = dc__rational_root_order(job->l, job->r);
  (void)dc__eigh_solve(job, index, &job->tasks[index], root, matrix_compute_dtype(job->r, index), scratch);
}

static void finish_matrix(const spectral_batch *b, int64_t index, void *scratch) {
  dc__spectral_task *t = &b->job.tasks[index];
  if (t->rational) {
    (void)dc__rational_root_store(&b->job, index, t, scratch);
  } else if (t->solved) {
    (void)dc__spectral_finish(&b->job, index, t, scratch);
  }
}

static void run_matrix(void *arg, int64_t index, void *scratch) {
  spectral_batch *b = arg;
  dc__spectral_task *t = &b->job.tasks[index];
  int64_t slot = dc__slots_acquire(&b->slots);
  bind_slot(b, t, slot);
  bool loaded = load_matrix(b, index, t);
  if (loaded && b->job.r->op == DC__SPECTRAL_NEWTON) {
    dc__newton_cpu(&b->job, index, t, scratch);
  } else if (loaded && b->job.r->op == DC__SPECTRAL_ORTHOGONAL_ITERATION) {
    dc__orthogonal_iteration_step(&b->job, index, t, scratch);
  } else if (loaded && !(dc__wants_warm_start(b->job.r) && dc__root_warm_start(&b->job, index, t, scratch))) {
    solve_matrix(b, index, scratch);
    finish_matrix(b, index, scratch);
  }
  dc__slots_release(&b->slots, slot);
}

static void load_task(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  spectral_batch *b = arg;
  bind_slot(b, &b->job.tasks[index], index);
  (void)load_matrix(b, index, &b->job.tasks[index]);
}

static bool needs_solve(const dc__spectral_task *t) {
  return t->status == DC_OK && t->path != DC_PATH_WARM;
}

static void solve_task(void *arg, int64_t index, void *scratch) {
  spectral_batch *b = arg;
  if (needs_solve(&b->job.tasks[index])) {
    solve_matrix(b, index, scratch);
  }
}

static void run_sharing_threads(spectral_batch *b, int64_t count) {
  dc__threadpool *pool = b->job.l->pool;
  dc__parallel_for(pool, count, load_task, b);
  if (b->job.r->op == DC__SPECTRAL_NEWTON) {
    for (int64_t i = 0; i < count; i++) {
      if (b->job.tasks[i].status == DC_OK) {
        dc__newton_cpu(&b->job, i, &b->job.tasks[i], NULL);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count && dc__wants_warm_start(b->job.r); i++) {
    if (b->job.tasks[i].status == DC_OK) {
      (void)dc__root_warm_start(&b->job, i, &b->job.tasks[i], NULL);
    }
  }
  dc__parallel_for(pool, count, solve_task, b);
  for (int64_t i = 0; i < count; i++) {
    if (needs_solve(&b->job.tasks[i])) {
      finish_matrix(b, i, NULL);
    }
  }
}

/* ---- reports ---- */

dc_status dc__spectral_fail(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index) {
  char place[32] = "a";
  if (r->a.batched) {
    snprintf(place, sizeof place, "a[%" PRId64 "]", index);
  }
  switch (t->status) {
    case DC_E_NOT_FINITE:
      return isfinite(t->largest) && t->path == DC_PATH_NONE
                 ? dc__fail(t->status, "%s: %s has a NaN or an infinity at [%" PRId64 ", %" PRId64 "]", r->fn, place,
                            t->row, t->col)
                 : dc__fail(t->status, "%s: the result for %s does not fit %s", r->fn, place,
                            dc_dtype_name(r->a.dtype));
    case DC_E_NOT_SYMMETRIC:
      return dc__fail(t->status,
                      "%s: %s is not symmetric: entries [%" PRId64 ", %" PRId64 "] and [%" PRId64 ", %" PRId64
                      "] are %g of the largest apart; options.symmetry may allow it",
                      r->fn, place, t->row, t->col, t->col, t->row, t->asymmetry);
    case DC_E_NOT_POSITIVE:
      return t->smallest < 0
                 ? dc__fail(t->status,
                            "%s: %s has the negative eigenvalue %g (the largest is %g); see options.negative", r->fn,
                            place, t->smallest, t->largest)
                 : dc__fail(t->status,
                            "%s: %s has an eigenvalue of zero, which has no power %g; give an epsilon or "
                            "rank_rtol",
                            r->fn, place, r->power);
    case DC_E_NOT_CONVERGED:
      if (r->op == DC__SPECTRAL_NEWTON) {
        return dc__fail(t->status,
                        "%s: %s: after %" PRId32 " iteration%s |X^%" PRId32
                        " (A + epsilon I) - I| is %g; is A positive "
                        "semidefinite?",
                        r->fn, place, t->iterations, DC__PLURAL_S(t->iterations), r->root, t->residual);
      }
      __attribute__((fallthrough));
    default:
      return dc__fail(t->status, "%s: the eigenvalues of %s did not converge", r->fn, place);
  }
}

void dc__spectral_write_info(const dc__spectral_request *r, const dc__spectral_task *t, int64_t index) {
  void *to = r->grouped != NULL ? r->grouped[index].info : r->info;
  if (to == NULL) {
    return;
  }
  dc_spectral_info info = {.status = t->status,
                           .path = t->status == DC_OK ? t->path : DC_PATH_NONE,
                           .smallest = t->smallest,
                           .largest = t->largest,
                           .epsilon = t->epsilon,
                           .asymmetry = t->asymmetry,
                           .change = t->change};
  dc_iteration_info iteration = {.status = t->status,
                                 .iterations = t->iterations,
                                 .residual = t->residual,
                                 .bound = t->largest,
                                 .epsilon = t->epsilon,
                                 .asymmetry = t->asymmetry};
  bool newton = r->op == DC__SPECTRAL_NEWTON;
  size_t max_bytes = newton ? sizeof iteration : sizeof info;
  memcpy((char *)to + (r->grouped != NULL ? 0 : (size_t)index * r->info_size),
         newton ? (const void *)&iteration : (const void *)&info, r->info_size < max_bytes ? r->info_size : max_bytes);
}

static dc_status write_all_info(const dc__spectral_request *r, const dc__spectral_task *tasks) {
  dc_status first = DC_OK;
  int64_t at = 0;
  for (int64_t i = 0; i < r->a.batch; i++) {
    const dc__spectral_task *t = &tasks[i];
    dc__spectral_write_info(r, t, i);
    if (first == DC_OK && t->status != DC_OK) {
      first = t->status;
      at = i;
    }
  }
  return first == DC_OK ? DC_OK : dc__spectral_fail(r, &tasks[at], at);
}

/* Computes the quadrature rule for a request's root before threads need it. */
static void init_quadrature(dc_linalg *l, const dc__spectral_request *r) {
  int32_t root = dc__rational_root_order(l, r);
  if (root > 0 && l->rules[root - 1].root == 0) {
    dc__quadrature_init(&l->rules[root - 1], root);
  }
}

dc_status dc__spectral_run(dc_linalg *l, const dc__spectral_request *r) {
  if (dc__linalg_is_cuda(l)) {
    return r->op == DC__SPECTRAL_NEWTON ? dc__newton_cuda(l, r) : dc__spectral_cuda(l, r);
  }
  int64_t n = r->a.rows;
  int64_t count = r->a.batch;
  if (n > MAX_LAPACK_ROWS && l->blas != NULL && r->op != DC__SPECTRAL_NEWTON) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: a has %" PRId64 " rows; LAPACK's 32-bit integers allow %d", r->fn, n,
                    (int)MAX_LAPACK_ROWS);
  }
  spectral_batch b = {.job = {.l = l, .r = r, .n = n, .serial = count >= dc__threadpool_threads(l->pool)}};
  size_t bytes = 0;
  size_t slot;
  void *memory;
  if (!slot_size(r, &slot) || !dc__linalg_add_bytes(&bytes, count, sizeof(dc__spectral_task)) ||
      !dc__slots_plan(&b.slots, l, count, slot, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold %" PRId64 " matri%s of %" PRId64 " rows", r->fn, count,
                    count == 1 ? "x" : "ces", n);
  }
  DC__TRY(dc__linalg_scratch(l, r->fn, bytes, &memory));
  if (memory == NULL || count == 0) {
    return DC_OK;
  }
  size_t offset = 0;
  b.job.tasks = dc__linalg_suballoc(memory, &offset, count, sizeof(dc__spectral_task));
  memset(b.job.tasks, 0, offset);
  dc__slots_init(&b.slots, memory, &offset);
  init_quadrature(l, r);
  if (n > 0 && b.job.serial) {
    dc__parallel_for(l->pool, count, run_matrix, &b);
  } else if (n > 0) {
    run_sharing_threads(&b, count);
  }
  return write_all_info(r, b.job.tasks);
}

/* ---- matrices of different sizes or in different memory ---- */

typedef struct grouped_batch {
  dc_linalg *l;
  const dc__spectral_request *requests;
  dc__spectral_task *tasks;
  dc__slots slots;
} grouped_batch;

static void run_grouped_matrix(void *arg, int64_t index, void *scratch) {
  const grouped_batch *m = arg;
  const dc__spectral_request *r = &m->requests[index];
  spectral_batch b = {.job = {.l = m->l, .r = r, .n = r->a.rows, .tasks = &m->tasks[index], .serial = true},
                      .slots = m->slots};
  run_matrix(&b, 0, scratch);
  dc__spectral_write_info(r, b.job.tasks, 0);
}

enum { STATUS_UNSET = -1 }; /* no status set yet */

/* Whether the device can compute two requests as one batch. */
static bool can_batch(const dc__spectral_request *a, const dc__spectral_request *b) {
  const bool matrices = a->a.rows == b->a.rows && a->a.dtype == b->a.dtype && a->out.dtype == b->out.dtype;
  const bool bases = (a->basis.data != NULL) == (b->basis.data != NULL) && a->basis.dtype == b->basis.dtype;
  return matrices && bases && a->op == b->op && a->root == b->root && a->vectors == b->vectors &&
         (a->values != NULL) == (b->values != NULL) && memcmp(&a->options, &b->options, sizeof a->options) == 0;
}

/* Runs similar requests as one batch. Matrices that it leaves without a status, because memory was short for example,
 * run again one by one; only those that still fail report it. */
static dc_status run_batch_cuda(dc_linalg *l, const dc__spectral_request *requests, int64_t count) {
  dc__spectral_request all = requests[0];
  all.grouped = requests;
  all.a.batch = all.out.batch = all.basis.batch = count;
  for (int64_t i = 0; i < count && !l->query; i++) {
    ((dc_spectral_info *)requests[i].info)->status = STATUS_UNSET;
  }
  const dc_status status = dc__spectral_cuda(l, &all);
  if (l->query) {
    return status;
  }
  DC__TRY(dc__device_check(l->device));
  for (int64_t i = 0; i < count; i++) {
    dc_spectral_info *info = requests[i].info;
    if (info->status == STATUS_UNSET && count > 1) {
      DC__TRY(run_batch_cuda(l, &requests[i], 1));
    } else if (info->status == STATUS_UNSET) {
      info->status = status;
    }
  }
  return DC_OK;
}

static dc_status run_grouped_cuda(dc_linalg *l, const dc__spectral_request *requests, int64_t count) {
  for (int64_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && can_batch(&requests[first], &requests[end]); end++) {
    }
    DC__TRY(run_batch_cuda(l, &requests[first], end - first));
  }
  return DC_OK;
}

dc_status dc__spectral_run_grouped(dc_linalg *l, const dc__spectral_request *requests, int64_t count) {
  if (dc__linalg_is_cuda(l)) {
    return run_grouped_cuda(l, requests, count);
  }
  grouped_batch m = {.l = l, .requests = requests};
  size_t bytes = 0;
  size_t max_bytes = 0;
  void *memory;
  for (int64_t i = 0; i < count; i++) {
    const dc__spectral_request *r = &requests[i];
    size_t slot;
    if (r->a.rows > MAX_LAPACK_ROWS || !slot_size(r, &slot)) {
      return dc__fail(DC_E_UNSUPPORTED, "%s: a matrix has %" PRId64 " rows; LAPACK's 32-bit integers allow %d", r->fn,
                      r->a.rows, (int)MAX_LAPACK_ROWS);
    }
    max_bytes = slot > max_bytes ? slot : max_bytes;
  }
  if (count == 0) {
    return DC_OK;
  }
  if (!dc__linalg_add_bytes(&bytes, count, sizeof(dc__spectral_task)) ||
      !dc__slots_plan(&m.slots, l, count, max_bytes, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold %" PRId64 " matri%s", requests[0].fn, count,
                    count == 1 ? "x" : "ces");
  }
  DC__TRY(dc__linalg_scratch(l, requests[0].fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  size_t offset = 0;
  m.tasks = dc__linalg_suballoc(memory, &offset, count, sizeof(dc__spectral_task));
  memset(m.tasks, 0, offset);
  dc__slots_init(&m.slots, memory, &offset);
  for (int64_t i = 0; i < count; i++) {
    init_quadrature(l, &requests[i]);
  }
  dc__parallel_for(l->pool, count, run_grouped_matrix, &m);
  return DC_OK;
}
