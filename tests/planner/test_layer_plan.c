/* The plan of a stack of layers. Its sums are compared with the sizes of real layers and with formulas, and the largest
 * micro-batch with the next larger one. Also extreme numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dc_api.h"

#define OK(call) assert_int_equal((call), DC_OK)

static dc_layer_config bert_large(void) {
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  c.hidden_size = 1024;
  c.heads = 16;
  c.num_hidden_layers = 24;
  c.dtype = DC_FLOAT16;
  return c;
}

static void set_flags(dc_layer_config *c, int32_t flags) {
  c->normalize_invertible = flags & 1;
  c->attn_dropout_checkpoint = flags >> 1 & 1;
  c->gelu_checkpoint = flags >> 2;
}

static dc_layer_plan_options options_of(int64_t seq, int64_t batch) {
  dc_layer_plan_options o = DC_LAYER_PLAN_OPTIONS_INIT;
  o.seq_length = seq;
  o.micro_batch = batch;
  o.memory_bytes = INT64_C(32) << 30;
  o.moments = 2;
  return o;
}

static dc_layer_plan plan_of(const dc_layer_config *config, const dc_layer_plan_options *options) {
  dc_layer_plan plan = DC_LAYER_PLAN_INIT;
  OK(dc_layer_get_plan(config, options, &plan));
  int64_t sum = plan.weight_bytes + plan.grad_bytes + plan.optimizer_bytes + plan.working_bytes + plan.kept_bytes +
                plan.workspace_bytes + options->other_bytes;
  assert_int_equal(plan.total_bytes, sum);
  return plan;
}

/* Activations are as dc_layer_get_cost reports them, in every combination. */
static void test_18_plan_is_the_cost(void **state) {
  (void)state;
  dc_device *device;
  OK(dc_device_open("cpu", NULL, &device));
  static const int32_t dtypes[] = {DC_FLOAT32, DC_FLOAT16, DC_BFLOAT16};
  for (int32_t i = 0; i < 3 * 2 * 8; i++) {
    dc_layer_config c = bert_large();
    c.dtype = dtypes[i / 16];
    c.pre_layer_norm = i / 8 % 2 == 0 ? 1 : -1;
    c.threads = 1;
    set_flags(&c, i % 8);
    dc_layer *layer;
    OK(dc_layer_create(device, &c, &layer));
    dc_layer_call call = DC_LAYER_CALL_INIT;
    dc_layer_cost cost = DC_LAYER_COST_INIT;
    call.batch = 3;
    call.seq_length = 77;
    OK(dc_layer_get_cost(layer, &call, &cost));
    dc_layer_plan_options o = options_of(77, 3);
    dc_layer_plan plan = plan_of(&c, &o);
    int64_t row = cost.kept_bytes - cost.reserve_bytes;
    int64_t largest = cost.backward_workspace_bytes > cost.forward_workspace_bytes ? cost.backward_workspace_bytes
                                                                                   : cost.forward_workspace_bytes;
    assert_int_equal(plan.kept_bytes, 24 * cost.kept_bytes + row);
    assert_int_equal(plan.workspace_bytes, largest + 2 * row);
    dc_layer_destroy(layer);
  }
  dc_device_destroy(device);
}

/* DeepSpeed's bytes per layer and sample, in units of S H: the tensors that its sources save, added up by hand. */
static void test_18_deepspeeds_inventory(void **state) {
  (void)state;
  static const int64_t at_128[] = {44, 40, 40, 36, 36, 32, 32, 28}; /* by flags, inv the lowest bit, then attn, gelu */
  static const int64_t at_512[] = {74, 70, 58, 54, 66, 62, 50, 46};
  for (int32_t flags = 0; flags < 8; flags++) {
    dc_layer_config c = bert_large();
    set_flags(&c, flags);
    for (int64_t s = 128; s <= 512; s += 384) {
      dc_layer_plan_options o = options_of(s, 1);
      o.inventory = DC_LAYER_INVENTORY_DEEPSPEED;
      int64_t units = s == 128 ? at_128[flags] : at_512[flags];
      assert_int_equal(plan_of(&c, &o).kept_bytes, 24 * (units * s * 1024 + 8 * s));
      o.seq_length = s - 15; /* padded to 16 */
      assert_int_equal(plan_of(&c, &o).kept_bytes, 24 * (units * s * 1024 + 8 * s));
      c.pre_layer_norm = -1;
      assert_int_equal(plan_of(&c, &o).kept_bytes, 24 * (units * s * 1024 + 8 * s));
      c.pre_layer_norm = 1;
    }
  }
  dc_layer_config c = bert_large();
  dc_layer_plan_options o = options_of(128, 1);
  o.inventory = DC_LAYER_INVENTORY_DEEPSPEED;
  assert_int_equal(plan_of(&c, &o).workspace_bytes, (6 + 4 + 2) * 2 * 128 * 1024);
  c.gelu_checkpoint = 1;
  c.dtype = DC_FLOAT32;
  assert_int_equal(plan_of(&c, &o).workspace_bytes, (6 + 4 + 8 + 2) * 4 * 128 * 1024);
  o.seq_length = 512;
  assert_int_equal(plan_of(&c, &o).workspace_bytes, (6 + 16 + 8 + 2) * 4 * 512 * 1024);
  assert_int_equal(plan_of(&c, &o).kept_bytes, 24 * (512 * 1024 * (34 + 4 * 4 + 8 * 9) + 16 * 512));
}

static void test_states_by_stage_and_optimizer(void **state) {
  (void)state;
  dc_layer_config c = bert_large();
  int64_t layer = 12596224, other = 33916732; /* together BERT-large for pre-training: 336226108 */
  int64_t all = 24 * layer + other, part = (all + 6) / 7;
  for (int32_t stage = 0; stage < 4; stage++) {
    dc_layer_plan_options o = options_of(128, 1);
    o.other_parameters = other;
    o.ranks = 7;
    o.stage = stage;
    dc_layer_plan plan = plan_of(&c, &o);
    assert_int_equal(plan.parameters, all);
    assert_int_equal(plan.weight_bytes, 2 * (stage == 3 ? part : all));
    assert_int_equal(plan.grad_bytes, 2 * (stage >= 2 ? part : all));
    assert_int_equal(plan.optimizer_bytes, 12 * (stage >= 1 ? part : all));
    assert_int_equal(plan.working_bytes, stage == 3 ? 6 * layer : stage == 2 ? 2 * layer : 0);
    o.moments = 0;
    assert_int_equal(plan_of(&c, &o).optimizer_bytes, 4 * (stage >= 1 ? part : all));
  }
  c.grad_dtype = DC_FLOAT32;
  dc_layer_plan_options o = options_of(128, 1);
  assert_int_equal(plan_of(&c, &o).grad_bytes, 4 * 24 * layer);
  c.dtype = DC_FLOAT32;
  o.moments = 1;
  assert_int_equal(plan_of(&c, &o).optimizer_bytes, 4 * 24 * layer);
  c.num_hidden_layers = 1;
  o.stage = 3;
  assert_int_equal(plan_of(&c, &o).working_bytes, 8 * layer);
}

/* The planned micro-batch fits, and a larger one does not. */
static void test_the_most_that_fit(void **state) {
  (void)state;
  for (int32_t i = 0; i < 2 * 8 * 3; i++) {
    dc_layer_config c = bert_large();
    set_flags(&c, i % 8);
    dc_layer_plan_options o = options_of(64 << i / 16, 0);
    o.inventory = i / 8 % 2;
    dc_layer_plan plan = plan_of(&c, &o);
    assert_true(plan.micro_batch > 1 && plan.total_bytes <= o.memory_bytes);
    o.micro_batch = plan.micro_batch + 1;
    assert_true(plan_of(&c, &o).total_bytes > o.memory_bytes);
    o.micro_batch = 0;
    o.memory_bytes = plan.total_bytes;
    assert_int_equal(plan_of(&c, &o).micro_batch, plan.micro_batch);
    o.memory_bytes--;
    assert_int_equal(plan_of(&c, &o).micro_batch, plan.micro_batch - 1);
    c.batch_size = 2;
    assert_int_equal(plan_of(&c, &o).micro_batch, 2);
    o.memory_bytes = 1;
    plan = plan_of(&c, &o);
    assert_int_equal(plan.micro_batch, 0);
    assert_int_equal(plan.kept_bytes + plan.workspace_bytes, 0);
  }
}

#define REFUSED(status, text)                                      \
  do {                                                             \
    dc_layer_plan before = DC_LAYER_PLAN_INIT, after = before;     \
    assert_int_equal(dc_layer_get_plan(&c, &o, &after), (status)); \
    assert_non_null(strstr(dc_last_error(), (text)));              \
    assert_memory_equal(&after, &before, sizeof after);            \
  } while (0)

#define BAD(field, value)                                        \
  do {                                                           \
    dc_layer_plan_options o = options_of(128, 1);                \
    o.field = value;                                             \
    REFUSED(DC_E_INVALID, "dc_layer_get_plan: options." #field); \
  } while (0)

static void test_27_plan_refuses(void **state) {
  (void)state;
  dc_layer_config c = bert_large();
  c.batch_size = 64;
  c.max_seq_length = 512;
  BAD(seq_length, 0);
  BAD(seq_length, 513);
  BAD(micro_batch, -1);
  BAD(micro_batch, 65);
  BAD(memory_bytes, 0);
  BAD(memory_bytes, INT64_MIN);
  BAD(other_bytes, -1);
  BAD(other_parameters, -1);
  BAD(ranks, -1);
  BAD(ranks, INT64_C(1) << 31);
  BAD(stage, 4);
  BAD(stage, -1);
  BAD(moments, 9);
  BAD(moments, -1);
  BAD(inventory, 2);
  BAD(reserved0, 1);
  BAD(struct_size, 8);
  dc_layer_plan_options o = options_of(128, 1);
  c.training = -1;
  REFUSED(DC_E_INVALID, "training");
  c = bert_large();
  c.heads = 5;
  REFUSED(DC_E_INVALID, "config.heads");
  c = bert_large();
  dc_layer_plan plan;
  dc_layer_plan_init(&plan, sizeof plan);
  dc_layer_plan_options_init(&o, sizeof o);
  assert_int_equal(dc_layer_get_plan(&c, &o, &plan), DC_E_INVALID); /* the length must be set */
  assert_int_equal(dc_layer_get_plan(NULL, &o, &plan), DC_E_INVALID);
  assert_int_equal(dc_layer_get_plan(&c, NULL, &plan), DC_E_INVALID);
  assert_int_equal(dc_layer_get_plan(&c, &o, NULL), DC_E_INVALID);
  plan.struct_size = 8;
  assert_int_equal(dc_layer_get_plan(&c, &o, &plan), DC_E_INVALID);
}

/* Sums at and beyond 2^63. */
static void test_27_plan_does_not_overflow(void **state) {
  (void)state;
  for (int32_t inventory = 0; inventory < 2; inventory++) {
    dc_layer_config c = bert_large();
    c.num_hidden_layers = INT32_MAX;
    c.hidden_size = 131072;
    c.intermediate_size = INT32_MAX;
    c.dtype = DC_FLOAT32;
    dc_layer_plan_options o = options_of(INT32_MAX, INT32_MAX);
    o.inventory = inventory;
    REFUSED(DC_E_SHAPE, "2^63");
    o.micro_batch = 0;
    o.memory_bytes = INT64_MAX;
    REFUSED(DC_E_SHAPE, "2^63"); /* already the states */
    c = bert_large();
    dc_layer_plan plan = plan_of(&c, &o);
    assert_true(plan.micro_batch >= 0 && plan.total_bytes >= 0);
    o.seq_length = 1;
    plan = plan_of(&c, &o);
    assert_true(plan.micro_batch > 100000000 && plan.total_bytes < INT64_MAX);
    o.other_bytes = INT64_MAX;
    REFUSED(DC_E_SHAPE, "2^63");
    o.other_bytes = 0;
    o.other_parameters = INT64_MAX;
    REFUSED(DC_E_SHAPE, "2^63");
  }
}

/* A single layer's sums, too, with its pairs of tokens. */
static void test_16_costs_do_not_overflow(void **state) {
  (void)state;
  dc_layer_config c = DC_LAYER_CONFIG_INIT;
  c.hidden_size = c.heads = c.intermediate_size = c.threads = 1;
  dc_device *device;
  dc_layer *layer;
  OK(dc_device_open("cpu", NULL, &device));
  OK(dc_layer_create(device, &c, &layer));
  dc_layer_call call = DC_LAYER_CALL_INIT;
  dc_layer_cost cost = DC_LAYER_COST_INIT;
  call.batch = 1;
  call.seq_length = INT32_MAX;
  assert_int_equal(dc_layer_get_cost(layer, &call, &cost), DC_E_SHAPE);
  call.seq_length = INT64_C(1) << 29; /* more than 2^32 pairs */
  OK(dc_layer_get_cost(layer, &call, &cost));
  assert_int_equal(cost.forward_flops, 12 * call.seq_length + 4 * call.seq_length * call.seq_length);
  call.batch = INT32_MAX;
  call.seq_length = 2;
  OK(dc_layer_get_cost(layer, &call, &cost));
  assert_int_equal(cost.forward_flops, 12 * 2 * call.batch + 4 * 4 * call.batch);
  dc_layer_destroy(layer);
  dc_device_destroy(device);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_18_plan_is_the_cost),
      cmocka_unit_test(test_18_deepspeeds_inventory),
      cmocka_unit_test(test_states_by_stage_and_optimizer),
      cmocka_unit_test(test_the_most_that_fit),
      cmocka_unit_test(test_27_plan_refuses),
      cmocka_unit_test(test_27_plan_does_not_overflow),
      cmocka_unit_test(test_16_costs_do_not_overflow),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
