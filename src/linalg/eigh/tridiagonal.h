/* Reduction of a matrix to tridiagonal form and back transformation, internal. */
#ifndef DC_LINALG_TRIDIAGONAL_H
#define DC_LINALG_TRIDIAGONAL_H

#include "linalg/eigh/eigh.h"

enum { DC__REFLECTOR_BLOCK = 48 }; /* reflections that are applied together; no more rows are reduced together */

/* Memory of one matrix in progress. P and Q are a panel's [2 DC__REFLECTOR_BLOCK, n] each. */
typedef struct dc__tridiagonal_form {
  const dc__spectral_job *job;
  dc__spectral_task *t;
  void *scratch;         /* of this thread; NULL for products on the pool */
  double *a;             /* the matrix, and then the reflections in its rows */
  void *f;               /* the result, at the beginning of the working memory */
  double *d, *off, *tau; /* T's diagonal, T's entries beside it, and the reflections' factors */
  void *p, *q;           /* from p on all memory is free between reduction and back transformation */
  double *rest;
  int64_t n;
  int32_t dtype; /* type of f, p and q at present */
} dc__tridiagonal_form;

static inline dc__threadpool *dc__tridiagonal_pool(const dc__tridiagonal_form *w) {
  return w->scratch != NULL ? NULL : w->job->l->pool;
}

/* tridiagonal.c: the lower triangle of c [m, m] -= P^T Q, `depth` rows of each. */
void dc__tridiagonal_syr2k(const dc__tridiagonal_form *w, int64_t m, int64_t depth, void *c);

/* back_transform.c, where Q is the product of the reduction's reflections. Replaces F, which is whole and of w's type,
 * by the lower triangle of Q F Q^T, and by parts of the upper one in the same blocks. */
void dc__back_transform_matrix(const dc__tridiagonal_form *w);
/* Transforms each row of F, an eigenvector of T, to one of A, F Q^T. */
void dc__back_transform_vectors(const dc__tridiagonal_form *w);

#endif
