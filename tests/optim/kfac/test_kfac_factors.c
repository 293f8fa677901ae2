/* K-FAC's factors of linear layers at many positions and of convolutions, compared with a float64 unfolding that is
 * written out: point 46 of the second-order conformance list. */
#include "kfac_test.h"

enum { ROOM = 1 << 16 };

/* A layer with its tensors. Spatial dimensions are filled up with leading ones. */
typedef struct scene {
  const char *name;
  int32_t kind, spatial, groups;
  int64_t n, in, out; /* a linear layer's positions are size[2] */
  int64_t size[3], size_out[3], kernel[3], stride[3], padding[3], dilation[3];
} scene;

static model m;
static float input[ROOM], gradient[ROOM];
static double want_a[ROOM], want_g[ROOM];

static int64_t positions_of(const scene *s) {
  return s->size_out[0] * s->size_out[1] * s->size_out[2];
}

/* Element `row` of the inputs of a group at a sample's position; the last row is the bias's. */
static double input_at(const scene *s, int64_t sample, int64_t group, int64_t position, int64_t row) {
  int64_t each = s->in / s->groups, places = s->kernel[0] * s->kernel[1] * s->kernel[2];
  if (row == each * places) {
    return 1;
  }
  if (s->kind == DC_SAMPLE_LINEAR) {
    return input[(sample * positions_of(s) + position) * s->in + row];
  }
  int64_t channel = group * each + row / places, at = 0;
  const int64_t out[3] = {position / (s->size_out[1] * s->size_out[2]), position / s->size_out[2] % s->size_out[1],
                          position % s->size_out[2]};
  const int64_t place = row % places;
  const int64_t k[3] = {place / (s->kernel[1] * s->kernel[2]), place / s->kernel[2] % s->kernel[1],
                        place % s->kernel[2]};
  for (int d = 0; d < 3; d++) {
    int64_t i = out[d] * s->stride[d] - s->padding[d] + k[d] * s->dilation[d];
    if (i < 0 || i >= s->size[d]) {
      return 0;
    }
    at = at * s->size[d] + i;
  }
  return input[(sample * s->in + channel) * s->size[0] * s->size[1] * s->size[2] + at];
}

static double gradient_at(const scene *s, int64_t sample, int64_t group, int64_t position, int64_t row) {
  int64_t channel = group * (s->out / s->groups) + row;
  return s->kind == DC_SAMPLE_LINEAR ? gradient[(sample * positions_of(s) + position) * s->out + channel]
                                     : gradient[(sample * s->out + channel) * positions_of(s) + position];
}

typedef double (*element)(const scene *, int64_t, int64_t, int64_t, int64_t);

/* sum v v^T times factor over all samples and positions; with reduce, v is the sum over positions times `each`. */
static void naive(const scene *s, element of, int64_t order, bool reduce, double each, double factor, double *out) {
  int64_t positions = positions_of(s);
  for (int64_t g = 0; g < s->groups; g++) {
    for (int64_t i = 0; i < order; i++) {
      for (int64_t j = 0; j < order; j++) {
        double sum = 0;
        for (int64_t n = 0; n < s->n; n++) {
          double x = 0, y = 0;
          for (int64_t t = 0; t < positions; t++) {
            double a = of(s, n, g, t, i), b = of(s, n, g, t, j);
            sum += reduce ? 0 : a * b;
            x += a * each;
            y += b * each;
          }
          sum += reduce ? x * y : 0;
        }
        out[(g * order + i) * order + j] = factor * sum;
      }
    }
  }
}

/* The values have few digits, and are neither large nor tiny. */
static void convert(void *to, int32_t dtype, const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &from[i], sizeof bits);
    if (dtype == DC_FLOAT32) {
      ((float *)to)[i] = from[i];
    } else if (dtype == DC_BFLOAT16) {
      ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    } else {
      uint32_t rest = ((bits >> 13) & 0x3ffffu) - (112u << 10);
      ((uint16_t *)to)[i] = (uint16_t)(from[i] == 0 ? 0 : (bits >> 16 & 0x8000u) | rest);
    }
  }
}

/* Fills with values that are exact in all types, as are their products and sums. */
static void fill(float *x, int64_t count, uint64_t seed) {
  for (int64_t i = 0; i < count; i++) {
    x[i] = (float)floor(number(&seed) * 8) / 8;
  }
}

static int64_t shape_of(const scene *s, int64_t channels, const int64_t size[3], int64_t shape[5]) {
  int64_t count = s->n * channels * size[0] * size[1] * size[2];
  int32_t ndim = 0;
  shape[ndim++] = s->n;
  if (s->kind == DC_SAMPLE_LINEAR) {
    shape[1] = size[2];
    shape[2] = channels;
    return count;
  }
  shape[ndim++] = channels;
  for (int32_t d = 3 - s->spatial; d < 3; d++) {
    shape[ndim++] = size[d];
  }
  return count;
}

static int64_t add_scene_layer(const scene *s, int32_t approximation, bool bias, int64_t *weight) {
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  int64_t shape[5] = {s->out, s->in / s->groups}, index;
  layer.kind = s->kind;
  layer.groups = s->groups;
  for (int32_t d = 0; d < s->spatial; d++) {
    int32_t from = 3 - s->spatial + d;
    shape[2 + d] = layer.kernel[d] = s->kernel[from];
    layer.stride[d] = s->stride[from];
    layer.padding[d] = s->padding[from];
    layer.dilation[d] = s->dilation[from];
  }
  *weight = add_part(&m, 0, shape, 2 + s->spatial, 0, -1);
  int64_t b = bias ? add_vector(&m, s->out) : -1;
  OK(dc_kfac_add_layer(m.optimizer, &layer, approximation, *weight, b, &index));
  return index;
}

static void check(const scene *s, int32_t approximation, bool bias, int32_t x_dtype, int32_t g_dtype) {
  static float x[ROOM], g[ROOM];
  bool reduce = approximation == DC_KFAC_REDUCE;
  int64_t x_shape[5], g_shape[5], weight, positions = positions_of(s);
  int64_t xs = shape_of(s, s->in, s->size, x_shape), gs = shape_of(s, s->out, s->size_out, g_shape);
  fill(input, xs, 71);
  fill(gradient, gs, 72);
  convert(x, x_dtype, input, xs);
  convert(g, g_dtype, gradient, gs);
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  open_model(&m, NULL, &options);
  int64_t layer = add_scene_layer(s, approximation, bias, &weight);
  dc_tensor tx = tensor_of(x, x_dtype, s->spatial + 2, 0, 0, 0, 0), tg = tx;
  tx.shape = x_shape;
  tx.ndim = tg.ndim = s->kind == DC_SAMPLE_LINEAR ? 3 : s->spatial + 2;
  tg.shape = g_shape;
  tg.dtype = g_dtype;
  tg.data = g;
  OK(dc_kfac_accumulate(m.optimizer, layer, &tx, &tg, 0.5));
  OK(step(&m));
  int64_t a = s->in / s->groups * s->kernel[0] * s->kernel[1] * s->kernel[2] + (bias ? 1 : 0);
  int64_t o = s->out / s->groups;
  double n = (double)s->n, t = (double)positions;
  naive(s, input_at, a, reduce, 1 / t, 1 / (reduce ? n : n * t), want_a);
  naive(s, gradient_at, o, reduce, 1, 0.25 / n, want_g);
  print_message("%s, %s, bias %d, %s and %s\n", s->name, reduce ? "reduce" : "expand", bias, dc_dtype_name(x_dtype),
                dc_dtype_name(g_dtype));
  near(piece(&m, weight, "factor_a"), want_a, s->groups * a * a, 1e-6);
  near(piece(&m, weight, "factor_g"), want_g, s->groups * o * o, 1e-6);
  close_model(&m);
}

static void check_all(const scene *s) {
  for (int32_t approximation = 0; approximation < 2; approximation++) {
    for (int bias = 0; bias < 2; bias++) {
      check(s, approximation, bias == 1, DC_FLOAT32, DC_FLOAT32);
      check(s, approximation, bias == 1, DC_BFLOAT16, DC_BFLOAT16);
      check(s, approximation, bias == 1, DC_FLOAT32, DC_FLOAT16);
      check(s, approximation, bias == 1, DC_FLOAT16, DC_FLOAT32);
    }
  }
}

#define ONES \
  { 1, 1, 1 }
#define NONE \
  { 0, 0, 0 }

static void point_46_linear_positions(void **state) {
  (void)state;
  const scene wide = {"linear", DC_SAMPLE_LINEAR, 0, 1, 3, 150, 20, {1, 1, 5}, {1, 1, 5}, ONES, ONES, NONE, ONES};
  const scene one = {"linear, one position", DC_SAMPLE_LINEAR, 0, 1, 9, 4, 3, ONES, ONES, ONES, ONES, NONE, ONES};
  check(&wide, DC_KFAC_EXPAND, true, DC_FLOAT32, DC_FLOAT32); /* more rows than a block of products has */
  check(&wide, DC_KFAC_REDUCE, true, DC_BFLOAT16, DC_FLOAT32);
  check_all(&one);
}

static void point_46_convolutions(void **state) {
  (void)state;
  const scene scenes[] = {
      {"1-d", DC_SAMPLE_CONV, 1, 1, 3, 2, 3, {1, 1, 9}, {1, 1, 5}, {1, 1, 3}, {1, 1, 2}, {0, 0, 1}, ONES},
      {"2-d", DC_SAMPLE_CONV, 2, 1, 2, 3, 4, {1, 6, 5}, {1, 6, 5}, {1, 3, 3}, ONES, {0, 1, 1}, ONES},
      {"2-d strided and dilated",
       DC_SAMPLE_CONV,
       2,
       1,
       3,
       2,
       2,
       {1, 9, 8},
       {1, 3, 4},
       {1, 3, 2},
       {1, 3, 2},
       {0, 2, 1},
       {1, 2, 3}},
      {"2-d in groups", DC_SAMPLE_CONV, 2, 2, 2, 4, 6, {1, 4, 4}, {1, 4, 4}, {1, 3, 1}, ONES, {0, 1, 0}, ONES},
      {"depthwise", DC_SAMPLE_CONV, 2, 3, 2, 3, 3, {1, 5, 5}, {1, 3, 3}, {1, 3, 3}, ONES, NONE, ONES},
      {"3-d", DC_SAMPLE_CONV, 3, 1, 2, 2, 2, {3, 4, 3}, {2, 2, 3}, {2, 3, 1}, {1, 2, 1}, {0, 1, 0}, ONES},
      {"1 x 1", DC_SAMPLE_CONV, 2, 1, 3, 5, 2, {1, 2, 3}, {1, 2, 3}, ONES, ONES, NONE, ONES},
  };
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; i++) {
    check_all(&scenes[i]);
  }
}

/* More samples than fit in a panel of patches, so the batch is unfolded in pieces. */
static void panels(void **state) {
  (void)state;
  enum { N = 96, C = 8, S = 16, K = 3 };
  const int64_t shape[4] = {2, C, K, K}, x_shape[4] = {N, C, S, S}, g_shape[4] = {N, 2, S, S};
  float *x = calloc(N * C * S * S, sizeof *x), *g = calloc(N * 2 * S * S, sizeof *g);
  fill(x, N * C * S * S, 80);
  fill(g, N * 2 * S * S, 81);
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_CONV;
  layer.kernel[0] = layer.kernel[1] = K;
  layer.padding[0] = layer.padding[1] = 1;
  float *factors[2];
  static model models[2];
  for (int way = 0; way < 2; way++) { /* all at once, and one sample at a time */
    open_model(&models[way], NULL, &options);
    add_part(&models[way], 0, shape, 4, 0, -1);
    OK(dc_kfac_add_layer(models[way].optimizer, &layer, DC_KFAC_EXPAND, 0, -1, NULL));
    int64_t each = way == 0 ? N : 1;
    for (int64_t n = 0; n < N; n += each) {
      dc_tensor tx = tensor_of(x + n * C * S * S, DC_FLOAT32, 4, each, x_shape[1], S, S);
      dc_tensor tg = tensor_of(g + n * 2 * S * S, DC_FLOAT32, 4, each, g_shape[1], S, S);
      OK(dc_kfac_accumulate(models[way].optimizer, 0, &tx, &tg, 1));
    }
    OK(step(&models[way]));
    factors[way] = piece(&models[way], 0, "factor_a");
  }
  for (int64_t i = 0; i < C * K * K * C * K * K; i++) {
    assert_true(fabsf(factors[0][i] - factors[1][i]) < 1e-6f);
  }
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  OK(dc_optimizer_get_stats(models[0].optimizer, &stats));
  int64_t unfolded = (int64_t)N * S * S * C * K * K * (int64_t)sizeof(float);
  assert_true(stats.scratch_bytes < unfolded); /* the unfolded batch never exists as a whole */
  close_model(&models[0]);
  close_model(&models[1]);
  free(x);
  free(g);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(point_46_linear_positions),
                                     cmocka_unit_test(point_46_convolutions), cmocka_unit_test(panels)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
