/* K: gradient buckets, and the order of reductions, at all stages. */
#include "conformance.h"

enum { COUNT = 4, EACH = 30 };

/* Registers COUNT parameters of EACH elements, in one graph. */
static void register_all(rank *r, int32_t stage, param *p) {
  int64_t ids[COUNT];
  for (int64_t i = 0; i < COUNT; i++) {
    p[i] = (param){.id = i, .shape = {EACH}, .stage = stage};
    ids[i] = i;
    OK(r, register_param(r, &p[i]));
  }
  OK(r, register_graph(r, GRAPH, stage, ids, COUNT));
}

static void has_all(rank *r, const param *p, int64_t step) {
  for (int64_t i = 0; i < COUNT; i++) {
    CHECK(r, has_grad(r, &p[i], step, step));
  }
}

/* A backward without its end. */
static void reduce_all(rank *r, param *p, int64_t step) {
  OK(r, dc_start_backward(r->ctx, 1));
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, reduce(r, GRAPH, &p[i], step));
  }
}

/* Two gradients fit in the bucket, the third does not. */
static void early_flush(rank *r) {
  static const int64_t flushes[COUNT] = {0, 0, 1, 1};
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t step = 0; step < 2; step++) {
    OK(r, dc_context_reset_stats(r->ctx));
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t i = 0; i < COUNT; i++) {
      OK(r, reduce(r, GRAPH, &p[i], step));
      CHECK(r, stats_of(r).flushes == flushes[i]);
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, stats_of(r).flushes == 2);
    has_all(r, p, step);
  }
}

static void check_83_a_full_bucket_is_flushed_once(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2, .bucket = 2 * EACH + 5}, early_flush, &stage);
  }
}

static void larger_than_the_bucket(rank *r) {
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t step = 0; step < 2; step++) {
    reduce_all(r, p, step);
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    has_all(r, p, step);
  }
  CHECK(r, stats_of(r).bucket_bytes == 2 * EACH * (int64_t)sizeof(float));
}

static void check_84_a_large_gradient_makes_its_bucket_grow(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2, .bucket = EACH / 3}, larger_than_the_bucket, &stage);
  }
}

/* While rank 1 stays away, rank 0's first reduction cannot end. With a second bucket, rank 0's next gradient is
 * accepted all the same; with only one, the copy on the caller's stream waits. */
static void while_the_first_is_reduced(rank *r) {
  const setup *s = r->user;
  param p[COUNT];
  dc_stream *stream;
  dc_event *copied;
  int32_t passed;
  register_all(r, 3, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t i = 0; i < 2; i++) {
    double values[EACH];
    for (int64_t k = 0; k < EACH; k++) {
      values[k] = gradient(r->rank, i, 0, k);
    }
    OK(r, write_to(r, p[i].source.data, DC_FLOAT32, values, EACH));
  }
  OK(r, new_stream(r, &stream));
  OK(r, dc_event_create(r->device, &copied));
  OK(r, dc_context_set_stream(r->ctx, stream));
  if (r->rank == 1) {
    OK(r, await_flag());
  }
  OK(r, dc_start_backward(r->ctx, 1));
  dc_tensor first = tensor_of(&p[0].source), second = tensor_of(&p[1].source);
  OK(r, dc_reduce_grad(r->ctx, &first, GRAPH, 0));
  OK(r, dc_reduce_grad(r->ctx, &second, GRAPH, 1)); /* flushes the first */
  OK(r, dc_event_record(copied, stream));
  if (r->rank == 0) {
    if (s->config.double_buffer == -1) {
      OK(r, dc_event_query(copied, &passed));
      CHECK(r, passed == 0);
    } else {
      OK(r, dc_event_wait(copied, NULL, INT64_C(60000000000)));
    }
    raise_flag();
  }
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_event_wait(copied, NULL, INT64_C(60000000000)));
  dc_event_destroy(copied);
  CHECK(r, has_grad(r, &p[0], 0, 0) && has_grad(r, &p[1], 0, 0));
}

static void check_85_a_second_bucket_fills_while_the_first_is_reduced(void **state) {
  (void)state;
  for (int32_t buckets = -1; buckets <= 1; buckets++) {
    setup s = {.world = 2, .bucket = EACH, .config.double_buffer = buckets};
    on_ranks(s, while_the_first_is_reduced, &s);
  }
}

/* Nearly every gradient causes a flush, over many steps, with the caller on the host and on a stream. */
static void buckets_used_again(rank *r) {
  param p[COUNT];
  dc_stream *stream;
  array sources[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t step = 0; step < 4; step++) {
    reduce_all(r, p, step);
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    has_all(r, p, step);
  }
  for (int64_t i = 0; i < COUNT; i++) {
    double values[EACH];
    for (int64_t k = 0; k < EACH; k++) {
      values[k] = gradient(r->rank, i, 9, k);
    }
    OK(r, new_array(r, &sources[i], EACH, DC_FLOAT32));
    OK(r, write_to(r, sources[i].data, DC_FLOAT32, values, EACH));
  }
  OK(r, new_stream(r, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  for (int round = 0; round < 4; round++) {
    OK(r, dc_start_backward(r->ctx, 1));
    for (int64_t i = 0; i < COUNT; i++) {
      dc_tensor t = tensor_of(&sources[i]);
      OK(r, dc_reduce_grad(r->ctx, &t, GRAPH, i));
    }
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    has_all(r, p, 9);
  }
}

static void check_86_a_bucket_is_used_again_after_its_reduction(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    for (int32_t buckets = -1; buckets <= 1; buckets += 2) {
      on_ranks((setup){.world = 2, .bucket = EACH + 2, .config.double_buffer = buckets}, buckets_used_again, &stage);
      on_ranks((setup){.world = 3, .bucket = EACH + 2, .config.double_buffer = buckets}, buckets_used_again, &stage);
    }
  }
}

static void two_types(rank *r) {
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  OK(r, dc_start_backward(r->ctx, 1));
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, reduce_as(r, GRAPH, &p[i], 0, i % 2 == 0 ? DC_FLOAT32 : DC_BFLOAT16));
  }
  CHECK(r, stats_of(r).flushes == 0);
  CHECK(r, stats_of(r).bucket_bytes == 2 * EACH * 4 + 2 * EACH * 2);
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, stats_of(r).flushes == 2);
  has_all(r, p, 0);
}

static void check_87_two_types_are_two_buckets(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2, .bucket = 2 * EACH}, two_types, &stage);
  }
}

/* Ranks that run at different speeds: the order of flushes depends on the calls alone. A difference between ranks would
 * be the communicator's error; the trace says which parameter leads each flush. */
static void order_of_flushes(rank *r) {
  static const int64_t leaders[COUNT] = {0, 1, 3, 2}; /* 2 flushes 0, and 3 flushes 1; the end takes float32 first */
  param p[COUNT];
  dc_trace_event events[16];
  int64_t count, found = 0;
  register_all(r, 3, p);
  CHECK(r, r->failure[0] == '\0');
  OK(r, dc_context_trace_start(r->ctx, 100));
  OK(r, dc_start_backward(r->ctx, 1));
  if (r->rank == 1) {
    OK(r, await_flag());
  }
  for (int64_t i = 0; i < COUNT; i++) {
    OK(r, reduce_as(r, GRAPH, &p[i], 0, i % 2 == 0 ? DC_BFLOAT16 : DC_FLOAT32));
  }
  if (r->rank == 0) {
    raise_flag();
  }
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  has_all(r, p, 0);
  OK(r, dc_context_trace_read(r->ctx, events, sizeof events[0], 16, &count));
  for (int64_t i = 0; i < count; i++) {
    if (events[i].op == DC_OP_REDUCE_GRAD && events[i].lane == 2) {
      CHECK(r, found < COUNT && events[i].id == leaders[found]);
      found++;
    }
  }
  CHECK(r, found == COUNT);
}

static void check_88_flushes_have_one_order_on_all_ranks(void **state) {
  (void)state;
  on_ranks((setup){.world = 2, .bucket = EACH}, order_of_flushes, NULL);
}

/* Gradients are final when the call returns, also on a reducing rank that comes last. */
static void final_when_back(rank *r) {
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t step = 0; step < 3; step++) {
    reduce_all(r, p, step);
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    has_all(r, p, step);
    for (int64_t i = 0; i < COUNT; i++) { /* the caller may write to them, too */
      array part = {p[i].buffer.data, p[i].count, DC_FLOAT32};
      OK(r, set_all(r, &part, 5));
    }
  }
}

static void check_89_the_end_of_a_backward_is_the_end_of_its_reductions(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 3}, final_when_back, &stage);
  }
}

static void released_buckets(rank *r) {
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  for (int64_t step = 0; step < 3; step++) {
    reduce_all(r, p, step);
    CHECK(r, stats_of(r).bucket_bytes > 0);
    OK(r, dc_end_backward(r->ctx, GRAPH, step != 1));
    CHECK(r, (stats_of(r).bucket_bytes == 0) == (step != 1));
    has_all(r, p, step);
  }
}

static void check_90_buckets_can_be_given_back(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2, .bucket = 50}, released_buckets, &stage);
  }
}

static void nothing_to_reduce(rank *r) {
  param p[COUNT];
  register_all(r, *(const int32_t *)r->user, p);
  CHECK(r, r->failure[0] == '\0');
  if (r->rank == 0) { /* rank 0 alone: nothing communicates */
    for (int i = 0; i < 3; i++) {
      OK(r, dc_start_backward(r->ctx, 1));
      OK(r, dc_end_backward(r->ctx, GRAPH, i == 1));
    }
    dc_memory_stats s = stats_of(r);
    CHECK(r, s.flushes == 0 && s.reduce_wire_bytes == 0 && s.bucket_bytes == 0);
  }
}

static void check_93_an_empty_backward_ends_at_once(void **state) {
  (void)state;
  for (int32_t stage = 0; stage <= 3; stage++) {
    on_ranks((setup){.world = 2}, nothing_to_reduce, &stage);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_83_a_full_bucket_is_flushed_once),
      cmocka_unit_test(check_84_a_large_gradient_makes_its_bucket_grow),
      cmocka_unit_test(check_85_a_second_bucket_fills_while_the_first_is_reduced),
      cmocka_unit_test(check_86_a_bucket_is_used_again_after_its_reduction),
      cmocka_unit_test(check_87_two_types_are_two_buckets),
      cmocka_unit_test(check_88_flushes_have_one_order_on_all_ranks),
      cmocka_unit_test(check_89_the_end_of_a_backward_is_the_end_of_its_reductions),
      cmocka_unit_test(check_90_buckets_can_be_given_back),
      cmocka_unit_test(check_93_an_empty_backward_ends_at_once),
  };
  return cmocka_run_group_tests_name("conformance: buckets", tests, NULL, NULL);
}
