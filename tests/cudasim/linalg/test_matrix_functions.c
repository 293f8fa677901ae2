/* The matrix operators on the device against the CPU's: types, strides, batches of more than one slice. Matrices that
 * fail beside others that do not, the texts of errors, scratch memory, and every call failing in turn. On the simulated
 * driver, or on a card (tests/card). */
#include "device_pair.h"

#ifdef CUDASIM_TSAN /* it makes kernels slow: fewer forms show the same barriers, and fewer calls fail in turn */
enum { EVERY = 3, FAILING = 48 };
#else
enum { EVERY = 1, FAILING = 5 };
#endif
enum { SIZE = 35 };

/* ---- products ---- */

static void test_batch_matmul(void **state) {
  (void)state;
  static const int32_t types[][2] = {{DC_FLOAT32, DC_FLOAT32},
                                     {DC_FLOAT64, DC_FLOAT64},
                                     {DC_FLOAT16, DC_FLOAT16},
                                     {DC_BFLOAT16, DC_FLOAT32},
                                     {DC_BFLOAT16, DC_BFLOAT16}};
  static const int64_t shapes[][4] = {{3, 5, 7, 4}, {1, 1, 1, 1}, {40, 2, 3, 2},
                                      {2, 4, 0, 3}, {0, 2, 2, 2}, {2, 0, 3, 4}};
  double *values = doubles(4000, 3);
  for (size_t s = 0; s < DC__COUNT(shapes); s++) {
    const int64_t *n = shapes[s];
    for (size_t i = 0; i < DC__COUNT(types); i++) {
      for (int form = 0; form < 4; form++) { /* plain; one a for all; b transposed; added to out */
        tensor_pair a = matrix_pair(values, types[i][0], form == 1 ? -1 : n[0], n[1], n[2]);
        tensor_pair b = matrix_pair(values + 1000, types[i][0], n[0], n[2], n[3]),
                    out = matrix_pair(values, types[i][1], n[0], n[1], n[3]);
        const int64_t turned[] = {n[2] * n[3], 1, n[2]};
        b.t[0].strides = b.t[1].strides = form == 2 ? turned : NULL;
        BOTH(dc_batch_matmul(linalg_of(k), &a.t[k], &b.t[k], 0.5, form == 3 ? -2 : 0, &out.t[k]));
        assert_true(relative_gap(&out) <= (dc_dtype_size(types[i][1]) == 2 ? 0x1p-7 : 1e-6));
        free_pair(&a);
        free_pair(&b);
        free_pair(&out);
      }
    }
  }
  free(values);
}

/* More matrices than cuBLASLt has in a batch; and empty products, which only scale out. */
static void test_a_large_batch(void **state) {
  (void)state;
  enum { COUNT = 70000 };
  double *values = doubles(4 * COUNT, 5);
  for (int64_t depth = 0; depth < 3; depth += 2) {
    tensor_pair a = matrix_pair(values, DC_FLOAT32, COUNT, 1, depth), b = matrix_pair(values, DC_FLOAT32, -1, depth, 3),
                out = matrix_pair(values, DC_FLOAT32, COUNT, 1, 3);
    BOTH(dc_batch_matmul(linalg_of(k), &a.t[k], &b.t[k], 1, 0.5, &out.t[k]));
    assert_true(relative_gap(&out) <= 1e-6);
    free_pair(&a), free_pair(&b), free_pair(&out);
  }
  free(values);
}

static void test_kronecker_products(void **state) {
  (void)state;
  enum { M = 3, N = 5, P = 4, Q = 2, COUNT = 3 };
  double *values = doubles(1000, 8);
  for (int wide = 0; wide < 2; wide++) {
    const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
    const double close = wide ? 1e-14 : 1e-6;
    tensor_pair a = matrix_pair(values, dtype, -1, M, N), b = matrix_pair(values + 50, dtype, -1, P, Q);
    tensor_pair whole = matrix_pair(NULL, dtype, -1, M * P, N * Q), x = matrix_pair(values + 100, dtype, COUNT, N, Q);
    tensor_pair y = matrix_pair(NULL, dtype, COUNT, M, P);
    const int64_t turned[] = {1, -Q}; /* reversed rows would need a negative stride, so columns are reversed */
    dc_tensor mirror[2] = {b.t[0], b.t[1]};
    for (int k = 0; k < 2; k++) {
      mirror[k].data = (char *)b.data[k] + (size_t)((P - 1) * Q) * dc_dtype_size(dtype);
      mirror[k].strides = turned;
      mirror[k].shape = x.t[k].shape + 2; /* Q */
    }
    const int64_t shape[] = {Q, P};
    mirror[0].shape = mirror[1].shape = shape;
    BOTH(dc_kron(linalg_of(k), &a.t[k], &b.t[k], &whole.t[k]));
    assert_true(relative_gap(&whole) == 0);
    tensor_pair other = matrix_pair(NULL, dtype, -1, M * Q, N * P);
    BOTH(dc_kron(linalg_of(k), &a.t[k], &mirror[k], &other.t[k]));
    assert_true(relative_gap(&other) == 0);
    BOTH(dc_kron_apply(linalg_of(k), &a.t[k], &b.t[k], &x.t[k], &y.t[k]));
    assert_true(relative_gap(&y) <= close);
    BOTH(dc_kron_apply(linalg_of(k), &a.t[k], &b.t[k], &y.t[k], &y.t[k])); /* refused: y cannot be x here */
    free_pair(&a), free_pair(&b), free_pair(&whole), free_pair(&other), free_pair(&x), free_pair(&y);
    /* out may be x; the damped inverse of what eigh gave */
    tensor_pair q = matrix_pair(values + 200, dtype, -1, N, N), r = matrix_pair(values + 300, dtype, -1, Q, Q);
    tensor_pair v = matrix_pair(values + 400, dtype, -1, 1, N), w = matrix_pair(values + 450, dtype, -1, 1, Q);
    tensor_pair z = matrix_pair(values + 500, dtype, -1, N, Q);
    dc_tensor tv[2], tw[2];
    for (int k = 0; k < 2; k++) {
      tv[k] = vector(v.data[k], dtype, N);
      tw[k] = vector(w.data[k], dtype, Q);
    }
    BOTH(dc_kron_apply(linalg_of(k), &q.t[k], &r.t[k], &z.t[k], &z.t[k]));
    BOTH(dc_kron_solve(linalg_of(k), &q.t[k], &tv[k], &r.t[k], &tw[k], 2, &z.t[k], &z.t[k]));
    assert_true(relative_gap(&z) <= 10 * close);
    BOTH(dc_kron_solve(linalg_of(k), &q.t[k], &tv[k], &r.t[k], &tw[k], 0, &z.t[k], &z.t[k])); /* values not positive */
    assert_non_null(strstr(cpu_text, "must be > 0"));
    free_pair(&q), free_pair(&r), free_pair(&v), free_pair(&w), free_pair(&z);
  }
  free(values);
}

static void test_nearest_kronecker_product(void **state) {
  (void)state;
  static const int64_t shapes[][4] = {{3, 5, 4, 2},    {1, 1, 3, 4}, {SIZE, 2, 1, 1},
                                      {2, 2, 3, SIZE}, {2, 3, 0, 2}, {0, 2, 3, 3}};
  double *values = doubles(9000, 12);
  for (size_t s = 0; s < DC__COUNT(shapes); s++) {
    const int64_t m = shapes[s][0], n = shapes[s][1], p = shapes[s][2], q = shapes[s][3];
    for (int form = 0; form < 4; form += EVERY) { /* bits: float64, transposed */
      const int32_t dtype = form & 1 ? DC_FLOAT64 : DC_FLOAT32;
      const int64_t rows = m * p, cols = n * q;
      double *scaled = calloc((size_t)(rows * cols) + 1, sizeof *scaled), residual[2] = {7, 7};
      for (int64_t i = 0; i < rows * cols; i++) { /* one dominant Kronecker product, whose squares overflow */
        const int64_t row = i / cols, col = i % cols;
        const double part = values[row / p * n + col / q] * values[4000 + row % p * q + col % q];
        scaled[i] = (part + 0.01 * values[i % 9000]) * (form & 1 ? 1e200 : 1e30);
      }
      tensor_pair x = matrix_pair(scaled, dtype, -1, form & 2 ? cols : rows, form & 2 ? rows : cols);
      tensor_pair a = matrix_pair(NULL, dtype, -1, m, n), b = matrix_pair(NULL, dtype, -1, p, q);
      const int64_t shape[] = {rows, cols}, strides[] = {1, rows};
      for (int k = 0; k < 2 && (form & 2); k++) {
        x.t[k].shape = shape;
        x.t[k].strides = strides;
      }
      BOTH(dc_kron_nearest(linalg_of(k), &x.t[k], &a.t[k], &b.t[k], &residual[k]));
      assert_int_equal(cpu_text[0], 0);
      assert_true(relative_gap(&a) <= (form & 1 ? 1e-9 : 1e-4) && relative_gap(&b) <= (form & 1 ? 1e-9 : 1e-4));
      assert_true(fabs(residual[0] - residual[1]) <= 1e-9);
      free_pair(&x), free_pair(&a), free_pair(&b);
      free(scaled);
    }
  }
  /* Zeros; a NaN, which is named by its place; two equal singular values; and two that are too close to tell apart. */
  static const double equal[16] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  for (int form = 0; form < 4; form++) {
    double x[16], residual[2] = {7, 7};
    memcpy(x, equal, sizeof x);
    x[0] = form == 0 ? 0 : 1;
    x[15] = form == 0 ? 0 : form == 3 ? 0.999 : 1;
    x[6] = form == 1 ? NAN : 0;
    tensor_pair tx = matrix_pair(x, DC_FLOAT64, -1, 4, 4), a = matrix_pair(NULL, DC_FLOAT64, -1, 2, 2),
                b = matrix_pair(NULL, DC_FLOAT64, -1, 2, 2);
    BOTH(dc_kron_nearest(linalg_of(k), &tx.t[k], &a.t[k], &b.t[k], &residual[k]));
    assert_true(form != 1 || strstr(cpu_text, "at [1, 2]") != NULL);
    assert_true(fabs(residual[0] - residual[1]) <= 1e-9);
    assert_true(form == 2 || (relative_gap(&a) <= 1e-9 && relative_gap(&b) <= 1e-9));
    free_pair(&tx), free_pair(&a), free_pair(&b);
  }
  free(values);
}

/* ---- polar factors ---- */

static void test_orthogonalize(void **state) {
  (void)state;
  static const int64_t shapes[][3] = {{-1, 1, 1}, {-1, 12, 40}, {3, 9, 5},   {40, 3, 4},
                                      {0, 3, 3},  {2, 0, 4},    {-1, 65, 33}};
  double *values = doubles(4000, 5);
  for (size_t s = 0; s < DC__COUNT(shapes); s++) {
    const int64_t *n = shapes[s], b = n[0] < 0 ? 1 : n[0];
    for (int32_t form = 0; form < 8; form += EVERY) { /* bits: float64, Muon's coefficients, transposed */
      const bool wide = form & 1, turned = (form & 4) != 0;
      double *scaled = calloc((size_t)(b * n[1] * n[2]) + 1, sizeof *scaled);
      for (int64_t i = 0; i < b * n[1] * n[2]; i++) { /* squares overflow; one matrix is zero */
        scaled[i] = b > 1 && i / (n[1] * n[2]) == 1 ? 0 : values[i] * (wide ? 1e200 : 1e30);
      }
      const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
      tensor_pair a = matrix_pair(scaled, dtype, n[0], n[1], n[2]), out = matrix_pair(NULL, dtype, n[0], n[1], n[2]);
      tensor_pair lying = matrix_pair(NULL, dtype, n[0], n[2], n[1]);
      const int64_t strides[] = {n[1] * n[2], 1, n[2]};
      for (int k = 0; k < 2 && turned; k++) {
        a.t[k].shape = lying.t[k].shape;
        a.t[k].strides = strides + (n[0] < 0);
      }
      tensor_pair *to = turned ? &lying : &out;
      BOTH(dc_orthogonalize(linalg_of(k), &a.t[k], form >> 1 & 1, 0, &to->t[k]));
      assert_true(relative_gap(to) <= (wide ? 1e-10 : 2e-3)); /* small singular values have not converged */
      free_pair(&a), free_pair(&out), free_pair(&lying);
      free(scaled);
    }
  }
  values[12 * 7 + 5] = INFINITY;
  tensor_pair a = matrix_pair(values, DC_FLOAT32, 40, 3, 4), out = matrix_pair(NULL, DC_FLOAT32, 40, 3, 4);
  BOTH(dc_orthogonalize(linalg_of(k), &a.t[k], 0, 0, &out.t[k]));
  assert_non_null(strstr(cpu_text, "[1, 1] of matrix 7"));
  assert_true(relative_gap(&out) == 0);
  free_pair(&a), free_pair(&out);
  free(values);
}

/* ---- inverse roots ---- */

enum { KINDS = 4 };

static void spectrum_pair(double *a, int64_t count) {
  double values[SIZE];
  for (int64_t b = 0; b < count; b++) {
    for (int64_t i = 0; i < SIZE; i++) {
      const double all[KINDS] = {pow(10, -5.0 * (double)i / SIZE), pow((double)(i + 1), -2), i < 5 ? 1 : 0, 1};
      values[i] = ldexp(all[b % KINDS], (int)b - 2);
    }
    with_spectrum(a + b * SIZE * SIZE, SIZE, values, 17 + (uint64_t)b);
  }
}

static void compare_info(dc_iteration_info info[2][40], int64_t count, double largest) {
  for (int64_t i = 0; i < count; i++) {
    const dc_iteration_info *a = &info[0][i], *b = &info[1][i];
    assert_int_equal(a->status, b->status);
    assert_true((a->iterations > 0) == (b->iterations > 0) && b->iterations <= 40); /* later ones are rounding */
    assert_true(fabs(a->bound - b->bound) <= 1e-12 * a->bound && a->asymmetry == b->asymmetry);
    assert_true(fabs(a->epsilon - b->epsilon) <= 1e-12 * a->epsilon);
    assert_true(a->status != DC_OK || fabs(a->residual - b->residual) <= largest);
  }
}

static void test_newton(void **state) {
  (void)state;
  enum { COUNT = 4 };
  static const int32_t roots[] = {4, 7};
  double a[COUNT * SIZE * SIZE];
  dc_iteration_info info[2][40];
  memset(info, 0, sizeof info);
  spectrum_pair(a, COUNT);
  for (size_t r = 0; r < DC__COUNT(roots); r++) {
    for (int form = 0; form < 8; form += EVERY) { /* bits: float64, computed in the other type, epsilon per matrix */
      const bool wide = form & 1, in_other = (form & 2) != 0;
      const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
      const bool fine = wide != in_other;
      dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
      o.eps_rel = form & 4 ? 0 : fine ? 1e-6 : 1e-3;
      o.eps_abs = form & 4 ? 1e-2 : 0;
      o.precision = in_other ? (wide ? DC_FLOAT32 : DC_FLOAT64) : DC_DTYPE_NONE;
      tensor_pair ta = matrix_pair(a, dtype, COUNT, SIZE, SIZE), tx = matrix_pair(NULL, dtype, COUNT, SIZE, SIZE);
      BOTH(dc_matrix_inverse_root_newton(linalg_of(k), &ta.t[k], roots[r], &o, &tx.t[k], info[k], sizeof info[k][0]));
      assert_int_equal(cpu_text[0], 0);
      compare_info(info, COUNT, fine ? 1e-8 : 0.02);
      assert_true(relative_gap(&tx) <= (fine ? (wide ? 1e-8 : 1e-6) : 2e-3));
      free_pair(&ta), free_pair(&tx);
    }
  }
}

/* Runs Newton on `count` matrices, some of which fail with this text. */
static void run_newton(double *a, int64_t count, const dc_iteration_options *o, const char *text, double close) {
  static dc_iteration_info info[2][40];
  memset(info, 0, sizeof info);
  tensor_pair ta = matrix_pair(a, DC_FLOAT64, count, SIZE, SIZE), tx = matrix_pair(NULL, DC_FLOAT64, count, SIZE, SIZE);
  dc_status first = DC_OK;
  for (int k = 0; k < 2; k++) {
    dc_status status =
        dc_matrix_inverse_root_newton(linalg_of(k), &ta.t[k], 4, o, &tx.t[k], info[k], sizeof info[k][0]);
    first = k == 0 ? status : first;
    assert_int_equal(status, first);
    if (strstr(dc_last_error(), text) == NULL) {
      fail_msg("side %d: %s", k, dc_last_error());
    }
  }
  compare_info(info, count, 1e-8);
  assert_true(relative_gap(&tx) <= close); /* -7 where nothing may be written */
  free_pair(&ta), free_pair(&tx);
}

static void test_newton_failures(void **state) {
  (void)state;
  enum { COUNT = 34, EACH = SIZE * SIZE };
  double *a = calloc(COUNT * EACH, sizeof *a), values[SIZE];
  dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
  o.eps_rel = 1e-5;
  spectrum_pair(a, COUNT);
  a[33 * EACH + 3 * SIZE + 7] = NAN; /* in the second slice */
  run_newton(a, COUNT, &o, "a[33] has a NaN or an infinity at [3, 7]", 1e-8);
  a[2 * EACH + 9] += 1;
  run_newton(a, 3, &o, "a[2] is not symmetric: entries [9, 0] and [0, 9]", 1e-8);
  o.symmetry = DC_SYMMETRY_LOWER;
  memset(a + EACH, 0, EACH * sizeof *a);
  run_newton(a, 3, &o, "a[1] has an eigenvalue of zero", 1e-8);
  o.symmetry = DC_SYMMETRY_UPPER;
  run_newton(a + 2 * EACH, 2, &o, "", 1e-8);
  for (int64_t i = 0; i < SIZE; i++) {
    values[i] = i == 5 ? -0.1 : 1;
  }
  with_spectrum(a + 4 * EACH, SIZE, values, 3);
  run_newton(a + 4 * EACH, 1, &o, "is A positive semidefinite?", 1e-6); /* returns the best iterate */
  o.symmetry = DC_SYMMETRY_MEAN;
  o.iterations = 5;
  run_newton(a, 1, &o, "after 5 iterations", 1e-8);
  o.iterations = 0;
  o.residual = 1e-30;
  run_newton(a, 1, &o, "|X^4 (A + epsilon I) - I| is", 1e-8);
  free(a);
}

/* ---- handles ---- */

static void test_scratch_and_refusals(void **state) {
  (void)state;
  double a[SIZE * SIZE];
  int64_t bytes;
  void *lent;
  spectrum_pair(a, 1);
  tensor_pair ta = matrix_pair(a, DC_FLOAT64, -1, SIZE, SIZE), tx = matrix_pair(NULL, DC_FLOAT64, -1, SIZE, SIZE);
  dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
  o.eps_rel = 1e-4;
  OK(dc_linalg_begin_query(cuda_linalg));
  OK(dc_batch_matmul(cuda_linalg, &ta.t[1], &ta.t[1], 1, 0, &tx.t[1]));
  OK(dc_kron_apply(cuda_linalg, &ta.t[1], &ta.t[1], &ta.t[1], &tx.t[1]));
  OK(dc_orthogonalize(cuda_linalg, &ta.t[1], 0, 0, &tx.t[1]));
  OK(dc_matrix_inverse_root_newton(cuda_linalg, &ta.t[1], 4, &o, &tx.t[1], NULL, 0));
  OK(dc_linalg_end_query(cuda_linalg, &bytes));
  assert_int_equal(card->ops->alloc(card, (size_t)bytes, DC_MEMORY_DEVICE, &lent), DC_OK);
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes - 64));
  FAILS(dc_matrix_inverse_root_newton(cuda_linalg, &ta.t[1], 4, &o, &tx.t[1], NULL, 0), DC_E_BUFFER_TOO_SMALL,
        "the workspace");
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes));
  BOTH(dc_matrix_inverse_root_newton(linalg_of(k), &ta.t[k], 4, &o, &tx.t[k], NULL, 0));
  assert_true(relative_gap(&tx) <= 1e-10);
  BOTH(dc_orthogonalize(linalg_of(k), &ta.t[k], 0, 0, &tx.t[k]));
  OK(dc_linalg_set_workspace(cuda_linalg, NULL, 0));
  card->ops->free(card, lent, (size_t)bytes, DC_MEMORY_DEVICE);
  dc_tensor askew = tx.t[1];
  askew.data = (char *)askew.data + 4;
  FAILS(dc_orthogonalize(cuda_linalg, &ta.t[1], 0, 0, &askew), DC_E_INVALID, "out.data = ");
  FAILS(dc_batch_matmul(cuda_linalg, &askew, &ta.t[1], 1, 0, &tx.t[1]), DC_E_INVALID,
        "must be a multiple of 8 on device");
  free_pair(&ta), free_pair(&tx);
}

#ifndef ON_CARD
/* Every call of the driver and of cuBLASLt fails in turn: whichever call reports the error, nothing leaks. */
static int use_all(void **state, const char *counted, const char *failing, int before) {
  const double a[] = {2, 1, 1, 2, 3, 0, 0, 1};
  dc_iteration_options o = DC_ITERATION_OPTIONS_INIT;
  o.eps_rel = 1e-4;
  assert_int_equal(open_both(state), 0);
  tensor_pair ta = matrix_pair(a, DC_FLOAT32, 2, 2, 2), tx = matrix_pair(NULL, DC_FLOAT32, 2, 2, 2);
  tensor_pair one = matrix_pair(a, DC_FLOAT32, -1, 1, 1), two = matrix_pair(a, DC_FLOAT32, -1, 1, 1);
  tensor_pair three = matrix_pair(a, DC_FLOAT32, -1, 1, 1);
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  dc_status status[] = {dc_matrix_inverse_root_newton(cuda_linalg, &ta.t[1], 4, &o, &tx.t[1], NULL, 0),
                        dc_orthogonalize(cuda_linalg, &ta.t[1], 0, 0, &tx.t[1]),
                        dc_batch_matmul(cuda_linalg, &ta.t[1], &ta.t[1], 1, 0, &tx.t[1]),
                        dc_kron(cuda_linalg, &one.t[1], &one.t[1], &two.t[1]),
                        dc_kron_nearest(cuda_linalg, &one.t[1], &two.t[1], &three.t[1], NULL)};
  const int calls = cudasim_calls(counted) - begun;
  bool told = false;
  for (size_t i = 0; i < DC__COUNT(status); i++) {
    told = told || status[i] != DC_OK;
  }
  if (told != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  free_pair(&ta), free_pair(&tx), free_pair(&one), free_pair(&two), free_pair(&three);
  assert_int_equal(close_both(state), 0);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",      "cuMemcpyAsync",
                                          "cuMemsetD8Async",     "cuMemAllocFromPoolAsync",
                                          "cublasLtCreate",      "cublasLtMatmulAlgoGetHeuristic",
                                          "cublasLtMatmul",      "cublasLtMatrixLayoutCreate",
                                          "cuStreamSynchronize", "cublasLtMatrixLayoutSetAttribute",
                                          "cuEventRecord",       "cuEventSynchronize"};
  fail_each_call(state, use_all, functions, DC__COUNT(functions), FAILING);
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_batch_matmul),       TEST(test_a_large_batch),
      TEST(test_kronecker_products), TEST(test_nearest_kronecker_product),
      TEST(test_orthogonalize),      TEST(test_newton),
      TEST(test_newton_failures),    TEST(test_scratch_and_refusals),
#ifndef ON_CARD
      TEST(test_every_call_fails),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
