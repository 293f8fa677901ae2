/* Matrix products: C = epilogue(alpha op(A) op(B) + beta C), row-major, batched.
 *
 * The kernels are libdc's own: operands are packed into panels and multiplied tile by tile, by plain C, AVX2, AVX-512,
 * AVX-512's bfloat16 products or AMX, chosen at run time. 16-bit operands are multiplied exactly and summed in float32
 * in every version (float64 operands in float64). Versions differ in the order of additions and in contraction, so
 * their results agree within the usual bound, not bit for bit. For one version, an element's bits depend on its row of
 * op(A), its column of op(B) and k alone: not on m, n, the batch, or the number of threads. */
#ifndef DC_KERNELS_GEMM_H
#define DC_KERNELS_GEMM_H

#include "kernels/threadpool.h"

/* The operation on t = alpha op(A) op(B) + beta C, element [i][j], before it is stored in C. */
enum dc__epilogue {
  DC__EPILOGUE_NONE = 0, /* t */
  DC__EPILOGUE_BIAS,     /* t + bias[j] */
  DC__EPILOGUE_GELU,     /* aux = t + bias[j], rounded to C's type; gelu(aux). aux may be NULL: not kept */
  DC__EPILOGUE_GELU_BACK /* t * gelu'(aux) */
};

/* The two forms of GELU: 0.5 x (1 + tanh(0.7978845608 (x + 0.044715 x^3))) and 0.5 x (1 + erf(x / sqrt 2)). */
enum dc__gelu_form { DC__GELU_TANH = 0, DC__GELU_ERF = 1 };

typedef struct dc__gemm {
  int32_t dtype;     /* of A, B and bias: float32, float64, float16, bfloat16 */
  int32_t out_dtype; /* of C: dtype, or float32 */
  bool trans_a;      /* A is stored [k][m] */
  bool trans_b;      /* B is stored [n][k] */
  int64_t m, n, k;
  const void *a, *b;
  void *c;
  int64_t lda, ldb, ldc; /* elements from one stored row to the next */
  int64_t batch;         /* 1 or more; elements from one matrix to the next: */
  int64_t stride_a, stride_b, stride_c;
  double alpha, beta;   /* beta 0: C is not read */
  int32_t epilogue;     /* float64 has the first two only */
  int32_t gelu;         /* enum dc__gelu_form */
  const void *bias;     /* [n]; NULL: zeros */
  void *aux;            /* [m][n] with C's strides; in C's type */
  const void *packed;   /* op(B) by dc__gemm_pack(), instead of b; batch 1. NULL: b */
  bool batch_invariant; /* on a device: the algorithm does not depend on batch, which is at most DC__CUDA_BATCH_SLICE */
} dc__gemm;

/* Returns a product of matrices of one type whose rows are contiguous. */
static inline dc__gemm dc__gemm_dense(int32_t dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                                      const void *a, const void *b, void *c) {
  dc__gemm g = {.dtype = dtype, .out_dtype = dtype, .trans_a = trans_a, .trans_b = trans_b, .alpha = 1, .batch = 1};
  g.m = m;
  g.n = n;
  g.k = k;
  g.a = a;
  g.b = b;
  g.c = c;
  g.lda = trans_a ? m : k;
  g.ldb = trans_b ? k : n;
  g.ldc = n;
  return g;
}

/* Computes a product, with C cut into blocks for the pool's threads. */
void dc__gemm_run(dc__threadpool *pool, const dc__gemm *gemm);
/* The same on the calling thread, with DC__SCRATCH_BYTES of scratch: for use inside dc__parallel_for(). */
void dc__gemm_serial(const dc__gemm *gemm, void *scratch);
/* dc__gemm_run(), or with pool NULL dc__gemm_serial(). */
void dc__gemm_on(dc__threadpool *pool, const dc__gemm *gemm, void *scratch);

/* op(B) packed once, for products in sequence or side by side. Slices of k lie one after the other. So the part of k
 * from the beginning of a slice on can be a packed operand of its own, behind dc__gemm_packed_bytes() of the part
 * before it. */
enum { DC__GEMM_PACKED_SCRATCH = 5 << 18 }; /* bytes of scratch that dc__gemm_serial() needs then */
typedef struct dc__gemm_shape {
  int64_t rows, columns; /* of a tile: blocks that are multiples of these have no padding */
  int64_t slice;         /* elements in k */
} dc__gemm_shape;
dc__gemm_shape dc__gemm_shape_of(int32_t dtype);
size_t dc__gemm_packed_bytes(int32_t dtype, int64_t n, int64_t k); /* SIZE_MAX on overflow */
/* Packs b into 64-byte aligned memory. Reads n, k, ldb, trans_b and dtype, but not m and the fields of A and C. */
void dc__gemm_pack(const dc__gemm *gemm, void *packed);

#endif
