/* Plans of out-of-core products: the sizes of their pieces. */
#include <inttypes.h>

#include "linalg/out_of_core/out_of_core.h"

enum {
  MIN_K = 16,           /* minimum length of k's pieces */
  MAX_CANDIDATES = 64,  /* lengths tried for a dimension */
  MAX_STRIP_ROWS = 168, /* longer strips no longer reduce the cost of passing over the packed piece */
  STRIP_BYTES = DC__SCRATCH_BYTES - DC__GEMM_PACKED_SCRATCH
};

/* ---- on threads ----
 *
 * A piece of B is packed for all threads. Strips of A's and C's rows pass by it, each in its thread's scratch memory.
 * If kb < k, C's tile is kept until k is summed; else mb is m. */

/* Nanoseconds beyond the multiplications, for choosing a plan only: a read or a write call; a byte that it copies; a
 * packed element; an element of C that is read and added to; an element of B that a strip passes. */
static const double READ = 430, WRITE = 2000, BYTE = 0.06, PACKED = 0.25, REACCUMULATED = 0.3, STREAMED = 0.07;

typedef dc__out_of_core_plan plan;

/* Bytes of the packed piece and C's tile; SIZE_MAX on overflow. */
static size_t packed_bytes(const dc__out_of_core *w, const plan *p) {
  size_t total = 0;
  bool fits = dc__linalg_add_bytes(&total, 1, dc__gemm_packed_bytes(w->a->mat.dtype, p->nb, p->kb));
  if (dc__in_file(w->out) && p->kb < w->k) {
    fits = fits && dc__linalg_add_bytes(&total, p->mb * p->nb, w->out_size);
  }
  return fits ? total : SIZE_MAX;
}

/* Rows of a strip that fit a thread's scratch memory, at most MAX_STRIP_ROWS; 0 if no row or no slice of B fits. */
static int64_t strip_of(const dc__out_of_core *w, const plan *p) {
  const double a = dc__in_file(w->a) ? (double)p->kb * (double)w->in_size : 0;
  const double c = (double)dc__strip_row_bytes(w, p->kb, p->nb);
  const double slice = (double)dc__min_int64(w->shape.slice, p->kb) * (double)p->nb * (double)w->in_size;
  const double rows = STRIP_BYTES / (a + c > 1 ? a + c : 1);
  const int64_t strip = rows < MAX_STRIP_ROWS ? (int64_t)rows : MAX_STRIP_ROWS;
  return dc__in_file(w->b) && slice > STRIP_BYTES ? 0
         : strip > w->shape.rows                  ? strip / w->shape.rows * w->shape.rows
                                                  : strip;
}

/* If all of k is summed at once, C has no tile, and its rows are processed in strips; so mb is m then. */
static bool plan_fits(const dc__out_of_core *w, plan *p) {
  p->strip = strip_of(w, p);
  p->coalesces = w->can_read_back && p->nb < w->n &&
                 (double)(p->strip + DC__OUT_OF_CORE_ROWS) * (double)w->n * (double)w->out_size <= STRIP_BYTES;
  return p->strip > 0 && (p->kb < w->k || p->mb == w->m);
}

double dc__out_of_core_io_cost(const dc__matrix_source *s, bool write, double times, double rows, double cols) {
  const double call = write ? WRITE : READ;
  const double calls = cols < (double)s->mat.cols ? rows : 1;
  const double bytes = rows * cols * (double)dc_dtype_size(s->mat.dtype);
  return dc__in_file(s) ? times * (call * calls + BYTE * bytes) : 0;
}

/* Strips that wait in the file are written, read back, merged and written again. */
static double output_io_cost(const dc__out_of_core *w, const plan *p, double times) {
  const double strips = (double)w->m / (double)p->strip + 1;
  const double bytes = (double)w->m * (double)w->n * (double)w->out_size;
  return p->coalesces ? WRITE * strips * (times + 1) + 4 * BYTE * bytes
                      : dc__out_of_core_io_cost(w->out, true, times, (double)w->m, (double)p->nb);
}

/* A is read for each column of C's tiles, B for each row of them. */
static double cpu_cost(const dc__out_of_core *w, const plan *p) {
  const double m = (double)w->m;
  const double n = (double)w->n;
  const double k = (double)w->k;
  const double nb = (double)p->nb;
  const double kb = (double)p->kb;
  const double i = (double)dc__num_pieces(w->m, p->mb);
  const double j = (double)dc__num_pieces(w->n, p->nb);
  const double t = (double)dc__num_pieces(w->k, p->kb);
  double sum =
      PACKED * (m * k * j + k * n * i) + STREAMED * k * n * m / (double)p->strip + REACCUMULATED * m * n * (t - 1);
  sum += dc__out_of_core_io_cost(w->a, false, j * t, m, kb) + dc__out_of_core_io_cost(w->b, false, i * j, k, nb);
  return sum + output_io_cost(w, p, j);
}

const dc__out_of_core_model dc__out_of_core_cpu = {.fits = plan_fits, .bytes = packed_bytes, .cost = cpu_cost};

/* ---- the choice ---- */

/* Candidate lengths for a dimension: all of it, and fractions in whole units; long ones in `coarse` units. */
static int32_t candidate_lengths(int64_t length, int64_t unit, int64_t coarse, int64_t list[MAX_CANDIDATES]) {
  int32_t count = 0;
  int64_t last = -1;
  for (int64_t parts = 1; count < MAX_CANDIDATES; parts = parts < 8 ? parts + 1 : parts * 5 / 4) {
    int64_t piece = dc__num_pieces(length, parts);
    const int64_t to = piece < coarse ? unit : coarse;
    piece = parts == 1 ? length : dc__min_int64(length, dc__num_pieces(piece, to) * to);
    if (piece != last) {
      list[count++] = piece;
      last = piece;
    }
    if (piece <= unit) {
      break;
    }
  }
  return count;
}

dc_status dc__out_of_core_choose_plan(dc__out_of_core *w, int64_t budget, int64_t *needed) {
  int64_t ms[MAX_CANDIDATES], ns[MAX_CANDIDATES], ks[MAX_CANDIDATES];
  const int32_t m = candidate_lengths(w->m, w->shape.rows, w->shape.rows, ms);
  const int32_t n = candidate_lengths(w->n, w->shape.columns, w->shape.columns, ns);
  const int32_t k = candidate_lengths(w->k, MIN_K, w->shape.slice, ks);
  plan best = {0};
  size_t smallest = SIZE_MAX;
  for (int32_t index = 0; index < m * n * k; index++) {
    plan p = {.mb = ms[index / (n * k)], .nb = ns[index / k % n], .kb = ks[index % k]};
    if (!w->model->fits(w, &p)) {
      continue;
    }
    const size_t bytes = w->model->bytes(w, &p);
    smallest = bytes < smallest ? bytes : smallest;
    p.cost = w->model->cost(w, &p);
    if (bytes <= (size_t)budget && (best.mb == 0 || p.cost < best.cost)) {
      best = p;
    }
  }
  if (best.mb > 0) {
    w->plan = best;
    return DC_OK;
  }
  if (needed != NULL) {
    *needed = (int64_t)smallest;
  }
  return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: budget_bytes = %" PRId64 ", must be >= %zu", w->fn, budget, smallest);
}
