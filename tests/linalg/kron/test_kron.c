/* Kronecker products: points 23, 24 and 26 of the second-order conformance list, in their order. */
#include "linalg_test.h"

enum { M = 4, K = 3, P = 5, Q = 6 };

static void test_23_kron(void **state) {
  (void)state;
  double *a = doubles(M * K, 1), *b = doubles(P * Q, 2), out[M * P * K * Q];
  dc_tensor ta = matrix(a, DC_FLOAT64, M, K), tb = matrix(b, DC_FLOAT64, P, Q),
            to = matrix(out, DC_FLOAT64, M * P, K * Q);
  OK(dc_kron(linalg, &ta, &tb, &to));
  for (int64_t i = 0; i < M * P; i++) {
    for (int64_t j = 0; j < K * Q; j++) {
      assert_true(out[i * K * Q + j] == a[i / P * K + j / Q] * b[i % P * Q + j % Q]);
    }
  }
  dc_tensor tt = matrix(a, DC_FLOAT64, K, M), wide = matrix(out, DC_FLOAT64, K * P, M * Q);
  const int64_t back[2] = {1, K}; /* the transposed view of an M by K matrix */
  tt.strides = back;
  OK(dc_kron(linalg, &tt, &tb, &wide));
  assert_true(out[1 * Q] == a[1 * K] * b[0]);
  dc_tensor none = matrix(NULL, DC_FLOAT64, 0, 3), one = matrix(a, DC_FLOAT64, 1, 1),
            empty = matrix(NULL, DC_FLOAT64, 0, 3 * Q);
  OK(dc_kron(linalg, &none, &tb, &empty));
  dc_tensor small = matrix(out, DC_FLOAT64, P, Q);
  OK(dc_kron(linalg, &one, &tb, &small));
  assert_true(out[7] == a[0] * b[7]);
  FAILS(dc_kron(linalg, &ta, &tb, &small), DC_E_SHAPE, "out is 5 by 6, must be 4 * 5 by 3 * 6");
  dc_tensor huge = matrix(a, DC_FLOAT64, INT64_C(1) << 28, INT64_C(1) << 28);
  FAILS(dc_kron(linalg, &huge, &huge, &small), DC_E_SHAPE, "must be");
  dc_tensor narrow = matrix(b, DC_FLOAT32, P, Q);
  FAILS(dc_kron(linalg, &ta, &narrow, &to), DC_E_DTYPE, "b is float32, must be float64");
  free(a);
  free(b);
}

static void test_24_kron_apply(void **state) {
  (void)state;
  double *a = doubles(M * K, 3), *b = doubles(P * Q, 4), *x = doubles(K * Q, 5);
  double whole[M * P * K * Q], out[M * P], want[M * P];
  dc_tensor ta = matrix(a, DC_FLOAT64, M, K), tb = matrix(b, DC_FLOAT64, P, Q), tx = matrix(x, DC_FLOAT64, K, Q),
            tw = matrix(whole, DC_FLOAT64, M * P, K * Q), to = matrix(out, DC_FLOAT64, M, P);
  OK(dc_kron(linalg, &ta, &tb, &tw));
  OK(dc_kron_apply(linalg, &ta, &tb, &tx, &to));
  multiply(whole, x, want, M * P, K * Q, 1); /* vec in row-major order */
  assert_true(largest_gap(out, want, M * P) < 1e-14);
  /* vec in column-major order: kron(A, B) vec(Y) = vec(B Y A^T); Y is X read by columns, so factors and sides swap */
  double y[K * Q], by_columns[M * P], columns[P * M];
  for (int64_t i = 0; i < K * Q; i++) {
    y[i % Q * K + i / Q] = x[i];
  }
  dc_tensor ty = matrix(y, DC_FLOAT64, Q, K), tc = matrix(columns, DC_FLOAT64, P, M);
  OK(dc_kron_apply(linalg, &tb, &ta, &ty, &tc));
  for (int64_t i = 0; i < M * P; i++) {
    by_columns[i] = columns[i % P * M + i / P];
  }
  assert_true(largest_gap(by_columns, want, M * P) < 1e-14);
  /* in place, and with the other side first: square factors */
  double *s = doubles(9, 6), *t = doubles(4, 7), z[6], again[6];
  for (int i = 0; i < 6; i++) {
    z[i] = again[i] = (double)i;
  }
  dc_tensor ts = matrix(s, DC_FLOAT64, 3, 3), tt = matrix(t, DC_FLOAT64, 2, 2), tz = matrix(z, DC_FLOAT64, 3, 2),
            fresh = matrix(again, DC_FLOAT64, 3, 2);
  double other[6];
  dc_tensor t6 = matrix(other, DC_FLOAT64, 3, 2);
  OK(dc_kron_apply(linalg, &ts, &tt, &fresh, &t6));
  OK(dc_kron_apply(linalg, &ts, &tt, &tz, &tz));
  assert_memory_equal(z, other, sizeof z);
  FAILS(dc_kron_apply(linalg, &tb, &ta, &tx, &to), DC_E_SHAPE, "x has");
  free(a);
  free(b);
  free(x);
  free(s);
  free(t);
}

/* Tall A and wide B: the other product of A X B^T comes first. */
static void test_24_the_cheaper_product_first(void **state) {
  (void)state;
  enum { TALL = 9, SHORT = 2, WIDE = 8 };
  double *a = doubles(TALL * SHORT, 18), *b = doubles(SHORT * WIDE, 19), *x = doubles(SHORT * WIDE, 20);
  double whole[TALL * SHORT * SHORT * WIDE], out[TALL * SHORT], want[TALL * SHORT];
  dc_tensor ta = matrix(a, DC_FLOAT64, TALL, SHORT), tb = matrix(b, DC_FLOAT64, SHORT, WIDE),
            tx = matrix(x, DC_FLOAT64, SHORT, WIDE), to = matrix(out, DC_FLOAT64, TALL, SHORT),
            tw = matrix(whole, DC_FLOAT64, TALL * SHORT, SHORT * WIDE);
  OK(dc_kron(linalg, &ta, &tb, &tw));
  OK(dc_kron_apply(linalg, &ta, &tb, &tx, &to));
  multiply(whole, x, want, TALL * SHORT, SHORT * WIDE, 1);
  assert_true(largest_gap(out, want, TALL * SHORT) < 1e-14);
  free(a);
  free(b);
  free(x);
}

static void test_26_damped_solve(void **state) {
  (void)state;
  enum { A = 4, G = 3 };
  double a[A * A], g[G * G], va[A], vg[G], qa[A * A], qg[G * G], whole[A * G * A * G], out[A * G], back[A * G];
  const double la[A] = {2, 1, 0.5, 0.1}, lg[G] = {3, 0.2, 0};
  with_spectrum(a, A, la, 11);
  with_spectrum(g, G, lg, 12);
  dc_tensor ta = matrix(a, DC_FLOAT64, A, A), tg = matrix(g, DC_FLOAT64, G, G), tva = vector(va, DC_FLOAT64, A),
            tvg = vector(vg, DC_FLOAT64, G), tqa = matrix(qa, DC_FLOAT64, A, A), tqg = matrix(qg, DC_FLOAT64, G, G),
            tw = matrix(whole, DC_FLOAT64, A * G, A * G), to = matrix(out, DC_FLOAT64, A, G);
  OK(dc_eigh(linalg, &ta, NULL, &tva, &tqa, NULL, 0));
  OK(dc_eigh(linalg, &tg, NULL, &tvg, &tqg, NULL, 0));
  double *x = doubles(A * G, 13);
  dc_tensor tx = matrix(x, DC_FLOAT64, A, G);
  OK(dc_kron_solve(linalg, &tqa, &tva, &tqg, &tvg, 0.01, &tx, &to));
  OK(dc_kron(linalg, &ta, &tg, &tw));
  for (int64_t i = 0; i < A * G; i++) {
    whole[i * A * G + i] += 0.01;
  }
  multiply(whole, out, back, A * G, A * G, 1);
  assert_true(largest_gap(back, x, A * G) < 1e-12);
  vg[0] = 0;
  FAILS(dc_kron_solve(linalg, &tqa, &tva, &tqg, &tvg, 0, &tx, &to), DC_E_NOT_POSITIVE, "must be > 0");
  FAILS(dc_kron_solve(linalg, &tqa, &tva, &tqg, &tvg, -1, &tx, &to), DC_E_INVALID, "damping = -1");
  free(x);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_23_kron),
      cmocka_unit_test(test_24_kron_apply),
      cmocka_unit_test(test_24_the_cheaper_product_first),
      cmocka_unit_test(test_26_damped_solve),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
