/* Matrix products whose operands may lie in files, with a bound on the memory in between. A piece of B is read and
 * packed once, for all threads. Then each takes strips of rows: reads A's, multiplies, writes C's, so that one reads
 * while another multiplies. What lies in memory is used where it is. What comes next is asked for ahead, so that a disk
 * works meanwhile. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "linalg/bounded.h"

/* One piece of B, k from p on, and C's tile that it adds to. Threads take slices of the piece, then strips of the
 * tile's rows, until there are no more. */
typedef struct pass {
  const dc__bounded *w;
  char *packed, *tile;
  int64_t i, rows, j, cols, p, depth;
  int64_t length, unit, parts,
      longest;        /* the rows that are shared out, even to one unit; a part has `longest` at most */
  atomic_llong next;  /* the first part that nobody took */
  atomic_bool failed; /* set by who fails first, and then tells about it: */
  struct {
    const char *arg;
    int64_t at; /* in the file, in bytes */
    int error;  /* 0: the file ends */
  } failure;
} pass;

/* ---- files ---- */

/* One run of bytes; false with errno, 0 at the file's end, and the place in *at. */
static bool move_run(const dc__source *s, char *memory, int64_t *at, int64_t bytes, bool write) {
  while (bytes > 0) {
    errno = 0;
    ssize_t done = write ? pwrite(s->fd, memory, (size_t)bytes, *at) : pread(s->fd, memory, (size_t)bytes, *at);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return false;
    }
    memory += done;
    *at += done;
    bytes -= done;
  }
  return true;
}

/* Rows [row, row + rows) and columns [col, col + cols) of a matrix in a file, to or from dense memory: at once where
 * they are whole. */
static bool move_block(pass *x, const char *arg, const dc__source *s, size_t size, char *memory, int64_t row,
                       int64_t rows, int64_t col, int64_t cols) {
  const int64_t step = cols == s->mat.cols ? rows : 1;
  const int64_t bytes = step * cols * (int64_t)size;
  for (int64_t i = 0; i < rows; i += step, memory += bytes) {
    int64_t at = s->offset + ((row + i) * s->mat.cols + col) * (int64_t)size;
    if (!move_run(s, memory, &at, bytes, s == x->w->out)) {
      const int error = errno;
      if (!atomic_exchange(&x->failed, true)) {
        x->failure.arg = arg;
        x->failure.at = at;
        x->failure.error = error;
      }
      return false;
    }
  }
  return true;
}

/* Asks the system for whole rows that come later; that it may not is no matter. */
static void expect(const dc__source *s, size_t size, int64_t row, int64_t rows) {
  enum { MOST = 8 << 20 };
  const int64_t line = s->mat.cols * (int64_t)size;
  rows = dc__least(rows, s->mat.rows - row);
  if (dc__in_file(s) && rows > 0 && line <= MOST / rows) {
    (void)posix_fadvise(s->fd, s->offset + row * line, rows * line, POSIX_FADV_WILLNEED);
  }
}

static dc_status check_file(const dc__bounded *w, const char *arg, const dc__source *s, size_t size, bool input) {
  struct stat status;
  int64_t end;
  if (!dc__in_file(s)) {
    return DC_OK;
  }
  if (s->fd < 0 || fstat(s->fd, &status) != 0) {
    return dc__fail(DC_E_INVALID, "%s: %s->fd = %" PRId32 " is no open file", w->fn, arg, s->fd);
  }
  if (s->offset < 0 || __builtin_mul_overflow(s->mat.rows * s->mat.cols, (int64_t)size, &end) ||
      __builtin_add_overflow(end, s->offset, &end)) {
    return dc__fail(DC_E_INVALID,
                    "%s: %s->offset = %" PRId64 ", must be >= 0 and the matrix behind it below 2^63 bytes", w->fn, arg,
                    s->offset);
  }
  if (input && S_ISREG(status.st_mode) && status.st_size < end) {
    return dc__fail(DC_E_INVALID, "%s: %s's file has %" PRId64 " bytes, must have %" PRId64, w->fn, arg,
                    (int64_t)status.st_size, end);
  }
  return DC_OK;
}

/* ---- products ---- */

/* A part of an operand: what was read of it, dense, or the place in memory. */
static dc__mat part_of(const dc__source *s, void *read, size_t size, int64_t row, int64_t rows, int64_t col,
                       int64_t cols) {
  dc__mat m = s->mat;
  m.rows = rows;
  m.cols = cols;
  if (dc__in_file(s)) {
    m.data = read;
    m.row_stride = cols;
    m.col_stride = 1;
  } else {
    m.data = (char *)m.data + (row * m.row_stride + col * m.col_stride) * (int64_t)size;
  }
  return m;
}

/* The next part's first row, and how many there are; false: no more. */
static bool take(pass *x, int64_t *row, int64_t *rows) {
  const int64_t index = atomic_fetch_add(&x->next, 1);
  const int64_t units = dc__pieces(x->length, x->unit);
  if (index >= x->parts || atomic_load(&x->failed)) {
    return false;
  }
  *row = units * index / x->parts * x->unit;
  *rows = dc__least(units * (index + 1) / x->parts * x->unit, x->length) - *row;
  return true;
}

/* scratch + DC__GEMM_PACKED_SCRATCH on is what products with a packed B leave alone. */
static void pack_slices(void *arg, int64_t index, void *scratch) {
  (void)index;
  pass *x = arg;
  const dc__bounded *w = x->w;
  char *read = (char *)scratch + DC__GEMM_PACKED_SCRATCH;
  for (int64_t row, rows; take(x, &row, &rows);) {
    expect(w->b, w->in_size, x->p + row + rows, x->longest);
    if (dc__in_file(w->b) && !move_block(x, "b", w->b, w->in_size, read, x->p + row, rows, x->j, x->cols)) {
      return;
    }
    const dc__mat b = part_of(w->b, read, w->in_size, x->p + row, rows, x->j, x->cols);
    dc__gemm g = dc__mat_product(&b, &b, 1, 0, &b);
    g.k = rows;
    dc__gemm_pack(&g, x->packed + dc__gemm_packed_bytes(g.dtype, x->cols, row));
  }
}

static void multiply_strips(void *arg, int64_t index, void *scratch) {
  (void)index;
  pass *x = arg;
  const dc__bounded *w = x->w;
  const bool whole = x->depth == w->k;
  const bool last = x->p + x->depth == w->k;
  char *own = (char *)scratch + DC__GEMM_PACKED_SCRATCH;
  char *read = own + (whole ? (size_t)(x->longest * x->cols) * w->out_size : 0);
  for (int64_t row, rows; take(x, &row, &rows);) {
    const int64_t i = x->i + row;
    char *sums = whole ? own : x->tile + (size_t)(row * x->cols) * w->out_size;
    if (whole) {
      expect(w->a, w->in_size, i + rows, x->longest);
    }
    if (dc__in_file(w->a) && !move_block(x, "a", w->a, w->in_size, read, i, rows, x->p, x->depth)) {
      return;
    }
    const dc__mat a = part_of(w->a, read, w->in_size, i, rows, x->p, x->depth);
    const dc__mat b = part_of(w->b, x->packed, w->in_size, x->p, x->depth, x->j, x->cols);
    const dc__mat c = part_of(w->out, sums, w->out_size, i, rows, x->j, x->cols);
    dc__gemm g = dc__mat_product(&a, &b, 1, x->p == 0 ? 0 : 1, &c);
    g.packed = x->packed;
    dc__gemm_serial(&g, scratch);
    if (dc__in_file(w->out) && last && !move_block(x, "out", w->out, w->out_size, sums, i, rows, x->j, x->cols)) {
      return;
    }
  }
}

/* Shares out rows between the threads, in parts of at most `longest`, a multiple of the unit where it is longer. */
static dc_status share(dc_linalg *l, pass *x, dc__work_fn fn, int64_t length, int64_t longest, int64_t unit) {
  const int64_t threads = dc__pool_threads(l->pool);
  x->length = length;
  x->longest = longest;
  x->unit = dc__least(unit, longest);
  x->parts = dc__least(dc__pieces(dc__pieces(length, longest), threads) * threads, dc__pieces(length, x->unit));
  atomic_init(&x->next, 0);
  atomic_init(&x->failed, false);
  dc__parallel(l->pool, dc__least(threads, x->parts), fn, x);
  return !atomic_load(&x->failed)
             ? DC_OK
             : dc__fail(DC_E_SYSTEM, "%s: %s's file, byte %" PRId64 ": %s", x->w->fn, x->failure.arg, x->failure.at,
                        x->failure.error != 0 ? strerror(x->failure.error) : "the file ends");
}

static dc_status all_passes(dc_linalg *l, const dc__bounded *w, char *packed, char *tile) {
  const dc__bounded_plan *s = &w->plan;
  for (int64_t j = 0; j < w->n; j += s->nb) {
    for (int64_t i = 0; i < w->m; i += s->mb) {
      int64_t p = 0;
      do {
        pass x = {.w = w, .packed = packed, .tile = tile, .i = i, .j = j, .p = p};
        x.rows = dc__least(s->mb, w->m - i);
        x.cols = dc__least(s->nb, w->n - j);
        x.depth = dc__least(s->kb, w->k - p);
        if (x.depth > 0) {
          DC__TRY(share(l, &x, pack_slices, x.depth, dc__least(w->shape.slice, x.depth), w->shape.slice));
        }
        DC__TRY(share(l, &x, multiply_strips, x.rows, s->strip, w->shape.rows));
        p += s->kb;
      } while (p < w->k);
    }
  }
  return DC_OK;
}

dc_status dc__matmul_bounded(dc_linalg *l, const char *fn, const dc__source *a, const dc__source *b,
                             const dc__source *out, int64_t budget, int64_t *needed) {
  dc__bounded w = {.fn = fn,
                   .a = a,
                   .b = b,
                   .out = out,
                   .m = out->mat.rows,
                   .n = out->mat.cols,
                   .k = a->mat.cols,
                   .in_size = dc_dtype_size(a->mat.dtype),
                   .out_size = dc_dtype_size(out->mat.dtype),
                   .shape = dc__gemm_shape_of(a->mat.dtype)};
  DC__TRY(check_file(&w, "a", a, w.in_size, true));
  DC__TRY(check_file(&w, "b", b, w.in_size, true));
  DC__TRY(check_file(&w, "out", out, w.out_size, false));
  if (w.m == 0 || w.n == 0) {
    return DC_OK;
  }
  if (!dc__in_file(a) && !dc__in_file(b) && !dc__in_file(out)) {
    const dc__gemm g = dc__mat_product(&a->mat, &b->mat, 1, 0, &out->mat);
    if (!l->query) {
      dc__gemm_run(l->pool, &g);
    }
    return DC_OK;
  }
  void *memory = NULL;
  size_t tile;
  DC__TRY(dc__bounded_choose(&w, budget, needed));
  DC__TRY(dc__linalg_scratch(l, fn, dc__bounded_bytes(&w, &w.plan, &tile), &memory));
  return memory != NULL ? all_passes(l, &w, memory, (char *)memory + tile) : DC_OK;
}
