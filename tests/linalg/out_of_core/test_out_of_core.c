/* Products of matrices: points 27 to 29 of the second-order conformance list, in their order. */
#include "out_of_core_test.h"

enum { M = 4, K = 3, P = 5 };

static void test_27_batches(void **state) {
  (void)state;
  enum { B = 3 };
  double *a = doubles(B * M * K, 14), *b = doubles(B * K * P, 15), out[B * M * P], want[B * M * P];
  dc_tensor ta = batch(a, DC_FLOAT64, B, M, K), tb = batch(b, DC_FLOAT64, B, K, P),
            to = batch(out, DC_FLOAT64, B, M, P);
  for (int64_t i = 0; i < B; i++) {
    multiply(a + i * M * K, b + i * K * P, want + i * M * P, M, K, P);
  }
  OK(dc_batch_matmul(linalg, &ta, &tb, 1, 0, &to));
  assert_true(largest_gap(out, want, B * M * P) < 1e-14);
  OK(dc_batch_matmul(linalg, &ta, &tb, 2, -1, &to));
  assert_true(largest_gap(out, want, B * M * P) < 1e-14);
  /* one b for the batch: as a matrix, and with stride 0; a transposed */
  const int64_t zero[3] = {0, P, 1};
  dc_tensor alone = matrix(b, DC_FLOAT64, K, P), still = tb;
  still.strides = zero;
  double out2[B * M * P];
  dc_tensor to2 = batch(out2, DC_FLOAT64, B, M, P);
  OK(dc_batch_matmul(linalg, &ta, &alone, 1, 0, &to));
  OK(dc_batch_matmul(linalg, &ta, &still, 1, 0, &to2));
  assert_memory_equal(out, out2, sizeof out);
  double turned[B * K * M];
  for (int64_t i = 0; i < B * M * K; i++) {
    turned[i / (M * K) * M * K + i % K * M + i / K % M] = a[i];
  }
  const int64_t by_columns[3] = {M * K, 1, M};
  dc_tensor tt = batch(turned, DC_FLOAT64, B, M, K);
  tt.strides = by_columns;
  OK(dc_batch_matmul(linalg, &tt, &alone, 1, 0, &to2));
  assert_true(largest_gap(out, out2, B * M * P) < 1e-14);
  /* dimensions of length 0 */
  dc_tensor no_k_a = batch(NULL, DC_FLOAT64, B, M, 0), no_k_b = batch(NULL, DC_FLOAT64, B, 0, P),
            none = batch(NULL, DC_FLOAT64, 0, M, P), no_a = batch(NULL, DC_FLOAT64, 0, M, K),
            no_b = batch(NULL, DC_FLOAT64, 0, K, P);
  memset(out2, 0x7f, sizeof out2);
  OK(dc_batch_matmul(linalg, &no_k_a, &no_k_b, 1, 0, &to2));
  for (int64_t i = 0; i < B * M * P; i++) {
    assert_true(out2[i] == 0);
  }
  OK(dc_batch_matmul(linalg, &no_a, &no_b, 1, 0, &none));
  dc_tensor two = batch(a, DC_FLOAT64, 2, M, K), bad = ta;
  const int64_t overlapping[3] = {M * K, 2, 2};
  bad.strides = overlapping;
  FAILS(dc_batch_matmul(linalg, &two, &tb, 1, 0, &to), DC_E_SHAPE, "a has 2 matrices, must have 3");
  FAILS(dc_batch_matmul(linalg, &tb, &ta, 1, 0, &to), DC_E_SHAPE, "rows");
  FAILS(dc_batch_matmul(linalg, &bad, &tb, 1, 0, &to), DC_E_SHAPE, "strides 2 and 2");
  FAILS(dc_batch_matmul(linalg, &ta, &tb, NAN, 0, &to), DC_E_INVALID, "alpha = nan");
  free(a);
  free(b);
}

/* If an output overlaps an input, it would be written while the input is read. It may lie between an input's lines. */
static void test_outputs_over_inputs(void **state) {
  (void)state;
  enum { N = 4 };
  double *x = doubles(4 * N * N, 16), want[2 * N];
  dc_tensor a = matrix(x, DC_FLOAT64, N, N), b = matrix(x + N * N, DC_FLOAT64, N, N),
            shifted = matrix(x + 1, DC_FLOAT64, N, N), out = matrix(x + 2 * N * N, DC_FLOAT64, N, N);
  FAILS(dc_batch_matmul(linalg, &a, &b, 1, 0, &a), DC_E_INVALID, "out, which is written, overlaps a");
  FAILS(dc_batch_matmul(linalg, &out, &a, 1, 0, &shifted), DC_E_INVALID, "overlaps b");
  FAILS(dc_kron_apply(linalg, &a, &b, &out, &a), DC_E_INVALID, "overlaps a");
  FAILS(dc_kron_apply(linalg, &out, &out, &a, &shifted), DC_E_INVALID, "overlaps x");
  dc_tensor square = matrix(x, DC_FLOAT64, 2, 2), corner = matrix(x + 2, DC_FLOAT64, 2, 2);
  FAILS(dc_kron(linalg, &square, &corner, &a), DC_E_INVALID, "overlaps a");
  const int64_t far[2] = {3 * N, 1};
  dc_tensor lines = matrix(x, DC_FLOAT64, 2, N), between = matrix(x + N, DC_FLOAT64, 2, N);
  lines.strides = far;
  multiply(x, x + N * N, want, 1, N, N);
  multiply(x + 3 * N, x + N * N, want + N, 1, N, N);
  OK(dc_batch_matmul(linalg, &lines, &b, 1, 0, &between));
  assert_true(largest_gap(x + N, want, 2 * N) < 1e-14);
  const int32_t file = file_of(x, 3 * N * N * sizeof *x, 0), again = writer_of(file);
  dc_tensor none = matrix(NULL, DC_FLOAT64, N, N);
  dc_matrix_source sa = source_of(&a, -1, 0), sb = source_of(&b, -1, 0), fa = source_of(&none, file, 0),
                   fo = source_of(&none, again, N * N * sizeof *x - 8);
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &sb, 1 << 20, NULL), DC_E_INVALID, "overlaps b");
  FAILS(dc_matmul_bounded(linalg, &fa, &sb, &fo, 1 << 20, NULL), DC_E_INVALID, "a lies in the same bytes");
  fo.offset += 8;
  OK(dc_matmul_bounded(linalg, &fa, &sb, &fo, 1 << 20, NULL));
  close(again);
  close(file);
  free(x);
}

static void test_29_types(void **state) {
  (void)state;
  enum { LONG = 4096 };
  /* 1 and then many 2^-12: in 16 bits each addition would be lost */
  uint16_t ones[LONG], small[LONG];
  float out = 0;
  for (int i = 0; i < LONG; i++) {
    ones[i] = 0x3f80; /* bfloat16 1 */
    small[i] = i == 0 ? 0x3f80 : 0x3980;
  }
  dc_tensor a = matrix(ones, DC_BFLOAT16, 1, LONG), b = matrix(small, DC_BFLOAT16, LONG, 1),
            to = matrix(&out, DC_FLOAT32, 1, 1);
  OK(dc_batch_matmul(linalg, &a, &b, 1, 0, &to));
  assert_true(fabsf(out - (1 + 4095.0f / 4096)) < 1e-5f);
  dc_tensor wide = matrix(ones, DC_FLOAT32, 1, 4), integer = matrix(ones, DC_INT32, 1, LONG);
  FAILS(dc_batch_matmul(linalg, &wide, &b, 1, 0, &to), DC_E_DTYPE, "b is bfloat16, must be float32 as a");
  FAILS(dc_batch_matmul(linalg, &integer, &integer, 1, 0, &to), DC_E_DTYPE, "floating-point");
  double twice = 0;
  dc_tensor t64 = matrix(&twice, DC_FLOAT64, 1, 1);
  FAILS(dc_batch_matmul(linalg, &a, &b, 1, 0, &t64), DC_E_DTYPE, "out is float64");
}

/* ---- bounded ---- */

enum { BM = 70, BK = 90, BN = 50 };

static void test_28_bounded(void **state) {
  (void)state;
  double *a = doubles(BM * BK, 16), *b = doubles(BK * BN, 17), want[BM * BN], got[BM * BN];
  int32_t fa = file_of(a, BM * BK * sizeof *a, 24), fb = file_of(b, BK * BN * sizeof *b, 0), fo = file_of(a, 8, 0);
  dc_tensor ma = matrix(a, DC_FLOAT64, BM, BK), mb = matrix(b, DC_FLOAT64, BK, BN),
            mo = matrix(got, DC_FLOAT64, BM, BN), da = matrix(NULL, DC_FLOAT64, BM, BK),
            db = matrix(NULL, DC_FLOAT64, BK, BN), dd = matrix(NULL, DC_FLOAT64, BM, BN);
  multiply(a, b, want, BM, BK, BN);
  for (int files = 0; files < 8; files++) {
    dc_matrix_source sa = source_of((files & 1) != 0 ? &da : &ma, fa, 24),
                     sb = source_of((files & 2) != 0 ? &db : &mb, fb, 0),
                     so = source_of((files & 4) != 0 ? &dd : &mo, fo, 40);
    int64_t needed = 1;
    if (files != 0) {
      FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 1, &needed), DC_E_BUFFER_TOO_SMALL, "budget_bytes = 1");
      assert_true(needed > 64 && needed < 16384);
    }
    for (int64_t budget = needed; budget < 400000; budget = budget * 2 + 64) {
      memset(got, 0, sizeof got);
      int64_t used = 0;
      OK(dc_linalg_begin_query(linalg));
      OK(dc_matmul_bounded(linalg, &sa, &sb, &so, budget, NULL));
      OK(dc_linalg_end_query(linalg, &used));
      assert_true(used <= budget);
      OK(dc_matmul_bounded(linalg, &sa, &sb, &so, budget, NULL));
      if ((files & 4) != 0) {
        assert_true(pread(fo, got, sizeof got, 40) == sizeof got);
      }
      assert_true(largest_gap(got, want, BM * BN) < 1e-13);
    }
  }
  dc_matrix_source sa = source_of(&da, fa, 24), sb = source_of(&mb, -1, 0), so = source_of(&mo, -1, 0);
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 0, NULL), DC_E_INVALID, "budget_bytes = 0");
  sa.offset = 32;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "a's file has");
  sa.offset = -8;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "offset = -8");
  sa.fd = -1;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "no open file");
  sa.in_file = 2;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "in_file = 2, must be 0 or 1");
  sa = source_of(&da, fa, 24), sa.tensor = &ma;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "a.tensor has data");
  sa.in_file = 0;
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "must be 0 unless in_file is 1");
  sa = source_of(&da, 0, 0), sa.in_file = 0; /* descriptor 0 without in_file is not taken for a file */
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_INVALID, "a.data is NULL");
  FAILS(dc_matmul_bounded(linalg, NULL, &sb, &so, 100000, NULL), DC_E_INVALID, "a is NULL");
  dc_tensor no_k = matrix(NULL, DC_FLOAT64, BM, 0), no_rows = matrix(NULL, DC_FLOAT64, 0, BN);
  sa = source_of(&no_k, fa, 24), sb = source_of(&no_rows, fb, 0), so = source_of(&dd, fo, 40);
  OK(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL)); /* empty sums are written too */
  assert_true(pread(fo, got, sizeof got, 40) == sizeof got && got[0] == 0 && got[BM * BN - 1] == 0);
  sb = source_of(&mb, -1, 0), so = source_of(&mo, -1, 0);
  dc_tensor narrow = matrix(got, DC_FLOAT32, BM, BN);
  sa = source_of(&ma, -1, 0);
  so = source_of(&narrow, -1, 0);
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_DTYPE, "out is float32, must be float64");
  close(fa);
  close(fb);
  close(fo);
  free(a);
  free(b);
}

/* Random shapes, including single rows and columns and products longer than a slice of k; random types, places and
 * budgets. */
static void test_28_random(void **state) {
  (void)state;
  enum { MOST = 600 * 41 };
  static const int64_t LENGTHS[] = {1, 2, 15, 16, 33, 41};
  static const int32_t TYPES[] = {DC_FLOAT32, DC_FLOAT64, DC_BFLOAT16};
  static double x[MOST], y[MOST], want[MOST], got[MOST];
  uint64_t seed = 28;
  dc_linalg *other = open_linalg(3, 0);
  for (int round = 0; round < 60; round++) {
    int64_t s[3];
    for (int i = 0; i < 3; i++) {
      s[i] = LENGTHS[(int)((number(&seed) + 1) * 3)];
    }
    s[round % 3] = 250 + (int64_t)((number(&seed) + 1) * 170);
    const int64_t m = s[0], k = s[1], n = s[2], offset = round % 5;
    const int32_t type = TYPES[round % 4 % 3], out = type == DC_FLOAT64 ? type : DC_FLOAT32;
    const int files = 1 + round % 7;
    const int64_t back[2] = {1, m};
    void *a = integers(type, m * k, (uint64_t)round, x), *b = integers(type, k * n, (uint64_t)round + 99, y);
    multiply(x, y, want, m, k, n);
    const int32_t fa = file_of(a, (size_t)(m * k) * dc_dtype_size(type), offset),
                  fb = file_of(b, (size_t)(k * n) * dc_dtype_size(type), offset), fo = file_of(a, 1, 0),
                  fw = writer_of(fo);
    if ((files & 1) == 0 && round % 2 == 0) { /* a as the transpose of a matrix that stores its columns */
      char *columns = malloc((size_t)(m * k) * dc_dtype_size(type));
      for (int64_t i = 0; i < m * k; i++) {
        memcpy(columns + (size_t)(i % k * m + i / k) * dc_dtype_size(type), (char *)a + (size_t)i * dc_dtype_size(type),
               dc_dtype_size(type));
      }
      free(a);
      a = columns;
    }
    dc_tensor ma = matrix((files & 1) != 0 ? NULL : a, type, m, k),
              mb = matrix((files & 2) != 0 ? NULL : b, type, k, n),
              mo = matrix((files & 4) != 0 ? NULL : got, out, m, n);
    ma.strides = (files & 1) == 0 && round % 2 == 0 ? back : NULL;
    dc_matrix_source sa = source_of(&ma, fa, offset), sb = source_of(&mb, fb, offset),
                     so = source_of(&mo, round % 2 == 0 ? fo : fw, offset);
    int64_t needed = 0;
    FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 1, &needed), DC_E_BUFFER_TOO_SMALL, "budget_bytes = 1");
    FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, needed - 1, NULL), DC_E_BUFFER_TOO_SMALL, "must be");
    for (int64_t budget = needed; budget < 1000000; budget *= 5) {
      memset(got, 1, sizeof got);
      OK(dc_matmul_bounded(budget % 2 == 0 ? linalg : other, &sa, &sb, &so, budget, NULL));
      if ((files & 4) != 0) {
        assert_true(pread(fo, got, (size_t)(m * n) * dc_dtype_size(out), offset) > 0);
      }
      for (int64_t i = 0; i < m * n; i++) {
        assert_true(want[i] == (out == DC_FLOAT64 ? got[i] : (double)((const float *)(const void *)got)[i]));
      }
    }
    close(fa);
    close(fb);
    close(fo);
    close(fw);
    free(a);
    free(b);
  }
  dc_linalg_destroy(other);
}

/* The bits are the same for any number of threads, at each budget. A file that fails is named, whichever thread
 * notices. */
static void test_28_threads(void **state) {
  (void)state;
  enum { N = 300 };
  static float out[3][N * N], values[N * N];
  double *x = doubles(N * N, 3);
  for (int i = 0; i < N * N; i++) {
    values[i] = (float)x[i];
  }
  const int32_t fa = file_of(values, sizeof values, 0), fo = file_of(values, 8, 0), bad = open("/dev/null", O_RDONLY);
  dc_tensor m = matrix(NULL, DC_FLOAT32, N, N);
  dc_matrix_source sa = source_of(&m, fa, 0), so = source_of(&m, fo, 0), sb = source_of(&m, bad, 0);
  for (int64_t budget = 16384; budget < 1000000; budget *= 4) {
    for (int32_t threads = 1; threads < 4; threads++) {
      dc_linalg *own = open_linalg(threads, 0);
      OK(dc_matmul_bounded(own, &sa, &sa, &so, budget, NULL));
      dc_linalg_destroy(own);
      assert_true(pread(fo, out[threads - 1], sizeof values, 0) == sizeof values);
    }
    assert_memory_equal(out[0], out[1], sizeof values);
    assert_memory_equal(out[0], out[2], sizeof values);
  }
  FAILS(dc_matmul_bounded(linalg, &sb, &sa, &so, 100000, NULL), DC_E_SYSTEM, "a's file, byte ");
  FAILS(dc_matmul_bounded(linalg, &sa, &sb, &so, 100000, NULL), DC_E_SYSTEM, ": the file ends");
  FAILS(dc_matmul_bounded(linalg, &sa, &sa, &sb, 100000, NULL), DC_E_SYSTEM, "Bad file descriptor");
  char name[32];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fo);
  const int32_t appends = open(name, O_RDWR | O_APPEND);
  dc_matrix_source sp = source_of(&m, appends, 0);
  FAILS(dc_matmul_bounded(linalg, &sa, &sa, &sp, 100000, NULL), DC_E_INVALID, "is open for appending");
  close(appends);
  close(fa);
  close(fo);
  close(bad);
  free(x);
}

/* A is in a file, B and out are in memory. However wide out is, A's strips stay in the threads' scratch memory. */
static void test_a_wide_product(void **state) {
  (void)state;
  enum { N = 1 << 20 };
  const float three = 3;
  float *b = malloc(N * sizeof *b), *got = malloc(N * sizeof *got);
  for (int i = 0; i < N; i++) {
    b[i] = (float)(i % 1000);
  }
  const int32_t fa = file_of(&three, sizeof three, 0);
  dc_tensor ma = matrix(NULL, DC_FLOAT32, 1, 1), mb = matrix(b, DC_FLOAT32, 1, N), mo = matrix(got, DC_FLOAT32, 1, N);
  dc_matrix_source sa = source_of(&ma, fa, 0), sb = source_of(&mb, -1, 0), so = source_of(&mo, -1, 0);
  OK(dc_matmul_bounded(linalg, &sa, &sb, &so, 8 << 20, NULL));
  for (int i = 0; i < N; i++) {
    assert_true(got[i] == 3 * b[i]);
  }
  close(fa);
  free(b);
  free(got);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_27_batches), cmocka_unit_test(test_outputs_over_inputs),
      cmocka_unit_test(test_28_bounded), cmocka_unit_test(test_28_random),
      cmocka_unit_test(test_28_threads), cmocka_unit_test(test_a_wide_product),
      cmocka_unit_test(test_29_types),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
