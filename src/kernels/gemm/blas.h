/* LAPACK, and the BLAS routines that libdc's own product does not cover, from a library that is opened at run time, not
 * linked. It is OpenBLAS, with or without the prefix scipy_, or any library with the Fortran interface and 32-bit
 * integers. Every routine runs on the calling thread alone: callers bring their own threads (threadpool.h), and the
 * same call gives the same bits. */
#ifndef DC_KERNELS_BLAS_H
#define DC_KERNELS_BLAS_H

#include "base/base.h"

/* The Fortran interface: arguments by address, matrices column by column, and at the end the length of each character
 * argument. Entries of a routine for float32 and float64. */
#define DC__BLAS_PAIR(name, ...)                \
  void (*s##name)(DC__BLAS_ARGS_##name(float)); \
  void (*d##name)(DC__BLAS_ARGS_##name(double));

#define DC__BLAS_ARGS_stedc(T)                                                                              \
  const char *compz, const int32_t *n, T *d, T *e, T *z, const int32_t *ldz, T *work, const int32_t *lwork, \
      int32_t *iwork, const int32_t *liwork, int32_t *info, size_t compz_length
#define DC__BLAS_ARGS_syevr(T)                                                                                        \
  const char *jobz, const char *range, const char *uplo, const int32_t *n, T *a, const int32_t *lda, const T *vl,     \
      const T *vu, const int32_t *il, const int32_t *iu, const T *abstol, int32_t *m, T *w, T *z, const int32_t *ldz, \
      int32_t *isuppz, T *work, const int32_t *lwork, int32_t *iwork, const int32_t *liwork, int32_t *info,           \
      size_t jobz_length, size_t range_length, size_t uplo_length
#define DC__BLAS_ARGS_potrf(T) \
  const char *uplo, const int32_t *n, T *a, const int32_t *lda, int32_t *info, size_t uplo_length
#define DC__BLAS_ARGS_potri(T) DC__BLAS_ARGS_potrf(T)
#define DC__BLAS_ARGS_potrs(T)                                                                                       \
  const char *uplo, const int32_t *n, const int32_t *nrhs, const T *a, const int32_t *lda, T *b, const int32_t *ldb, \
      int32_t *info, size_t uplo_length
#define DC__BLAS_ARGS_getrf(T) \
  const int32_t *m, const int32_t *n, T *a, const int32_t *lda, int32_t *pivots, int32_t *info
#define DC__BLAS_ARGS_getri(T) \
  const int32_t *n, T *a, const int32_t *lda, const int32_t *pivots, T *work, const int32_t *lwork, int32_t *info
#define DC__BLAS_ARGS_getrs(T)                                                                                     \
  const char *trans, const int32_t *n, const int32_t *nrhs, const T *a, const int32_t *lda, const int32_t *pivots, \
      T *b, const int32_t *ldb, int32_t *info, size_t trans_length
#define DC__BLAS_ARGS_geqrf(T) \
  const int32_t *m, const int32_t *n, T *a, const int32_t *lda, T *tau, T *work, const int32_t *lwork, int32_t *info
#define DC__BLAS_ARGS_orgqr(T)                                                                           \
  const int32_t *m, const int32_t *n, const int32_t *k, T *a, const int32_t *lda, const T *tau, T *work, \
      const int32_t *lwork, int32_t *info
#define DC__BLAS_ARGS_gesdd(T)                                                                                    \
  const char *jobz, const int32_t *m, const int32_t *n, T *a, const int32_t *lda, T *s, T *u, const int32_t *ldu, \
      T *vt, const int32_t *ldvt, T *work, const int32_t *lwork, int32_t *iwork, int32_t *info, size_t jobz_length
#define DC__BLAS_ARGS_trsm(T)                                                                                  \
  const char *side, const char *uplo, const char *trans, const char *diag, const int32_t *m, const int32_t *n, \
      const T *alpha, const T *a, const int32_t *lda, T *b, const int32_t *ldb, size_t side_length,            \
      size_t uplo_length, size_t trans_length, size_t diag_length

/* X(name) for each routine. */
#define DC__BLAS_EACH(X) \
  X(stedc) X(syevr) X(potrf) X(potri) X(potrs) X(getrf) X(getri) X(getrs) X(geqrf) X(orgqr) X(gesdd) X(trsm)

typedef struct dc__blas {
  char path[256]; /* the path by which it was opened */
  DC__BLAS_EACH(DC__BLAS_PAIR)
} dc__blas;

/* Sets *blas to the routines, which are complete and valid until the process ends. path is the library's file. If it is
 * NULL, the package scipy-openblas32 beside libdc's own is tried, then libopenblas.so.0 on the system's path. The first
 * success is kept, and later calls with NULL or its path return it again; another path is DC_E_STATE. Errors:
 * DC_E_UNSUPPORTED (no such library, or one without a routine: its name is in the text). [any] */
dc_status dc__blas_open(const char *path, const dc__blas **blas);

#endif
