/* Out-of-core products, internal: the operands, and the pieces they are computed in. */
#ifndef DC_LINALG_OUT_OF_CORE_H
#define DC_LINALG_OUT_OF_CORE_H

#include "linalg/linalg.h"

static inline int64_t dc__num_pieces(int64_t length, int64_t piece) {
  return piece > 0 ? (length + piece - 1) / piece : 1; /* for k = 0, C is still written */
}

/* The plan of a product. C's tile [mb, nb] is summed over pieces [mb, kb] of A and [kb, nb] of B. The plan does not
 * depend on the number of threads, so neither do the bits. */
typedef struct dc__out_of_core_plan {
  int64_t mb, nb, kb;
  int64_t strip;  /* rows of A and C per strip */
  bool coalesces; /* strips of C wait in its file to be merged */
  double cost;    /* nanoseconds beyond the multiplications */
} dc__out_of_core_plan;

typedef struct dc__out_of_core {
  const char *fn;
  const dc__matrix_source *a, *b, *out;
  int64_t m, n, k;
  size_t in_size, out_size; /* bytes per element */
  bool can_read_back;       /* out's file can be read back */
  const struct dc__out_of_core_model *model;
  dc__gemm_shape shape; /* pieces are multiples of it, or whole dimensions */
  dc__out_of_core_plan plan;
} dc__out_of_core;

/* Rows of C that are merged at a time. */
enum { DC__OUT_OF_CORE_ROWS = 16 };

/* How plans are checked and compared on one kind of device. */
typedef struct dc__out_of_core_model {
  bool (*fits)(const dc__out_of_core *w,
               dc__out_of_core_plan *plan); /* sets the plan's strip; false if the plan cannot run */
  size_t (*bytes)(const dc__out_of_core *w, const dc__out_of_core_plan *plan); /* SIZE_MAX on overflow */
  double (*cost)(const dc__out_of_core *w,
                 const dc__out_of_core_plan *plan); /* nanoseconds beyond the multiplications */
} dc__out_of_core_model;

/* ---- matrices in files (out_of_core_file.c) ---- */

static inline bool dc__in_file(const dc__matrix_source *s) {
  return s->in_file;
}

/* Bytes of a thread's scratch memory per row of C's strip: 0 unless out is in a file and all of k is summed at once. */
static inline int64_t dc__strip_row_bytes(const dc__out_of_core *w, int64_t depth, int64_t cols) {
  return dc__in_file(w->out) && depth == w->k ? cols * (int64_t)w->out_size : 0;
}

/* The first failure of several threads' I/O; later ones are ignored. */
typedef struct dc__file_failure {
  atomic_bool failed;
  const char *arg;
  int64_t at; /* position in the file, in bytes */
  int error;  /* errno, or 0 at the end of the file */
} dc__file_failure;

static inline void dc__file_failure_init(dc__file_failure *failure) {
  atomic_init(&failure->failed, false);
}
static inline bool dc__file_failed(dc__file_failure *failure) {
  return atomic_load(&failure->failed);
}
/* Returns DC_E_SYSTEM for a failure, otherwise DC_OK. Call it when all threads are done. */
dc_status dc__file_status(dc__file_failure *failure, const char *fn);
/* Returns DC_E_INVALID unless the source is in memory, or in an open file that is long enough. */
dc_status dc__file_check(const char *fn, const char *arg, const dc__matrix_source *s, bool input);
/* Returns DC_E_INVALID if both lie in one file and share bytes. Both have passed dc__file_check(). */
dc_status dc__file_check_apart(const char *fn, const dc__matrix_source *out, const char *arg,
                               const dc__matrix_source *in);
/* Whether a destination can be read back: it is a regular file, open for reading and writing. */
bool dc__file_can_read_back(const dc__matrix_source *s);
/* Reads or writes elements [first, first + count), in file order. Returns false on failure. */
bool dc__file_io_contiguous(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write,
                            char *memory, int64_t first, int64_t count);
/* Rows [row, row + rows) and columns [col, col + cols) of a matrix. */
typedef struct dc__matrix_part {
  int64_t row, rows, col, cols;
} dc__matrix_part;
/* Reads a part into dense memory, or writes it from there; in one call if rows are whole. Returns false on failure. */
bool dc__file_io_block(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write, char *memory,
                       const dc__matrix_part *part);
/* Returns a part of a matrix: in place, or for a file the dense memory `read` that it was read into. */
dc__mat dc__matrix_source_block(const dc__matrix_source *s, void *read, const dc__matrix_part *part);
/* Prefetches whole rows of a source in a file. Errors are ignored. */
void dc__file_prefetch(const dc__matrix_source *s, int64_t row, int64_t rows);

/* ---- plans (out_of_core_plan.c) ---- */

extern const dc__out_of_core_model dc__out_of_core_cpu; /* on the handle's threads */
/* Returns the nanoseconds to read or write [rows, cols] of a matrix `times` times. Whole rows take one call. */
double dc__out_of_core_io_cost(const dc__matrix_source *s, bool write, double times, double rows, double cols);
/* Sets w->plan to the cheapest plan within `budget` bytes. On DC_E_BUFFER_TOO_SMALL, *needed is set to the bytes of the
 * smallest plan, if not NULL. */
dc_status dc__out_of_core_choose_plan(dc__out_of_core *w, int64_t budget, int64_t *needed);

/* ---- on a device (out_of_core_cuda.c) ---- */

/* Runs a product that was checked and has at least one element. */
dc_status dc__out_of_core_cuda(dc_linalg *l, dc__out_of_core *w, int64_t budget, int64_t *needed);

#endif
