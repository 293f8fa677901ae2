/* H, I, J: gradients at stages 1, 2 and 3. */
#include "conformance.h"

#include <math.h>

/* ---- H: stage 1 ---- */

static void sums_then_averages(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 1};
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, dc_context_reset_stats(r->ctx));
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, backward(r, &p, micro == 2, 3 * step + micro));
    }
    dc_memory_stats s = stats_of(r);
    CHECK(r, s.reductions == 1 && s.flushes == 1);
    CHECK(r, s.reduce_wire_bytes == p.count * (r->world - 1) * (int64_t)sizeof(float)); /* for its own part only */
    CHECK(r, has_grad(r, &p, 3 * step, 3 * step + 2));
  }
}

static void check_67_stage_1_averages_the_sum_once(void **state) {
  (void)state;
  on_ranks((setup){.world = 1}, sums_then_averages, NULL);
  on_ranks((setup){.world = 2}, sums_then_averages, NULL);
  on_ranks((setup){.world = 3}, sums_then_averages, NULL);
}

static void quiet_micro_batches(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 1};
  OK(r, register_one(r, &p));
  if (r->rank == 0) { /* rank 0 alone: nothing communicates */
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, backward(r, &p, 0, micro));
      dc_memory_stats s = stats_of(r);
      CHECK(r, s.bucket_bytes == 0 && s.reductions == 0 && s.reduce_wire_bytes == 0 && s.flushes == 0);
    }
    CHECK(r, is_all(r, &p.buffer, 0));
  }
}

static void check_68_micro_batches_of_stage_1_are_local(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, quiet_micro_batches, NULL);
}

static void buckets_given_back(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 1};
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 4; step++) {
    for (int64_t micro = 0; micro < 2; micro++) {
      OK(r, dc_start_backward(r->ctx, micro == 1));
      OK(r, reduce(r, GRAPH, &p, 2 * step + micro));
      OK(r, dc_end_backward(r->ctx, GRAPH, 1));
    }
    CHECK(r, stats_of(r).bucket_bytes == 0 && has_grad(r, &p, 2 * step, 2 * step + 1));
  }
}

static void check_69_accumulation_with_released_buckets(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, buckets_given_back, NULL);
}

/* Each rank's part lies in a larger array, whose other elements must stay. */
static void partial_owners(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  const int64_t shape = 30;
  array whole, part, source;
  double values[30], expected[30];
  OK(r, new_array(r, &whole, 30, DC_FLOAT32));
  OK(r, new_array(r, &source, 30, DC_FLOAT32));
  OK(r, set_all(r, &whole, 5));
  int64_t begin = r->rank == 0 ? 4 : 11, count = r->rank == 0 ? 7 : r->rank == 1 ? 10 : 0, id = 1;
  part = (array){(char *)whole.data + begin * (int64_t)sizeof(float), count, DC_FLOAT32};
  dc_tensor grad = tensor_of(&part), t = tensor_of(&source);
  OK(r, dc_register_param(r->ctx, 1, &shape, 1, NULL, &grad, begin));
  OK(r, register_graph(r, GRAPH, stage, &id, 1));
  for (int64_t i = 0; i < 30; i++) {
    values[i] = (double)(r->rank + 1) * (double)i;
    expected[i] = i < begin || i >= begin + count ? 5 : (double)(r->world + 1) * (double)i / 2;
  }
  OK(r, write_to(r, source.data, DC_FLOAT32, values, 30));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, holds(r, whole.data, DC_FLOAT32, expected, 30));
}

static void check_70_each_rank_gets_its_part_and_nothing_else(void **state) {
  (void)state;
  for (int32_t stage = 1; stage <= 2; stage++) {
    on_ranks((setup){.world = 2}, partial_owners, &stage);
    on_ranks((setup){.world = 3}, partial_owners, &stage); /* here rank 2 owns nothing */
  }
}

/* backward() overwrites the source as soon as the call has returned. With a stream, work on that stream may overwrite
 * it. */
static void overwritten_source(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage};
  double values[30];
  dc_stream *stream;
  OK(r, register_one(r, &p));
  OK(r, backward(r, &p, 0, 0));
  OK(r, backward(r, &p, 1, 1));
  CHECK(r, has_grad(r, &p, 0, 1));
  for (int64_t i = 0; i < 30; i++) {
    values[i] = gradient(r->rank, 1, 2, i);
  }
  OK(r, write_to(r, p.source.data, DC_FLOAT32, values, 30));
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  dc_tensor t = tensor_of(&p.source);
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, 1));
  dc__stream_zero(stream, p.source.data, 30 * sizeof(float));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, has_grad(r, &p, 2, 2));
}

static void check_71_a_gradient_is_the_callers_again_at_once(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, overwritten_source, &stage);
  }
}

static void stale_contents(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage};
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    array part = {p.buffer.data, p.count, DC_FLOAT32};
    OK(r, set_all(r, &part, NAN)); /* as if the optimizer had overwritten it */
    OK(r, backward(r, &p, 1, step));
    CHECK(r, has_grad(r, &p, step, step));
  }
}

static void check_72_a_new_step_begins_with_a_copy(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, stale_contents, &stage);
  }
}

/* ---- I: stage 2 ---- */

static void every_micro_batch(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage};
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, dc_context_reset_stats(r->ctx));
    for (int64_t micro = 0; micro < 3; micro++) {
      OK(r, backward(r, &p, micro == 2, 3 * step + micro));
      CHECK(r, stats_of(r).reductions == micro + 1);
      CHECK(r, has_grad(r, &p, 3 * step, 3 * step + micro)); /* copies, adds, adds; the next step copies again */
    }
  }
}

static void check_73_74_stage_2_reduces_every_micro_batch(void **state) {
  (void)state;
  const int32_t stages[] = {2, 3, 0};
  for (int i = 0; i < 3; i++) {
    on_ranks((setup){.world = 2}, every_micro_batch, &stages[i]);
  }
}

static void late_gradient(rank *r) {
  int32_t stage = *(const int32_t *)r->user;
  param p = {.id = 1, .shape = {30}, .stage = stage}, q = {.id = 2, .shape = {30}, .stage = stage};
  int64_t ids[2] = {1, 2};
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, stage, ids, 2));
  OK(r, backward(r, &p, 0, 0));
  array part = {q.buffer.data, q.count, DC_FLOAT32};
  OK(r, set_all(r, &part, NAN));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 1));
  OK(r, reduce(r, GRAPH, &q, 1));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, has_grad(r, &p, 0, 1) && has_grad(r, &q, 1, 1));
}

static void check_75_a_first_gradient_is_copied_whenever_it_comes(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, late_gradient, &stage);
  }
}

/* Gradients whose sums round, so another order of ranks, or dividing first, would give other bits. */
static double uneven(int32_t by, int64_t i) {
  uint32_t x = (uint32_t)(by * 73856093 + i * 19349663) * 0x2c1b3c6du;
  return (double)((float)(x >> 8) * exp2f((float)(x % 16) - 30));
}

static void same_bits(rank *r) {
  double found[4][30];
  for (int32_t stage = 0; stage <= 3; stage++) {
    param p = {.id = stage, .shape = {30}, .stage = stage};
    double values[30];
    OK(r, register_one(r, &p));
    for (int64_t i = 0; i < 30; i++) {
      values[i] = uneven(r->rank, i);
    }
    OK(r, write_to(r, p.source.data, DC_FLOAT32, values, 30));
    dc_tensor t = tensor_of(&p.source);
    OK(r, dc_start_backward(r->ctx, 1));
    OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, stage));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    if (stage == 0) { /* every rank has the whole gradient, with which the other stages' parts are compared */
      OK(r, read_from(r, p.buffer.data, DC_FLOAT32, found[0], 30));
    }
    CHECK(r, holds(r, p.buffer.data, DC_FLOAT32, found[0] + p.begin, p.count));
  }
}

static void check_76_stages_have_the_same_bits(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_ranks((setup){.world = world}, same_bits, NULL);
  }
}

/* ---- J: stage 3 ---- */

static void slices_of_the_mean(rank *r) {
  const int64_t sizes[] = {1, 2, 7, 24, 25, 100};
  enum { COUNT = sizeof sizes / sizeof sizes[0] };
  param p[COUNT];
  int64_t ids[COUNT];
  for (int64_t i = 0; i < COUNT; i++) {
    p[i] = (param){.id = i, .shape = {sizes[i]}, .stage = 3};
    ids[i] = i;
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, 3, ids, COUNT));
  for (int64_t step = 0; step < 2; step++) { /* one bucket: each gradient's padding precedes the next gradient */
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, reduce(r, GRAPH, &p[i], step));
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    for (int64_t i = 0; i < COUNT; i++) {
      CHECK(r, has_grad(r, &p[i], step, step)); /* this rank's slice, and zeros in the padding */
    }
  }
}

static void check_77_78_slices_of_the_mean_and_zero_padding(void **state) {
  (void)state;
  for (int32_t world = 1; world <= 4; world++) {
    on_ranks((setup){.world = world}, slices_of_the_mean, NULL);
  }
}

static void expected_type(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 3, .expected = DC_BFLOAT16}, q = {.id = 2, .shape = {30}, .stage = 3};
  int64_t ids[2] = {1, 2};
  OK(r, register_param(r, &p));
  OK(r, register_param(r, &q));
  OK(r, register_graph(r, GRAPH, 3, ids, 2));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 0)); /* given as float32, and cast */
  CHECK(r, stats_of(r).reduce_wire_bytes == 2 * p.count * (r->world - 1));
  OK(r, reduce_as(r, GRAPH, &q, 0, DC_BFLOAT16)); /* given as bfloat16, and not cast */
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, stats_of(r).flushes == 1); /* one bucket, of bfloat16 */
  CHECK(r, has_grad(r, &p, 0, 0) && has_grad(r, &q, 0, 0));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce(r, GRAPH, &p, 1));
  OK(r, reduce(r, GRAPH, &q, 1)); /* given as float32 this time: another bucket */
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, stats_of(r).flushes == 3 && has_grad(r, &p, 1, 1) && has_grad(r, &q, 1, 1));
}

static void check_79_the_expected_type_chooses_the_bucket(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, expected_type, NULL);
}

/* Sums that bfloat16 rounds, so they show in which type they are computed. */
static void stored_in_the_buffers_type(rank *r) {
  static const int32_t reduced[] = {DC_BFLOAT16, DC_FLOAT16, DC_FLOAT32, DC_FLOAT32};
  static const int32_t stored[] = {DC_FLOAT32, DC_FLOAT32, DC_BFLOAT16, DC_FLOAT16};
  for (int k = 0; k < 4; k++) {
    for (int32_t stage = 1; stage <= 3; stage++) {
      param p = {.id = 10 * k + stage, .shape = {30}, .stage = stage, .grad = stored[k]};
      OK(r, register_one(r, &p));
      for (int64_t step = 0; step < 2; step++) { /* the first is copied, the second added if the stage adds */
        OK(r, dc_start_backward(r->ctx, step == 1));
        OK(r, reduce_as(r, GRAPH, &p, step, reduced[k]));
        OK(r, dc_end_backward(r->ctx, GRAPH, 0));
      }
      CHECK(r, has_grad(r, &p, 0, 1));
    }
  }
}

static void check_80_bucket_and_buffer_may_differ_in_type(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, stored_in_the_buffers_type, NULL);
  on_ranks((setup){.world = 4}, stored_in_the_buffers_type, NULL);
}

static void persistent_over_steps(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 3, .persistent = 1};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    for (int64_t micro = 0; micro < 2; micro++) { /* only the first micro-batch of a step gathers */
      OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
      CHECK(r, stats_of(r).gathers == step + 1 && is_whole(r, &full, &p, DC_DTYPE_NONE, step));
      OK(r, dc_release_param(r->ctx, NULL, GRAPH, 1, 1));
      OK(r, backward(r, &p, micro == 1, 2 * step + micro));
    }
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full)); /* the end of a backward does not change weights */
    CHECK(r, stats_of(r).gathers == step + 1);
    OK(r, set_weights(r, &p, step + 1));
    OK(r, dc_context_params_updated(r->ctx, NULL, 0));
  }
}

static void check_81_persistent_weights_are_gathered_once_an_update(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, persistent_over_steps, NULL);
}

static void forward_before_the_step(rank *r) {
  param p = {.id = 1, .shape = {30}, .stage = 3, .persistent = 1};
  dc_tensor full = DC_TENSOR_INIT;
  OK(r, register_one(r, &p));
  for (int64_t step = 0; step < 3; step++) {
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full));
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, step));
    OK(r, backward(r, &p, 1, step));
    OK(r, gather(r, GRAPH, &p, DC_DTYPE_NONE, &full)); /* an evaluation between backward and step */
    CHECK(r, is_whole(r, &full, &p, DC_DTYPE_NONE, step));
    OK(r, set_weights(r, &p, step + 1));
    OK(r, dc_context_params_updated(r->ctx, &p.id, 1));
  }
}

static void check_82_a_forward_before_the_step_leaves_nothing_stale(void **state) {
  (void)state;
  on_ranks((setup){.world = 2}, forward_before_the_step, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_67_stage_1_averages_the_sum_once),
      cmocka_unit_test(check_68_micro_batches_of_stage_1_are_local),
      cmocka_unit_test(check_69_accumulation_with_released_buckets),
      cmocka_unit_test(check_70_each_rank_gets_its_part_and_nothing_else),
      cmocka_unit_test(check_71_a_gradient_is_the_callers_again_at_once),
      cmocka_unit_test(check_72_a_new_step_begins_with_a_copy),
      cmocka_unit_test(check_73_74_stage_2_reduces_every_micro_batch),
      cmocka_unit_test(check_75_a_first_gradient_is_copied_whenever_it_comes),
      cmocka_unit_test(check_76_stages_have_the_same_bits),
      cmocka_unit_test(check_77_78_slices_of_the_mean_and_zero_padding),
      cmocka_unit_test(check_79_the_expected_type_chooses_the_bucket),
      cmocka_unit_test(check_80_bucket_and_buffer_may_differ_in_type),
      cmocka_unit_test(check_81_persistent_weights_are_gathered_once_an_update),
      cmocka_unit_test(check_82_a_forward_before_the_step_leaves_nothing_stale),
  };
  return cmocka_run_group_tests_name("conformance: gradients", tests, NULL, NULL);
}
