/* Matrix products with operands in files and bounded memory. A piece of B is read and packed once for all threads.
 * Each thread takes strips of rows: it reads A's, multiplies, and writes C's, so I/O overlaps with products.
 * Operands in memory are used in place. The next pieces are prefetched. Writing short pieces of C's rows would cost
 * a system call each. So a strip is stored dense in the file, where its whole rows will be; the last strip merges
 * the rows. */
#include <stdatomic.h>
#include <string.h>

#include "linalg/out_of_core/out_of_core.h"

/* One piece of B, k from p on, and the tile of C that it adds to. Threads take slices of the piece, then strips of
 * the tile's rows, until none are left. */
typedef struct out_of_core_pass {
  const dc__out_of_core *w;
  char *packed, *tile;
  int64_t i, rows, j, cols, p, depth;
  int64_t length, unit, parts, longest; /* rows to share out, in units of `unit`; parts have at most `longest` */
  atomic_llong next;                    /* the first part not yet taken */
  dc__file_failure failure;
} out_of_core_pass;

/* Takes the next part's first row and its number of rows. Returns false at the end. */
static bool next_part(out_of_core_pass *x, int64_t *row, int64_t *rows) {
  const int64_t index = atomic_fetch_add(&x->next, 1);
  const int64_t units = dc__num_pieces(x->length, x->unit);
  if (index >= x->parts || dc__file_failed(&x->failure)) {
    return false;
  }
  *row = units * index / x->parts * x->unit;
  *rows = dc__min_int64(units * (index + 1) / x->parts * x->unit, x->length) - *row;
  return true;
}

/* Packs slices of B. It reads them into scratch behind DC__GEMM_PACKED_SCRATCH, which products with a packed B leave
 * unused. */
static void pack_slices(void *arg, int64_t index, void *scratch) {
  (void)index;
  out_of_core_pass *x = arg;
  const dc__out_of_core *w = x->w;
  char *read = (char *)scratch + DC__GEMM_PACKED_SCRATCH;
  for (int64_t row, rows; next_part(x, &row, &rows);) {
    dc__file_prefetch(w->b, x->p + row + rows, x->longest);
    const dc__matrix_part part = {.row = x->p + row, .rows = rows, .col = x->j, .cols = x->cols};
    if (dc__in_file(w->b) && !dc__file_io_block(&x->failure, "b", w->b, false, read, &part)) {
      return;
    }
    const dc__mat b = dc__matrix_source_block(w->b, read, &part);
    dc__gemm g = dc__mat_gemm(&b, &b, 1, 0, &b);
    g.k = rows;
    dc__gemm_pack(&g, x->packed + dc__gemm_packed_bytes(g.dtype, x->cols, row));
  }
}

/* Assembles whole rows from the sums and the strips before them, a few at a time, so that they are written from the
 * cache. */
static bool write_rows(out_of_core_pass *x, const char *sums, const char *before, char *line, int64_t i, int64_t rows) {
  const dc__out_of_core *w = x->w;
  const size_t size = w->out_size;
  const int64_t nb = w->plan.nb;
  for (int64_t row = 0; row < rows; row += DC__OUT_OF_CORE_ROWS) {
    const int64_t lines = dc__min_int64(DC__OUT_OF_CORE_ROWS, rows - row);
    char *to = line;
    for (int64_t r = row; r < row + lines; r++) {
      for (int64_t j = 0; j < x->j; j += nb, to += (size_t)nb * size) {
        memcpy(to, before + (size_t)(rows * j + r * nb) * size, (size_t)nb * size);
      }
      memcpy(to, sums + (size_t)(r * x->cols) * size, (size_t)x->cols * size);
      to += (size_t)x->cols * size;
    }
    if (!dc__file_io_contiguous(&x->failure, "out", w->out, true, line, (i + row) * w->n, lines * w->n)) {
      return false;
    }
  }
  return true;
}

/* Writes a strip of C, from row i on, to its file. `own` is scratch memory, which begins with the strip unless that is
 * in C's tile. */
static bool write_strip(out_of_core_pass *x, char *sums, char *own, int64_t i, int64_t rows) {
  const dc__out_of_core *w = x->w;
  if (!w->plan.coalesces) {
    const dc__matrix_part part = {.row = i, .rows = rows, .col = x->j, .cols = x->cols};
    return dc__file_io_block(&x->failure, "out", w->out, true, sums, &part);
  }
  if (x->j + x->cols < w->n) {
    return dc__file_io_contiguous(&x->failure, "out", w->out, true, sums, i * w->n + rows * x->j, rows * x->cols);
  }
  char *before = own + (sums == own ? (size_t)(rows * x->cols) * w->out_size : 0);
  char *line = before + (size_t)(rows * x->j) * w->out_size;
  return dc__file_io_contiguous(&x->failure, "out", w->out, false, before, i * w->n, rows * x->j) &&
         write_rows(x, sums, before, line, i, rows);
}

static void multiply_row_strips(void *arg, int64_t index, void *scratch) {
  (void)index;
  out_of_core_pass *x = arg;
  const dc__out_of_core *w = x->w;
  const bool whole = x->depth == w->k;
  const bool last = x->p + x->depth == w->k;
  char *own = (char *)scratch + DC__GEMM_PACKED_SCRATCH;
  char *read = own + x->longest * dc__strip_row_bytes(w, x->depth, x->cols);
  for (int64_t row, rows; next_part(x, &row, &rows);) {
    const int64_t i = x->i + row;
    char *sums = whole ? own : x->tile + (size_t)(row * x->cols) * w->out_size;
    if (whole) {
      dc__file_prefetch(w->a, i + rows, x->longest);
    }
    const dc__matrix_part part_a = {.row = i, .rows = rows, .col = x->p, .cols = x->depth};
    const dc__matrix_part part_c = {.row = i, .rows = rows, .col = x->j, .cols = x->cols};
    const dc__matrix_part part_b = {.row = x->p, .rows = x->depth, .col = x->j, .cols = x->cols};
    if (dc__in_file(w->a) && !dc__file_io_block(&x->failure, "a", w->a, false, read, &part_a)) {
      return;
    }
    const dc__mat a = dc__matrix_source_block(w->a, read, &part_a);
    const dc__mat b = dc__matrix_source_block(w->b, x->packed, &part_b);
    const dc__mat c = dc__matrix_source_block(w->out, sums, &part_c);
    dc__gemm g = dc__mat_gemm(&a, &b, 1, x->p == 0 ? 0 : 1, &c);
    g.packed = x->packed;
    dc__gemm_serial(&g, scratch);
    if (dc__in_file(w->out) && last && !write_strip(x, sums, own, i, rows)) {
      return;
    }
  }
}

/* Shares out `length` rows between the threads, in parts of at most `longest`, rounded to `unit`. */
static dc_status run_parts(dc_linalg *l, out_of_core_pass *x, dc__parallel_fn fn, int64_t length, int64_t longest,
                           int64_t unit) {
  const int64_t threads = dc__threadpool_threads(l->pool);
  x->length = length;
  x->longest = longest;
  x->unit = dc__min_int64(unit, longest);
  x->parts = dc__min_int64(dc__num_pieces(dc__num_pieces(length, longest), threads) * threads,
                           dc__num_pieces(length, x->unit));
  atomic_init(&x->next, 0);
  dc__file_failure_init(&x->failure);
  dc__parallel_for(l->pool, dc__min_int64(threads, x->parts), fn, x);
  return dc__file_status(&x->failure, x->w->fn);
}

static dc_status run_passes(dc_linalg *l, const dc__out_of_core *w, char *packed, char *tile) {
  const dc__out_of_core_plan *s = &w->plan;
  for (int64_t j = 0; j < w->n; j += s->nb) {
    for (int64_t i = 0; i < w->m; i += s->mb) {
      int64_t p = 0;
      do {
        out_of_core_pass x = {.w = w, .packed = packed, .tile = tile, .i = i, .j = j, .p = p};
        x.rows = dc__min_int64(s->mb, w->m - i);
        x.cols = dc__min_int64(s->nb, w->n - j);
        x.depth = dc__min_int64(s->kb, w->k - p);
        if (x.depth > 0) {
          DC__TRY(run_parts(l, &x, pack_slices, x.depth, dc__min_int64(w->shape.slice, x.depth), w->shape.slice));
        }
        DC__TRY(run_parts(l, &x, multiply_row_strips, x.rows, s->strip, w->shape.rows));
        p += s->kb;
      } while (p < w->k);
    }
  }
  return DC_OK;
}

dc_status dc__matmul_bounded(dc_linalg *l, const char *fn, const dc__matrix_source *a, const dc__matrix_source *b,
                             const dc__matrix_source *out, int64_t budget, int64_t *needed) {
  dc__out_of_core w = {.fn = fn,
                       .a = a,
                       .b = b,
                       .out = out,
                       .m = out->mat.rows,
                       .n = out->mat.cols,
                       .k = a->mat.cols,
                       .in_size = dc_dtype_size(a->mat.dtype),
                       .out_size = dc_dtype_size(out->mat.dtype),
                       .can_read_back = dc__file_can_read_back(out),
                       .model = &dc__out_of_core_cpu,
                       .shape = dc__gemm_shape_of(a->mat.dtype)};
  DC__TRY(dc__file_check(fn, "a", a, true));
  DC__TRY(dc__file_check(fn, "b", b, true));
  DC__TRY(dc__file_check(fn, "out", out, false));
  DC__TRY(dc__file_check_apart(fn, out, "a", a));
  DC__TRY(dc__file_check_apart(fn, out, "b", b));
  if (w.m == 0 || w.n == 0) {
    return DC_OK;
  }
  if (dc__linalg_is_cuda(l)) {
    return dc__out_of_core_cuda(l, &w, budget, needed);
  }
  if (!dc__in_file(a) && !dc__in_file(b) && !dc__in_file(out)) {
    const dc__gemm g = dc__mat_gemm(&a->mat, &b->mat, 1, 0, &out->mat);
    if (!l->query) {
      dc__gemm_run(l->pool, &g);
    }
    return DC_OK;
  }
  void *memory = NULL;
  size_t offset = 0;
  DC__TRY(dc__out_of_core_choose_plan(&w, budget, needed));
  DC__TRY(dc__linalg_scratch(l, fn, w.model->bytes(&w, &w.plan), &memory));
  if (memory == NULL) {
    return DC_OK;
  }
  char *packed = dc__linalg_suballoc(memory, &offset, 1, dc__gemm_packed_bytes(a->mat.dtype, w.plan.nb, w.plan.kb));
  return run_passes(l, &w, packed, (char *)memory + offset);
}
