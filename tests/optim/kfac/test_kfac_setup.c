/* Errors of K-FAC's setup: point 43 of the second-order conformance list. */
#include "kfac_test.h"

static void point_43_bad_options(void **state) {
  (void)state;
  dc_optimizer *made = NULL;
  const struct {
    size_t place;
    double value;
    const char *text;
  } numbers[] = {
      {offsetof(dc_kfac_options, decay), 1, "decay"},       {offsetof(dc_kfac_options, decay), -0.5, "decay"},
      {offsetof(dc_kfac_options, damping), -1, "damping"},  {offsetof(dc_kfac_options, damping), NAN, "damping"},
      {offsetof(dc_kfac_options, kl_clip), -2, "kl_clip"},  {offsetof(dc_kfac_options, kl_clip), INFINITY, "kl_clip"},
      {offsetof(dc_kfac_options, momentum), 1, "momentum"}, {offsetof(dc_kfac_options, weight_decay), -1, "decay"},
  };
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
    memcpy((char *)&options + numbers[i].place, &numbers[i].value, sizeof(double));
    FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, numbers[i].text);
    assert_null(made);
  }
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  options.factor_frequency = -1;
  FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, "factor_frequency");
  options.factor_frequency = 0;
  options.refresh_frequency = -3;
  FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, "refresh_frequency");
  options.refresh_frequency = 0;
  options.inverse = 2;
  FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, "inverse");
  options.inverse = 0;
  options.tolerated_failures = -2;
  FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, "tolerated_failures");
  options.tolerated_failures = 0;
  options.nesterov = 1;
  options.momentum = -1;
  FAILS(dc_kfac_create(linalg, NULL, &options, &made), DC_E_INVALID, "nesterov");
  FAILS(dc_kfac_create(NULL, NULL, NULL, &made), DC_E_INVALID, "linalg is NULL");
  FAILS(dc_kfac_create(linalg, NULL, NULL, NULL), DC_E_INVALID, "optimizer is NULL");
  static model m;
  open_model(&m, NULL, NULL);
  add_vector(&m, 3);
  options = (dc_kfac_options)DC_KFAC_OPTIONS_INIT;
  int64_t bytes;
  options.momentum = -1;
  OK(dc_kfac_set_group(m.optimizer, 0, &options));
  options.momentum = 0.9;
  OK(dc_kfac_set_group(m.optimizer, 0, &options));
  OK(dc_optimizer_get_save_bytes(m.optimizer, &bytes)); /* makes the state */
  options.momentum = -1;
  FAILS(dc_kfac_set_group(m.optimizer, 0, &options), DC_E_INVALID, "whether there is momentum");
  options.momentum = 0.5;
  OK(dc_kfac_set_group(m.optimizer, 0, &options));
  OK(dc_kfac_set_group(m.optimizer, 1, &options));
  FAILS(dc_kfac_set_group(m.optimizer, 3, &options), DC_E_INVALID, "group = 3");
  close_model(&m);
}

static void bad_layers(void **state) {
  (void)state;
  static model m;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT, conv = DC_SAMPLE_LAYER_INIT;
  int64_t index = -7;
  const int64_t kernel[4] = {4, 2, 3, 3}, empty[2] = {0, 3};
  layer.kind = DC_SAMPLE_LINEAR;
  conv.kind = DC_SAMPLE_CONV;
  conv.kernel[0] = conv.kernel[1] = 3;
  open_model(&m, NULL, NULL);
  int64_t w = add_matrix(&m, 3, 4), b = add_vector(&m, 3), wrong = add_vector(&m, 4),
          c = add_part(&m, 0, kernel, 4, 0, -1);
  int64_t nothing = add_part(&m, 0, empty, 2, 0, -1);
#define ADD(layer, how, weight, bias) dc_kfac_add_layer(m.optimizer, layer, how, weight, bias, &index)
  FAILS(ADD(NULL, 0, w, b), DC_E_INVALID, "layer is NULL");
  FAILS(ADD(&layer, 2, w, b), DC_E_INVALID, "approximation");
  FAILS(ADD(&layer, 0, 9, b), DC_E_NOT_FOUND, "weight = 9");
  FAILS(ADD(&layer, 0, w, -2), DC_E_NOT_FOUND, "bias = -2");
  FAILS(ADD(&layer, 0, w, wrong), DC_E_SHAPE, "bias");
  FAILS(ADD(&layer, 0, w, w), DC_E_SHAPE, "bias");
  FAILS(ADD(&layer, 0, b, -1), DC_E_SHAPE, "1 dimension, must have 2");
  FAILS(ADD(&layer, 0, c, -1), DC_E_SHAPE, "dimensions");
  FAILS(ADD(&conv, 0, w, -1), DC_E_SHAPE, "dimensions");
  FAILS(ADD(&layer, 0, nothing, -1), DC_E_SHAPE, "empty");
  conv.kernel[1] = 2;
  FAILS(ADD(&conv, 0, c, -1), DC_E_SHAPE, "kernel[1]");
  conv.kernel[1] = 3;
  conv.groups = 3;
  FAILS(ADD(&conv, 0, c, -1), DC_E_INVALID, "groups");
  conv.groups = 0;
  conv.stride[0] = -1;
  FAILS(ADD(&conv, 0, c, -1), DC_E_INVALID, "stride");
  layer.kind = DC_SAMPLE_LAYER_NORM;
  FAILS(ADD(&layer, 0, w, b), DC_E_INVALID, "kind");
  layer.kind = DC_SAMPLE_LINEAR;
  assert_int_equal(index, -7);
  OK(ADD(&layer, 0, w, b));
  assert_int_equal(index, 0);
  FAILS(ADD(&layer, 0, w, -1), DC_E_EXISTS, "weight");
  FAILS(dc_kfac_add_layer(NULL, &layer, 0, w, b, NULL), DC_E_INVALID, "optimizer is NULL");
  dc_optimizer *sgd;
  OK(dc_sgd_create(linalg, NULL, &sgd));
  FAILS(dc_kfac_add_layer(sgd, &layer, 0, 0, -1, NULL), DC_E_STATE, "kfac");
  FAILS(dc_kfac_accumulate(sgd, 0, NULL, NULL, 1), DC_E_STATE, "kfac");
  dc_optimizer_destroy(sgd);
  OK(step(&m));
  FAILS(ADD(&layer, 0, c, -1), DC_E_STATE, "state");
  close_model(&m);
}

static void bad_batches(void **state) {
  (void)state;
  static model m;
  float x[64] = {0}, g[64] = {0};
  double wide[64] = {0};
  open_model(&m, NULL, NULL);
  add_linear(&m, 0, add_matrix(&m, 3, 4), -1);
  dc_tensor tx = matrix(x, DC_FLOAT32, 5, 4), tg = matrix(g, DC_FLOAT32, 5, 3), narrow = matrix(x, DC_FLOAT32, 5, 3);
  dc_tensor fewer = matrix(g, DC_FLOAT32, 4, 3), doubled = matrix(wide, DC_FLOAT64, 5, 4),
            flat = vector(x, DC_FLOAT32, 4);
  dc_tensor none = matrix(x, DC_FLOAT32, 0, 4), nothing = matrix(g, DC_FLOAT32, 0, 3);
#define BATCH(index, x, g, scale) dc_kfac_accumulate(m.optimizer, index, x, g, scale)
  FAILS(BATCH(1, &tx, &tg, 1), DC_E_NOT_FOUND, "index = 1");
  FAILS(BATCH(-1, &tx, &tg, 1), DC_E_NOT_FOUND, "index = -1");
  FAILS(BATCH(0, NULL, &tg, 1), DC_E_INVALID, "x is NULL");
  FAILS(BATCH(0, &tx, NULL, 1), DC_E_INVALID, "delta is NULL");
  FAILS(BATCH(0, &tx, &tg, 0), DC_E_INVALID, "loss_scale");
  FAILS(BATCH(0, &tx, &tg, NAN), DC_E_INVALID, "loss_scale");
  FAILS(BATCH(0, &tx, &tg, 1e200), DC_E_INVALID, "loss_scale");
  FAILS(BATCH(0, &narrow, &tg, 1), DC_E_SHAPE, "features");
  FAILS(BATCH(0, &tx, &tx, 1), DC_E_SHAPE, "features");
  FAILS(BATCH(0, &tx, &fewer, 1), DC_E_SHAPE, "delta");
  FAILS(BATCH(0, &flat, &tg, 1), DC_E_SHAPE, "x");
  FAILS(BATCH(0, &doubled, &tg, 1), DC_E_DTYPE, "x is float64");
  OK(BATCH(0, &none, &nothing, 1)); /* an empty batch counts as a batch */
  OK(BATCH(0, &tx, &tg, 1));        /* zeros are harmless: the damping remains */
  OK(step(&m));
  close_model(&m);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_43_bad_options),
      cmocka_unit_test(bad_layers),
      cmocka_unit_test(bad_batches),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
