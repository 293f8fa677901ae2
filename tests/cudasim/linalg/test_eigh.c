/* Eigendecompositions on the device compared with the CPU's: types, strides, scales, batches of more than one slice,
 * powers, and roots, also from an earlier basis. On the simulated driver, or on a card (tests/card). */
#include "eigh_pair.h"

/* ---- eigenvectors ---- */

/* The largest distance of V diag(values) V^T from A over all matrices, relative to A's largest element. */
static double rebuilt(const double *a, const double *values, const double *vectors, int64_t count, int64_t n) {
  double *scaled = calloc((size_t)(2 * n * n) + 1, sizeof *scaled), *back = scaled + n * n, largest = 0;
  for (int64_t b = 0; b < count; b++) {
    const double *v = vectors + b * n * n;
    for (int64_t i = 0; i < n * n; i++) {
      scaled[(i % n) * n + i / n] = v[i] * values[b * n + i % n]; /* transposed */
    }
    multiply(v, scaled, back, n, n, n);
    double size = 0;
    for (int64_t i = 0; i < n * n; i++) {
      size = fmax(size, fabs(a[b * n * n + i]));
    }
    largest = fmax(largest, largest_gap(back, a + b * n * n, n * n) / (size > 0 ? size : 1));
  }
  free(scaled);
  return largest;
}

static void test_eigh(void **state) {
  (void)state;
  static const int64_t shapes[][2] = {{-1, 1}, {-1, SIZE}, {3, 9}, {MANY, 4}, {0, 3}, {2, 0}, {-1, 0}, {5, 2}};
  for (size_t s = 0; s < DC__COUNT(shapes); s++) {
    const int64_t b = shapes[s][0], count = b < 0 ? 1 : b, n = shapes[s][1];
    double *a = spectrum_pair(count, n);
    for (int form = 0; form < 16; form += EVERY) { /* float64, descending, values only, computed in the other type */
      const bool wide = form & 1, other = (form & 8) != 0;
      const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
      dc_spectral_options o = defaults();
      o.descending = form >> 1 & 1;
      o.precision = !other ? DC_DTYPE_NONE : wide ? DC_FLOAT32 : DC_FLOAT64;
      const double close = wide && !other ? 1e-13 : 1e-5;
      const int64_t lengths[] = {count, n};
      tensor_pair ta = matrix_pair(a, dtype, b, n, n), tv = matrix_pair(NULL, dtype, b, n, n);
      tensor_pair tw = number_pair(NULL, dtype, lengths + (b < 0), b < 0 ? 1 : 2);
      memset(info, 0xff, sizeof info);
      BOTH(dc_eigh(linalg_of(k), &ta.t[k], &o, &tw.t[k], form & 4 ? NULL : &tv.t[k], info[k], sizeof info[k][0]));
      assert_int_equal(cpu_text[0], 0);
      compare_info(info, count, close);
      assert_true(relative_gap(&tw) <= close);
      double *values = host_copy(&tw), *vectors = host_copy(&tv);
      if (form & 4) {
        assert_true(relative_gap(&tv) == 0); /* unchanged: all are -7 */
      } else {
        assert_true(rebuilt(a, values, vectors, count, n) <= close);
      }
      free(values);
      free(vectors);
      free_pair(&ta), free_pair(&tv), free_pair(&tw);
    }
    free(a);
  }
}

/* A transposed view, a matrix that repeats, and numbers whose squares overflow or underflow. */
static void test_eigh_reads_strides_and_scales(void **state) {
  (void)state;
  enum { N = 5 };
  static const double scales[] = {1e300, 1e-300, 4e-320, 1e35, 1e-42};
  double *a = spectrum_pair(1, N);
  for (size_t s = 0; s < DC__COUNT(scales); s++) {
    double scaled[N * N];
    for (int i = 0; i < N * N; i++) {
      scaled[i] = a[i] * scales[s];
    }
    const int32_t dtype = s < 3 ? DC_FLOAT64 : DC_FLOAT32;
    const int64_t strides[] = {0, 1, N}, lengths[] = {3, N};
    tensor_pair ta = matrix_pair(scaled, dtype, -1, N, N), tv = matrix_pair(NULL, dtype, 3, N, N),
                tw = number_pair(NULL, dtype, lengths, 2);
    for (int k = 0; k < 2; k++) {
      ta.t[k].ndim = 3;
      ta.t[k].shape = tv.t[k].shape;
      ta.t[k].strides = strides;
    }
    BOTH(dc_eigh(linalg_of(k), &ta.t[k], NULL, &tw.t[k], &tv.t[k], info[k], sizeof info[k][0]));
    assert_int_equal(cpu_text[0], 0);
    compare_info(info, 3, 1e-5);
    assert_true(relative_gap(&tw) <= (s < 2 ? 1e-13 : 1e-2)); /* the last ones are denormal */
    free_pair(&ta), free_pair(&tv), free_pair(&tw);
  }
  free(a);
}

/* ---- powers ---- */

static void test_powers(void **state) {
  (void)state;
  static const int64_t shapes[][2] = {{-1, 1}, {-1, SIZE}, {3, 9}, {MANY, 4}, {0, 3}, {2, 0}};
  static const double powers[] = {-0.5, 0, 1, 0.3, -1};
  for (size_t s = 0; s < DC__COUNT(shapes); s++) {
    const int64_t b = shapes[s][0], count = b < 0 ? 1 : b, n = shapes[s][1];
    double *a = spectrum_pair(count, n);
    for (int form = 0; form < 20; form += EVERY) { /* bits: float64, but computed in float32; then the power */
      const bool wide = form & 1, narrowed = (form & 2) != 0;
      const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
      dc_spectral_options o = defaults();
      o.eps_rel = 1e-3;
      o.precision = narrowed ? DC_FLOAT32 : DC_DTYPE_NONE;
      o.negative = DC_NEGATIVE_CLAMP;
      tensor_pair ta = matrix_pair(a, dtype, b, n, n), tx = matrix_pair(NULL, dtype, b, n, n);
      memset(info, 0xff, sizeof info);
      BOTH(dc_matrix_power(linalg_of(k), &ta.t[k], powers[form / 4], &o, &tx.t[k], info[k], sizeof info[k][0]));
      assert_int_equal(cpu_text[0], 0);
      compare_info(info, count, narrowed ? 1e-4 : 1e-5);
      assert_true(relative_gap(&tx) <= (narrowed || (!wide && n > 8) ? 2e-3 : wide ? 1e-11 : 1e-5));
      double *x = host_copy(&tx);
      for (int64_t i = 0; i < tx.count; i++) { /* exactly symmetric */
        const int64_t m = i / (n * n) * n * n, row = i % (n * n) / n, col = i % n;
        assert_true(x[i] == x[m + col * n + row]);
      }
      free(x);
      free_pair(&ta), free_pair(&tx);
    }
    free(a);
  }
}

/* Roots, with the basis that they leave, both kinds of epsilon, and a pseudo-inverse. */
static void test_inverse_roots(void **state) {
  (void)state;
  enum { COUNT = 5 };
  double *a = spectrum_pair(COUNT, SIZE);
  for (int form = 0; form < 24; form += EVERY) {
    const bool wide = form & 1, with_basis = (form & 2) != 0, wide_basis = (form & 4) != 0;
    const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
    dc_spectral_options o = defaults();
    o.eps_rel = form / 8 == 0 ? 1e-3 : 0;
    o.eps_abs = form / 8 == 1 ? 0.01 : 0;
    o.rank_rtol = form / 8 == 2 ? 4.2e-4 : 0;
    o.negative = DC_NEGATIVE_CLAMP;
    tensor_pair ta = matrix_pair(a, dtype, COUNT, SIZE, SIZE), tx = matrix_pair(NULL, dtype, COUNT, SIZE, SIZE);
    tensor_pair tq = matrix_pair(NULL, wide_basis ? DC_FLOAT64 : DC_FLOAT32, COUNT, SIZE, SIZE);
    BOTH(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], form & 1 ? 4 : 3, &o, with_basis ? &tq.t[k] : NULL, &tx.t[k],
                                info[k], sizeof info[k][0]));
    assert_int_equal(cpu_text[0], 0);
    const bool fine = with_basis ? wide_basis : true;
    compare_info(info, COUNT, fine ? 1e-6 : 1e-4);
    if (!(relative_gap(&tx) <= (!fine ? 2e-2 : wide ? 1e-9 : 2e-3))) {
      fail_msg("form %d: %g apart", form, relative_gap(&tx));
    }
    double *q = host_copy(&tq), *square = calloc((size_t)SIZE * SIZE, sizeof *square),
           *turned = calloc((size_t)SIZE * SIZE, sizeof *turned);
    for (int64_t i = 0; i < SIZE * SIZE; i++) {
      turned[i % SIZE * SIZE + i / SIZE] = q[i];
    }
    multiply(turned, q, square, SIZE, SIZE, SIZE);
    for (int64_t i = 0; i < SIZE * SIZE && with_basis; i++) {
      assert_true(fabs(square[i] - (i % (SIZE + 1) == 0 ? 1 : 0)) < (wide_basis ? 1e-12 : 1e-5));
    }
    free(q), free(square), free(turned);
    free_pair(&ta), free_pair(&tx), free_pair(&tq);
  }
  free(a);
}

/* Matrices near an earlier one, whose basis saves the decomposition, and far from it. Between the two calls, one is
 * refused. */
static void test_warm_roots(void **state) {
  (void)state;
  enum { COUNT = 6, EACH = SIZE * SIZE };
  double *first = spectrum_pair(COUNT, SIZE), *now = calloc(COUNT * EACH, sizeof *now);
  uint64_t seed = 5;
  for (int64_t i = 0; i < COUNT * EACH; i++) {
    const int64_t row = i % EACH / SIZE, col = i % SIZE, mirrored = i / EACH * EACH + col * SIZE + row;
    const double small = (i / EACH == 4 ? 1 : 1e-6) * fabs(first[i / EACH * EACH]) * number(&seed);
    now[i] = row < col ? 0 : first[i] + small;
    now[mirrored] = row < col ? now[mirrored] : now[i];
  }
  for (int64_t i = 0; i < COUNT * EACH; i++) { /* copies it to the upper triangle */
    const int64_t row = i % EACH / SIZE, col = i % SIZE;
    now[i] = row < col ? now[i / EACH * EACH + col * SIZE + row] : now[i];
  }
  for (int form = 0; form < 16; form += EVERY) { /* bits: float64, float64 basis, loose tolerance, another root */
    const bool wide = form & 1, wide_basis = (form & 2) != 0, loose = (form & 4) != 0;
    const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32, basis_dtype = wide_basis ? DC_FLOAT64 : DC_FLOAT32;
    const int32_t root = form & 8 ? 1 : 4;
    dc_spectral_options o = defaults();
    o.eps_rel = 1e-2;
    o.negative = DC_NEGATIVE_CLAMP;
    o.tolerance = loose ? 1e-3 : 1e-6;
    double *zeros = calloc(COUNT * EACH, sizeof *zeros);
    tensor_pair ta = matrix_pair(first, dtype, COUNT, SIZE, SIZE), tx = matrix_pair(NULL, dtype, COUNT, SIZE, SIZE);
    tensor_pair tq = matrix_pair(zeros, basis_dtype, COUNT, SIZE, SIZE);
    free(zeros);
    BOTH(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], root, &o, &tq.t[k], &tx.t[k], info[k], sizeof info[k][0]));
    compare_info(info, COUNT, 1e-4);
    assert_true(relative_gap(&tx) <= 2e-3 && info[1][0].path == DC_PATH_FRESH);
    copy(tq.data[1], tq.data[0], tq.bytes);
    now[3 * EACH] = form >= 8 ? NAN : first[3 * EACH];
    tensor_pair tb = matrix_pair(now, dtype, COUNT, SIZE, SIZE);
    dc_status first_status = DC_OK;
    for (int k = 0; k < 2; k++) {
      memset(info[k], 0, sizeof info[k]);
      expect_same_status(
          k, dc_matrix_inverse_root(linalg_of(k), &tb.t[k], root, &o, &tq.t[k], &tx.t[k], info[k], sizeof info[k][0]),
          &first_status);
    }
    assert_int_equal(first_status, form >= 8 ? DC_E_NOT_FINITE : DC_OK);
    compare_info(info, COUNT, 1e-4);
    for (int i = 0; i < COUNT; i++) {
      const bool warm = i != 4 && !(i == 3 && form >= 8);
      assert_int_equal(info[1][i].path == DC_PATH_WARM, warm);
      assert_true(!warm || fabs(info[1][i].change - info[0][i].change) <= 1e-2 * info[0][i].change + 1e-9);
    }
    if (!(relative_gap(&tx) <= (wide && wide_basis ? 1e-9 : 2e-3))) {
      fail_msg("form %d: %g apart", form, relative_gap(&tx));
    }
    free_pair(&ta), free_pair(&tb), free_pair(&tx), free_pair(&tq);
  }
  free(first), free(now);
}

/* The scale ignores the triangle that is not read, and entries that cancel in the mean. */
static void test_unused_entries_of_any_size(void **state) {
  (void)state;
  enum { N = 6 };
  const int32_t modes[] = {DC_SYMMETRY_LOWER, DC_SYMMETRY_UPPER, DC_SYMMETRY_MEAN};
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    double *a = spectrum_pair(1, N);
    for (int64_t i = 0; i < N; i++) {
      for (int64_t j = 0; j < i; j++) {
        a[i * N + j] = modes[m] == DC_SYMMETRY_LOWER ? a[i * N + j] : 1e250;
        a[j * N + i] = modes[m] == DC_SYMMETRY_UPPER ? a[j * N + i] : modes[m] == DC_SYMMETRY_MEAN ? -1e250 : 1e250;
      }
    }
    tensor_pair ta = matrix_pair(a, DC_FLOAT64, 1, N, N), tx = matrix_pair(NULL, DC_FLOAT64, 1, N, N);
    dc_spectral_options o = defaults();
    o.symmetry = modes[m];
    o.eps_rel = 1e-6;
    BOTH(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], 2, &o, NULL, &tx.t[k], NULL, 0));
    assert_true(relative_gap(&tx) <= 1e-10);
    free_pair(&ta), free_pair(&tx);
    free(a);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {TEST(test_eigh),       TEST(test_eigh_reads_strides_and_scales),
                                     TEST(test_powers),     TEST(test_inverse_roots),
                                     TEST(test_warm_roots), TEST(test_unused_entries_of_any_size)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
