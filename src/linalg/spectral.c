/* Batches of symmetric matrices. Many matrices run side by side, each on one thread from end to end; few of them share
 * the threads where a product can be cut up. LAPACK itself always has one thread: so the bits do not depend on how
 * many there are, and it is faster than a threaded LAPACK on one block after the other. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "linalg/spectral.h"

enum { MOST_LAPACK = 32766 }; /* 2 n n + 6 n + 1 must fit LAPACK's 32-bit integers */

/* A batch with its memory. A slot is what one matrix under way needs. */
typedef struct batch {
  dc__job job;
  dc__slots slots;
} batch;

static int64_t work_size(const dc__spectral *r) {
  int64_t n = r->a.rows;
  if (r->op == DC__SPECTRAL_NEWTON) {
    return 6 * n * n;
  }
  int64_t vectors = 2 * n * n + 3 * DC__PROBES * n + 1;
  int64_t rational = dc__tridiagonal_work(n);
  return vectors > rational ? vectors : rational;
}

/* The parts of a slot, in the order of use_slot(). */
static bool slot_size(const dc__spectral *r, size_t *bytes) {
  int64_t n = r->a.rows;
  int64_t square = 0;
  *bytes = 0;
  return !__builtin_mul_overflow(n, n, &square) && square <= INT64_MAX / 8 &&
         dc__linalg_add(bytes, square, sizeof(double)) && dc__linalg_add(bytes, work_size(r), sizeof(double)) &&
         dc__linalg_add(bytes, 2 * n, sizeof(double)) && dc__linalg_add(bytes, 5 * n + 3, sizeof(int32_t));
}

static void use_slot(const batch *b, dc__task *t, int64_t slot) {
  int64_t n = b->job.n;
  void *memory = dc__slots_memory(&b->slots, slot);
  size_t offset = 0;
  t->s = dc__linalg_part(memory, &offset, n * n, sizeof(double));
  t->work = dc__linalg_part(memory, &offset, work_size(b->job.r), sizeof(double));
  t->values = dc__linalg_part(memory, &offset, 2 * n, sizeof(double));
  t->iwork = dc__linalg_part(memory, &offset, 5 * n + 3, sizeof(int32_t));
}

/* float32 is enough where epsilon hides what its decomposition does to small eigenvalues. */
int32_t dc__computing_type(const dc__spectral *r, double bound) {
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

/* By the trace, which is at least the largest eigenvalue. */
static int32_t computing_type(const dc__spectral *r, int64_t index) {
  const dc__mat *a = &r->a;
  double trace = 0;
  for (int64_t i = 0; i < a->rows; i++) {
    trace += fabs(dc__get(a->data, a->dtype == DC_FLOAT64, dc__place(a, index, i, i)));
  }
  return dc__computing_type(r, trace);
}

/* In the type that is computed in, or for the way to tridiagonal form in float64. */
static bool load(const batch *b, int64_t index, dc__task *t) {
  const dc__spectral *r = b->job.r;
  bool typed = r->op == DC__SPECTRAL_NEWTON || r->op == DC__SPECTRAL_BASIS || dc__wants_warm(r);
  t->dtype = typed ? computing_type(r, index) : DC_FLOAT64;
  return dc__symmetric_load(&b->job, index, t);
}

/* As far as one thread goes: to the root of a tridiagonal matrix, or to eigenvectors. */
static void solve(const batch *b, int64_t index, void *scratch) {
  const dc__job *job = &b->job;
  int32_t root = dc__rational_root(job->l, job->r);
  (void)dc__decompose(job, index, &job->tasks[index], root, computing_type(job->r, index), scratch);
}

static void finish(const batch *b, int64_t index, void *scratch) {
  dc__task *t = &b->job.tasks[index];
  if (t->rational) {
    (void)dc__rational_finish(&b->job, index, t, scratch);
  } else if (t->solved) {
    (void)dc__finish(&b->job, index, t, scratch);
  }
}

static void whole(void *arg, int64_t index, void *scratch) {
  batch *b = arg;
  dc__task *t = &b->job.tasks[index];
  int64_t slot = dc__slots_take(&b->slots);
  use_slot(b, t, slot);
  bool loaded = load(b, index, t);
  if (loaded && b->job.r->op == DC__SPECTRAL_NEWTON) {
    dc__newton_here(&b->job, index, t, scratch);
  } else if (loaded && b->job.r->op == DC__SPECTRAL_BASIS) {
    dc__basis_step(&b->job, index, t, scratch);
  } else if (loaded && !(dc__wants_warm(b->job.r) && dc__warm(&b->job, index, t, scratch))) {
    solve(b, index, scratch);
    finish(b, index, scratch);
  }
  dc__slots_give(&b->slots, slot);
}

static void first_part(void *arg, int64_t index, void *scratch) {
  (void)scratch;
  batch *b = arg;
  use_slot(b, &b->job.tasks[index], index);
  (void)load(b, index, &b->job.tasks[index]);
}

static bool waits(const dc__task *t) {
  return t->status == DC_OK && t->path != DC_PATH_WARM;
}

static void middle_part(void *arg, int64_t index, void *scratch) {
  batch *b = arg;
  if (waits(&b->job.tasks[index])) {
    solve(b, index, scratch);
  }
}

static void few(batch *b, int64_t count) {
  dc__pool *pool = b->job.l->pool;
  dc__parallel(pool, count, first_part, b);
  if (b->job.r->op == DC__SPECTRAL_NEWTON) {
    for (int64_t i = 0; i < count; i++) {
      if (b->job.tasks[i].status == DC_OK) {
        dc__newton_here(&b->job, i, &b->job.tasks[i], NULL);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count && dc__wants_warm(b->job.r); i++) {
    if (b->job.tasks[i].status == DC_OK) {
      (void)dc__warm(&b->job, i, &b->job.tasks[i], NULL);
    }
  }
  dc__parallel(pool, count, middle_part, b);
  for (int64_t i = 0; i < count; i++) {
    if (waits(&b->job.tasks[i])) {
      finish(b, i, NULL);
    }
  }
}

/* ---- reports ---- */

dc_status dc__spectral_explain(const dc__spectral *r, const dc__task *t, int64_t index) {
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
                        r->fn, place, t->iterations, DC__S(t->iterations), r->root, t->residual);
      }
      __attribute__((fallthrough));
    default:
      return dc__fail(t->status, "%s: the eigenvalues of %s did not converge", r->fn, place);
  }
}

void dc__spectral_write_info(const dc__spectral *r, const dc__task *t, int64_t index) {
  void *to = r->each != NULL ? r->each[index].info : r->info;
  if (to == NULL) {
    return;
  }
  dc_spectral_info info = {
      t->status, t->status == DC_OK ? t->path : DC_PATH_NONE, t->smallest, t->largest, t->epsilon, t->asymmetry,
      t->change};
  dc_iteration_info iteration = {t->status, t->iterations, t->residual, t->largest, t->epsilon, t->asymmetry};
  bool newton = r->op == DC__SPECTRAL_NEWTON;
  size_t most = newton ? sizeof iteration : sizeof info;
  memcpy((char *)to + (r->each != NULL ? 0 : (size_t)index * r->info_size),
         newton ? (const void *)&iteration : (const void *)&info, r->info_size < most ? r->info_size : most);
}

static dc_status report(const dc__spectral *r, const dc__task *tasks) {
  dc_status first = DC_OK;
  int64_t at = 0;
  for (int64_t i = 0; i < r->a.batch; i++) {
    const dc__task *t = &tasks[i];
    dc__spectral_write_info(r, t, i);
    if (first == DC_OK && t->status != DC_OK) {
      first = t->status;
      at = i;
    }
  }
  return first == DC_OK ? DC_OK : dc__spectral_explain(r, &tasks[at], at);
}

/* The rule for a request's root, before threads want it. */
static void prepare(dc_linalg *l, const dc__spectral *r) {
  int32_t root = dc__rational_root(l, r);
  if (root > 0 && l->rules[root - 1].root == 0) {
    dc__rule_open(&l->rules[root - 1], root);
  }
}

dc_status dc__spectral_run(dc_linalg *l, const dc__spectral *r) {
  if (dc__linalg_is_there(l)) {
    return r->op == DC__SPECTRAL_NEWTON ? dc__newton_there(l, r) : dc__spectral_there(l, r);
  }
  int64_t n = r->a.rows;
  int64_t count = r->a.batch;
  if (n > MOST_LAPACK && l->blas != NULL && r->op != DC__SPECTRAL_NEWTON) {
    return dc__fail(DC_E_UNSUPPORTED, "%s: a has %" PRId64 " rows; LAPACK's 32-bit integers allow %d", r->fn, n,
                    (int)MOST_LAPACK);
  }
  batch b = {.job = {.l = l, .r = r, .n = n, .inside = count >= dc__pool_threads(l->pool)}};
  size_t bytes = 0;
  size_t slot;
  void *memory;
  if (!slot_size(r, &slot) || !dc__linalg_add(&bytes, count, sizeof(dc__task)) ||
      !dc__slots_plan(&b.slots, l, count, slot, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold %" PRId64 " matri%s of %" PRId64 " rows", r->fn, count,
                    count == 1 ? "x" : "ces", n);
  }
  DC__TRY(dc__linalg_scratch(l, r->fn, bytes, &memory));
  if (memory == NULL || count == 0) {
    return DC_OK;
  }
  size_t offset = 0;
  b.job.tasks = dc__linalg_part(memory, &offset, count, sizeof(dc__task));
  memset(b.job.tasks, 0, offset);
  dc__slots_place(&b.slots, memory, &offset);
  prepare(l, r);
  if (n > 0 && b.job.inside) {
    dc__parallel(l->pool, count, whole, &b);
  } else if (n > 0) {
    few(&b, count);
  }
  return report(r, b.job.tasks);
}

/* ---- matrices of different sizes, or in different places ---- */

typedef struct mixture {
  dc_linalg *l;
  const dc__spectral *requests;
  dc__task *tasks;
  dc__slots slots;
} mixture;

static void one_of(void *arg, int64_t index, void *scratch) {
  const mixture *m = arg;
  const dc__spectral *r = &m->requests[index];
  batch b = {.job = {.l = m->l, .r = r, .n = r->a.rows, .tasks = &m->tasks[index], .inside = true}, .slots = m->slots};
  whole(&b, 0, scratch);
  dc__spectral_write_info(r, b.job.tasks, 0);
}

enum { NOT_SEEN = -1 }; /* no status of a matrix */

/* Whether a device can take two requests as one. */
static bool alike(const dc__spectral *a, const dc__spectral *b) {
  const bool matrices = a->a.rows == b->a.rows && a->a.dtype == b->a.dtype && a->out.dtype == b->out.dtype;
  const bool bases = (a->basis.data != NULL) == (b->basis.data != NULL) && a->basis.dtype == b->basis.dtype;
  return matrices && bases && a->op == b->op && a->root == b->root && a->vectors == b->vectors &&
         (a->values != NULL) == (b->values != NULL) && memcmp(&a->options, &b->options, sizeof a->options) == 0;
}

/* Requests that are alike, as a batch. That matrices could not be computed for want of memory is their own failure,
 * unless each of them can alone: the others need not wait for it. */
static dc_status some_there(dc_linalg *l, const dc__spectral *requests, int64_t count) {
  dc__spectral all = requests[0];
  all.each = requests;
  all.a.batch = all.out.batch = all.basis.batch = count;
  for (int64_t i = 0; i < count && !l->query; i++) {
    ((dc_spectral_info *)requests[i].info)->status = NOT_SEEN;
  }
  const dc_status status = dc__spectral_there(l, &all);
  if (l->query) {
    return status;
  }
  DC__TRY(dc__device_check(l->device));
  for (int64_t i = 0; i < count; i++) {
    dc_spectral_info *info = requests[i].info;
    if (info->status == NOT_SEEN && count > 1) {
      DC__TRY(some_there(l, &requests[i], 1));
    } else if (info->status == NOT_SEEN) {
      info->status = status;
    }
  }
  return DC_OK;
}

static dc_status each_there(dc_linalg *l, const dc__spectral *requests, int64_t count) {
  for (int64_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && alike(&requests[first], &requests[end]); end++) {
    }
    DC__TRY(some_there(l, &requests[first], end - first));
  }
  return DC_OK;
}

dc_status dc__spectral_each(dc_linalg *l, const dc__spectral *requests, int64_t count) {
  if (dc__linalg_is_there(l)) {
    return each_there(l, requests, count);
  }
  mixture m = {.l = l, .requests = requests};
  size_t bytes = 0;
  size_t most = 0;
  void *memory;
  for (int64_t i = 0; i < count; i++) {
    const dc__spectral *r = &requests[i];
    size_t slot;
    if (r->a.rows > MOST_LAPACK || !slot_size(r, &slot)) {
      return dc__fail(DC_E_UNSUPPORTED, "%s: a matrix has %" PRId64 " rows; LAPACK's 32-bit integers allow %d", r->fn,
                      r->a.rows, (int)MOST_LAPACK);
    }
    most = slot > most ? slot : most;
  }
  if (count == 0) {
    return DC_OK;
  }
  if (!dc__linalg_add(&bytes, count, sizeof(dc__task)) || !dc__slots_plan(&m.slots, l, count, most, &bytes)) {
    return dc__fail(DC_E_NO_MEMORY, "%s: no memory can hold %" PRId64 " matri%s", requests[0].fn, count,
                    count == 1 ? "x" : "ces");
  }
  DC__TRY(dc__linalg_scratch(l, requests[0].fn, bytes, &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  size_t offset = 0;
  m.tasks = dc__linalg_part(memory, &offset, count, sizeof(dc__task));
  memset(m.tasks, 0, offset);
  dc__slots_place(&m.slots, memory, &offset);
  for (int64_t i = 0; i < count; i++) {
    prepare(l, &requests[i]);
  }
  dc__parallel(l->pool, count, one_of, &m);
  return DC_OK;
}
