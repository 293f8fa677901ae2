/* Eigendecompositions on the device: matrices that fail beside others that do not, the texts of errors, and scratch
 * memory. Also versions of the library, its absence, and every call failing in turn. On the simulated driver, or on a
 * card (tests/card). */
#include "eigh_pair.h"

#ifndef ON_CARD
#include "device/cuda/cusolver.h"
#endif

/* Computes roots on both sides, whose texts must have the same fragment. */
static void run_roots(const double *a, int32_t dtype, int64_t count, int32_t root, const dc_spectral_options *o,
                      const char *text) {
  tensor_pair ta = matrix_pair(a, dtype, count, SIZE, SIZE), tx = matrix_pair(NULL, dtype, count, SIZE, SIZE);
  dc_status first = DC_OK;
  memset(info, 0, sizeof info);
  for (int k = 0; k < 2; k++) {
    const dc_status status =
        dc_matrix_inverse_root(linalg_of(k), &ta.t[k], root, o, NULL, &tx.t[k], info[k], sizeof info[k][0]);
    first = k == 0 ? status : first;
    assert_int_equal(status, first);
    assert_true((status == DC_OK) == (text[0] == '\0'));
    if (status != DC_OK && strstr(dc_last_error(), text) == NULL) {
      fail_msg("side %d: %s", k, dc_last_error());
    }
  }
  compare_info(info, count, 1e-9);
  assert_true(relative_gap(&tx) <= 1e-4); /* -7 where nothing may be written */
  free_pair(&ta), free_pair(&tx);
}

static void test_failures(void **state) {
  (void)state;
  enum { EACH = SIZE * SIZE };
  double *a = spectrum_pair(MANY, SIZE), values[SIZE];
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-5;
  a[33 * EACH + 3 * SIZE + 7] = NAN; /* in the second slice */
  run_roots(a, DC_FLOAT64, MANY, 4, &o, "a[33] has a NaN or an infinity at [3, 7]");
  a[2 * EACH + 9] += 1;
  run_roots(a, DC_FLOAT64, 4, 4, &o, "a[2] is not symmetric: entries [9, 0] and [0, 9]");
  a[2 * EACH + 5] = -INFINITY;
  run_roots(a, DC_FLOAT32, 4, 4, &o, "a[2] has a NaN or an infinity at [0, 5]");
  a[2 * EACH + 5] = 0;
  o.symmetry = DC_SYMMETRY_LOWER;
  run_roots(a, DC_FLOAT64, 4, 4, &o, "");
  o.eps_rel = 0;
  memset(a + EACH, 0, EACH * sizeof *a);
  run_roots(a, DC_FLOAT64, 2, 4, &o, "a[1] has an eigenvalue of zero, which has no power -0.25");
  for (int64_t i = 0; i < SIZE; i++) {
    values[i] = i == 5 ? -0.1 : 1;
  }
  with_spectrum(a + 2 * EACH, SIZE, values, 3);
  with_spectrum(a + 1 * EACH, SIZE, values, 4);
  run_roots(a, DC_FLOAT64, 3, 4, &o, "a[1] has the negative eigenvalue -0.1");
  o.negative = DC_NEGATIVE_CLAMP;
  o.eps_abs = 1e-3;
  run_roots(a, DC_FLOAT64, 3, 2, &o, "");
  o.negative = DC_NEGATIVE_FLOOR;
  run_roots(a, DC_FLOAT64, 3, 2, &o, "");
  for (int64_t i = 0; i < EACH; i++) {
    a[EACH + i] = i % (SIZE + 1) == 0 ? 1e-40 : 0;
  }
  o = defaults();
  run_roots(a, DC_FLOAT32, 2, 1, &o, "the result for a[1] does not fit float32");
  free(a);
}

/* One root does not fit its type, while the other matrix of the batch has a new basis. */
static void test_a_result_that_does_not_fit_leaves_the_basis(void **state) {
  (void)state;
  enum { COUNT = 2, EACH = SIZE * SIZE };
  double *a = spectrum_pair(COUNT, SIZE);
  for (int64_t i = 0; i < EACH; i++) {
    a[EACH + i] = i % (SIZE + 1) == 0 ? 1e-40 : 0;
  }
  tensor_pair ta = matrix_pair(a, DC_FLOAT32, COUNT, SIZE, SIZE), tx = matrix_pair(NULL, DC_FLOAT32, COUNT, SIZE, SIZE);
  tensor_pair tq = matrix_pair(NULL, DC_FLOAT64, COUNT, SIZE, SIZE);
  for (int k = 0; k < 2; k++) {
    FAILS(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], 1, NULL, &tq.t[k], &tx.t[k], NULL, 0), DC_E_NOT_FINITE,
          "the result for a[1] does not fit float32");
  }
  double *cuda = host_copy(&tq);
  const double *const q[2] = {tq.data[0], cuda};
  for (int64_t i = 0; i < 2 * EACH; i++) {
    const double *side = q[i % 2];
    assert_true(side[EACH + i / 2] == -7 && fabs(side[i / 2]) <= 1 + 1e-9);
  }
  free(cuda);
  free_pair(&ta), free_pair(&tx), free_pair(&tq);
  free(a);
}

static void test_scratch_and_refusals(void **state) {
  (void)state;
  int64_t bytes;
  void *lent;
  double *a = spectrum_pair(3, SIZE);
  tensor_pair ta = matrix_pair(a, DC_FLOAT64, 3, SIZE, SIZE), tx = matrix_pair(NULL, DC_FLOAT64, 3, SIZE, SIZE);
  const int64_t lengths[] = {3, SIZE};
  tensor_pair tw = number_pair(NULL, DC_FLOAT64, lengths, 2);
  assert_string_equal(dc_linalg_solver(cuda_linalg), "cuSOLVER");
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-6;
  OK(dc_linalg_begin_query(cuda_linalg));
  OK(dc_matrix_inverse_root(cuda_linalg, &ta.t[1], 4, &o, NULL, &tx.t[1], NULL, 0));
  OK(dc_eigh(cuda_linalg, &ta.t[1], NULL, &tw.t[1], &tx.t[1], NULL, 0));
  OK(dc_linalg_end_query(cuda_linalg, &bytes));
  assert_true(relative_gap(&tx) == 0 && relative_gap(&tw) == 0);
  assert_int_equal(card->ops->alloc(card, (size_t)bytes, DC_MEMORY_DEVICE, &lent), DC_OK);
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes - 64));
  FAILS(dc_matrix_inverse_root(cuda_linalg, &ta.t[1], 4, &o, NULL, &tx.t[1], NULL, 0), DC_E_BUFFER_TOO_SMALL,
        "dc_matrix_inverse_root: the workspace");
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes));
  BOTH(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], 4, &o, NULL, &tx.t[k], NULL, 0));
  assert_true(relative_gap(&tx) <= 1e-9);
  OK(dc_linalg_set_workspace(cuda_linalg, NULL, 0));
  card->ops->free(card, lent, (size_t)bytes, DC_MEMORY_DEVICE);
  dc_tensor askew = tw.t[1];
  askew.data = (char *)askew.data + 4;
  FAILS(dc_eigh(cuda_linalg, &ta.t[1], NULL, &askew, NULL, NULL, 0), DC_E_INVALID, "values.data = ");
  free_pair(&ta), free_pair(&tx), free_pair(&tw);
  free(a);
}

#ifndef ON_CARD
/* A matrix that does not converge in float32 is tried again in float64. */
static void test_convergence(void **state) {
  (void)state;
  enum { COUNT = 4 };
  double *a = spectrum_pair(COUNT, SIZE);
  const int64_t lengths[] = {COUNT, SIZE};
  for (int wide = 0; wide < 2; wide++) {
    const int32_t dtype = wide ? DC_FLOAT64 : DC_FLOAT32;
    tensor_pair ta = matrix_pair(a, dtype, COUNT, SIZE, SIZE), tv = matrix_pair(NULL, dtype, COUNT, SIZE, SIZE),
                tw = number_pair(NULL, dtype, lengths, 2);
    OK(dc_eigh(linalg, &ta.t[0], NULL, &tw.t[0], &tv.t[0], info[0], sizeof info[0][0]));
    cudasim_fail("cusolver: convergence", 1, 5);
    const dc_status status = dc_eigh(cuda_linalg, &ta.t[1], NULL, &tw.t[1], &tv.t[1], info[1], sizeof info[1][0]);
    assert_int_equal(status, wide ? DC_E_NOT_CONVERGED : DC_OK);
    if (wide) {
      assert_string_equal(dc_last_error(), "dc_eigh: the eigenvalues of a[1] did not converge");
      double *values = host_copy(&tw), *vectors = host_copy(&tv);
      for (int64_t i = 0; i < COUNT * SIZE; i++) {
        assert_true((values[i] == -7) == (i / SIZE == 1));
      }
      assert_true(vectors[SIZE * SIZE] == -7 && vectors[2 * SIZE * SIZE - 1] == -7);
      free(values), free(vectors);
    } else {
      assert_true(relative_gap(&tw) <= 1e-5);
    }
    for (int i = 0; i < COUNT; i++) {
      assert_int_equal(info[1][i].path, i != 1 ? DC_PATH_FRESH : wide ? DC_PATH_NONE : DC_PATH_RETRIED);
    }
    free_pair(&ta), free_pair(&tv), free_pair(&tw);
  }
  free(a);
}

/* No library, an old one, and one without batches. */
static void test_library(void **state) {
  (void)state;
  enum { COUNT = 6, N = 6 };
  double *a = spectrum_pair(COUNT, N);
  tensor_pair ta = matrix_pair(a, DC_FLOAT64, COUNT, N, N), tx = matrix_pair(NULL, DC_FLOAT64, COUNT, N, N);
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-2;
#define ROOT(k) dc_matrix_inverse_root(linalg_of(k), &ta.t[k], 4, &o, NULL, &tx.t[k], NULL, 0)
  OK(dc_batch_matmul(cuda_linalg, &ta.t[1], &ta.t[1], 1, 0, &tx.t[1])); /* cuBLASLt is loaded */
  setenv("LIBDC_CUDA_LIB_DIR", "/nowhere", 1);
  FAILS(ROOT(1), DC_E_UNSUPPORTED,
        "dc_matrix_inverse_root: CUDA: eigendecompositions need cuSOLVER, and it was not found");
  assert_non_null(
      strstr(dc_last_error(), "install the package nvidia-cusolver, or name its folder in LIBDC_CUDA_LIB_DIR"));
  unsetenv("LIBDC_CUDA_LIB_DIR");
  cudasim_fail("cusolverGetVersion", 0, 10600);
  FAILS(ROOT(1), DC_E_UNSUPPORTED, "cuSOLVER is too old (version); that of CUDA 12.0 is needed");
  cudasim_fail("cusolverDnCreate", 0, DC__CUSOLVER_ALLOC_FAILED);
  FAILS(ROOT(1), DC_E_NO_MEMORY, "device \"cuda\": cusolverDnCreate: cuSOLVER's status 2");
  cudasim_fail("cusolverGetVersion", 0, DC__CUSOLVER_OLDEST_BATCHED - 1);
  cudasim_hold(); /* matrices are computed one by one, and share the host's workspace */
  BOTH(ROOT(k));
  assert_true(relative_gap(&tx) <= 1e-10);
  assert_int_equal(cudasim_calls("cusolverDnXsyevd"), COUNT);
  assert_int_equal(cudasim_calls("cusolverDnXsyevBatched"), 0);
#undef ROOT
  free_pair(&ta), free_pair(&tx);
  free(a);
}

/* A batch smaller than planned may need more workspace: then as many matrices go together as fit. */
static void test_batches(void **state) {
  (void)state;
  enum { COUNT = 4, N = 6 };
  double *a = spectrum_pair(COUNT, N);
  for (int bad = 0; bad < 2; bad++) {
    const int calls[] = {cudasim_calls("cusolverDnXsyevBatched"), cudasim_calls("cusolverDnXsyevd")};
    a[COUNT * N * N - 1] = bad ? NAN : 1;
    tensor_pair ta = matrix_pair(a, DC_FLOAT64, COUNT, N, N), tx = matrix_pair(NULL, DC_FLOAT64, COUNT, N, N);
    dc_spectral_options o = defaults();
    o.eps_rel = 1e-2;
    o.symmetry = DC_SYMMETRY_MEAN;
    o.negative = DC_NEGATIVE_CLAMP;
    BOTH(dc_matrix_inverse_root(linalg_of(k), &ta.t[k], 9, &o, NULL, &tx.t[k], NULL, 0));
    assert_true(relative_gap(&tx) <= 1e-10);
    assert_int_equal(cudasim_calls("cusolverDnXsyevBatched") - calls[0], 1);
    assert_int_equal(cudasim_calls("cusolverDnXsyevd") - calls[1], bad);
    free_pair(&ta), free_pair(&tx);
  }
  free(a);
}

/* Every call of the driver and the libraries fails in turn: whichever call reports the error, nothing leaks. */
static int use_all(void **state, const char *counted, const char *failing, int before) {
  const double a[] = {2, 1, 1, 2, 3, 0, 0, 1};
  dc_spectral_options o = defaults();
  o.eps_rel = 1e-2;
  assert_int_equal(open_both(state), 0);
  const int64_t lengths[] = {2, 2};
  tensor_pair ta = matrix_pair(a, DC_FLOAT32, 2, 2, 2), tx = matrix_pair(NULL, DC_FLOAT32, 2, 2, 2),
              tw = number_pair(NULL, DC_FLOAT32, lengths, 2);
  tensor_pair one = matrix_pair(a, DC_FLOAT64, -1, 2, 2), two = matrix_pair(a, DC_FLOAT64, -1, 2, 2);
  tensor_pair tq = matrix_pair(NULL, DC_FLOAT64, 2, 2, 2);
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  o.tolerance = 1e-3;
  dc_status status[] = {dc_matrix_inverse_root(cuda_linalg, &ta.t[1], 4, &o, &tq.t[1], &tx.t[1], NULL, 0),
                        dc_matrix_inverse_root(cuda_linalg, &ta.t[1], 4, &o, &tq.t[1], &tx.t[1], NULL, 0),
                        dc_eigh(cuda_linalg, &ta.t[1], NULL, &tw.t[1], &tx.t[1], NULL, 0),
                        dc_matrix_power(cuda_linalg, &one.t[1], 0.5, NULL, &two.t[1], NULL, 0)};
  const int calls = cudasim_calls(counted) - begun;
  bool told = false;
  for (size_t i = 0; i < DC__COUNT(status); i++) {
    told = told || status[i] != DC_OK;
  }
  if (told != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  if (failing != NULL && strncmp(failing, "cusolver", 8) == 0) { /* the device is still usable */
    OK(dc_matrix_power(cuda_linalg, &one.t[1], 0.5, NULL, &two.t[1], NULL, 0));
  }
  free_pair(&ta), free_pair(&tx), free_pair(&tw), free_pair(&one), free_pair(&two), free_pair(&tq);
  assert_int_equal(close_both(state), 0);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync",
                                          "cuMemsetD8Async",         "cuStreamSynchronize",
                                          "cuMemAllocFromPoolAsync", "cuEventRecord",
                                          "cuEventSynchronize",      "cublasLtMatmul",
                                          "cusolverDnCreate",        "cusolverDnCreateParams",
                                          "cusolverDnSetStream",     "cusolverDnXsyevd_bufferSize",
                                          "cusolverDnXsyevd",        "cusolverDnXsyevBatched_bufferSize",
                                          "cusolverDnXsyevBatched"};
  fail_each_call(state, use_all, functions, DC__COUNT(functions), FAILING);
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_failures),
      TEST(test_a_result_that_does_not_fit_leaves_the_basis),
      TEST(test_scratch_and_refusals),
#ifndef ON_CARD
      TEST(test_convergence),
      TEST(test_library),
      TEST(test_batches),
      TEST(test_every_call_fails),
#endif
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
