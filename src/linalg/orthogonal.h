/* Polar factors, inside the room: the order of the products is written once, in orthogonal.c, over a table of where
 * they are made: there for one matrix, by orthogonal_there.c for a few on a device. */
#ifndef DC_LINALG_ORTHOGONAL_H
#define DC_LINALG_ORTHOGONAL_H

#include "linalg/linalg.h"

struct dc__orthogonal_work;

/* Matrices under way, dense, with no more rows than columns. */
typedef struct dc__orthogonal {
  const struct dc__orthogonal_work *work;
  void *place; /* the table's own */
  int64_t rows, cols;
  int32_t count, dtype;
  bool alike;        /* on a device: the bits do not depend on count */
  void *x, *next;    /* [count, rows, cols] */
  void *gram, *both; /* [count, rows, rows] */
} dc__orthogonal;

typedef struct dc__orthogonal_work {
  /* c [rows, rows] = alpha a a^T + beta c with a [rows, k], of each matrix; c is symmetric. */
  void (*square)(const dc__orthogonal *o, double alpha, const void *a, double beta, void *c, int64_t k);
  /* c [rows, n] = alpha a [rows, k] op(b) + beta c, of each matrix. */
  void (*product)(const dc__orthogonal *o, double alpha, const void *a, bool turned, const void *b, double beta,
                  void *c, int64_t n, int64_t k);
  /* [count, rows, cols] */
  void (*copy)(const dc__orthogonal *o, void *to, const void *from, int64_t cols);
} dc__orthogonal_work;

/* The steps, from x to x, which is another place afterwards. */
void dc__polynomials(dc__orthogonal *o, bool is_express, int32_t steps);
dc__gemm dc__orthogonal_product(const dc__orthogonal *o, double alpha, const void *a, bool turned, const void *b,
                                double beta, void *c, int64_t n, int64_t k);
/* x, next, gram and both, for `count` matrices, one after the other. */
void dc__orthogonal_place(dc__orthogonal *o, void *memory, int64_t count);
/* The matrix, or its transpose where that lies. */
dc__mat dc__lying(const dc__mat *m);
/* DC_E_NOT_FINITE with the place; `first` is the first matrix' number. */
dc_status dc__orthogonal_check(const char *fn, const dc__mat *a, int64_t first);

dc_status dc__orthogonalize_there(dc_linalg *l, const char *fn, const dc__mat *a, bool express, int32_t steps,
                                  const dc__mat *out);

#endif
