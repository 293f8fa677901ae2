/* Per-sample gradients: points 30 to 39 of the second-order conformance list, in their order, compared with the
 * definitions in float64. tests/python/test_linalg.py and tests/torch/test_torchium.py compare with autograd. */
#include "linalg_test.h"

enum { MOST = 20000 };

/* One case: a layer with its tensors, and each sample's gradients by definition. */
typedef struct scene {
  dc_sample_layer layer;
  dc_tensor x, delta;
  int64_t samples, weights, biases; /* elements of one sample */
  double *input, *gradient;
  double weight[MOST], bias[MOST];
} scene;

static scene s;

static void begin(int32_t kind, int64_t inputs, int64_t outputs, int64_t samples) {
  memset(&s, 0, sizeof s);
  dc_sample_layer_init(&s.layer, sizeof s.layer);
  s.layer.kind = kind;
  s.samples = samples;
  s.input = doubles(inputs, 31);
  s.gradient = doubles(outputs, 32);
}

static void end(void) {
  free(s.input);
  free(s.gradient);
}

static dc_tensor part(double *data, bool bias, bool per_sample) {
  int64_t count = bias ? s.biases : s.weights;
  static int64_t shape[2][8];
  int64_t *to = shape[bias];
  int32_t ndim = 0;
  if (per_sample) {
    to[ndim++] = s.samples;
  }
  if (bias || s.layer.kind == DC_SAMPLE_LAYER_NORM || s.layer.kind == DC_SAMPLE_RMS_NORM) {
    to[ndim++] = count;
  } else if (s.layer.kind == DC_SAMPLE_CONV) {
    int32_t spatial = s.x.ndim - 2;
    to[ndim++] = s.delta.shape[1];
    to[ndim++] = s.x.shape[1] / (s.layer.groups > 0 ? s.layer.groups : 1);
    for (int32_t i = 0; i < spatial; i++) {
      to[ndim++] = s.layer.kernel[i];
    }
  } else if (s.layer.kind == DC_SAMPLE_EMBEDDING) {
    to[ndim++] = s.layer.rows;
    to[ndim++] = s.delta.shape[s.delta.ndim - 1];
  } else {
    to[ndim++] = s.delta.shape[s.delta.ndim - 1];
    to[ndim++] = s.x.shape[s.x.ndim - 1];
  }
  dc_tensor t = DC_TENSOR_INIT;
  t.data = data;
  t.shape = to;
  t.ndim = ndim;
  t.dtype = DC_FLOAT64;
  return t;
}

/* Checks the scene's gradients, norms and sums against its definition. */
static void check_scene(void) {
  static double w[MOST], b[MOST], sum_w[MOST], sum_b[MOST], squares[64], factors[64];
  bool has_bias = s.biases > 0;
  dc_tensor tw = part(w, false, true), tb = part(b, true, true);
  OK(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, has_bias ? &tb : NULL));
  assert_true(largest_gap(w, s.weight, s.samples * s.weights) < 1e-12);
  assert_true(largest_gap(b, s.bias, s.samples * s.biases) < 1e-12);
  dc_tensor tq = vector(squares, DC_FLOAT64, s.samples), tf = vector(factors, DC_FLOAT64, s.samples);
  for (int32_t parts = 1; parts <= (has_bias ? 3 : 1); parts++) {
    for (int64_t n = 0; n < s.samples; n++) {
      squares[n] = 100;
    }
    OK(dc_per_sample_norms(linalg, &s.layer, &s.x, &s.delta, parts, 1, &tq));
    for (int64_t n = 0; n < s.samples; n++) {
      double want = 100;
      for (int64_t i = 0; i < s.weights && (parts & DC_PART_WEIGHT) != 0; i++) {
        want += s.weight[n * s.weights + i] * s.weight[n * s.weights + i];
      }
      for (int64_t i = 0; i < s.biases && (parts & DC_PART_BIAS) != 0; i++) {
        want += s.bias[n * s.biases + i] * s.bias[n * s.biases + i];
      }
      assert_true(fabs(squares[n] - want) < 1e-11 * want);
    }
  }
  OK(dc_per_sample_norms(linalg, &s.layer, &s.x, &s.delta, 1, 0, &tq));
  OK(dc_clip_factors(linalg, &tq, 1.0, &tf));
  tw = part(sum_w, false, false);
  tb = part(sum_b, true, false);
  for (int accumulate = 0; accumulate < 2; accumulate++) {
    for (int64_t i = 0; i < MOST; i++) {
      sum_w[i] = sum_b[i] = accumulate == 1 ? 1 : NAN;
    }
    OK(dc_clipped_grad_sum(linalg, &s.layer, &s.x, &s.delta, &tf, accumulate, &tw, has_bias ? &tb : NULL));
    for (int64_t i = 0; i < s.weights + s.biases; i++) {
      double want = accumulate;
      for (int64_t n = 0; n < s.samples; n++) {
        want += factors[n] * (i < s.weights ? s.weight[n * s.weights + i] : s.bias[n * s.biases + i - s.weights]);
      }
      assert_true(fabs((i < s.weights ? sum_w[i] : sum_b[i - s.weights]) - want) < 1e-11);
    }
  }
  OK(dc_clipped_grad_sum(linalg, &s.layer, &s.x, &s.delta, NULL, 0, &tw, NULL)); /* gives the batch's gradient */
  for (int64_t i = 0; i < s.weights; i++) {
    double want = 0;
    for (int64_t n = 0; n < s.samples; n++) {
      want += s.weight[n * s.weights + i];
    }
    assert_true(fabs(sum_w[i] - want) < 1e-11);
  }
}

static void linear(int64_t n, int64_t t, int64_t in, int64_t out, int32_t ndim) {
  begin(DC_SAMPLE_LINEAR, n * t * in, n * t * out, n);
  s.x = ndim == 2 ? matrix(s.input, DC_FLOAT64, n, in) : batch(s.input, DC_FLOAT64, n, t, in);
  s.delta = ndim == 2 ? matrix(s.gradient, DC_FLOAT64, n, out) : batch(s.gradient, DC_FLOAT64, n, t, out);
  if (ndim == 4) {
    s.x = tensor_of(s.input, DC_FLOAT64, 4, n, t / 2, 2, in);
    s.delta = tensor_of(s.gradient, DC_FLOAT64, 4, n, t / 2, 2, out);
  }
  s.weights = in * out;
  s.biases = out;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t p = i * t; p < (i + 1) * t; p++) {
      for (int64_t o = 0; o < out; o++) {
        s.bias[i * out + o] += s.gradient[p * out + o];
        for (int64_t j = 0; j < in; j++) {
          s.weight[(i * out + o) * in + j] += s.gradient[p * out + o] * s.input[p * in + j];
        }
      }
    }
  }
  check_scene();
  end();
}

/* 2, 3 and 4 dimensions; norms computed from positions and from gradients; T = 1; batches of 0 and 1. */
static void test_30_32_linear(void **state) {
  (void)state;
  linear(5, 1, 7, 9, 2);
  linear(5, 1, 7, 9, 3);
  linear(4, 3, 8, 9, 3);   /* 2 T T < i o: from the positions */
  linear(2, 150, 8, 9, 3); /* more positions than a tile has */
  linear(2, 300, 40, 70, 3);
  linear(3, 6, 5, 4, 4);
  linear(1, 2, 3, 3, 3);
  linear(0, 2, 3, 3, 3);
  linear(2, 0, 3, 3, 3);
}

static void conv(int32_t spatial, int64_t n, int64_t c, int64_t o, int32_t groups, const int64_t *size,
                 const int64_t *kernel, const int64_t *stride, const int64_t *padding, const int64_t *dilation,
                 const int64_t *size_out) {
  int64_t pixels = 1, places = 1, taps = 1;
  for (int32_t i = 0; i < spatial; i++) {
    pixels *= size[i];
    places *= size_out[i];
    taps *= kernel[i];
  }
  begin(DC_SAMPLE_CONV, n * c * pixels, n * o * places, n);
  static int64_t sx[5], sd[5];
  sx[0] = sd[0] = n;
  sx[1] = c;
  sd[1] = o;
  s.layer.groups = groups;
  int64_t zs[3] = {1, 1, 1}, zo[3] = {1, 1, 1}, zk[3] = {1, 1, 1}, zt[3] = {1, 1, 1}, zp[3] = {0}, zd[3] = {1, 1, 1};
  for (int32_t i = 0; i < spatial; i++) {
    sx[2 + i] = size[i];
    sd[2 + i] = size_out[i];
    s.layer.kernel[i] = kernel[i];
    s.layer.stride[i] = stride[i];
    s.layer.padding[i] = padding[i];
    s.layer.dilation[i] = dilation[i];
    int32_t z = 3 - spatial + i;
    zs[z] = size[i], zo[z] = size_out[i], zk[z] = kernel[i], zt[z] = stride[i], zp[z] = padding[i], zd[z] = dilation[i];
  }
  s.x = tensor_of(s.input, DC_FLOAT64, spatial + 2, 0, 0, 0, 0);
  s.x.shape = sx;
  s.delta = s.x;
  s.delta.data = s.gradient;
  s.delta.shape = sd;
  int64_t cg = c / groups, og = o / groups;
  s.weights = o * cg * taps;
  s.biases = o;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t f = 0; f < o; f++) {
      for (int64_t place = 0; place < places; place++) {
        double d = s.gradient[(i * o + f) * places + place];
        int64_t at[3] = {place / (zo[1] * zo[2]), place / zo[2] % zo[1], place % zo[2]};
        s.bias[i * o + f] += d;
        for (int64_t tap = 0; tap < cg * taps; tap++) {
          int64_t k = tap % taps, channel = f / og * cg + tap / taps;
          int64_t kk[3] = {k / (zk[1] * zk[2]), k / zk[2] % zk[1], k % zk[2]};
          int64_t pixel = 0;
          bool inside = true;
          for (int j = 0; j < 3; j++) {
            int64_t p = at[j] * zt[j] - zp[j] + kk[j] * zd[j];
            inside = inside && p >= 0 && p < zs[j];
            pixel = pixel * zs[j] + p;
          }
          s.weight[(i * o + f) * cg * taps + tap] += inside ? d * s.input[(i * c + channel) * pixels + pixel] : 0;
        }
      }
    }
  }
  check_scene();
  end();
}

#define L(...) ((const int64_t[]){__VA_ARGS__})

static void test_33_convolutions(void **state) {
  (void)state;
  conv(2, 3, 2, 4, 1, L(5, 6), L(3, 3), L(1, 1), L(1, 1), L(1, 1), L(5, 6));
  conv(2, 2, 4, 6, 2, L(7, 5), L(3, 2), L(2, 1), L(0, 1), L(1, 2), L(3, 5));
  conv(2, 2, 3, 3, 3, L(4, 4), L(3, 3), L(1, 1), L(1, 1), L(1, 1), L(4, 4)); /* depthwise */
  conv(2, 2, 3, 5, 1, L(4, 3), L(1, 1), L(1, 1), L(0, 0), L(1, 1), L(4, 3));
  conv(2, 2, 2, 2, 1, L(4, 4), L(4, 2), L(1, 1), L(1, 0), L(1, 1), L(4, 4)); /* 'same' with even kernels */
  conv(1, 3, 2, 3, 1, L(9), L(3), L(2), L(1), L(1), L(5));
  conv(3, 2, 2, 3, 1, L(3, 4, 3), L(2, 2, 2), L(1, 2, 1), L(0, 1, 0), L(1, 1, 2), L(2, 2, 1));
  conv(2, 1, 2, 40, 1, L(3, 3), L(3, 3), L(1, 1), L(1, 1), L(1, 1), L(3, 3)); /* norms from positions */
  conv(2, 0, 2, 4, 1, L(3, 3), L(3, 3), L(1, 1), L(1, 1), L(1, 1), L(3, 3));
}

static void test_34_embedding(void **state) {
  (void)state;
  enum { SAMPLES = 3, T = 5, ROWS = 7, D = 40 };
  int64_t ids[SAMPLES * T] = {1, 1, 3, 0, 6, 2, 2, 2, 2, 2, 5, 0, 0, 6, 5};
  begin(DC_SAMPLE_EMBEDDING, 1, SAMPLES * T * D, SAMPLES);
  s.layer.rows = ROWS;
  s.layer.has_padding_row = 1; /* row 0 */
  s.x = matrix(ids, DC_INT64, SAMPLES, T);
  s.delta = batch(s.gradient, DC_FLOAT64, SAMPLES, T, D);
  s.weights = ROWS * D;
  for (int64_t p = 0; p < SAMPLES * T; p++) {
    for (int64_t i = 0; i < D && ids[p] != 0; i++) {
      s.weight[(p / T * ROWS + ids[p]) * D + i] += s.gradient[p * D + i];
    }
  }
  check_scene();
  int32_t narrow[SAMPLES * T];
  for (int i = 0; i < SAMPLES * T; i++) {
    narrow[i] = (int32_t)ids[i];
  }
  s.x = matrix(narrow, DC_INT32, SAMPLES, T);
  check_scene();
  double w[SAMPLES * ROWS * D], before[SAMPLES * ROWS * D];
  memset(w, 0x5a, sizeof w);
  memset(before, 0x5a, sizeof w);
  s.x = matrix(ids, DC_INT64, SAMPLES, T);
  dc_tensor tw = part(w, false, true), tb = vector(w, DC_FLOAT64, 1);
  ids[12] = ROWS;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID, "x[2][2] = 7, must be 0 to 6");
  ids[12] = -1;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID, "x[2][2] = -1");
  assert_memory_equal(w, before, sizeof w);
  ids[12] = 0;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, &tb), DC_E_INVALID, "has no bias");
  s.layer.padding_row = ROWS;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID,
        "padding_row = 7, must be 0 to rows - 1");
  s.layer.has_padding_row = 0;
  s.layer.padding_row = 1;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID, "has_padding_row is 0");
  s.layer.has_padding_row = 2;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID, "has_padding_row = 2");
  s.layer.has_padding_row = 0;
  s.layer.padding_row = 0;
  s.layer.reserved0 = 1;
  FAILS(dc_per_sample_grads(linalg, &s.layer, &s.x, &s.delta, &tw, NULL), DC_E_INVALID, "reserved0 = 1, must be 0");
  s.layer.reserved0 = 0;
  dc_tensor floats = matrix(s.gradient, DC_FLOAT64, SAMPLES, T);
  FAILS(dc_per_sample_grads(linalg, &s.layer, &floats, &s.delta, &tw, NULL), DC_E_DTYPE, "int64 or int32");
  end();
  begin(DC_SAMPLE_EMBEDDING, 1, 1, 2); /* empty sequences */
  s.layer.rows = 3;
  s.x = matrix(NULL, DC_INT64, 2, 0);
  s.delta = batch(NULL, DC_FLOAT64, 2, 0, 4);
  s.weights = 12;
  check_scene();
  end();
}

static void norm(int32_t kind, int64_t n, int64_t t, int64_t d, double eps) {
  begin(kind, n * t * d, n * t * d, n);
  s.layer.eps = eps;
  s.layer.features = d;
  s.x = tensor_of(s.input, DC_FLOAT64, 4, n, t, 2, d / 2);
  s.delta = tensor_of(s.gradient, DC_FLOAT64, 4, n, t, 2, d / 2);
  s.weights = d;
  s.biases = kind == DC_SAMPLE_LAYER_NORM ? d : 0;
  for (int64_t row = 0; row < n * t; row++) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < d && kind == DC_SAMPLE_LAYER_NORM; i++) {
      mean += s.input[row * d + i] / (double)d;
    }
    for (int64_t i = 0; i < d; i++) {
      square += pow(s.input[row * d + i] - mean, 2) / (double)d;
    }
    for (int64_t i = 0; i < d; i++) {
      double g = s.gradient[row * d + i];
      s.weight[row / t * d + i] += g * (s.input[row * d + i] - mean) / sqrt(square + eps);
      s.bias[row / t * d + i] += kind == DC_SAMPLE_LAYER_NORM ? g : 0;
    }
  }
  check_scene();
  end();
}

static void test_35_norms(void **state) {
  (void)state;
  norm(DC_SAMPLE_LAYER_NORM, 3, 4, 6, 1e-5);
  norm(DC_SAMPLE_LAYER_NORM, 2, 1, 2, 0.5);
  norm(DC_SAMPLE_RMS_NORM, 3, 4, 6, 1e-6);
}

static void test_36_37_clipping(void **state) {
  (void)state;
  double squares[6] = {0, 4, 0.25, NAN, INFINITY, 1e300}, factors[6];
  dc_tensor ts = vector(squares, DC_FLOAT64, 6), tf = vector(factors, DC_FLOAT64, 6);
  OK(dc_clip_factors(linalg, &ts, 1, &tf));
  const double want[6] = {1, 1 / (2 + 1e-6), 1, 0, 0, 1e-150};
  assert_true(largest_gap(factors, want, 6) < 1e-15);
  OK(dc_clip_factors(linalg, &ts, INFINITY, &tf));
  assert_true(factors[1] == 1 && factors[3] == 0);
  FAILS(dc_clip_factors(linalg, &ts, 0, &tf), DC_E_INVALID, "max_norm = 0");
  FAILS(dc_clip_factors(linalg, &ts, -1, &tf), DC_E_INVALID, "max_norm = -1");
  FAILS(dc_clip_factors(linalg, &ts, NAN, &tf), DC_E_INVALID, "max_norm = nan");
  /* A NaN stays in its sample, and a factor of 0 leaves its sample out. */
  double x[] = {1, 2, NAN, 4, 5, 6}, d[] = {1, 1, 1, 1, 1, INFINITY}, sum[4], bias[2], norms[3], keep[3] = {1, 0, 0};
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_LINEAR;
  dc_tensor tx = matrix(x, DC_FLOAT64, 3, 2), td = matrix(d, DC_FLOAT64, 3, 2), tn = vector(norms, DC_FLOAT64, 3),
            tk = vector(keep, DC_FLOAT64, 3), tw = matrix(sum, DC_FLOAT64, 2, 2), tb = vector(bias, DC_FLOAT64, 2);
  OK(dc_per_sample_norms(linalg, &layer, &tx, &td, 3, 0, &tn));
  assert_true(norms[0] == 12 && isnan(norms[1]) && !isfinite(norms[2]));
  OK(dc_clipped_grad_sum(linalg, &layer, &tx, &td, &tk, 0, &tw, &tb));
  assert_true(sum[0] == 1 && sum[1] == 2 && sum[2] == 1 && sum[3] == 2 && bias[0] == 1 && bias[1] == 1);
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 0, 0, &tn), DC_E_INVALID, "parts = 0");
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 4, 0, &tn), DC_E_INVALID, "parts = 4");
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 2, &tn), DC_E_INVALID, "accumulate = 2");
  FAILS(dc_per_sample_norms(linalg, NULL, &tx, &td, 1, 0, &tn), DC_E_INVALID, "layer is NULL");
  layer.kind = 9;
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tn), DC_E_INVALID, "layer.kind = 9");
  layer.kind = DC_SAMPLE_CONV;
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tn), DC_E_SHAPE, "x has 2 dimensions");
  layer.kind = DC_SAMPLE_LAYER_NORM;
  layer.eps = -1;
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tn), DC_E_INVALID, "layer.eps = -1");
  layer.eps = 0;
  layer.features = 3;
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &td, 1, 0, &tn), DC_E_INVALID, "features = 3");
  dc_tensor other = matrix(d, DC_FLOAT64, 2, 2);
  FAILS(dc_per_sample_norms(linalg, &layer, &tx, &other, 1, 0, &tn), DC_E_SHAPE, "delta has length 2");
}

/* T = 4096: products of positions are computed in tiles, so little scratch memory is needed. */
static void test_39_memory(void **state) {
  (void)state;
  enum { T = 4096, I = 8192 };
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_LINEAR;
  float one = 1;
  dc_tensor x = batch(&one, DC_FLOAT32, 8, T, I), d = batch(&one, DC_FLOAT32, 8, T, I), n = vector(&one, DC_FLOAT32, 8);
  int64_t bytes = 0;
  OK(dc_linalg_begin_query(linalg));
  OK(dc_per_sample_norms(linalg, &layer, &x, &d, 3, 0, &n));
  OK(dc_linalg_end_query(linalg, &bytes));
  assert_true(bytes < 1 << 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_30_32_linear), cmocka_unit_test(test_33_convolutions), cmocka_unit_test(test_34_embedding),
      cmocka_unit_test(test_35_norms),     cmocka_unit_test(test_36_37_clipping),  cmocka_unit_test(test_39_memory),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
