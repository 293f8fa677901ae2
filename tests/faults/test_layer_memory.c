/* The transformer layer when memory or threads are refused: each request during a layer's life fails once. The call
 * reports it and works at the second try, or works without the resource. All bits are right, and nothing leaks. Once
 * threads and scratch memory exist, calls request nothing. */
#include "layer.h"
#include "system_calls.h"

enum { TOKENS = 2 * 19 };

static const int32_t offsets[] = {0, 19, 38};
static unsigned char expected_out[TOKENS * 48 * 4], expected_dx[TOKENS * 48 * 4], expected_dw[144 * 48 * 4];

static void assert_expected(const rig *r) {
  assert_memory_equal(expected_out, r->out.t.data, r->out.bytes);
  assert_memory_equal(expected_dx, r->dx.t.data, r->dx.bytes);
  assert_memory_equal(expected_dw, r->g[0].t.data, r->g[0].bytes);
}

static void fill_outputs(rig *r) {
  memset(r->out.t.data, CANARY, r->out.bytes);
  memset(r->dx.t.data, CANARY, r->dx.bytes);
  memset(r->g[0].t.data, CANARY, r->g[0].bytes);
}

/* Repeats the call once if something was refused; any other failure fails the test. */
#define TWICE(call)                                \
  do {                                             \
    if ((call) != DC_OK) {                         \
      assert_non_null(fault_injected());           \
      assert_int_not_equal(dc_last_error()[0], 0); \
      OK(call);                                    \
    }                                              \
  } while (0)

/* Makes a layer, computes on the calling thread and packed on a stream, and destroys it. */
static bool run_layer(rig *r, fault_kind kind, long n) {
  long before = fault_held_resources();
  dc_layer_config c = small_config();
  dc_layer *layer = NULL;
  fault_inject(kind, n);
  TWICE(dc_layer_create(r->device, &c, &layer));
  r->call.stream = NULL;
  r->call.cu_seqlens = NULL;
  fill_outputs(r);
  OK(dc_layer_forward(layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t));
  OK(dc_layer_backward(layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t, &r->dout.t, &r->dx.t, r->gradients));
  assert_expected(r);
  TWICE(dc_stream_create(r->device, &r->call.stream));
  r->call.cu_seqlens = offsets;
  fill_outputs(r);
  TWICE(dc_layer_forward(layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t));
  TWICE(dc_layer_backward(layer, &r->call, TWELVE(r->weights), &r->x.t, &r->out.t, &r->dout.t, &r->dx.t, r->gradients));
  OK(dc_stream_synchronize(r->call.stream, 0));
  assert_expected(r);
  bool refused = fault_injected() != NULL;
  fault_inject(kind, -1);
  dc_stream_destroy(r->call.stream);
  dc_layer_destroy(layer);
  assert_int_equal(fault_held_resources(), before);
  return refused;
}

static void record_expected(rig *r) {
  forward(r);
  backward(r);
  memcpy(expected_out, r->out.t.data, r->out.bytes);
  memcpy(expected_dx, r->dx.t.data, r->dx.bytes);
  memcpy(expected_dw, r->g[0].t.data, r->g[0].bytes);
}

static void test_27_memory_and_threads_that_are_refused(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 2, 19);
  bind_rig(&r);
  record_expected(&r);
  dc_layer_destroy(r.layer); /* also frees the pool of its threads */
  r.layer = NULL;
  assert_false(run_layer(&r, FAULT_MEMORY, -1));
  for (fault_kind kind = FAULT_MEMORY; kind <= FAULT_THREAD; kind++) {
    long n = 0;
    while (run_layer(&r, kind, n)) {
      n++;
    }
    assert_true(n > 0);
    print_message("%s: %ld refused one by one\n", fault_names[kind], n);
  }
  free_rig(&r);
}

static void test_31_calls_allocate_nothing(void **state) {
  (void)state;
  rig r = make_rig(small_config(), 2, 19);
  bind_rig(&r);
  record_expected(&r);
  for (int32_t queued = 0; queued < 2; queued++) {
    if (queued) {
      OK(dc_stream_create(r.device, &r.call.stream));
    }
    fill_outputs(&r);
    for (fault_kind kind = FAULT_MEMORY; kind <= FAULT_THREAD; kind++) {
      fault_inject(kind, 0);
      for (int32_t i = 0; i < 3; i++) {
        forward(&r);
        backward(&r);
      }
      if (queued) {
        OK(dc_stream_synchronize(r.call.stream, 0));
      }
      OK(dc_layer_get_cost(r.layer, &r.call, &r.cost));
      assert_null(fault_injected());
      fault_inject(kind, -1);
    }
    assert_expected(&r);
  }
  dc_stream_destroy(r.call.stream);
  free_rig(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_27_memory_and_threads_that_are_refused),
      cmocka_unit_test(test_31_calls_allocate_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
