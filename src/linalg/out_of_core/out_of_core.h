/* Bounded products, inside the room: what is multiplied, and in which pieces. */
#ifndef DC_LINALG_OUT_OF_CORE_H
#define DC_LINALG_OUT_OF_CORE_H

#include "linalg/linalg.h"

static inline int64_t dc__min_int64(int64_t x, int64_t y) {
  return x < y ? x : y;
}
static inline int64_t dc__num_pieces(int64_t length, int64_t piece) {
  return piece > 0 ? (length + piece - 1) / piece : 1; /* k = 0: C is still to be written */
}

/* A product, and how it is cut. C's tile [mb, nb] is summed over pieces [mb, kb] of A and [kb, nb] of B. The number of
 * threads has no part in the choice, so it has none in the bits. */
typedef struct dc__out_of_core_plan {
  int64_t mb, nb, kb;
  int64_t strip;  /* of A's and C's rows at a time, where they go in strips */
  bool coalesces; /* strips of C wait in its file for those beside them */
  double cost;
} dc__out_of_core_plan;

typedef struct dc__out_of_core {
  const char *fn;
  const dc__matrix_source *a, *b, *out;
  int64_t m, n, k;
  size_t in_size, out_size;
  bool can_read_back; /* what is written to out's file can be read again */
  const struct dc__out_of_core_model *model;
  dc__gemm_shape shape; /* pieces come in multiples of it, or in as many as there are */
  dc__out_of_core_plan plan;
} dc__out_of_core;

/* Rows of C that are put together at a time. */
enum { DC__OUT_OF_CORE_ROWS = 16 };

/* What plans mean where they are carried out. */
typedef struct dc__out_of_core_model {
  bool (*fits)(const dc__out_of_core *w, dc__out_of_core_plan *plan); /* sets its strip; false: there is no such way */
  size_t (*bytes)(const dc__out_of_core *w, const dc__out_of_core_plan *plan); /* SIZE_MAX: more than there can be */
  double (*cost)(const dc__out_of_core *w,
                 const dc__out_of_core_plan *plan); /* nanoseconds, beside the multiplications */
} dc__out_of_core_model;

/* ---- matrices in files (out_of_core_file.c) ---- */

static inline bool dc__in_file(const dc__matrix_source *s) {
  return s->mat.data == NULL;
}

/* What several threads read and write fails once: who fails first tells about it. */
typedef struct dc__file_failure {
  atomic_bool failed;
  const char *arg;
  int64_t at; /* in the file, in bytes */
  int error;  /* 0: the file ends */
} dc__file_failure;

static inline void dc__file_failure_init(dc__file_failure *failure) {
  atomic_init(&failure->failed, false);
}
static inline bool dc__file_failed(dc__file_failure *failure) {
  return atomic_load(&failure->failed);
}
/* DC_OK, or the failure as DC_E_SYSTEM, once all threads are done. */
dc_status dc__file_status(dc__file_failure *failure, const char *fn);
/* DC_E_INVALID unless the source is in memory, or in an open file that is long enough. */
dc_status dc__file_check(const char *fn, const char *arg, const dc__matrix_source *s, bool input);
/* Whether what is written there can be read: it is a file proper, open for both. */
bool dc__file_can_read_back(const dc__matrix_source *s);
/* Elements [first, first + count), in the order in which they lie. False: it failed. */
bool dc__file_io_contiguous(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write,
                            char *memory, int64_t first, int64_t count);
/* Rows [row, row + rows) and columns [col, col + cols) from dense memory (`write`) or to it, at once where rows are
 * whole. False: it failed. */
bool dc__file_io_block(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write, char *memory,
                       int64_t row, int64_t rows, int64_t col, int64_t cols);
/* A part of a matrix: what was read of it into dense memory, or the place in its own. */
dc__mat dc__matrix_source_block(const dc__matrix_source *s, void *read, int64_t row, int64_t rows, int64_t col,
                                int64_t cols);
/* Asks the system for whole rows that come later, if the source is in a file; that it may not is no matter. */
void dc__file_prefetch(const dc__matrix_source *s, int64_t row, int64_t rows);

/* ---- plans (out_of_core_plan.c) ---- */

extern const dc__out_of_core_model dc__out_of_core_cpu; /* on the handle's threads */
/* What it costs to read or write a part of each row so many times, in nanoseconds; whole rows go in one call. */
double dc__out_of_core_io_cost(const dc__matrix_source *s, bool write, double times, double rows, double cols);
/* Chooses w->plan, the cheapest within the budget. DC_E_BUFFER_TOO_SMALL: *needed is set, if there. */
dc_status dc__out_of_core_choose_plan(dc__out_of_core *w, int64_t budget, int64_t *needed);

/* ---- on a device (out_of_core_cuda.c) ---- */

/* The product, checked and of at least one element. */
dc_status dc__out_of_core_cuda(dc_linalg *l, dc__out_of_core *w, int64_t budget, int64_t *needed);

#endif
