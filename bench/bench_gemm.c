/* Rates of the matrix products of a transformer layer, forward and backward, at each instruction-set level. They are
 * billions of operations per second of one thread's processor time, so that a machine in use does not spoil them.
 *   bench_gemm [tokens, 1024 by default] [hidden size, 1024] */
#define _GNU_SOURCE /* CLOCK_THREAD_CPUTIME_ID */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/kernels.h"

enum { HIGHEST_LEVEL = DC__KERNELS_LEVELS - 1, ROUNDS = 5 };

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void fill(void *data, int32_t dtype, int64_t count) {
  uint64_t seed = 1;
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    float x = (float)(int32_t)(seed >> 32) * 0x1p-31f;
    dc__cast((char *)data + (size_t)i * dc_dtype_size(dtype), dtype, &x, DC_FLOAT32, 1);
  }
}

/* The best of the rounds, after one that warms up. */
static double rate(dc__threadpool *pool, const dc__gemm *g) {
  double least = 1e30;
  for (int32_t round = 0; round <= ROUNDS; round++) {
    double begin = seconds();
    dc__gemm_run(pool, g);
    double took = seconds() - begin;
    least = round > 0 && took < least ? took : least;
  }
  return 2e-9 * (double)g->m * (double)g->n * (double)g->k / least;
}

static void product(dc__threadpool *pool, int32_t dtype, const char *name, int64_t m, int64_t n, int64_t k,
                    bool trans_a, bool trans_b) {
  size_t size = dc_dtype_size(dtype);
  dc__gemm g = {.dtype = dtype, .out_dtype = dtype, .batch = 1, .alpha = 1, .m = m, .n = n, .k = k};
  void *a = malloc((size_t)(m * k) * size);
  void *b = malloc((size_t)(k * n) * size);
  g.c = malloc((size_t)(m * n) * size);
  if (a == NULL || b == NULL || g.c == NULL) {
    fprintf(stderr, "bench_gemm: no memory\n");
    exit(1);
  }
  fill(a, dtype, m * k);
  fill(b, dtype, k * n);
  g.a = a;
  g.b = b;
  g.trans_a = trans_a;
  g.trans_b = trans_b;
  g.lda = trans_a ? m : k;
  g.ldb = trans_b ? k : n;
  g.ldc = n;
  printf("%-10s%-22s%5" PRId64 " x%5" PRId64 " x%5" PRId64, dtype == DC_FLOAT32 ? "float32" : "bfloat16", name, m, n,
         k);
  for (int32_t level = 1; level <= HIGHEST_LEVEL; level++) {
    if (dc__kernels_limit(level) < level) {
      printf("%10s", "-");
    } else {
      printf("%10.1f", rate(pool, &g));
    }
    fflush(stdout);
  }
  printf("\n");
  free(a);
  free(b);
  free(g.c);
}

int main(int argc, char **argv) {
  int64_t tokens = argc > 1 ? strtol(argv[1], NULL, 10) : 1024;
  int64_t hidden = argc > 2 ? strtol(argv[2], NULL, 10) : 1024;
  if (tokens < 1 || hidden < 1 || tokens > 65536 || hidden > 16384) {
    fprintf(stderr, "bench_gemm: %" PRId64 " tokens of %" PRId64 " features, must be 1 to 65536 and 1 to 16384\n",
            tokens, hidden);
    return 2;
  }
  dc__threadpool *pool;
  if (dc__threadpool_open(1, &pool) != DC_OK) {
    fprintf(stderr, "bench_gemm: %s\n", dc_last_error());
    return 1;
  }
  printf("GFLOP/s%48s%10s%10s%10s\n", "AVX2", "AVX-512", "+ bf16", "AMX");
  const int64_t linear[][2] = {{3 * hidden, hidden}, {hidden, hidden}, {4 * hidden, hidden}, {hidden, 4 * hidden}};
  const int32_t dtypes[] = {DC_FLOAT32, DC_BFLOAT16};
  for (size_t t = 0; t < DC__COUNT(dtypes); t++) {
    for (size_t i = 0; i < DC__COUNT(linear); i++) {
      product(pool, dtypes[t], "y = x w'", tokens, linear[i][0], linear[i][1], false, true);
      product(pool, dtypes[t], "dx = dy w", tokens, linear[i][1], linear[i][0], false, false);
      product(pool, dtypes[t], "dw = dy' x", linear[i][0], linear[i][1], tokens, true, false);
    }
  }
  dc__threadpool_close(pool);
  return 0;
}
