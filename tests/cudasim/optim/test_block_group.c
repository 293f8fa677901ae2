/* How much work a step of Muon, Shampoo, SOAP and K-FAC gives a device. Blocks and matrices of one shape are batched,
 * so the number of launches, products and waits must not grow with theirs. On the simulated driver only. */
#include <math.h>

#include "harness.h"

#include "cudasim.h"
#include "kernels/kernels.h"

enum { LAYERS = 6, ROWS = 7, COLS = 5, EACH = ROWS * COLS, SAMPLES = 5 };

typedef struct count {
  int launches, products, copies, waits, decompositions;
} count;

static count counted(void) {
  return (count){.launches = cudasim_calls("cuLaunchKernel"),
                 .products = cudasim_calls("cublasLtMatmul"),
                 .copies = cudasim_calls("cuMemcpyAsync"),
                 .waits = cudasim_calls("cuEventSynchronize"),
                 .decompositions = cudasim_calls("cusolverDnXsyevd") + cudasim_calls("cusolverDnXsyevBatched")};
}

/* A model of layers of one shape; each parameter's weight is followed by its gradient. */
typedef struct model {
  dc_device *device;
  dc_linalg *linalg;
  dc_optimizer *optimizer;
  int params;
  float *memory;
} model;

static void move(const model *m, void *to, const void *from, size_t bytes) {
  dc__stream_copy(m->device->internal_stream, to, from, bytes);
  dc__device_sync_internal(m->device, NULL);
}

static void open_model(model *m, const char *device, int params) {
  float values[2 * EACH];
  *m = (model){.params = params};
  assert_int_equal(dc_device_open(device, NULL, &m->device), DC_OK);
  assert_int_equal(dc_linalg_create(m->device, NULL, &m->linalg), DC_OK);
  void *memory;
  assert_int_equal(m->device->ops->alloc(m->device, (size_t)params * sizeof values, DC_MEMORY_DEVICE, &memory), DC_OK);
  m->memory = memory;
  for (int p = 0; p < params; p++) {
    for (int i = 0; i < 2 * EACH; i++) {
      values[i] = (float)((i * 37 + p * 11) % 29 - 14) / 8;
    }
    move(m, m->memory + (size_t)p * 2 * EACH, values, sizeof values);
  }
}

static void add_params(const model *m) {
  const int64_t shape[2] = {ROWS, COLS};
  for (int p = 0; p < m->params; p++) {
    assert_int_equal(dc_optimizer_add_param(m->optimizer, 0, shape, 2, 0, EACH, DC_FLOAT32, NULL), DC_OK);
  }
}

/* skipped: the parameter without a gradient. */
static count step(const model *m, int skipped) {
  const int64_t each = EACH;
  dc_tensor weights[LAYERS], grads[LAYERS];
  for (int p = 0; p < m->params; p++) {
    weights[p] = flat(m->memory + (size_t)p * 2 * EACH, &each, DC_FLOAT32);
    grads[p] = flat(m->memory + (size_t)p * 2 * EACH + EACH, &each, p == skipped ? DC_DTYPE_NONE : DC_FLOAT32);
  }
  const count before = counted();
  const dc_status status = dc_optimizer_step(m->optimizer, weights, grads, sizeof *weights, m->params, 1);
  if (status != DC_OK) {
    fail_msg("%s", dc_last_error());
  }
  const count after = counted();
  return (count){after.launches - before.launches, after.products - before.products, after.copies - before.copies,
                 after.waits - before.waits, after.decompositions - before.decompositions};
}

static void close_model(model *m) {
  dc_optimizer_destroy(m->optimizer);
  m->device->ops->free(m->device, m->memory, (size_t)m->params * 2 * EACH * sizeof(float), DC_MEMORY_DEVICE);
  dc_linalg_destroy(m->linalg);
  dc_device_destroy(m->device);
}

/* most: upper bounds. */
static void check(const char *what, int params, const count *c, count most) {
  if (c->launches > most.launches || c->products > most.products || c->copies > most.copies || c->waits > most.waits ||
      c->decompositions > most.decompositions) {
    fail_msg("%s, %d parameters: %d launches, %d products, %d copies, %d waits, %d decompositions", what, params,
             c->launches, c->products, c->copies, c->waits, c->decompositions);
  }
}

/* A parameter that is left out of a step is a step behind from then on, and is no longer batched with the others. */
static void test_one_that_is_left_out(void **state) {
  (void)state;
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  float weights[2][LAYERS][2 * EACH];
  o.beta2 = 0.9;
  o.eps_rel = 1e-3;
  for (int k = 0; k < 2; k++) {
    model m;
    open_model(&m, k == 0 ? "cpu" : "cuda", LAYERS);
    assert_int_equal(dc_shampoo_create(m.linalg, NULL, &o, &m.optimizer), DC_OK);
    add_params(&m);
    for (int i = 1; i <= 4; i++) {
      (void)step(&m, i == 2 ? 2 : -1);
    }
    move(&m, weights[k], m.memory, sizeof weights[k]);
    close_model(&m);
  }
  for (int i = 0; i < LAYERS * 2 * EACH; i++) {
    const float here = (&weights[0][0][0])[i], there = (&weights[1][0][0])[i];
    assert_true(fabsf(here - there) <= 2e-4f);
  }
}

/* Batched work, plus two launches a parameter that read its gradient and write its direction. Roots of one size are one
 * batch, however many they are. */
static void test_shampoo(void **state) {
  (void)state;
  dc_shampoo_options o = DC_SHAMPOO_OPTIONS_INIT;
  o.precondition_frequency = 3;
  o.momentum = 0.9;
  for (int params = 1; params <= LAYERS; params += LAYERS - 1) {
    const count plain = {12 + 2 * params, 4, 1, 2, 0};
    const count due = {28 + 2 * params, 6, 13, 10, 2};
    model m;
    open_model(&m, "cuda", params);
    assert_int_equal(dc_shampoo_create(m.linalg, NULL, &o, &m.optimizer), DC_OK);
    add_params(&m);
    for (int i = 1; i <= 6; i++) {
      const count c = step(&m, -1);
      if (i > 1) {
        check("Shampoo", params, &c, i % 3 == 0 ? due : plain);
      }
    }
    close_model(&m);
  }
}

/* Two launches a parameter, and three products and two copies for each of the five iterations of all batched
 * parameters. Unless products are in float32, the parameters are cast to bfloat16 and back. The only wait is for the
 * scan of the gradients; on a stream there is none. */
static void check_muon(int params, bool narrow, bool streams) {
  const dc_muon_options o = {.struct_size = sizeof o, .precision = narrow ? DC_BFLOAT16 : DC_FLOAT32};
  const count most = {(narrow ? 11 : 9) + 2 * params, 15, streams ? 10 : 11, streams ? 0 : 1, 0};
  dc_stream *stream = NULL;
  model m;
  open_model(&m, "cuda", params);
  if (streams) {
    assert_int_equal(dc_stream_create(m.device, &stream), DC_OK);
  }
  assert_int_equal(dc_muon_create(m.linalg, NULL, &o, &m.optimizer), DC_OK);
  assert_int_equal(dc_optimizer_set_stream(m.optimizer, stream), DC_OK);
  add_params(&m);
  for (int i = 1; i <= 3; i++) {
    const count c = step(&m, -1);
    if (i > 1) {
      check("Muon", params, &c, most);
    }
  }
  dc_optimizer_destroy(m.optimizer);
  dc_stream_destroy(stream);
  m.optimizer = NULL;
  close_model(&m);
}

static void test_muon(void **state) {
  (void)state;
  for (int params = 1; params <= LAYERS; params += LAYERS - 1) {
    for (int way = 0; way < 4; way++) {
      check_muon(params, way / 2 != 0, way % 2 != 0);
    }
  }
}

static dc_status create(const model *m, int kind, dc_optimizer **optimizer) {
  const dc_muon_options muon = {.struct_size = sizeof muon, .precision = kind == 1 ? DC_BFLOAT16 : DC_FLOAT32};
  dc_shampoo_options shampoo = DC_SHAMPOO_OPTIONS_INIT;
  dc_soap_options soap = DC_SOAP_OPTIONS_INIT;
  shampoo.precondition_frequency = soap.precondition_frequency = 1;
  shampoo.tolerance = kind == 3 ? 0.1 : 0; /* computes roots from earlier bases */
  return kind < 2   ? dc_muon_create(m->linalg, NULL, &muon, optimizer)
         : kind < 4 ? dc_shampoo_create(m->linalg, NULL, &shampoo, optimizer)
                    : dc_soap_create(m->linalg, NULL, &soap, optimizer);
}

/* Ranks have different numbers of blocks but must have the same bits. So algorithms are searched for a full slice and
 * for one alignment, however many blocks there are. */
static void test_algorithms_do_not_depend_on_the_number(void **state) {
  (void)state;
  for (int kind = 0; kind < 5; kind++) {
    for (int params = 1; params <= LAYERS; params++) {
      const int all = cudasim_calls("cublasLtMatmulAlgoGetHeuristic"), full = cudasim_searches(32, 16);
      model m;
      open_model(&m, "cuda", params);
      assert_int_equal(create(&m, kind, &m.optimizer), DC_OK);
      add_params(&m);
      for (int i = 0; i < 3; i++) {
        (void)step(&m, -1);
      }
      close_model(&m);
      const int searched = cudasim_calls("cublasLtMatmulAlgoGetHeuristic") - all;
      if (searched == 0 || cudasim_searches(32, 16) - full != searched) {
        fail_msg("kind %d, %d parameters: %d searches, %d of them for 32 matrices at 16 bytes", kind, params, searched,
                 cudasim_searches(32, 16) - full);
      }
    }
  }
}

/* Two sizes of bases take a few launches each, and no more waits than a step in which none is due. */
static void test_soap(void **state) {
  (void)state;
  dc_soap_options o = DC_SOAP_OPTIONS_INIT;
  o.precondition_frequency = 3;
  for (int params = 1; params <= LAYERS; params += LAYERS - 1) {
    const count plain = {6 + 2 * params, 6, 2, 2, 0};
    const count due = {24 + 2 * params, 12, 6, 2, 0};
    model m;
    open_model(&m, "cuda", params);
    assert_int_equal(dc_soap_create(m.linalg, NULL, &o, &m.optimizer), DC_OK);
    add_params(&m);
    for (int i = 1; i <= 4; i++) {
      const count c = step(&m, -1);
      if (i > 1) {
        check("SOAP", params, &c, i == 4 ? due : plain);
      }
    }
    close_model(&m);
  }
}

/* Accumulates a batch for each layer, with the parameters' numbers. */
static void accumulate(const model *m) {
  const int64_t x[2] = {SAMPLES, COLS}, delta[2] = {SAMPLES, ROWS};
  for (int p = 0; p < m->params; p++) {
    dc_tensor tx = flat(m->memory, x, DC_FLOAT32), td = flat(m->memory + p + 1, delta, DC_FLOAT32);
    tx.ndim = td.ndim = 2;
    assert_int_equal(dc_kfac_accumulate(m->optimizer, p, &tx, &td, 1), DC_OK);
  }
}

/* Decompositions of one size are one batch. In a step without them, the host waits only for the terms of the KL bound,
 * the scan of the gradients and the end of the step. */
static void test_kfac(void **state) {
  (void)state;
  dc_kfac_options o = DC_KFAC_OPTIONS_INIT;
  dc_sample_layer layer = DC_SAMPLE_LAYER_INIT;
  layer.kind = DC_SAMPLE_LINEAR;
  o.refresh_frequency = 4;
  o.factor_frequency = 2;
  for (int params = 1; params <= LAYERS; params += LAYERS - 1) {
    const count most[] = {{16 + 15 * params, 4 * params, 10 + 5 * params, 9, 2},
                          {2 + 5 * params, 4 * params, 2 + params, 3, 0},
                          {2 + 13 * params, 4 * params, 2 + params, 3, 0}};
    model m;
    open_model(&m, "cuda", params);
    assert_int_equal(dc_kfac_create(m.linalg, NULL, &o, &m.optimizer), DC_OK);
    add_params(&m);
    for (int p = 0; p < params; p++) {
      assert_int_equal(dc_kfac_add_layer(m.optimizer, &layer, DC_KFAC_EXPAND, p, -1, NULL), DC_OK);
    }
    for (int i = 0; i < 5; i++) {
      if (i % 2 == 0) {
        accumulate(&m);
      }
      const count c = step(&m, -1);
      if (i > 0) { /* the first step allocates the state */
        check("K-FAC", params, &c, most[i % 4 == 0 ? 0 : i % 2 == 0 ? 2 : 1]);
      }
    }
    close_model(&m);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_one_that_is_left_out),
      cmocka_unit_test(test_shampoo),
      cmocka_unit_test(test_muon),
      cmocka_unit_test(test_algorithms_do_not_depend_on_the_number),
      cmocka_unit_test(test_soap),
      cmocka_unit_test(test_kfac),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
