/* The nearest Kronecker product: point 25 of the second-order conformance list. */
#include "linalg_test.h"

enum { M = 4, K = 3, P = 5, Q = 6 };

static void test_25_nearest(void **state) {
  (void)state;
  double *a = doubles(M * K, 8), *b = doubles(P * Q, 9), whole[M * P * K * Q], again[M * P * K * Q];
  double fa[M * K], fb[P * Q], residual = 7;
  dc_tensor ta = matrix(a, DC_FLOAT64, M, K), tb = matrix(b, DC_FLOAT64, P, Q),
            tw = matrix(whole, DC_FLOAT64, M * P, K * Q), tg = matrix(again, DC_FLOAT64, M * P, K * Q),
            tfa = matrix(fa, DC_FLOAT64, M, K), tfb = matrix(fb, DC_FLOAT64, P, Q);
  OK(dc_kron(linalg, &ta, &tb, &tw));
  OK(dc_kron_nearest(linalg, &tw, &tfa, &tfb, &residual));
  OK(dc_kron(linalg, &tfa, &tfb, &tg));
  assert_true(residual < 1e-14 && largest_gap(whole, again, M * P * K * Q) < 1e-14);
  for (int32_t power = -3; power <= 3; power++) { /* the two factors share any power of two */
    double scaled[M * P * K * Q];
    double norms[2] = {0, 0};
    dc_tensor tp = matrix(scaled, DC_FLOAT64, M * P, K * Q);
    for (int64_t i = 0; i < M * P * K * Q; i++) {
      scaled[i] = ldexp(whole[i], power);
    }
    OK(dc_kron_nearest(linalg, &tp, &tfa, &tfb, NULL));
    for (int64_t i = 0; i < M * K; i++) {
      norms[0] += fa[i] * fa[i];
    }
    for (int64_t i = 0; i < P * Q; i++) {
      norms[1] += fb[i] * fb[i];
    }
    assert_true(fabs(norms[0] - norms[1]) < 1e-14 * norms[0]);
  }
  /* diag(3, 3, 3, 4, 0 …) as blocks: the largest single block is not the best factor */
  double blocks[64] = {0}, ba[16], bb[4];
  for (int64_t i = 0; i < 3; i++) {
    blocks[(2 * i) * 8 + 2 * i] = 3;
  }
  blocks[7 * 8 + 7] = 4;
  dc_tensor tx = matrix(blocks, DC_FLOAT64, 8, 8), tba = matrix(ba, DC_FLOAT64, 4, 4),
            tbb = matrix(bb, DC_FLOAT64, 2, 2);
  OK(dc_kron_nearest(linalg, &tx, &tba, &tbb, &residual));
  assert_true(fabs(residual - sqrt(16.0 / 43)) < 1e-12);
  /* A symmetric positive semidefinite matrix has such factors. */
  double spd[64] = {0}, values[8] = {5, 4, 3, 2, 1, 0.5, 0.1, 0}, w[4];
  with_spectrum(spd, 8, values, 10);
  dc_tensor ts = matrix(spd, DC_FLOAT64, 8, 8), tv = vector(w, DC_FLOAT64, 4);
  OK(dc_kron_nearest(linalg, &ts, &tba, &tbb, NULL));
  OK(dc_eigh(linalg, &tba, NULL, &tv, NULL, NULL, 0));
  assert_true(w[0] > -1e-12);
  tv = vector(w, DC_FLOAT64, 2);
  OK(dc_eigh(linalg, &tbb, NULL, &tv, NULL, NULL, 0));
  assert_true(w[0] > -1e-12);
  memset(blocks, 0, sizeof blocks);
  OK(dc_kron_nearest(linalg, &tx, &tba, &tbb, &residual));
  assert_true(residual == 0 && ba[0] == 0 && bb[0] == 0);
  blocks[11] = NAN;
  FAILS(dc_kron_nearest(linalg, &tx, &tba, &tbb, &residual), DC_E_NOT_FINITE, "[1, 3]");
  FAILS(dc_kron_nearest(linalg, &tx, &tba, &tfb, &residual), DC_E_SHAPE, "x is 8 by 8");
  dc_tensor over = tba;
  over.data = tx.data;
  FAILS(dc_kron_nearest(linalg, &tx, &over, &tbb, &residual), DC_E_INVALID, "a, which is written, overlaps x");
  over = tbb;
  over.data = tba.data;
  FAILS(dc_kron_nearest(linalg, &tx, &tba, &over, &residual), DC_E_INVALID, "a, which is written, overlaps b");
  free(a);
  free(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_25_nearest),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
