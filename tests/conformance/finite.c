/* Whether the gradients of a step are finite (dc_context_grads_finite): which gradients and ranks count, and for how
 * long. */
#include "conformance.h"

#include <math.h>

enum { PARAMS = 3, LENGTH = 45 };

static const setup checked = {.world = 2, .config = {.check_finite = 1}};

/* Parameters with several ids, in one graph. */
typedef struct model {
  param params[PARAMS];
} model;

static dc_status make_model(rank *r, int32_t stage, model *m) {
  int64_t ids[PARAMS];
  dc_status status = DC_OK;
  for (int64_t i = 0; i < PARAMS && status == DC_OK; i++) {
    m->params[i] = (param){.id = 40 - 20 * i, .shape = {LENGTH + i}, .stage = stage}; /* 40, 20, 0 */
    ids[i] = m->params[i].id;
    status = register_param(r, &m->params[i]);
  }
  return status == DC_OK ? register_graph(r, GRAPH, stage, ids, PARAMS) : status;
}

/* Reduces a gradient with one odd number among those of `gradient(…)`. */
static dc_status reduce_with(rank *r, param *p, int64_t step, int32_t dtype, int64_t at, double odd) {
  double values[MOST];
  array source;
  for (int64_t i = 0; i < p->numel; i++) {
    values[i] = i == at ? odd : gradient(r->rank, p->id, step, i);
  }
  dc_status status = new_array(r, &source, p->numel, dtype);
  status = status == DC_OK ? write_to(r, source.data, dtype, values, p->numel) : status;
  const dc_tensor t = tensor_of(&source);
  return status == DC_OK ? dc_reduce_grad(r->ctx, &t, GRAPH, p->id) : status;
}

/* Returns 1 if all are finite, 0 if not (`id` is the first parameter that is not), -1 if status and outputs
 * disagree. */
static int32_t asked(rank *r, int64_t *id) {
  int32_t finite = -1;
  *id = -7;
  return dc_context_grads_finite(r->ctx, &finite, id) == DC_OK && finite == (*id == -7) ? finite : -1;
}

/* Two micro-batches. In one of them, one rank's gradients of the parameters from `first` on end with an infinity. */
static void a_step(rank *r, model *m, int64_t step, int64_t micro, int32_t who, int64_t first) {
  for (int64_t k = 0; k < 2; k++) {
    OK(r, dc_start_backward(r->ctx, k == 1));
    for (int64_t i = 0; i < PARAMS; i++) {
      const bool odd = k == micro && r->rank == who && m->params[i].id >= first;
      OK(r, reduce_with(r, &m->params[i], 2 * step + k, DC_FLOAT32, odd ? m->params[i].numel - 1 : -1, INFINITY));
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  }
}

static void one_rank_is_seen_by_all(rank *r) {
  model m;
  int64_t id;
  OK(r, make_model(r, *(const int32_t *)r->user, &m));
  for (int64_t step = 0; step < 6; step++) {
    const bool odd = step % 3 != 0;
    a_step(r, &m, step, step % 2, odd ? (int32_t)step % r->world : -1, step % 3 == 1 ? 20 : 40);
    CHECK(r, asked(r, &id) == !odd && id == (odd ? step % 3 == 1 ? 20 : 40 : -7));
    CHECK(r, asked(r, &id) == !odd); /* asking again gives the same */
    for (int64_t i = 0; i < PARAMS && !odd; i++) {
      CHECK(r, has_grad(r, &m.params[i], 2 * step, 2 * step + 1)); /* asking changes nothing */
    }
  }
}

static void test_every_stage_and_micro_batch(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    for (int32_t world = 1; world <= 3; world++) {
      setup s = checked;
      s.world = world;
      s.bucket = 50; /* one parameter a bucket */
      on_ranks(s, one_rank_is_seen_by_all, &stage);
    }
  }
}

typedef struct of_type {
  double x;
  int32_t from, to; /* from: the gradient's type; to: the expected type */
  bool finite;
} of_type;

static void types(rank *r) {
  static const of_type cases[] = {
      {0x1.fffffep127, DC_FLOAT32, DC_FLOAT32, true}, {INFINITY, DC_FLOAT32, DC_FLOAT32, false},
      {NAN, DC_FLOAT32, DC_FLOAT32, false},           {-0.0, DC_FLOAT32, DC_FLOAT16, true},
      {65519.0, DC_FLOAT32, DC_FLOAT16, true},        {-65520.0, DC_FLOAT32, DC_FLOAT16, false},
      {0x1p-149, DC_FLOAT32, DC_FLOAT16, true},       {0x1.fep127, DC_FLOAT32, DC_BFLOAT16, true},
      {0x1.ffp127, DC_FLOAT32, DC_BFLOAT16, false},   {-65504.0, DC_FLOAT16, DC_FLOAT16, true},
      {-INFINITY, DC_FLOAT16, DC_FLOAT16, false},     {NAN, DC_BFLOAT16, DC_BFLOAT16, false},
      {0x1.fep127, DC_BFLOAT16, DC_FLOAT32, true},    {0x1.fep127, DC_BFLOAT16, DC_FLOAT16, false},
      {1e300, DC_FLOAT64, DC_FLOAT64, true},          {1e300, DC_FLOAT64, DC_FLOAT32, false},
      {-INFINITY, DC_FLOAT64, DC_FLOAT64, false},
  };
  param p[DC__COUNT(cases)];
  int64_t ids[DC__COUNT(cases)], id;
  for (size_t k = 0; k < DC__COUNT(cases); k++) {
    p[k] = (param){.id = (int64_t)k - 5, .shape = {LENGTH}, .stage = 3, .expected = cases[k].to}; /* ids below 0 too */
    ids[k] = p[k].id;
    OK(r, register_param(r, &p[k]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, (int64_t)DC__COUNT(cases)));
  for (size_t k = 0; k < DC__COUNT(cases); k++) {
    OK(r, dc_start_backward(r->ctx, 1));
    OK(r, reduce_with(r, &p[k], 0, cases[k].from, (int64_t)k, r->rank == 0 ? cases[k].x : 1));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, asked(r, &id) == cases[k].finite);
    CHECK(r, cases[k].finite || id == ids[k]);
  }
}

static void test_types(void **state) {
  (void)state;
  on_ranks(checked, types, NULL);
}

/* At stage 1 the addends are finite, but their local sum is not. */
static void a_local_sum_overflows(rank *r) {
  param p = {.id = 3, .shape = {LENGTH}, .stage = 1, .dtype = DC_FLOAT16, .grad = DC_FLOAT16};
  int64_t id;
  OK(r, register_one(r, &p));
  for (int64_t k = 0; k < 2; k++) {
    OK(r, dc_start_backward(r->ctx, k == 1));
    OK(r, reduce_with(r, &p, k, DC_FLOAT16, 40, r->rank == 1 ? 40000 : 0));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  }
  CHECK(r, asked(r, &id) == 0 && id == 3);
}

static void test_a_local_sum_overflows(void **state) {
  (void)state;
  on_ranks(checked, a_local_sum_overflows, NULL);
}

/* The answer follows the order of the caller's streams, which are used in turn. */
static void streams(rank *r) {
  param p = {.id = 1, .shape = {LENGTH}, .stage = 2};
  dc_stream *stream[2];
  int64_t id;
  OK(r, register_one(r, &p));
  OK(r, new_stream(r, &stream[0]));
  OK(r, new_stream(r, &stream[1]));
  for (int64_t step = 0; step < 4; step++) {
    const bool odd = step % 2 == 1;
    for (int64_t k = 0; k < 2; k++) {
      OK(r, dc_context_set_stream(r->ctx, stream[(step + k) % 2]));
      OK(r, dc_start_backward(r->ctx, k == 1));
      OK(r, reduce_with(r, &p, step, DC_FLOAT32, odd && k == 0 && r->rank == 1 ? 17 : -1, NAN));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    }
    CHECK(r, asked(r, &id) == !odd);
    OK(r, dc_context_set_stream(r->ctx, NULL));
    CHECK(r, asked(r, &id) == !odd);
  }
}

static void test_streams(void **state) {
  (void)state;
  on_ranks(checked, streams, NULL);
}

#define NOT_YET "no backward with update = 1 has ended"

static void when_it_can_be_asked(rank *r) {
  param p = {.id = 1, .shape = {LENGTH}, .stage = 2};
  int32_t finite = -1;
  int64_t id;
  OK(r, register_one(r, &p));
  FAILS(r, dc_context_grads_finite(r->ctx, NULL, &id), DC_E_INVALID, "dc_context_grads_finite: finite is NULL");
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, NOT_YET);
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, reduce_with(r, &p, 0, DC_FLOAT32, 1, INFINITY));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, NOT_YET);
  OK(r, dc_context_step_abort(r->ctx)); /* an abort forgets the answer */
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, NOT_YET);
  CHECK(r, finite == -1);
  OK(r, backward(r, &p, 1, 1));
  OK(r, dc_context_grads_finite(r->ctx, &finite, NULL));
  CHECK(r, finite == 1);
  OK(r, dc_start_backward(r->ctx, 1));
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, NOT_YET);
  OK(r, reduce_with(r, &p, 0, DC_FLOAT32, 1, INFINITY));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, asked(r, &id) == 0 && id == 1);
  OK(r, dc_reset(r->ctx));
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, NOT_YET);
  OK(r, register_graph(r, GRAPH, 2, &p.id, 1));
  OK(r, backward(r, &p, 1, 1));
  CHECK(r, asked(r, &id) == 1);
}

static void test_grads_finite_needs_a_finished_step(void **state) {
  (void)state;
  on_ranks(checked, when_it_can_be_asked, NULL);
}

/* Graphs may be dropped between micro-batches. The buffers keep the sum so far, and its infinity still counts. */
static void reset_between_micro_batches(rank *r) {
  param p = {.id = 1, .shape = {LENGTH}, .stage = 2};
  int64_t id;
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 2; step++) {
    OK(r, dc_start_backward(r->ctx, 0));
    OK(r, reduce_with(r, &p, 2 * step, DC_FLOAT32, step == 0 && r->rank == 1 ? 5 : -1, INFINITY));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    OK(r, dc_reset(r->ctx));
    OK(r, register_graph(r, GRAPH, 2, &p.id, 1));
    OK(r, backward(r, &p, 1, 2 * step + 1));
    CHECK(r, asked(r, &id) == step && id == (step == 0 ? 1 : -7));
  }
}

static void test_reset_forgets_nothing(void **state) {
  (void)state;
  on_ranks(checked, reset_between_micro_batches, NULL);
}

static void without_check_finite(rank *r) {
  param p = {.id = 1, .shape = {LENGTH}, .stage = 2};
  int32_t finite = -1;
  OK(r, register_one(r, &p));
  OK(r, backward(r, &p, 1, 0));
  FAILS(r, dc_context_grads_finite(r->ctx, &finite, NULL), DC_E_STATE, "config.check_finite was 0 in dc_init");
  CHECK(r, finite == -1);
}

static void test_no_check_without_the_option(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, without_check_finite, NULL);
}

static void different_check_finite(rank *r) {
  dc_context *ctx;
  dc_config config = DC_CONFIG_INIT;
  config.check_finite = r->rank;
  OK(r, dc_context_create(r->device, NULL, &ctx));
  const dc_status status = dc_init(ctx, r->comm, &config, 10);
  const bool told = strstr(dc_last_error(), "dc_init: check_finite = ") != NULL;
  dc_context_destroy(ctx);
  CHECK(r, status == DC_E_MISMATCH && told);
}

static void test_the_option_is_the_same_on_all_ranks(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, different_check_finite, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_stage_and_micro_batch),
      cmocka_unit_test(test_types),
      cmocka_unit_test(test_a_local_sum_overflows),
      cmocka_unit_test(test_streams),
      cmocka_unit_test(test_grads_finite_needs_a_finished_step),
      cmocka_unit_test(test_reset_forgets_nothing),
      cmocka_unit_test(test_no_check_without_the_option),
      cmocka_unit_test(test_the_option_is_the_same_on_all_ranks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
