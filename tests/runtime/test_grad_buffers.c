/* Gradient buffers that are taken away, replaced, or unset on some ranks: errors do not depend on a rank's part. */
#include "address.h"
#include "harness.h"

enum { GRAPH = 7, OTHER_GRAPH = 8, PARAM = 1, LENGTH = 10 };

typedef struct part {
  float grad[LENGTH];
  int64_t begin, count;
} part;

static dc_status register_part(rank *r, part *p, int64_t begin, int64_t end) {
  const int64_t numel = LENGTH, id = PARAM;
  p->begin = begin;
  p->count = end - begin;
  dc_tensor grad = flat(p->grad, &p->count, DC_FLOAT32);
  return dc_register_param(r->ctx, id, &numel, 1, NULL, &grad, begin);
}

static dc_status register_graph(rank *r, int32_t stage) {
  const int64_t id = PARAM;
  return stage == 1 ? dc_register_graph_z1(r->ctx, GRAPH, &id, 1) : dc_register_graph_z2(r->ctx, GRAPH, &id, 1);
}

static dc_status reduce_ones(rank *r) {
  const int64_t numel = LENGTH;
  float ones[LENGTH];
  for (int i = 0; i < LENGTH; i++) {
    ones[i] = 1.0f;
  }
  dc_tensor grad = flat(ones, &numel, DC_FLOAT32);
  return dc_reduce_grad(r->ctx, &grad, GRAPH, PARAM);
}

typedef struct split {
  int32_t stage;
  int64_t cut; /* rank 0 owns the elements before it, the last rank the rest */
} split;

/* A rank that owns nothing cannot know that the buffer was taken away: all ranks learn it in the reduction. */
static void taken_away(rank *r) {
  const split *s = r->user;
  bool all_own = s->cut > 0 && s->cut < LENGTH && r->world == 2;
  part p;
  OK(r, register_part(r, &p, r->rank == 0 ? 0 : s->cut, r->rank == 0 || r->rank + 1 < r->world ? s->cut : LENGTH));
  OK(r, register_graph(r, s->stage));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
  OK(r, dc_start_backward(r->ctx, 1));
  static const char text[] = "the gradient buffer of parameter 1 was taken away by dc_context_update_param_grad_buffer";
  if (all_own) {
    FAILS(r, reduce_ones(r), DC_E_STATE, text);
    dc_tensor grad = flat(p.grad, &p.count, DC_FLOAT32);
    OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, p.begin));
    OK(r, reduce_ones(r));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, p.grad[0] == 1.0f && p.grad[p.count - 1] == 1.0f);
    return;
  }
  OK(r, reduce_ones(r));
  FAILS(r, dc_end_backward(r->ctx, GRAPH, 0), DC_E_STATE, text);
  char owner[64];
  snprintf(owner, sizeof owner, "on rank %d; give it one first", s->cut > 0 ? 0 : r->world - 1);
  CHECK(r, strstr(dc_last_error(), owner) != NULL);
}

static void test_buffers_are_removed(void **state) {
  (void)state;
  static const int64_t cuts[] = {5, 0, LENGTH};
  for (int32_t stage = 1; stage <= 2; stage++) {
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
      run_ranks((setup){.world = 2}, taken_away, &(split){stage, cuts[i]});
      run_ranks((setup){.world = 3}, taken_away, &(split){stage, cuts[i]});
    }
  }
}

/* A new buffer for other ranks does not affect a rank that owns nothing. */
static void given_anew(rank *r) {
  part p, other;
  int64_t begin = r->rank == 0 ? 0 : LENGTH;
  OK(r, register_part(r, &p, begin, LENGTH));
  OK(r, register_graph(r, 2));
  for (int i = 0; i < 3; i++) {
    dc_tensor grad = flat(i % 2 == 0 ? other.grad : p.grad, &p.count, DC_FLOAT32);
    OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
    OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, begin));
    OK(r, dc_start_backward(r->ctx, 1));
    OK(r, reduce_ones(r));
    OK(r, dc_end_backward(r->ctx, GRAPH, 0));
    CHECK(r, r->rank != 0 || ((const float *)grad.data)[LENGTH - 1] == 1.0f);
  }
}

static void test_buffers_are_replaced(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, given_anew, NULL);
}

static void nap(void *user) {
  (void)user;
  nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* Once there is another buffer, the caller may use the old one, also if the caller's stream was to zero it. */
static void old_buffer_is_free(rank *r) {
  part p, other;
  dc_stream *stream;
  OK(r, dc_stream_create(r->device, &stream));
  OK(r, dc_context_set_stream(r->ctx, stream));
  OK(r, dc_stream_call(stream, nap, NULL));
  OK(r, register_part(r, &p, 0, LENGTH));
  dc_tensor grad = flat(other.grad, &p.count, DC_FLOAT32);
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, 0));
  p.grad[0] = 7.0f;
  OK(r, dc_stream_synchronize(stream, 0));
  CHECK(r, p.grad[0] == 7.0f && other.grad[0] == 0.0f);
  OK(r, dc_context_set_stream(r->ctx, NULL));
  dc_stream_destroy(stream);
}

static void test_old_buffers_are_free(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, old_buffer_is_free, NULL);
}

/* A graph is registered with each rank's part of a gradient; a later buffer does not change that part. */
static void thawed(rank *r) {
  sharded p;
  const int64_t id = PARAM, chunk = ceil_div(LENGTH, r->world);
  OK(r, register_sharded(r, &p, PARAM, LENGTH, 0));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  dc_tensor grad = flat(p.grad, &chunk, DC_FLOAT32);
  for (int64_t i = 0; i < chunk; i++) {
    p.grad[i] = 7.0f;
  }
  int64_t own = LENGTH - r->rank * chunk < chunk ? LENGTH - r->rank * chunk : chunk;
  if (own > 0) {
    FAILS(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, 0), DC_E_SHAPE,
          "but its graph was registered with");
    FAILS(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, 0), DC_E_SHAPE,
          "register it again with the new buffer");
  }
  CHECK(r, p.grad[0] == 7.0f);
  OK(r, dc_unregister_graph(r->ctx, GRAPH));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce_ones(r));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, own <= 0 || p.grad[0] == 1.0f);
  free_sharded(&p);
}

static void test_thawed(void **state) {
  (void)state;
  run_ranks((setup){.world = 1}, thawed, NULL);
  run_ranks((setup){.world = 2}, thawed, NULL);
  run_ranks((setup){.world = 4}, thawed, NULL); /* the last rank has two elements, and padding */
  run_ranks((setup){.world = 6}, thawed, NULL); /* the last rank has only padding */
}

static dc_status register_other(rank *r, int32_t stage) {
  const int64_t id = PARAM;
  return stage == 1 ? dc_register_graph_z1(r->ctx, OTHER_GRAPH, &id, 1)
                    : dc_register_graph_z2(r->ctx, OTHER_GRAPH, &id, 1);
}

/* A graph may be registered while the buffer is away. It does not freeze the parameter in other graphs or lose their
 * sums, and accepts no other split. */
static void registered_meanwhile(rank *r) {
  const split *s = r->user;
  part p;
  OK(r, register_part(r, &p, r->rank == 0 ? 0 : s->cut, r->rank == 0 ? s->cut : LENGTH));
  OK(r, register_graph(r, s->stage));
  OK(r, dc_start_backward(r->ctx, 0));
  OK(r, s->stage == 1 ? reduce_ones(r) : DC_OK);
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
  OK(r, register_other(r, s->stage));
  OK(r, dc_start_backward(r->ctx, 1));
  FAILS(r, reduce_ones(r), DC_E_STATE, "the gradient buffer of parameter 1 was taken away");
  dc_tensor grad = flat(p.grad, &p.count, DC_FLOAT32);
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, p.begin));
  OK(r, reduce_ones(r));
  OK(r, dc_end_backward(r->ctx, OTHER_GRAPH, 0));
  CHECK(r, p.grad[0] == (s->stage == 1 ? 2.0f : 1.0f) && p.grad[p.count - 1] == p.grad[0]);
  if (r->rank == 0) {
    OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
  }
  FAILS(r, register_other(r, s->stage), DC_E_MISMATCH,
        "grad_buffer of parameter 1 covers elements 0 to 0 on rank 0, but another graph was registered with 0 to 5");
}

static void test_registered_meanwhile(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, registered_meanwhile, &(split){1, 5});
  run_ranks((setup){.world = 2}, registered_meanwhile, &(split){2, 5});
}

/* A stage-0 graph writes whole gradients. It refuses a parameter whose buffers are parts, also while these are away,
 * and the parameter's other graph stays usable. */
static void whole_meanwhile(rank *r) {
  static const char text[] =
      "stage 0 needs all 10 elements of the gradient of parameter 1, but another graph was "
      "registered with 0 to 5 on rank 0";
  const split *s = r->user;
  const int64_t id = PARAM;
  const bool parts = s->cut < LENGTH;
  part p;
  OK(r, register_part(r, &p, parts && r->rank > 0 ? s->cut : 0, parts && r->rank > 0 ? LENGTH : s->cut));
  OK(r, register_graph(r, s->stage));
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, NULL, 0));
  const dc_status status = dc_register_graph_z0(r->ctx, OTHER_GRAPH, &id, 1);
  CHECK(r, status == (parts ? DC_E_MISMATCH : DC_OK));
  CHECK(r, !parts || strstr(dc_last_error(), text) != NULL);
  dc_tensor grad = flat(p.grad, &p.count, DC_FLOAT32);
  OK(r, dc_context_update_param_grad_buffer(r->ctx, PARAM, &grad, p.begin));
  OK(r, dc_start_backward(r->ctx, 1));
  OK(r, reduce_ones(r));
  OK(r, dc_end_backward(r->ctx, GRAPH, 0));
  CHECK(r, p.grad[0] == 1.0f && p.grad[p.count - 1] == 1.0f);
}

static void test_whole_meanwhile(void **state) {
  (void)state;
  for (int32_t stage = 1; stage <= 2; stage++) {
    run_ranks((setup){.world = 2}, whole_meanwhile, &(split){stage, 5});
    run_ranks((setup){.world = 2}, whole_meanwhile, &(split){stage, LENGTH});
  }
}

/* At stage 0 every rank gets the whole gradient. */
static void wanted_by_one(rank *r) {
  const int64_t id = PARAM;
  part p;
  OK(r, register_part(r, &p, 0, r->rank == 0 ? LENGTH : 0));
  FAILS(r, dc_register_graph_z0(r->ctx, GRAPH, &id, 1), DC_E_MISMATCH, "number of gradient elements");
}

static void test_wanted_by_one(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, wanted_by_one, NULL);
}

/* An empty buffer of a wrong type is refused as a longer one is on other ranks. */
static void of_no_float(rank *r) {
  const int64_t numel = LENGTH, half = r->rank == 0 ? LENGTH : 0;
  int32_t whole[LENGTH];
  dc_tensor grad = flat(whole, &half, DC_INT32);
  FAILS(r, dc_register_param(r->ctx, PARAM, &numel, 1, NULL, &grad, 0), DC_E_DTYPE,
        "grad_buffer of parameter 1 is int32, must be a floating-point type");
}

static void test_of_no_float(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, of_no_float, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_buffers_are_removed),  cmocka_unit_test(test_buffers_are_replaced),
      cmocka_unit_test(test_old_buffers_are_free), cmocka_unit_test(test_thawed),
      cmocka_unit_test(test_wanted_by_one),        cmocka_unit_test(test_of_no_float),
      cmocka_unit_test(test_registered_meanwhile), cmocka_unit_test(test_whole_meanwhile),
  };
  return cmocka_run_group_tests_name("grad_buffers", tests, NULL, NULL);
}
