/* K-FAC's steps: ranks, frequencies, failures and saved states: points 16, 44 and 46 to 49 of the second-order
 * conformance list. */
#include <pthread.h>

#include "kfac_test.h"
#include "support/steps.h"

/* Three layers, of which one has a bias and one is a grouped convolution, and a vector without a layer. */
enum { N = 12, I = 6, H = 5, O = 4, C = 4, S = 5, STEPS = 7, ALL = 5 };

typedef struct data {
  float *x, *h, *g, *image, *maps;
} data;

static data data_of(uint64_t seed) {
  return (data){floats(N * I, seed), floats(N * H, seed + 1), floats(N * O, seed + 2), floats(N * C * S, seed + 3),
                floats(N * C * S, seed + 4)};
}

static void free_data(data *d) {
  free(d->x);
  free(d->h);
  free(d->g);
  free(d->image);
  free(d->maps);
}

/* How ranks share parameters: whole, or in parts. */
typedef struct partition {
  int32_t rank, world;
  bool parts;
} partition;

static void add_cut(model *m, partition c, const int64_t *shape, int32_t ndim) {
  int64_t n = 1;
  for (int32_t d = 0; d < ndim; d++) {
    n *= shape[d];
  }
  int64_t each = (n + c.world - 1) / c.world, begin = c.rank * each < n ? c.rank * each : n;
  int64_t end = begin + each < n ? begin + each : n;
  add_part(m, 0, shape, ndim, c.parts ? begin : 0, c.parts ? end - begin : n);
}

static void build(model *m, dc_comm *comm, const dc_kfac_options *options, partition c) {
  const int64_t first[2] = {H, I}, bias = H, second[2] = {O, H}, conv[3] = {C, C / 2, 3}, alone = 11;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  open_model(m, comm, options);
  OK(dc_optimizer_set_lr(m->optimizer, 0, 0.1));
  add_cut(m, c, first, 2);
  add_cut(m, c, &bias, 1);
  add_cut(m, c, second, 2);
  add_cut(m, c, conv, 3);
  add_cut(m, c, &alone, 1);
  add_linear(m, DC_KFAC_EXPAND, 0, 1);
  add_linear(m, DC_KFAC_EXPAND, 2, -1);
  layer.kind = DC_SAMPLE_CONV;
  layer.groups = 2;
  layer.kernel[0] = 3;
  layer.padding[0] = 1;
  OK(dc_kfac_add_layer(m->optimizer, &layer, DC_KFAC_EXPAND, 3, -1, NULL));
}

/* Accumulates samples [begin, begin + n) of a batch. */
static dc_status feed(const model *m, const data *d, int64_t begin, int64_t n) {
  dc_tensor image = tensor_of(d->image + begin * C * S, DC_FLOAT32, 3, n, C, S, 0);
  dc_tensor maps = tensor_of(d->maps + begin * C * S, DC_FLOAT32, 3, n, C, S, 0);
  dc_status status = batch_of(m, 0, d->x + begin * I, d->h + begin * H, n, I, H, N);
  status = status != DC_OK ? status : batch_of(m, 1, d->h + begin * H, d->g + begin * O, n, H, O, N);
  return status != DC_OK ? status : dc_kfac_accumulate(m->optimizer, 2, &image, &maps, N);
}

static dc_status train(model *m, int from, int to, int64_t begin, int64_t n) {
  for (int k = from; k < to; k++) {
    data d = data_of((uint64_t)(10 * k + 100));
    dc_status status = feed(m, &d, begin, n);
    status = status != DC_OK ? status : step(m);
    free_data(&d);
    if (status != DC_OK) {
      return status;
    }
  }
  return DC_OK;
}

static dc_kfac_options usual(void) {
  dc_kfac_options options = DC_KFAC_OPTIONS_INIT;
  options.damping = 0.03;
  options.factor_frequency = 2;
  options.refresh_frequency = 4;
  options.weight_decay = 0.01;
  return options;
}

static const partition alone = {0, 1, false};

/* ---- ranks ---- */

typedef struct rank {
  model m;
  dc_comm *comm;
  partition c;
  bool share;
  dc_status status;
  int64_t owned;
  char text[256];
} rank;

static void *run_rank(void *arg) {
  rank *r = arg;
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  dc_kfac_options options = usual();
  build(&r->m, r->comm, &options, r->c);
  int64_t n = r->share ? N / r->c.world : N;
  r->status = train(&r->m, 0, STEPS, r->share ? r->c.rank * n : 0, n);
  snprintf(r->text, sizeof r->text, "%s", dc_last_error());
  if (dc_optimizer_get_stats(r->m.optimizer, &stats) == DC_OK) {
    r->owned = stats.owned_blocks;
  }
  dc_optimizer_destroy(r->m.optimizer);
  dc_comm_destroy(r->comm);
  return NULL;
}

/* 46, 47: one, two and three ranks. If each has the whole batch, the bits are those of one rank, however parameters are
 * split. If each has a share of it, only rounding differs. The layers are divided among owners. */
static void point_47_ranks(void **state) {
  (void)state;
  static model one;
  static rank all[3];
  const dc_kfac_options options = usual();
  build(&one, NULL, &options, alone);
  OK(train(&one, 0, STEPS, 0, N));
  for (int way = 0; way < 12; way++) {
    int32_t world = way / 4 + 1;
    bool share = way % 2 == 1, parts = way / 2 % 2 == 1;
    dc_comm *comms[3];
    pthread_t threads[3];
    int64_t owned = 0, least = 3;
    dc_comm_options limits = DC_COMM_OPTIONS_INIT;
    limits.timeout_ns = INT64_C(60000000000);
    OK(dc_comm_create_threads(world, &limits, comms));
    for (int32_t r = 0; r < world; r++) {
      all[r] = (rank){.comm = comms[r], .c = {r, world, parts}, .share = share};
      assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &all[r]), 0);
    }
    for (int32_t r = 0; r < world; r++) {
      pthread_join(threads[r], NULL);
    }
    for (int32_t r = 0; r < world; r++) {
      if (all[r].status != DC_OK) {
        fail_msg("rank %d of %d: %s", r, world, all[r].text);
      }
      owned += all[r].owned;
      least = all[r].owned < least ? all[r].owned : least;
      for (int i = 0; i < ALL; i++) {
        int64_t each = (one.parts[i] + world - 1) / world, begin = parts ? r * each : 0;
        for (int64_t k = 0; k < all[r].m.parts[i]; k++) {
          float want = one.weight[i][begin + k], got = all[r].m.weight[i][k];
          if (share ? !(fabsf(got - want) < 1e-4f) : got != want) {
            fail_msg("way %d, rank %d: parameter %d [%d] is %.9g, must be %.9g", way, r, i, (int)k, (double)got,
                     (double)want);
          }
        }
      }
    }
    assert_int_equal(owned, 3);
    assert_true(least >= 1); /* the costliest layer first, each to the rank with the least work */
  }
  close_model(&one);
}

/* ---- frequencies ---- */

/* 40, 49: factors and decompositions change only when they are due, and stay in use until then. */
static void point_49_frequencies(void **state) {
  (void)state;
  static model m;
  const dc_kfac_options options = usual();
  float factor[(I + 1) * (I + 1)], vectors[(I + 1) * (I + 1)];
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  build(&m, NULL, &options, alone);
  for (int k = 0; k < 9; k++) {
    float before[H * I];
    memcpy(before, m.weight[0], sizeof before);
    OK(train(&m, k, k + 1, 0, N));
    bool factors_stay = memcmp(factor, piece(&m, 0, "factor_a"), sizeof factor) == 0;
    bool vectors_stay = memcmp(vectors, piece(&m, 0, "vectors_a"), sizeof vectors) == 0;
    assert_true(k == 0 || factors_stay == (k % 2 != 0));
    assert_true(k == 0 || vectors_stay == (k % 4 != 0));
    memcpy(factor, piece(&m, 0, "factor_a"), sizeof factor);
    memcpy(vectors, piece(&m, 0, "vectors_a"), sizeof vectors);
    float largest = 0;
    for (int i = 0; i < H * I; i++) {
      largest = fmaxf(largest, fabsf(m.weight[0][i] - before[i]));
    }
    assert_true(largest > 0 && largest < 1); /* a refresh causes no jump */
  }
  OK(dc_optimizer_get_stats(m.optimizer, &stats));
  assert_int_equal(stats.steps, 9);
  assert_int_equal(stats.blocks, 3);
  assert_int_equal(stats.refreshes, 3 * 2 * 3); /* steps 1, 5 and 9, two factors of three layers */
  assert_int_equal(stats.failed_refreshes, 0);
  assert_int_equal(steps_of(m.optimizer), 9);
  close_model(&m);
}

/* ---- what is not finite ---- */

/* 44: a gradient, an input or an output's gradient that is not finite is an error, and changes nothing; so are finite
 * ones whose products would overflow. */
static void point_44_not_finite(void **state) {
  (void)state;
  static model m, other;
  const dc_kfac_options options = usual();
  const float bad[3] = {NAN, INFINITY, -INFINITY};
  size_t bytes;
  build(&m, NULL, &options, alone);
  build(&other, NULL, &options, alone);
  OK(train(&m, 0, 4, 0, N));
  OK(train(&other, 0, 4, 0, N));
  void *before = saved(&m, &bytes);
  for (int i = 0; i < 3; i++) {
    data d = data_of(500);
    float kept = m.grad[2][3];
    m.grad[2][3] = bad[i];
    FAILS(step(&m), DC_E_NOT_FINITE, "grads[2]");
    m.grad[2][3] = kept;
    d.x[17] = bad[i];
    FAILS(feed(&m, &d, 0, N), DC_E_NOT_FINITE, "x has a NaN or an infinity at element 17");
    d.x[17] = 1;
    d.h[20] = bad[i];
    FAILS(feed(&m, &d, 0, N), DC_E_NOT_FINITE, "delta has a NaN or an infinity at element 20");
    d.h[20] = 3e19f;
    FAILS(feed(&m, &d, 0, N), DC_E_NOT_FINITE, "products of delta");
    free_data(&d);
  }
  void *after = saved(&m, &bytes);
  assert_memory_equal(before, after, bytes);
  assert_memory_equal(m.weight, other.weight, sizeof m.weight);
  OK(train(&m, 4, 8, 0, N)); /* later steps are as if nothing had happened */
  OK(train(&other, 4, 8, 0, N));
  assert_memory_equal(m.weight, other.weight, sizeof m.weight);
  free(before);
  free(after);
  close_model(&m);
  close_model(&other);
}

/* Batches of a step that is left out count for the next step. */
static void point_44_left_out(void **state) {
  (void)state;
  static model both, one;
  const dc_kfac_options options = usual();
  const dc_tensor found_inf = {.struct_size = sizeof found_inf, .data = &(float){1}, .dtype = DC_FLOAT32};
  data first = data_of(100), second = data_of(110);
  build(&both, NULL, &options, alone);
  build(&one, NULL, &options, alone);
  OK(feed(&both, &first, 0, N));
  OK(feed(&both, &second, 0, N));
  OK(step(&both));
  OK(feed(&one, &first, 0, N));
  OK(dc_optimizer_set_loss_scale(one.optimizer, NULL, &found_inf));
  OK(step(&one));
  OK(dc_optimizer_set_loss_scale(one.optimizer, NULL, NULL));
  OK(feed(&one, &second, 0, N));
  OK(step(&one));
  assert_memory_equal(both.weight, one.weight, sizeof both.weight);
  assert_memory_equal(piece(&both, 0, "factor_g"), piece(&one, 0, "factor_g"), H * H * sizeof(float));
  free_data(&first);
  free_data(&second);
  close_model(&both);
  close_model(&one);
}

/* 16: if a factor cannot be decomposed, its last decomposition stays in use. The fourth failure in a row is an error,
 * and changes nothing. */
static void point_16_failed_decompositions(void **state) {
  (void)state;
  static model m;
  dc_kfac_options options = usual();
  dc_optimizer_stats stats = DC_OPTIMIZER_STATS_INIT;
  options.refresh_frequency = 1;
  options.factor_frequency = 1000; /* so that a value written into the state stays there */
  float vectors[(I + 1) * (I + 1)];
  build(&m, NULL, &options, alone);
  OK(train(&m, 0, 2, 0, N));
  memcpy(vectors, piece(&m, 0, "vectors_a"), sizeof vectors);
  float *factor = piece(&m, 0, "factor_a"), kept = factor[3];
  for (int round = 0; round < 2; round++) {
    factor[3] = NAN;
    for (int k = 0; k < 3; k++) {
      OK(train(&m, 2, 3, 0, N));
      assert_memory_equal(vectors, piece(&m, 0, "vectors_a"), sizeof vectors);
      assert_true(isfinite(m.weight[0][0]));
    }
    size_t bytes;
    void *before = saved(&m, &bytes);
    for (int k = 0; k < 2; k++) {
      FAILS(train(&m, 2, 3, 0, N), DC_E_NOT_CONVERGED, "factor_a of parameter 0");
    }
    void *after = saved(&m, &bytes);
    assert_memory_equal(before, after, bytes);
    free(before);
    free(after);
    factor[3] = kept;
    OK(train(&m, 2, 3, 0, N)); /* a success resets the count */
  }
  OK(dc_optimizer_get_stats(m.optimizer, &stats));
  assert_int_equal(stats.failed_refreshes, 6);
  close_model(&m);
}

/* 16, 44: several factors fail at once, and others succeed: then no factor changes, and accumulated batches stay. The
 * step can be made again. */
static void point_16_44_all_or_none(void **state) {
  (void)state;
  static model m, other;
  dc_kfac_options options = usual();
  size_t bytes;
  options.refresh_frequency = options.factor_frequency = 1;
  options.tolerated_failures = -1;
  build(&m, NULL, &options, alone);
  build(&other, NULL, &options, alone);
  OK(train(&m, 0, 3, 0, N));
  OK(train(&other, 0, 3, 0, N));
  float *factor = piece(&m, 3, "factor_g"), kept = factor[1];
  data d = data_of(900);
  OK(feed(&m, &d, 0, N));
  OK(feed(&other, &d, 0, N));
  factor[1] = factor[2] = NAN; /* in both triangles */
  void *before = saved(&m, &bytes);
  for (int k = 0; k < 2; k++) {
    FAILS(step(&m), DC_E_NOT_CONVERGED, "factor_g of parameter 3");
    void *after = saved(&m, &bytes);
    assert_memory_equal(before, after, bytes);
    assert_memory_equal(m.weight, other.weight, sizeof m.weight);
    free(after);
  }
  factor[1] = factor[2] = kept;
  OK(step(&m));
  OK(step(&other));
  assert_memory_equal(m.weight, other.weight, sizeof m.weight);
  void *one = saved(&m, &bytes), *two = saved(&other, &bytes);
  assert_memory_equal(one, two, bytes);
  free(one);
  free(two);
  free(before);
  free_data(&d);
  close_model(&m);
  close_model(&other);
}

/* ---- saved states ---- */

/* 48: a run that is saved and continues in another optimizer has the same bits, also between refreshes. A batch that
 * the other optimizer got before does not count. */
static void point_48_save_and_load(void **state) {
  (void)state;
  static model m, other;
  const dc_kfac_options options = usual();
  for (int at = 1; at < 6; at++) {
    size_t bytes;
    build(&m, NULL, &options, alone);
    build(&other, NULL, &options, alone);
    OK(train(&m, 0, at, 0, N));
    void *memory = saved(&m, &bytes);
    data left = data_of(77);
    OK(feed(&other, &left, 0, N));
    free_data(&left);
    memcpy(other.weight, m.weight, sizeof m.weight);
    OK(dc_optimizer_load(other.optimizer, memory, (int64_t)bytes));
    OK(train(&m, at, 10, 0, N));
    OK(train(&other, at, 10, 0, N));
    assert_memory_equal(m.weight, other.weight, sizeof m.weight);
    close_model(&other);
    open_model(&other, NULL, &options); /* without the layers the state does not fit */
    for (int64_t i = 0; i < m.count; i++) {
      add_vector(&other, m.parts[i]);
    }
    assert_true(dc_optimizer_load(other.optimizer, memory, (int64_t)bytes) == DC_E_SHAPE);
    free(memory);
    close_model(&m);
    close_model(&other);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(point_47_ranks),
      cmocka_unit_test(point_49_frequencies),
      cmocka_unit_test(point_44_not_finite),
      cmocka_unit_test(point_44_left_out),
      cmocka_unit_test(point_16_failed_decompositions),
      cmocka_unit_test(point_16_44_all_or_none),
      cmocka_unit_test(point_48_save_and_load),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
