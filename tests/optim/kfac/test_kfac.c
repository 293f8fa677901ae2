/* K-FAC's mathematics: points 43, 44 and 46 of the second-order conformance list, compared with the definitions in
 * float64. test_kfac_factors.c has the factors of convolutions, test_kfac_step.c ranks, failures and saved states. */
#include "kfac_test.h"

static model m;

/* Options without momentum or clipping, with lr 1, to show only what is under test. */
static dc_kfac_options bare(void) {
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  options.momentum = -1;
  options.kl_clip = -1;
  options.refresh_frequency = 1;
  return options;
}

static void open_bare(dc_kfac_options options) {
  open_model(&m, NULL, &options);
  OK(dc_optimizer_set_lr(m.optimizer, 0, 1));
}

/* Solves a x = b by Gaussian elimination with pivots; overwrites a, and b with x. */
static void solve(double *a, double *b, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    int64_t best = k;
    for (int64_t i = k + 1; i < n; i++) {
      best = fabs(a[i * n + k]) > fabs(a[best * n + k]) ? i : best;
    }
    for (int64_t j = 0; j < n; j++) {
      double t = a[k * n + j];
      a[k * n + j] = a[best * n + j];
      a[best * n + j] = t;
    }
    double t = b[k];
    b[k] = b[best];
    b[best] = t;
    for (int64_t i = 0; i < n; i++) {
      double f = i == k ? 0 : a[i * n + k] / a[k * n + k];
      for (int64_t j = k; j < n && i != k; j++) {
        a[i * n + j] -= f * a[k * n + j];
      }
      b[i] -= f * b[k];
    }
  }
  for (int64_t k = 0; k < n; k++) {
    b[k] /= a[k * n + k];
  }
}

/* (G x A + damping)^-1 g for g [go, ao], written out; or with both factors shifted first. */
static void direction(const double *a, int64_t ao, const double *g, int64_t go, double shift_a, double shift_g,
                      double damping, const double *grad, double *out) {
  int64_t n = ao * go;
  double *big = doubles(n * n, 0);
  for (int64_t r = 0; r < n; r++) {
    for (int64_t c = 0; c < n; c++) {
      double x = g[r / ao * go + c / ao] + (r / ao == c / ao ? shift_g : 0);
      double y = a[r % ao * ao + c % ao] + (r % ao == c % ao ? shift_a : 0);
      big[r * n + c] = x * y + (r == c ? damping : 0);
    }
  }
  memcpy(out, grad, (size_t)n * sizeof *out);
  solve(big, out, n);
  free(big);
}

/* For one sample, A x G is exactly the Fisher matrix of a linear layer. */
static void point_46_one_sample(void **state) {
  (void)state;
  enum { I = 5, O = 3 };
  float *x = floats(I, 1), *delta = floats(O, 2);
  open_bare(bare());
  int64_t w = add_matrix(&m, O, I), layer = add_linear(&m, DC_KFAC_EXPAND, w, -1);
  OK(batch_of(&m, layer, x, delta, 1, I, O, 1));
  OK(step(&m));
  const float *a = piece(&m, w, "factor_a"), *g = piece(&m, w, "factor_g");
  for (int r = 0; r < O * I; r++) {
    for (int c = 0; c < O * I; c++) {
      double fisher = (double)delta[r / I] * x[r % I] * delta[c / I] * x[c % I];
      assert_true(fabs((double)g[r / I * O + c / I] * a[r % I * I + c % I] - fisher) < 1e-6);
    }
  }
  close_model(&m);
  free(x);
  free(delta);
}

/* In a deep linear net with squared error, over the net's own distribution of targets (a finite one of the same
 * covariance), A x G is the Fisher matrix again. There inputs and gradients of every layer are independent. */
static void point_46_deep_linear_net(void **state) {
  (void)state;
  enum { N = 6, D0 = 4, D1 = 3, D2 = 2, SAMPLES = N * 2 * D2 };
  float *data = floats(N * D0, 3), *w1 = floats(D1 * D0, 4), *w2 = floats(D2 * D1, 5);
  float x0[SAMPLES * D0], g1[SAMPLES * D1], x1[SAMPLES * D1], g2[SAMPLES * D2];
  for (int s = 0; s < SAMPLES; s++) { /* residuals +-sqrt(D2) e_k: mean 0, covariance I */
    int n = s / (2 * D2), k = s / 2 % D2;
    double e = (s % 2 == 0 ? 1 : -1) * sqrt(D2);
    for (int i = 0; i < D0; i++) {
      x0[s * D0 + i] = data[n * D0 + i];
    }
    for (int i = 0; i < D1; i++) {
      double sum = 0;
      for (int j = 0; j < D0; j++) {
        sum += (double)w1[i * D0 + j] * x0[s * D0 + j];
      }
      x1[s * D1 + i] = (float)sum;
      g1[s * D1 + i] = (float)(w2[k * D1 + i] * e);
    }
    for (int i = 0; i < D2; i++) {
      g2[s * D2 + i] = i == k ? (float)e : 0;
    }
  }
  open_bare(bare());
  int64_t p1 = add_matrix(&m, D1, D0), p2 = add_matrix(&m, D2, D1);
  OK(batch_of(&m, add_linear(&m, DC_KFAC_EXPAND, p1, -1), x0, g1, SAMPLES, D0, D1, 1));
  OK(batch_of(&m, add_linear(&m, DC_KFAC_EXPAND, p2, -1), x1, g2, SAMPLES, D1, D2, 1));
  OK(step(&m));
  const struct {
    int64_t param;
    const float *x, *g;
    int in, out;
  } layers[2] = {{p1, x0, g1, D0, D1}, {p2, x1, g2, D1, D2}};
  for (int l = 0; l < 2; l++) {
    int in = layers[l].in, out = layers[l].out;
    const float *a = piece(&m, layers[l].param, "factor_a"), *g = piece(&m, layers[l].param, "factor_g");
    for (int r = 0; r < in * out; r++) {
      for (int c = 0; c < in * out; c++) {
        double fisher = 0;
        for (int s = 0; s < SAMPLES; s++) {
          fisher += (double)layers[l].g[s * out + r / in] * layers[l].x[s * in + r % in] *
                    layers[l].g[s * out + c / in] * layers[l].x[s * in + c % in] / SAMPLES;
        }
        assert_true(fabs((double)g[r / in * out + c / in] * a[r % in * in + c % in] - fisher) < 1e-5);
      }
    }
  }
  close_model(&m);
  free(data);
  free(w1);
  free(w2);
}

/* A bias is the weight of an input that is always one. */
static void point_46_bias_is_homogeneous(void **state) {
  (void)state;
  enum { N = 7, I = 4, O = 3 };
  float *x = floats(N * I, 6), *delta = floats(N * O, 7), longer[N * (I + 1)];
  for (int n = 0; n < N; n++) {
    memcpy(longer + n * (I + 1), x + n * I, I * sizeof *x);
    longer[n * (I + 1) + I] = 1;
  }
  static model plain;
  dc_kfac_options options = bare();
  open_model(&plain, NULL, &options);
  OK(dc_optimizer_set_lr(plain.optimizer, 0, 1));
  open_bare(options);
  int64_t whole = add_matrix(&plain, O, I + 1);
  int64_t w = add_matrix(&m, O, I), b = add_vector(&m, O);
  for (int i = 0; i < O; i++) {
    for (int j = 0; j <= I; j++) {
      *(j < I ? &m.weight[w][i * I + j] : &m.weight[b][i]) = plain.weight[whole][i * (I + 1) + j];
      *(j < I ? &m.grad[w][i * I + j] : &m.grad[b][i]) = plain.grad[whole][i * (I + 1) + j];
    }
  }
  OK(batch_of(&plain, add_linear(&plain, DC_KFAC_EXPAND, whole, -1), longer, delta, N, I + 1, O, N));
  OK(batch_of(&m, add_linear(&m, DC_KFAC_EXPAND, w, b), x, delta, N, I, O, N));
  OK(step(&plain));
  OK(step(&m));
  double want[(I + 1) * (I + 1)];
  mean_products(x, N, I, true, 1, want);
  near(piece(&m, w, "factor_a"), want, (I + 1) * (I + 1), 1e-6);
  for (int i = 0; i < O; i++) {
    for (int j = 0; j <= I; j++) {
      double got = (double)(j < I ? m.weight[w][i * I + j] : m.weight[b][i]);
      assert_true(fabs(got - (double)plain.weight[whole][i * (I + 1) + j]) < 1e-3);
    }
  }
  close_model(&plain);
  close_model(&m);
  free(x);
  free(delta);
}

/* One step of a layer with a bias, and the expected result. */
enum { DN = 9, DI = 4, DO = 3 };
typedef struct one_step {
  double a[(DI + 1) * (DI + 1)], g[DO * DO], grad[DO * (DI + 1)], moved[DO * (DI + 1)];
} one_step;

static void run_one(dc_kfac_options options, double lr, one_step *s) {
  float *x = floats(DN * DI, 8), *delta = floats(DN * DO, 9);
  open_model(&m, NULL, &options);
  OK(dc_optimizer_set_lr(m.optimizer, 0, lr));
  int64_t w = add_matrix(&m, DO, DI), b = add_vector(&m, DO);
  mean_products(x, DN, DI, true, 1, s->a);
  mean_products(delta, DN, DO, false, 4, s->g);
  for (int i = 0; i < DO * (DI + 1); i++) {
    int r = i / (DI + 1), c = i % (DI + 1);
    s->grad[i] = c < DI ? m.grad[w][r * DI + c] : m.grad[b][r];
    s->moved[i] = c < DI ? m.weight[w][r * DI + c] : m.weight[b][r];
  }
  OK(batch_of(&m, add_linear(&m, DC_KFAC_EXPAND, w, b), x, delta, DN, DI, DO, 2));
  OK(step(&m));
  for (int i = 0; i < DO * (DI + 1); i++) {
    int r = i / (DI + 1), c = i % (DI + 1);
    s->moved[i] -= (double)(c < DI ? m.weight[w][r * DI + c] : m.weight[b][r]);
  }
  close_model(&m);
  free(x);
  free(delta);
}

static double trace(const double *a, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) {
    sum += a[i * n + i];
  }
  return sum;
}

/* The two inversions differ in their damping, as the header describes. */
static void point_46_damping(void **state) {
  (void)state;
  one_step s;
  double want[DO * (DI + 1)], other[DO * (DI + 1)];
  for (double gamma = 1e-3; gamma < 1; gamma *= 10) {
    dc_kfac_options options = bare();
    options.damping = gamma;
    run_one(options, 1, &s);
    direction(s.a, DI + 1, s.g, DO, 0, 0, gamma, s.grad, want);
    assert_true(largest_gap(s.moved, want, DO * (DI + 1)) < 1e-3 * (1 + 0.01 / gamma));
    options.inverse = DC_KFAC_FACTORED;
    run_one(options, 1, &s);
    double pi = sqrt(trace(s.a, DI + 1) / (DI + 1) / (trace(s.g, DO) / DO));
    double on_a = pi * sqrt(gamma), on_g = sqrt(gamma) / pi;
    direction(s.a, DI + 1, s.g, DO, on_a, on_g, 0, s.grad, other);
    assert_true(largest_gap(s.moved, other, DO * (DI + 1)) < 1e-3);
    assert_true(largest_gap(want, other, DO * (DI + 1)) > 1e-2);
    /* what pi is for: the two terms that damping adds have one trace, and its product is the damping */
    double first = on_a * (DI + 1) * trace(s.g, DO), second = on_g * DO * trace(s.a, DI + 1);
    assert_true(fabs(first - second) < 1e-9 * first && fabs(on_a * on_g - gamma) < 1e-12);
  }
}

/* nu = min(1, sqrt(kl_clip / |lr^2 sum of direction gradient|)). */
static void point_46_kl_clip(void **state) {
  (void)state;
  one_step s;
  double want[DO * (DI + 1)];
  for (double clip = 1e-4; clip < 1e6; clip *= 100) {
    dc_kfac_options options = bare();
    options.damping = 0.1;
    options.kl_clip = clip;
    double lr = 0.5, sum = 0;
    run_one(options, lr, &s);
    direction(s.a, DI + 1, s.g, DO, 0, 0, 0.1, s.grad, want);
    for (int i = 0; i < DO * (DI + 1); i++) {
      sum += want[i] * s.grad[i];
    }
    double nu = fmin(1, sqrt(clip / (lr * lr * sum)));
    for (int i = 0; i < DO * (DI + 1); i++) {
      assert_true(fabs(s.moved[i] - lr * nu * want[i]) < 1e-4);
    }
  }
}

/* The mean of the first updates, then a running average. */
static void point_46_running_average(void **state) {
  (void)state;
  enum { N = 5, I = 3, O = 2 };
  for (int none = 0; none < 2; none++) {
    dc_kfac_options options = bare();
    options.decay = none == 1 ? -1 : 0.75;
    open_bare(options);
    int64_t w = add_matrix(&m, O, I), layer = add_linear(&m, DC_KFAC_EXPAND, w, -1);
    double a[I * I] = {0}, now[I * I];
    for (int k = 1; k <= 8; k++) {
      float *x = floats(N * I, (uint64_t)(20 + k)), *delta = floats(N * O, (uint64_t)(40 + k));
      double c = none == 1 ? 0 : fmin(0.75, 1 - 1.0 / k);
      OK(batch_of(&m, layer, x, delta, N, I, O, N));
      OK(step(&m));
      mean_products(x, N, I, false, 1, now);
      for (int i = 0; i < I * I; i++) {
        a[i] = c * a[i] + (1 - c) * now[i];
      }
      near(piece(&m, w, "factor_a"), a, I * I, 1e-6); /* so it depends on the data, which Torchium's does not */
      free(x);
      free(delta);
    }
    close_model(&m);
  }
}

/* Any number of micro-batches makes one batch, and the result does not depend on the loss scale. */
static void micro_batches(void **state) {
  (void)state;
  enum { N = 12, I = 3, O = 2 };
  float *x = floats(N * I, 60), *delta = floats(N * O, 61), results[3][O * I];
  const float factors[3] = {1, 1, 1.0f / 65536};
  for (int way = 0; way < 3; way++) {
    open_bare(bare());
    int64_t w = add_matrix(&m, O, I), layer = add_linear(&m, DC_KFAC_EXPAND, w, -1);
    for (int i = 0; i < N * O; i++) {
      delta[i] *= factors[way];
    }
    int pieces = way == 1 ? 3 : 1;
    for (int i = 0; i < pieces; i++) {
      OK(batch_of(&m, layer, x + i * N / pieces * I, delta + i * N / pieces * O, N / pieces, I, O,
                  1 / (double)factors[way]));
    }
    OK(step(&m));
    memcpy(results[way], m.weight[w], sizeof results[way]);
    close_model(&m);
  }
  for (int i = 0; i < O * I; i++) {
    assert_true(fabsf(results[0][i] - results[1][i]) < 1e-4f);
    assert_true(results[0][i] == results[2][i]);
  }
  free(x);
  free(delta);
}

/* Parameters without a layer, and layers without a batch so far, take SGD's steps to the last bit, with its weight
 * decay. Point 43: lr 0 changes no weight. */
static void point_43_without_a_layer(void **state) {
  (void)state;
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  dc_sgd_options plain = DC_SGD_OPTIONS_INIT;
  options.momentum = plain.momentum = 0.8;
  options.weight_decay = plain.weight_decay = 0.1;
  options.nesterov = plain.nesterov = 1;
  static model sgd;
  open_model(&m, NULL, &options);
  memset(&sgd, 0, sizeof sgd);
  OK(dc_sgd_create(linalg, &plain, &sgd.optimizer));
  for (int i = 0; i < 2; i++) {
    model *x = i == 0 ? &m : &sgd;
    add_matrix(x, 7, 5);
    add_vector(x, 11);
    OK(dc_optimizer_set_lr(x->optimizer, 0, 0.1));
  }
  add_linear(&m, DC_KFAC_EXPAND, 0, -1);
  for (int k = 0; k < 4; k++) {
    OK(dc_optimizer_set_lr(m.optimizer, 0, k == 2 ? 0 : 0.1));
    OK(dc_optimizer_set_lr(sgd.optimizer, 0, k == 2 ? 0 : 0.1));
    OK(step(&m));
    OK(step(&sgd));
    assert_memory_equal(m.weight, sgd.weight, sizeof m.weight);
  }
  close_model(&m);
  close_model(&sgd);
}

/* A frozen weight or bias: its gradient counts as zero, and it does not change. */
static void frozen(void **state) {
  (void)state;
  for (int which = 0; which < 2; which++) {
    float *x = floats(DN * DI, 8), *delta = floats(DN * DO, 9), before[2][DO * DI];
    open_bare(bare());
    int64_t index[2] = {add_matrix(&m, DO, DI), add_vector(&m, DO)};
    memcpy(before[0], m.weight[0], sizeof before[0]);
    memcpy(before[1], m.weight[1], sizeof before[1]);
    int64_t layer = add_linear(&m, DC_KFAC_EXPAND, index[0], index[1]);
    m.grads[which] = (dc_tensor)DC_TENSOR_INIT;
    OK(batch_of(&m, layer, x, delta, DN, DI, DO, 2));
    OK(step(&m));
    double a[(DI + 1) * (DI + 1)], g[DO * DO], grad[DO * (DI + 1)], want[DO * (DI + 1)];
    mean_products(x, DN, DI, true, 1, a);
    mean_products(delta, DN, DO, false, 4, g);
    for (int i = 0; i < DO * (DI + 1); i++) {
      int r = i / (DI + 1), c = i % (DI + 1);
      grad[i] = (c < DI) == (which == 0) ? 0 : (double)(c < DI ? m.grad[0][r * DI + c] : m.grad[1][r]);
    }
    direction(a, DI + 1, g, DO, 0, 0, 1e-3, grad, want);
    for (int i = 0; i < DO * (DI + 1); i++) {
      int r = i / (DI + 1), c = i % (DI + 1);
      double moved =
          c < DI ? (double)before[0][r * DI + c] - m.weight[0][r * DI + c] : (double)before[1][r] - m.weight[1][r];
      assert_true(fabs(moved - ((c < DI) == (which == 0) ? 0 : want[i])) < 2e-2);
    }
    close_model(&m);
    free(x);
    free(delta);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_46_one_sample),
      cmocka_unit_test(point_46_deep_linear_net),
      cmocka_unit_test(point_46_bias_is_homogeneous),
      cmocka_unit_test(point_46_damping),
      cmocka_unit_test(point_46_kl_clip),
      cmocka_unit_test(point_46_running_average),
      cmocka_unit_test(micro_batches),
      cmocka_unit_test(point_43_without_a_layer),
      cmocka_unit_test(frozen),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
