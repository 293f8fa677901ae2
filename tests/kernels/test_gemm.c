/* Matrix products at each level compared with float64, the epilogues, and the same bits for any blocking and number of
 * threads. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

#include "sanitized.h"

/* Sanitizers make kernels slow, so only every third type and order of the large products is run. */
#ifdef SANITIZED
enum { NEXT_LARGE = 3 };
#else
enum { NEXT_LARGE = 1 };
#endif
enum { MOST = 700 * 700, HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1 };

static double a64[MOST];
static double b64[MOST];
static double c64[MOST];
static double bias64[1100];
static double aux64[MOST];
static char a[MOST * 8];
static char b[MOST * 8];
static char c[MOST * 8];
static char c2[MOST * 8];
static char aux[MOST * 8];
static char bias[1100 * 8];

static const int32_t DTYPES[] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16};

static double number(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(*seed >> 32) / 2147483648.0 - 1.0;
}

static void fill(void *data, double *values, int32_t dtype, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; i++) {
    values[i] = number(&seed);
  }
  dc__cast(data, dtype, values, DC_FLOAT64, count);
  dc__cast(values, DC_FLOAT64, data, dtype, count);
}

static double unit(int32_t dtype) {
  return dtype == DC_FLOAT64 ? 0x1p-53 : dtype == DC_FLOAT32 ? 0x1p-24 : dtype == DC_FLOAT16 ? 0x1p-11 : 0x1p-8;
}

static double gelu64(double x, int32_t form) {
  return form == DC__GELU_ERF ? 0.5 * x * (1 + erf(x / sqrt(2.0)))
                              : 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}

/* C[i][j] in float64, before any activation. */
static double product(const dc__gemm *g, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t p = 0; p < g->k; p++) {
    sum += a64[g->trans_a ? p * g->lda + i : i * g->lda + p] * b64[g->trans_b ? j * g->ldb + p : p * g->ldb + j];
  }
  sum = g->alpha * sum + (g->beta != 0 ? g->beta * c64[i * g->ldc + j] : 0);
  return sum + (g->bias != NULL ? bias64[j] : 0);
}

static void check(const dc__gemm *g) {
  static double got[MOST];
  dc__cast(got, DC_FLOAT64, c, g->out_dtype, g->m * g->ldc);
  double bound = 40 * (sqrt((double)g->k) + 4) * unit(g->dtype == DC_FLOAT64 ? DC_FLOAT64 : DC_FLOAT32);
  for (int64_t i = 0; i < g->m; i++) {
    for (int64_t j = 0; j < g->ldc; j++) {
      double x = got[i * g->ldc + j];
      double want = j < g->n ? product(g, i, j) : c64[i * g->ldc + j];
      double allowed = bound + unit(g->out_dtype) * 1.01 * fabs(want);
      if (j < g->n && g->epilogue == DC__EPILOGUE_GELU) {
        want = gelu64(want, g->gelu);
        allowed = bound * 3 + 4 * unit(g->out_dtype) * (fabs(want) + 1);
      }
      if (!(fabs(x - want) <= allowed) || (j >= g->n && x != want)) {
        fail_msg("level %d dtype %d m %d n %d k %d [%d][%d]: %.9g, expected %.9g", (int)dc__kernels_level(),
                 (int)g->dtype, (int)g->m, (int)g->n, (int)g->k, (int)i, (int)j, x, want);
      }
    }
  }
}

static dc__gemm make(int32_t dtype, int32_t out, int64_t m, int64_t n, int64_t k, int32_t trans) {
  dc__gemm g = {
      .dtype = dtype, .out_dtype = out, .m = m, .n = n, .k = k, .batch = 1, .alpha = 1, .a = a, .b = b, .c = c};
  g.trans_a = trans & 1;
  g.trans_b = trans & 2;
  g.lda = (g.trans_a ? m : k) + 3;
  g.ldb = (g.trans_b ? k : n) + 2;
  g.ldc = n + 1;
  return g;
}

/* Fills scratch memory with NaN, as an earlier product may leave it; it must not be read. */
static void poison(dc__threadpool *pool) {
  void *scratch = dc__scratch_acquire(pool);
  memset(scratch, 0xff, DC__SCRATCH_BYTES);
  dc__scratch_release(pool, scratch);
}

static void test_shapes(void **state) {
  (void)state;
  static const int64_t SHAPES[][3] = {{1, 1, 1},  {5, 3, 0},    {14, 32, 2},   {15, 33, 17}, {13, 31, 255},
                                      {1, 70, 3}, {70, 1, 300}, {61, 50, 257}, {29, 65, 513}};
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(2, &pool), DC_OK);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (size_t t = 0; t < 4; t++) {
      for (size_t s = 0; s < DC__COUNT(SHAPES); s++) {
        for (int32_t variant = 0; variant < 8; variant++) {
          int32_t out = variant & 4 && DTYPES[t] != DC_FLOAT64 ? DC_FLOAT32 : DTYPES[t];
          dc__gemm g = make(DTYPES[t], out, SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], variant & 3);
          fill(a, a64, g.dtype, (g.trans_a ? g.k : g.m) * g.lda, s + 1);
          fill(b, b64, g.dtype, (g.trans_b ? g.n : g.k) * g.ldb, s + 2);
          fill(c, c64, out, g.m * g.ldc, s + 3);
          g.alpha = variant % 3 == 0 ? 1 : -0.5;
          g.beta = variant % 2 == 0 ? 0 : 1;
          if (variant > 4) {
            fill(bias, bias64, g.dtype, g.n, s + 4);
            g.bias = bias;
            g.epilogue = DC__EPILOGUE_BIAS;
          }
          poison(pool);
          dc__gemm_run(pool, &g);
          check(&g);
        }
      }
    }
  }
  dc__threadpool_close(pool);
}

static void test_gelu(void **state) {
  (void)state;
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(1, &pool), DC_OK);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (size_t t = 0; t < 4; t++) {
      for (int32_t form = 0; form < 2 && DTYPES[t] != DC_FLOAT64; form++) {
        dc__gemm g = make(DTYPES[t], DTYPES[t], 37, 45, 60, 2);
        fill(a, a64, g.dtype, g.m * g.lda, 1);
        fill(b, b64, g.dtype, g.n * g.ldb, 2);
        fill(c, c64, g.dtype, g.m * g.ldc, 3);
        fill(bias, bias64, g.dtype, g.n, 4);
        g.bias = bias;
        g.epilogue = DC__EPILOGUE_GELU;
        g.gelu = form;
        g.aux = aux;
        dc__gemm_run(pool, &g);
        check(&g);
        /* the product times the derivative at aux */
        dc__cast(aux64, DC_FLOAT64, aux, g.dtype, g.m * g.ldc);
        g.bias = NULL;
        g.epilogue = DC__EPILOGUE_GELU_BACK;
        dc__gemm_run(pool, &g);
        dc__cast(c64, DC_FLOAT64, c, g.dtype, g.m * g.ldc);
        for (int64_t i = 0; i < g.m; i++) {
          for (int64_t j = 0; j < g.n; j++) {
            double x = aux64[i * g.ldc + j];
            double slope = (gelu64(x + 1e-5, form) - gelu64(x - 1e-5, form)) / 2e-5;
            double want = slope * product(&g, i, j);
            assert_true(fabs(c64[i * g.ldc + j] - want) <= 1e-5 + unit(g.dtype) * 2 * fabs(want));
          }
        }
      }
    }
  }
  dc__threadpool_close(pool);
}

/* The product has several blocks and slices. Serial, with 1, 2 and 4 threads, and for some of its rows, it has the same
 * bits, also in aux. From 2 threads on, all of them pack B together. */
static void test_same_bits(void **state) {
  (void)state;
  static char scratch[DC__SCRATCH_BYTES] __attribute__((aligned(256)));
  static char aux2[MOST * 8];
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int32_t variant = 0; variant < 8; variant += NEXT_LARGE) {
      const int32_t dtype = DTYPES[variant / 2];
      dc__gemm g = make(dtype, dtype, 531, 600, 540, variant % 2 == 0 ? 2 : variant / 2 % 2);
      size_t bytes = (size_t)(g.m * g.ldc) * dc_dtype_size(g.dtype);
      fill(a, a64, g.dtype, (g.trans_a ? g.k : g.m) * g.lda, 1);
      fill(b, b64, g.dtype, (g.trans_b ? g.n : g.k) * g.ldb, 2);
      fill(bias, bias64, g.dtype, g.n, 3);
      g.bias = bias;
      g.epilogue = dtype == DC_FLOAT64 ? DC__EPILOGUE_BIAS : DC__EPILOGUE_GELU;
      memset(c, 0, sizeof c);
      memset(c2, 0, sizeof c2);
      memset(aux, 0, sizeof aux);
      memset(aux2, 0, sizeof aux2);
      g.c = c2;
      g.aux = aux2;
      dc__gemm_serial(&g, scratch);
      g.c = c;
      g.aux = aux;
      for (int32_t threads = 1; threads < 6; threads += threads) {
        dc__threadpool *pool;
        assert_int_equal(dc__threadpool_open(threads, &pool), DC_OK);
        dc__gemm_run(pool, &g);
        assert_memory_equal(c, c2, bytes);
        assert_memory_equal(aux, aux2, bytes);
        dc__threadpool_close(pool);
      }
      g.m = 3;
      memset(c, 0, sizeof c);
      dc__gemm_serial(&g, scratch);
      assert_memory_equal(c, c2, (size_t)(g.m * g.ldc) * dc_dtype_size(g.dtype));
    }
  }
}

/* B is too large to be packed at once by all threads, so its columns are packed in several parts. */
static void test_parts(void **state) {
  (void)state;
  enum { M = 257, N = 300, K = 8000 };
  static float x[M * K];
  static float y[K * N];
  static float want[M * N];
  static float got[M * N];
  static char scratch[DC__SCRATCH_BYTES] __attribute__((aligned(256)));
  uint64_t seed = 1;
  for (int64_t i = 0; i < M * K; i++) {
    x[i] = (float)number(&seed);
  }
  for (int64_t i = 0; i < K * N; i++) {
    y[i] = (float)number(&seed);
  }
  dc__kernels_limit(HIGHEST_LEVEL);
  dc__gemm g = {.dtype = DC_FLOAT32, .out_dtype = DC_FLOAT32, .m = M, .n = N, .k = K, .batch = 1, .alpha = 1};
  g.a = x;
  g.lda = K;
  g.b = y;
  g.ldb = g.ldc = N;
  g.c = want;
  dc__gemm_serial(&g, scratch);
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(3, &pool), DC_OK);
  g.c = got;
  dc__gemm_run(pool, &g);
  assert_memory_equal(got, want, sizeof want);
  dc__threadpool_close(pool);
}

/* B is packed beforehand, slice by slice: the bits are the same as without, for all rows and for some. */
static void test_packed(void **state) {
  (void)state;
  static char scratch[DC__GEMM_PACKED_SCRATCH] __attribute__((aligned(256)));
  static char packed[608 * 540 * 8] __attribute__((aligned(64)));
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(2, &pool), DC_OK);
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int32_t variant = 0; variant < 8; variant += NEXT_LARGE) {
      dc__gemm g = make(DTYPES[variant / 2], DTYPES[variant / 2], 331, 600, 540, variant % 2 * 2);
      const dc__gemm_shape shape = dc__gemm_shape_of(g.dtype);
      fill(a, a64, g.dtype, g.m * g.lda, 1);
      fill(b, b64, g.dtype, g.n * g.k, 2);
      assert_true(dc__gemm_packed_bytes(g.dtype, g.n, g.k) <= sizeof packed);
      for (int64_t k = 0; k < g.k; k += shape.slice) {
        dc__gemm part = g;
        part.k = g.k - k < shape.slice ? g.k - k : shape.slice;
        part.b = b + (size_t)(k * (g.trans_b ? 1 : g.ldb)) * dc_dtype_size(g.dtype);
        dc__gemm_pack(&part, packed + dc__gemm_packed_bytes(g.dtype, g.n, k));
      }
      memset(c, 0, sizeof c);
      memset(c2, 0, sizeof c2);
      dc__gemm_run(pool, &g);
      g.packed = packed;
      g.c = c2;
      dc__gemm_serial(&g, scratch);
      assert_memory_equal(c, c2, (size_t)(g.m * g.ldc) * dc_dtype_size(g.dtype));
      g.m = 29;
      memset(c2, 0, sizeof c2);
      dc__gemm_run(pool, &g);
      assert_memory_equal(c, c2, (size_t)(g.m * g.ldc) * dc_dtype_size(g.dtype));
    }
  }
  assert_true(dc__gemm_packed_bytes(DC_FLOAT32, 1, INT64_MAX) == SIZE_MAX);
  dc__threadpool_close(pool);
}

/* k is so long that B is not packed as a whole; sums of small integers are exact in any order. */
static void test_long(void **state) {
  (void)state;
  enum { M = 17, N = 130, K = 16700 };
  static float x[M * K];
  static float y[K * N];
  static float want[M * N];
  uint64_t seed = 1;
  for (int64_t i = 0; i < M * K; i++) {
    x[i] = (float)(int)(number(&seed) * 3);
  }
  for (int64_t i = 0; i < K * N; i++) {
    y[i] = (float)(int)(number(&seed) * 3);
  }
  for (int64_t i = 0; i < M; i++) {
    for (int64_t p = 0; p < K; p++) {
      for (int64_t j = 0; j < N; j++) {
        want[i * N + j] += x[i * K + p] * y[p * N + j];
      }
    }
  }
  static char x16[sizeof x / 2];
  static char y16[sizeof y / 2];
  dc__cast(x16, DC_BFLOAT16, x, DC_FLOAT32, M * K);
  dc__cast(y16, DC_BFLOAT16, y, DC_FLOAT32, K * N);
  static char scratch[DC__SCRATCH_BYTES] __attribute__((aligned(256)));
  for (int32_t level = 0; level <= HIGHEST_LEVEL; level++) {
    dc__kernels_limit(level);
    for (int32_t narrow = 0; narrow < 2; narrow++) {
      dc__gemm g = {.dtype = narrow ? DC_BFLOAT16 : DC_FLOAT32, .out_dtype = DC_FLOAT32, .m = M, .n = N, .k = K};
      g.batch = 1;
      g.alpha = 1;
      g.a = narrow ? (void *)x16 : (void *)x;
      g.b = narrow ? (void *)y16 : (void *)y;
      g.c = c;
      g.lda = K;
      g.ldb = g.ldc = N;
      dc__gemm_serial(&g, scratch);
      assert_memory_equal(c, want, sizeof want);
    }
  }
}

static void test_batch(void **state) {
  (void)state;
  dc__threadpool *pool;
  assert_int_equal(dc__threadpool_open(3, &pool), DC_OK);
  fill(a, a64, DC_FLOAT32, 5 * 20 * 30, 1);
  fill(b, b64, DC_FLOAT32, 5 * 30 * 40, 2);
  dc__gemm g = {DC_FLOAT32, DC_FLOAT32, false, false, 20, 40, 30, a, b,    c,    30,   40,   40,
                5,          600,        1200,  800,   1,  0,  0,  0, NULL, NULL, NULL, false};
  dc__gemm_run(pool, &g);
  for (int64_t matrix = 0; matrix < 5; matrix++) {
    for (int64_t i = 0; i < 20; i++) {
      for (int64_t j = 0; j < 40; j++) {
        double want = 0;
        for (int64_t p = 0; p < 30; p++) {
          want += a64[matrix * 600 + i * 30 + p] * b64[matrix * 1200 + p * 40 + j];
        }
        assert_true(fabs((double)((float *)(void *)c)[matrix * 800 + i * 40 + j] - want) < 1e-5);
      }
    }
  }
  dc__threadpool_close(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shapes), cmocka_unit_test(test_gelu), cmocka_unit_test(test_same_bits),
      cmocka_unit_test(test_packed), cmocka_unit_test(test_long), cmocka_unit_test(test_parts),
      cmocka_unit_test(test_batch),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
