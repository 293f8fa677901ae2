/* Matrix products whose operands may lie in files, with a bound on the memory in between. Tiles of A [mb, kb] and B
 * [kb, nb] are read, tiles of C [mb, nb] are kept until k is summed up; what lies in memory needs no tile. The threads
 * share the reading; what comes next is asked for ahead, so that a disk works while the product does. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "linalg/linalg.h"

enum {
  UNIT = 16,
  CHOICES = 64,
  PIECES = 64
}; /* the smallest tile; lengths tried for a dimension; parts of a transfer */

/* What tiles cost beside the multiplications, in nanoseconds, for the choice between them alone: a system call, a byte
 * that is copied, an element that is packed for a product, one of C that is read and written again. */
static const double CALL = 550, BYTE = 0.06, PACKED = 0.25, AGAIN = 0.3;

typedef struct plan {
  int64_t mb, nb, kb;
  double cost;
} plan;

typedef struct bounded {
  const char *fn;
  const dc__source *a, *b, *out;
  int64_t m, n, k;
  size_t in_size, out_size;
  plan tiles;
  char *ta, *tb, *tc;
} bounded;

static bool in_file(const dc__source *s) {
  return s->mat.data == NULL;
}

static size_t tile_bytes(const bounded *w, const plan *p) {
  size_t total = 0;
  bool fits = (!in_file(w->a) || dc__linalg_add(&total, p->mb * p->kb, w->in_size)) &&
              (!in_file(w->b) || dc__linalg_add(&total, p->kb * p->nb, w->in_size)) &&
              (!in_file(w->out) || dc__linalg_add(&total, p->mb * p->nb, w->out_size));
  return fits ? total : SIZE_MAX;
}

static int64_t pieces(int64_t length, int64_t piece) {
  return piece > 0 ? (length + piece - 1) / piece : 1; /* k = 0: C is still to be written */
}

/* Tiles of [rows, cols] out of a file's rows of `pitch` elements, read or written `times`. */
static double transfers(double times, int64_t rows, int64_t cols, int64_t pitch, size_t size) {
  return times * (CALL * (cols == pitch ? 1 : (double)rows) + BYTE * (double)(rows * cols) * (double)size);
}

/* A is read once for each column of tiles, or once if whole rows of it fit; B for each row of tiles, or once if all of
 * it fits. */
static double cost(const bounded *w, const plan *p) {
  double i = (double)pieces(w->m, p->mb);
  double j = (double)pieces(w->n, p->nb);
  double k = (double)pieces(w->k, p->kb);
  bool whole_k = p->kb == w->k;
  bool whole_b = whole_k && p->nb == w->n;
  double sum = PACKED * ((double)w->m * (double)w->k * j + (double)w->k * (double)w->n * i);
  sum += AGAIN * (double)w->m * (double)w->n * k;
  sum += in_file(w->a) ? transfers(i * k * (whole_k ? 1 : j), p->mb, p->kb, w->k, w->in_size) : 0;
  sum += in_file(w->b) ? transfers(j * k * (whole_b ? 1 : i), p->kb, p->nb, w->n, w->in_size) : 0;
  return sum + (in_file(w->out) ? transfers(i * j, p->mb, p->nb, w->n, w->out_size) : 0);
}

/* The lengths to try for a dimension: all of it, and fractions, down to the smallest tile. */
static int32_t choices(int64_t length, int64_t list[CHOICES]) {
  int32_t count = 0;
  int64_t last = -1;
  for (int64_t parts = 1; count < CHOICES; parts = parts < 8 ? parts + 1 : parts * 5 / 4) {
    int64_t piece = (pieces(length, parts) + UNIT - 1) / UNIT * UNIT;
    piece = parts == 1 || piece > length ? length : piece;
    if (piece != last) {
      list[count++] = piece;
      last = piece;
    }
    if (piece <= UNIT) {
      break;
    }
  }
  return count;
}

static dc_status choose(bounded *w, int64_t budget, int64_t *needed) {
  int64_t ms[CHOICES], ns[CHOICES], ks[CHOICES];
  int32_t m = choices(w->m, ms);
  int32_t n = choices(w->n, ns);
  int32_t k = choices(w->k, ks);
  plan best = {0};
  for (int32_t i = 0; i < m * n * k; i++) {
    plan p = {ms[i / (n * k)], ns[i / k % n], ks[i % k], 0};
    p.cost = cost(w, &p);
    if ((best.mb == 0 || p.cost < best.cost) && tile_bytes(w, &p) <= (size_t)budget) {
      best = p;
    }
  }
  if (best.mb == 0) {
    plan least = {ms[m - 1], ns[n - 1], ks[k - 1], 0};
    size_t bytes = tile_bytes(w, &least);
    if (needed != NULL) {
      *needed = (int64_t)bytes;
    }
    return dc__fail(DC_E_BUFFER_TOO_SMALL, "%s: budget_bytes = %" PRId64 ", must be >= %zu", w->fn, budget, bytes);
  }
  w->tiles = best;
  return DC_OK;
}

/* ---- files ---- */

/* A tile on its way: rows of `bytes` from `at` on, `pitch` apart in the file, dense in memory. */
typedef struct transfer {
  int32_t fd;
  bool write;
  char *memory;
  int64_t at, pitch, rows, bytes, pieces;
  struct {
    int64_t at; /* where it failed; -1: it did not */
    int error;  /* 0: the file ends */
  } failed[PIECES];
} transfer;

/* One run of bytes; false with errno, 0 at the file's end, and the place in *at. */
static bool move_run(const transfer *t, char *memory, int64_t *at, int64_t bytes) {
  while (bytes > 0) {
    errno = 0;
    ssize_t done = t->write ? pwrite(t->fd, memory, (size_t)bytes, *at) : pread(t->fd, memory, (size_t)bytes, *at);
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

/* Some rows: at once where they are dense. */
static void move_piece(void *arg, int64_t piece, void *scratch) {
  (void)scratch;
  transfer *t = arg;
  int64_t end = t->rows * (piece + 1) / t->pieces;
  t->failed[piece].at = -1;
  for (int64_t row = t->rows * piece / t->pieces, step; row < end; row += step) {
    step = t->pitch == t->bytes ? end - row : 1;
    int64_t at = t->at + row * t->pitch;
    if (!move_run(t, t->memory + row * t->bytes, &at, step * t->bytes)) {
      t->failed[piece].error = errno;
      t->failed[piece].at = at;
      return;
    }
  }
}

/* Rows [row, row + rows) and columns [col, col + cols) of a matrix in a file, to or from a dense tile. */
static dc_status move_tile(dc_linalg *l, const bounded *w, const char *arg, const dc__source *s, size_t size,
                           char *tile, int64_t row, int64_t rows, int64_t col, int64_t cols, bool write) {
  enum { ROWS = 64, BYTES = 1 << 17 }; /* what is worth another thread: calls, or bytes of dense rows */
  int64_t pitch = s->mat.cols;
  transfer t = {.fd = s->fd, .write = write, .memory = tile, .rows = rows};
  t.at = s->offset + (row * pitch + col) * (int64_t)size;
  t.bytes = cols * (int64_t)size;
  t.pitch = pitch * (int64_t)size;
  t.pieces = cols == pitch ? rows * t.bytes / BYTES : rows / ROWS;
  t.pieces = t.pieces < 1 ? 1 : t.pieces < PIECES ? t.pieces : PIECES;
  t.pieces = t.pieces < rows ? t.pieces : rows;
  dc__parallel(l->pool, t.pieces, move_piece, &t);
  for (int64_t i = 0; i < t.pieces; i++) {
    if (t.failed[i].at >= 0) {
      return dc__fail(DC_E_SYSTEM, "%s: %s's file, byte %" PRId64 ": %s", w->fn, arg, t.failed[i].at,
                      t.failed[i].error != 0 ? strerror(t.failed[i].error) : "the file ends");
    }
  }
  return DC_OK;
}

/* Asks the system for rows that come next; that it may not is no matter. */
static void expect(const dc__source *s, size_t size, int64_t row, int64_t rows) {
  int64_t line = s->mat.cols * (int64_t)size;
  rows = row + rows < s->mat.rows ? rows : s->mat.rows - row;
  if (in_file(s) && rows > 0) {
    (void)posix_fadvise(s->fd, s->offset + row * line, rows * line, POSIX_FADV_WILLNEED);
  }
}

static dc_status check_file(const bounded *w, const char *arg, const dc__source *s, size_t size, bool input) {
  struct stat status;
  int64_t end;
  if (!in_file(s)) {
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

/* An operand of a tile's product: the tile, or the place in memory. */
static dc__mat operand(const dc__source *s, char *tile, size_t size, int64_t row, int64_t rows, int64_t col,
                       int64_t cols) {
  dc__mat m = s->mat;
  m.rows = rows;
  m.cols = cols;
  if (in_file(s)) {
    m.data = tile;
    m.row_stride = cols;
    m.col_stride = 1;
  } else {
    m.data = (char *)m.data + (row * m.row_stride + col * m.col_stride) * (int64_t)size;
  }
  return m;
}

static int64_t part(int64_t length, int64_t piece, int64_t begin) {
  return length - begin < piece ? length - begin : piece;
}

/* One tile of C. fresh_a, fresh_b: their tiles must be read. */
static dc_status tile_of_c(dc_linalg *l, const bounded *w, int64_t i, int64_t j, bool fresh_a, bool fresh_b) {
  int64_t rows = part(w->m, w->tiles.mb, i);
  int64_t cols = part(w->n, w->tiles.nb, j);
  dc__mat c = operand(w->out, w->tc, w->out_size, i, rows, j, cols);
  int64_t p = 0;
  do {
    int64_t depth = part(w->k, w->tiles.kb, p);
    if (in_file(w->a) && fresh_a) {
      DC__TRY(move_tile(l, w, "a", w->a, w->in_size, w->ta, i, rows, p, depth, false));
    }
    if (in_file(w->b) && fresh_b) {
      DC__TRY(move_tile(l, w, "b", w->b, w->in_size, w->tb, p, depth, j, cols, false));
    }
    if (fresh_b) {
      expect(w->b, w->in_size, p + depth, w->tiles.kb);
    }
    dc__mat a = operand(w->a, w->ta, w->in_size, i, rows, p, depth);
    dc__mat b = operand(w->b, w->tb, w->in_size, p, depth, j, cols);
    dc__gemm g = dc__mat_product(&a, &b, 1, p == 0 ? 0 : 1, &c);
    dc__gemm_run(l->pool, &g);
    p += w->tiles.kb;
  } while (p < w->k);
  return in_file(w->out) ? move_tile(l, w, "out", w->out, w->out_size, w->tc, i, rows, j, cols, true) : DC_OK;
}

static dc_status all_tiles(dc_linalg *l, const bounded *w) {
  bool whole_k = w->tiles.kb >= w->k;
  bool whole_b = whole_k && w->tiles.nb >= w->n;
  for (int64_t i = 0; i < w->m; i += w->tiles.mb) {
    expect(w->a, w->in_size, i + w->tiles.mb, w->tiles.mb);
    for (int64_t j = 0; j < w->n; j += w->tiles.nb) {
      DC__TRY(tile_of_c(l, w, i, j, !whole_k || j == 0, !whole_b || i == 0));
    }
  }
  return DC_OK;
}

dc_status dc__matmul_bounded(dc_linalg *l, const char *fn, const dc__source *a, const dc__source *b,
                             const dc__source *out, int64_t budget, int64_t *needed) {
  bounded w = {.fn = fn,
               .a = a,
               .b = b,
               .out = out,
               .m = out->mat.rows,
               .n = out->mat.cols,
               .k = a->mat.cols,
               .in_size = dc_dtype_size(a->mat.dtype),
               .out_size = dc_dtype_size(out->mat.dtype)};
  DC__TRY(check_file(&w, "a", a, w.in_size, true));
  DC__TRY(check_file(&w, "b", b, w.in_size, true));
  DC__TRY(check_file(&w, "out", out, w.out_size, false));
  if (w.m == 0 || w.n == 0) {
    return DC_OK;
  }
  DC__TRY(choose(&w, budget, needed));
  size_t bytes = tile_bytes(&w, &w.tiles);
  void *memory = NULL;
  if (bytes > 0 || l->query) {
    DC__TRY(dc__linalg_scratch(l, fn, bytes, &memory));
    if (memory == NULL) {
      return DC_OK;
    }
  }
  size_t offset = 0;
  w.ta = in_file(a) ? dc__linalg_part(memory, &offset, w.tiles.mb * w.tiles.kb, w.in_size) : NULL;
  w.tb = in_file(b) ? dc__linalg_part(memory, &offset, w.tiles.kb * w.tiles.nb, w.in_size) : NULL;
  w.tc = in_file(out) ? dc__linalg_part(memory, &offset, w.tiles.mb * w.tiles.nb, w.out_size) : NULL;
  return all_tiles(l, &w);
}
