/* Bounded products, inside the room: what is multiplied, and in which pieces. */
#ifndef DC_LINALG_BOUNDED_H
#define DC_LINALG_BOUNDED_H

#include "linalg/linalg.h"

static inline int64_t dc__least(int64_t x, int64_t y) {
  return x < y ? x : y;
}
static inline int64_t dc__pieces(int64_t length, int64_t piece) {
  return piece > 0 ? (length + piece - 1) / piece : 1; /* k = 0: C is still to be written */
}

/* A product, and how it is cut. C's tile [mb, nb] is summed over pieces [mb, kb] of A and [kb, nb] of B. The number of
 * threads has no part in the choice, so it has none in the bits. */
typedef struct dc__bounded_plan {
  int64_t mb, nb, kb;
  int64_t strip; /* of A's and C's rows at a time, where they go in strips */
  bool gathers;  /* strips of C wait in its file for those beside them */
  double cost;
} dc__bounded_plan;

typedef struct dc__bounded {
  const char *fn;
  const dc__source *a, *b, *out;
  int64_t m, n, k;
  size_t in_size, out_size;
  bool rereads; /* what is written to out's file can be read again */
  const struct dc__bounded_way *way;
  dc__gemm_shape shape; /* pieces come in multiples of it, or in as many as there are */
  dc__bounded_plan plan;
} dc__bounded;

/* Rows of C that are put together at a time. */
enum { DC__BOUNDED_LINES = 16 };

/* What plans mean where they are carried out. */
typedef struct dc__bounded_way {
  bool (*fits)(const dc__bounded *w, dc__bounded_plan *plan);          /* sets its strip; false: there is no such way */
  size_t (*bytes)(const dc__bounded *w, const dc__bounded_plan *plan); /* SIZE_MAX: more than there can be */
  double (*cost)(const dc__bounded *w, const dc__bounded_plan *plan);  /* nanoseconds, beside the multiplications */
} dc__bounded_way;

/* ---- matrices in files (bounded_file.c) ---- */

static inline bool dc__in_file(const dc__source *s) {
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
dc_status dc__file_told(dc__file_failure *failure, const char *fn);
/* DC_E_INVALID unless the source is in memory, or in an open file that is long enough. */
dc_status dc__file_check(const char *fn, const char *arg, const dc__source *s, bool input);
/* Whether what is written there can be read: it is a file proper, open for both. */
bool dc__file_rereads(const dc__source *s);
/* Elements [first, first + count), in the order in which they lie. False: it failed. */
bool dc__file_run(dc__file_failure *failure, const char *arg, const dc__source *s, bool write, char *memory,
                  int64_t first, int64_t count);
/* Rows [row, row + rows) and columns [col, col + cols) from dense memory (`write`) or to it, at once where rows are
 * whole. False: it failed. */
bool dc__file_move(dc__file_failure *failure, const char *arg, const dc__source *s, bool write, char *memory,
                   int64_t row, int64_t rows, int64_t col, int64_t cols);
/* A part of a matrix: what was read of it into dense memory, or the place in its own. */
dc__mat dc__source_part(const dc__source *s, void *read, int64_t row, int64_t rows, int64_t col, int64_t cols);
/* Asks the system for whole rows that come later, if the source is in a file; that it may not is no matter. */
void dc__file_expect(const dc__source *s, int64_t row, int64_t rows);

/* ---- plans (bounded_plan.c) ---- */

extern const dc__bounded_way dc__bounded_here; /* on the handle's threads */
/* What it costs to read or write a part of each row so many times, in nanoseconds; whole rows go in one call. */
double dc__bounded_moves(const dc__source *s, bool write, double times, double rows, double cols);
/* Chooses w->plan, the cheapest within the budget. DC_E_BUFFER_TOO_SMALL: *needed is set, if there. */
dc_status dc__bounded_choose(dc__bounded *w, int64_t budget, int64_t *needed);

/* ---- on a device (bounded_there.c) ---- */

/* The product, checked and of at least one element. */
dc_status dc__bounded_there(dc_linalg *l, dc__bounded *w, int64_t budget, int64_t *needed);

#endif
