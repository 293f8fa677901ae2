/* The kernels' versions for instruction sets, behind one table of functions. */
#ifndef DC_KERNELS_DISPATCH_H
#define DC_KERNELS_DISPATCH_H

#include "kernels/kernels.h"

enum {
  DC__KERNELS_STEP = 32,  /* the functions below take multiples of this many elements; plain C does the rest */
  DC__KERNELS_FAN_IN = 8, /* maximum number of sources of a table's reduce */
  DC__KERNELS_TILE = 512, /* elements of a temporary on the stack: a few of them fit the first-level cache */
  DC__KERNELS_DTYPES = 8  /* the types of dc__dtype_is_castable and DC_DTYPE_NONE */
};

/* Copies of at least this many bytes bypass the caches. On a core with 1 MiB of second-level and 32 MiB of third-level
 * cache they are faster than memcpy from 1 MiB on. But below 16 MiB, reading the result at once costs more than that
 * saves. Ranks share the third-level cache, so it is half of that. */
#define DC__COPY_STREAM ((size_t)8 << 20)

/* dst = (dst_dtype)src, or dst += src. */
typedef void (*dc__binary_fn)(void *dst, const void *src, int64_t count);
/* The same. Returns whether all of dst is finite afterwards. */
typedef bool (*dc__combine_fn)(void *dst, const void *src, int64_t count);
/* dc__reduce() of n sources, 2 to DC__KERNELS_FAN_IN. Sources are read from element `begin` on, and dst is written from
 * element 0 on. */
typedef void (*dc__reduce_fn)(void *dst, const void *const *src, int32_t n, int64_t begin, int64_t count, bool mean,
                              bool accumulate);
/* Copies at least DC__COPY_STREAM bytes. */
typedef void (*dc__copy_fn)(void *dst, const void *src, size_t bytes);

/* The tile of a matrix product, of mr rows and nr columns, over packed panels: a is [steps][mr] and b [steps][nr]
 * words. Panels follow each other, all aligned to 64 bytes. A word is one element, or, for bfloat16, a pair of
 * neighbours in k, the first in the lower half. */
enum { DC__TILE_F32, DC__TILE_F64, DC__TILE_BF16, DC__TILES };
typedef struct dc__tile {
  /* acc[mr][nr] = a b, or += with `add`; rows of acc lie ld elements apart and are aligned to 64 bytes. acc is float32,
   * or float64 for DC__TILE_F64. */
  void (*fn)(int64_t steps, const void *a, const void *b, void *acc, int64_t ld, bool add);
  /* Packs one panel of `panel` (mr or nr) rows that run along k, ld bytes apart and `steps` words long: dst[p][i] =
   * src[i][p]. Rows beyond `rows` become zeros. */
  void (*pack_rows)(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps);
  /* Packs panels, `steps` words long, from `depth` rows of `width` elements that run across k, ld bytes apart:
   * dst[i / panel][p][i % panel] = src[p][i]. Elements beyond width, and the second half of an odd last pair, become
   * zeros. */
  void (*pack_columns)(void *dst, int64_t panel, int64_t steps, const void *src, int64_t ld, int64_t width,
                       int64_t depth);
  int32_t mr, nr;
  /* Packs a panel of A, if its layout is not that of B's panels; else NULL. src has `rows` rows of op(A), at most mr,
   * and `depth` elements in k. Its stored rows lie ld bytes apart, and are op(A)'s rows if k_runs, else its columns. */
  void (*pack_a)(void *dst, const void *src, int64_t ld, bool k_runs, int64_t rows, int64_t depth);
  /* Called before and after the tiles of a thread; may be NULL. */
  void (*begin)(void);
  void (*end)(void);
} dc__tile;
/* The packers in plain C (pack.c). */
void dc__pack_rows_f32(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps);
void dc__pack_rows_f64(void *dst, int64_t panel, const void *src, int64_t ld, int64_t rows, int64_t steps);
void dc__pack_columns_f32(void *dst, int64_t panel, int64_t steps, const void *src, int64_t ld, int64_t width,
                          int64_t depth);
void dc__pack_columns_f64(void *dst, int64_t panel, int64_t steps, const void *src, int64_t ld, int64_t width,
                          int64_t depth);

/* rowops.h, for one instruction set. */
typedef struct dc__rowops {
  void (*gelu)(float *y, const float *x, int64_t count, int32_t form);
  void (*gelu_backward)(float *g, const float *x, int64_t count, int32_t form);
  void (*moments)(const float *x, int64_t count, float eps, float *mean, float *rstd);
  void (*normalize)(float *y, const float *x, const float *gamma, const float *beta, int64_t count, float mean,
                    float rstd);
  void (*normalize_backward)(float *dx, const float *dy, const float *xhat, const float *gamma, int64_t count,
                             float rstd);
  float (*max)(const float *x, int64_t count);
  float (*exp)(float *x, int64_t count, float shift);
  void (*exp_scaled)(float *x, int64_t count, float shift, float scale);
  void (*softmax_backward)(float *dp, float *p, const float *m, int64_t count, float delta);
  float (*dot)(const float *x, const float *y, int64_t count);
  void (*scale)(float *x, int64_t count, float scale);
  void (*add)(float *x, const float *y, int64_t count);
  void (*multiply)(float *x, const float *y, int64_t count);
  void (*dropout)(float *m, int64_t count, int64_t first, uint32_t row, uint32_t plane, const dc__dropout *dropout);
} dc__rowops;
extern const dc__rowops dc__rowops_plain;
extern const dc__rowops dc__rowops_avx2;
extern const dc__rowops dc__rowops_avx512;

/* update.h, for one instruction set. */
typedef struct dc__update {
  void (*adamw)(const dc__update_span *span, int64_t from, int64_t count, float scale);
  void (*sgd)(const dc__update_span *span, int64_t from, int64_t count, float scale);
  void (*read)(float *x, const void *from, int32_t dtype, int64_t count, float scale);
  bool (*is_below)(const float *x, int64_t count, int32_t exponent);
  void (*sync_master)(float *master, const void *w, int32_t dtype, int64_t count);
} dc__update;
extern const dc__update dc__update_plain;
extern const dc__update dc__update_avx2;
extern const dc__update dc__update_avx512;

/* tridiagonal.h, for one instruction set. */
typedef struct dc__tridiagonal {
  void (*symv)(double *y, const double *a, int64_t ld, const double *x, int64_t n);
  void (*gemv)(double *sums, const double *rows, int64_t ld, int64_t count, const double *x, int64_t n);
  void (*gemv_t)(double *y, const double *rows, int64_t ld, int64_t count, const double *factors, int64_t n);
  void (*eigenvalue_bounds)(const double *d, const double *off, int64_t n, double *min, double *max);
  void (*shifted_inverses)(double *f, const double *d, const double *off, int64_t n, const double *shifts,
                           const double *weights, double *scratch);
} dc__tridiagonal;
extern const dc__tridiagonal dc__tridiagonal_plain;
extern const dc__tridiagonal dc__tridiagonal_avx2;
extern const dc__tridiagonal dc__tridiagonal_avx512;

/* Entries are NULL where there is only the plain C version. Pairs are [dst_dtype][src_dtype]. */
typedef struct dc__kernel_table {
  dc__binary_fn cast[DC__KERNELS_DTYPES][DC__KERNELS_DTYPES];
  dc__binary_fn accumulate[DC__KERNELS_DTYPES][DC__KERNELS_DTYPES];
  dc__combine_fn combine[2][DC__KERNELS_DTYPES][DC__KERNELS_DTYPES]; /* [add] */
  dc__reduce_fn reduce[DC__KERNELS_DTYPES][DC__KERNELS_DTYPES];
  dc__copy_fn copy;
  dc__tile tile[DC__TILES];
  const dc__rowops *rowops;
  const dc__update *update;
  const dc__tridiagonal *tridiagonal;
} dc__kernel_table;

/* The table in use (dispatch.c). */
const dc__kernel_table *dc__active_kernels(void);

/* Each instruction set overwrites the entries it improves (x86/). */
void dc__cast_avx2(dc__kernel_table *table);
void dc__cast_avx512(dc__kernel_table *table);
void dc__accumulate_avx2(dc__kernel_table *table);
void dc__accumulate_avx512(dc__kernel_table *table);
void dc__combine_avx2(dc__kernel_table *table);
void dc__combine_avx512(dc__kernel_table *table);
void dc__reduce_avx2(dc__kernel_table *table);
void dc__reduce_avx512(dc__kernel_table *table);
void dc__copy_avx2(dc__kernel_table *table);
void dc__copy_avx512(dc__kernel_table *table);
void dc__gemm_avx2(dc__kernel_table *table);
void dc__gemm_avx512(dc__kernel_table *table);
void dc__gemm_avx512bf16(dc__kernel_table *table);
void dc__gemm_amx(dc__kernel_table *table);

/* Returns the type in which two others are combined. Conversion to it is exact, except from integers to float32. */
static inline int32_t dc__compute_dtype(int32_t a, int32_t b) {
  if (a == DC_FLOAT64 || b == DC_FLOAT64) {
    return DC_FLOAT64;
  }
  return dc__dtype_is_float(a) || dc__dtype_is_float(b) ? DC_FLOAT32 : DC_INT64;
}

/* Element i of an array. */
static inline void *dc__at(void *array, int32_t dtype, int64_t i) {
  return (char *)array + (size_t)i * dc_dtype_size(dtype);
}
static inline const void *dc__const_at(const void *array, int32_t dtype, int64_t i) {
  return (const char *)array + (size_t)i * dc_dtype_size(dtype);
}

#endif
