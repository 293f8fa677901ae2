/* The sums of a step's gradients: of several types, in several graphs, and without a gradient in the last micro-batch.
 * No call loses a sum that is not averaged yet. */
#include "conformance.h"

enum { EACH = 30, TYPES = 4, OTHER_GRAPH = GRAPH + 1 };

static const int32_t types[TYPES] = {DC_FLOAT32, DC_FLOAT64, DC_FLOAT16, DC_BFLOAT16};

typedef struct scene {
  int32_t stage;
  int32_t buffer; /* type of the gradient buffers */
} scene;

/* Runs on one and two ranks, whose means are exact, with buckets that hold one element, one gradient, and all
 * gradients. */
static void in_every_stage(void (*body)(rank *r)) {
  static const int64_t buckets[] = {1, EACH, 1000};
  for (int32_t stage = 0; stage <= 3; stage++) {
    for (int k = 0; k < 3; k++) {
      scene s = {.stage = stage, .buffer = k == 1 ? DC_FLOAT64 : DC_FLOAT32};
      on_ranks((setup){.world = k == 0 ? 1 : 2, .bucket = buckets[k], .config.double_buffer = k == 2 ? -1 : 0}, body,
               &s);
    }
  }
}

/* A body's objects: two parameters of GRAPH, and memory for a gradient of each type. */
typedef struct pair {
  param p, q;
  array sources[TYPES];
} pair;

static dc_status register_two(rank *r, pair *two) {
  const scene *s = r->user;
  two->p = (param){.id = 1, .shape = {EACH}, .stage = s->stage, .grad = s->buffer};
  two->q = (param){.id = 2, .shape = {EACH}, .stage = s->stage, .grad = s->buffer};
  dc_status status = register_param(r, &two->p);
  status = status == DC_OK ? register_param(r, &two->q) : status;
  for (int k = 0; k < TYPES && status == DC_OK; k++) {
    status = new_array(r, &two->sources[k], EACH, types[k]);
  }
  return status == DC_OK ? register_graph(r, GRAPH, s->stage, (const int64_t[]){1, 2}, 2) : status;
}

static const array *source_of(const pair *two, int32_t dtype) {
  int k = 0;
  while (types[k] != dtype) {
    k++;
  }
  return &two->sources[k];
}

static dc_status reduce_typed(rank *r, const pair *two, param *p, int64_t step, int32_t dtype) {
  p->source = *source_of(two, dtype);
  return reduce_as(r, GRAPH, p, step, dtype);
}

/* Reduces a gradient that has one value everywhere. */
static dc_status reduce_value(rank *r, const pair *two, double x, int32_t dtype) {
  const array *source = source_of(two, dtype);
  dc_status status = set_all(r, source, x);
  dc_tensor t = tensor_of(source);
  return status == DC_OK ? dc_reduce_grad(r->ctx, &t, GRAPH, two->p.id) : status;
}

static bool buffer_is(rank *r, const param *p, double x) {
  const array part = {p->buffer.data, p->count, p->grad};
  return is_all(r, &part, x);
}

/* ---- gradients of several types ---- */

/* Between two gradients of one parameter comes another parameter's, of the second type, so either bucket may fill
 * first. */
static void two_types(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  for (int a = 0; a < TYPES; a++) {
    for (int b = 0; b < TYPES; b++) {
      int64_t step = 10 * a + b;
      OK(r, dc_start_backward(r->ctx, 1));
      if (b % 2 == 1) {
        OK(r, reduce_typed(r, &two, &two.q, step, types[b]));
      }
      OK(r, reduce_typed(r, &two, &two.p, step, types[a]));
      OK(r, reduce_typed(r, &two, &two.q, step + 1, types[b]));
      OK(r, reduce_typed(r, &two, &two.p, step + 1, types[b]));
      OK(r, dc_end_backward(r->ctx, GRAPH, a == b));
      CHECK(r, has_grad(r, &two.p, step, step + 1));
      CHECK(r, has_grad(r, &two.q, b % 2 == 1 ? step : step + 1, step + 1));
    }
  }
}

static void check_75_gradients_of_two_types_are_added(void **state) {
  (void)state;
  in_every_stage(two_types);
}

/* 2^24 is the first float32 to which adding 1 changes nothing, while adding 2 does. So the order of additions shows. */
static void order_of_types(rank *r) {
  const double large = 16777216;
  pair two;
  OK(r, register_two(r, &two));
  double exact = ((const scene *)r->user)->buffer == DC_FLOAT64 ? large + 2 : large;
  for (int a = 0; a < TYPES; a++) {
    for (int b = a % 2; b < TYPES && types[a] != DC_FLOAT16; b += 2) { /* float16 has no 2^24 */
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, reduce_value(r, &two, large, types[a]));
      OK(r, reduce_value(r, &two, 1, types[b]));
      OK(r, reduce_value(r, &two, 1, types[3 - b]));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      CHECK(r, buffer_is(r, &two.p, exact)); /* (2^24 + 1) + 1 */
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, reduce_value(r, &two, 1, types[b]));
      OK(r, reduce_value(r, &two, 1, types[3 - b]));
      OK(r, reduce_value(r, &two, large, types[a]));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      CHECK(r, buffer_is(r, &two.p, large + 2)); /* (1 + 1) + 2^24 */
    }
  }
}

static void check_88_gradients_of_several_types_are_added_in_the_order_of_the_calls(void **state) {
  (void)state;
  in_every_stage(order_of_types);
}

/* With micro-batches of different types, stage 1 has the same sums as the other stages. */
static void types_of_micro_batches(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  for (int64_t step = 0; step < TYPES * TYPES; step++) {
    const int32_t of[3] = {types[step % TYPES], types[step / TYPES], types[(step + step / TYPES) % TYPES]};
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, dc_start_backward(r->ctx, micro == 2));
      OK(r, reduce_typed(r, &two, &two.p, 3 * step + micro, of[micro]));
      OK(r, reduce_typed(r, &two, &two.q, 3 * step + micro, of[2 - micro]));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    }
    CHECK(r, has_grad(r, &two.p, 3 * step, 3 * step + 2) && has_grad(r, &two.q, 3 * step, 3 * step + 2));
  }
}

static void check_67_micro_batches_may_differ_in_type(void **state) {
  (void)state;
  in_every_stage(types_of_micro_batches);
}

/* The type of a local sum holds the values of all its gradients: digits that float32 has and 16-bit types lack are
 * kept. */
static void type_of_the_sum(rank *r) {
  static const struct {
    double first, second;
    int32_t types[2];
  } cases[] = {{256, 0.015625, {DC_BFLOAT16, DC_FLOAT32}},   {0.015625, 256, {DC_FLOAT32, DC_BFLOAT16}},
               {100000, 0.0625, {DC_BFLOAT16, DC_FLOAT16}},  {2049, 1e-3, {DC_FLOAT32, DC_FLOAT64}},
               {1.0009765625, 99, {DC_FLOAT16, DC_FLOAT64}}, {1.0009765625, 99, {DC_FLOAT16, DC_FLOAT32}}};
  pair two;
  OK(r, register_two(r, &two));
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (int taken_along = 0; taken_along < 2; taken_along++) { /* in a micro-batch, or in the last one */
      double sum = rounded(cases[i].first, cases[i].types[0]) + rounded(cases[i].second, cases[i].types[1]);
      OK(r, dc_start_backward(r->ctx, 0));
      OK(r, reduce_value(r, &two, cases[i].first, cases[i].types[0]));
      OK(r, dc_start_backward(r->ctx, taken_along));
      OK(r, reduce_value(r, &two, cases[i].second, cases[i].types[1]));
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      CHECK(r, buffer_is(r, &two.p, sum));
    }
  }
}

static void check_67_a_local_sum_holds_the_values_of_all_its_types(void **state) {
  (void)state;
  scene s = {.stage = 1, .buffer = DC_FLOAT64};
  on_ranks((setup){.world = 2}, type_of_the_sum, &s);
}

/* ---- no gradient in the last micro-batch ---- */

/* The bits of `step` say in which micro-batches the second parameter has gradients. */
static void skipped_micro_batches(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  for (int64_t step = 0; step < 16; step++) {
    int64_t first = -1, last = -1;
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, dc_start_backward(r->ctx, micro == 2));
      OK(r, reduce(r, GRAPH, &two.p, 3 * step + micro));
      if ((step >> micro) % 2 == 1 &&
          (step % 8 != 5 || micro == 0)) { /* consecutive ones, which has_grad() can check */
        OK(r, reduce(r, GRAPH, &two.q, 3 * step + micro));
        first = first < 0 ? micro : first;
        last = micro;
      }
      OK(r, dc_end_backward(r->ctx, GRAPH, step >= 8));
    }
    CHECK(r, has_grad(r, &two.p, 3 * step, 3 * step + 2));
    if (last >= 0) {
      CHECK(r, has_grad(r, &two.q, 3 * step + first, 3 * step + last));
    }
  }
}

static void check_67_a_last_micro_batch_may_bring_no_gradient(void **state) {
  (void)state;
  in_every_stage(skipped_micro_batches);
}

/* The step ends with the backward of any graph, which also averages what the other graphs' parameters have. A later
 * gradient is averaged by itself and added. */
static void two_graphs(rank *r) {
  const scene *s = r->user;
  pair two;
  OK(r, register_two(r, &two));
  OK(r, register_graph(r, GRAPH, s->stage, &two.p.id, 1));
  OK(r, register_graph(r, OTHER_GRAPH, s->stage, &two.q.id, 1));
  for (int64_t step = 0; step < 12; step++) {
    int64_t last = 3 * step + step % 3;
    for (int64_t micro = 0; micro < 2; micro++) {
      OK(r, dc_start_backward(r->ctx, micro == 1));
      OK(r, reduce(r, GRAPH, &two.p, 3 * step + micro));
      if (micro < step % 3) {
        OK(r, reduce(r, OTHER_GRAPH, &two.q, 3 * step + micro));
      }
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      if (micro == 1) {
        OK(r, reduce(r, OTHER_GRAPH, &two.q, last));
        OK(r, dc_end_backward(r->ctx, OTHER_GRAPH, step % 2 == 1));
      }
    }
    CHECK(r, has_grad(r, &two.p, 3 * step, 3 * step + 1) && has_grad(r, &two.q, 3 * step, last));
  }
}

static void check_91_a_graph_that_comes_after_the_steps_end_is_added(void **state) {
  (void)state;
  in_every_stage(two_graphs);
}

/* ---- what is added to, and what is replaced ---- */

/* An end of a backward with update = 1 does not end the step: later gradients are added, in every graph. */
static void after_the_end(rank *r) {
  const scene *s = r->user;
  pair two;
  OK(r, register_two(r, &two));
  OK(r, register_graph(r, OTHER_GRAPH, s->stage, &two.q.id, 1));
  for (int64_t step = 0; step < 9; step += 3) {
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t end = 0; end < 3; end++) {
      OK(r, reduce(r, GRAPH, &two.p, step + end));
      OK(r, reduce(r, OTHER_GRAPH, &two.q, step + end));
      OK(r, dc_end_backward(r->ctx, end == 1 ? OTHER_GRAPH : GRAPH, 0));
      CHECK(r, has_grad(r, &two.p, step, step + end) && has_grad(r, &two.q, step, step + end));
    }
  }
}

static void check_91_a_gradient_after_the_end_is_added(void **state) {
  (void)state;
  in_every_stage(after_the_end);
}

/* Keeps the gradients of one of two parameters, for the next step only; a step that was aborted forgets them. */
static void kept_for_the_next_step(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  for (int64_t step = 0; step < 12; step += 3) {
    const bool left = step == 6;
    for (int64_t next = 0; next < 3; next++) {
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, reduce(r, GRAPH, &two.p, step + next));
      OK(r, reduce(r, GRAPH, &two.q, step + next));
      OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      CHECK(r, has_grad(r, &two.p, next == 1 && !left ? step : step + next, step + next));
      CHECK(r, has_grad(r, &two.q, step + next, step + next));
      OK(r, next == 0 ? dc_context_accumulate_grads(r->ctx, &two.p.id, 1) : DC_OK);
      OK(r, left ? dc_context_step_abort(r->ctx) : DC_OK);
    }
  }
}

static void check_75_gradients_may_be_kept_for_the_next_step(void **state) {
  (void)state;
  in_every_stage(kept_for_the_next_step);
}

/* ---- nothing is lost ---- */

static void forgotten_graph(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  OK(r, register_graph(r, OTHER_GRAPH, 1, &two.q.id, 1));
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, reduce(r, GRAPH, &two.p, 0));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  FAILS(r, dc_reset(r->ctx), DC_E_BUSY, "parameter 1");
  FAILS(r, dc_unregister_graph(r->ctx, GRAPH), DC_E_BUSY, "parameter 1");
  FAILS(r, dc_unregister_param(r->ctx, 1), DC_E_BUSY, "parameter 1");
  FAILS(r, register_graph(r, GRAPH, 1, &two.q.id, 1), DC_E_BUSY, "update = 1");
  OK(r, dc_unregister_graph(r->ctx, OTHER_GRAPH)); /* its parameter has no local sum */
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_grad(r, &two.p, 0, 0));
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, reduce(r, GRAPH, &two.p, 1));
  OK(r, dc_context_step_abort(r->ctx)); /* drops the local sum on purpose */
  OK(r, dc_unregister_graph(r->ctx, GRAPH));
  OK(r, dc_unregister_param(r->ctx, 1));
}

static void check_22_a_local_sum_outlives_no_graph(void **state) {
  (void)state;
  scene s = {.stage = 1, .buffer = DC_FLOAT32};
  on_ranks((setup){.world = 1}, forgotten_graph, &s);
  on_ranks((setup){.world = 2}, forgotten_graph, &s);
}

/* The buffer is given only for the step's last backward, as DeepSpeed does at stage 1. */
static void buffer_of_one_backward(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, dc_context_update_param_grad_buffer(r->ctx, 1, NULL, 0));
    OK(r, dc_start_backward(r->ctx, 0));
    OK(r, reduce(r, GRAPH, &two.p, step));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    OK(r, dc_start_backward(r->ctx, 1));
    FAILS(r, dc_end_backward(r->ctx, GRAPH, 0), DC_E_STATE, "dc_end_backward: the gradient buffer of parameter 1");
    dc_tensor grad = flat(two.p.buffer.data, &two.p.count, two.p.grad);
    OK(r, dc_context_update_param_grad_buffer(r->ctx, 1, &grad, two.p.begin));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, has_grad(r, &two.p, step, step));
  }
}

static void check_26_a_sum_waits_for_its_buffer(void **state) {
  (void)state;
  scene s = {.stage = 1, .buffer = DC_FLOAT32};
  on_ranks((setup){.world = 1}, buffer_of_one_backward, &s);
  on_ranks((setup){.world = 2}, buffer_of_one_backward, &s);
}

/* Only one rank has a local sum: the reduction finds the mismatch, as it does for a gradient that only one rank
 * reduces. */
static void uneven_sums(rank *r) {
  pair two;
  OK(r, register_two(r, &two));
  OK(r, dc_start_backward(r->ctx, 0));
  if (r->rank == 0) {
    OK(r, reduce(r, GRAPH, &two.q, 0));
  }
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &two.p, 1));
  CHECK(r, dc_end_backward(r->ctx, GRAPH, 0) == DC_E_MISMATCH);
}

static void check_126_sums_of_some_ranks_are_a_mismatch(void **state) {
  (void)state;
  scene s = {.stage = 1, .buffer = DC_FLOAT32};
  on_ranks((setup){.world = 2}, uneven_sums, &s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_75_gradients_of_two_types_are_added),
      cmocka_unit_test(check_88_gradients_of_several_types_are_added_in_the_order_of_the_calls),
      cmocka_unit_test(check_67_micro_batches_may_differ_in_type),
      cmocka_unit_test(check_67_a_local_sum_holds_the_values_of_all_its_types),
      cmocka_unit_test(check_67_a_last_micro_batch_may_bring_no_gradient),
      cmocka_unit_test(check_91_a_graph_that_comes_after_the_steps_end_is_added),
      cmocka_unit_test(check_91_a_gradient_after_the_end_is_added),
      cmocka_unit_test(check_75_gradients_may_be_kept_for_the_next_step),
      cmocka_unit_test(check_22_a_local_sum_outlives_no_graph),
      cmocka_unit_test(check_26_a_sum_waits_for_its_buffer),
      cmocka_unit_test(check_126_sums_of_some_ranks_are_a_mismatch),
  };
  return cmocka_run_group_tests_name("conformance: sums", tests, NULL, NULL);
}
