/* Polar factors, internal. newton_schulz.c runs the products in order through a table of operations: its own for one
 * matrix on the CPU, newton_schulz_cuda.c's for a slice of a batch. */
#ifndef DC_LINALG_NEWTON_SCHULZ_H
#define DC_LINALG_NEWTON_SCHULZ_H

#include "linalg/linalg.h"

struct dc__newton_schulz_work;

/* Matrices in progress, dense, with no more rows than columns. */
typedef struct dc__newton_schulz {
  const struct dc__newton_schulz_work *work;
  void *context; /* of the table's operations */
  int64_t rows, cols;
  int32_t count, dtype;
  bool batch_invariant; /* on a device: the bits do not depend on count */
  void *x, *next;       /* [count, rows, cols] */
  void *gram, *poly;    /* [count, rows, rows] */
} dc__newton_schulz;

typedef struct dc__newton_schulz_work {
  /* c [rows, rows] = alpha a a^T + beta c with a [rows, k], of each matrix; c is symmetric. */
  void (*syrk)(const dc__newton_schulz *o, double alpha, const void *a, double beta, void *c, int64_t k);
  /* c [rows, n] = alpha a [rows, k] op(b) + beta c, of each matrix. */
  void (*gemm)(const dc__newton_schulz *o, double alpha, const void *a, bool trans_b, const void *b, double beta,
               void *c, int64_t n, int64_t k);
  /* Copies [count, rows, cols]. */
  void (*copy)(const dc__newton_schulz *o, void *to, const void *from, int64_t cols);
} dc__newton_schulz_work;

/* Runs the steps on x, which may be another buffer afterwards. */
void dc__newton_schulz_run(dc__newton_schulz *o, bool use_polar_express, int32_t steps);
dc__gemm dc__newton_schulz_gemm(const dc__newton_schulz *o, double alpha, const void *a, bool trans_b, const void *b,
                                double beta, void *c, int64_t n, int64_t k);
/* Places x, next, gram and poly of `count` matrices in `memory`, one after the other. */
void dc__newton_schulz_layout(dc__newton_schulz *o, void *memory, int64_t count);
/* Returns the matrix, or its transpose if it is tall. */
dc__mat dc__mat_as_wide(const dc__mat *m);
/* Returns DC_E_NOT_FINITE for a NaN or an infinity. `first` is the index of a's first matrix in the batch, for the
 * error text. */
dc_status dc__newton_schulz_check_finite(const char *fn, const dc__mat *a, int64_t first);

dc_status dc__orthogonalize_cuda(dc_linalg *l, const char *fn, const dc__mat *a, bool polar_express, int32_t steps,
                                 const dc__mat *out);

#endif
