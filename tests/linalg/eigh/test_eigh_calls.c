/* Symmetric matrices: refusals, and independence of threads, memory and earlier calls: points 9 to 11, 14, 15 and 52 to
 * 54 of the second-order conformance list, in their order. */
#include <pthread.h>

#include "eigh_test.h"

static void test_09_shapes(void **state) {
  (void)state;
  double a[24] = {0}, out[24];
  dc_tensor wide = matrix(a, DC_FLOAT64, 2, 3), to = matrix(out, DC_FLOAT64, 2, 3), flat = vector(a, DC_FLOAT64, 4),
            four = tensor_of(a, DC_FLOAT64, 4, 1, 1, 2, 2), square = matrix(a, DC_FLOAT64, 2, 2),
            small = matrix(out, DC_FLOAT64, 1, 2), none = matrix(NULL, DC_FLOAT64, 2, 2),
            other = matrix(out, DC_FLOAT32, 2, 2), half = matrix(a, DC_FLOAT16, 2, 2);
  const int64_t apart[2] = {4, 2};
  FAILS(dc_matrix_power(linalg, &wide, 1, NULL, &to, NULL, 0), DC_E_SHAPE, "2 by 3, must be square");
  FAILS(dc_matrix_power(linalg, &flat, 1, NULL, &to, NULL, 0), DC_E_SHAPE, "1 dimension,");
  FAILS(dc_matrix_power(linalg, &four, 1, NULL, &to, NULL, 0), DC_E_SHAPE, "4 dimensions");
  FAILS(dc_matrix_power(linalg, &square, 1, NULL, &small, NULL, 0), DC_E_SHAPE, "1 rows, must have 2");
  FAILS(dc_matrix_power(linalg, &none, 1, NULL, &square, NULL, 0), DC_E_INVALID, "data is NULL");
  FAILS(dc_matrix_power(linalg, &square, 1, NULL, &other, NULL, 0), DC_E_DTYPE, "out is float32");
  FAILS(dc_matrix_power(linalg, &half, 1, NULL, &half, NULL, 0), DC_E_DTYPE, "a is float16");
  FAILS(dc_matrix_power(linalg, NULL, 1, NULL, &square, NULL, 0), DC_E_INVALID, "a is NULL");
  FAILS(dc_matrix_power(linalg, &square, 1, NULL, NULL, NULL, 0), DC_E_INVALID, "out is NULL");
  FAILS(dc_matrix_power(NULL, &square, 1, NULL, &square, NULL, 0), DC_E_INVALID, "linalg is NULL");
  square.strides = apart; /* allowed as an input, but not as an output */
  dc_tensor dense = matrix(out, DC_FLOAT64, 2, 2);
  OK(dc_matrix_power(linalg, &square, 1, NULL, &dense, NULL, 0));
  FAILS(dc_matrix_power(linalg, &dense, 1, NULL, &square, NULL, 0), DC_E_SHAPE, "not contiguous");
}

static void test_10_not_symmetric(void **state) {
  (void)state;
  double a[4] = {2, 1, 0, 2}, x[4], from_low[4], from_high[4];
  const double low[4] = {2, 0, 0, 2}, high[4] = {2, 1, 1, 2}, mean[4] = {2, 0.5, 0.5, 2};
  dc_spectral_info info = {0};
  FAILS(power_of(a, x, 2, DC_FLOAT64, 1, NULL, &info), DC_E_NOT_SYMMETRIC, "a is not symmetric");
  assert_true(info.status == DC_E_NOT_SYMMETRIC && info.asymmetry == 0.5);
  dc_spectral_options o = defaults();
  o.symmetry = DC_SYMMETRY_LOWER;
  OK(power_of(a, from_low, 2, DC_FLOAT64, 1, &o, NULL));
  o.symmetry = DC_SYMMETRY_UPPER;
  OK(power_of(a, from_high, 2, DC_FLOAT64, 1, &o, NULL));
  o.symmetry = DC_SYMMETRY_MEAN;
  OK(power_of(a, x, 2, DC_FLOAT64, 1, &o, NULL));
  assert_true(largest_gap(from_low, low, 4) < 1e-15 && largest_gap(from_high, high, 4) < 1e-15 &&
              largest_gap(x, mean, 4) < 1e-15);
}

/* A NaN or an infinity at any position is found before LAPACK is called, also at sizes where LAPACK does not report it,
 * or does not return. */
static void test_11_not_finite(void **state) {
  (void)state;
  const int64_t sizes[] = {1, 16, 64, 500};
  const double bad[] = {NAN, INFINITY, -INFINITY};
  for (size_t s = 0; s < 4; s++) {
    int64_t n = sizes[s];
    double *a = calloc((size_t)(n * n), sizeof *a), *x = doubles(n * n, 1), *before = doubles(n * n, 1);
    for (int64_t i = 0; i < n; i++) {
      a[i * n + i] = 1;
    }
    const int64_t places[] = {0, n - 1, (n - 1) * n, n * n - 1};
    for (size_t b = 0; b < 3; b++) {
      for (size_t p = 0; p < 4; p++) {
        double old = a[places[p]];
        a[places[p]] = bad[b];
        for (int32_t symmetry = 0; symmetry <= DC_SYMMETRY_UPPER; symmetry++) {
          dc_spectral_options o = defaults();
          o.symmetry = symmetry;
          char place[64];
          snprintf(place, sizeof place, "[%d, %d]", (int)(places[p] / n), (int)(places[p] % n));
          FAILS(power_of(a, x, n, DC_FLOAT64, -0.25, &o, NULL), DC_E_NOT_FINITE, place);
        }
        a[places[p]] = old;
      }
    }
    assert_memory_equal(x, before, (size_t)(n * n) * sizeof *x);
    free(a);
    free(x);
    free(before);
  }
}

static void test_14_one_bad_matrix(void **state) {
  (void)state;
  enum { COUNT = 5 };
  double a[COUNT * N * N], x[COUNT * N * N], alone[N * N];
  dc_spectral_info info[COUNT];
  for (int b = 0; b < COUNT; b++) {
    spread_spectrum(a + b * N * N, N, (uint64_t)b);
  }
  a[2 * N * N + 7] = NAN;
  memset(x, 0x5a, sizeof x);
  dc_tensor ta = batch(a, DC_FLOAT64, COUNT, N, N), tx = batch(x, DC_FLOAT64, COUNT, N, N);
  FAILS(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, info, sizeof info[0]), DC_E_NOT_FINITE,
        "a[2] has a NaN or an infinity at [0, 7]");
  for (int b = 0; b < COUNT; b++) {
    if (b == 2) {
      assert_int_equal(info[b].status, DC_E_NOT_FINITE);
      assert_int_equal(info[b].path, DC_PATH_NONE);
      assert_true(((unsigned char *)(x + b * N * N))[11] == 0x5a);
      continue;
    }
    OK(power_of(a + b * N * N, alone, N, DC_FLOAT64, -0.25, NULL, NULL));
    assert_memory_equal(alone, x + b * N * N, sizeof alone);
    assert_int_equal(info[b].status, DC_OK);
    assert_true(fabs(info[b].largest - 1) < 1e-12);
  }
}

/* Results go to memory of their own; in a query, where nothing is written, tensors may share memory. */
static void test_outputs_over_inputs(void **state) {
  (void)state;
  enum { SMALL = 2, COUNT = 3 };
  double x[4 * COUNT * SMALL * SMALL] = {0}, before[4 * COUNT * SMALL * SMALL], *y = x + COUNT * SMALL * SMALL,
                               *z = y + COUNT * SMALL * SMALL;
  for (int64_t i = 0; i < COUNT * SMALL * SMALL; i++) {
    x[i] = i % 4 == 0 || i % 4 == 3 ? 2 : 1;
  }
  memcpy(before, x, sizeof x);
  dc_tensor a = batch(x, DC_FLOAT64, COUNT, SMALL, SMALL), last = batch(y - 1, DC_FLOAT64, COUNT, SMALL, SMALL),
            b = batch(y, DC_FLOAT64, COUNT, SMALL, SMALL), c = batch(z, DC_FLOAT64, COUNT, SMALL, SMALL),
            values = matrix(z, DC_FLOAT64, COUNT, SMALL), over = matrix(x, DC_FLOAT64, COUNT, SMALL);
  dc_iteration_options newton = DC_ITERATION_OPTIONS_INIT;
  newton.eps_rel = 1e-3;
  FAILS(dc_eigh(linalg, &a, NULL, &over, &b, NULL, 0), DC_E_INVALID, "values, which is written, overlaps a");
  FAILS(dc_eigh(linalg, &a, NULL, &values, &a, NULL, 0), DC_E_INVALID, "vectors, which is written, overlaps a");
  FAILS(dc_eigh(linalg, &a, NULL, &values, &c, NULL, 0), DC_E_INVALID, "vectors, which is written, overlaps values");
  FAILS(dc_matrix_power(linalg, &a, 2, NULL, &a, NULL, 0), DC_E_INVALID, "out, which is written, overlaps a");
  FAILS(dc_matrix_power(linalg, &a, 2, NULL, &last, NULL, 0), DC_E_INVALID, "out, which is written, overlaps a");
  FAILS(dc_matrix_inverse_root(linalg, &a, 4, NULL, NULL, &a, NULL, 0), DC_E_INVALID, "overlaps a");
  FAILS(dc_matrix_inverse_root(linalg, &a, 4, NULL, &a, &b, NULL, 0), DC_E_INVALID, "basis, which is written");
  FAILS(dc_matrix_inverse_root(linalg, &a, 4, NULL, &b, &b, NULL, 0), DC_E_INVALID, "overlaps basis");
  FAILS(dc_matrix_inverse_root_newton(linalg, &a, 4, &newton, &a, NULL, 0), DC_E_INVALID, "overlaps a");
  FAILS(dc_orthogonalize(linalg, &a, 0, 0, &a), DC_E_INVALID, "out, which is written, overlaps a");
  assert_memory_equal(x, before, sizeof x);
  OK(dc_linalg_begin_query(linalg));
  OK(dc_matrix_inverse_root(linalg, &a, 4, NULL, &a, &a, NULL, 0));
  int64_t bytes;
  OK(dc_linalg_end_query(linalg, &bytes));
  OK(dc_matrix_inverse_root(linalg, &a, 4, NULL, &b, &c, NULL, 0)); /* neighbours do not overlap */
}

/* Sizes beyond any memory are an error, whatever the data is; the data is not read. */
static void test_15_huge(void **state) {
  (void)state;
  double a = 1;
  const int64_t sizes[] = {32766, 40000, INT64_C(1) << 27};
  dc_linalg *plain = open_linalg(1, 1);
  for (size_t i = 0; i < 3; i++) {
    dc_tensor t = matrix(&a, DC_FLOAT64, sizes[i], sizes[i]);
    const int64_t still[2] = {0, 0};
    t.strides = still;
    dc_tensor out = matrix(&a, DC_FLOAT64, sizes[i], sizes[i]);
    OK(dc_linalg_begin_query(plain));
    OK(dc_matrix_power(plain, &t, 1, NULL, &out, NULL, 0));
    int64_t bytes = 0;
    OK(dc_linalg_end_query(plain, &bytes));
    assert_true(bytes / 24 >= (int64_t)sizes[i] * sizes[i]);
  }
  const int64_t still[2] = {0, 0};
  dc_tensor t = matrix(&a, DC_FLOAT64, INT64_C(1) << 27, INT64_C(1) << 27), out = t;
  t.strides = still;
  out.data = &a + 1;
  dc_status status = dc_matrix_power(linalg, &t, 1, NULL, &out, NULL, 0);
  assert_true(status == DC_E_UNSUPPORTED || status == DC_E_NO_MEMORY);
  FAILS(dc_matrix_power(plain, &t, 1, NULL, &out, NULL, 0), DC_E_NO_MEMORY, "dc_matrix_power");
  t = matrix(&a, DC_FLOAT64, INT64_C(1) << 40, INT64_C(1) << 40);
  FAILS(dc_matrix_power(linalg, &t, 1, NULL, &t, NULL, 0), DC_E_SHAPE, "2^56");
  dc_linalg_destroy(plain);
}

static void test_options(void **state) {
  (void)state;
  double a = 1, x;
#define BAD(field, value, text)                                                         \
  do {                                                                                  \
    dc_spectral_options o = defaults();                                                 \
    o.field = value;                                                                    \
    FAILS(power_of(&a, &x, 1, DC_FLOAT64, 1, &o, NULL), DC_E_INVALID, "options." text); \
  } while (0)
  BAD(eps_abs, -1, "eps_abs = -1");
  BAD(eps_abs, NAN, "eps_abs = nan");
  BAD(eps_rel, INFINITY, "eps_rel = inf");
  BAD(rank_rtol, 2, "rank_rtol = 2");
  BAD(tolerance, -1, "tolerance = -1");
  BAD(symmetry, 4, "symmetry = 4");
  BAD(negative, -1, "negative = -1");
  BAD(precision, DC_BFLOAT16, "precision");
  BAD(descending, 2, "descending = 2");
  dc_spectral_info info;
  dc_tensor t = matrix(&a, DC_FLOAT64, 1, 1);
  FAILS(dc_matrix_power(linalg, &t, 1, NULL, &t, &info, 4), DC_E_INVALID, "info_size = 4");
  dc_linalg_options wrong = DC_LINALG_OPTIONS_INIT;
  dc_linalg *made;
  wrong.threads = -1;
  FAILS(dc_linalg_create(device, &wrong, &made), DC_E_INVALID, "threads = -1");
  assert_null(made);
  wrong.threads = 0;
  wrong.plain = 2;
  FAILS(dc_linalg_create(device, &wrong, &made), DC_E_INVALID, "plain = 2");
}

/* The same bits with one thread, two and five, and from one call to the next. */
static void test_53_bits(void **state) {
  (void)state;
  enum { COUNT = 7 };
  float *a = calloc(COUNT * 64 * 64, sizeof *a), *x[3];
  for (int b = 0; b < COUNT; b++) {
    double wide[64 * 64];
    spread_spectrum(wide, 64, (uint64_t)b + 53);
    for (int64_t i = 0; i < 64 * 64; i++) {
      a[b * 64 * 64 + i] = (float)wide[i];
    }
  }
  const int32_t threads[] = {1, 2, 5};
  for (int count = 1; count <= COUNT; count += 6) {
    for (int i = 0; i < 3; i++) {
      x[i] = calloc(COUNT * 64 * 64, sizeof *x[i]);
      dc_linalg *l = open_linalg(threads[i], 0);
      dc_tensor ta = batch(a, DC_FLOAT32, count, 64, 64), tx = batch(x[i], DC_FLOAT32, count, 64, 64);
      OK(dc_matrix_power(l, &ta, -0.25, NULL, &tx, NULL, 0));
      dc_linalg_destroy(l);
      assert_memory_equal(x[0], x[i], COUNT * 64 * 64 * sizeof *a);
    }
    for (int i = 0; i < 3; i++) {
      free(x[i]);
    }
  }
  free(a);
}

typedef struct racer {
  double a[N * N], x[N * N];
  dc_status status;
} racer;

static void *race(void *arg) {
  racer *r = arg;
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_linalg *own;
  options.threads = 2;
  r->status = dc_linalg_create(device, &options, &own);
  for (int i = 0; i < 20 && r->status == DC_OK; i++) {
    dc_tensor ta = matrix(r->a, DC_FLOAT64, N, N), tx = matrix(r->x, DC_FLOAT64, N, N);
    r->status = dc_matrix_power(i % 2 == 0 ? own : linalg, &ta, -0.25, NULL, &tx, NULL, 0);
  }
  dc_linalg_destroy(own);
  return NULL;
}

/* Many threads, each on its own handle, and on one that they share. */
static void test_52_threads(void **state) {
  (void)state;
  enum { COUNT = 4 };
  static racer racers[COUNT];
  pthread_t threads[COUNT];
  double x[N * N];
  for (int i = 0; i < COUNT; i++) {
    spread_spectrum(racers[i].a, N, (uint64_t)i);
    assert_int_equal(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
  }
  for (int i = 0; i < COUNT; i++) {
    pthread_join(threads[i], NULL);
  }
  for (int i = 0; i < COUNT; i++) {
    assert_int_equal(racers[i].status, DC_OK);
    OK(power_of(racers[i].a, x, N, DC_FLOAT64, -0.25, NULL, NULL));
    assert_memory_equal(x, racers[i].x, sizeof x);
  }
}

static void test_54_workspace(void **state) {
  (void)state;
  double a[N * N], x[N * N];
  spread_spectrum(a, N, 54);
  int64_t bytes = 0;
  dc_tensor ta = matrix(a, DC_FLOAT64, N, N), tx = matrix(x, DC_FLOAT64, N, N);
  memset(x, 0x5a, sizeof x);
  OK(dc_linalg_begin_query(linalg));
  FAILS(dc_linalg_begin_query(linalg), DC_E_STATE, "has begun");
  OK(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, NULL, 0));
  OK(dc_linalg_end_query(linalg, &bytes));
  FAILS(dc_linalg_end_query(linalg, &bytes), DC_E_STATE, "no query");
  assert_true(bytes > (int64_t)(3 * sizeof a) && ((unsigned char *)x)[5] == 0x5a);
  char *memory = aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64));
  memory[bytes] = 0x77;
  OK(dc_linalg_set_workspace(linalg, memory, bytes));
  OK(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, NULL, 0));
  assert_int_equal(memory[bytes], 0x77);
  OK(dc_linalg_set_workspace(linalg, memory, bytes - 1));
  FAILS(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, NULL, 0), DC_E_BUFFER_TOO_SMALL, "workspace");
  FAILS(dc_linalg_set_workspace(linalg, memory + 1, bytes), DC_E_INVALID, "64-byte aligned");
  FAILS(dc_linalg_set_workspace(linalg, memory, 0), DC_E_INVALID, "not empty");
  OK(dc_linalg_set_workspace(linalg, NULL, 0));
  free(memory);
  dc_device_memory before = DC_DEVICE_MEMORY_INIT, after = DC_DEVICE_MEMORY_INIT;
  OK(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, NULL, 0));
  OK(dc_device_get_memory(device, &before));
  for (int i = 0; i < 1000; i++) {
    OK(dc_matrix_power(linalg, &ta, -0.25, NULL, &tx, NULL, 0));
  }
  OK(dc_device_get_memory(device, &after));
  assert_true(before.reserved_bytes == after.reserved_bytes && before.peak_bytes == after.peak_bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_09_shapes),     cmocka_unit_test(test_10_not_symmetric),
      cmocka_unit_test(test_11_not_finite), cmocka_unit_test(test_14_one_bad_matrix),
      cmocka_unit_test(test_15_huge),       cmocka_unit_test(test_52_threads),
      cmocka_unit_test(test_53_bits),       cmocka_unit_test(test_54_workspace),
      cmocka_unit_test(test_options),       cmocka_unit_test(test_outputs_over_inputs),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
