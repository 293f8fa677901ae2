/* Per-sample gradients on the device compared with the CPU's: every kind of layer, both types, empty shapes, more
 * positions than a tile, samples that are left out. Also the texts of errors, and every call failing in turn. On the
 * simulated driver, or on a card (tests/card). */
#include "device_pair.h"

/* The thread sanitizer makes kernels slow, so fewer of the calls fail in turn. */
#ifdef CUDASIM_TSAN
enum { FAILING = 40 };
#else
enum { FAILING = 4 };
#endif
enum { LONG = 300, WIDE = 430, MANY = 300 };

enum { MOST = 6, VALUES = 400000 };

/* A layer with its tensors in both memories. */
static struct {
  dc_sample_layer layer;
  int32_t dtype;
  int64_t x_shape[MOST], delta_shape[MOST], weight_shape[MOST], bias_shape[2]; /* of outputs: begins with N */
  int32_t x_ndim, delta_ndim, weight_ndim;
  bool has_bias, exact; /* exact: the bits must agree */
  tensor_pair x, delta;
} s;

static double *values; /* VALUES numbers in [-1, 1) */

static int32_t lengths(int64_t *shape, const int64_t *from) {
  int32_t ndim = 0;
  for (; from[ndim] >= 0; ndim++) {
    shape[ndim] = from[ndim];
  }
  return ndim;
}

/* Lists of lengths end with -1; the weight's lengths are those of one sample. */
static void begin(const dc_sample_layer *layer, int32_t dtype, const int64_t *x, const int64_t *delta,
                  const int64_t *weight) {
  memset(&s, 0, sizeof s);
  s.layer = *layer;
  s.dtype = dtype;
  s.x_ndim = lengths(s.x_shape, x);
  s.delta_ndim = lengths(s.delta_shape, delta);
  s.weight_ndim = lengths(s.weight_shape + 1, weight) + 1;
  s.weight_shape[0] = s.bias_shape[0] = x[0];
  s.bias_shape[1] = weight[0];
  s.exact = layer->rows > 0;
  s.has_bias = !s.exact && layer->kind != DC_SAMPLE_RMS_NORM;
  if (s.exact) { /* indices, many of which occur twice, in both types */
    int64_t ids[512];
    int32_t narrow[512];
    for (int i = 0; i < 512; i++) {
      ids[i] = (int64_t)(fabs(values[i]) * (double)layer->rows);
      narrow[i] = (int32_t)ids[i];
    }
    const bool wide = dtype == DC_FLOAT64;
    s.x = pair_of(wide ? (void *)ids : narrow, wide ? DC_INT64 : DC_INT32, s.x_shape, s.x_ndim);
  } else {
    s.x = number_pair(values, dtype, s.x_shape, s.x_ndim);
  }
  s.delta = number_pair(values + VALUES / 2, dtype, s.delta_shape, s.delta_ndim);
}

static void finish(void) {
  free_pair(&s.x), free_pair(&s.delta);
}

static bool near(const tensor_pair *w) {
  return relative_gap(w) <= (s.exact ? 0 : s.dtype == DC_FLOAT64 ? 1e-12 : 1e-5);
}

static void check_gradients(void) {
  tensor_pair w = number_pair(NULL, s.dtype, s.weight_shape, s.weight_ndim),
              b = number_pair(NULL, s.dtype, s.bias_shape, 2);
  BOTH(dc_per_sample_grads(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], &w.t[k], s.has_bias ? &b.t[k] : NULL));
  assert_true(near(&w) && near(&b));
  BOTH(dc_per_sample_grads(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], NULL, s.has_bias ? &b.t[k] : NULL));
  BOTH(dc_per_sample_grads(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], NULL, NULL));
  free_pair(&w), free_pair(&b);
}

static void check_norms(void) {
  tensor_pair squares = number_pair(NULL, s.dtype, s.bias_shape, 1);
  const bool exact = s.exact;
  s.exact = false;
  for (int32_t parts = 1; parts <= (s.has_bias ? 3 : 1); parts++) {
    for (int32_t accumulate = 1; accumulate >= 0; accumulate--) {
      BOTH(dc_per_sample_norms(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], parts, accumulate, &squares.t[k]));
      assert_true(near(&squares));
    }
  }
  s.exact = exact;
  free_pair(&squares);
}

static void check_sums(void) {
  double numbers_of[64];
  for (int i = 0; i < 64; i++) {
    numbers_of[i] = i % 3 == 1 ? 0 : values[i]; /* some samples are left out */
  }
  tensor_pair factors = number_pair(numbers_of, s.dtype, s.bias_shape, 1);
  tensor_pair w = number_pair(NULL, s.dtype, s.weight_shape + 1, s.weight_ndim - 1),
              b = number_pair(NULL, s.dtype, s.bias_shape + 1, 1);
  for (int form = 0; form < 4; form++) {
    BOTH(dc_clipped_grad_sum(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], form & 1 ? &factors.t[k] : NULL,
                             form / 2, &w.t[k], s.has_bias ? &b.t[k] : NULL));
    assert_true(near(&w) && near(&b));
  }
  free_pair(&factors), free_pair(&w), free_pair(&b);
}

static void check(const dc_sample_layer *layer, const int64_t *x, const int64_t *delta, const int64_t *weight) {
  for (int wide = 0; wide < 2; wide++) {
    begin(layer, wide ? DC_FLOAT64 : DC_FLOAT32, x, delta, weight);
    check_gradients();
    check_norms();
    check_sums();
    finish();
  }
}

#define L(...) ((const int64_t[]){__VA_ARGS__, -1})

static dc_sample_layer kind(int32_t kind) {
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = kind;
  layer.eps = 1e-3;
  return layer;
}

static void test_linear(void **state) {
  (void)state;
  const dc_sample_layer linear = kind(DC_SAMPLE_LINEAR);
  check(&linear, L(5, 7), L(5, 9), L(9, 7));       /* one position */
  check(&linear, L(4, 3, 8), L(4, 3, 9), L(9, 8)); /* norms from the positions */
  check(&linear, L(3, 6, 5), L(3, 6, 4), L(4, 5)); /* norms from the gradients */
  check(&linear, L(2, 3, 2, 5), L(2, 3, 2, 4), L(4, 5));
  check(&linear, L(40, 2, 3), L(40, 2, 1), L(1, 3));
  check(&linear, L(1, 2, 0), L(1, 2, 3), L(3, 0));
  check(&linear, L(0, 2, 3), L(0, 2, 3), L(3, 3));
  check(&linear, L(2, 0, 3), L(2, 0, 3), L(3, 3));
}

/* More positions than a Gram tile has; more rows of a gradient than are computed at once. */
static void test_tiles(void **state) {
  (void)state;
  const dc_sample_layer linear = kind(DC_SAMPLE_LINEAR);
  begin(&linear, DC_FLOAT64, L(1, LONG, WIDE), L(1, LONG, WIDE), L(WIDE, WIDE));
  check_norms();
  finish();
  begin(&linear, DC_FLOAT64, L(2, LONG, 3), L(2, LONG, LONG), L(LONG, 3));
  check_norms();
  finish();
}

static dc_sample_layer conv(int32_t groups, const int64_t *kernel, const int64_t *stride, const int64_t *padding,
                            const int64_t *dilation) {
  dc_sample_layer layer = kind(DC_SAMPLE_CONV);
  layer.groups = groups;
  for (int i = 0; kernel[i] >= 0; i++) {
    layer.kernel[i] = kernel[i], layer.stride[i] = stride[i];
    layer.padding[i] = padding[i], layer.dilation[i] = dilation[i];
  }
  return layer;
}

static void test_convolutions(void **state) {
  (void)state;
  const dc_sample_layer same = conv(1, L(3, 3), L(1, 1), L(1, 1), L(1, 1));
  const dc_sample_layer odd = conv(2, L(3, 2), L(2, 1), L(0, 1), L(1, 2));
  const dc_sample_layer deep = conv(3, L(3, 3), L(1, 1), L(1, 1), L(1, 1));
  const dc_sample_layer one = conv(1, L(3), L(2), L(1), L(1)), point = conv(1, L(1, 1), L(1, 1), L(0, 0), L(1, 1));
  const dc_sample_layer three = conv(1, L(2, 2, 2), L(1, 2, 1), L(0, 1, 0), L(1, 1, 2));
  check(&same, L(3, 2, 5, 6), L(3, 4, 5, 6), L(4, 2, 3, 3));
  check(&odd, L(2, 4, 7, 5), L(2, 6, 3, 5), L(6, 2, 3, 2));
  check(&deep, L(2, 3, 4, 4), L(2, 3, 4, 4), L(3, 1, 3, 3));
  check(&one, L(3, 2, 9), L(3, 3, 5), L(3, 2, 3));
  check(&point, L(2, 3, 1, 1), L(2, 5, 1, 1), L(5, 3, 1, 1));
  check(&three, L(2, 2, 3, 4, 3), L(2, 3, 2, 2, 1), L(3, 2, 2, 2, 2));
  check(&same, L(1, 2, 3, 3), L(1, 40, 3, 3), L(40, 2, 3, 3)); /* norms from the positions */
  check(&same, L(0, 2, 3, 3), L(0, 4, 3, 3), L(4, 2, 3, 3));
  check(&same, L(2, 0, 3, 3), L(2, 4, 3, 3), L(4, 0, 3, 3));
  check(&same, L(2, 2, 0, 2), L(2, 4, 2, 2), L(4, 2, 3, 3)); /* only padding */
}

static void test_embeddings(void **state) {
  (void)state;
  dc_sample_layer large = kind(DC_SAMPLE_EMBEDDING);
  large.rows = MANY; /* more rows than the blocks share, and than a block scans at once */
  check(&large, L(1, MANY - 1), L(1, MANY - 1, 1), L(MANY, 1));
#ifndef CUDASIM_TSAN
  check(&large, L(2, 3), L(2, 3, MANY), L(MANY, MANY));
#endif
  for (int32_t each = 0; each < 3; each++) {
    static const int32_t kinds[] = {DC_SAMPLE_EMBEDDING, DC_SAMPLE_BAG_SUM, DC_SAMPLE_BAG_MEAN};
    dc_sample_layer layer = kind(kinds[each]);
    for (int32_t padding = 0; padding < 2; padding++) {
      layer.rows = 7;
      layer.has_padding_row = padding;
      layer.padding_row = padding;
      check(&layer, L(3, 5), each > 0 ? L(3, 4) : L(3, 5, 4), L(7, 4));
      check(&layer, L(2, 0), each > 0 ? L(2, 4) : L(2, 0, 4), L(7, 4));
      check(&layer, L(0, 3), each > 0 ? L(0, 4) : L(0, 3, 4), L(7, 4));
    }
  }
}

static void test_norms(void **state) {
  (void)state;
  dc_sample_layer layer = kind(DC_SAMPLE_LAYER_NORM), rms = kind(DC_SAMPLE_RMS_NORM),
                  group = kind(DC_SAMPLE_GROUP_NORM);
  check(&layer, L(3, 4, 6), L(3, 4, 6), L(6));
  check(&layer, L(3, 70), L(3, 70), L(70));
  check(&rms, L(3, 4, 6), L(3, 4, 6), L(6));
  check(&layer, L(2, 0, 6), L(2, 0, 6), L(6));
  check(&layer, L(2, 3, 0), L(2, 3, 0), L(0));
  check(&layer, L(0, 3, 2), L(0, 3, 2), L(2));
  layer.features = 12;
  check(&layer, L(3, 4, 2, 6), L(3, 4, 2, 6), L(12));
  group.groups = 2;
  check(&group, L(3, 4, 5, 9), L(3, 4, 5, 9), L(4));
  group.groups = 4;
  check(&group, L(3, 4), L(3, 4), L(4));
  check(&group, L(3, 4, 0), L(3, 4, 0), L(4));
}

/* A NaN stays in its sample, and a factor of 0 leaves its sample out, whatever the sample contains. */
static void test_nonfinite_input(void **state) {
  (void)state;
  const dc_sample_layer layers[] = {kind(DC_SAMPLE_LINEAR), kind(DC_SAMPLE_LAYER_NORM),
                                    conv(1, L(1), L(1), L(0), L(1))};
  for (size_t i = 0; i < DC__COUNT(layers); i++) {
    double x[] = {1, 2, NAN, 4, 5, 6}, d[] = {1, 3, 1, 1, 1, INFINITY}, squares[] = {0, 4, NAN}, keep[] = {0.5, 0, 0};
    const int64_t shape[] = {3, 2, 1}, n[] = {3};
    const int64_t lying[] = {3, 1, 2};
    const bool deep = i == 2;
    tensor_pair tx = number_pair(x, DC_FLOAT64, deep ? shape : lying, 3),
                td = number_pair(d, DC_FLOAT64, deep ? shape : lying, 3);
    tensor_pair ts = number_pair(squares, DC_FLOAT64, n, 1), tk = number_pair(keep, DC_FLOAT64, n, 1);
    const int64_t weights[][3] = {{2, 2}, {2}, {2, 2, 1}};
    const int32_t ndims[] = {2, 1, 3};
    tensor_pair w = number_pair(NULL, DC_FLOAT64, weights[i], ndims[i]),
                b = number_pair(NULL, DC_FLOAT64, weights[i], 1);
    BOTH(dc_per_sample_norms(linalg_of(k), &layers[i], &tx.t[k], &td.t[k], 3, 0, &ts.t[k]));
    double host_copy[3];
    copy(host_copy, ts.data[1], sizeof host_copy);
    assert_true(fabs(host_copy[0] - ((const double *)ts.data[0])[0]) <= 1e-12 * host_copy[0]);
    assert_true(!isfinite(host_copy[1]) && !isfinite(host_copy[2]));
    BOTH(dc_clipped_grad_sum(linalg_of(k), &layers[i], &tx.t[k], &td.t[k], &tk.t[k], 0, &w.t[k], &b.t[k]));
    assert_true(relative_gap(&w) <= 1e-12 && relative_gap(&b) <= 1e-12); /* a NaN fails this */
    BOTH(dc_clip_factors(linalg_of(k), &ts.t[k], 2, &tk.t[k]));
    assert_true(relative_gap(&tk) <= 1e-12);
    BOTH(dc_clip_factors(linalg_of(k), &ts.t[k], INFINITY, &ts.t[k]));
    assert_true(relative_gap(&ts) == 0);
    free_pair(&tx), free_pair(&td), free_pair(&ts), free_pair(&tk), free_pair(&w), free_pair(&b);
  }
}

static void test_scratch_and_refusals(void **state) {
  (void)state;
  dc_sample_layer layer = kind(DC_SAMPLE_EMBEDDING);
  layer.rows = 7;
  begin(&layer, DC_FLOAT64, L(3, 5), L(3, 5, 4), L(7, 4));
  tensor_pair w = number_pair(NULL, DC_FLOAT64, s.weight_shape, s.weight_ndim);
  const int64_t ids[] = {7, -1, 0};
  for (int i = 0; i < 3; i++) {
    for (int k = 0; k < 2; k++) {
      copy((char *)s.x.data[k] + (size_t)12 * 8, &ids[i], 8);
    }
    BOTH(dc_per_sample_grads(linalg_of(k), &s.layer, &s.x.t[k], &s.delta.t[k], &w.t[k], NULL));
    assert_non_null(strstr(cpu_text, i == 0 ? "x[2][2] = 7, must be 0 to 6" : i == 1 ? "x[2][2] = -1" : ""));
    assert_true(relative_gap(&w) == 0); /* unchanged, or the same bits */
  }
  dc_tensor askew = s.delta.t[1];
  askew.data = (char *)askew.data + 4;
  FAILS(dc_per_sample_grads(cuda_linalg, &s.layer, &s.x.t[1], &askew, &w.t[1], NULL), DC_E_INVALID, "delta.data = ");
  askew = w.t[1];
  askew.data = (char *)askew.data + 4;
  FAILS(dc_per_sample_grads(cuda_linalg, &s.layer, &s.x.t[1], &s.delta.t[1], &askew, NULL), DC_E_INVALID,
        "weight.data = ");
  FAILS(dc_clip_factors(cuda_linalg, &askew, 1, &askew), DC_E_INVALID, "squares.data = ");
  BOTH(dc_clip_factors(linalg_of(k), &w.t[k], 0, &w.t[k]));
  free_pair(&w);
  finish();
  /* The memory of norms does not grow with the number of positions. A workspace is used, and one that is too small is
   * refused. */
  const dc_sample_layer linear = kind(DC_SAMPLE_LINEAR);
  int64_t bytes[2];
  for (int i = 0; i < 2; i++) {
    double one = 1;
    dc_tensor x = batch(&one, DC_FLOAT32, 8, i == 0 ? 1024 : 4096, 8192), n = vector(&one, DC_FLOAT32, 8);
    OK(dc_linalg_begin_query(cuda_linalg));
    OK(dc_per_sample_norms(cuda_linalg, &linear, &x, &x, 3, 0, &n));
    OK(dc_linalg_end_query(cuda_linalg, &bytes[i]));
  }
  assert_true(bytes[0] == bytes[1] && bytes[0] < 64 << 20);
  begin(&linear, DC_FLOAT32, L(5, 2, 7), L(5, 2, 9), L(9, 7));
  tensor_pair squares = number_pair(NULL, DC_FLOAT32, s.bias_shape, 1);
  void *lent;
  OK(dc_linalg_begin_query(cuda_linalg));
  OK(dc_per_sample_norms(cuda_linalg, &linear, &s.x.t[1], &s.delta.t[1], 3, 0, &squares.t[1]));
  OK(dc_linalg_end_query(cuda_linalg, &bytes[0]));
  assert_int_equal(card->ops->alloc(card, (size_t)bytes[0], DC_MEMORY_DEVICE, &lent), DC_OK);
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes[0] - 64));
  FAILS(dc_per_sample_norms(cuda_linalg, &linear, &s.x.t[1], &s.delta.t[1], 3, 0, &squares.t[1]), DC_E_BUFFER_TOO_SMALL,
        "the workspace");
  OK(dc_linalg_set_workspace(cuda_linalg, lent, bytes[0]));
  BOTH(dc_per_sample_norms(linalg_of(k), &linear, &s.x.t[k], &s.delta.t[k], 3, 0, &squares.t[k]));
  assert_true(near(&squares));
  OK(dc_linalg_set_workspace(cuda_linalg, NULL, 0));
  card->ops->free(card, lent, (size_t)bytes[0], DC_MEMORY_DEVICE);
  free_pair(&squares);
  finish();
}

#ifndef ON_CARD
/* Every call of the driver and of cuBLASLt fails in turn: whichever call reports the error, nothing leaks. */
static int use_all(void **state, bool embedding, const char *counted, const char *failing, int before) {
  dc_sample_layer layer = kind(embedding ? DC_SAMPLE_EMBEDDING : DC_SAMPLE_LINEAR);
  layer.rows = embedding ? 3 : 0;
  bool told = false;
  assert_int_equal(open_both(state), 0);
  begin(&layer, DC_FLOAT32, embedding ? L(2, 2) : L(2, 2, 2), L(2, 2, 2), embedding ? L(3, 2) : L(2, 2));
  tensor_pair w = number_pair(NULL, s.dtype, s.weight_shape, 3), q = number_pair(NULL, s.dtype, s.bias_shape, 1);
  dc_tensor *x = &s.x.t[1], *d = &s.delta.t[1], sum = w.t[1];
  sum.shape++, sum.ndim--;
  if (failing != NULL) {
    cudasim_fail(failing, before, strncmp(failing, "cublas", 6) == 0 ? DC__LT_ALLOC_FAILED : 2);
  }
  const int begun = cudasim_calls(counted);
  const dc_status status[] = {dc_per_sample_grads(cuda_linalg, &layer, x, d, &w.t[1], NULL),
                              dc_per_sample_norms(cuda_linalg, &layer, x, d, 1, 0, &q.t[1]),
                              dc_clip_factors(cuda_linalg, &q.t[1], 1, &q.t[1]),
                              dc_clipped_grad_sum(cuda_linalg, &layer, x, d, &q.t[1], 0, &sum, NULL)};
  const int calls = cudasim_calls(counted) - begun;
  for (size_t i = 0; i < DC__COUNT(status); i++) {
    told = told || status[i] != DC_OK;
  }
  if (told != (failing != NULL)) {
    fail_msg("%s, call %d: %s", failing == NULL ? "nothing" : failing, before, dc_last_error());
  }
  free_pair(&w), free_pair(&q);
  finish();
  assert_int_equal(close_both(state), 0);
  return calls;
}

static void test_every_call_fails(void **state) {
  static const char *const functions[] = {"cuLaunchKernel",          "cuMemcpyAsync",      "cuMemsetD8Async",
                                          "cuMemAllocFromPoolAsync", "cublasLtMatmul",     "cuStreamSynchronize",
                                          "cublasLtCreate",          "cuEventSynchronize", "cublasLtMatmulDescCreate"};
  (void)close_both(state);
  for (size_t f = 0; f < 2 * DC__COUNT(functions); f++) {
    const char *function = functions[f / 2];
    /* On a card, a copy to pageable host memory is complete when the call returns. Here it may run after a failed wait
     * for it, when the memory is already free. */
    const bool embedding = f % 2 == 1 && strstr(function, "Synchronize") == NULL;
    const int calls = use_all(state, embedding, function, NULL, 0);
    for (int before = 0; before < calls; before += FAILING) {
      (void)use_all(state, embedding, function, function, before);
    }
  }
  (void)open_both(state);
}
#endif

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_linear),
      TEST(test_tiles),
      TEST(test_convolutions),
      TEST(test_embeddings),
      TEST(test_norms),
      TEST(test_nonfinite_input),
      TEST(test_scratch_and_refusals),
#ifndef ON_CARD
      TEST(test_every_call_fails),
#endif
  };
  values = doubles(VALUES, 31);
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  free(values);
  return failed;
}
